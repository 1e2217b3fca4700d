"""Find the best schedule in any order of devices, with ``sched-pipeline``."""

from __future__ import annotations

from pipeedge.auction.market import Bid, Market
from pipeedge.auction.ordered import Outcome, outcome
from pipeedge.base.errors import InfeasibleError, PipeEdgeError
from pipeedge.base.wording import figure
from pipeedge.plan import scheduler
from pipeedge.plan.problem import HostKind, HostLink, LayerSizes, Problem, SolverOptions
from pipeedge.plan.sched_pipeline import UndecidedError

__all__ = ["optimal"]


def optimal(market: Market, *, time_limit_s: float = 5.0) -> Outcome:
    """Return the schedule with the highest throughput over all orders of the devices.

    Ties are broken by fewer devices, then by lower latency.

    Args:
        market: The bids.
        time_limit_s: Seconds after which to return the best schedule so far, with a bound on its gap.

    Raises:
        InfeasibleError: There is no schedule.
        PipeEdgeError: No schedule was found in time.
    """
    try:
        found = scheduler.solve(_problem(market, time_limit_s), hosts=[bid.host for bid in market.bids])
    except UndecidedError:
        raise PipeEdgeError(
            f"no schedule found within {figure(time_limit_s)} s; raise --time-limit"
        ) from None
    except InfeasibleError:
        raise InfeasibleError(f"no schedule: {market.why_not()}") from None
    stages = tuple((stage.rank, stage.layers.start, stage.layers.stop) for stage in found.schedule.stages)
    return outcome(market, stages, found.costs.gap)


def _problem(market: Market, time_limit_s: float) -> Problem:
    """Return the problem whose hosts are the devices, with their bids as the times of stages."""
    # Devices that cannot be told apart are one kind to the solver, which saves it their permutations.
    kinds: dict[tuple[float, bytes], HostKind] = {}
    hosts = {}
    for bid in market.bids:
        key = (bid.bw_bytes_per_s, bid.stage_s.tobytes())
        if key not in kinds:
            kinds[key] = _kind(f"kind {len(kinds)}", bid)
        hosts[bid.host] = kinds[key].name
    links = tuple(
        HostLink(bid.host, name, link.bw_bytes_per_s, link.latency_s)
        for bid in market.bids
        for name, link in bid.links.items()
        if name in hosts and name != bid.host
    )
    return Problem(
        layers=LayerSizes(
            weight_bytes=(0.0,) * market.layers,
            elements_in=float(market.cut_bytes[0]),
            elements_out=tuple(market.cut_bytes[1:].tolist()),
            element_bytes=1.0,
        ),
        kinds=tuple(kinds.values()),
        hosts=hosts,
        links=links,
        data_host=None if market.data_host is None else market.bids[market.data_host].host,
        options=SolverOptions(time_limit_s=time_limit_s),
    )


def _kind(name: str, bid: Bid) -> HostKind:
    rows = tuple(tuple(row[first + 1 :].tolist()) for first, row in enumerate(bid.stage_s[:-1]))
    return HostKind(name, mem_bytes=0.0, bw_bytes_per_s=bid.bw_bytes_per_s, stage_s=rows)
