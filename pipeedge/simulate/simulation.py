"""Simulate a run: compute when each thread of the runtime would do what. Pure.

    [feed] ──link 0──> [stage 0] ──link 1──> ... [stage S-1] ──link S──> [collect]
    node 0              node 1                    node S                  node S+1

Every node takes a microbatch, works on it and passes it on; every link bounds how far a node runs ahead of
the next. For microbatch n, in the words of ``worker.py`` and ``transport/p2p_links.py``:

    taken(n)   = max(free(n-1), arrived_in(n))                 the node has time, and it is there
    done(n)    = taken(n) + work
    room(n)    = max(done(n), arrived(n-2))                    two frames under way
    posted(n)  = room(n) + send                                = free(n): the copy into the frame
    started(n) = max(posted(n), wire(n-1), taken_next(n-2))    two receives are posted, one more as soon as
                                                               one has been taken
    wire(n)    = started(n) + bytes / bandwidth
    arrived(n) = wire(n) + latency

A link in memory has no wire: room(n) = max(done(n), taken_next(n-2)), arrived(n) = posted(n). These
are sums and maxima of earlier moments only, so nothing is searched for: node i at microbatch n depends on
(i-1, n), (i, n-1) and (i+1, n-2), of which none lies on the diagonal i + n or beyond. One diagonal after
the other is computed, all of its nodes at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from pipeedge.observe.assembly import assemble
from pipeedge.observe.lanes import STAGE
from pipeedge.observe.records import LaneRecord, LinkRecord, Recording, Row, Transfer
from pipeedge.observe.timeline import LaneId, ThreadState, Timeline

__all__ = ["PipelineModel", "SimulatedLink", "SimulatedRun", "SimulatedStage", "simulate"]

_Seconds = NDArray[np.float64]

_PHASES = (*STAGE, ThreadState.ENCODE)
"""Phases of a simulated microbatch. Copying it into a frame, when the link has room, counts as encoding."""

KEPT_MOMENTS = 40_000
"""Microbatches times stages whose every moment is kept for a picture."""


@dataclass(frozen=True)
class SimulatedStage:
    """Seconds that a stage spends on one microbatch. Validated on creation.

    Raises:
        ValueError: A number is negative or not finite.
    """

    compute_s: float
    decode_s: float = 0.0
    """Seconds to receive and decode it."""
    encode_s: float = 0.0
    """Seconds to encode the output."""
    send_s: float = 0.0
    """Seconds to copy the output into a frame, once the link has room."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def busy_s(self) -> float:
        """Seconds that the stage is occupied by one microbatch, apart from its links."""
        return self.decode_s + self.compute_s + self.encode_s + self.send_s


@dataclass(frozen=True)
class SimulatedLink:
    """Seconds that one microbatch occupies a link. Validated on creation.

    Raises:
        ValueError: A number is negative or not finite, or a link in memory has a wire.
    """

    wire_s: float = 0.0
    """Seconds on the wire, bytes / bandwidth, during which no other frame is on it."""
    latency_s: float = 0.0
    """Further seconds until the frame arrives, in which the next may follow on the wire."""
    in_memory: bool = False
    """Whether both ends are on one rank, so that there is no wire."""

    def __post_init__(self) -> None:
        _check(self)
        if self.in_memory and (self.wire_s or self.latency_s):
            raise ValueError("a link in memory has no wire")


