"""Rules of failover at a rank: what it does for which epoch, and which frames it takes. Pure.

    SPARE ──prepare e──> PREPARING e ──prepared──> PREPARED e ──run e──> RUNNING e ──complete──> ENDED
      ^                       └─────────────abort e─────┴──────────────────┘
      └───────────stopped─────── STOPPING e <─┘

``EpochMember`` uses neither threads nor links: messages of the hub go in and tell the caller what to do
(prepare, run, stop); what the caller reports of its threads and links comes out as messages to the hub.

Stages hold nothing between two microbatches, so nothing needs to be saved when an epoch stops. Its frames
may arrive for a while; ``judge`` tells by the epoch in their headers what becomes of them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import ClassVar

from pipeedge.control.epoch_messages import Abort, EpochReady, LinkLost, Prepare, Run, Stopped
from pipeedge.control.messages import Complete, Message, Verdict

__all__ = ["Admission", "EpochMember", "MemberStep"]


class MemberStep(enum.Enum):
    """Step of a rank."""

    SPARE = "spare"
    """The rank has no part in an epoch."""
    PREPARING = "preparing"
    """The rank loads its part and opens its links."""
    PREPARED = "prepared"
    """The rank waits for the other participants."""
    RUNNING = "running"
    STOPPING = "stopping"
    """The rank ends its threads and closes its links."""
    ENDED = "ended"
    """The run is complete, or has failed."""


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
        self._step = MemberStep.SPARE
        self._epoch = 0
        self._link_lost = False  # whether the loss of a link of this epoch has been reported

    @property
    def step(self) -> MemberStep:
        """Present step of this rank."""
        return self._step

    @property
    def epoch(self) -> int:
        """Latest epoch in which this rank has a part; 0 before the first."""
        return self._epoch

    # -- messages of the hub ----------------------------------------------------------------------

    _STEPS: ClassVar[Mapping[MemberStep, Mapping[type[Message], MemberStep]]] = {
        MemberStep.SPARE: {Prepare: MemberStep.PREPARING},
        MemberStep.PREPARING: {Abort: MemberStep.STOPPING},
        MemberStep.PREPARED: {Run: MemberStep.RUNNING, Abort: MemberStep.STOPPING},
        MemberStep.RUNNING: {Abort: MemberStep.STOPPING},
        MemberStep.STOPPING: {},
        MemberStep.ENDED: {},
    }
    """Step to which each message leads that the hub may send; others break the protocol."""

    def heard(self, message: Prepare | Run | Abort | Complete | Verdict) -> None:
        """Follow the hub. The caller then does what the message asks for.

        Raises:
            ValueError: the hub breaks the protocol.
        """
        if isinstance(message, Complete | Verdict):  # they may come at any time
            self._step = MemberStep.ENDED
            return
        step = self._STEPS[self._step].get(type(message))
        is_new = isinstance(message, Prepare)
        if step is None or (message.epoch <= self._epoch if is_new else message.epoch != self._epoch):
            raise ValueError(f"{message.kind} {message.epoch} while {self._step.value} {self._epoch}")
        self._step, self._epoch = step, message.epoch
        self._link_lost = self._link_lost and not is_new

    # -- reports of the caller --------------------------------------------------------------------

    def prepared(self, epoch: int) -> EpochReady | None:
        """Note that the part is loaded and all links are open; return what to tell the hub, if anything."""
        if epoch != self._epoch or self._step is not MemberStep.PREPARING:
            return None  # the epoch was aborted meanwhile
        self._step = MemberStep.PREPARED
        return EpochReady(epoch)

    def link_lost(self, epoch: int, peer: int, line: str) -> LinkLost | None:
        """Note that a link broke or does not open; return what to tell the hub, if anything.

        Only the first one of an epoch is reported. Later ones follow from it, or from the abort.
        """
        if epoch != self._epoch or self._link_lost or self._step not in _ACTIVE:
            return None
        self._link_lost = True
        return LinkLost(epoch, peer, line)

    def stopped(self, written: int | None = None) -> Stopped | None:
        """Note that all threads and links of the aborted epoch have ended; return what to tell the hub.

        Args:
            written: on the data rank, the lowest number of a microbatch that is not written.
        """
        if self._step is not MemberStep.STOPPING:
            return None  # the run has ended meanwhile
        self._step = MemberStep.SPARE
        return Stopped(self._epoch, written)

    # -- frames -----------------------------------------------------------------------------------

    def judge(self, epoch: int) -> Admission:
        """Return what to do with a frame of ``epoch``, or with a peer that opens a link for it."""
        if self._step is MemberStep.ENDED or epoch < self._epoch:
            return Admission.REFUSE
        if epoch > self._epoch:
            return Admission.KEEP
        return Admission.TAKE if self._step in _ACTIVE else Admission.REFUSE
