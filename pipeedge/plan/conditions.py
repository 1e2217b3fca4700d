"""The hosts and links of a cluster as a run finds them, compared with their profiles. Pure.

    window of a run ──measured──> Conditions ──with_conditions──> Problem with the measured numbers
                                            └─period_s──> seconds of a microbatch with any schedule

A host's *slowness* is the time that its layers take, as a multiple of what its profile says; a link's is the
same for its time a byte. Layers that a host has not run yet scale with those that it has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pipeedge.base.schedule import LayerRange
from pipeedge.plan.problem import HostKind, HostLink, Problem

__all__ = [
    "Conditions",
    "HostPair",
    "PlacedStage",
    "StageFigures",
    "collecting_seconds",
    "data_seconds",
    "feeding_seconds",
    "held_bytes",
    "input_seconds",
    "link_seconds",
    "measured",
    "period_s",
    "stage_seconds",
    "with_conditions",
]

HostPair: TypeAlias = tuple[str, str]
"""Sending and receiving host of a link."""

_FELT = 0.2
"""Part of the period below which the time of a link does not matter, so that it is not measured."""


@dataclass(frozen=True)
class PlacedStage:
    """A stage of a schedule, as far as its speed depends on it."""

    host: str
    layers: LayerRange
    bits: int = 0
    """Bits per value on its outgoing link; 0 if the values travel as they are."""


@dataclass(frozen=True)
class StageFigures:
    """Measurements of one stage during a window."""

    compute_s: float
    """Seconds spent computing an item."""
    link_s: float | None = None
    """Seconds of an item on the outgoing link, or None if that is not measured."""


@dataclass(frozen=True)
class Conditions:
    """Slowness of hosts and links. Those that are missing are as slow as ``common`` says."""

    hosts: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[HostPair, float] = field(default_factory=dict)
    common: float = 1.0
    """Slowness of hosts that are not measured."""

    @property
    def as_profiled(self) -> bool:
        """Whether everything is as the profiles say."""
        return all(one == 1.0 for one in (*self.hosts.values(), *self.links.values(), self.common))

    def of_host(self, host: str) -> float:
        """Return the slowness of ``host``."""
        return self.hosts.get(host, self.common)


def measured(
    problem: Problem, stages: Sequence[PlacedStage], figures: Sequence[StageFigures], *, varying: bool = False
) -> Conditions:
    """Return the conditions that explain what was measured.

    Args:
        problem: The profiles.
        stages: Schedule that was measured.
        figures: Measurements of its stages.
        varying: Whether items differ in size, like sentences. Then what all hosts have in common says
            something about the input, and holds for hosts without a stage as well.
    """
    hosts = {}
    for stage, figure in zip(stages, figures, strict=True):
        promised = sum(problem.kind_of(stage.host).time_s[stage.layers.start : stage.layers.stop])
        if promised > 0:
            seconds = figure.compute_s * problem.batch_size
            hosts[stage.host] = _without(data_seconds(problem, stage), seconds, promised) / promised
    common = sorted(hosts.values())[(len(hosts) - 1) // 2] if varying and len(hosts) > 1 else 1.0
    found = Conditions(hosts, {}, common)
    period = period_s(problem, stages, found)
    links = {}
    for number, (stage, figure) in enumerate(zip(stages, figures, strict=True)):
        after = stages[number + 1].host if number + 1 < len(stages) else problem.data_host
        seconds = 0.0 if figure.link_s is None else figure.link_s * problem.batch_size
        promised = 0.0 if after is None else link_seconds(problem, stage, after)
        if after is not None and promised > 0 and seconds >= _FELT * period:
            links[stage.host, after] = seconds / promised
    return dataclasses.replace(found, links=links)


def _without(own_s: float, seconds: float, promised: float) -> float:
    """Return the seconds of the layers alone, where the data rank's own work may have delayed them."""
    return min(seconds, max(promised, seconds - own_s))


