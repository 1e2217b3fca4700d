"""Values that a program supplies to a session: readers of its messages, and its decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec import Raw

from pipeedge.base.errors import EXIT_REQUEST
from pipeedge.control.admission import Terms
from pipeedge.control.announcement import Announcement
from pipeedge.control.plans import Wanted

__all__ = ["Forms", "GoingOn", "Refusal"]

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
class GoingOn(Generic[_Facts, _Plan]):
    """Decisions of rank 0 in a session that goes on after failures, made in a thread of its own."""

    plan: Callable[[Wanted, Mapping[int, _Facts]], Announcement[_Plan] | Refusal]
    """Makes a plan for those that are wanted, whose facts are given by rank."""
    review: Callable[[int, _Facts], str | None]
    """Returns why a process with this rank and these facts cannot take part, or None if it can, instead of an
    earlier process of that rank."""
