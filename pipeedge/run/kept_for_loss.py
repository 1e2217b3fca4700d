"""What ranks of a decoder keep for the loss of one of them: their outputs, and copies of others' caches.

    --keep-outputs    what each stage sends on          (plan.kept_outputs)
    --replicate       layers and pages of other stages  (plan.standbys), where the plan after a loss has them

Rank 0 decides it with each plan, and the doctor looks at it before a run.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipeedge.base.errors import PipeEdgeError
from pipeedge.base.fields import Options
from pipeedge.base.schedule import Schedule
from pipeedge.models.decoder import DecoderModel
from pipeedge.plan.after_loss import Held
from pipeedge.plan.cache_size import bounds_after_loss
from pipeedge.plan.kept_outputs import choose_outputs
from pipeedge.plan.planning import Plan
from pipeedge.plan.schedule_choice import PlannedSchedule
from pipeedge.plan.standbys import choose_standbys
from pipeedge.request.config import RunRequest

__all__ = ["KeptForLoss", "keep_for_loss"]


@dataclass(frozen=True)
class KeptForLoss:
    """A plan with what its ranks keep for a loss."""

    plan: Plan
    notes: tuple[str, ...] = ()
    """What is not kept though it was asked for, and why."""


def keep_for_loss(
    request: RunRequest,
    model: DecoderModel,
    plan: Plan,
    facts: Mapping[int, Options],
    held: Held,
    plan_again: Callable[[Held, Mapping[int, Options]], PlannedSchedule | str],
) -> KeptForLoss:
    """Return a plan with the outputs and copies that its ranks keep, as far as their memory allows.

    Args:
        request: Request of rank 0.
        model: The decoder.
        plan: The plan, with the bounds of its steps.
        facts: Facts of the ranks, in which ``memory_bytes`` is what a rank can allocate.
        held: What the ranks have loaded.
        plan_again: Returns the schedule for ranks that are left, or why there is none.
    """
    cache = request.cache
    wanted = {"--keep-outputs": cache.keep_outputs, "--replicate": cache.replicate}
    if not any(wanted.values()):
        return KeptForLoss(plan)
    why = None if plan.goes_on else "a loss ends the run: give -c tcp and --on-failure continue"
    if plan.step_bounds.window_pages:
        why = f"{model.name} has blocks with windows"
    if why is not None:
        lines = (f"{name}: nothing is kept for a loss, as {why}" for name, asked in wanted.items() if asked)
        return KeptForLoss(plan, tuple(lines))
    memory: Mapping[int, int | None]
    memory = {rank: told.get("memory_bytes") for rank, told in facts.items()}
    notes: tuple[str, ...] = ()
    if cache.keep_outputs:
        outputs = held.outputs(plan.schedule, plan.number)
        kept = choose_outputs(model, plan.schedule, plan.step_bounds, outputs, memory, plan.data_rank)
        memory, notes = kept.memory, kept.notes
        plan = dataclasses.replace(plan, outputs=kept.outputs)
    if cache.replicate:

        def after(rank: int) -> Schedule | None:
            left = copy.deepcopy(held)
            left.loads(plan.schedule, plan.number)
            left.forget(rank)
            others = {other: told for other, told in facts.items() if other != rank}
            try:
                planned = plan_again(left, others)
                if not isinstance(planned, PlannedSchedule):
                    return None
                bounds_after_loss(
                    model,
                    planned.schedule,
                    cache,
                    plan.step_bounds,
                    data_rank=plan.data_rank,
                    memory={other: told.get("memory_bytes") for other, told in others.items()},
                )
            except PipeEdgeError:
                return None
            return planned.schedule

        following = {rank: after(rank) for rank in plan.schedule.ranks if rank not in {0, plan.data_rank}}
        chosen = choose_standbys(model, plan.schedule, plan.step_bounds, following, memory, plan.data_rank)
        notes += chosen.notes
        plan = dataclasses.replace(plan, standbys=chosen.ranks)
    return KeptForLoss(plan, notes)
