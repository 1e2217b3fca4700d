"""Describe why a session ended, as data: the rank, the kind of failure, and the cause. Pure.

The hub sends a ``Failure`` to every rank. The line for the user is made from it where it is shown.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from msgspec import Struct

from pipeedge.base.errors import (
    EXIT_FAULT,
    EXIT_INFEASIBLE,
    EXIT_PEER,
    EXIT_REQUEST,
    Account,
    InfeasibleError,
    PeerFailedError,
    PipeEdgeError,
    RequestError,
)
from pipeedge.base.fields import Count, ExitCode, LongLine

__all__ = ["Failure", "FailureKind"]


class FailureKind(enum.Enum):
    """Kind of a failure."""

    REFUSED = "refused"
    """The ranks disagree, or ask for something impossible."""
    ABSENT = "absent"
    """A rank never appeared."""
    LATE = "late"
    """The session goes on without a rank that came, or sent its facts, too late."""
    FAILED = "failed"
    """A rank reported its own failure."""
    GONE = "gone"
    """A connection closed, or another rank lost this one."""
    MALFORMED = "malformed"
    """A rank broke the protocol."""
    SILENT = "silent"
    """A rank sent no heartbeat."""
    STUCK = "stuck"
    """A link carries nothing although both its ends are alive."""
    HUNG = "hung"
    """A rank loads what it needs too slowly, or not at all."""
    STALLED = "stalled"
    """Nothing moves, although no rank or link is at fault."""


_JOINTS: Mapping[FailureKind, str] = {FailureKind.FAILED: " failed: ", FailureKind.GONE: " is gone: "}
"""Text between the name of the rank and the cause; a space for all other kinds."""


class Failure(Struct, frozen=True):
    """The first reason why a session ended."""

    kind: FailureKind
    cause: LongLine
    rank: Count | None = None
    """Rank at fault; None if no single rank is."""
    name: LongLine = ""
    """Name of that rank for the user, such as ``rank 1 (stage 0, on pi1)``; empty if ``cause`` names it."""
    exit_code: ExitCode = EXIT_PEER

    @property
    def line(self) -> str:
        """Message for the user."""
        return f"{self.name}{_JOINTS.get(self.kind, ' ')}{self.cause}" if self.name else self.cause

    def error(self, rank: int | None = None) -> PipeEdgeError:
        """Return the exception that the member of ``rank`` raises."""
        if self.exit_code == EXIT_REQUEST:
            return RequestError(self.line)
        if self.exit_code == EXIT_INFEASIBLE:
            return InfeasibleError(self.line)
        if self.exit_code == EXIT_FAULT and rank == self.rank:
            return PipeEdgeError(self.line)
        if self.kind is FailureKind.FAILED and self.rank is not None:
            return PeerFailedError(self.line, account=Account(self.rank, self.cause))
        return PeerFailedError(self.line)
