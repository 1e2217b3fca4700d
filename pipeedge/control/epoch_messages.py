"""Messages about epochs, between the hub and its members. Pure.

    to the hub      epochready, declined, passed, stopped, linklost; from the data rank: complete
    from the hub    prepare, run, retire, abort; at the end: complete or verdict

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
    "Declined",
    "EpochReady",
    "LinkLost",
    "Passed",
    "Prepare",
    "Retire",
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


class Retire(Message, frozen=True):
    """All that the epoch was fed has passed, and another one feeds what follows: its links can be closed."""

    epoch: Positive


class Abort(Message, frozen=True):
    """The epoch has failed, or is not wanted any longer: the participants that are left stop it."""

    epoch: Positive
    line: LongLine
    """The reason, for the user."""


class EpochReady(Message, frozen=True):
    """A rank has loaded its part, and its links are open."""

    epoch: Positive


class Declined(Message, frozen=True):
    """A rank cannot prepare an epoch beside the one that runs."""

    epoch: Positive
    line: LongLine
    """The reason, for the user."""


class Passed(Message, frozen=True):
    """All that came to a rank in the epoch has passed, and nothing follows."""

    epoch: Positive
    first: Count | None = None
    """Lowest number of a microbatch that the next epoch is fed; None from ranks that feed nothing."""


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


EPOCH_TO_HUB = EpochReady | Declined | Passed | Stopped | LinkLost | Complete
EPOCH_FROM_HUB = Prepare | Run | Retire | Abort | Complete | Verdict
