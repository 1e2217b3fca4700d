"""Measure the time of the scheduler and its distance from the optimum, and compare with targets.

    python benchmarks/scheduler.py [--seeds N] [--only TEXT] [--beside PROGRAM]

``--beside`` solves each instance with another build of ``sched-pipeline`` as well, in turn.

Instances come from a seeded generator: a transformer's repeating blocks (or layers without any pattern),
and device types whose speed, memory and bandwidth differ by an order of magnitude; each layer deviates a
little from the type's average. The time is the solver's own; the peak memory is that of the program, which
also reads the problem. Figures depend on the machine; the targets are for two ordinary cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeedge.plan.sched_pipeline import find_executable

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


def problem(instance: Instance, seed: int) -> dict[str, Any]:
    """Return the problem of an instance and a seed, as ``sched-pipeline --problem`` reads it."""
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
    bandwidth = rng.choice([100.0, 300.0, 1000.0, 2500.0], types) * MIB / 8
    names = [f"h{host}" for host in range(instance.hosts)]
    pairs = [(a, b) for a in names for b in names if a != b] if instance.linked else []
    speeds = rng.choice([50.0, 100.0, 300.0, 1000.0], len(pairs)) * MIB / 8
    latencies = rng.uniform(0, 0.02, len(pairs))
    return {
        "batch_size": 8,
        "element_bytes": 4,
        "elements_in": 150528.0,
        "elements_out": elements.tolist(),
        "weight_bytes": (mem * MIB).tolist(),
        "buffers_in": 2,
        "buffers_out": 2,
        "types": [
            {
                "name": f"t{kind}",
                "mem_bytes": float(type_mem[kind]) * MIB,
                "bw_bytes_per_s": float(bandwidth[kind]),
                "time_s": time[kind].tolist(),
            }
            for kind in range(types)
        ],
        "hosts": [
            {"name": name, "type": f"t{number // instance.hosts_per_type}"}
            for number, name in enumerate(names)
        ],
        "links": [
            {"from": a, "to": b, "bw_bytes_per_s": float(bw), "latency_s": float(latency)}
            for (a, b), bw, latency in zip(pairs, speeds, latencies, strict=True)
        ],
    }


def solve(program: Path, instance: Instance, seed: int) -> dict[str, Any]:
    """Solve an instance with a build of the program."""
    command = [str(program), "--problem=-", "--format=json", f"--objective={instance.objective}"]
    command.append(f"--time-limit={instance.time_limit_s}")
    with tempfile.TemporaryFile("w+") as text, tempfile.TemporaryFile("w+") as printed:
        json.dump(problem(instance, seed), text)
        text.seek(0)
        process = subprocess.Popen(command, stdin=text, stdout=printed)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, command)
        printed.seek(0)
        answer: dict[str, Any] = json.load(printed)
    return {
        "status": answer["status"],
        "objective": answer["latency_s" if instance.objective == "latency" else "bottleneck_s"],
        "latency": answer["latency_s"],
        "stages": len(answer["schedule"]),
        "gap": answer["gap"],
        "seconds": answer["elapsed_s"],
        "peak_mb": used.ru_maxrss / 1024,
    }


def main() -> int:
    """Print the table; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="instances of each kind (default 3)")
    parser.add_argument("--only", default="", help="solve only instances whose name contains this")
    parser.add_argument("--beside", type=Path, metavar="PROGRAM", help="another build, to compare with")
    options = parser.parse_args()
    programs = [find_executable(), *([options.beside] if options.beside else [])]
    print(
        f"{'instance':28} {'hosts':>5} {'layers':>6} {'seed':>4} {'status':>10} {'objective':>10} "
        f"{'stages':>6} {'latency':>9} {'gap':>8} {'<=':>6} {'time s':>8} {'<=':>6} {'peak MB':>8}"
    )
    missed = 0
    for instance in (instance for instance in SUITE if options.only in instance.name):
        for seed in range(options.seeds):
            for program in programs:
                row = solve(program, instance, seed)
                late = row["seconds"] > instance.target_s * 1.1 or row["gap"] > instance.target_gap
                missed += late and program == programs[0]
                name = instance.name if program == programs[0] else "  beside"
                print(
                    f"{name:28} {instance.hosts:5} {instance.layers:6} {seed:4} {row['status']:>10} "
                    f"{row['objective']:10.6f} {row['stages']:6} {row['latency']:9.5f} {row['gap']:8.3%} "
                    f"{instance.target_gap:6.0%} {row['seconds']:8.4f} {instance.target_s:6g} "
                    f"{row['peak_mb']:8.0f}{'  missed' if late else ''}",
                    flush=True,
                )
    print(f"{missed} targets missed" if missed else "all targets met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
