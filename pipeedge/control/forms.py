"""Values that a program supplies to a session: readers of its messages, its decisions, and terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec import Raw

from pipeedge.base.errors import EXIT_REQUEST
from pipeedge.control.admission import Terms
from pipeedge.control.announcement import Announcement
from pipeedge.request.config import WorldRequest

__all__ = ["Forms", "GoingOn", "Joining", "Refusal", "Remaining"]

_Facts = TypeVar("_Facts")
_Plan = TypeVar("_Plan")
_Stats = TypeVar("_Stats")


@dataclass(frozen=True)
class Forms(Generic[_Facts, _Plan, _Stats]):
    """Functions that read the facts, the plan and the stats of a program, like ``base.fields.reader`` makes.

    A reader raises one of ``base.fields.MALFORMED`` or RequestError for a malformed message.
    """

    facts: Callable[[Raw], _Facts]
    plan: Callable[[Raw], _Plan]
    stats: Callable[[Raw], _Stats]
    max_message_bytes: int = Terms.max_message_bytes
    """Length of the longest message that a rank sends to rank 0, in bytes."""


@dataclass(frozen=True)
class Refusal:
    """A reason why the ranks cannot run together."""

    line: str
    exit_code: int = EXIT_REQUEST


@dataclass(frozen=True)
class Remaining(Generic[_Facts]):
    """The ranks for which a session that goes on after failures needs another plan."""

    facts: Mapping[int, _Facts]
    """Facts of each rank that may have a part."""
    cause: str
    """Reason why the last plan failed, for the user."""
    lost: tuple[int, ...] = ()
    """Ranks that were lost since the last plan."""


@dataclass(frozen=True)
class GoingOn(Generic[_Facts, _Plan]):
    """Decisions of rank 0 in a session that goes on after failures, made in a thread of its own."""

    plan: Callable[[Remaining[_Facts]], Announcement[_Plan] | Refusal]
    review: Callable[[int, _Facts], str | None]
    """Returns why a process with this rank and these facts cannot take part, or None if it can, instead of an
    earlier process of that rank."""


@dataclass(frozen=True)
class Joining:
    """Terms on which ranks join a session, and stay in it."""

    appear_s: float
    """Seconds within which an absent rank is reported."""
    silence_s: float
    """Seconds within which a silent rank is reported."""
    required: frozenset[int] | None = None
    """Ranks without which there is no session; None for all. Others that do not come, or are lost before the
    plan, are left out."""
    joins_later: bool = False
    """Whether a rank that is left out may join after the plan; if so, one that reports a failure before the
    plan is not left out, but ends the session."""
    ends_if_refused: bool = False
    """Whether ranks that do not come end the session if a process was refused for its key."""

    @classmethod
    def of(
        cls,
        world: WorldRequest,
        *,
        required: frozenset[int] | None = None,
        joins_later: bool = False,
        ends_if_refused: bool = False,
    ) -> Joining:
        """Return terms with the deadlines that ``--timeout`` sets."""
        return cls(world.timeout_s, world.timeout_s, required, joins_later, ends_if_refused)
