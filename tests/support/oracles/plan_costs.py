"""What plans cost, for tests without the scheduler's program and for comparison with it.

It shares no code with the program: costs are added up here as docs/scheduler.md states them. Without bids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from pipeedge.base.schedule import LayerRange
from pipeedge.plan.conditions import Conditions, HostPair
from pipeedge.plan.costs import LimitingPart, MomentCosts, PlanCosts, StageCosts
from pipeedge.plan.live_choice import CostsOf
from pipeedge.plan.placing import PlacedStage, Placing
from pipeedge.plan.problem import HostKind, HostLink, Problem


def kind_of(problem: Problem, host: str) -> HostKind:
    return next(kind for kind in problem.kinds if kind.name == problem.hosts[host])


class DataWork:
    """The data rank's own work."""

    def __init__(self, problem: Problem) -> None:
        self._kind = None if problem.data_host is None else kind_of(problem, problem.data_host)

    def feeding_s(self, *, away: bool) -> float:
        kind = self._kind
        return 0.0 if kind is None else kind.feed_s + (kind.input_send_s if away else 0.0)

    def collecting_s(self, *, away: bool) -> float:
        kind = self._kind
        return 0.0 if kind is None else kind.collect_s + (kind.output_receive_s if away else 0.0)

    def beside_s(self, layers: LayerRange, n_layers: int) -> float:
        return self.feeding_s(away=layers.start > 0) + self.collecting_s(away=layers.stop < n_layers)


def data_work(problem: Problem) -> DataWork:
    return DataWork(problem)


def costs_of(problem: Problem) -> CostsOf:
    """Return what states the costs of plans, in place of the program."""

    def plan_costs(stages: Placing, present: Placing, moments: Sequence[Conditions]) -> PlanCosts:
        loads = host_loads(problem, present, stages)
        targets = [*(stage.host for stage in stages[1:]), problem.data_host]
        period = period_s(problem, stages)
        return PlanCosts(
            layers=len(problem.layers.elements_out),
            batch_size=problem.batch_size,
            schedule=tuple(
                StageCosts(
                    stage.host,
                    (stage.layers.first, stage.layers.last),
                    stage.bits,
                    stage.dtype,
                    compute_s=sum(
                        kind_of(problem, stage.host).time_s[stage.layers.start : stage.layers.stop]
                    ),
                    data_s=data_seconds(problem, stage),
                    link_in_s=0.0,
                    link_out_s=0.0 if target is None else link_seconds(problem, stage, target),
                    load_bytes=load,
                )
                for stage, target, load in zip(stages, targets, loads, strict=True)
            ),
            bottleneck=LimitingPart(""),
            bottleneck_s=period,
            latency_s=period,
            throughput_items_per_s=problem.batch_size / period,
            feed_s=0.0,
            collect_s=0.0,
            loss=0.0,
            losses_known=False,
            warnings=(),
            fits=fits_beside(problem, present, stages),
            moments=tuple(
                MomentCosts(
                    problem.batch_size, period_s(problem, stages, one), latency_s(problem, stages, one)
                )
                for one in moments
            ),
        )

    return lambda plans, present, moments: [plan_costs(plan, present, moments) for plan in plans]


def latency_s(problem: Problem, stages: Sequence[PlacedStage], conditions: Conditions) -> float:
    """Return the seconds of a microbatch in the stages alone."""
    return sum(conditions.of_host(stage.host) * stage_seconds(problem, stage) for stage in stages)


def period_s(problem: Problem, stages: Sequence[PlacedStage], conditions: Conditions | None = None) -> float:
    """Return the seconds between microbatches once the pipeline is full, as the scheduler counts them."""
    return max(_costs(problem, stages, conditions or Conditions()), default=0.0)


