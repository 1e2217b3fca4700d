"""Schedules in a given order of devices. Pure, and exact for their order.

    reach(i, e)   the best way to have computed the layers before e, the last of them on device i
                = min over f < e of  enter(i, f)  (+)  stage(i, f, e)
    enter(i, f)   device i gets what crosses the cut f
                = min over devices j before i of  reach(j, f)  (+)  link(j, i, f)

(+) is the sum for the latency of one microbatch, the larger of both for the time between two microbatches.
With D devices and L layers that is D*D*L + D*L*L steps. A device may be passed over only where that is
allowed; with links of their own between devices, ``enter`` must look at all devices before, not only at the
best of them.

The paper does the same with a set of devices in place of an order (Hu et al. 2022, section III); an order
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
    "Order",
    "Outcome",
    "Stage",
    "greedy_host_count",
    "latency_ordered",
    "outcome",
    "throughput_ordered",
]

Stage: TypeAlias = tuple[int, int, int]
"""Device, first layer, layer behind the last; from 0."""
_Combine: TypeAlias = Callable[[Seconds, Seconds], Seconds]
_Indices: TypeAlias = npt.NDArray[np.int_]
_NOBODY = -1
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Order:
    """How far the order of the devices binds."""

    strict: bool = True
    """Every device has a stage; else devices may be passed over."""
    strict_first: bool = False
    """The first of the order has the first stage."""
    strict_last: bool = False
    """The last of the order has the last stage."""


@dataclass(frozen=True)
class Outcome:
    """A schedule and what it promises."""

    stages: tuple[Stage, ...]
    bottleneck_s: float
    """The longest stage or link: time between two microbatches."""
    latency_s: float
    """Of one microbatch through the idle pipeline."""
    gap: float | None = None
    """Distance from the optimum over all orders at most, as a fraction; None: not known."""


def outcome(market: Market, stages: tuple[Stage, ...], gap: float | None = None) -> Outcome:
    """What ``stages`` promise."""
    times = [market.from_data_s(stages[0][0]), market.to_data_s(stages[-1][0])]
    for number, (device, first, last) in enumerate(stages):
        times.append(float(market.bids[device].stage_s[first, last]))
        if number:
            times.append(float(market.link_s(stages[number - 1][0], device)[first]))
    return Outcome(stages, max(times), sum(times), gap)


def latency_ordered(market: Market, order: Order) -> Outcome:
    """The least latency.

    Raises:
        InfeasibleError: there is no schedule in this order.
    """
    return outcome(market, _best(market, order, np.add))


def throughput_ordered(market: Market, order: Order) -> Outcome:
    """The least time between two microbatches, and among those schedules the least latency.

    Raises:
        InfeasibleError: there is no schedule in this order.
    """
    bottleneck = outcome(market, _best(market, order, np.maximum)).bottleneck_s
    return outcome(market, _best(market, order, np.add, limit_s=bottleneck * (1 + _TOLERANCE)))


def greedy_host_count(market: Market) -> Outcome:
    """Few devices: at each cut the one that goes furthest, and of those the one with the least time.

    Raises:
        InfeasibleError: it comes to a cut from where nobody goes on. Another schedule may still exist.
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
                f"greedy_host_count comes to layer {cut + 1}, and none of the devices left bids for what "
                f"follows ({market.why_not()}); -sch optimal tries all orders"
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


def _best(market: Market, order: Order, combine: _Combine, *, limit_s: float = np.inf) -> tuple[Stage, ...]:
    """The stages with the least sum or maximum of which no part takes longer than ``limit_s``."""
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


def _why_not(market: Market, order: Order) -> str:
    if order.strict and len(market.bids) > market.layers:
        return (
            f"{count(len(market.bids), 'device')}, each with a stage, and {count(market.layers, 'layer')}: "
            "take fewer (-d/--dev-count) or let devices be passed over (--no-strict-order)"
        )
    more = "; let devices be passed over (--no-strict-order)" if order.strict else ""
    return f"no schedule in this order of devices: {market.why_not()}{more}"
