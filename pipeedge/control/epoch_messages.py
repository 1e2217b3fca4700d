"""Messages about epochs, between the hub and its members. Pure.

    to the hub      epochready, stopped, linklost; from the data rank: complete
    from the hub    prepare, run, abort; at the end: complete or verdict

Each names its epoch. ``pipeedge.control.epochs`` and ``pipeedge.control.epoch_member`` have the rules.
"""

from __future__ import annotations

from msgspec import Raw

from pipeedge.base.fields import Count, LongLine, Positive
from pipeedge.control.messages import Complete, Message, Verdict

__all__ = [
    "EPOCH_FROM_HUB",
    "EPOCH_TO_HUB",
    "Abort",
    "LinkLost",
    "Prepare",
    "EpochReady",
    "Run",
    "Stopped",
]


class Prepare(Message, frozen=True):
    """The hub asks a participant to load its part and to open its links."""

    epoch: Positive
    plan: Raw


class Run(Message, frozen=True):
    """All participants are prepared, and start."""

    epoch: Positive


class Abort(Message, frozen=True):
    """The epoch has failed: the participants that are left stop it."""

    epoch: Positive
    line: LongLine
    """The reason, for the user."""


class EpochReady(Message, frozen=True):
    """A rank has loaded its part, and its links are open."""

    epoch: Positive


class Stopped(Message, frozen=True):
    """A rank has stopped: it neither computes for the epoch nor takes frames of it any longer."""

    epoch: Positive
    written: Count | None = None
    """Lowest number of a microbatch that is not written; None from ranks that write none."""


class LinkLost(Message, frozen=True):
    """A rank has lost a link of the epoch, or cannot open it."""

    epoch: Positive
    peer: Count
    """Rank at the other end."""
    line: LongLine


EPOCH_TO_HUB = EpochReady | Stopped | LinkLost | Complete
EPOCH_FROM_HUB = Prepare | Run | Abort | Complete | Verdict
