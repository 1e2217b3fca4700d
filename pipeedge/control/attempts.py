"""Attempts to run a plan: the active epoch, another one beside it, and the faults that have ended some. Pure.

The hub's rules (``pipeedge.control.epochs``) decide what happens to an attempt; here is what they have to
remember for that. A *part* is what one rank does in one epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from pipeedge.control.members import MemberTable

__all__ = ["EpochAttempt", "Attempts", "Faults", "Part"]

Part: TypeAlias = tuple[int, int]
"""Number of an epoch, and rank of a participant."""


@dataclass(frozen=True)
class EpochAttempt:
    """An epoch and its participants, some of which may have been lost."""

    number: int
    participants: frozenset[int]


class Attempts:
    """The active epochs, and the parts of them that the hub waits for.

    Args:
        members: members of the run; a rank that is none has no part that anybody waits for.
    """

    def __init__(self, members: MemberTable) -> None:
        self.current = EpochAttempt(0, frozenset())
        """The latest epoch that ran or was to run; one beside it counts once it has taken its place."""
        self.beside: EpochAttempt | None = None
        """The epoch that is prepared, dropped or run beside it."""
        self.awaited: set[Part] = set()
        """Parts that have not prepared, or not stopped."""
        self._members = members
        self._latest = 0  # number of the latest attempt, which may have been dropped
        self._passed: set[Part] = set()

    # -- beginnings -------------------------------------------------------------------------------

    def prepare(self, ranks: Iterable[int]) -> EpochAttempt:
        """Begin an attempt in place of the current one, and wait until it is prepared."""
        self.current, self._passed = self._begin(ranks), set()
        return self.current

    def prepare_beside(self, ranks: Iterable[int]) -> EpochAttempt:
        """Begin an attempt beside the current one, and wait until it is prepared."""
        self.beside = self._begin(ranks)
        return self.beside

    def _begin(self, ranks: Iterable[int]) -> EpochAttempt:
        self._latest += 1
        attempt = EpochAttempt(self._latest, frozenset(ranks))
        self.awaited = self._parts(attempt)
        return attempt

    # -- answers ----------------------------------------------------------------------------------

    def check_has(self, *parts: Part) -> None:
        """Raise ValueError unless these are parts of active epochs."""
        if not all(self._has(part) for part in parts):
            raise ValueError("a message about a part that the rank does not have")

    def strike_off(self, part: Part) -> None:
        """Note that a part is prepared, or has stopped. Raises ValueError if it was not awaited."""
        if part not in self.awaited:
            raise ValueError("an answer to a question of another epoch, or a second one")
        self.awaited.discard(part)

    def forget(self, rank: int) -> None:
        """Wait no longer for a rank that is lost."""
        self.awaited = {part for part in self.awaited if part[1] != rank}

    def note_passed(self, part: Part) -> None:
        """Note that all microbatches of an epoch have passed one of its ranks."""
        self._passed.add(part)

    # -- ends -------------------------------------------------------------------------------------

    def stop(self, *, is_dropping: bool) -> list[Part]:
        """Wait until all parts have stopped; return those that do not know it yet, in order.

        Args:
            is_dropping: whether the epoch beside the current one is being dropped, as its parts know.
        """
        parts = self._parts(self.current)
        known = self.awaited if is_dropping else set[Part]()
        if self.beside is not None and not is_dropping:
            parts |= self._parts(self.beside)
        self.beside, self.awaited = None, parts | known
        return sorted(parts)

    def drop(self, attempt: EpochAttempt) -> list[Part]:
        """Wait until the parts of the epoch beside the current one have stopped; return them in order."""
        self.awaited = self._parts(attempt)
        return sorted(self.awaited)

    def replace_if_passed(self) -> EpochAttempt | None:
        """Let the epoch beside the current one take its place, once all of that has passed.

        Returns:
            The epoch that was replaced, with the participants that are members still; None if it goes on.
        """
        parts = self._parts(self.current)
        if self.beside is None or not parts <= self._passed:
            return None
        replaced = EpochAttempt(self.current.number, frozenset(rank for _, rank in parts))
        self.current, self.beside = self.beside, None
        self._passed = {part for part in self._passed if part[0] == self.current.number}
        return replaced

    # -- details ----------------------------------------------------------------------------------

    def _has(self, part: Part) -> bool:
        epoch, rank = part
        if self.beside is not None and epoch == self.beside.number:
            return rank in self.beside.participants
        return epoch == self.current.number and rank in self.current.participants

    def _parts(self, attempt: EpochAttempt) -> set[Part]:
        """Return the parts of an epoch whose ranks are members still."""
        return {(attempt.number, rank) for rank in attempt.participants if rank in self._members}


class Faults:
    """Links that broke although both of their ends live, since something was written."""

    def __init__(self) -> None:
        self._broken: dict[frozenset[int], int] = {}  # latest epoch that each pair of incarnations broke
        self._written = 0

    def is_first(self, link: frozenset[int], epoch: int) -> bool:
        """Note that a link broke in ``epoch``; return whether it is the first fault of the link that counts.

        Args:
            link: incarnations of both ends; empty if nothing moved although no link was at fault.
            epoch: number of the epoch.
        """
        is_first = link not in self._broken
        self._broken[link] = epoch
        return is_first

    def note_written(self, written: int, epoch: int) -> None:
        """Forget the faults of epochs before ``epoch`` if more was written than ever before."""
        if written > self._written:
            self._written = written
            self._broken = {link: broken for link, broken in self._broken.items() if broken == epoch}
