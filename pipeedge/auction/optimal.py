"""Find the best schedule in any order of devices, with the native solver (``pipeedge._native``)."""

from __future__ import annotations

import numpy as np

from pipeedge import _native
from pipeedge.auction.market import Bid, Market
from pipeedge.auction.ordered import Outcome, outcome
from pipeedge.base.errors import InfeasibleError, PipeEdgeError
from pipeedge.base.wording import figure

__all__ = ["optimal"]


def optimal(market: Market, *, time_limit_s: float = 5.0) -> Outcome:
    """Return the schedule with the highest throughput over all orders of the devices.

    Ties are broken by fewer devices, then by lower latency.

    Args:
        market: the bids.
        time_limit_s: seconds after which to return the best schedule so far, with a bound on its gap.

    Raises:
        InfeasibleError: there is no schedule.
        PipeEdgeError: no schedule was found in time.
    """
    # Identical devices are one type to the solver, which need not try their permutations.
    types: dict[tuple[float, bytes], int] = {}
    kinds: list[Bid] = []
    host_types = []
    for bid in market.bids:
        key = (bid.bw_bytes_per_s, bid.stage_s.tobytes())
        if key not in types:
            types[key] = len(kinds)
            kinds.append(bid)
        host_types.append(types[key])
    hosts = {bid.host: index for index, bid in enumerate(market.bids)}
    links = [
        (source, hosts[name], link.bw_bytes_per_s, link.latency_s)
        for source, bid in enumerate(market.bids)
        for name, link in bid.links.items()
        if name in hosts and hosts[name] != source
    ]
    nothing = np.zeros(market.layers)
    found = _native.schedule(
        mem_bytes=nothing,
        elements_out=market.cut_bytes[1:],
        elements_in=float(market.cut_bytes[0]),
        type_mem_bytes=np.zeros(len(kinds)),
        type_bw_bytes_per_s=[kind.bw_bytes_per_s for kind in kinds],
        type_time_s=np.tile(nothing, (len(kinds), 1)),
        type_stage_s=np.stack([kind.stage_s for kind in kinds]),
        host_types=host_types,
        link_hosts=np.array([link[:2] for link in links], dtype=np.int64).reshape(-1, 2),
        link_bw_bytes_per_s=[link[2] for link in links],
        link_latency_s=[link[3] for link in links],
        data_host=market.data_host,
        batch_size=1.0,
        element_bytes=1.0,
        time_limit_s=time_limit_s,
    )
    if found.status == "infeasible":
        raise InfeasibleError(f"no schedule: {market.why_not()}")
    if found.status == "unknown":
        raise PipeEdgeError(f"no schedule found within {figure(time_limit_s)} s; raise --time-limit")
    stages = tuple((int(host), int(first), int(last)) for host, first, last in found.stages)
    return outcome(market, stages, found.gap)
