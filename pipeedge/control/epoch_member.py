"""Rules of a session at a rank: what it does for which epoch. Pure.

    SPARE ──prepare e──> PREPARING e ──ready──> PREPARED e ──run e──> RUNNING e ──complete──> ENDED
      ^                       └────────────abort e───┴─────────────────────┤
      ├───────────stopped─────── STOPPING e <──────────────────────────────┤
      └───────────retire e────── PASSED e <──passed: all of e has──────────┘

A rank goes through these steps for each epoch in which it has a part. While it has one that runs, the hub may
have it prepare one more beside it, for a better plan; each takes its steps alone. What the hub says and what
the rank says about an epoch is in one table, ``EpochMember.TABLE``:

    step                           hub says  rank says  next step  what the rank does then
    SPARE                          prepare              PREPARING  load its part, open its links
    PREPARING                                ready      PREPARED   wait for the other participants
    PREPARING                                declined   PREPARING  wait for the abort
    PREPARED                       run                  RUNNING    work
    PREPARING, PREPARED, RUNNING             linklost   the same   wait for the abort; said once an epoch
    RUNNING                                  passed     PASSED     wait for another epoch, or the end
    PASSED                         retire               SPARE      close its links
    all of these but SPARE         abort                STOPPING   end its threads, close its links
    STOPPING                                 stopped    SPARE      wait for another epoch
    any                            complete, verdict    ENDED

What the hub says without a row breaks the protocol. What the rank would say without a row is not said: the
hub has stopped the epoch meanwhile.

``EpochMember`` uses neither threads nor links. Stages hold nothing that could not be computed again from what
the data rank keeps, so nothing needs to be saved when an epoch stops. No frame carries the number of its
epoch: a link belongs to one epoch, so frames of another one cannot arrive on it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import ClassVar, TypeAlias

from pipeedge.control.messages import (
    Abort,
    Complete,
    Declined,
    LinkLost,
    Message,
    Passed,
    Prepare,
    Ready,
    Retire,
    Run,
    Stopped,
)

__all__ = ["EpochMember", "MemberStep", "Report"]

Report: TypeAlias = Ready | Declined | Passed | Stopped | LinkLost
"""Message of a rank about an epoch."""


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
    """The session is complete."""


_FOLLOWED = (MemberStep.RUNNING, MemberStep.PASSED)
"""Steps of an epoch beside which the next one may be prepared."""
_LINKED = (MemberStep.PREPARING, MemberStep.PREPARED, MemberStep.RUNNING)
"""Steps in which the loss of a link matters."""


class EpochMember:
    """One rank's part in the epochs of a session."""

    TABLE: ClassVar[Mapping[tuple[MemberStep, type[Message]], MemberStep]] = {
        (MemberStep.SPARE, Prepare): MemberStep.PREPARING,
        (MemberStep.PREPARING, Ready): MemberStep.PREPARED,
        (MemberStep.PREPARING, Declined): MemberStep.PREPARING,
        (MemberStep.PREPARED, Run): MemberStep.RUNNING,
        (MemberStep.RUNNING, Passed): MemberStep.PASSED,
        (MemberStep.PASSED, Retire): MemberStep.SPARE,
        (MemberStep.STOPPING, Stopped): MemberStep.SPARE,
        **{(step, LinkLost): step for step in _LINKED},
        **{(step, Abort): MemberStep.STOPPING for step in (*_LINKED, MemberStep.PASSED)},
    }
    """Step that follows what the hub or the rank says about an epoch."""

    def __init__(self) -> None:
        self.latest = 0
        """Number of the latest epoch in which this rank has had a part; 0 before the first."""
        self.ended = False
        """Whether the session is complete."""
        self._parts: dict[int, MemberStep] = {}
        self._broken: set[int] = set()  # epochs of which the loss of a link has been reported

    @property
    def epochs(self) -> tuple[int, ...]:
        """Epochs in which this rank has a part, in order: at most two."""
        return tuple(sorted(self._parts))

    def step(self, epoch: int) -> MemberStep:
        """Return the present step of this rank in an epoch."""
        return MemberStep.ENDED if self.ended else self._parts.get(epoch, MemberStep.SPARE)

    def heard(self, message: Prepare | Run | Retire | Abort | Complete) -> None:
        """Follow the hub. The caller then does what the table says.

        Raises:
            ValueError: The hub breaks the protocol.
        """
        if isinstance(message, Complete):  # it may come at any time
            self.ended = True
            return
        epoch, before = message.epoch, self.step(message.epoch)
        after = self.TABLE.get((before, type(message)))
        if after is None or (isinstance(message, Prepare) and not self._may_prepare(epoch)):
            parts = ", ".join(f"{step.value} {number}" for number, step in self._parts.items())
            raise ValueError(f"{message.kind} {epoch} while {parts or before.value}")
        self.latest = max(self.latest, epoch)
        self._enter(epoch, after)

    def says(self, report: Report) -> bool:
        """Take the step that follows a report of this rank; return whether the hub is to hear it.

        Only the first lost link of an epoch is reported. Later ones follow from it, or from the abort.
        """
        epoch = report.epoch
        after = self.TABLE.get((self.step(epoch), type(report)))
        if after is None or (isinstance(report, LinkLost) and epoch in self._broken):
            return False
        if isinstance(report, LinkLost):
            self._broken.add(epoch)
        self._enter(epoch, after)
        return True

    def _may_prepare(self, epoch: int) -> bool:
        """Return whether an epoch is new, and no more than one that runs is left before it."""
        steps = tuple(self._parts.values())
        return epoch > self.latest and (not steps or (len(steps) == 1 and steps[0] in _FOLLOWED))

    def _enter(self, epoch: int, step: MemberStep) -> None:
        if step is MemberStep.SPARE:
            del self._parts[epoch]
            self._broken.discard(epoch)
        else:
            self._parts[epoch] = step
