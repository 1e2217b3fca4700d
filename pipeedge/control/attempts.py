"""Attempts to run a plan: the active epoch, the next one beside it, and the faults that have ended some.

The hub's rules (``pipeedge.control.epochs``) decide what happens to an attempt; here is what they have to
remember for that. A *part* is what one rank does in one epoch. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from pipeedge.control.roster import Members, Roster

__all__ = ["Attempts", "EpochAttempt", "Faults", "Part"]

Part: TypeAlias = tuple[int, int]
"""Number of an epoch, and rank of a participant."""


@dataclass(frozen=True)
class EpochAttempt:
    """An epoch and its participants, some of which may have been lost."""

    number: int
    participants: Members = field(default_factory=dict)


class Attempts:
    """The active epochs, and the parts of them that the hub waits for.

    Args:
        roster: The ranks; one that is lost has no part that anybody waits for.
    """

    def __init__(self, roster: Roster) -> None:
        self.current = EpochAttempt(0)
        """The latest epoch that ran or was to run; the next one counts once it has taken its place."""
        self.next: EpochAttempt | None = None
        """The epoch that is prepared, dropped or run beside it."""
        self.awaited: set[Part] = set()
        """Parts that have not prepared, or not stopped."""
        self._roster = roster
        self.latest = 0
        """Number of the latest attempt, which may have been dropped."""
        self._passed: set[Part] = set()

    def begin(self, ranks: Iterable[int]) -> EpochAttempt:
        """Begin an attempt in place of the current one, and wait until it is prepared."""
        self.current, self._passed = self._begin(ranks), set()
        return self.current

    def begin_next(self, ranks: Iterable[int]) -> EpochAttempt:
        """Begin an attempt beside the current one, and wait until it is prepared."""
        self.next = self._begin(ranks)
        return self.next

    def _begin(self, ranks: Iterable[int]) -> EpochAttempt:
        self.latest += 1
        members = self._roster.members
        attempt = EpochAttempt(self.latest, {rank: members[rank] for rank in ranks})
        self.awaited = set(self.parts(attempt))
        return attempt

    # -- answers ----------------------------------------------------------------------------------

    def parts(self, attempt: EpochAttempt | None) -> list[Part]:
        """Return the parts of an epoch whose ranks are the members still that it began with, in order."""
        if attempt is None:
            return []
        here = self._roster.members
        return [
            (attempt.number, rank)
            for rank, incarnation in sorted(attempt.participants.items())
            if here.get(rank) == incarnation
        ]

    def check_has(self, *parts: Part) -> None:
        """Raise ValueError unless these are parts of active epochs."""
        active = {one.number: one.participants for one in (self.current, self.next) if one is not None}
        if not all(rank in active.get(epoch, {}) for epoch, rank in parts):
            raise ValueError("a message about a part that the rank does not have")

    def strike_off(self, part: Part) -> None:
        """Note that a part is prepared, or has stopped. Raises ValueError if it was not awaited."""
        if part not in self.awaited:
            raise ValueError("an answer to a question of another epoch, or a second one")
        self.awaited.discard(part)

    def awaits(self, rank: int) -> bool:
        """Return whether a part of ``rank`` has not prepared, or not stopped."""
        return any(rank == awaited for _, awaited in self.awaited)

    def forget(self, rank: int) -> None:
        """Wait no longer for a rank that is lost."""
        self.awaited = {part for part in self.awaited if part[1] != rank}

    def note_passed(self, part: Part) -> None:
        """Note that all microbatches of an epoch have passed one of its ranks."""
        self._passed.add(part)

    def has_passed(self, rank: int) -> bool:
        """Return whether all microbatches of the current epoch have passed a rank."""
        return (self.current.number, rank) in self._passed

    @property
    def all_passed(self) -> bool:
        """Whether all microbatches of the current epoch have passed all of its ranks."""
        return self._passed.issuperset(self.parts(self.current))

    # -- ends -------------------------------------------------------------------------------------

    def stop(self, *attempts: EpochAttempt | None) -> list[Part]:
        """Wait, too, until the parts of these epochs have stopped; return them in order."""
        parts = [part for attempt in attempts for part in self.parts(attempt)]
        self.awaited |= set(parts)
        return parts

    def replace(self) -> EpochAttempt:
        """Let the next epoch take the place of the current one; return the one that it was."""
        replaced = self.current
        if self.next is not None:
            self.current, self.next = self.next, None
        return replaced


class Faults:
    """Links that broke although both of their ends live, since something was written."""

    def __init__(self) -> None:
        self._broken: dict[frozenset[int], int] = {}  # latest epoch that each pair of incarnations broke
        self._written = 0

    def is_first(self, link: frozenset[int], epoch: int) -> bool:
        """Note that a link broke in ``epoch``; return whether it is the first fault of the link that counts.

        Args:
            link: Incarnations of both ends; empty if nothing moved although no link was at fault.
            epoch: Number of the epoch.
        """
        is_first = link not in self._broken
        self._broken[link] = epoch
        return is_first

    def note_written(self, written: int, epoch: int) -> None:
        """Forget the faults of epochs before ``epoch`` if more was written than ever before."""
        if written > self._written:
            self._written = written
            self._broken = {link: broken for link, broken in self._broken.items() if broken == epoch}
