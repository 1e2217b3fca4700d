"""Watch a run on rank 0, and say when another schedule would pay, or change to it.

    hub ──heartbeats of the stages──> [replanner] ──windows──> LivePlanning ──> Proposal ──> a line, a change

The thread looks every second, and ends with the run. Nothing that it does or meets ends the run.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from msgspec.structs import replace

from pipeedge.base.errors import one_line
from pipeedge.base.fields import Options
from pipeedge.base.text_lengths import are_alike, mean_of
from pipeedge.base.wording import count, figure
from pipeedge.control.changing import RunSnapshot, Switched
from pipeedge.observe.pipeline_state import PipelineState
from pipeedge.observe.records import ReplanRecord
from pipeedge.plan.change_detection import WindowMaker, WorkWindow
from pipeedge.plan.live_choice import LivePlanning, Objective, Proposal
from pipeedge.plan.live_search import LiveSearch, profiled_search
from pipeedge.plan.placing import Placing, placed
from pipeedge.plan.planning import Plan
from pipeedge.plan.sched_pipeline import KeptProgram, run_program
from pipeedge.plan.schedule_choice import PlannedSchedule, host_names
from pipeedge.request.scheduling import ENERGY
from pipeedge.run.context import RankContext
from pipeedge.run.decision import FORMS, Decider, RunSession
from pipeedge.run.replanning import PlanAsMeasured, name_stages

__all__ = ["RunWatcher", "describe_proposal", "watch_run"]

_LOOK_S = 1.0
"""Seconds between two looks at what the hub knows."""
_UNITS_OF_TEXT = ("s a token of a lone stream", "J a token")
"""Units of latency and energy."""


def watch_run(
    context: RankContext, session: RunSession, decider: Decider, shown: PipelineState | None = None
) -> None:
    """Watch a run with several ranks, scheduled from files, in a thread of its own.

    Args:
        context: Rank 0.
        session: Session of the ranks.
        decider: Rank 0's decisions.
        shown: What is told how slow hosts are, or None.
    """
    watcher = RunWatcher(context, session, decider, shown=shown)
    threading.Thread(target=watcher.run, name="replanner", daemon=True).start()


class RunWatcher:
    """Turns what the hub knows into proposals, and follows them.

    Args:
        context: Rank 0.
        session: Session of the ranks.
        decider: Rank 0's decisions, which have the present plan.
        clock: Clock in seconds.
        pause: Waits for a number of seconds.
        shown: What is told how slow hosts are, or None.
    """

    def __init__(
        self,
        context: RankContext,
        session: RunSession,
        decider: Decider,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
        shown: PipelineState | None = None,
    ) -> None:
        self._context = context
        self._session = session
        self._decider = decider
        self._shown = shown
        self._clock = clock
        self._pause = pause or threading.Event().wait
        self._names = host_names(context.request)
        self._proposed: set[Placing] = set()
        self._done = _Done()
        self._scheduler = KeptProgram()  # it is asked several times in each window

    def run(self) -> None:
        """Watch until the run ends."""
        try:
            with self._scheduler:
                self._watch()
        except Exception as error:  # the run is none the worse for it
            if self._session.snapshot() is not None:
                self._context.warn(f"the run is not watched for a better schedule: {one_line(error)}")

    def _watch(self) -> None:
        plan = self._decider.present
        if plan is None:
            return
        search, planning = self._planning(plan)
        if not search.has_times:
            return
        # Steps of a decoder have any number of rows.
        windows = WindowMaker(plan.microbatch_size if plan.steps is None else 1)
        while (seen := self._session.snapshot()) is not None:
            window = self._window(windows, seen)
            plan = self._decider.present
            lengths = None if plan is None else _new_lengths(plan, seen)
            if plan is not None and lengths is not None:
                # What was compared with the times of other lengths says nothing any longer.
                self._decider.lengths, plan = lengths, dataclasses.replace(plan, lengths=lengths)
                why = f"sentences have {figure(mean_of(lengths), 2)} tokens on average"
                search, planning = self._planning(plan, why)
            if window is not None and plan is not None:
                self._decide(planning, search, window, plan, seen)
                self._context.watched.as_run = planning.as_run()
                if planning.is_settled:
                    self._decider.as_measured = self._as_measured(planning, search, plan.max_tokens)
                    if self._shown is not None:
                        self._shown.measured(planning.slowness)
            self._pause(_LOOK_S)

    def _planning(self, plan: Plan, outdated: str | None = None) -> tuple[LiveSearch, LivePlanning]:
        """Return the search for the lengths of a plan's sentences, and what decides with it.

        Args:
            plan: The plan, with the lengths to plan for.
            outdated: Reason why it may not be the best for them, for the user.
        """
        request = self._context.request
        search = profiled_search(request, self._context.model, plan, self._decider.limits, self._scheduler)
        planning = LivePlanning(
            search,
            search.costs,
            search.data_host,
            costs_of_steps=None if plan.steps is None else search.costs_of_steps,
            objective=Objective(request.schedule.objective, request.schedule.min_throughput or 0.0),
            varying=plan.max_tokens is not None or plan.items is None or plan.steps is not None,
            outdated=outdated,
        )
        return search, planning

    def _window(self, windows: WindowMaker, seen: RunSnapshot) -> WorkWindow | None:
        """Return the window that a snapshot completes, or None."""
        plan = self._decider.present
        if not seen.running or plan is None:
            return None
        ranks = plan.schedule.ranks
        work = [seen.statuses[rank].work if rank in seen.statuses else None for rank in ranks]
        self._done.add(seen.epoch, 0 if work[-1] is None else work[-1].items)
        status = seen.statuses.get(plan.data_rank)
        return windows.add(self._clock(), seen.epoch, work, None if status is None else status.text)

    def _decide(
        self, planning: LivePlanning, search: LiveSearch, window: WorkWindow, plan: Plan, seen: RunSnapshot
    ) -> None:
        hosts = frozenset(
            self._names[rank] for rank, facts in seen.facts.items() if _has_weights(FORMS.facts(facts))
        )
        total = _total(plan)
        left = None if total is None else max(0, total - self._done.items)
        present = placed(plan.schedule, self._names)
        proposal = planning.take(window, present, hosts, left)
        self._note_gain(planning)
        if proposal is None:
            return
        planned = search.planned(proposal.stages, proposal.conditions, plan.max_tokens)
        if self._context.request.schedule.follows_proposals and plan.goes_on:
            self._change(planning, proposal, planned, seen)
        elif proposal.stages not in self._proposed:
            self._proposed.add(proposal.stages)
            self._context.warn(f"{describe_proposal(proposal, planned)}; the run keeps its schedule")
            self._context.watched.replans.append(self._record(proposal, planned))

    def _as_measured(
        self, planning: LivePlanning, search: LiveSearch, tokens: int | None
    ) -> PlanAsMeasured | None:
        """Return a planner for the conditions of this moment; None while they are as the profiles say."""
        conditions = planning.expected
        if conditions.as_profiled:
            return None
        apart = search.calling(
            run_program
        )  # another thread plans after a loss, and is not to wait for this one
        return lambda survivors: apart.after_loss(conditions, survivors, tokens)

    def _change(
        self, planning: LivePlanning, proposal: Proposal, planned: PlannedSchedule, seen: RunSnapshot
    ) -> None:
        """Let the run follow a proposal, if nothing newer happens meanwhile."""
        record = self._record(proposal, planned)
        line = f"{describe_proposal(proposal, planned)}; the run changes to it"
        outcome = self._decider.change(self._session, planned, seen, proposal.why, line)
        if isinstance(outcome, Switched):
            planning.changed(proposal)
            record = replace(
                record, outcome="switched", microbatch=outcome.microbatch, seconds=outcome.seconds
            )
        else:
            planning.dropped()
            record = replace(record, outcome=outcome.why)
            if self._session.snapshot() is not None:
                self._context.warn(f"the run keeps its schedule: {outcome.why}")
        self._context.watched.replans.append(record)

    def _note_gain(self, planning: LivePlanning) -> None:
        """Say and record what the latest change has brought, once that is known."""
        gain = planning.gain()
        if gain is None:
            return
        self._context.warn(f"the change has brought {gain.measured:+.0%} (predicted: {gain.predicted:+.0%})")
        latest = max(
            number
            for number, record in enumerate(self._context.watched.replans)
            if record.microbatch is not None
        )
        self._context.watched.replans[latest] = replace(
            self._context.watched.replans[latest], measured_gain=gain.measured
        )

    def _record(self, proposal: Proposal, planned: PlannedSchedule) -> ReplanRecord:
        now_s = self._session.member.hub_clock(time.perf_counter())
        return ReplanRecord(now_s, proposal.why, planned.schedule, proposal.gain)


def _total(plan: Plan) -> int | None:
    """Return the number of items of a run, or of tokens that texts may have; None if it is unknown."""
    if plan.items is None or plan.steps is None:
        return plan.items
    return None if plan.texts is None else plan.items * plan.texts.answer


def _new_lengths(plan: Plan, seen: RunSnapshot) -> str | None:
    """Return the lengths of the sentences that come lately if they are not those of the plan."""
    status = seen.statuses.get(plan.data_rank)
    lengths = None if status is None else status.lengths
    if lengths is None or (plan.lengths is not None and are_alike(plan.lengths, lengths)):
        return None
    return lengths


class _Done:
    """Items that the run has computed, however many plans it takes; some of them twice after a failure."""

    def __init__(self) -> None:
        self._epoch = 0
        self._before = 0
        self._now = 0

    def add(self, epoch: int, items: int) -> None:
        """Note how many items the last stage has finished in an epoch."""
        if epoch != self._epoch:
            self._epoch, self._before, self._now = epoch, self.items, 0
        self._now = items

    @property
    def items(self) -> int:
        """Number of items."""
        return self._before + self._now


def _has_weights(facts: Options) -> bool:
    """Return whether a rank can load layers."""
    return facts.get("weights") is not None


def describe_proposal(proposal: Proposal, planned: PlannedSchedule) -> str:
    """Return the beginning of the line about a proposal."""
    text = None if planned.prediction is None else planned.prediction.text
    if proposal.before is None:
        now, then = proposal.items_per_s, proposal.items_per_s * (1 + proposal.gain)
        rate = "items/s" if text is None else f"tokens/s of {count(text.streams, 'stream')}"
        what = f"{figure(then)} {rate} instead of {figure(now)} are predicted"
    else:
        then = proposal.before / (1 + proposal.gain)
        units = ("s through the idle pipeline", "J an item") if text is None else _UNITS_OF_TEXT
        unit = units[proposal.objective.name == ENERGY]
        what = f"{figure(then)} {unit} instead of {figure(proposal.before)} are predicted"
    return f"{proposal.why}; with {name_stages(planned.schedule)}, {what} ({proposal.gain:+.0%})"
