"""The choice of microbatch size, cut, hosts, number types and bits together (``--plan auto``).

    profiles of the hosts ─> microbatch sizes up to -u ─> sched-pipeline --plan auto ─> one schedule
                                                               └─ tighter limits <─ trial on held-out items

``sched-pipeline`` names the profiles that are missing and what was not measured, and plans without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pipeedge.base.errors import InfeasibleError, ScheduleError
from pipeedge.base.program import program_name
from pipeedge.base.schedule import Schedule
from pipeedge.base.wording import count, figure
from pipeedge.plan.sched_pipeline import GRACE_S, PROGRAM, not_understood, run_program
from pipeedge.plan.schedule_files import schedule_on
from pipeedge.plan.scheduler import PromisedStage, SchedulerRequest, Solution
from pipeedge.plan.spec_files import find_named, read_files
from pipeedge.plan.specs import ModelProfile, short_dtype
from pipeedge.request.scheduling import ENERGY

__all__ = ["JointPlan", "Trial", "choose_together", "profiled_sizes"]

_NOTHING = 1e-9
"""Largest expected loss that counts as none."""
_LESS = 0.1
"""Least part by which the expected loss of the next plan is smaller, so that it is not nearly the same."""
_WIDTHS = (0, 16, 8, 6, 4)
"""Bits of links that the scheduler chooses from by default."""
_BEGINNING = "--plan auto takes "
_CHOSEN = ("--batch-size=", "--dtype=")
"""Options of a single schedule that the plan chooses."""


@dataclass(frozen=True)
class JointPlan:
    """A schedule with everything that was chosen with it."""

    solution: Solution
    microbatch_size: int
    notes: tuple[str, ...]
    """Lines about each attempt and the choice."""


class Trial(Sized, Protocol):
    """A trial of plans on held-out items, of which it has a number."""

    def __call__(self, schedule: Schedule, microbatch_size: int, /) -> float:
        """Return the fraction of the items whose class under ``schedule`` is that of float32."""


@dataclass(frozen=True)
class _Limits:
    """Limits of the choice; None for those of the scheduler."""

    min_agreement: float | None
    dtypes: tuple[str, ...] | None = None
    widths: tuple[int, ...] | None = None

    def arguments(self) -> list[str]:
        """Return the options of the scheduler."""
        options = {
            "--min-agreement": None if self.min_agreement is None else [self.min_agreement],
            "--dtypes": self.dtypes,
            "--widths": self.widths,
        }
        return [
            f"{name}={','.join(map(str, values))}" for name, values in options.items() if values is not None
        ]

    def without(self, answer: dict[str, Any], dtypes: Iterable[str]) -> _Limits | None:
        """Return limits that exclude a plan, or None if it is exact.

        The next plan is to have less expected loss. One that is expected to lose nothing loses its fewest
        bits, or a number type.

        Args:
            answer: What the scheduler says of the plan.
            dtypes: Profiled number types.
        """
        loss = answer["loss"]
        if loss > _NOTHING:
            return replace(self, min_agreement=1 - loss * (1 - _LESS))
        fewest = min((row["quant_bits"] for row in answer["schedule"] if row["quant_bits"]), default=0)
        if fewest:
            widths = _WIDTHS if self.widths is None else self.widths
            return replace(self, widths=tuple(bits for bits in widths if bits == 0 or bits > fewest))
        used = {row["dtype"] for row in answer["schedule"]} - {"float32"}
        left = tuple(dtype for dtype in self.dtypes or tuple(dtypes) if dtype not in used)
        return replace(self, dtypes=left) if used and left else None


def choose_together(
    asked: SchedulerRequest,
    min_agreement: float | None,
    hosts: Sequence[str] | None,
    *,
    exactly: bool = False,
    trial: Trial | None = None,
) -> JointPlan:
    """Find the best plan with microbatches of at most the requested size that passes its trial.

    Args:
        asked: The files, and the largest microbatch size.
        min_agreement: Least fraction of items classified as in float32 with uncompressed links; 0 allows what
            was not measured, too; None for the scheduler's default.
        hosts: The host of each rank; None where the hosts are called by their ranks.
        exactly: Whether microbatches must have the requested size.
        trial: Tries plans on held-out items; one with less than the wanted agreement gives way to the next
            best one. None takes the best plan untried.

    Raises:
        ScheduleError: No profile has such a microbatch size.
        InfeasibleError: No plan keeps the limits, or passes its trial.
        PipeEdgeError: As ``scheduler.solve``.
    """
    sizes = [asked.microbatch_size] if exactly else profiled_sizes(asked)
    if not sizes:
        raise ScheduleError(
            f"--plan auto: no host has a profile of {asked.model_name} for microbatches of at most "
            f"{asked.microbatch_size} ({asked.dev_types_file}); allow larger ones with -u"
        )

    def plan(limits: _Limits) -> tuple[JointPlan, dict[str, Any]]:
        printed = run_program(
            [
                "--plan=auto",
                "--format=json",
                *(option for option in asked.arguments() if not option.startswith(_CHOSEN)),
                f"--batch-sizes={','.join(map(str, sizes))}",
                *limits.arguments(),
                *_objective(asked),
                f"--time-limit={asked.time_limit_s}",
            ],
            timeout_s=asked.time_limit_s + GRACE_S,
        )
        return _read_plan(printed, hosts)

    if trial is None:
        return plan(_Limits(min_agreement))[0]
    return _first_that_passes(plan, _Limits(min_agreement), trial, _profiled_dtypes(asked))


def _objective(asked: SchedulerRequest) -> list[str]:
    """Return the options that say what the plan is to make as good as it can."""
    least = asked.min_throughput
    return [f"--objective={asked.objective}", *([] if least is None else [f"--min-throughput={least}"])]


def _first_that_passes(
    plan: Callable[[_Limits], tuple[JointPlan, dict[str, Any]]],
    limits: _Limits | None,
    trial: Trial,
    dtypes: Sequence[str],
) -> JointPlan:
    """Return the best plan with the wanted agreement on held-out items.

    Raises:
        InfeasibleError: There is none.
    """
    refused: list[str] = []
    wanted = None
    while limits is not None:
        try:
            found, answer = plan(limits)
        except InfeasibleError:
            if not refused:
                raise
            break
        if wanted is None:  # any loss is allowed where there is no largest one
            wanted = 0.0 if answer["max_loss"] is None else 1 - answer["max_loss"]
        part = trial(found.solution.schedule, found.microbatch_size)
        measured = f"{figure(part, 4)} on {count(len(trial), 'held-out item')}"
        (chosen,) = found.notes
        if part >= wanted - _NOTHING:
            return replace(found, notes=(*refused, f"{chosen}, {measured}"))
        refused.append(
            f"--held-out refuses {chosen.removeprefix(_BEGINNING)}: {measured}, {figure(wanted, 4)} wanted"
        )
        limits = limits.without(answer, dtypes)
    raise InfeasibleError(f"no plan keeps the agreement on held-out items: {refused[-1]}")


def profiled_sizes(asked: SchedulerRequest) -> list[int]:
    """Return the microbatch sizes up to the requested one that hosts have profiles for, ascending."""
    return sorted({profile.batch_size for profile in _profiles(asked)})


def _profiled_dtypes(asked: SchedulerRequest) -> list[str]:
    """Return the number types of these profiles."""
    return sorted({short_dtype(profile.dtype) for profile in _profiles(asked)})


def _profiles(asked: SchedulerRequest) -> Iterable[ModelProfile]:
    """Yield the profiles of the hosts with microbatches of at most the requested size."""
    files = read_files(device_types=asked.dev_types_file, devices=asked.dev_file)
    for kind, listed in files.devices.items():
        if kind in files.device_types and (not asked.hosts or set(listed) & set(asked.hosts)):
            for profile in find_named(files.device_types[kind].profiles, asked.model_name) or ():
                if profile.batch_size <= asked.microbatch_size:
                    yield profile


def _read_plan(text: str, hosts: Sequence[str] | None) -> tuple[JointPlan, dict[str, Any]]:
    """Return the plan that the scheduler printed, and all that it says of it."""
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
            gap=answer["gap"],
            bottleneck=answer["bottleneck"]["words"],
            warnings=tuple(answer["warnings"]),
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
            joules_per_item=answer.get("joules_per_item"),
        )
        return JointPlan(solution, int(answer["batch_size"]), (_note(answer),)), answer
    except (ValueError, KeyError, TypeError) as error:
        raise not_understood(error) from error


def _note(answer: dict[str, Any]) -> str:
    rate = answer["throughput_items_per_s"]
    parts = [f"{_BEGINNING}microbatches of {int(answer['batch_size'])}"]
    if rate is not None:
        parts.append(f"{figure(rate, 3)} items/s")
    if answer["objective"] == ENERGY:
        parts.append(f"{figure(answer['joules_per_item'], 3)} J an item")
    if answer["losses_known"]:
        parts.append(f"an agreement of {figure(max(0.0, 1 - answer['loss']), 4)} expected")
    if answer["gap"] > 0:
        parts.append(f"at most {figure(100 * answer['gap'], 2)} % from the best plan")
    return ", ".join(parts)
