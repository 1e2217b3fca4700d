"""The schedule for the ranks that are left, on rank 0.

scheduler files      the optimum for the hosts that are left, as slow as they were last, if the run was
                     watched, else as their profiles say; layers that are loaded break ties
-pt, or an even split    the smallest change (plan.after_loss)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeedge.base.schedule import LayerRange, Schedule
from pipeedge.base.wording import figure
from pipeedge.models import Model
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.step_rows import StepBounds
from pipeedge.plan.after_loss import Held, Survivor
from pipeedge.plan.cache_size import least_cache_bytes
from pipeedge.plan.planning import Plan
from pipeedge.plan.schedule_choice import PlannedSchedule, plan_after_loss
from pipeedge.request.config import RunRequest

if TYPE_CHECKING:  # a run without the scheduler does without it
    from pipeedge.plan.scheduler import Choice

__all__ = ["PlanAsMeasured", "describe", "goes_on", "name_stages", "plan_schedule_again"]


PlanAsMeasured: TypeAlias = Callable[[Sequence[Survivor]], PlannedSchedule | None]
"""Returns the best schedule for the ranks that are left under measured conditions; None if there is none."""


def goes_on(request: RunRequest, items: int | None) -> bool:
    """Return whether a run goes on after failures.

    Who waits for the answer of a request would rather be told, unless continuing was asked for.

    Args:
        request: Request of rank 0.
        items: Number of items, or None if the input has no end.
    """
    if request.world.size < 2:
        return False
    if items is None:
        return request.transport.on_failure == "continue"
    return request.transport.goes_on


def plan_schedule_again(
    request: RunRequest,
    model: Model | DecoderModel,
    before: Plan,
    facts: Mapping[int, Mapping[str, Any]],
    held: Held,
    as_measured: PlanAsMeasured | None = None,
    limits: Choice | None = None,
) -> PlannedSchedule | str:
    """Return the schedule for the ranks that are left, or why there is none.

    Args:
        request: Request of rank 0.
        model: The model.
        before: The plan that has failed.
        facts: Facts of the ranks that are left.
        held: Layers that they have loaded.
        as_measured: Plans for the speed that the hosts had; None if it is not known.
        limits: Limits of the plan that has failed; None for those of the request.

    Raises:
        PipeEdgeError: The scheduler finds none.
    """
    hosts = request.schedule.hosts
    survivors = [
        held.survivor(
            rank, _room_bytes(told) - _ends_bytes(model, before, rank), None if hosts is None else hosts[rank]
        )
        for rank, told in sorted(facts.items())
    ]
    if request.schedule.automatic and as_measured is not None:
        found = as_measured(survivors)
        if found is not None:
            return found
    return plan_after_loss(
        dataclasses.replace(request, microbatch_size=before.microbatch_size),
        model,
        before.schedule,
        survivors,
        lambda schedule: _layer_bytes(model, schedule, before.steps),
        before.input_sizes,
        limits,
    )


def _room_bytes(facts: Mapping[str, Any]) -> float:
    """Return the memory that a rank has for weights; 0 if it has no weights to load."""
    if facts.get("weights") is None:
        return 0.0
    memory = facts.get("memory_bytes")
    return float(memory) if isinstance(memory, int) else math.inf


def _ends_bytes(model: Model | DecoderModel, plan: Plan, rank: int) -> int:
    """Return the bytes of a decoder's embedding and head if ``rank`` holds them, else 0."""
    if rank != plan.data_rank or not isinstance(model, DecoderModel):
        return 0
    return model.end_bytes(find_dtype(plan.schedule.stages[0].dtype))


def _layer_bytes(model: Model | DecoderModel, schedule: Schedule, bounds: StepBounds | None) -> list[float]:
    """Return the bytes of each layer in the number type of its stage: weights, and the least cache."""
    found = []
    for stage in schedule.stages:
        for layer in range(stage.layers.start, stage.layers.stop):
            layers = LayerRange(layer, layer + 1)
            size = model.weight_bytes(layers, find_dtype(stage.dtype))
            if isinstance(model, DecoderModel) and bounds is not None:
                size += least_cache_bytes(model, layers, stage.dtype, bounds)
            found.append(float(size))
    return found


def name_stages(schedule: Schedule) -> str:
    """Return ``layers 1-8 on rank 0, layers 9-16 on rank 1``."""
    return ", ".join(f"{stage.layers.named} on rank {stage.rank}" for stage in schedule.stages)


def describe(before: Plan, now: Plan) -> str:
    """Return the line for the user about a plan that follows another."""
    if now.schedule == before.schedule:
        line = f"{now.cause}; the run tries again with the same ranks"
    else:
        line = f"{now.cause}; the run goes on with {name_stages(now.schedule)}"
    was, will_be = (
        None if plan.prediction is None else plan.prediction.throughput_items_per_s for plan in (before, now)
    )
    if was is not None and will_be is not None:
        line += f" (predicted: {figure(will_be)} items/s, was {figure(was)})"
    return line
