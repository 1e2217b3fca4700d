"""Rules of failover at a rank: what it does for which epoch, and which frames it takes. Pure.

    SPARE ──prepare e──> PREPARING e ──prepared──> PREPARED e ──run e──> RUNNING e ──complete──> ENDED
      ^                       └─────────────abort e─────┴──────────────────┤
      ├───────────stopped─────── STOPPING e <──────────────────────────────┤
      └───────────retire e────── PASSED e <──all of e has passed───────────┘

A rank goes through these steps for each epoch in which it has a part. While it has one that runs, the hub may
have it prepare one more beside it, for a better plan; each takes its steps alone.

``EpochMember`` uses neither threads nor links: messages of the hub go in and tell the caller what to do
(prepare, run, stop); what the caller reports of its threads and links comes out as messages to the hub.

Stages hold nothing between two microbatches, so nothing needs to be saved when an epoch stops. Its frames
may arrive for a while; ``judge`` tells by the epoch in their headers what becomes of them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import ClassVar

from pipeedge.control.epoch_messages import (
    Abort,
    Declined,
    EpochReady,
    LinkLost,
    Passed,
    Prepare,
    Retire,
    Run,
    Stopped,
)
from pipeedge.control.messages import Complete, Message, Verdict

__all__ = ["Admission", "EpochMember", "MemberStep"]


class MemberStep(enum.Enum):
    """Step of a rank, in one epoch."""

    SPARE = "spare"
    """The rank has no part in the epoch."""
    PREPARING = "preparing"
    """The rank loads its part and opens its links."""
    PREPARED = "prepared"
    """The rank waits for the other participants."""
    RUNNING = "running"
    PASSED = "passed"
    """All that came has passed; another epoch, or the end of the run, follows."""
    STOPPING = "stopping"
    """The rank ends its threads and closes its links."""
    ENDED = "ended"
    """The run is complete, or has failed."""


_FOLLOWED = (MemberStep.RUNNING, MemberStep.PASSED)
"""Steps of an epoch beside which the next one may be prepared."""
_ACTIVE = (MemberStep.PREPARING, MemberStep.PREPARED, MemberStep.RUNNING)
"""Steps in which a rank has links. Frames come only when all participants are prepared, so when they come
before this rank hears from the hub that all run, it may take them.
"""


class Admission(enum.Enum):
    """Answer to a frame, or to a peer that opens a link."""

    TAKE = "take"
    KEEP = "keep"
    """It is early: ask again when this rank has heard from the hub."""
    REFUSE = "refuse"
    """It belongs to an epoch that has ended."""


class EpochMember:
    """One rank's part in the epochs of a run."""

    def __init__(self) -> None:
        self._parts: dict[int, MemberStep] = {}
        self._latest = 0
        self._ended = False
        self._broken: set[int] = set()  # epochs of which the loss of a link has been reported

    @property
    def ended(self) -> bool:
        """Whether the run is complete, or has failed."""
        return self._ended

    @property
    def epochs(self) -> tuple[int, ...]:
        """Epochs in which this rank has a part, in order: at most two."""
        return tuple(sorted(self._parts))

    def step(self, epoch: int) -> MemberStep:
        """Return the present step of this rank in an epoch."""
        return MemberStep.ENDED if self._ended else self._parts.get(epoch, MemberStep.SPARE)

    # -- messages of the hub ----------------------------------------------------------------------

    _STEPS: ClassVar[Mapping[MemberStep, Mapping[type[Message], MemberStep]]] = {
        MemberStep.SPARE: {Prepare: MemberStep.PREPARING},
        MemberStep.PREPARING: {Abort: MemberStep.STOPPING},
        MemberStep.PREPARED: {Run: MemberStep.RUNNING, Abort: MemberStep.STOPPING},
        MemberStep.RUNNING: {Abort: MemberStep.STOPPING},
        MemberStep.PASSED: {Retire: MemberStep.SPARE, Abort: MemberStep.STOPPING},
        MemberStep.STOPPING: {},
        MemberStep.ENDED: {},
    }
    """Step to which each message leads that the hub may send; others break the protocol."""

    def heard(self, message: Prepare | Run | Retire | Abort | Complete | Verdict) -> None:
        """Follow the hub. The caller then does what the message asks for.

        Raises:
            ValueError: the hub breaks the protocol.
        """
        if isinstance(message, Complete | Verdict):  # they may come at any time
            self._ended = True
            return
        epoch, before = message.epoch, self.step(message.epoch)
        after = self._STEPS[before].get(type(message))
        if after is None or (isinstance(message, Prepare) and not self._may_prepare(epoch)):
            parts = ", ".join(f"{step.value} {number}" for number, step in self._parts.items())
            raise ValueError(f"{message.kind} {epoch} while {parts or before.value}")
        self._latest = max(self._latest, epoch)
        self._enter(epoch, after)

    def _may_prepare(self, epoch: int) -> bool:
        """Return whether an epoch is new, and no more than one that runs is left before it."""
        steps = tuple(self._parts.values())
        return epoch > self._latest and (not steps or (len(steps) == 1 and steps[0] in _FOLLOWED))

    def _enter(self, epoch: int, step: MemberStep) -> None:
        if step is MemberStep.SPARE:
            del self._parts[epoch]
            self._broken.discard(epoch)
        else:
            self._parts[epoch] = step

    # -- reports of the caller --------------------------------------------------------------------

    def prepared(self, epoch: int) -> EpochReady | None:
        """Note that the part is loaded and all links are open; return what to tell the hub, if anything."""
        if self.step(epoch) is not MemberStep.PREPARING:
            return None  # the epoch was aborted meanwhile
        self._enter(epoch, MemberStep.PREPARED)
        return EpochReady(epoch)

    def declined(self, epoch: int, line: str) -> Declined | None:
        """Note that the part cannot be prepared; return what to tell the hub, if anything."""
        return Declined(epoch, line) if self.step(epoch) is MemberStep.PREPARING else None

    def link_lost(self, epoch: int, peer: int, line: str) -> LinkLost | None:
        """Note that a link broke or does not open; return what to tell the hub, if anything.

        Only the first one of an epoch is reported. Later ones follow from it, or from the abort.
        """
        if epoch in self._broken or self.step(epoch) not in _ACTIVE:
            return None
        self._broken.add(epoch)
        return LinkLost(epoch, peer, line)

    def passed(self, epoch: int, first: int | None = None) -> Passed | None:
        """Note that all that came has passed; return what to tell the hub, if anything.

        Args:
            epoch: the epoch.
            first: on the data rank, the lowest number of a microbatch that the next epoch is fed.
        """
        if self.step(epoch) is not MemberStep.RUNNING:
            return None
        self._enter(epoch, MemberStep.PASSED)
        return Passed(epoch, first)

    def stopped(self, epoch: int, written: int | None = None) -> Stopped | None:
        """Note that all threads and links of the aborted epoch have ended; return what to tell the hub.

        Args:
            epoch: the epoch.
            written: on the data rank, the lowest number of a microbatch that is not written.
        """
        if self.step(epoch) is not MemberStep.STOPPING:
            return None  # the run has ended meanwhile
        self._enter(epoch, MemberStep.SPARE)
        return Stopped(epoch, written)

    # -- frames -----------------------------------------------------------------------------------

    def judge(self, epoch: int) -> Admission:
        """Return what to do with a frame of ``epoch``, or with a peer that opens a link for it."""
        step = self.step(epoch)
        if step is MemberStep.SPARE:
            return Admission.KEEP if epoch > self._latest else Admission.REFUSE
        return Admission.TAKE if step in _ACTIVE else Admission.REFUSE
