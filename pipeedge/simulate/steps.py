"""Simulate the steps of a decoder: the runtime's scheduler of steps, on stages with known times. Pure.

    [scheduler] ──step──> [feed] ──link 0──> [stage 0] ──link 1──> ... [stage S-1] ──link S──> [head]
         ^                                                                                       │
         └───────────────────────── tokens, of which the next steps are made ────────────────────┘

Each host does one thing at a time: what arrived first, first. Feeding and the head are work of the data rank,
which shares its processor with its stage. As in a run, the first steps measure how long steps take.

The seconds of a step come from ``sched-pipeline``. For rows at the beginning of a text it was asked at some
numbers of rows; what lies between is interpolated. Each row takes longer for each position in front of it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipeedge.base.schedule import LayerRange
from pipeedge.decoding.pages import LostLayers
from pipeedge.decoding.step_limits import CacheSize, StepLimits
from pipeedge.decoding.step_trial import StepTrial
from pipeedge.decoding.steps import DecodingStep, StepScheduler
from pipeedge.observe.lanes import STAGE
from pipeedge.observe.records import LaneRecord, LinkRecord, Recording, Row, Transfer
from pipeedge.observe.timeline import LaneId
from pipeedge.observe.token_figures import TokenFigures

__all__ = ["LostHost", "Passage", "SimulatedSteps", "StepSeconds"]

_Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of steps at each place of a pipeline."""

    rows: _Numbers
    """Numbers of rows, ascending, for which times are known."""
    stages: _Numbers
    """Seconds of each stage for so many rows at the beginning of a text; shape (stages, rows)."""
    positions: _Numbers
    """Additional seconds of each stage for each row and each position in front of it; shape (stages,)."""
    links: _Numbers
    """Seconds on each link, from the first stage's to the one back; shape (stages + 1, rows)."""
    latencies: _Numbers
    """Seconds of those in which the next step may follow; shape (stages + 1,)."""
    feed: _Numbers
    """Seconds of the data rank to feed a step; shape (rows,)."""
    head: _Numbers
    """Seconds of the data rank for so many rows that decide a token; shape (rows,)."""
    prompts: float = 1.0
    """Seconds for the positions in front of a row of a prompt, in those of a row that continues a text."""

    def stage_s(self, stage: int, step: DecodingStep) -> float:
        """Return the seconds of a stage for a step."""
        known = float(np.interp(step.rows, self.rows, self.stages[stage]))
        weights = (self.prompts if part.reads_prompt else 1.0 for part in step.parts)
        sums = (len(part.tokens) * (part.position + (len(part.tokens) - 1) / 2) for part in step.parts)
        return known + float(self.positions[stage]) * sum(a * b for a, b in zip(weights, sums, strict=True))

    def link_s(self, link: int, rows: int) -> float:
        """Return the seconds of a link for so many rows."""
        return float(np.interp(rows, self.rows, self.links[link]))

    def feed_s(self, rows: int) -> float:
        """Return the seconds to feed so many rows."""
        return float(np.interp(rows, self.rows, self.feed))

    def head_s(self, deciding: int) -> float:
        """Return the seconds of the head for so many rows that decide a token."""
        return float(np.interp(deciding, self.rows, self.head)) if deciding else 0.0


@dataclass
class Passage:
    """One step on its way."""

    step: DecodingStep
    began_s: float
    stages: list[tuple[float, float]] = field(default_factory=list)
    """When each stage began and ended it."""
    links: list[tuple[float, float]] = field(default_factory=list)
    """When it was on each link."""
    ended_s: float = math.inf


@dataclass(frozen=True)
class LostHost:
    """A host that is lost while steps are on their way."""

    host: str
    at_s: float
    stopped_s: float
    """Moment at which everybody stops; what had left the host until ``at_s`` may arrive before."""


