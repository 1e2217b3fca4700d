"""Rehearse a stage as a run has it, to find what it costs besides its parts.

    data rank   input  ──> [stage: take it, compute] ──> [collect] ──> results
    links       frames ──> link ──> [stage: receive, compute, send] ──> link ──> frames released

Layers, frames and the data rank are measured one at a time, each by a loop that finds all it needs in the
caches of its core. In a run, the threads of a rank take turns several times a microbatch, and each finds
what the others have left. That costs a stage 0.1 to 0.2 ms a microbatch, however many layers it has: little
beside layers that take 20 ms, and a third more if they take 0.5 ms.

So a small model is run once more by the runtime's own threads, links and loops, at full speed. What the stage
takes on the data rank besides its layers is the overhead of any stage; what it takes over a transport besides
these two is handling; what taking the input and collecting take is the data rank's own work.

The steps of a decoder are rehearsed whatever its size, one after the other. So all that lies between two of
them is work of the data rank, and of the threads that hand them over to one another. With links in between,
it also holds what two of these take at both ends, by caches that weights have just passed through. There, the
processor idles before and after each step, as it does while other stages compute: it wakes up slowly.

    stage       . ██ step 1 ██ .                    . ██ step 2 ██ .
    links                        ──>             ──>
    data rank                        score, make
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from pipeedge.base.crew import Crew
from pipeedge.base.errors import PipeEdgeError
from pipeedge.base.payload import Payload, TensorSpec, specs_bytes
from pipeedge.plan.specs import TransportHandling
from pipeedge.profile.data_work import DataRank, DataWork
from pipeedge.profile.handling import Handling
from pipeedge.profile.measuring import without_delays
from pipeedge.profile.transport_costs import open_ends
from pipeedge.run.activity import Activity
from pipeedge.run.worker import Incoming, Outgoing, SendingEnd, StageLoop, StageSteps
from pipeedge.transport.base import Link, Packet, PacketSource, Reserved, Transport, unbound
from pipeedge.transport.loopback import LocalLink

__all__ = [
    "LONGEST_PASS_S",
    "AtWork",
    "OpenDataRank",
    "Rehearsal",
    "ReserveMemory",
    "StepLinks",
    "StepsAtWork",
    "StepsRehearsal",
    "rehearse_data_rank",
    "rehearse_in_turn",
    "rehearse_links",
    "rehearse_steps",
    "step_handling",
]

LONGEST_PASS_S = 0.005
"""Seconds of the longest pass that is rehearsed: in a longer one, the difference would drown in its noise."""
ROUNDS = 3
_ROUND_S = 0.3
_LEAST_MICROBATCHES = 20
_IDLE_S = 0.003
"""Seconds for which a stage waits for others before and after a step."""
_ONE_END = "rpc"
"""Transport of which a process has one end only, so that no frame can go to a stage and back."""

OpenDataRank: TypeAlias = Callable[[int, LocalLink], AbstractContextManager[DataRank]]
"""Opens a data rank for a number of microbatches, with the link from the last stage."""
ReserveMemory: TypeAlias = Callable[[Sequence[TensorSpec]], Reserved]
"""Reserves memory for a payload."""
OpenTextRank: TypeAlias = Callable[[PacketSource, ReserveMemory], AbstractContextManager[DataRank]]
"""Opens the data rank of a decoder, with the link from its stage and the memory of that to it."""


@dataclass(frozen=True)
class Rehearsal:
    """A stage to rehearse, and the conditions."""

    compute: Callable[[Packet], Packet]
    """Computes a microbatch."""
    payload: Payload
    """Input of the stage, as it arrives."""
    pass_s: float
    """Seconds of its layers for a microbatch, as measured by themselves."""
    whole_process: bool
    """Whether all threads of a rank share the processor of the one that computes."""
    stretch: float = 1.0
    """Elapsed seconds per second of processor time."""

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a round."""
        return max(_LEAST_MICROBATCHES, int(_ROUND_S * self.stretch / max(self.pass_s, 1e-4)))


@dataclass(frozen=True)
class AtWork:
    """Costs of a microbatch in a rank that works on several."""

    overhead_s: float
    """Seconds of any stage besides its layers and links."""
    data_work: DataWork
    """Costs of the data rank beside a stage."""


