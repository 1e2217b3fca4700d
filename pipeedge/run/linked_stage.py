"""A stage between its links.

link n ──> Incoming ──> [compute] StageLoop: decode, compute, encode ──> Outgoing ──> link n + 1
input, if stage 0 is on the data rank ──┘                                     └──> [watch] times the link
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pipeedge.base.crew import Crew
from pipeedge.base.machine import peak_rss_mb
from pipeedge.base.schedule import StagePlan
from pipeedge.compress.adaptation import AdaptiveBits, FixedBits, LinkContext
from pipeedge.compress.policies import Decided, make_policy
from pipeedge.models.dtypes import find_dtype, stream_dtype
from pipeedge.models.layers.decoder import DecoderStage
from pipeedge.models.layers.kept_outputs import KeptOutputs
from pipeedge.models.shard import Shard
from pipeedge.observe.lanes import STAGE, Lane, LinkLane
from pipeedge.observe.metrics import StageStats
from pipeedge.observe.monitoring import Monitor, send_samples, stage_samples
from pipeedge.observe.records import Row
from pipeedge.observe.timeline import LaneId, ThreadState
from pipeedge.plan.cache_owners import KeptOutput, Standby
from pipeedge.plan.planning import Plan
from pipeedge.run.context import EpochContext
from pipeedge.run.copying import CopyReceiver, CopySender
from pipeedge.run.links import LinkEnds
from pipeedge.run.priority import give_way
from pipeedge.run.stage import Decode, Encode, StepStage
from pipeedge.run.worker import Incoming, Outgoing, StageLoop, StageSteps
from pipeedge.transport.base import Packet, PacketSource

__all__ = ["LinkedStage", "LoadedStage", "StageBits", "link_stage", "make_decoder"]


@dataclass(frozen=True)
class LoadedStage:
    """A stage with its weights."""

    number: int
    parameters: int
    """Number of parameters."""
    kernels: str
    """Kernels of the linear layers."""
    compute: Callable[[Packet], Packet]
    plan: StagePlan
    """Stage of the schedule that it was loaded for."""
    shard: Shard | DecoderStage
    since: Mapping[int, int] = field(default_factory=dict)
    """For each layer of the model, number of the plan since which its rank has had it."""
    outputs: Mapping[KeptOutput, KeptOutputs] = field(default_factory=dict)
    """What is kept of its outputs."""

    def serves(self, stage: StagePlan) -> bool:
        """Return whether it has the layers of another stage, so that nothing needs to be loaded for that."""
        return (stage.layers, stage.dtype) == (self.plan.layers, self.plan.dtype)

    def stands_by(self, standby: Standby) -> bool:
        """Return whether it has the layers that a rank stands by for."""
        return (standby.layers, standby.dtype) == (self.plan.layers, self.plan.dtype)


StageBits = AdaptiveBits | FixedBits | None
"""Bit width policy for the output of a stage, or None if it is not encoded."""


def _stage_bits(epoch: EpochContext, stage: int, slowest_s: Callable[[], float]) -> StageBits:
    """Return the bit width policy for the output of ``stage``."""
    plan, compression = epoch.plan, epoch.plan.compression
    bits = plan.schedule.stages[stage].quant_bits
    if compression.adaptive is None or not plan.adapts(stage):
        return FixedBits(bits) if bits else None
    policy, target = compression.adaptive, compression.send_constraint or 0.0
    sizes = plan.sizes(epoch.rank.model, stage)

    def tell(line: str) -> None:
        epoch.rank.warn(f"stage {stage}: {line}")

    return AdaptiveBits(
        lambda sizes: make_policy(policy, sizes, target),
        sizes,
        window=compression.window_size,
        first_bits=bits if bits in sizes.bytes_at else 0,
        context=LinkContext(slowest_s, time.perf_counter, tell),
    )


def make_decoder(plan: Plan, stage: int) -> Decode | None:
    """Return what undoes the encoding of the output of ``stage`` (-1: the last), or None without one."""
    stage %= len(plan.schedule.stages)
    return Decode(plan.schedule.stages[stage].rank) if plan.compresses(stage) else None


@dataclass(frozen=True)
class LinkedStage:
    """A stage with the threads that run it. It outlasts them for its figures, and its weights do not."""

    number: int
    parameters: int
    """Number of parameters."""
    kernels: str
    """Kernels of the linear layers."""
    loop: StageLoop
    outgoing: Outgoing
    link: LinkLane
    """Record of the outgoing link."""
    bits: StageBits
    encode: Encode | None
    """Encoder of its output, if the outgoing link is compressed."""
    after: threading.Event | None = None
    """Set once this rank has computed what the plan before was fed; None if that has ended already."""
    copies: Sequence[CopySender] = ()
    """What copies its pages to other ranks."""
    receivers: Sequence[CopyReceiver] = ()
    """What takes copies of the pages of others, as long as it computes."""
    gives_way: bool = False
    """Whether other threads of this rank go first."""

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Lanes of its threads."""
        return (self.loop.lane,)

    def start(self, crew: Crew) -> None:
        """Begin to compute."""
        crew.on_stop(self.outgoing.close)
        if self.after is not None:
            crew.on_stop(self.after.set)
        crew.start("compute", self._compute)
        crew.start("watch", self.outgoing.run)
        for one in self.copies:
            one.start(crew)

    def _compute(self) -> None:
        if self.gives_way:
            give_way()
        self.loop.run(self.after)
        for sender in self.copies:
            sender.end()
        for receiver in self.receivers:
            receiver.end()

    def decided(self, hub_clock: Callable[[float], float]) -> tuple[Decided, ...]:
        """Return the bit widths that were chosen, timed by the hub's clock."""
        if not isinstance(self.bits, AdaptiveBits):
            return ()
        return tuple(dataclasses.replace(one, time_s=hub_clock(one.time_s)) for one in self.bits.decided)

    def stats(self, rank: int) -> StageStats:
        """Return the statistics of this stage, on ``rank``."""
        lane = self.loop.lane
        return StageStats(
            stage=self.number,
            rank=rank,
            microbatches=lane.microbatches,
            compute_s_mean=lane.tally(ThreadState.COMPUTE).mean,
            send_s_mean=self.outgoing.seconds.mean,
            send_s_best=self.outgoing.send_s_best,
            recv_wait_s_mean=lane.tally(ThreadState.WAIT_INPUT).mean,
            bytes_out_mean=self.outgoing.bytes.mean,
            busy_fraction=self.loop.busy_fraction,
            rss_peak_mb=peak_rss_mb(),
            parameters=self.parameters,
            kernels=self.kernels,
            compute_cpu_s_mean=self.loop.compute_cpu_seconds.mean,
            threads=torch.get_num_threads(),
            encode_s_mean=lane.tally(ThreadState.ENCODE).mean,
            decode_s_mean=lane.tally(ThreadState.DECODE).mean,
            transformed_fraction=0.0 if self.encode is None else self.encode.transformed_fraction,
            # Where the bits change, so does the time of a microbatch, and none of it is what was promised.
            link_s=None if isinstance(self.bits, AdaptiveBits) else self.outgoing.link_s,
        )


