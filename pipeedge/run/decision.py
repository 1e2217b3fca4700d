"""Messages of the ranks before a run: the facts of each, and rank 0's decisions.

facts of all ranks ──disagreement?──> schedule ──> Plan ──(announced)──> every rank
facts of who is left ───────────> schedule ──> the next plan, after a rank is lost
a better schedule ──────────────────────────> the next plan, beside the one that runs
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeedge.base.errors import (
    EXIT_INFEASIBLE,
    EXIT_PEER,
    InfeasibleError,
    WeightsError,
)
from pipeedge.base.fields import Options, convert, decoding, reader
from pipeedge.base.machine import available_bytes
from pipeedge.base.schedule import Schedule
from pipeedge.base.text_lengths import InputSizes
from pipeedge.base.wording import figure, plural
from pipeedge.control.announcement import Announcement
from pipeedge.control.changing import Dropped, RunSnapshot, Switched
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.forms import Forms, Refusal
from pipeedge.control.plans import Wanted
from pipeedge.control.session import Session
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.step_rows import StepBounds
from pipeedge.observe.metrics import StageStats
from pipeedge.plan.after_loss import Held
from pipeedge.plan.cache_owners import CopiedPages
from pipeedge.plan.cache_size import bounds_after_loss, choose_bounds, describe_cache
from pipeedge.plan.facts import disagreement, rank_facts, unlikeness
from pipeedge.plan.planning import InputFacts, Plan
from pipeedge.plan.schedule_choice import PlannedSchedule, plan_schedule
from pipeedge.request.scheduling import AUTO
from pipeedge.run.context import RankContext
from pipeedge.run.kept_for_loss import keep_for_loss
from pipeedge.run.replanning import (
    PlanAsMeasured,
    describe,
    goes_on,
    name_stages,
    plan_schedule_again,
)

if TYPE_CHECKING:  # only the data rank needs it
    from pipeedge.data import DataEnds
    from pipeedge.plan.choice import Trial
    from pipeedge.plan.scheduler import Choice

__all__ = ["FORMS", "Decider", "RunSession", "find_facts", "find_weights"]

RunSession: TypeAlias = Session[Options, Plan, StageStats | None]

FORMS: Forms[Options, Plan, StageStats | None] = Forms(
    facts=reader(Options), plan=reader(Plan), stats=reader(StageStats | None)
)
"""The facts of a run are an open list of options to compare, and stay a mapping."""
_read_copies = reader(tuple[CopiedPages, ...] | None)


def find_weights(context: RankContext) -> str | None:
    """Return the fingerprint of the weights of this rank, or None if it has none that can be read.

    Not every rank needs weights. One that does says what is wrong when it loads them.
    """
    try:
        return context.model.fingerprint(context.request.model.weights)
    except WeightsError:
        return None


def find_facts(context: RankContext, weights: str | None, data: DataEnds | None) -> dict[str, Any]:
    """Return what this rank was asked to do and, on the data rank, what is known of the input.

    Args:
        context: This rank.
        weights: Fingerprint of its weights, or None.
        data: Input and results of the run, on the data rank.
    """
    request, model = context.request, context.model
    source = data.source if data is not None else None
    return rank_facts(
        request,
        model,
        weights=weights,
        items=source.total if source is not None else None,
        sizes=None if data is None else InputSizes(data.source.max_tokens, data.source.lengths, data.lengths),
        pixels=source.pixels if source is not None else None,
        memory_bytes=max(0, available_bytes() - (0 if data is None else data.coming_bytes)),
    )


class Decider:
    """Rank 0's decisions: the plan, and those that follow when ranks are lost or come.

    Args:
        context: This rank.
        trial: Tries the first plan on held-out items; None if they were not asked for.
        left_out: Returns why the run begins without a rank, for each without which it does.
    """

    def __init__(
        self,
        context: RankContext,
        trial: Trial | None = None,
        left_out: Callable[[], Mapping[int, Failure]] = dict,
    ) -> None:
        self._context = context
        self._trial = trial
        self._left_out = left_out
        self._facts: dict[int, Options] = {}
        self._plan: Plan | None = None
        self._held = Held()
        self._numbers = itertools.count(1)  # of plans
        self._unlikeness: str | None = None
        self.limits: Choice | None = None
        """What was chosen with the first plan within which limits, which hold for all that follow."""
        self.as_measured: PlanAsMeasured | None = None
        """Plans for the speed that the hosts of the run have had lately; None if it is not known."""
        self.lengths: str | None = None
        """Histogram of the sentences' lengths to plan for from now on; None for that of the first plan."""

    def decide(self, facts: Mapping[int, Options]) -> Announcement[Plan] | Refusal:
        """Compare the facts of all ranks, and decide the schedule."""
        mismatch = disagreement(facts)
        if mismatch is not None:
            return Refusal(mismatch)
        self._facts = dict(facts)
        self._warn_of_unlike_ranks()
        context, request = self._context, self._context.request
        data_rank = request.schedule.data_rank
        known = _input_facts(facts, data_rank)
        with context.activity.busy("scheduling"):
            planned = plan_schedule(request, context.model, known.sizes, trial=self._trial)
        for note in planned.notes:
            context.warn(note)
        self.limits = planned.limits
        plan = Plan(
            schedule=planned.schedule,
            data_rank=data_rank,
            items=known.items,
            microbatch_size=planned.microbatch_size or request.microbatch_size,
            max_tokens=known.max_tokens,
            lengths=known.lengths,
            texts=known.text_lengths,
            pixel_table=known.pixel_table,
            prediction=planned.prediction,
            compression=request.links.compression,
            record_rows=known.record_rows,
            goes_on=goes_on(request, known.items),
        )
        if isinstance(context.model, DecoderModel):
            steps = self._bounds(context.model, plan, facts)
            plan = dataclasses.replace(plan, steps=steps)
        if request.schedule.replan == AUTO and not plan.goes_on and request.world.size > 1:
            return Refusal("--replan auto needs --on-failure continue where the input has no end")
        missing = sorted(set(range(request.world.size)) - facts.keys())
        return self._begin_without(missing, plan, facts) if missing else self._announced(plan)

    def _bounds(self, model: DecoderModel, plan: Plan, facts: Mapping[int, Options]) -> StepBounds:
        """Return the bounds of the steps of a decoder, and tell the user of its cache."""
        memory = {rank: told.get("memory_bytes") for rank, told in facts.items()}
        bounds = choose_bounds(
            model,
            plan.schedule,
            self._context.request.cache,
            sequences=plan.most_items,
            answers=plan.items,
            data_rank=plan.data_rank,
            memory=memory,
        )
        if not self._context.request.output.quiet:
            self._context.warn(describe_cache(model, plan.schedule, bounds))
        return bounds

    def _begin_without(
        self, missing: Sequence[int], plan: Plan, facts: Mapping[int, Options]
    ) -> Announcement[Plan] | Refusal:
        """Return the plan for the ranks that are here, though some have not come in time, or were lost."""
        request, model = self._context.request, self._context.model
        left_out = self._left_out()
        lost = [one for rank in missing if (one := left_out.get(rank)) and one.kind is not FailureKind.ABSENT]
        absent = [rank for rank in missing if rank not in {one.rank for one in lost}]
        causes = [one.line for one in lost]
        if absent:
            which = f"{plural(len(absent), 'rank')} {', '.join(map(str, absent))} of {request.world.size}"
            causes.append(f"{which} never appeared within {figure(request.world.timeout_s)} s")
        cause = "; ".join(causes)
        if not plan.goes_on:
            remedy = ": start each rank, with the same --addr and --port" if absent else ""
            return Refusal(f"{cause}{remedy}", EXIT_PEER)
        planned = plan_schedule_again(request, model, plan, facts, self._held, limits=self.limits)
        without = f"without {plural(len(missing), 'it', 'them')}"
        if not isinstance(planned, PlannedSchedule):
            return Refusal(f"{cause}; nothing fits {without}: {planned}", EXIT_PEER)
        self._context.warn(f"{cause}; the run begins {without}, with {name_stages(planned.schedule)}")
        return self._announced(_following(plan, planned, self._steps(plan, planned.schedule, facts)))

    @property
    def present(self) -> Plan | None:
        """The plan that was announced last, with the lengths to plan for now, or None before the first."""
        plan = self._plan
        if plan is None or self.lengths is None:
            return plan
        return dataclasses.replace(plan, lengths=self.lengths)

    def plan_again(self, wanted: Wanted, facts: Mapping[int, Options]) -> Announcement[Plan] | Refusal:
        """Return a plan for the ranks that are left, after the last one has failed."""
        before = self.present
        if before is None:
            return Refusal(f"{wanted.cause}; there was no plan before", EXIT_INFEASIBLE)
        request, model = self._context.request, self._context.model
        self._facts = dict(facts)
        for rank, copied in wanted.copied.items():
            with decoding(f"what rank {rank} says of its copies"):
                self._held.copied(rank, _read_copies(copied) or ())
        for rank in wanted.lost:
            self._held.forget(rank)
        planned = plan_schedule_again(
            request, model, before, facts, self._held, self.as_measured, self.limits
        )
        if not isinstance(planned, PlannedSchedule):
            return Refusal(f"{wanted.cause}; nothing fits without it: {planned}", EXIT_INFEASIBLE)
        try:
            steps = self._steps(before, planned.schedule, facts)
        except InfeasibleError as error:
            return Refusal(f"{wanted.cause}; nothing fits without it: {error}", EXIT_INFEASIBLE)
        plan = _following(before, planned, steps, wanted.cause, wanted.lost)
        return dataclasses.replace(self._announced(plan), line=describe(before, plan))

    def _steps(self, before: Plan, schedule: Schedule, facts: Mapping[int, Options]) -> StepBounds | None:
        """Return the bounds of the steps of a plan that follows; None for an encoder.

        Raises:
            InfeasibleError: The cache does not fit.
        """
        model = self._context.model
        if before.steps is None or not isinstance(model, DecoderModel):
            return None
        return bounds_after_loss(
            model,
            schedule,
            self._context.request.cache,
            before.steps,
            data_rank=before.data_rank,
            memory={rank: told.get("memory_bytes") for rank, told in facts.items()},
        )

    def change(
        self,
        session: RunSession,
        planned: PlannedSchedule,
        since: RunSnapshot,
        cause: str,
        line: str,
    ) -> Switched | Dropped:
        """Replace the plan that runs with a better one; wait for the outcome.

        Args:
            session: Session of the ranks.
            planned: The better schedule, with microbatches of the same size.
            since: What the decision was based on.
            cause: Reason for the change, for the report.
            line: What is done and why, for the user.
        """
        announced, before = self._plan, self.present
        if before is None:
            return Dropped("there was no plan before")
        try:
            steps = self._steps(before, planned.schedule, self._facts)
        except InfeasibleError as error:
            return Dropped(str(error))
        plan = self._numbered(_following(before, planned, steps, cause))
        outcome = session.change_to(dataclasses.replace(_announcement(plan), line=line), since)
        if isinstance(outcome, Switched) and self._plan is announced:  # otherwise a rank was lost since then
            self._plan = plan
            self._held.loads(plan.schedule, plan.number, plan.standbys, plan.outputs)
        return outcome

    def review(self, rank: int, facts: Options) -> str | None:
        """Return why a process that comes during the run cannot have a part, or None if it can."""
        known = {other: told for other, told in self._facts.items() if other != rank}
        mismatch = disagreement({**known, rank: facts})
        if mismatch is None:
            self._facts[rank] = facts
            self._held.forget(rank)
            self._warn_of_unlike_ranks()
        return mismatch

    def _warn_of_unlike_ranks(self) -> None:
        """Say how the ranks differ, unless that was said before."""
        unlike = unlikeness(self._facts)
        if unlike is not None and unlike != self._unlikeness:
            self._context.warn(unlike)
        self._unlikeness = unlike

    def _announced(self, plan: Plan) -> Announcement[Plan]:
        self._plan = plan = self._numbered(plan)
        self._held.loads(plan.schedule, plan.number, plan.standbys, plan.outputs)
        return _announcement(plan)

    def _numbered(self, plan: Plan) -> Plan:
        """Return a plan with the next number, and with what its ranks have and keep of their layers."""
        number, held = next(self._numbers), self._held
        since, copies = held.since(plan.schedule, number), held.copies(plan.schedule)
        plan = dataclasses.replace(plan, number=number, since=since, copies=copies)
        return self._kept_for_loss(plan)

    def _kept_for_loss(self, plan: Plan) -> Plan:
        """Return a plan with the outputs and copies that ranks keep, if asked for; say what cannot be."""
        context = self._context
        if plan.steps is None or not isinstance(context.model, DecoderModel):
            return plan

        def plan_again(held: Held, facts: Mapping[int, Options]) -> PlannedSchedule | str:
            return plan_schedule_again(
                context.request, context.model, plan, facts, held, self.as_measured, self.limits
            )

        kept = keep_for_loss(context.request, context.model, plan, self._facts, self._held, plan_again)
        for note in kept.notes:
            context.warn(note)
        return kept.plan


def _following(
    before: Plan,
    planned: PlannedSchedule,
    steps: StepBounds | None,
    cause: str = "",
    lost: tuple[int, ...] = (),
) -> Plan:
    """Return the plan that follows another one."""
    return dataclasses.replace(
        before,
        schedule=planned.schedule,
        prediction=planned.prediction,
        steps=steps,
        since=(),
        outputs=(),
        cause=cause,
        lost=lost,
    )


def _announcement(plan: Plan) -> Announcement[Plan]:
    names = {rank: name for rank in plan.participants if (name := plan.name(rank)) is not None}
    return Announcement(plan, plan.participants, names, plan.data_rank, goes_on=plan.goes_on)


def _input_facts(facts: Mapping[int, Options], data_rank: int) -> InputFacts:
    """Return what the data rank says of its input."""
    with decoding(f"what rank {data_rank} says of its input"):
        known: InputFacts = convert(facts[data_rank], InputFacts)
        return known