def rehearse_data_rank(
    stage: Rehearsal, outputs: Payload, open_rank: OpenDataRank, known: DataWork
) -> AtWork:
    """Return the costs of a stage on the data rank, where no link takes time.

    Args:
        stage: The stage.
        outputs: Outputs of the model's last layer, which the stage need not have.
        open_rank: Opens the data rank.
        known: Costs of the data rank by itself, which are its least.
    """

    def compute(packet: Packet) -> Packet:
        stage.compute(Packet(packet.number, packet.items, stage.payload))
        packet.lease.release()
        return Packet(packet.number, packet.items, outputs)

    rounds = []
    for _ in range(ROUNDS):
        activity, count, computed = Activity(), stage.microbatches, LocalLink()
        crew = Crew()
        crew.on_stop(computed.close)
        with open_rank(count, computed) as rank:
            fed = _TimedSource(rank.feeder)
            outgoing = Outgoing(SendingEnd(computed), activity)
            loop = StageLoop(StageSteps(compute), Incoming(fed, None, activity), outgoing, activity)
            rank.stream.start(crew)
            spent_s, others_s = _spent(crew, {"stage": loop.run, "collect": rank.collector.run})
        # The other threads read the input.
        feed_s = fed.spent_s + (others_s if stage.whole_process else 0.0)
        parts = spent_s["stage"] - fed.spent_s, feed_s, spent_s["collect"]
        rounds.append([stage.stretch * each / count for each in parts])
    stage_s, feed_s, collect_s = (statistics.median(each) for each in zip(*rounds, strict=True))
    return AtWork(
        max(0.0, stage_s - stage.pass_s),
        DataWork(max(known.feed_s, feed_s), max(known.collect_s, collect_s)),
    )


@dataclass(frozen=True)
class StepsAtWork:
    """Costs of a step of a decoder in a rank that works, besides the layers."""

    stage_s: float
    """Seconds of the stage."""
    data_s: float
    """Seconds of the data rank, with its head."""


@dataclass(frozen=True)
class StepsRehearsal:
    """Steps to rehearse."""

    texts: int
    """Number of texts that grow at a time."""
    transport: str | None = None
    """Transport that they cross, or None if the stage is on the data rank."""

    @classmethod
    def over(cls, texts: int, transports: Iterable[str]) -> list[StepsRehearsal]:
        """Return those over each of the transports of which a process can have both ends."""
        return [cls(texts, name) for name in transports if name != _ONE_END]


@dataclass(frozen=True)
class StepLinks:
    """Links between a data rank and the stage of a decoder, to be opened in one process."""

    transport: str
    there: tuple[TensorSpec, ...]
    """Specification of the largest step."""
    back: tuple[TensorSpec, ...]
    """Specification of its result."""


def rehearse_steps(
    compute: Callable[[Packet], tuple[Packet, float]],
    open_rank: OpenTextRank,
    clock: Callable[[], float],
    links: StepLinks | None = None,
) -> StepsAtWork:
    """Return what steps cost besides the layers, in a rank that has nothing else to do.

    Args:
        compute: Computes a step; returns also the seconds of the stage besides the layers.
        open_rank: Opens the data rank.
        clock: Time of the process in seconds, by which the data rank's work counts.
        links: Links that steps cross, which then count with that work; None if the stage is on the data rank.

    Raises:
        PipeEdgeError: The machine forbids the links, or a step failed.
    """
    stage_s: list[float] = []
    moments: list[tuple[float, float]] = []

    def timed(packet: Packet) -> Packet:
        came = clock()
        idle()
        found, besides_s = compute(packet)
        idle()
        moments.append((came, clock()))
        stage_s.append(besides_s)
        return found

    def idle() -> None:
        if links is not None:
            time.sleep(_IDLE_S)

    activity, crew = Activity(), Crew()
    with ExitStack() as stack:
        if links is None:
            computed = LocalLink()
            crew.on_stop(computed.close)
            rank = stack.enter_context(open_rank(computed, unbound))
            outgoing, incoming = SendingEnd(computed), Incoming(rank.feeder, None, activity)
        else:
            outside, inside, (outer, inner) = stack.enter_context(open_ends(links.transport))
            there, back = Link(outer, inner, links.there), Link(inner, outer, links.back)
            for end in (outside, inside):
                crew.on_stop(end.abort)
            feeding = Outgoing(SendingEnd(outside.sender(there), inner), activity)
            rank = stack.enter_context(open_rank(outside.receiver(back), feeding.reserve))
            outgoing = SendingEnd(inside.sender(back), outer)
            incoming = Incoming(inside.receiver(there), outer, activity)
            crew.start("feed", lambda: rank.feeder.run(feeding))
            crew.start("watch", feeding.run)
        sending = Outgoing(outgoing, activity)
        loop = StageLoop(StageSteps(timed), incoming, sending, activity)
        rank.stream.start(crew)
        for name, work in (("stage", loop.run), ("watch", sending.run), ("collect", rank.collector.run)):
            crew.start(name, work)
        crew.wait()
    data_s = [came - left for (_, left), (came, _) in pairwise(moments)]
    return StepsAtWork(*(float(without_delays(each).mean()) for each in (stage_s, data_s)))


