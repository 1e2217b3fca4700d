"""Run joint plans in the test bed and compare them with their promise; used by ``planning.py --bed``.

    random quotas and links ──> test bed ──> profiles of all sizes and types ──> joint plan
                                   `──> a rank on each host of the plan ──> throughput ──> as promised?

Quotas and links differ from host to host. The model has four blocks of ViT-Base: of narrower rows, the
scales, which plans do not count, would be a larger part of what crosses a compressed link. Its weights are
random, so the loss of number types and bits is not measured, and plans may take any of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from beds import Bed, Kind, Pipeline, Workload, raised, steady_items_per_s

from pipeedge.plan.sched_pipeline import find_executable

__all__ = ["run_in_beds"]

TARGET = 0.07
SIZES = (2, 8)
DTYPES = ("float32", "int8")
HOSTS = 4
PROCESSORS = 1.6
"""Processors that the hosts share; the rest is for the machine."""
ITERATIONS = 3
RUN_S = 15.0
LEAST_MICROBATCHES = 24


MODEL = {
    "architectures": ["ViTForImageClassification"],
    "model_type": "vit",
    "hidden_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "qkv_bias": True,
}


def make_model(directory: Path) -> str:
    """Create the directory of the model and return it."""
    place = directory / "four-blocks"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(MODEL))
    return str(place)


def draw_kinds(seed: int) -> tuple[Kind, ...]:
    """Return different hosts with random quotas and links of 10 to 100 Mbps."""
    rng = np.random.default_rng(seed)
    quotas = PROCESSORS * rng.dirichlet(np.full(HOSTS, 8.0))
    bandwidth = rng.choice([10, 25, 100], size=HOSTS)
    return tuple(
        Kind(f"host{number}-", 1, round(max(0.15, float(quota)), 2), float(mbps))
        for number, (quota, mbps) in enumerate(zip(quotas, bandwidth, strict=True))
    )


def plan(bed: Bed, load: Workload) -> dict[str, Any]:
    """Return the best joint plan of a test bed whose first host has the data."""
    files = bed.files
    command = [str(find_executable()), "--plan=auto", "--format=json", "--min-agreement=0"]
    command += ["-m", load.model, "--data-host", bed.hosts[0]]
    command += ["-sm", str(files["models"]), "-sdt", str(files["device_types"]), "-sd", str(files["devices"])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=60)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def as_pipeline(answer: dict[str, Any], data_host: str) -> Pipeline:
    """Return the plan as the entries of a schedule file."""
    stages = []
    for row in answer["schedule"]:
        stage = {row["host"]: row["layers"], "dtype": row["dtype"]}
        stages.append(stage | ({"quant_bits": row["quant_bits"]} if row["quant_bits"] else {}))
    return Pipeline(tuple(stages), data_host)


def run_in_beds(beds: int) -> bool:
    """Print promise and measurement of a plan in each of some test beds; return whether all are close."""
    worst = 0.0
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        load = Workload(make_model(directory), max(SIZES), directory)
        for seed in range(beds):
            kinds = draw_kinds(seed)
            with raised(f"planning{os.getpid()}", kinds, directory / f"bed{seed}") as bed:
                bed.profile(load, ITERATIONS, SIZES, DTYPES)
                answer = plan(bed, load)
                size, promised = int(answer["batch_size"]), float(answer["throughput_items_per_s"])
                pipeline = as_pipeline(answer, bed.hosts[0])
                microbatches = max(LEAST_MICROBATCHES, round(RUN_S * promised / size))
                (report,) = bed.run(replace(load, ubatch=size), [pipeline], [size * microbatches])
            measured = steady_items_per_s(report)
            error = measured / promised - 1
            worst = max(worst, abs(error))
            hosts = ", ".join(f"{kind.cpu_fraction:g} at {kind.bw_mbps:g} Mbps" for kind in kinds)
            dtypes = ", ".join(row["dtype"] for row in answer["schedule"])
            print(
                f"test bed {seed} (processors and links: {hosts})\n"
                f"    {pipeline}; {dtypes}; microbatches of {size}; {answer['bottleneck']['words']}\n"
                f"    promised {promised:.2f} items/s, measured {measured:.2f} ({error:+.1%})",
                flush=True,
            )
    print(f"worst error {worst:.1%}, asked <= {TARGET:.0%}")
    return worst <= TARGET
