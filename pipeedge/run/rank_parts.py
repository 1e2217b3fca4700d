"""Parts of a rank while microbatches flow.

Parts ─┬─ StagePart   on a rank of the schedule: the loop, its outgoing link, its bits
       ├─ DataPart    on the data rank: feeder, collector, their links and files
       ├─ LinkEnds    links between these and to other ranks, over the transport
       └─ Monitor     samples and energy, if anybody wants them
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeedge.control.hub_client import HubClient
from pipeedge.observe.energy import EnergyMeter, open_source
from pipeedge.observe.monitoring import DATA_KEYS, STAGE_KEYS, CsvFiles, Exporter, Monitor, Sink
from pipeedge.plan.planning import Plan
from pipeedge.run.context import RankContext
from pipeedge.run.links import LinkEnds
from pipeedge.run.stage_part import LoadedStage, StagePart, make_stage_bits, make_stage_part

if TYPE_CHECKING:  # only the data rank needs it
    from pipeedge.data import DataEnds
    from pipeedge.run.data_part import DataPart
    from pipeedge.run.progress import DataProgress

__all__ = ["Attempt", "Parts", "make_parts", "open_monitor"]


@dataclass(frozen=True)
class Parts:
    """The parts of a rank."""

    ends: LinkEnds
    monitor: Monitor
    stage: StagePart | None
    """The stage of this rank, if the plan gives it one."""
    data: DataPart | None
    """Input and results, on the data rank."""

    @property
    def all(self) -> tuple[DataPart | StagePart, ...]:
        """The parts that there are."""
        return tuple(part for part in (self.data, self.stage) if part is not None)

    @property
    def microbatches(self) -> int:
        """Number of microbatches that have passed here."""
        lanes = [self.data.collector.lane] if self.data is not None else []
        lanes += [self.stage.loop.lane] if self.stage is not None else []
        return max((lane.microbatches for lane in lanes), default=0)


@dataclass(frozen=True)
class Attempt:
    """A plan of a run, in which this rank takes part."""

    plan: Plan
    epoch: int
    """Number of the epoch."""
    before: Parts | None = None
    """The parts of this rank in the plan before, while that still runs."""


def make_parts(
    context: RankContext,
    member: HubClient,
    attempt: Attempt,
    *,
    stage: LoadedStage | None,
    data_ends: DataEnds | None,
    progress: DataProgress | None,
    monitor: Monitor,
) -> Parts:
    """Join the stage, and the input and results, of this rank to its links.

    Args:
        context: This rank.
        member: Connection to the hub, which knows the slowest stage.
        attempt: Plan that this rank takes part in.
        stage: Stage of this rank, or None.
        data_ends: Input and results of the run, on the data rank.
        progress: What of it is under way, and what is done, on the data rank.
        monitor: Takes a sample of each microbatch, if anybody wants them.
    """
    plan, before = attempt.plan, attempt.before
    model, activity = context.model, context.activity
    ends = LinkEnds(context.rank, plan.links(model), context.transport, activity, context.crew)
    stage_part = data_part = None
    if stage is not None:
        number = stage.number

        def tell(line: str) -> None:
            context.warn(f"stage {number}: {line}")

        bits = make_stage_bits(plan, model, number, lambda: member.slowest_stage_s, tell)
        stage_before = None if before is None else before.stage
        stage_part = make_stage_part(stage, plan, ends, bits, activity, monitor, stage_before)
    if data_ends is not None and progress is not None:
        from pipeedge.run.data_part import make_data_part

        data_before = None if before is None else before.data
        data_part = make_data_part(
            data_ends, progress, plan, context, ends, monitor, epoch=attempt.epoch, before=data_before
        )
    return Parts(ends, monitor, stage_part, data_part)


def open_monitor(context: RankContext, plan: Plan, exporter: Exporter | None) -> Monitor:
    """Open what takes the samples of this rank, from the beginning of the run to its end.

    Args:
        context: This rank.
        plan: The first plan that gives this rank a part.
        exporter: Server of the metrics, or None.
    """
    metrics = context.request.metrics
    sinks: list[Sink] = [] if exporter is None else [exporter]
    if metrics.directory is not None:
        keys: tuple[str, ...] = DATA_KEYS if context.rank == plan.data_rank else ()
        if plan.goes_on or plan.schedule.stage_of(context.rank) is not None:
            keys += STAGE_KEYS
        sinks.append(CsvFiles(metrics.directory, metrics.csv_file_mode, context.rank, keys))
    meter = EnergyMeter(*open_source())
    return Monitor(meter, sinks, metrics.window_size, time.perf_counter, context.warn)