def _check(costs: object) -> None:
    for entry in fields(costs):  # type: ignore[arg-type]
        value = getattr(costs, entry.name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{entry.name} is {value}; it must be finite and not negative")


@dataclass(frozen=True)
class PipelineModel:
    """Costs of a pipeline's stages and links, and the length of its run. Validated on creation.

    Raises:
        ValueError: No stage, another number of links than stages + 1, or no microbatch.
    """

    stages: tuple[SimulatedStage, ...]
    links: tuple[SimulatedLink, ...]
    """Links into each stage, and the one from the last stage back to the data rank."""
    microbatches: int
    """Number of microbatches."""
    feed_s: float = 0.0
    """Seconds to read a microbatch of input and to feed it."""
    collect_s: float = 0.0
    """Seconds to take the results of a microbatch and to write them."""
    last_fraction: float = 1.0
    """Size of the last microbatch as a fraction of the others; its costs shrink by the same factor."""

    def __post_init__(self) -> None:
        if not self.stages or len(self.links) != len(self.stages) + 1:
            raise ValueError(f"{len(self.stages)} stages and {len(self.links)} links; links are one more")
        if self.microbatches < 1:
            raise ValueError(f"{self.microbatches} microbatches; there must be at least one")
        if not 0 < self.last_fraction <= 1:
            raise ValueError(f"a last microbatch of {self.last_fraction} of the others")
        for name in ("feed_s", "collect_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite and not negative")


@dataclass(frozen=True)
class _Moments:
    """Moments of some nodes in seconds, each array of shape (nodes, microbatches)."""

    nodes: tuple[int, ...]
    """Numbers of the nodes."""
    taken: _Seconds
    """Moments at which the node took each microbatch."""
    room: _Seconds
    """Moments at which its output was done and the link had room for it."""
    arrived: _Seconds
    """Moments at which the output arrived at the other end of the link."""

    @classmethod
    def empty(cls, nodes: Sequence[int], microbatches: int) -> _Moments:
        shape = (len(nodes), microbatches)
        return cls(tuple(nodes), np.empty(shape), np.empty(shape), np.empty(shape))


@dataclass(frozen=True)
class SimulatedRun:
    """A finished simulation. Times are seconds since reading began."""

    model: PipelineModel
    length_s: float
    """Seconds until the last result."""
    fed_at: _Seconds
    """Moments at which each microbatch was written into its frame, from which its latency counts; shape
    (microbatches,)."""
    result_at: _Seconds
    """Moments at which each result was collected; shape (microbatches,)."""
    fill_s: _Seconds
    """Seconds of each stage before its first microbatch, reading included; shape (stages,)."""
    drain_s: _Seconds
    """Seconds of each stage after its last microbatch; shape (stages,)."""
    wait_input_s: _Seconds
    """Seconds of each stage waiting for input after its first microbatch; shape (stages,)."""
    wait_link_s: _Seconds
    """Seconds of each stage waiting for room on its outgoing link; shape (stages,)."""
    occupied_s: _Seconds
    """Seconds in which a microbatch was on each link or waited to be taken; shape (stages + 1,)."""
    _moments: _Moments = field(repr=False)

    @property
    def latencies_s(self) -> _Seconds:
        """Seconds from data rank to data rank for each microbatch; shape (microbatches,)."""
        return self.result_at - self.fed_at

    @property
    def passes(self) -> float:
        """Number of microbatches, where the smaller last one counts as a fraction."""
        return self.model.microbatches - 1 + self.model.last_fraction

    def seconds(self, stage: int) -> Mapping[ThreadState, float]:
        """Return the seconds a stage spent on each activity. They add up to the length of the run."""
        costs = self.model.stages[stage]
        return {
            ThreadState.DECODE: costs.decode_s * self.passes,
            ThreadState.COMPUTE: costs.compute_s * self.passes,
            ThreadState.ENCODE: (costs.encode_s + costs.send_s) * self.passes,
            ThreadState.FILL: float(self.fill_s[stage]),
            ThreadState.DRAIN: float(self.drain_s[stage]),
            ThreadState.WAIT_INPUT: float(self.wait_input_s[stage]),
            ThreadState.WAIT_LINK: float(self.wait_link_s[stage]),
        }

    @property
    def drawn(self) -> tuple[int, ...]:
        """Stages for which every moment is known."""
        last = len(self.model.stages)
        return tuple(node - 1 for node in self._moments.nodes if 1 <= node <= last)

    def timeline(self, ranks: Sequence[int]) -> Timeline:
        """Return the spans of the stages in ``drawn`` and of their outgoing links.

        Args:
            ranks: Rank of each stage.
        """
        return assemble(self.recordings(ranks), 0.0, self.length_s)

    def recordings(
        self,
        ranks: Sequence[int],
        *,
        epoch: int = 0,
        since_s: float = 0.0,
        until_s: Callable[[int], float] = lambda _rank: math.inf,
    ) -> list[Recording]:
        """Return what the ranks would have recorded of the stages in ``drawn`` and of their outgoing links.

        Args:
            ranks: Rank of each stage.
            epoch: Number of the epoch, or 0 in a run that has none.
            since_s: Beginning of the epoch, in seconds from the beginning of the run.
            until_s: Returns the end of a rank's part in it, in seconds from the beginning of the run.
        """
        found = []
        for stage in self.drawn:
            left_s = until_s(ranks[stage]) - since_s
            link = (
                () if self.model.links[stage + 1].in_memory else (self._link_record(stage, since_s, left_s),)
            )
            lane = self._lane_record(stage, since_s, left_s)
            found.append(Recording(ranks[stage], "", (lane,), link, epoch=epoch))
        return found

    def posted(self, stage: int) -> _Seconds:
        """Return the moments at which each output of a stage in ``drawn`` was on its link."""
        room: _Seconds = self._moments.room[self._moments.nodes.index(stage + 1)]
        return room + self.model.stages[stage].send_s

    def windows(self, stage: int, points: int) -> Iterator[tuple[float, float, float]]:
        """Yield the output of a stage in ``drawn`` as windows: start, end (seconds) and microbatches.

        The smaller last microbatch counts as a fraction.

        Args:
            stage: Number of the stage.
            points: Maximum number of windows.
        """
        row = self._moments.nodes.index(stage + 1)
        count, posted = self.model.microbatches, self.posted(stage)
        size, since = -(-count // points), float(self._moments.taken[row, 0])
        for first in range(0, count, size):
            stop = min(count, first + size)
            until = float(posted[stop - 1])
            if until > since:
                yield since, until, stop - first - (1 - self.model.last_fraction) * (stop == count)
            since = until

    def _lane_record(self, stage: int, since_s: float, left_s: float) -> LaneRecord:
        """Return the lane of a stage, which begins at ``since_s`` and ends ``left_s`` later at the latest."""
        costs = self.model.stages[stage]
        row = self._moments.nodes.index(stage + 1)
        moments = zip(self._moments.taken[row].tolist(), self._moments.room[row].tolist(), strict=True)
        rows, free = [], float(self._moments.taken[row, 0])
        for number, (taken, room) in enumerate(moments):
            share = self.model.last_fraction if number == self.model.microbatches - 1 else 1.0
            work = tuple(seconds * share for seconds in (costs.decode_s, costs.compute_s, costs.encode_s))
            done, send = taken + sum(work), costs.send_s * share
            if free >= left_s:
                break
            seconds = _cut_off((max(0.0, taken - free), *work, max(0.0, room - done), send), left_s - free)
            rows.append(Row(number, 1, 0, 0, 0.0, since_s + free, seconds))
            free = max(room, done) + send
        return LaneRecord(LaneId.stage(stage), _PHASES, 0.0, tuple(rows))

    def _link_record(self, stage: int, since_s: float, left_s: float) -> LinkRecord:
        """Return the outgoing link of a stage, in an epoch as for ``_lane_record``."""
        row = self._moments.nodes.index(stage + 1)
        transfers, free = [], 0.0
        moments = zip(self.posted(stage).tolist(), self._moments.arrived[row].tolist(), strict=True)
        for number, (start, end) in enumerate(moments):
            if start >= left_s:
                break
            end = min(end, left_s)
            transfers.append(Transfer(number, 0, since_s + min(max(start, free), end), since_s + end))
            free = end
        return LinkRecord(LaneId.link(stage), None, tuple(transfers))


def _cut_off(seconds: Sequence[float], left_s: float) -> tuple[float, ...]:
    """Return the seconds of successive phases as far as they pass within ``left_s``."""
    found = []
    for each in seconds:
        found.append(min(each, left_s))
        left_s -= found[-1]
    return tuple(found)


def simulate(
    model: PipelineModel, *, kept_moments: int = KEPT_MOMENTS, drawn: Collection[int] = ()
) -> SimulatedRun:
    """Simulate a run of ``model``.

    Args:
        model: Costs of the pipeline.
        kept_moments: Maximum of stages times microbatches for which every moment is kept.
        drawn: Stages for which every moment is kept in any case.
    """
    count, stages = model.microbatches, len(model.stages)
    nodes = sorted({*_kept_nodes(stages, count, kept_moments), *(1 + stage for stage in drawn)})
    wavefront = _Wavefront(model, _Moments.empty(nodes, count))
    for diagonal in range(count + stages + 1):
        wavefront.step(diagonal)
    return wavefront.run()


def _kept_nodes(stages: int, microbatches: int, moments: int) -> list[int]:
    """Return the nodes whose moments are kept: feeder, collector, and stages evenly from first to last."""
    lanes = min(stages, max(2, moments // microbatches))
    chosen = {1 + round(lane * (stages - 1) / max(1, lanes - 1)) for lane in range(lanes)}
    return [0, *sorted(chosen), stages + 1]


class _Wavefront:
    """State of the simulation: the latest moments of all nodes, and their sums so far."""

    def __init__(self, model: PipelineModel, moments: _Moments) -> None:
        self._model = model
        self._moments = moments
        self._kept = np.array(moments.nodes)
        self._nodes = nodes = len(model.stages) + 2
        costs = [stage.decode_s + stage.compute_s + stage.encode_s for stage in model.stages]
        self._work = np.array([model.feed_s, *costs, model.collect_s])
        self._send = np.array([0.0, *(stage.send_s for stage in model.stages), 0.0])
        self._wire = np.array([*(link.wire_s for link in model.links), 0.0])
        self._latency = np.array([*(link.latency_s for link in model.links), 0.0])
        self._in_memory = np.array([*(link.in_memory for link in model.links), True])
        self._free = np.zeros(nodes + 1)
        # Behind each node its incoming link: the entry before that of the link it sends on.
        self._arrived = np.zeros(nodes + 1)
        self._arrived_before = np.zeros(nodes)
        self._on_wire_until = np.zeros(nodes)
        self._taken = np.zeros(nodes + 1)
        self._fill = np.zeros(nodes)
        self._wait_input = np.zeros(nodes)
        self._wait_link = np.zeros(nodes)
        self._occupied = np.zeros(nodes)

    def step(self, diagonal: int) -> None:
        """Let each node i take microbatch ``diagonal`` - i, if there is one."""
        low = max(0, diagonal - self._model.microbatches + 1)
        high = min(diagonal, self._nodes - 1) + 1
        here, after = slice(low, high), slice(low + 1, high + 1)
        work, send, wire = self._costs(diagonal, here)
        arrived_last = self._arrived[after]
        taken = np.maximum(self._free[here], self._arrived[here])
        done = taken + work
        room = np.maximum(
            done, np.where(self._in_memory[here], self._taken[after], self._arrived_before[here])
        )
        posted = room + send
        room_there = np.where(self._in_memory[here], 0.0, self._taken[after])
        started = np.maximum(np.maximum(posted, self._on_wire_until[here]), room_there)
        on_wire_until = started + wire
        arrived = on_wire_until + self._latency[here]

        self._wait_input[here] += taken - self._free[here]
        self._wait_link[here] += room - done
        self._occupied[here] += arrived - np.maximum(posted, arrived_last)
        if diagonal < self._nodes:  # the node at the tip takes its first
            self._fill[diagonal], self._wait_input[diagonal] = taken[-1], 0.0
        self._keep(diagonal, low, high, taken, room, arrived)

        self._arrived_before[here] = arrived_last
        self._arrived[after] = arrived
        self._on_wire_until[here] = on_wire_until
        self._free[here] = posted
        self._taken[here] = taken

    def _costs(self, diagonal: int, here: slice) -> tuple[_Seconds, _Seconds, _Seconds]:
        costs = self._work[here], self._send[here], self._wire[here]
        if diagonal - here.start != self._model.microbatches - 1 or self._model.last_fraction == 1:
            return costs
        work, send, wire = (cost.copy() for cost in costs)
        for cost in (work, send, wire):  # the node at the end is at the last microbatch
            cost[0] *= self._model.last_fraction
        return work, send, wire

    def _keep(
        self, diagonal: int, low: int, high: int, taken: _Seconds, room: _Seconds, arrived: _Seconds
    ) -> None:
        first, stop = np.searchsorted(self._kept, (low, high))
        rows = np.arange(first, stop)
        nodes = self._kept[first:stop]
        for kept, moments in (
            (self._moments.taken, taken),
            (self._moments.room, room),
            (self._moments.arrived, arrived),
        ):
            kept[rows, diagonal - nodes] = moments[nodes - low]

    def run(self) -> SimulatedRun:
        """Return the finished simulation."""
        result_at = self._moments.taken[-1]
        length = float(result_at[-1])
        inner = slice(1, self._nodes - 1)
        shares = np.ones(self._model.microbatches)
        shares[-1] = self._model.last_fraction
        read_at = self._moments.taken[0] + self._model.feed_s * shares
        fed_at = read_at if self._model.links[0].in_memory else self._moments.room[0]
        return SimulatedRun(
            model=self._model,
            length_s=length,
            fed_at=fed_at,
            result_at=result_at,
            fill_s=self._fill[inner],
            drain_s=length - self._free[inner],
            wait_input_s=self._wait_input[inner],
            wait_link_s=self._wait_link[inner],
            occupied_s=self._occupied[:-1],
            _moments=self._moments,
        )