def _costs(problem: Problem, stages: Sequence[PlacedStage], conditions: Conditions) -> Iterator[float]:
    data = problem.data_host
    if data is not None:
        yield conditions.of_host(data) * feeding_seconds(problem, stages[0].host)
        yield conditions.of_host(data) * collecting_seconds(problem, stages[-1].host)
        slowness = conditions.links.get((data, stages[0].host), 1.0)
        yield slowness * input_seconds(problem, stages[0].host)
    for number, stage in enumerate(stages):
        seconds = stage_seconds(problem, stage) + data_seconds(problem, stage)
        yield conditions.of_host(stage.host) * seconds
        after = stages[number + 1].host if number + 1 < len(stages) else data
        if after is not None:
            slowness = conditions.links.get((stage.host, after), 1.0)
            yield slowness * link_seconds(problem, stage, after)


def stage_seconds(problem: Problem, stage: PlacedStage) -> float:
    """Return the seconds of a microbatch in a stage, its handling included."""
    kind, layers = kind_of(problem, stage.host), stage.layers
    if kind.stage_s:
        return kind.stage_s[layers.start][len(layers) - 1]
    seconds = sum(kind.time_s[layers.start : layers.stop])
    free_end = problem.data_host is None or problem.data_host == stage.host
    if kind.receive_s and not (free_end and layers.start == 0):
        seconds += kind.receive_s[layers.start]
    if kind.send_s and not (free_end and layers.stop == len(kind.send_s)):
        seconds += kind.send_s[layers.stop - 1]
    return seconds


def feeding_seconds(problem: Problem, first: str) -> float:
    """Return the seconds that the data rank takes to feed a microbatch to a first stage on ``first``."""
    return data_work(problem).feeding_s(away=first != problem.data_host)


def collecting_seconds(problem: Problem, last: str) -> float:
    """Return the seconds that the data rank takes to collect a microbatch of a last stage on ``last``."""
    return data_work(problem).collecting_s(away=last != problem.data_host)


def data_seconds(problem: Problem, stage: PlacedStage) -> float:
    """Return the seconds of a microbatch that the data rank's own work adds to a stage; 0 on other hosts."""
    if stage.host != problem.data_host:
        return 0.0
    return data_work(problem).beside_s(stage.layers, len(problem.layers.elements_out))


def input_seconds(problem: Problem, host: str) -> float:
    """Return the seconds of a microbatch from the data host to the first stage, on ``host``."""
    data = problem.data_host
    return 0.0 if data is None else _wire_seconds(problem, data, host, _cut_bytes(problem, 0))


def link_seconds(problem: Problem, stage: PlacedStage, after: str) -> float:
    """Return the seconds of a microbatch on the link from ``stage`` to the host ``after``."""
    size = _cut_bytes(problem, stage.layers.stop)
    if stage.bits and stage.layers.stop < len(problem.layers.elements_out):
        size *= stage.bits / (8 * problem.layers.element_bytes)
    return _wire_seconds(problem, stage.host, after, size)


def _wire_seconds(problem: Problem, source: str, target: str, size: float) -> float:
    """Return the seconds of ``size`` bytes from one host to another."""
    if source == target:
        return 0.0
    rate, latency_s = _speed(problem, source, target)
    if size <= 0:
        return latency_s
    return size / rate + latency_s if rate > 0 else math.inf


def held_bytes(problem: Problem, host: str, layers: LayerRange) -> float:
    """Return the memory of a stage as the scheduler counts it: weights, largest activation, and buffers."""
    kind = kind_of(problem, host)
    weights = kind.weight_bytes or problem.layers.weight_bytes
    shared = problem.layers.shared_with
    total = 0.0
    for layer in range(layers.start, layers.stop):
        source = shared[layer] - 1 if shared else -1
        already = weights[source] if source >= layers.start else 0.0
        total += max(0.0, weights[layer] - already)
    total += max(kind.activation_bytes[layers.start : layers.stop], default=0.0)
    before, after = problem.buffers
    return total + before * _cut_bytes(problem, layers.start) + after * _cut_bytes(problem, layers.stop)


def _cut_bytes(problem: Problem, layer: int) -> float:
    """Return the bytes of a microbatch at the cut before ``layer``."""
    sizes = problem.layers
    if layer == 0 and sizes.input_bytes is not None:
        return sizes.input_bytes * problem.batch_size
    if layer == len(sizes.elements_out) and sizes.output_bytes is not None:
        return sizes.output_bytes * problem.batch_size
    elements = sizes.elements_in if layer == 0 else sizes.elements_out[layer - 1]
    return elements * problem.batch_size * sizes.element_bytes


