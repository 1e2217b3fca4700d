"""Try every schedule of a small problem. Written from the definition, independently of the solver.

All ways to cut the layers into k ranges, and all sequences of k hosts (or of k types, if hosts of a type are
equivalent), are two index arrays; numpy computes the costs of their product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations, product

import numpy as np
from oracles.schedule_cases import Case

SAME = 1e-9
"""Relative difference below which two costs are equal."""


@dataclass(frozen=True)
class Best:
    """The best by (bottleneck, hosts, data host, latency) and by (latency, bottleneck, hosts, data host).

    ``data host`` is 0 if the data host has a stage, and 1 if it has none.
    """

    throughput: tuple[float, int, int, float]
    latency: tuple[float, float, int, int]


@cache
def cuts_of(layers: int, stages: int) -> np.ndarray:
    """Return [n, stages + 1] boundaries, including 0 and ``layers``."""
    rows = [(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)]
    return np.array(rows, dtype=np.intp)


@lru_cache(maxsize=4096)
def orders_of(counts: tuple[int, ...], stages: int) -> np.ndarray:
    """Return [n, stages] kinds of host, none more often than it has hosts."""
    rows = [
        order
        for order in product([k for k, n in enumerate(counts) if n], repeat=stages)
        if all(order.count(k) <= n for k, n in enumerate(counts))
    ]
    return np.array(rows, dtype=np.intp).reshape(-1, stages)


def seconds(nbytes: float, bandwidth: float, latency: float) -> float:
    """Return the time of one message; a bandwidth of 0 carries nothing."""
    if nbytes == 0:
        return latency
    return nbytes / bandwidth + latency if bandwidth > 0 else np.inf


def tables(case: Case) -> tuple[tuple[int, ...], np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the kinds of host and their costs.

    Returns:
        counts: number of hosts of each kind.
        compute: [kinds, L + 1, L + 1] seconds of layers [i, j), infinite if they do not fit.
        link: [kinds, kinds, L + 1] seconds of the message at each cut.
        to_first, from_last: [kinds] links with the data host.
    """
    named = case.data_host is not None or bool(case.links)
    hosts_of_kind = (
        [[h] for h in range(len(case.hosts))]
        if named
        else [[h for h, t in enumerate(case.hosts) if t == kind] for kind in range(len(case.type_mem))]
    )
    hosts_of_kind = [hosts for hosts in hosts_of_kind if hosts]
    kinds = [case.hosts[hosts[0]] for hosts in hosts_of_kind]
    n, layers = len(kinds), case.layers
    nbytes = case.cut_bytes()
    crossing = case.link_bytes()

    compute = np.full((n, layers + 1, layers + 1), np.inf)
    for i in range(layers):
        for j in range(i + 1, layers + 1):
            need = case.mem[i:j].sum() + case.buffers_in * nbytes[i] + case.buffers_out * nbytes[j]
            for k, t in enumerate(kinds):
                if need + case.held(t, i, j) <= case.type_mem[t] * (1 + SAME):
                    compute[k, i, j] = case.time[t, i:j].sum() + case.handling(hosts_of_kind[k][0], i, j)

    def link(a: int, b: int, cut: int) -> float:
        if a == b and named:
            return 0.0
        default = (min(case.type_bw[case.hosts[a]], case.type_bw[case.hosts[b]]), 0.0)
        return seconds(crossing[cut], *case.links.get((a, b), case.links.get((b, a), default)))

    between = np.array(
        [[[link(a[0], b[0], cut) for cut in range(layers + 1)] for b in hosts_of_kind] for a in hosts_of_kind]
    )
    to_first, from_last = np.zeros(n), np.zeros(n)
    if case.data_host is not None:
        to_first = np.array([link(case.data_host, hosts[0], 0) for hosts in hosts_of_kind])
        from_last = np.array([link(hosts[0], case.data_host, layers) for hosts in hosts_of_kind])
    return tuple(len(hosts) for hosts in hosts_of_kind), compute, between, to_first, from_last


def best_schedules(case: Case) -> Best | None:
    """Return the optima of both objectives, or None if nothing fits."""
    counts, compute, between, to_first, from_last = tables(case)
    bottlenecks, latencies, sizes, elsewhere = [], [], [], []
    feed, collect, input_send, output_receive = case.data_seconds()
    for stages in range(1, min(case.layers, sum(counts)) + 1):
        cuts, orders = cuts_of(case.layers, stages), orders_of(counts, stages)
        if not len(orders):
            continue
        # With a data host every host is a kind of its own.
        on_data_host = orders == (-1 if case.data_host is None else case.data_host)
        worst = np.maximum(to_first[orders[:, 0]], from_last[orders[:, -1]])[:, None]
        feeding = (feed + input_send * ~on_data_host[:, 0])[:, None]
        collecting = (collect + output_receive * ~on_data_host[:, -1])[:, None]
        worst = np.maximum(worst, np.maximum(feeding, collecting))
        total = (to_first[orders[:, 0]] + from_last[orders[:, -1]])[:, None]
        for s in range(stages):
            cost = compute[orders[:, s, None], cuts[None, :, s], cuts[None, :, s + 1]]
            worst = np.maximum(worst, cost + (feeding + collecting) * on_data_host[:, s, None])
            total = total + cost
            if s:
                cost = between[orders[:, s - 1, None], orders[:, s, None], cuts[None, :, s]]
                worst, total = np.maximum(worst, cost), total + cost
        possible = np.isfinite(worst)
        if possible.any():
            bottlenecks.append(worst[possible])
            latencies.append(total[possible])
            sizes.append(np.full(possible.sum(), stages))
            away = np.broadcast_to(~on_data_host.any(axis=1)[:, None], possible.shape)
            elsewhere.append(away[possible].astype(int))
    if not bottlenecks:
        return None
    bottleneck, latency = np.concatenate(bottlenecks), np.concatenate(latencies)
    size, away = np.concatenate(sizes), np.concatenate(elsewhere)

    fastest = bottleneck <= bottleneck.min() * (1 + SAME)
    fewest = fastest & (size == size[fastest].min())
    preferred = fewest & (away == away[fewest].min())
    quickest = latency <= latency.min() * (1 + SAME)
    steadiest = quickest & (bottleneck <= bottleneck[quickest].min() * (1 + SAME))
    smallest = steadiest & (size == size[steadiest].min())
    return Best(
        throughput=(
            float(bottleneck.min()),
            int(size[fastest].min()),
            int(away[fewest].min()),
            float(latency[preferred].min()),
        ),
        latency=(
            float(latency.min()),
            float(bottleneck[steadiest].min()),
            int(size[steadiest].min()),
            int(away[smallest].min()),
        ),
    )
