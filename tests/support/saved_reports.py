"""Create saved reports, to test what is made from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pipeedge.base.schedule import Schedule
from pipeedge.observe.records import EpochRecord
from pipeedge.observe.timeline import ThreadState
from pipeedge.simulate.simulation import PipelineModel, SimulatedLink, SimulatedStage, simulate

MICROBATCHES = 40


def simulated_body(
    compute_s: Sequence[float], wires_s: Sequence[float] = (), *, microbatches: int = MICROBATCHES
) -> dict[str, Any]:
    """Return the report of stages with these compute times and links with these times (from stage 0 on)."""
    count = len(compute_s)
    wires = [*wires_s, *[0.001] * (count - 1 - len(wires_s))]
    local = SimulatedLink(in_memory=True)
    model = PipelineModel(
        tuple(SimulatedStage(seconds) for seconds in compute_s),
        (local, *(SimulatedLink(wire) for wire in wires), local if count == 1 else SimulatedLink(0.001)),
        microbatches,
    )
    run = simulate(model)
    stages = range(count)
    return {
        "model": "some/model",
        "simulated": True,
        "schedule": [
            {"stage": n, "rank": n, "host": f"pi{n}", "layers": [4 * n + 1, 4 * n + 4], "quant_bits": 0}
            for n in stages
        ],
        "items": 8 * microbatches,
        "microbatches": microbatches,
        "ubatch_size": 8,
        "elapsed_s": run.length_s,
        "throughput_items_per_s": 8 * microbatches / run.length_s,
        "latency_s": {"p50": 1.0, "p95": 2.0, "max": 3.0},
        "latencies_s": run.latencies_s.tolist(),
        "accuracy": {"correct": 9, "labelled": 10, "top1": 0.9},
        "stages": [
            {
                "stage": n,
                "rank": n,
                "microbatches": microbatches,
                "compute_s_mean": compute_s[n],
                "send_s_mean": float(run.occupied_s[n + 1]) / microbatches,
                "bytes_out_mean": 4.8e6,
                "rss_peak_mb": 250.0 + n,
                "seconds": {doing.value: spent for doing, spent in run.seconds(n).items()},
                "memory_mb": {"weights": 100.0, "buffers": 20.0, "working": 50.0, "available": 512.0},
            }
            for n in stages
        ],
        "timeline": run.timeline(stages).to_body(),
        "series": [
            {
                "stage": n,
                "rank": n,
                "t_s": [1.0, 2.0, 3.0],
                "items_per_s": [5.0, 6.0, 5.5],
                "bytes_per_s": [1e6, 1.1e6, 1e6],
                "link_bytes_per_s": [1e8, None, 1.2e8],
                "bits": [32, 8, 4],
            }
            for n in stages
        ],
        "energy": {
            "ranks": [
                {"rank": 0, "host": "pi0", "source": "rapl", "joules": 120.0, "mean_watts": 12.0},
                {"rank": 1, "host": "pi1", "source": None, "joules": None, "why_not": ["RAPL: no counters"]},
            ],
            "joules": 120.0,
            "joules_per_item": 0.4,
            "unmeasured_hosts": ["pi1"],
        },
        "predicted": {
            "throughput_items_per_s": 8.0,
            "throughput_items_per_s_measured": 7.9,
            "throughput_items_per_s_error_percent": -1.25,
            "stages": [{"stage": 0, "rank": 0, "compute_s": 1.0, "compute_s_measured": 1.1}],
            "remarks": ["stage 0 is off"],
        },
        "skipped": ["broken.png: no image"],
        "command": ["runtime.py", "0", "2", "-pt", "1,4,5,8"],
        "versions": {"pipeedge": "0.1.0", "torch": "2.13.0"},
        "data_rank": 0,
    }


def recovered_epochs() -> tuple[EpochRecord, ...]:
    """Return the epochs of a run that lost rank 1, and then rank 2 while it recovered."""
    before = Schedule.from_partition([1, 4, 5, 8, 9, 12])
    first = before.with_rank_order([0, 3, 2], world_size=4)
    second = Schedule.from_partition([1, 4, 5, 12]).with_rank_order([0, 3], world_size=4)
    killed = "rank 1 (stage 1, layers 5-8): its process was killed or crashed"
    silent = "rank 2 (stage 2, layers 9-12): no heartbeat for 2 s"
    return (
        EpochRecord(1, before, 0.0),
        EpochRecord(2, first, 10.5, killed, (1,), 0.25, 0.5, 1.0, 4),
        EpochRecord(3, second, 20.0, silent, (2,), 0.5, 1.5, 2.0, 3),
    )


def through_json(body: dict[str, Any]) -> Any:
    """Return a report as read back from a file."""
    return json.loads(json.dumps(body))


NASTY = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>\"&\u2028"


def poisoned(value: Any) -> Any:
    """Append ``NASTY`` to every text in ``value`` that is not the name of an activity."""
    if isinstance(value, str):
        return value if value in {doing.value for doing in ThreadState} else value + NASTY
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    if isinstance(value, dict):
        return {key: poisoned(item) for key, item in value.items()}
    return value
