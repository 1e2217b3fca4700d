"""The members of a run that goes on after failures. Pure.

A member is known by its *incarnation*, the number of its connection. A process that comes back has a new
one. If its rank is taken by a member that may only seem to live, it waits, as a *claimant*, until that one is
heard or lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["MemberTable", "Members"]


@dataclass(frozen=True)
class Members:
    """The ranks that take part in a run, or may do so."""

    number: int
    """Number of this snapshot, which grows with each change."""
    incarnations: Mapping[int, int]
    """Incarnation of each member, by rank."""


class MemberTable:
    """Members and claimants of a run.

    Args:
        incarnations: incarnation of each rank that is here first.
    """

    def __init__(self, incarnations: Mapping[int, int]) -> None:
        self.incarnations = dict(incarnations)
        """Incarnation of each member, by rank; changed by the methods below alone."""
        self.claims: dict[int, int] = {}
        """Incarnation of the claimant of a rank, by rank."""
        self._number = 1

    def __contains__(self, rank: int) -> bool:
        return rank in self.incarnations

    def __getitem__(self, rank: int) -> int:
        return self.incarnations[rank]

    def snapshot(self) -> Members:
        """Return the present members."""
        return Members(self._number, dict(self.incarnations))

    def everybody(self) -> tuple[int, ...]:
        """Return the incarnations of all members and claimants."""
        return (*self.incarnations.values(), *self.claims.values())

    def rank_of(self, incarnation: int) -> int | None:
        """Return the rank of a member, or None if this is none."""
        return next((rank for rank, held in self.incarnations.items() if held == incarnation), None)

    def has_all(self, ranks: Iterable[int], asked: Members) -> bool:
        """Return whether these ranks are the members still that they were in a former snapshot."""
        return all(rank in self and self[rank] == asked.incarnations.get(rank) for rank in ranks)

    def admit(self, rank: int, incarnation: int) -> None:
        """Make a process a member."""
        self.incarnations[rank] = incarnation
        self._number += 1

    def claim(self, rank: int, incarnation: int) -> int | None:
        """Let a process wait for a rank; return the claimant that it replaces, if there was one."""
        replaced = self.claims.pop(rank, None)
        self.claims[rank] = incarnation
        return replaced

    def withdraw(self, incarnation: int) -> None:
        """Forget a claimant that is gone."""
        self.claims = {rank: waits for rank, waits in self.claims.items() if waits != incarnation}

    def remove(self, rank: int) -> None:
        """Forget the member with a rank, which is lost."""
        del self.incarnations[rank]
        self._number += 1

    def seat_claimant(self, rank: int) -> None:
        """Make the claimant of a rank a member, if there is one and the rank is free."""
        if rank in self.claims:
            self.admit(rank, self.claims.pop(rank))
