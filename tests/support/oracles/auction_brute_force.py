"""Every schedule of an auction, from the definition in plain Python."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import strategies as st

from pipeedge.auction.market import Bid, Call, Market
from pipeedge.plan.specs import NeighborLink


def every_schedule(devices: Sequence[int], layers: int) -> Iterator[list[tuple[int, int, int]]]:
    """Return all ways to divide the layers among exactly these devices, in this order."""
    for cuts in itertools.combinations(range(1, layers), len(devices) - 1):
        bounds = [0, *cuts, layers]
        yield [(device, bounds[at], bounds[at + 1]) for at, device in enumerate(devices)]


def costs(market: Market, schedule: list[tuple[int, int, int]]) -> tuple[float, float]:
    """Return the bottleneck and latency of one schedule."""

    def message(a: int, b: int, cut: int) -> float:
        if a == b:
            return 0.0
        one, two = market.bids[a], market.bids[b]
        slower = min(one.bw_bytes_per_s, two.bw_bytes_per_s)
        link = one.links.get(two.host, two.links.get(one.host, NeighborLink(slower)))
        size = float(market.cut_bytes[cut])
        if size == 0:
            return link.latency_s
        return size / link.bw_bytes_per_s + link.latency_s if link.bw_bytes_per_s else math.inf

    parts = [float(market.bids[device].stage_s[first, last]) for device, first, last in schedule]
    parts += [message(a[0], b[0], b[1]) for a, b in itertools.pairwise(schedule)]
    if market.data_host is not None:
        parts.append(message(market.data_host, schedule[0][0], 0))
        parts.append(message(schedule[-1][0], market.data_host, schedule[-1][2]))
    return max(parts), sum(parts)


def least(market: Market, choices: Iterator[tuple[int, ...]]) -> tuple[float, float, float] | None:
    """Return the least bottleneck, the least latency with it, and the least latency of all."""
    found = [
        cost
        for devices in choices
        for schedule in every_schedule(devices, market.layers)
        if math.isfinite((cost := costs(market, schedule))[0])
    ]
    if not found:
        return None
    bottleneck = min(cost[0] for cost in found)
    return (
        bottleneck,
        min(cost[1] for cost in found if cost[0] <= bottleneck * (1 + 1e-9)),
        min(cost[1] for cost in found),
    )


@st.composite
def markets(draw: st.DrawFn) -> Market:
    """Draw bids of all kinds: sums of layers or arbitrary, with holes, filtered; with links or without."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    layers, count = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    additive, holes = draw(st.booleans()), draw(st.sampled_from([0.0, 0.2, 0.5]))
    call = Call("m", layers, chunk=draw(st.integers(1, min(2, layers))), largest=draw(st.booleans()))
    bids: list[Bid] = []
    for device in range(count):
        sums = np.concatenate(([0.0], np.cumsum(rng.uniform(0.1, 1, layers))))
        seconds = sums[None, :] - sums[:, None] if additive else rng.uniform(0.1, 2, (layers + 1, layers + 1))
        ends = np.arange(layers + 1)
        seconds = np.where(ends[:, None] < ends[None, :], seconds, np.inf)
        seconds[rng.random(seconds.shape) < holes] = np.inf
        if device and draw(st.booleans()):
            seconds, bandwidth = bids[0].stage_s, bids[0].bw_bytes_per_s  # identical to the solver
        else:
            bandwidth = float(rng.choice([0, 1, 3, 10]) if rng.random() < 0.3 else rng.uniform(1, 10))
        links = {
            f"h{other}": NeighborLink(float(rng.choice([0.0, 2.0, 20.0])), float(rng.choice([0.0, 0.1])))
            for other in range(count)
            if other != device and draw(st.booleans()) and rng.random() < 0.5
        }
        bids.append(Bid(f"h{device}", "t", bandwidth, seconds, links).filtered(call))
    cut_bytes = rng.choice([0.0, 1.0, 2.0, 5.0], layers + 1)
    return Market(tuple(bids), cut_bytes, 8, draw(st.sampled_from([None, 0, count - 1])))