def with_conditions(problem: Problem, conditions: Conditions) -> Problem:
    """Return the problem with the measured times of hosts and links."""
    kinds = {kind.name: kind for kind in problem.kinds}
    hosts = dict(problem.hosts)
    for host, name in problem.hosts.items():
        slowness = conditions.of_host(host)
        if slowness != 1.0:
            scaled = _slowed(kinds[name], slowness)
            kinds[scaled.name] = scaled
            hosts[host] = scaled.name
    known = {(link.source, link.target): link for link in problem.links}
    for pair, slowness in conditions.links.items():
        if pair[0] in hosts and pair[1] in hosts:
            rate, latency_s = _speed(problem, *pair)
            # A measured link says nothing about the other direction, which the scheduler takes for the same.
            other = (pair[1], pair[0])
            if other not in known:
                known[other] = HostLink(*other, rate, latency_s)
            known[pair] = HostLink(*pair, rate / slowness, latency_s * slowness)
    used = set(hosts.values())
    return dataclasses.replace(
        problem,
        kinds=tuple(kind for kind in kinds.values() if kind.name in used),
        hosts=hosts,
        links=tuple(known.values()),
    )


def _slowed(kind: HostKind, slowness: float) -> HostKind:
    def longer(seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(slowness * each for each in seconds)

    return dataclasses.replace(
        kind,
        name=f"{kind.name} x {slowness:.6g}",
        time_s=longer(kind.time_s),
        receive_s=longer(kind.receive_s),
        send_s=longer(kind.send_s),
    )


def period_s(problem: Problem, stages: Sequence[PlacedStage], conditions: Conditions | None = None) -> float:
    """Return the seconds between microbatches once the pipeline is full, as the scheduler counts them."""
    return max(_costs(problem, stages, conditions or Conditions()), default=0.0)


def _costs(problem: Problem, stages: Sequence[PlacedStage], conditions: Conditions) -> Iterator[float]:
    data = problem.data_host
    if data is not None:
        yield feeding_seconds(problem, stages[0].host)
        yield collecting_seconds(problem, stages[-1].host)
        slowness = conditions.links.get((data, stages[0].host), 1.0)
        yield slowness * input_seconds(problem, stages[0].host)
    for number, stage in enumerate(stages):
        yield conditions.of_host(stage.host) * stage_seconds(problem, stage) + data_seconds(problem, stage)
        after = stages[number + 1].host if number + 1 < len(stages) else data
        if after is not None:
            slowness = conditions.links.get((stage.host, after), 1.0)
            yield slowness * link_seconds(problem, stage, after)


def stage_seconds(problem: Problem, stage: PlacedStage) -> float:
    """Return the seconds of a microbatch in a stage, its handling included."""
    kind, layers = problem.kind_of(stage.host), stage.layers
    if kind.stage_s:
        return kind.stage_s[layers.start][len(layers) - 1]
    seconds = kind.overhead_s + sum(kind.time_s[layers.start : layers.stop])
    free_end = problem.data_host is None or problem.data_host == stage.host
    if kind.receive_s and not (free_end and layers.start == 0):
        seconds += kind.receive_s[layers.start]
    if kind.send_s and not (free_end and layers.stop == len(kind.send_s)):
        seconds += kind.send_s[layers.stop - 1]
    return seconds


def feeding_seconds(problem: Problem, first: str) -> float:
    """Return the seconds that the data rank takes to feed a microbatch to a first stage on ``first``."""
    return problem.data_work.feeding_s(away=first != problem.data_host)


def collecting_seconds(problem: Problem, last: str) -> float:
    """Return the seconds that the data rank takes to collect a microbatch of a last stage on ``last``."""
    return problem.data_work.collecting_s(away=last != problem.data_host)


def data_seconds(problem: Problem, stage: PlacedStage) -> float:
    """Return the seconds of a microbatch that the data rank's own work adds to a stage; 0 on other hosts."""
    if stage.host != problem.data_host:
        return 0.0
    return problem.data_work.beside_s(stage.layers, len(problem.layers.elements_out))


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
    kind = problem.kind_of(host)
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
    return min(problem.kind_of(source).bw_bytes_per_s, problem.kind_of(target).bw_bytes_per_s), 0.0


def _links_of(links: Iterable[HostLink], pair: HostPair) -> Iterator[HostLink]:
    return (link for link in links if (link.source, link.target) == pair)
