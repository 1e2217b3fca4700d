"""Find the optimal schedule by dynamic programming over (used hosts of each kind, last kind, layers).

This is exact for any size, but the table grows with the product of the host counts. It is for problems that
are too large to try every schedule, but small enough for a table. Shares nothing with the native solver.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from oracles.schedule_brute_force import SAME, Best, tables
from oracles.schedule_cases import Case


def best_schedules(case: Case) -> Best | None:
    """Return the optima of both objectives, or None if nothing fits."""
    counts, compute, between, to_first, from_last = tables(case)
    layers = case.layers
    feed, collect, input_send, output_receive = case.data_seconds()
    busy = compute.copy()
    # What the data rank does at the ends, by the kind of host that the stage there has.
    feeding, collecting = (
        np.full(len(counts), feed + input_send),
        np.full(len(counts), collect + output_receive),
    )
    if case.data_host is not None:  # then every host is a kind of its own
        feeding[case.data_host], collecting[case.data_host] = feed, collect
        busy[case.data_host] += feed + collect
        busy[case.data_host, 1:, :] += input_send
        busy[case.data_host, :, :layers] += output_receive

    def search(limit: float, *, bottleneck: bool) -> dict[tuple[int, int], float]:
        """Least bottleneck (or latency, with no cost above ``limit``) for each number of hosts, and whether
        the data host is none of them."""
        combine = np.maximum if bottleneck else np.add
        stage = np.where(busy <= limit, busy if bottleneck else compute, np.inf)
        link = np.where(between <= limit, between, np.inf)
        first = np.maximum(to_first, feeding) if bottleneck else to_first
        last = np.maximum(from_last, collecting) if bottleneck else from_last
        first = np.where(np.maximum(to_first, feeding) <= limit, first, np.inf)
        last = np.where(np.maximum(from_last, collecting) <= limit, last, np.inf)
        table: dict[tuple[tuple[int, ...], int], np.ndarray] = {}
        best: dict[tuple[int, int], float] = {}
        for used in sorted(product(*(range(n + 1) for n in counts)), key=sum):
            size = sum(used)
            if not 0 < size <= layers:
                continue
            away = int(case.data_host is None or not used[case.data_host])
            for kind, n in enumerate(used):
                if not n:
                    continue
                before = (*used[:kind], n - 1, *used[kind + 1 :])
                arrive = np.full(layers + 1, np.inf)  # cost up to a cut, its link into `kind` included
                if size == 1:
                    arrive[0] = first[kind]
                for other, m in enumerate(before):
                    if m and (before, other) in table:
                        cost = combine(table[before, other], link[other, kind])
                        cost[0] = cost[layers] = np.inf
                        arrive = np.minimum(arrive, cost)
                done = combine(arrive[:, None], stage[kind]).min(axis=0)
                table[used, kind] = done
                total = float(combine(done[layers], last[kind]))
                if total < best.get((size, away), np.inf):
                    best[size, away] = total
        return best

    fastest = search(np.finfo(float).max, bottleneck=True)
    if not fastest:
        return None
    bottleneck = min(fastest.values())
    size, away = min(n for n, value in fastest.items() if value <= bottleneck * (1 + SAME))
    latency = search(bottleneck * (1 + SAME), bottleneck=False)[size, away]

    quickest = min(search(np.finfo(float).max, bottleneck=False).values())
    near = quickest * (1 + SAME)
    tried = (busy, between, to_first, from_last, feeding, collecting)
    costs = np.unique(np.concatenate([t[np.isfinite(t)] for t in tried]))
    low, high = 0, len(costs) - 1  # the smallest limit that still allows the least latency
    while low < high:
        middle = (low + high) // 2
        found = search(float(costs[middle]) * (1 + SAME), bottleneck=False)
        if found and min(found.values()) <= near:
            high = middle
        else:
            low = middle + 1
    steady = search(float(costs[low]) * (1 + SAME), bottleneck=False)
    return Best(
        throughput=(bottleneck, size, away, latency),
        latency=(quickest, float(costs[low]), *min(n for n, value in steady.items() if value <= near)),
    )
