"""Search for the best schedule under measured conditions, on rank 0 of a run that is scheduled from files.

``sched-pipeline`` searches and evaluates, and each question here is one call of it. While a plan takes over,
hosts hold the layers of both, and keep their order as far as that costs next to nothing; the program knows
how.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pipeedge.base.errors import InfeasibleError
from pipeedge.base.fields import MALFORMED, convert
from pipeedge.base.schedule import Schedule, StagePlan
from pipeedge.models.outline import Outline
from pipeedge.plan import scheduler
from pipeedge.plan.after_loss import Survivor, loaded_by
from pipeedge.plan.conditions import Conditions, StepMix
from pipeedge.plan.costs import PlanCosts
from pipeedge.plan.placing import Placing, placed, to_bodies
from pipeedge.plan.planning import Plan
from pipeedge.plan.problem import SolverOptions
from pipeedge.plan.sched_pipeline import Calls, not_understood, run_program
from pipeedge.plan.schedule_choice import Following, PlannedSchedule, host_names, scheduler_request
from pipeedge.plan.scheduler import Choice, SchedulerRequest, TextRequest
from pipeedge.request.config import RunRequest

__all__ = ["LiveSearch", "profiled_search"]

_TIME_LIMIT_S = 3.0
"""Seconds after which the best schedule found so far will do; the run goes on meanwhile."""


def profiled_search(
    request: RunRequest,
    model: Outline,
    plan: Plan,
    limits: Choice | None = None,
    call: Calls = run_program,
) -> LiveSearch:
    """Return the search over the profiles of all hosts for a run.

    Args:
        request: Request of rank 0.
        model: The model.
        plan: The plan that runs, whose microbatches keep their size.
        limits: What was chosen with it within which limits, or None for nothing but the cut.
        call: Calls the program.

    Raises:
        PipeEdgeError: The files are wrong, or are not those of the run any longer.
    """
    request = dataclasses.replace(request, microbatch_size=plan.microbatch_size)
    following = Following(range(request.world.size), limits)
    asked, _ = scheduler_request(request, model, plan.input_sizes, following)
    asked = dataclasses.replace(asked, time_limit_s=_TIME_LIMIT_S)
    return LiveSearch(
        asked.arguments(),
        scheduler.read_problem(asked, call),
        asked.solver_options,
        host_names(request),
        request.links.quant_bits,
        mixed=plan.lengths is not None,
        call=call,
        asked=asked,
    )


class LiveSearch:
    """Finds schedules that can take over from the present one, and says what they cost.

    Args:
        arguments: Command line of ``sched-pipeline`` that describes the problem.
        problem: The problem, as the program prints it.
        options: Objective and limits of the search.
        names: Host of each rank.
        quant_bits: Bits per value on each link if the user has chosen them, or None.
        mixed: Whether the times are averages over sentences of several lengths.
        call: Calls the program.
        asked: Request with the same problem; only plans of decoders need it.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        problem: Mapping[str, Any],
        options: SolverOptions,
        names: Sequence[str],
        quant_bits: Sequence[int] | None = None,
        *,
        mixed: bool = False,
        call: Calls = run_program,
        asked: SchedulerRequest | None = None,
    ) -> None:
        settings: Sequence[Mapping[str, Any]] = problem.get("settings") or [problem]
        self._arguments = tuple(arguments)
        self._hosts = frozenset(host["name"] for setting in settings for host in setting["hosts"])
        self._options = options
        self._names = tuple(names)
        self._quant_bits = quant_bits
        self._mixed = mixed
        self._call = call
        self._asked = asked
        self.data_host: str | None = problem.get("data_host")
        """Host that reads the input and collects the results, or None if that is not counted."""
        self.has_times = any(kind.get("time_s") for setting in settings for kind in setting["types"])
        """Whether the profiles have times; without them, nothing can be slower."""

    def calling(self, call: Calls) -> LiveSearch:
        """Return the same search with another way to call the program."""
        other = copy.copy(self)
        other._call = call
        return other

    def __call__(self, conditions: Conditions, hosts: frozenset[str], present: Placing) -> Placing | None:
        """Return the best stages on ``hosts``, or None if they can have none but the present ones."""
        running = to_bodies(_without_bits(present) if self._quant_bits is not None else present)
        found = self._found(conditions, hosts, {"running": running})
        if found is None or placed(found, self._names) == present:
            return None
        return placed(found, self._names)

    def costs(
        self, plans: Sequence[Placing], present: Placing, moments: Sequence[Conditions]
    ) -> list[PlanCosts]:
        """Return what plans cost beside the present one, as profiled and at some moments."""
        answer = self._answer(
            {
                "running": to_bodies(present),
                "plans": [to_bodies(plan) for plan in plans],
                "moments": [conditions.to_body(self._hosts) for conditions in moments],
            },
            self._options.evaluating(),
        )
        try:
            found: list[PlanCosts] = convert(answer["plans"], list[PlanCosts])
        except MALFORMED as error:
            raise not_understood(error) from error
        return found

    def costs_of_steps(self, stages: Placing, steps: StepMix, moments: Sequence[Conditions]) -> PlanCosts:
        """Return what a plan of a decoder costs for some steps, as profiled and at some moments.

        Args:
            stages: The plan.
            steps: Steps that continue texts.
            moments: Conditions of each moment.
        """
        if self._asked is None:
            raise TypeError("a search without a request knows no steps")
        texts = TextRequest.of_steps(steps.rows, steps.positions, steps.texts)
        of_steps = dataclasses.replace(self._asked, texts=texts)
        bodies = [conditions.to_body(self._hosts) for conditions in moments]
        schedule = self._schedule(stages)
        return scheduler.evaluate(
            of_steps, schedule, hosts=self._names, moments=bodies, call=self._call
        ).costs

    def after_loss(
        self, conditions: Conditions, survivors: Sequence[Survivor], tokens: int | None
    ) -> PlannedSchedule | None:
        """Return the best schedule when no other one runs, or None if there is none.

        Args:
            conditions: Measured conditions.
            survivors: Ranks that are left, with the layers that they have loaded.
            tokens: Tokens of the longest sentence of the input; None for images.
        """
        hosts = frozenset(self._names[one.rank] for one in survivors)
        found = self._found(conditions, hosts, {"loaded": to_bodies(loaded_by(survivors, self._names))})
        return None if found is None else self.planned(placed(found, self._names), conditions, tokens)

    def planned(self, stages: Placing, conditions: Conditions, tokens: int | None) -> PlannedSchedule:
        """Return stages as a schedule, and what it promises under some conditions.

        Args:
            stages: Stages that the search has returned.
            conditions: Conditions to predict for.
            tokens: Tokens of the longest sentence of the input; None for images.
        """
        given = {**conditions.to_body(self._hosts), "plans": [to_bodies(stages)]}
        answer = self._answer(given, self._options.evaluating())
        found = scheduler.read_answer(answer["plans"][0], self._names)
        return PlannedSchedule(self._schedule(stages), found.costs.prediction(tokens, mixed=self._mixed))

    def _found(
        self, conditions: Conditions, hosts: frozenset[str], before: Mapping[str, Any]
    ) -> Schedule | None:
        """Return the best schedule on some hosts; None if there is none."""
        missing = sorted(self._hosts - hosts)
        try:
            answer = self._answer(
                {**conditions.to_body(self._hosts), **before, "missing": missing}, self._options.arguments()
            )
        except InfeasibleError:
            return None
        schedule = scheduler.read_answer(answer, self._names).schedule
        if self._quant_bits is None:
            return schedule
        if len(self._quant_bits) != len(schedule.stages):  # -q has bits for another number of links
            return None
        return schedule.with_quant_bits(self._quant_bits)

    def _answer(self, conditions: Mapping[str, Any], options: Sequence[str]) -> Any:
        return scheduler.ask([*self._arguments, *options], conditions, _TIME_LIMIT_S, self._call)

    def _schedule(self, stages: Placing) -> Schedule:
        return Schedule(
            tuple(
                StagePlan(stage.layers, self._names.index(stage.host), stage.host, stage.bits, stage.dtype)
                for stage in stages
            )
        )


def _without_bits(stages: Placing) -> Placing:
    return tuple(dataclasses.replace(stage, bits=0) for stage in stages)
