"""The choice of microbatch size, cut, hosts, number types and bits together (``--plan auto``).

    profiles of the hosts ─> microbatch sizes up to -u ─> sched-pipeline --plan auto ─> one schedule

``sched-pipeline`` names the profiles that are missing and what was not measured, and plans without it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeedge.base.errors import ScheduleError
from pipeedge.base.program import program_name
from pipeedge.base.wording import figure
from pipeedge.plan.sched_pipeline import GRACE_S, PROGRAM, not_understood, run_program
from pipeedge.plan.schedule_files import schedule_on
from pipeedge.plan.scheduler import PromisedStage, SchedulerRequest, Solution
from pipeedge.plan.spec_files import find_named, read_files

__all__ = ["JointPlan", "choose_together", "profiled_sizes"]

_CHOSEN = ("--batch-size=", "--dtype=")
"""Options of a single schedule that the plan chooses."""


@dataclass(frozen=True)
class JointPlan:
    """A schedule with everything that was chosen with it."""

    solution: Solution
    microbatch_size: int
    note: str
    """What was chosen, in one line."""


def choose_together(
    asked: SchedulerRequest,
    min_agreement: float | None,
    hosts: Sequence[str] | None,
    *,
    exactly: bool = False,
) -> JointPlan:
    """Find the best plan with microbatches of at most the requested size.

    Args:
        asked: the files, and the largest microbatch size.
        min_agreement: least fraction of items classified as in float32 with uncompressed links; None for the
            scheduler's default.
        hosts: the host of each rank; None where the hosts are called by their ranks.
        exactly: whether microbatches must have the requested size.

    Raises:
        ScheduleError: no profile has such a microbatch size.
        InfeasibleError: no plan keeps the limits.
        PipeEdgeError: as ``scheduler.solve``.
    """
    sizes = [asked.microbatch_size] if exactly else profiled_sizes(asked)
    if not sizes:
        raise ScheduleError(
            f"--plan auto: no host has a profile of {asked.model_name} for microbatches of at most "
            f"{asked.microbatch_size} ({asked.dev_types_file}); allow larger ones with -u"
        )
    printed = run_program(
        [
            "--plan=auto",
            "--format=json",
            *(option for option in asked.arguments() if not option.startswith(_CHOSEN)),
            f"--batch-sizes={','.join(map(str, sizes))}",
            *([] if min_agreement is None else [f"--min-agreement={min_agreement}"]),
            f"--time-limit={asked.time_limit_s}",
        ],
        timeout_s=asked.time_limit_s + GRACE_S,
    )
    return _read_plan(printed, hosts)


def profiled_sizes(asked: SchedulerRequest) -> list[int]:
    """Return the microbatch sizes up to the requested one that hosts have profiles for, ascending."""
    files = read_files(device_types=asked.dev_types_file, devices=asked.dev_file)
    return sorted(
        {
            profile.batch_size
            for kind, listed in files.devices.items()
            if kind in files.device_types and (not asked.hosts or set(listed) & set(asked.hosts))
            for profile in find_named(files.device_types[kind].profiles, asked.model_name) or ()
            if profile.batch_size <= asked.microbatch_size
        }
    )


def _read_plan(text: str, hosts: Sequence[str] | None) -> JointPlan:
    try:
        answer: dict[str, Any] = json.loads(text)
        rows = answer["schedule"]
        schedule = schedule_on(
            [
                (str(row["host"]), tuple(row["layers"]), int(row["quant_bits"]), str(row["dtype"]))
                for row in rows
            ],
            hosts,
            program_name(PROGRAM),
        )
        solution = Solution(
            schedule=schedule.check(n_layers=answer["layers"], world_size=max(schedule.ranks) + 1),
            bottleneck_s=answer["bottleneck_s"],
            throughput_items_per_s=answer["throughput_items_per_s"],
            latency_s=answer["latency_s"],
            lower_bound_s=answer["lower_bound_s"],
            gap=answer["gap"],
            bottleneck=answer["bottleneck"],
            warnings=tuple(answer["warnings"]),
            unused_hosts=tuple((host["host"], host["why"]) for host in answer["left_out"]),
            stages=tuple(
                PromisedStage(
                    compute_s=row["compute_s"] + row["data_s"],
                    link_out_s=row["link_out_s"],
                    threads=row.get("threads"),
                    tokens=tuple(map(int, row["tokens"])),
                    data_s=row["data_s"],
                    kernels=row.get("kernels"),
                )
                for row in rows
            ),
            input_link_s=rows[0]["link_in_s"],
            feed_s=answer["feed_s"],
            collect_s=answer["collect_s"],
        )
        return JointPlan(solution, int(answer["batch_size"]), _note(answer))
    except (ValueError, KeyError, TypeError) as error:
        raise not_understood(error) from error


def _note(answer: dict[str, Any]) -> str:
    rate = answer["throughput_items_per_s"]
    parts = [f"--plan auto takes microbatches of {int(answer['batch_size'])}"]
    if rate is not None:
        parts.append(f"{figure(rate, 3)} items/s")
    if answer["losses_known"]:
        parts.append(f"an agreement of {figure(max(0.0, 1 - answer['loss']), 4)} expected")
    if answer["gap"] > 0:
        parts.append(f"at most {figure(100 * answer['gap'], 2)} % from the best plan")
    return ", ".join(parts)
