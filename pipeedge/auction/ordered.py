"""Find schedules for a given order of devices. Pure, and exact for that order.

    reach(i, e)   the best way to compute the layers before e, the last of them on device i
                = min over f < e of  enter(i, f)  (+)  stage(i, f, e)
    enter(i, f)   the best way for device i to receive the data at cut f
                = min over devices j before i of  reach(j, f)  (+)  link(j, i, f)

(+) is the sum for the latency of one microbatch, and the maximum for the time between two microbatches.
With D devices and L layers that takes D*D*L + D*L*L steps. Devices are skipped only if that is allowed.
Since each pair of devices may have a link of its own, ``enter`` must consider all earlier devices, not only
the best of them.

The paper does the same with a set of devices instead of an order (Hu et al. 2022, section III); an order
makes it polynomial.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeedge.auction.market import Market, Seconds
from pipeedge.base.errors import InfeasibleError
from pipeedge.base.wording import count

__all__ = [
    "DeviceOrder",
    "Outcome",
    "Stage",
    "greedy_host_count",
    "latency_ordered",
    "outcome",
    "throughput_ordered",
]

Stage: TypeAlias = tuple[int, int, int]
"""Device, first layer, layer after the last; all from 0."""
_Combine: TypeAlias = Callable[[Seconds, Seconds], Seconds]
_Indices: TypeAlias = npt.NDArray[np.int_]
_NOBODY = -1
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class DeviceOrder:
    """How strictly a schedule must keep to the order of the devices."""

    strict: bool = True
    """Whether every device must have a stage; otherwise devices may be skipped."""
    strict_first: bool = False
    """Whether the first device in the order must have the first stage."""
    strict_last: bool = False
    """Whether the last device in the order must have the last stage."""


@dataclass(frozen=True)
class Outcome:
    """A schedule with its predicted performance."""

    stages: tuple[Stage, ...]
    bottleneck_s: float
    """Seconds of the longest stage or link, which is the time between two microbatches."""
    latency_s: float
    """Seconds that one microbatch takes through the idle pipeline."""
    gap: float | None = None
    """Bound on the distance from the optimum over all orders, as a fraction, or None if unknown."""


def outcome(market: Market, stages: tuple[Stage, ...], gap: float | None = None) -> Outcome:
    """Return ``stages`` with their predicted performance."""
    times = [market.from_data_s(stages[0][0]), market.to_data_s(stages[-1][0])]
    for number, (device, first, last) in enumerate(stages):
        times.append(float(market.bids[device].stage_s[first, last]))
        if number:
            times.append(float(market.link_s(stages[number - 1][0], device)[first]))
    return Outcome(stages, max(times), sum(times), gap)


def latency_ordered(market: Market, order: DeviceOrder) -> Outcome:
    """Return the schedule with the lowest latency.

    Raises:
        InfeasibleError: There is no schedule in this order.
    """
    return outcome(market, _best(market, order, np.add))


def throughput_ordered(market: Market, order: DeviceOrder) -> Outcome:
    """Return the schedule with the highest throughput, and among those the one with the lowest latency.

    Raises:
        InfeasibleError: There is no schedule in this order.
    """
    bottleneck = outcome(market, _best(market, order, np.maximum)).bottleneck_s
    return outcome(market, _best(market, order, np.add, limit_s=bottleneck * (1 + _TOLERANCE)))


def greedy_host_count(market: Market) -> Outcome:
    """Return a schedule with few devices.

    At each cut it takes the device that extends furthest, and of those the one with the least time.

    Raises:
        InfeasibleError: It reaches a cut from which no device continues. Another schedule may still exist.
    """
    stages: list[Stage] = []
    left = list(range(len(market.bids)))
    cut = 0
    while cut < market.layers:
        candidates = [
            (-last, max(float(stage_s), link_s), device)
            for device in left
            if np.isfinite(link_s := _link_in(market, stages, device, cut))
            for last, stage_s in _furthest(market, device, cut)
        ]
        if not candidates:
            raise InfeasibleError(
                f"greedy_host_count reached layer {cut + 1}, where none of the remaining devices bids to "
                f"continue ({market.why_not()}); try -sch optimal, which considers all orders"
            )
        last, _, device = min(candidates)
        stages.append((device, cut, -last))
        left.remove(device)
        cut = -last
    return outcome(market, tuple(stages))


def _furthest(market: Market, device: int, cut: int) -> list[tuple[int, float]]:
    row = market.bids[device].stage_s[cut]
    ends = [int(last) for last in np.flatnonzero(np.isfinite(row))]
    if ends and ends[-1] == market.layers and not np.isfinite(market.to_data_s(device)):
        ends.pop()
    return [(ends[-1], float(row[ends[-1]]))] if ends else []


def _link_in(market: Market, stages: list[Stage], device: int, cut: int) -> float:
    if not stages:
        return market.from_data_s(device)
    return float(market.link_s(stages[-1][0], device)[cut])


def _best(
    market: Market, order: DeviceOrder, combine: _Combine, *, limit_s: float = np.inf
) -> tuple[Stage, ...]:
    """Return the stages with the least sum or maximum among those with no part longer than ``limit_s``."""
    count, cuts = len(market.bids), market.layers + 1
    reach = np.full((count, cuts), np.inf)
    came_from = np.full((count, cuts), _NOBODY)
    began_at = np.zeros((count, cuts), dtype=int)
    for device in range(count):
        enter = np.full(cuts, np.inf)
        if device == 0 or not (order.strict or order.strict_first):
            enter[0] = _within(market.from_data_s(device), limit_s)
        before = range(max(0, device - 1) if order.strict else 0, device)
        if len(before):
            ways = np.stack(
                [combine(reach[other], _within(market.link_s(other, device), limit_s)) for other in before]
            )
            came_from[device, 1:] = ways.argmin(axis=0)[1:] + before.start
            enter[1:] = ways.min(axis=0)[1:]
        ways = combine(enter[:, None], _within(market.bids[device].stage_s, limit_s))
        began_at[device] = ways.argmin(axis=0)
        reach[device] = ways.min(axis=0)
    ends = np.array([_within(market.to_data_s(device), limit_s) for device in range(count)])
    total = combine(reach[:, -1], ends)
    if order.strict or order.strict_last:
        total[:-1] = np.inf
    if not np.isfinite(total).any():
        raise InfeasibleError(_why_not(market, order))
    return _trace(int(total.argmin()), came_from, began_at)


def _within(seconds: Seconds | float, limit_s: float) -> Seconds:
    return np.where(np.asarray(seconds) <= limit_s, seconds, np.inf)


def _trace(device: int, came_from: _Indices, began_at: _Indices) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    last = came_from.shape[1] - 1
    while last:
        first = int(began_at[device, last])
        stages.append((device, first, last))
        device, last = int(came_from[device, first]), first
    return tuple(reversed(stages))


def _why_not(market: Market, order: DeviceOrder) -> str:
    if order.strict and len(market.bids) > market.layers:
        return (
            f"{count(len(market.bids), 'device')} cannot each have a stage of a model with "
            f"{count(market.layers, 'layer')}: use fewer (-d/--dev-count) or allow skipping devices "
            "(--no-strict-order)"
        )
    more = "; allow skipping devices (--no-strict-order)" if order.strict else ""
    return f"no schedule in this order of devices: {market.why_not()}{more}"