def _speed(problem: Problem, source: str, target: str) -> tuple[float, float]:
    """Return the bytes per second and the latency of a link. A link known in one direction holds for both."""
    for pair in ((source, target), (target, source)):
        for link in _links_of(problem.links, pair):
            return link.bw_bytes_per_s, link.latency_s
    return min(kind_of(problem, source).bw_bytes_per_s, kind_of(problem, target).bw_bytes_per_s), 0.0


def _links_of(links: Iterable[HostLink], pair: HostPair) -> Iterator[HostLink]:
    return (link for link in links if (link.source, link.target) == pair)


def fits_beside(problem: Problem, present: Sequence[PlacedStage], wanted: Sequence[PlacedStage]) -> bool:
    """Return whether every host has memory for the stages of both schedules."""
    new = {stage.host: stage.layers for stage in wanted}
    return all(
        stage.host not in new
        or new[stage.host] == stage.layers
        or _both_bytes(problem, stage, new[stage.host]) <= kind_of(problem, stage.host).mem_bytes * (1 + 1e-9)
        for stage in present
    )


def _both_bytes(problem: Problem, stage: PlacedStage, layers: LayerRange) -> float:
    """Return the memory of a stage and of other layers beside it. Weights that both have are held once."""
    both = held_bytes(problem, stage.host, layers) + held_bytes(problem, stage.host, stage.layers)
    return both - sum(_weights(problem, stage.host)[layer] for layer in _shared(problem, stage, layers))


def host_loads(
    problem: Problem, present: Sequence[PlacedStage], wanted: Sequence[PlacedStage]
) -> Iterator[float]:
    """Yield the bytes that the host of each wanted stage has to load."""
    before = {stage.host: stage for stage in present}
    for stage in wanted:
        weights, layers = _weights(problem, stage.host), range(stage.layers.start, stage.layers.stop)
        old = before.get(stage.host)
        if old is not None and old.layers == stage.layers:
            yield 0.0
            continue
        known = () if old is None else _shared(problem, old, stage.layers)
        yield float(sum(weights[layer] for layer in layers if layer not in known))


def _weights(problem: Problem, host: str) -> Sequence[float]:
    return kind_of(problem, host).weight_bytes or problem.layers.weight_bytes


def _shared(problem: Problem, stage: PlacedStage, layers: LayerRange) -> range:
    """Return the layers that a rank has already; none in a model whose layers share weights."""
    if any(problem.layers.shared_with):
        return range(0)
    return range(max(stage.layers.start, layers.start), min(stage.layers.stop, layers.stop))


def handover_s(problem: Problem, present: Sequence[PlacedStage], wanted: Sequence[PlacedStage]) -> float:
    """Return the seconds between the last result of a schedule and the first of that which takes over.

    A host computes what there is of the present schedule first. That nothing waits before its stages is the
    worst case: microbatches that wait leave time to the first one of the other schedule.

    Args:
        problem: The hosts with their measured times.
        present: Schedule that runs.
        wanted: Schedule that takes over.
    """
    free_s: dict[str, float] = {}  # when each host has computed all of the present schedule
    last_s = 0.0
    for stage, after in _with_next(present):
        last_s += stage_seconds(problem, stage)
        free_s[stage.host] = last_s
        last_s += link_seconds(problem, stage, after)
    first_s = 0.0
    for stage, after in _with_next(wanted):
        first_s = max(first_s, free_s.get(stage.host, 0.0)) + stage_seconds(problem, stage)
        first_s += link_seconds(problem, stage, after)
    return first_s - last_s


def _with_next(stages: Sequence[PlacedStage]) -> Iterator[tuple[PlacedStage, str]]:
    """Yield each stage with the host that follows it; nothing is sent after the last."""
    hosts = [stage.host for stage in stages]
    yield from zip(stages, [*hosts[1:], hosts[-1]], strict=True)


def _times(problem: Problem, stage: PlacedStage) -> Sequence[float]:
    return kind_of(problem, stage.host).time_s[stage.layers.start : stage.layers.stop]
