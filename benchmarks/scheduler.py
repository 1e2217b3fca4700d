"""Measure the time of the scheduler and its distance from the optimum, and compare with targets.

    python benchmarks/scheduler.py [--seeds N] [--only TEXT]

Instances come from a seeded generator: a transformer's repeating blocks (or layers without any pattern),
and device types whose speed, memory and bandwidth differ by an order of magnitude; each layer deviates a
little from the type's average. Every instance is solved in a separate process, to measure its peak memory.
Figures depend on the machine; the targets are for two ordinary cores.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

MIB = 2.0**20
BLOCK_SECONDS = np.array([0.34, 0.08, 0.35, 0.30])
BLOCK_MIB = np.array([25.0, 19.5, 27.0, 26.4])
BLOCK_ELEMENTS = 197 * 768 * np.array([2.0, 1.0, 5.0, 1.0])


@dataclass(frozen=True)
class Instance:
    """A row of the table."""

    name: str
    types: int
    hosts_per_type: int
    layers: int
    pattern: str = "transformer"
    memory: str = "ample"
    """``ample``, or ``tight``: the total memory is about twice what the model needs."""
    time_limit_s: float = 10.0
    target_s: float = 10.0
    target_gap: float = 0.0
    objective: str = "throughput"
    linked: bool = False
    """Whether every pair of hosts has its own bandwidth and latency."""

    @property
    def hosts(self) -> int:
        """Number of hosts of all types."""
        return self.types * self.hosts_per_type


SUITE = (
    Instance("5 x 8", 5, 8, 48, target_s=0.05),
    Instance("5 x 8", 5, 8, 96, target_s=0.05),
    Instance("5 x 8 tight", 5, 8, 96, memory="tight", target_s=0.05),
    Instance("5 x 8 no pattern", 5, 8, 96, pattern="random", target_s=0.05),
    Instance("10 x 8", 10, 8, 96, target_gap=0.01),
    Instance("10 x 8 tight", 10, 8, 96, memory="tight", target_gap=0.01),
    Instance("10 x 8 no pattern", 10, 8, 96, pattern="random", target_gap=0.01),
    Instance("200 different", 200, 1, 96, target_gap=0.02),
    Instance("200 different, tight", 200, 1, 96, memory="tight", target_gap=0.02),
    Instance("200 different, no pattern", 200, 1, 96, pattern="random", target_gap=0.02),
    Instance("50 different", 50, 1, 96, target_gap=0.02),
    Instance("1000 different", 1000, 1, 384, time_limit_s=55, target_s=60, target_gap=1.0),
    Instance("100 x 10", 100, 10, 384, time_limit_s=55, target_s=60, target_gap=1.0),
    Instance("5 x 8 latency", 5, 8, 96, objective="latency", target_gap=0.01),
    Instance("12 linked", 12, 1, 48, linked=True, target_gap=0.05),
    Instance("40 linked", 40, 1, 96, linked=True, target_gap=0.2),
)


def arguments(instance: Instance, seed: int) -> dict[str, Any]:
    """Keyword arguments of ``pipeedge._native.schedule`` for an instance and a seed."""
    rng = np.random.default_rng([seed, instance.types, instance.hosts_per_type, instance.layers])
    layers, types = instance.layers, instance.types
    if instance.pattern == "transformer":
        seconds = np.resize(BLOCK_SECONDS, layers)
        mem = np.resize(BLOCK_MIB, layers) * rng.uniform(0.97, 1.03, layers)
        elements = np.resize(BLOCK_ELEMENTS, layers)
    else:
        seconds = rng.uniform(0.05, 0.5, layers)
        mem = rng.uniform(5, 60, layers)
        elements = np.exp(rng.uniform(np.log(2e4), np.log(1e6), layers))
    elements[-1] = 1000
    speed = np.exp(rng.uniform(np.log(0.15), np.log(2.0), types))
    time = seconds / speed[:, None] * rng.uniform(0.93, 1.07, (types, layers))
    type_mem = 2.0 ** rng.integers(9, 14, types)
    if instance.memory == "tight":
        buffers = 4 * elements.mean() * 8 * 4 / MIB
        per_host = 2 * mem.sum() / instance.hosts
        type_mem = rng.uniform(0.4, 1.6, types) * per_host + buffers
    hosts = np.repeat(np.arange(types), instance.hosts_per_type)
    call: dict[str, Any] = {
        "mem_bytes": mem * MIB,
        "elements_out": elements,
        "elements_in": 150528.0,
        "type_mem_bytes": type_mem * MIB,
        "type_bw_bytes_per_s": rng.choice([100.0, 300.0, 1000.0, 2500.0], types) * MIB / 8,
        "type_time_s": time,
        "host_types": hosts,
        "objective": instance.objective,
        "time_limit_s": instance.time_limit_s,
    }
    if instance.linked:
        pairs = np.array([(a, b) for a in range(len(hosts)) for b in range(len(hosts)) if a != b])
        call["link_hosts"] = pairs
        call["link_bw_bytes_per_s"] = rng.choice([50.0, 100.0, 300.0, 1000.0], len(pairs)) * MIB / 8
        call["link_latency_s"] = rng.uniform(0, 0.02, len(pairs))
    return call


def solve(index: int, seed: int) -> dict[str, Any]:
    """Solve one instance of the suite in this process."""
    from pipeedge import _native

    call = arguments(SUITE[index], seed)
    result = _native.schedule(**call)
    return {
        "status": result.status,
        "objective": result.objective_s,
        "stages": len(result.stages),
        "gap": result.gap,
        "seconds": result.elapsed_s,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> int:
    """Print the table; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="instances of each kind (default 3)")
    parser.add_argument("--only", default="", help="solve only instances whose name contains this")
    parser.add_argument("--one", nargs=2, type=int, metavar=("INDEX", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        json.dump(solve(*options.one), sys.stdout)
        return 0

    print(
        f"{'instance':28} {'hosts':>5} {'layers':>6} {'seed':>4} {'status':>10} {'objective':>10} "
        f"{'stages':>6} {'gap':>8} {'<=':>6} {'time s':>8} {'<=':>6} {'peak MB':>8}"
    )
    missed = 0
    for index, instance in enumerate(SUITE):
        if options.only not in instance.name:
            continue
        for seed in range(options.seeds):
            command = [sys.executable, __file__, "--one", str(index), str(seed)]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            late = row["seconds"] > instance.target_s * 1.1 or row["gap"] > instance.target_gap
            missed += late
            print(
                f"{instance.name:28} {instance.hosts:5} {instance.layers:6} {seed:4} "
                f"{row['status']:>10} {row['objective']:10.6f} {row['stages']:6} {row['gap']:8.3%} "
                f"{instance.target_gap:6.0%} {row['seconds']:8.4f} {instance.target_s:6g} "
                f"{row['peak_mb']:8.0f}{'  missed' if late else ''}",
                flush=True,
            )
    print(f"{missed} targets missed" if missed else "all targets met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