def link_stage(
    stage: LoadedStage,
    epoch: EpochContext,
    ends: LinkEnds,
    slowest_s: Callable[[], float],
    monitor: Monitor,
    before: LinkedStage | None = None,
    feeder: PacketSource | None = None,
) -> LinkedStage:
    """Join a loaded stage to its links.

    Args:
        stage: The stage.
        epoch: This rank in the epoch.
        ends: Links of this rank.
        slowest_s: Returns the seconds that the slowest stage spends on a microbatch.
        monitor: Takes a sample of each microbatch, if anybody wants them.
        before: The stage that this rank has in the epoch before, while that still runs.
        feeder: Input of the pipeline, which the first stage takes itself on the data rank.
    """
    plan, activity = epoch.plan, epoch.activity
    bits = _stage_bits(epoch, stage.number, slowest_s)
    number = stage.number
    decode = make_decoder(plan, number - 1) if number else None
    layers = len(plan.schedule.stages[number].layers)
    plain_bits = torch.finfo(stream_dtype(find_dtype(plan.schedule.stages[number].dtype))).bits

    def computed(row: Row, received: float) -> None:
        came_bits = decode.latest_bits if decode is not None else 0
        monitor.add_samples(stage_samples(row, STAGE, int(received), layers, came_bits))

    def sent(size: int, start_s: float, end_s: float) -> None:
        monitor.add_samples(send_samples(size, start_s, end_s))

    wants_samples = monitor.wants_samples
    end = ends.outgoing(number + 1)
    link = LinkLane(LaneId.link(number), end.peer, plan.record_rows, sent if wants_samples else None)
    arrived = bits.arrived if isinstance(bits, AdaptiveBits) else None
    outgoing = Outgoing(end, activity, lane=link, arrived=arrived)
    encode = None if bits is None else _make_encoder(plan, number, bits, stage.compute)
    steps = StageSteps(
        stage.compute,
        decode,
        encode,
        lambda: (bits.latest if bits is not None else 0) or plain_bits,
        _counts(stage.compute),
    )
    lane = Lane(
        LaneId.stage(number), STAGE, time.perf_counter, plan.record_rows, computed if wants_samples else None
    )
    if feeder is not None and number == 0:
        incoming = Incoming(feeder, None, activity)
    else:
        incoming = ends.incoming(number)
    loop = StageLoop(steps, incoming, outgoing, activity, lane)
    activity.stage(loop.work)
    return LinkedStage(
        number,
        stage.parameters,
        stage.kernels,
        loop,
        outgoing,
        link,
        bits,
        encode,
        after=None if before is None else before.loop.ended,
        gives_way=epoch.gives_way("compute"),
    )


def _make_encoder(
    plan: Plan, stage: int, bits: AdaptiveBits | FixedBits, compute: Callable[[Packet], Packet]
) -> Encode:
    compression = plan.compression
    return Encode(
        bits,
        compression.clamp,
        compression.window_size,
        transform=compression.link_transform,
        stage=stage,
        rank=plan.schedule.stages[stage].rank,
        kind=_latest_kind(compute),
    )


def _counts(compute: Callable[[Packet], Packet]) -> Callable[[], bool]:
    """Return what tells whether the latest microbatch counts: of a decoder, one that has read no prompt."""
    latest_kind = _latest_kind(compute)
    return lambda: latest_kind() == 0


def _latest_kind(compute: Callable[[Packet], Packet]) -> Callable[[], int]:
    """Return what tells of which kind the latest step was; weights are let go when the loop ends."""
    if not isinstance(compute, StepStage):
        return lambda: 0
    steps = weakref.ref(compute)

    def latest_kind() -> int:
        stage = steps()
        return 0 if stage is None else stage.latest_kind

    return latest_kind
