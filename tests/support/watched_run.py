"""Runs that rank 0 watches, whose heartbeats a test makes up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from clock import Clock
from msgspec import Raw

from pipeedge.control.changing import Dropped, RunSnapshot, Switched
from pipeedge.control.liveness import RankStatus
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.model import Model
from pipeedge.observe.pipeline_state import PipelineState
from pipeedge.observe.records import ReplanRecord
from pipeedge.plan.planning import Plan
from pipeedge.plan.schedule_choice import PlannedSchedule
from pipeedge.request.config import RunRequest
from pipeedge.run.context import Watched
from pipeedge.run.live_planning import RunWatcher

SWITCHED = Switched(2, 77, 1.5)


class WatchedRun:
    """A run, of which a class of a test says how it computes: ``_begin``, ``_pass`` and ``_statuses``.

    Args:
        request: The request.
        model: The model.
        planned: Its schedule.
        plan: Its plan.
        seconds: Length of the run.
        outcome: What comes of each change.
    """

    def __init__(
        self,
        request: RunRequest,
        model: Model | DecoderModel,
        planned: PlannedSchedule,
        plan: Plan,
        seconds: float,
        outcome: Switched | Dropped = SWITCHED,
    ) -> None:
        self.request, self.first, self.plan, self.outcome = request, planned.schedule, plan, outcome
        self.clock = Clock()
        self.lines: list[str] = []
        self.watched = Watched()
        self.shown = PipelineState()
        self._model, self._seconds, self._epoch = model, seconds, 1
        self.decider: Any = SimpleNamespace(
            present=plan, change=self._change, as_measured=None, limits=planned.limits, lengths=None
        )
        self._begin()

    @property
    def replans(self) -> list[ReplanRecord]:
        """Better plans that were found."""
        return self.watched.replans

    def watch(self) -> None:
        """Let rank 0 watch the run to its end."""
        context: Any = SimpleNamespace(
            request=self.request, model=self._model, warn=self.lines.append, watched=self.watched
        )
        session: Any = SimpleNamespace(
            snapshot=self._snapshot, member=SimpleNamespace(hub_clock=lambda at: self.clock.now)
        )
        RunWatcher(context, session, self.decider, self.clock, self._pass, self.shown).run()

    def _begin(self) -> None:
        """Begin with the counters of a plan."""
        raise NotImplementedError

    def _pass(self, seconds: float) -> None:
        """Let time pass."""
        raise NotImplementedError

    def _statuses(self) -> Mapping[int, RankStatus]:
        """Return what was heard of each rank."""
        raise NotImplementedError

    def _change(
        self, session: object, planned: PlannedSchedule, since: RunSnapshot, cause: str, line: str
    ) -> Switched | Dropped:
        self.lines.append(line)
        assert line.startswith(cause)
        if isinstance(self.outcome, Dropped):
            return self.outcome
        self._epoch += 1
        self.plan = self.decider.present = dataclasses.replace(self.plan, schedule=planned.schedule)
        self._begin()
        return self.outcome

    def _snapshot(self) -> RunSnapshot | None:
        if self.clock.now > self._seconds:
            return None
        facts = {rank: Raw(b'{"weights": "w"}') for rank in range(self.request.world.size)}
        return RunSnapshot(self._epoch, True, None, facts, self._statuses())