def rehearse_in_turn(
    rehearse: Callable[[StepsRehearsal], StepsAtWork],
    local: Sequence[StepsRehearsal],
    over_links: Sequence[StepsRehearsal],
) -> dict[StepsRehearsal, tuple[StepsAtWork, ...]]:
    """Rehearse steps several times in turn, so that a drift of the machine affects all alike.

    Args:
        rehearse: Rehearses steps of one kind.
        local: Kinds whose stage is on the data rank.
        over_links: Kinds whose steps cross links. Those that the machine forbids are left out.

    Raises:
        PipeEdgeError: A step of the data rank's own stage failed.
    """
    found: dict[StepsRehearsal, tuple[StepsAtWork, ...]] = {}
    forbidden = set()
    for _ in range(ROUNDS):
        for kind in local:
            found[kind] = (*found.get(kind, ()), rehearse(kind))
        for kind in over_links:
            if kind not in forbidden:
                try:
                    found[kind] = (*found.get(kind, ()), rehearse(kind))
                except PipeEdgeError:  # as it will in a run
                    forbidden.add(kind)
                    found.pop(kind, None)
    return found


def step_handling(
    rounds: Mapping[StepsRehearsal, Sequence[StepsAtWork]],
    frames: Handling,
    known: Mapping[str, TransportHandling],
    stretch: float = 1.0,
) -> dict[str, TransportHandling]:
    """Return what each transport costs a stage of a decoder, or the data rank, for a step.

    Args:
        rounds: What ``rehearse_in_turn`` found, on the data rank and over transports.
        frames: Seconds to read a frame of a step and to write one.
        known: Costs of each transport by itself.
        stretch: Elapsed seconds per second of the clock by which steps were rehearsed.
    """
    costs = dict(known)
    for kind, over_links in rounds.items():
        if kind.transport is None:
            continue
        local = rounds[replace(kind, transport=None)]
        more_s = [
            (over.data_s - one.data_s, over.stage_s - one.stage_s)
            for one, over in zip(local, over_links, strict=True)
        ]
        data_s, stage_s = (stretch * statistics.median(each) for each in zip(*more_s, strict=True))
        # Each of the two links has a sender and a receiver. The stage takes longer where it has waited.
        both_s, own = data_s / 2 - frames.receive_s - frames.send_s, known[kind.transport]
        receive_s, send_s = _shared(max(0.0, both_s), own.receive_s, own.send_s)
        costs[kind.transport] = replace(own, receive_s=receive_s + max(0.0, stage_s), send_s=send_s)
    return costs


@dataclass
class _TimedSource:
    """A source that adds up the processor time of the thread that takes from it."""

    source: PacketSource
    spent_s: float = 0.0

    def receive(self) -> Packet | None:
        """Return the next packet, or None after the last."""
        began = time.thread_time()
        packet = self.source.receive()
        self.spent_s += time.thread_time() - began
        return packet


