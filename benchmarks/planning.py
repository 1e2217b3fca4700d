"""Compare joint plans with the best uniform setting on random clusters, and time a large instance.

    python benchmarks/planning.py [--clusters N] [--large N] [--time-limit SECONDS]

A uniform setting has one microbatch size, one number type for all stages and one width for all links; the
best one keeps the same agreement. Clusters have four to six hosts of different speed, memory and bandwidth
and a model of 24 layers; every second one has thin links. Large instances have 16 different hosts, 48 layers,
three number types, five widths and four microbatch sizes. Everything is planned, nothing is run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

import numpy as np

from pipeedge.plan.sched_pipeline import find_executable

MIB = 2.0**20
BLOCK_ELEMENTS = 197 * 768 * np.array([2.0, 1.0, 5.0, 1.0])
BLOCK_SECONDS = np.array([0.30, 0.08, 0.30, 0.30])
BLOCK_MIB = np.array([7.1, 2.3, 9.0, 9.0])
DTYPES = {"float32": (4, 1.0, 0.0), "bfloat16": (2, 0.5, 0.002), "int8": (2, 0.3, 0.008)}
"""Bytes of a value, size of weights relative to float32, and loss of the whole model."""
WIDTHS = {0: 0.0, 16: 0.0001, 8: 0.0005, 6: 0.002, 4: 0.006}
"""Mean loss of a cut at each width."""
MAX_LOSS = 0.01


def instance(seed: int, hosts: int, layers: int, sizes: tuple[int, ...], *, thin: bool) -> dict[str, Any]:
    """Return a random joint problem."""
    rng = np.random.default_rng(seed)
    blocks = layers // 4
    speed = rng.lognormal(0, 0.8, size=hosts)
    bandwidth = rng.choice([10, 30, 100] if thin else [300, 940, 2500], size=hosts) * MIB / 8
    bandwidth = bandwidth * rng.uniform(0.9, 1.1, size=hosts)
    memory = rng.choice([150, 300, 600, 2000], size=hosts) * MIB
    gains = {"float32": (1.0, 1.0), "bfloat16": (0.4, 1.1), "int8": (0.25, 0.8)}
    gain = {dtype: rng.uniform(low, high, size=hosts) for dtype, (low, high) in gains.items()}
    elements = np.tile(BLOCK_ELEMENTS, blocks)
    elements[-1] = 1000
    weights = np.tile(BLOCK_MIB, blocks) * MIB
    shares = rng.dirichlet(np.ones(layers) * 3)
    settings = []
    for size in sizes:
        for dtype, (element_bytes, part, loss) in DTYPES.items():
            types = []
            for host in range(hosts):
                seconds = np.tile(BLOCK_SECONDS, blocks) * (size + 1) / 9 * gain[dtype][host] / speed[host]
                types.append(
                    {
                        "name": f"t{host}",
                        "mem_bytes": memory[host],
                        "bw_bytes_per_s": bandwidth[host],
                        "time_s": (seconds * rng.uniform(0.95, 1.05, size=layers)).tolist(),
                        "weight_bytes": (weights * part).tolist(),
                        "loss": (shares * loss).tolist(),
                    }
                )
            settings.append(
                {
                    "dtype": dtype,
                    "batch_size": size,
                    "element_bytes": element_bytes,
                    "elements_in": 3 * 224 * 224,
                    "elements_out": elements.tolist(),
                    "input_bytes": 3 * 224 * 224,
                    "output_bytes": 4000,
                    "weight_bytes": weights.tolist(),
                    "buffers_in": 2,
                    "buffers_out": 2,
                    "types": types,
                    "hosts": [{"name": f"h{host}", "type": f"t{host}"} for host in range(hosts)],
                    "data_host": "h0",
                }
            )
    widths = [
        {"bits": bits, "loss": (rng.gamma(2, 0.5, size=layers - 1) * mean).tolist() if bits else None}
        for bits, mean in WIDTHS.items()
    ]
    return {"settings": settings, "widths": widths, "max_loss": MAX_LOSS}


def planned(problem: dict[str, Any], time_limit_s: float) -> dict[str, Any] | None:
    """Return the plan of a problem, or None if there is none."""
    done = subprocess.run(
        [find_executable(), "--plan=auto", "--problem=-", "--format=json", f"--time-limit={time_limit_s}"],
        input=json.dumps(problem),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 3):
        raise RuntimeError(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer if done.returncode == 0 else None


def best_uniform(problem: dict[str, Any], time_limit_s: float) -> float:
    """Return the throughput of the best uniform setting; 0 if none keeps the limits."""
    best = 0.0
    for setting in problem["settings"]:
        for width in problem["widths"]:
            if width["bits"] >= 8 * setting["element_bytes"]:
                continue
            found = planned({**problem, "settings": [setting], "widths": [width]}, time_limit_s)
            best = max(best, found["throughput_items_per_s"] if found else 0.0)
    return best


def compare(clusters: int, time_limit_s: float) -> bool:
    """Print the gains over the best uniform setting; return whether the targets are met."""
    gains: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(clusters):
        thin = seed % 2 == 1
        problem = instance(seed, 4 + seed % 3, 24, (1, 4, 16), thin=thin)
        found = planned(problem, time_limit_s)
        uniform = best_uniform(problem, time_limit_s)
        if found and uniform:
            gains[thin].append(found["throughput_items_per_s"] / uniform)
    for thin, each in gains.items():
        if each:
            kind = "thin links" if thin else "fast links"
            print(
                f"{kind}: {len(each)} clusters, joint plan / best uniform setting: "
                f"median {statistics.median(each):.2f}, least {min(each):.3f}, most {max(each):.2f}"
            )
    never_worse = all(gain >= 1 - 1e-9 for each in gains.values() for gain in each)
    return never_worse and (not gains[True] or statistics.median(gains[True]) >= 1.2)


def time_large(instances: int, time_limit_s: float) -> None:
    """Print the time and gap of large instances."""
    for seed in range(instances):
        problem = instance(seed, 16, 48, (1, 4, 8, 16), thin=seed % 2 == 1)
        for limit in (1.0, time_limit_s):
            found = planned(problem, limit)
            if found:
                print(
                    f"16 hosts, 48 layers, instance {seed}, limit {limit:g} s: {found['status']} after "
                    f"{found['elapsed_s']:.2f} s, gap {100 * found['gap']:.2f} %"
                )


def main() -> int:
    """Print the comparison; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", type=int, default=60, help="random clusters (%(default)s)")
    parser.add_argument("--large", type=int, default=4, help="large instances (%(default)s)")
    parser.add_argument(
        "--time-limit", type=float, default=10.0, help="seconds a plan may take (%(default)s)"
    )
    wanted = parser.parse_args()
    met = compare(wanted.clusters, wanted.time_limit)
    time_large(wanted.large, wanted.time_limit)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
