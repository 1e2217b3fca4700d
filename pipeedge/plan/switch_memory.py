"""The best schedule that can be loaded beside the one that runs. Pure: the solver is passed in.

While a plan takes over from another, a host holds the layers of both; weights that both have are held once.
The solver knows one limit of memory for each host, so the search branches where its answer needs more: that
host either keeps its layers, or has only the memory that they leave.

    every limit as profiled ──answer fits──> done
             └─ a host has too little ─┬─> this host keeps its layers, or has none
                                       └─> this host has what its layers leave

To the solver, a host that keeps its layers takes as long for some of them as for all. Where the answer gives
it only some, its neighbours leave it the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from pipeedge.base.errors import InfeasibleError
from pipeedge.base.schedule import LayerRange, Schedule
from pipeedge.plan.conditions import PlacedStage, held_bytes, period_s, stage_seconds
from pipeedge.plan.problem import HostKind, Problem

__all__ = ["best_beside", "fits_beside", "host_loads", "placed", "to_load_bytes"]

_MOST_SOLVED = 24
"""Largest number of problems that one search solves."""


def placed(schedule: Schedule, names: Sequence[str]) -> tuple[PlacedStage, ...]:
    """Return the stages of a schedule on the hosts that ``names`` has for its ranks."""
    return tuple(PlacedStage(names[one.rank], one.layers, one.quant_bits) for one in schedule.stages)


def fits_beside(problem: Problem, present: Sequence[PlacedStage], wanted: Sequence[PlacedStage]) -> bool:
    """Return whether every host has memory for the stages of both schedules."""
    return _too_large(problem, present, wanted) is None


def _too_large(
    problem: Problem,
    present: Sequence[PlacedStage],
    wanted: Sequence[PlacedStage],
    kept: frozenset[str] = frozenset(),
) -> PlacedStage | None:
    """Return a present stage that cannot be held beside what its host is to load, or None.

    Hosts that are ``kept`` load nothing.
    """
    new = {stage.host: stage.layers for stage in wanted}
    for stage in present:
        layers = new.get(stage.host)
        if layers is None or layers == stage.layers or stage.host in kept:
            continue
        if _both_bytes(problem, stage, layers) > problem.kind_of(stage.host).mem_bytes * (1 + 1e-9):
            return stage
    return None


def _both_bytes(problem: Problem, stage: PlacedStage, layers: LayerRange) -> float:
    """Return the memory of a stage and of other layers beside it. Weights that both have are held once."""
    both = held_bytes(problem, stage.host, layers) + held_bytes(problem, stage.host, stage.layers)
    return both - sum(_weights(problem, stage.host)[layer] for layer in _shared(problem, stage, layers))


def to_load_bytes(problem: Problem, present: Sequence[PlacedStage], wanted: Sequence[PlacedStage]) -> float:
    """Return the bytes that the host with the most to load has to load."""
    return max(host_loads(problem, present, wanted), default=0.0)


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
    return problem.kind_of(host).weight_bytes or problem.layers.weight_bytes


def _shared(problem: Problem, stage: PlacedStage, layers: LayerRange) -> range:
    """Return the layers that a rank has already; none in a model whose layers share weights."""
    if any(problem.layers.shared_with):
        return range(0)
    return range(max(stage.layers.start, layers.start), min(stage.layers.stop, layers.stop))


def best_beside(
    problem: Problem,
    present: Sequence[PlacedStage],
    solve: Callable[[Problem], Sequence[PlacedStage]],
) -> tuple[PlacedStage, ...]:
    """Return the best schedule for which every host has memory beside its present stage.

    It is the present one, if nothing better is found and all of its hosts may take part.

    Args:
        problem: The hosts that may take part, with their measured times.
        present: Schedule that runs.
        solve: The scheduler; raises InfeasibleError if there is no schedule.

    Raises:
        InfeasibleError: A host of the present schedule may not take part, and no other schedule was found.
    """
    best: tuple[PlacedStage, ...] | None = None
    best_s = math.inf
    if all(stage.host in problem.hosts for stage in present):
        best, best_s = tuple(present), period_s(problem, present)
    waiting: list[tuple[Problem, frozenset[str]]] = [(problem, frozenset())]
    solved = 0
    while waiting and solved < _MOST_SOLVED:
        tried, kept = waiting.pop()
        solved += 1
        try:
            found = tuple(solve(tried))
        except InfeasibleError:
            continue
        if period_s(tried, found) >= best_s:
            continue  # tighter limits only make it worse
        stage = _too_large(problem, present, found, kept)
        if stage is not None:
            waiting += [
                (_with_rest(tried, problem, stage), kept),
                (_with_kept(tried, stage), kept | {stage.host}),
            ]
            continue
        found = _completed(found, [stage for stage in present if stage.host in kept])
        if fits_beside(problem, present, found) and period_s(problem, found) < best_s:
            best, best_s = found, period_s(problem, found)
    if best is None:
        raise InfeasibleError("no schedule of the hosts that may take part fits beside the present one")
    return best


def _completed(found: tuple[PlacedStage, ...], kept: Sequence[PlacedStage]) -> tuple[PlacedStage, ...]:
    """Return the schedule in which hosts that keep their layers have all of them."""
    for stage in kept:
        place = next((number for number, one in enumerate(found) if one.host == stage.host), None)
        if place is None:
            continue
        start, stop = stage.layers.start, stage.layers.stop
        before = (_part(one, one.layers.start, min(one.layers.stop, start)) for one in found[:place])
        after = (_part(one, max(one.layers.start, stop), one.layers.stop) for one in found[place + 1 :])
        whole = dataclasses.replace(found[place], layers=stage.layers)
        found = (*(one for one in before if one), whole, *(one for one in after if one))
    return found


def _part(stage: PlacedStage, start: int, stop: int) -> PlacedStage | None:
    return dataclasses.replace(stage, layers=LayerRange(start, stop)) if start < stop else None


def _with_rest(tried: Problem, problem: Problem, stage: PlacedStage) -> Problem:
    """Return the problem in which a host has the memory that its present stage leaves, and those layers."""
    kind, weights = tried.kind_of(stage.host), list(_weights(problem, stage.host))
    for layer in _shared(problem, stage, stage.layers):
        weights[layer] = 0.0
    rest = dataclasses.replace(
        kind,
        name=f"{kind.name}, beside {stage.host}",
        mem_bytes=max(0.0, kind.mem_bytes - held_bytes(problem, stage.host, stage.layers)),
        weight_bytes=tuple(weights),
    )
    return _with_kind(tried, stage.host, rest)


def _with_kept(tried: Problem, stage: PlacedStage) -> Problem:
    """Return the problem in which a host can only have layers that it has, in the time of all of them."""
    kind = tried.kind_of(stage.host)
    layers, seconds = len(tried.layers.elements_out), stage_seconds(tried, stage)
    rows = [
        [seconds if stage.layers.start <= first and last <= stage.layers.stop else math.inf for last in lasts]
        for first in range(layers)
        for lasts in [range(first + 1, layers + 1)]
    ]
    kept = HostKind(
        f"{kind.name}, kept on {stage.host}",
        0.0,
        kind.bw_bytes_per_s,
        stage_s=tuple(map(tuple, rows)),
        feed_s=kind.feed_s,
        collect_s=kind.collect_s,
        input_send_s=kind.input_send_s,
        output_receive_s=kind.output_receive_s,
        dtype=kind.dtype,
        threads=kind.threads,
        tokens=kind.tokens,
        kernels=kind.kernels,
    )
    return _with_kind(tried, stage.host, kept)


def _with_kind(problem: Problem, host: str, kind: HostKind) -> Problem:
    hosts = {**problem.hosts, host: kind.name}
    used = set(hosts.values())
    kinds = (*(one for one in problem.kinds if one.name in used), kind)
    return dataclasses.replace(problem, kinds=kinds, hosts=hosts)