class SimulatedSteps:
    """A pipeline that writes texts. Moments are seconds since it began.

    Args:
        scheduler: Makes the steps.
        trial: Measures steps before; None if nothing is measured.
        texts: Tokens of the prompt and of the answer of each sequence, which the scheduler has.
        data_host: Host of the data rank.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        trial: StepTrial | None,
        texts: Mapping[int, tuple[int, int]],
        data_host: str,
    ) -> None:
        self.passages: list[Passage] = []
        """Steps of the plan that runs, in order."""
        self.figures = TokenFigures()
        self.now_s = 0.0
        self.scheduler = scheduler
        self._trial = trial
        self._texts = texts
        self._left = {sequence: answer for sequence, (_, answer) in texts.items()}
        self._data_host = data_host
        self._order = itertools.count()
        self._began: set[int] = set()

    @property
    def is_over(self) -> bool:
        """Whether all texts are written."""
        return not self._left

    def run(
        self, seconds: StepSeconds, stages: Sequence[tuple[str, LayerRange]], lost: LostHost | None = None
    ) -> None:
        """Execute steps until all texts are written, or everybody stops.

        Args:
            seconds: Times of steps.
            stages: Host and layers of each stage.
            lost: A host that is lost meanwhile.
        """
        self._seconds, self._stages, self._lost = seconds, stages, lost
        self._free: dict[str, float] = {}
        self._events: list[tuple[float, int, int, Passage]] = []
        """Moment, order, place (feed, link 0, stage 0, ..., head, back) and step of each arrival."""
        self.passages = []
        self._feed()
        while self._events and (lost is None or self._events[0][0] <= lost.stopped_s):
            self.now_s, _, place, passage = heapq.heappop(self._events)
            if place == 2 * len(stages) + 3:
                self._finish(passage)
                self._feed()
            else:
                self._pass(place, passage)

    def resume(self, now_s: float, limits: StepLimits, cache: CacheSize, lost: LostLayers) -> None:
        """Go on with another plan; the arguments but the moment are those of ``StepScheduler.restart``."""
        if self._trial is not None:
            self.scheduler.begin(limits, self._trial.steps)
            self._trial = None
        known = self.scheduler.limits
        self.scheduler.restart(limits.timed_as(known), cache, lost)
        self.now_s = now_s

    def _feed(self) -> None:
        while (step := self._next()) is not None:
            passage = Passage(step, self.now_s)
            self.passages.append(passage)
            for part in step.parts:
                if part.sequence in self._texts and part.sequence not in self._began:
                    self._began.add(part.sequence)
                    self.figures.began(part.sequence, self._texts[part.sequence][0], self.now_s)
            self._arrive(self.now_s, 0, passage)

    def _next(self) -> DecodingStep | None:
        if self._trial is not None:
            if not self._trial.is_over:
                return self._trial.next(self.now_s)
            self.scheduler.begin(self._trial.limits, self._trial.steps)
            self._trial = None
        return self.scheduler.next(self.now_s)

    def _arrive(self, moment: float, place: int, passage: Passage) -> None:
        heapq.heappush(self._events, (moment, next(self._order), place, passage))

    def _pass(self, place: int, passage: Passage) -> None:
        """Let a step that has arrived at a place go through it as soon as that is free."""
        seconds, step, stages = self._seconds, passage.step, len(self._stages)
        index, latency = (place - 1) // 2, 0.0
        if place == 0:
            resource, takes = self._data_host, seconds.feed_s(step.rows)
        elif place == 2 * stages + 2:
            resource, takes = self._data_host, seconds.head_s(sum(part.deciding for part in step.parts))
        elif place % 2:
            latency = float(seconds.latencies[index])
            resource, takes = f"link {index}", max(0.0, seconds.link_s(index, step.rows) - latency)
        else:
            index = place // 2 - 1
            resource, layers = self._stages[index]
            takes = seconds.stage_s(index, step)
            if step.layers is not None:
                takes *= len(layers.shared(step.layers)) / len(layers)
        start = max(self.now_s, self._free.get(resource, 0.0))
        if self._lost is not None and resource == self._lost.host and start + takes > self._lost.at_s:
            return
        end = self._free[resource] = start + takes
        if 0 < place < 2 * stages + 2:
            moments = passage.links if place % 2 else passage.stages
            moments.append((start, end + latency))
        self._arrive(end + latency, place + 1, passage)

    def _finish(self, passage: Passage) -> None:
        passage.ended_s = self.now_s
        number = passage.step.number
        if self._trial is not None:
            self._trial.finished(self.now_s)
            return
        drawn = {part.sequence: (part.sequence,) for part in passage.step.parts if part.scored}
        self.scheduler.finished(number, drawn, now=self.now_s)
        for sequence in drawn:
            self.figures.drew(sequence, self.now_s)
            self._left[sequence] -= 1
            if not self._left[sequence]:
                del self._left[sequence]
                self.figures.ended(sequence, self.now_s)

    # -- what came of it --------------------------------------------------------------------------

    def recordings(self, ranks: Sequence[int], *, epoch: int, kept: int) -> list[Recording]:
        """Return what the ranks would have recorded of the last steps.

        Args:
            ranks: Rank of each stage.
            epoch: Number of the epoch, or 0 in a run that has none.
            kept: Most steps.
        """
        shown = [passage for passage in self.passages[-kept:] if math.isfinite(passage.ended_s)]
        found = []
        for stage, rank in enumerate(ranks):
            rows, transfers = [], []
            free, sent = shown[0].stages[stage][0] if shown else 0.0, 0.0
            first = free
            for passage in shown:
                start, end = passage.stages[stage]
                waits, works = max(0.0, start - free), end - start
                phases = (waits, 0.0, works, 0.0, 0.0)
                rows.append(Row(passage.step.number, 1, passage.step.rows, 0, 0.0, start - waits, phases))
                free = end
                start, end = passage.links[stage + 1]
                if end > start:
                    transfers.append(Transfer(passage.step.number, 0, min(max(start, sent), end), end))
                    sent = end
            links = (LinkRecord(LaneId.link(stage), None, tuple(transfers)),) if transfers else ()
            lane = LaneRecord(LaneId.stage(stage), STAGE, first, tuple(rows))
            found.append(Recording(rank, "", (lane,), links, epoch=epoch))
        return found