def rehearse_links(
    stage: Rehearsal, overhead_s: float, frames: Handling, known: Mapping[str, TransportHandling]
) -> dict[str, TransportHandling]:
    """Return what each transport costs a stage that runs.

    Args:
        stage: The stage.
        overhead_s: Seconds of any stage besides its layers and links.
        frames: Seconds to read a frame of its input and to write one of its output.
        known: Costs of each transport by itself.
    """
    inputs = _specs(stage.payload)
    outputs = _specs(stage.compute(Packet(0, len(stage.payload[0]), stage.payload)).payload)
    found = dict(known)
    for name, costs in known.items():
        if name == _ONE_END:
            continue
        try:
            stage_s = stage.stretch * _stage_seconds(name, stage, inputs, outputs)
        except PipeEdgeError:  # the machine forbids it, as it will in a run
            continue
        parts_s = stage.pass_s + overhead_s + frames.receive_s + frames.send_s
        parts_s += costs.receive_s_per_byte * specs_bytes(inputs)
        parts_s += costs.send_s_per_byte * specs_bytes(outputs)
        receive_s, send_s = _shared(max(0.0, stage_s - parts_s), costs.receive_s, costs.send_s)
        found[name] = replace(costs, receive_s=receive_s, send_s=send_s)
    return found


def _stage_seconds(
    name: str, stage: Rehearsal, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> float:
    """Return the processor seconds that a microbatch takes in a stage between two links."""
    with open_ends(name) as (outside, inside, ranks):
        outer, inner = ranks
        links = Link(outer, inner, inputs), Link(inner, outer, outputs)
        _pass_through(outside, inside, links, stage, _LEAST_MICROBATCHES)  # warms up
        return statistics.median(
            _pass_through(outside, inside, links, stage, stage.microbatches) for _ in range(ROUNDS)
        )


def _pass_through(
    outside: Transport, inside: Transport, links: tuple[Link, Link], stage: Rehearsal, count: int
) -> float:
    """Send ``count`` frames through ``stage``, and return the mean processor seconds of one there."""
    there, back = links
    activity = Activity()
    feeding = Outgoing(SendingEnd(outside.sender(there), there.destination), activity)
    incoming = Incoming(inside.receiver(there), there.source, activity)
    outgoing = Outgoing(SendingEnd(inside.sender(back), back.destination), activity)
    collecting = Incoming(outside.receiver(back), back.source, activity)

    def feed() -> None:
        for number in range(count):
            memory = feeding.reserve(there.specs)
            for part, value in zip(memory.payload, stage.payload, strict=True):
                part.copy_(value)
            feeding.send(Packet(number, len(stage.payload[0]), memory.payload, memory.lease))
        feeding.finish()

    def collect() -> None:
        while (packet := collecting.receive()) is not None:
            packet.lease.release()

    crew = Crew()
    for end in (outside, inside):
        crew.on_stop(end.abort)
    loop = StageLoop(StageSteps(stage.compute), incoming, outgoing, activity)
    work = {"stage": loop.run, "watch": outgoing.run, "feed": feed, "collect": collect, "other": feeding.run}
    spent_s, others_s = _spent(crew, work)
    # The threads that move bytes work for both ends alike.
    return (spent_s["stage"] + spent_s["watch"] + (others_s / 2 if stage.whole_process else 0.0)) / count


def _spent(crew: Crew, work: Mapping[str, Callable[[], None]]) -> tuple[dict[str, float], float]:
    """Do all ``work`` at once; return the processor seconds of each thread, and of all other threads."""
    spent_s: dict[str, float] = {}

    def timed(name: str, call: Callable[[], None]) -> None:
        began = time.thread_time()
        call()
        spent_s[name] = time.thread_time() - began

    began = time.process_time()
    for name, call in work.items():
        crew.start(name, lambda name=name, call=call: timed(name, call))  # type: ignore[misc]
    crew.wait()
    return spent_s, max(0.0, time.process_time() - began - sum(spent_s.values()))


def _shared(seconds: float, first_s: float, second_s: float) -> tuple[float, float]:
    """Divide ``seconds`` as two known times divide theirs, or equally if both are 0."""
    whole_s = first_s + second_s
    part = first_s / whole_s if whole_s else 0.5
    return part * seconds, (1 - part) * seconds


def _specs(payload: Payload) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in payload)
