"""A simulated run that loses ranks: its epochs, and what each recovery costs.

    epoch 1 ──> rank lost ──detect──> all stop ──plan──> plan known ──load──> epoch 2 starts ──fill──> result
                 what had passed it still comes           layers that a rank lacks

The steps are those of a run over tcp (docs/failures.md). Planning is that of a run too, so the plan after the
loss is the one that it would take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import replace as with_fields

from pipeedge.base.backpressure import STAGES_AHEAD
from pipeedge.base.errors import InfeasibleError, RequestError
from pipeedge.base.schedule import Schedule, StagePlan
from pipeedge.base.wording import figure
from pipeedge.observe.records import EpochRecord
from pipeedge.plan.after_loss import Survivor
from pipeedge.plan.schedule_choice import PlannedSchedule
from pipeedge.simulate.options import Loss, RecoveryRequest
from pipeedge.simulate.simulation import SimulatedRun

__all__ = ["LossyRun", "LossyWorld", "Recoveries", "SimulatedEpoch", "simulate_epochs"]


@dataclass(frozen=True)
class SimulatedEpoch:
    """One epoch of a simulated run."""

    planned: PlannedSchedule
    run: SimulatedRun
    """Everything that is left to do, as if nothing were lost."""
    record: EpochRecord
    since_s: float = 0.0
    """Time at which it started, in seconds from the beginning of the run."""
    stopped_s: float = math.inf
    """Time at which its ranks stopped, or infinity if it ended with the run."""
    lost_s: Mapping[int, float] | None = None
    """Time at which each rank was lost that ended it."""
    results: int | None = None
    """Number of microbatches whose results came, or None for all."""

    @property
    def length_s(self) -> float:
        """Seconds from its start to its last result, if nothing is lost."""
        return self.run.length_s

    @property
    def latencies_s(self) -> Sequence[float]:
        """Latencies of the microbatches whose results came."""
        latencies: Sequence[float] = self.run.latencies_s[: self.results].tolist()
        return latencies

    def until_s(self, rank: int) -> float:
        """Return the time at which a rank's part in it ended."""
        return min(self.stopped_s, (self.lost_s or {}).get(rank, math.inf))


@dataclass(frozen=True)
class LossyWorld:
    """Ranks that may be lost, and what is planned then."""

    ranks: int
    data_rank: int
    plan: Callable[[Schedule, Sequence[Survivor]], PlannedSchedule | str]
    """Plans for the ranks that are left, or says why nothing fits."""
    room_bytes: Callable[[int], float]
    """Returns the memory of a rank."""
    host: Callable[[int], str | None]
    """Returns the host of a rank."""
    load_bytes: Callable[[Schedule, int, StagePlan | None], float]
    """Returns the bytes that the rank of a stage loads, given the stage that it has loaded."""


@dataclass(frozen=True)
class LossyRun(LossyWorld):
    """What a run of an encoder that loses ranks is simulated with."""

    items: int
    microbatch_size: int
    simulate: Callable[[Schedule, int, Sequence[int]], SimulatedRun]
    """Simulates a schedule with the last items, and keeps every moment of some stages."""


def simulate_epochs(
    world: LossyRun, planned: PlannedSchedule, losses: Sequence[Loss], recovery: RecoveryRequest
) -> list[SimulatedEpoch]:
    """Simulate a run that loses ranks.

    Args:
        world: The run.
        planned: Its first plan.
        losses: Losses, in any order.
        recovery: Seconds of each step of a recovery.

    Raises:
        RequestError: A rank does not exist.
        InfeasibleError: A loss ends the run.
    """
    return list(_Epochs(world, planned, losses, recovery))


