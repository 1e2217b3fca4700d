"""Keep the hosts of a running pipeline in their order when it gets another plan. Pure.

    present   a: 1-12   b: 13-25  c: 26-38  d: 39-48
    found     a: 1-14   c: 15-21  d: 22-33  b: 34-48     as fast, but b, c and d load all layers anew
    kept      a: 1-14   b: 15-27  c: 28-34  d: 35-48

The scheduler may return any of the schedules with the shortest period. In that with the hosts in their order,
less has to be loaded, and less lies between the last result of one plan and the first of the other.

A host that joins makes the way longer. At the end of the schedule, it gets the first new microbatch
only when all others have computed the old plan: where three equal hosts become four, its result comes
1.5 periods after the last one. A new host that is the second stage computes meanwhile, and it is one period:

    a  oooonnn                   a  oooonnn                    o  last microbatch of the present schedule
    b      oooonnn               d         nnn                 n  first one of the new schedule
    c          oooonnn           b      oooo  nnn
    d                 nnn        c          oooo nnn           the period is 4
                   |----| 6                     |--| 4
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeedge.base.schedule import LayerRange
from pipeedge.plan.conditions import (
    PlacedStage,
    data_seconds,
    held_bytes,
    link_seconds,
    period_s,
    stage_seconds,
)
from pipeedge.plan.problem import Problem
from pipeedge.plan.switch_memory import fits_beside, host_loads

__all__ = ["handover_s", "in_present_order"]

_SLOWER = 1.02
"""Largest ratio of the period to that of the schedule that was found."""
_UNNOTICED = 1.1
"""Periods between two results up to which a shorter time is worth nothing."""


def in_present_order(
    problem: Problem, present: Sequence[PlacedStage], found: Sequence[PlacedStage]
) -> tuple[PlacedStage, ...]:
    """Return a schedule about as fast as ``found`` that keeps its hosts in the order that they have.

    A host that is new stands where the first result comes soonest after the last of the present schedule
    and, if that makes no difference, where the least has to be loaded. Where no such schedule is fast
    enough, or bits were chosen for the links of ``found``, that is returned as it is.

    Args:
        problem: The hosts with their measured times.
        present: Schedule that runs.
        found: Best schedule for the problem.
    """
    best = tuple(found)
    if any(stage.bits for stage in found):
        return best
    limit_s = _SLOWER * period_s(problem, found)
    held = {stage.host: stage for stage in present}
    least = _costs(problem, present, found)
    for hosts in _orders([stage.host for stage in present], [stage.host for stage in found]):
        stages = _cut(problem, held, hosts, limit_s)
        if stages is None or period_s(problem, stages) > limit_s or not fits_beside(problem, present, stages):
            continue
        costs = _costs(problem, present, stages)
        if costs < least:
            best, least = stages, costs
    return best


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


def _orders(present: Sequence[str], found: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the orders of the hosts of ``found`` in which those that are present keep theirs."""
    kept = [host for host in present if host in found]
    new = [host for host in found if host not in present]
    if len(new) > 1:
        return
    for place in range(len(kept) + 1) if new else (0,):
        yield (*kept[:place], *new, *kept[place:])


def _costs(
    problem: Problem, present: Sequence[PlacedStage], stages: Sequence[PlacedStage]
) -> tuple[float, float, float]:
    """Return what a change to other stages costs, the most important first.

    That is the time without a result, as far as it is noticed, the bytes that the host with the most to load
    has to load, and those of all together.
    """
    loads = list(host_loads(problem, present, stages))
    gap_s = 0.0
    if all(stage.host in problem.hosts for stage in present):  # otherwise the run is about to fail
        gap_s = max(_UNNOTICED * period_s(problem, present), handover_s(problem, present, stages))
    return gap_s, max(loads), sum(loads)


def _cut(
    problem: Problem, held: Mapping[str, PlacedStage], hosts: Sequence[str], limit_s: float
) -> tuple[PlacedStage, ...] | None:
    """Return the stages of hosts in a given order, within the limit and near to what they hold; or None."""
    layers = len(problem.layers.elements_out)
    earliest = [layers]  # where each stage can begin at the earliest, if all that follow are to be in time
    for host in reversed(hosts):
        earliest.insert(0, _first_layer(problem, host, earliest[0], limit_s))
    stages: list[PlacedStage] = []
    start = 0
    for number, host in enumerate(hosts):
        left = len(hosts) - number - 1
        least = max(start + 1, earliest[number + 1])
        most = min(_last_layer(problem, host, start, limit_s), layers - left)
        if least > most:
            return None
        if host in held:
            liked = held[host].layers.stop
        else:
            liked = held[hosts[number + 1]].layers.start if left else layers
        stop = min(max(liked, least), most)
        stages.append(PlacedStage(host, LayerRange(start, stop)))
        start = stop
    return tuple(stages)


def _first_layer(problem: Problem, host: str, stop: int, limit_s: float) -> int:
    """Return the start of the longest stage before ``stop`` that a host computes in time; or ``stop``."""
    start = stop
    while start > 0 and _in_time(problem, PlacedStage(host, LayerRange(start - 1, stop)), limit_s):
        start -= 1
    return start


def _last_layer(problem: Problem, host: str, start: int, limit_s: float) -> int:
    """Return the end of the longest stage from ``start`` on that a host computes in time; or ``start``."""
    stop, layers = start, len(problem.layers.elements_out)
    while stop < layers and _in_time(problem, PlacedStage(host, LayerRange(start, stop + 1)), limit_s):
        stop += 1
    return stop


def _in_time(problem: Problem, stage: PlacedStage, limit_s: float) -> bool:
    """Return whether a host has the memory for a stage, and computes it within the limit."""
    has_room = held_bytes(problem, stage.host, stage.layers) <= problem.kind_of(stage.host).mem_bytes
    return has_room and stage_seconds(problem, stage) + data_seconds(problem, stage) <= limit_s
