"""What a rank consists of while the microbatches of an epoch flow.

Composition ─┬─ LinkedStage  on a rank of the schedule: the loop, its outgoing link, its bits
             ├─ DataFlow     on the data rank: feeder, collector, their links and files
             ├─ CopyReceivers  on a standby: copies of the pages of other ranks
             ├─ LinkEnds     links between these and to other ranks, over the transport
             └─ Monitor      samples and energy, if anybody wants them
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeedge.control.hub_client import HubClient
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.layers.decoder import DecoderStage
from pipeedge.observe.energy import EnergyMeter, open_source
from pipeedge.observe.monitoring import DATA_KEYS, STAGE_KEYS, CsvFiles, Exporter, Monitor, Sink
from pipeedge.plan.planning import Plan
from pipeedge.run.context import EpochContext, Prepared, RankContext
from pipeedge.run.copying import CopyReceiver, CopySender
from pipeedge.run.linked_stage import LinkedStage, LoadedStage, link_stage
from pipeedge.run.links import LinkEnds
from pipeedge.run.stage import StepStage

if TYPE_CHECKING:  # only the data rank needs it
    from pipeedge.run.data_flow import DataFlow

__all__ = ["Composition", "compose", "open_monitor"]


@dataclass(frozen=True)
class Composition:
    """The parts of a rank in one epoch."""

    ends: LinkEnds
    monitor: Monitor
    stage: LinkedStage | None
    """The stage of this rank, if the plan gives it one."""
    data: DataFlow | None
    """Input and results, on the data rank."""
    receivers: Sequence[CopyReceiver] = ()
    """What takes copies of the pages of other ranks."""

    @property
    def all(self) -> tuple[DataFlow | LinkedStage, ...]:
        """The parts that there are."""
        return tuple(part for part in (self.data, self.stage) if part is not None)

    @property
    def microbatches(self) -> int:
        """Number of microbatches that have passed here."""
        lanes = [self.data.collector.lane] if self.data is not None else []
        lanes += [self.stage.loop.lane] if self.stage is not None else []
        return max((lane.microbatches for lane in lanes), default=0)


def compose(
    epoch: EpochContext,
    member: HubClient,
    prepared: Prepared,
    stage: LoadedStage | None,
    monitor: Monitor,
    before: Composition | None,
) -> Composition:
    """Join the stage, and the input and results, of this rank to its links.

    Args:
        epoch: This rank in the epoch.
        member: Connection to the hub, which knows the slowest stage.
        prepared: What this rank has opened.
        stage: Stage of this rank, or None.
        monitor: Takes a sample of each microbatch, if anybody wants them.
        before: The parts of this rank in the epoch before, while that still runs.

    Raises:
        PeerError: The links do not open.
    """
    rank, plan = epoch.rank, epoch.plan
    stage_before, data_before = (None, None) if before is None else (before.stage, before.data)
    ends = LinkEnds(rank.rank, plan.links(rank.model), epoch.transport, epoch.activity, epoch.crew)
    linked = data = None
    if prepared.data is not None and prepared.progress is not None:
        from pipeedge.run.data_flow import make_data_flow

        data = make_data_flow(prepared.data, prepared.progress, epoch, ends, monitor, data_before)
    if stage is not None:
        feeder = None if data is None else data.feeder
        linked = link_stage(stage, epoch, ends, lambda: member.slowest_stage_s, monitor, stage_before, feeder)
    # After all other links, at both ends.
    copies: tuple[CopySender, ...] = ()
    if stage is not None and isinstance(stage.compute, StepStage):
        copies = stage.compute.copies = _copy_senders(epoch, stage)
    receivers = _copy_receivers(epoch)
    if linked is not None:
        linked = replace(linked, copies=copies, receivers=receivers)
    return Composition(ends, monitor, linked, data, receivers)


def _copy_senders(epoch: EpochContext, stage: LoadedStage) -> tuple[CopySender, ...]:
    """Open what copies the pages of a stage to standbys."""
    plan, model = epoch.plan, epoch.rank.model
    if not isinstance(stage.shard, DecoderStage) or not isinstance(model, DecoderModel):
        return ()
    links = [(one, plan.copy_link(model, one)) for one in plan.standbys if plan.copied(one) == stage.number]
    return tuple(
        CopySender(stage.shard, one, epoch.transport.sender(link), plan.step_bounds.pages, link.specs)
        for one, link in links
    )


def _copy_receivers(epoch: EpochContext) -> tuple[CopyReceiver, ...]:
    """Open what takes the copies for which this rank is a standby."""
    plan, rank, model = epoch.plan, epoch.rank, epoch.rank.model
    if not isinstance(model, DecoderModel):
        return ()
    links = [(one, plan.copy_link(model, one)) for one in plan.standbys if one.rank == rank.rank]
    return tuple(
        CopyReceiver(one, plan.number, epoch.transport.receiver(link), plan.step_bounds.pages, rank.warn)
        for one, link in links
    )


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