class Recoveries:
    """The losses of a run, and the plans that follow them.

    Args:
        world: The ranks.
        planned: The first plan.
        losses: Losses, in any order.
        recovery: Seconds of each step of a recovery.

    Raises:
        RequestError: A rank does not exist.
    """

    def __init__(
        self,
        world: LossyWorld,
        planned: PlannedSchedule,
        losses: Sequence[Loss],
        recovery: RecoveryRequest,
    ) -> None:
        for loss in losses:
            if loss.rank >= world.ranks:
                raise RequestError(f"--lose {loss}: the ranks are 0 to {world.ranks - 1}")
        self.planned = planned
        """The latest plan."""
        self._world = world
        self._coming = sorted(losses, key=lambda loss: loss.at_s)
        self._recovery = recovery
        self._left = set(range(world.ranks))
        self._holds = {stage.rank: stage for stage in planned.schedule.stages}

    def next_lost(self, before_s: float) -> Loss | None:
        """Return the next loss of a rank with a part in the plan, before a moment."""
        ranks = {*self.planned.schedule.ranks, self._world.data_rank, 0}
        while self._coming and self._coming[0].at_s < before_s:
            loss = self._coming.pop(0)
            if loss.rank in self._left:
                self._left.discard(loss.rank)
                if loss.rank in ranks:
                    return loss
        return None

    def recover(self, lost: Loss, number: int) -> EpochRecord:
        """Plan after a loss; return the epoch that follows, number ``number``.

        Raises:
            InfeasibleError: The loss ends the run.
        """
        recovery, before = self._recovery, self.planned.schedule
        stopped_s = failed_s = lost.at_s + recovery.detect_s
        ranks, ready_s, cause = [lost.rank], 0.0, self._cause(lost, before)
        while True:
            self._plan(before, lost)
            planned_s = failed_s + recovery.plan_s
            ready_s = planned_s + self._loading_s()
            again = self.next_lost(ready_s)
            if again is None:
                break
            lost, cause = again, f"{cause}; {self._cause(again, self.planned.schedule)}"
            ranks.append(lost.rank)
            failed_s = lost.at_s + recovery.detect_s
        self._holds |= {stage.rank: stage for stage in self.planned.schedule.stages}
        return EpochRecord(
            number,
            self.planned.schedule,
            ready_s,
            cause=cause,
            lost=tuple(ranks),
            waiting_s=planned_s - stopped_s,
            preparing_s=ready_s - planned_s,
        )

    def _cause(self, lost: Loss, schedule: Schedule) -> str:
        stage, host = schedule.stage_of(lost.rank), self._world.host(lost.rank)
        what = "data rank" if stage is None else f"stage {stage}, {schedule.stages[stage].layers.named}"
        where = "" if host is None else f", on {host}"
        seconds = figure(self._recovery.detect_s)
        return (
            f"rank {lost.rank} ({what}{where}) is lost after {figure(lost.at_s)} s, noticed {seconds} s later"
        )

    def _plan(self, before: Schedule, lost: Loss) -> None:
        """Plan for the ranks that are left, and keep what they have loaded.

        Raises:
            InfeasibleError: Nothing fits, or the run cannot do without the rank.
        """
        world = self._world
        for rank, what in ((0, "rank 0 makes the plans"), (world.data_rank, "it has the data")):
            if rank not in self._left:
                raise InfeasibleError(f"--lose {lost}: the run ends there, because {what}; name another rank")
        survivors = [
            Survivor.holding(rank, world.room_bytes(rank), world.host(rank), self._holds.get(rank))
            for rank in sorted(self._left)
        ]
        try:
            found = world.plan(before, survivors)
        except InfeasibleError as error:
            found = str(error)
        if isinstance(found, str):
            raise InfeasibleError(
                f"--lose {lost}: the run ends there, because nothing fits without it: {found}"
            )
        self.planned = found

    def _loading_s(self) -> float:
        """Return the seconds until each rank of the plan has the layers that it lacks."""
        if self._recovery.replicate:
            return 0.0
        schedule = self.planned.schedule
        needed = [
            self._world.load_bytes(schedule, number, self._holds.get(stage.rank))
            for number, stage in enumerate(schedule.stages)
        ]
        return max(needed, default=0.0) / self._recovery.load_bytes_per_s


class _Epochs(Recoveries):
    """The epochs of a run, one after the other."""

    def __init__(
        self,
        world: LossyRun,
        planned: PlannedSchedule,
        losses: Sequence[Loss],
        recovery: RecoveryRequest,
    ) -> None:
        super().__init__(world, planned, losses, recovery)
        self._run = world
        self._written = 0

    def __iter__(self) -> Iterator[SimulatedEpoch]:
        epoch = self._begun(EpochRecord(1, self.planned.schedule, 0.0))
        while (lost := self.next_lost(epoch.since_s + epoch.length_s)) is not None:
            ended = self._stopped(epoch, lost)
            if ended.results == epoch.run.model.microbatches:  # the run was complete before anybody noticed
                break
            self._written += ended.results or 0
            yield ended
            epoch = self._after(ended, lost)
        yield replace(epoch, record=self._measured(epoch.record, epoch.run, None))

    def _begun(self, record: EpochRecord) -> SimulatedEpoch:
        """Return an epoch that starts with what is left, when all its ranks have loaded their layers."""
        schedule, world = self.planned.schedule, self._run
        threatened = {loss.rank for loss in self._coming}
        watched = [number for number, stage in enumerate(schedule.stages) if stage.rank in threatened]
        run = world.simulate(schedule, world.items - self._written * world.microbatch_size, watched)
        prediction = self.planned.prediction
        record = with_fields(
            record,
            predicted_items_per_s=None if prediction is None else prediction.throughput_items_per_s,
            filling_s=float(run.result_at[0]) if record.cause else 0.0,
        )
        return SimulatedEpoch(self.planned, run, record, record.started_s)

    def _stopped(self, epoch: SimulatedEpoch, lost: Loss) -> SimulatedEpoch:
        """Return ``epoch`` as the loss has ended it."""
        stopped_s = lost.at_s + self._recovery.detect_s
        run, local_s = epoch.run, stopped_s - epoch.since_s
        stage = epoch.planned.schedule.stage_of(lost.rank)
        came = run.result_at <= local_s
        if stage is not None:  # what had passed the lost rank goes on
            came &= run.posted(stage) <= lost.at_s - epoch.since_s
        results = int(np.count_nonzero(came))
        return replace(
            epoch,
            record=self._measured(epoch.record, run, results),
            stopped_s=stopped_s,
            lost_s={lost.rank: lost.at_s},
            results=results,
        )

    def _measured(self, record: EpochRecord, run: SimulatedRun, results: int | None) -> EpochRecord:
        """Return the record of an epoch with what came of it."""
        size, at = self._run.microbatch_size, run.result_at[:results]
        items = len(at) * size
        if results is None:
            items = self._run.items - self._written * size
        seconds = float(at[-1] - at[0]) if len(at) else 0.0
        return with_fields(
            record, items=items, steady_items_per_s=(items - size) / seconds if seconds > 0 else None
        )

    def _after(self, ended: SimulatedEpoch, lost: Loss) -> SimulatedEpoch:
        """Return the epoch that follows, unless the loss ends the run."""
        before = ended.planned.schedule
        fed = int(np.count_nonzero(ended.run.fed_at <= ended.stopped_s - ended.since_s))
        repeated = min(fed - (ended.results or 0), STAGES_AHEAD * len(before.stages))
        record = self.recover(lost, ended.record.number + 1)
        return self._begun(with_fields(record, repeated=max(0, repeated)))
