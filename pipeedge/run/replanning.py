"""The schedule for the ranks that are left, on rank 0: what each can hold, what each has loaded.

scheduler files      the optimum for the hosts that are left, as slow as they were last, if the run was
                     watched, else as their profiles say; layers that are loaded break ties
-pt, or an even split    the smallest change (plan.after_loss)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeedge.base.schedule import LayerRange, Schedule, StagePlan, shared_blocks
from pipeedge.base.wording import figure
from pipeedge.models import Model
from pipeedge.models.architecture import LAYERS_PER_BLOCK
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.step_rows import StepBounds
from pipeedge.plan.after_loss import Survivor
from pipeedge.plan.cache_size import least_cache_bytes
from pipeedge.plan.planning import Plan
from pipeedge.plan.schedule_choice import PlannedSchedule, plan_after_loss
from pipeedge.request.config import RunRequest

if TYPE_CHECKING:  # a run without the scheduler does without it
    from pipeedge.plan.scheduler import Choice

__all__ = ["Held", "PlanAsMeasured", "describe", "name_stages", "plan_schedule_again"]


class Held:
    """Layers that the ranks have loaded, as far as rank 0 knows.

    Args:
        block: Number of layers of a block, which a rank keeps only if it has all of them before and after.
    """

    def __init__(self, block: int = LAYERS_PER_BLOCK) -> None:
        self._block = block
        self._stages: dict[int, StagePlan] = {}
        self._since: dict[int, dict[int, int]] = {}
        """Plan since which each rank of the latest plan has had each of its layers in every plan."""

    def since(self, schedule: Schedule, number: int) -> tuple[int, ...]:
        """Return, for each layer, since which plan its rank has had it in every plan.

        Args:
            schedule: The schedule.
            number: Number of its plan, larger than those before.
        """
        found = []
        for stage in schedule.stages:
            known, kept = self._since.get(stage.rank, {}), self._kept(stage)
            layers = range(stage.layers.start, stage.layers.stop)
            found += [known.get(layer, number) if layer in kept else number for layer in layers]
        return tuple(found)

    def _kept(self, stage: StagePlan) -> range:
        """Return the layers of a stage that its rank keeps."""
        known = self._stages.get(stage.rank)
        if known is None or known.dtype != stage.dtype:
            return range(0)
        if known.layers == stage.layers:
            return range(stage.layers.start, stage.layers.stop)
        blocks = shared_blocks(known.layers, stage.layers, self._block)
        return range(blocks.start * self._block, blocks.stop * self._block)

    def loads(self, schedule: Schedule, number: int) -> None:
        """Note that the ranks of a schedule load their layers, in place of what they had.

        Args:
            schedule: The schedule.
            number: Number of its plan.
        """
        since = self.since(schedule, number)
        self._since = {
            stage.rank: {layer: since[layer] for layer in range(stage.layers.start, stage.layers.stop)}
            for stage in schedule.stages
        }
        self._stages |= {stage.rank: stage for stage in schedule.stages}

    def forget(self, rank: int) -> None:
        """Note that another process has the number ``rank``, or none."""
        self._stages.pop(rank, None)
        self._since.pop(rank, None)

    def survivor(self, rank: int, room_bytes: float, host: str | None) -> Survivor:
        """Return a rank that is left, with what it has loaded."""
        return Survivor.holding(rank, room_bytes, host, self._stages.get(rank))


PlanAsMeasured: TypeAlias = Callable[[Sequence[Survivor]], PlannedSchedule | None]
"""Returns the best schedule for the ranks that are left under measured conditions; None if there is none."""


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
