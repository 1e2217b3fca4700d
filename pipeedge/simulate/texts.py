"""Simulate a run of a decoder from files: its texts, its steps, and the ranks that it loses."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from msgspec.structs import replace as with_fields

import pipeedge
from pipeedge._native import DECODER_PAGE as PAGE
from pipeedge.base.schedule import Schedule
from pipeedge.base.text_lengths import TextLengths
from pipeedge.decoding.pages import pages_of
from pipeedge.decoding.step_limits import CacheSize, StepLimits
from pipeedge.decoding.step_trial import StepTrial
from pipeedge.decoding.steps import StepScheduler
from pipeedge.observe.assembly import assemble
from pipeedge.observe.metrics import Latency, StageStats
from pipeedge.observe.records import EpochRecord, Recording
from pipeedge.observe.timeline import ThreadState
from pipeedge.observe.token_figures import TextState
from pipeedge.plan.after_loss import Held
from pipeedge.plan.cache_owners import CacheOwner, CacheOwners, CopiedPages
from pipeedge.plan.costs import PlanCosts, StageCosts, TextCosts
from pipeedge.plan.problem import ELEMENT_BYTES
from pipeedge.plan.schedule_choice import PlannedSchedule
from pipeedge.plan.scheduler import TextRequest
from pipeedge.plan.specs import BYTES_PER_MB
from pipeedge.report.run_report import RunReport
from pipeedge.simulate.losses import LossyWorld, Recoveries
from pipeedge.simulate.options import RecoveryRequest, SimulationRequest
from pipeedge.simulate.steps import LostHost, Passage, SimulatedSteps, StepSeconds

__all__ = ["FinishedTexts", "TextLoad", "simulate_texts"]

_CHUNK = 256
"""Most rows of a step besides one of each text, as in a run."""
_DRAWN_STEPS = 2000
"""Most steps of an epoch that are drawn, the last ones."""
_MOST_FACTOR = 8.0
"""Most that a position in front of a row of a prompt may take, in those in front of other rows."""

CostsOfTexts = Callable[[Schedule, TextRequest], PlanCosts]
"""Returns what a schedule costs for some texts."""


@dataclass(frozen=True)
class TextLoad:
    """The texts of a run."""

    model_name: str
    streams: int
    """Number of texts that grow at a time."""
    lengths: TextLengths
    """All have the same."""

    @property
    def request(self) -> TextRequest:
        """The texts as the scheduler is asked for them."""
        one = self.lengths
        return TextRequest(min(self.streams, one.texts), one.longest, one.prompt, one.answer)

    def cache(self, owners: CacheOwners) -> CacheSize:
        """Return the pages for all texts that grow at a time."""
        pages = self.streams * pages_of(self.lengths.longest, PAGE)
        return CacheSize(pages, page=PAGE, outputs=owners.cuts)

    def limits(self, stages: Sequence[str], data_host: str) -> StepLimits:
        """Return the bounds of steps, as a run chooses them."""
        places = 0 if set(stages) == {data_host} else len(stages)
        return StepLimits(
            self.lengths.longest,
            2 * places or 1,
            max(1, places),
            self.streams + min(_CHUNK, self.streams * self.lengths.longest),
            self.streams,
            slowdown=math.inf,
        )

    def seconds(self, schedule: Schedule, own: int | None, costs_of: CostsOfTexts) -> StepSeconds:
        """Return the seconds of the steps of a schedule.

        Args:
            schedule: The schedule.
            own: Number of the stage of the data rank, or None if it has none.
            costs_of: Returns what the schedule costs for some texts.
        """
        far = max(2, self.lengths.prompt + self.lengths.answer // 2)
        most = self.streams + _CHUNK
        rows = [2**power for power in range(most.bit_length()) if 2**power < most] + [most]
        near = [costs_of(schedule, TextRequest.of_steps(count, 1, count)) for count in rows]
        distant = costs_of(schedule, TextRequest.of_steps(1, far, 1))
        numbers = np.array(rows, float)
        positions = np.maximum(0.0, (_compute_s(distant) - _compute_s(near[0])) / (far - 1))
        # The scheduler counts 1.5 positions in front of these rows, and the row itself.
        stages = np.array([_compute_s(one) for one in near]).T - 1.5 * positions[:, None] * numbers
        found = StepSeconds(
            rows=numbers,
            stages=stages,
            positions=positions,
            links=np.array([_link_s(one.schedule) for one in near]).T,
            latencies=np.array(_latencies_s(near[0].schedule)),
            feed=np.array([one.feed_s for one in near]),
            head=np.array([one.collect_s for one in near]),
        )
        text = costs_of(schedule, self.request).text
        return found if text is None else replace(found, prompts=_prompt_factor(found, own, text))


def _compute_s(costs: PlanCosts) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([stage.compute_s for stage in costs.schedule])


def _link_s(stages: Sequence[StageCosts]) -> list[float]:
    return [stages[0].link_in_s, *(stage.link_out_s for stage in stages)]


def _latencies_s(stages: Sequence[StageCosts]) -> list[float]:
    return [stages[0].link_in_latency_s, *(stage.link_out_latency_s for stage in stages)]


def _prompt_factor(seconds: StepSeconds, own: int | None, text: TextCosts) -> float:
    """Return the factor with which a lone prompt takes as long as the scheduler says."""
    rows, prompt = text.chunk, text.prompt_tokens
    stages = np.array([np.interp(rows, seconds.rows, one) for one in seconds.stages])
    others = [np.interp(rows, seconds.rows, one) for one in (*seconds.links, seconds.feed)]
    attending = seconds.positions * rows * prompt / 2

    def first_token_s(factor: float) -> float:
        places = [*(stages + factor * attending), *others]
        total, chunks = sum(places), math.ceil(prompt / rows)
        if own is not None:
            places[own] += others[-1]
        return float(total + (chunks - 1) * max(places) + seconds.head_s(1))

    low, high = 0.0, _MOST_FACTOR
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if first_token_s(middle) < text.first_token_s else (low, middle)
    return low


@dataclass(frozen=True)
class _Epoch:
    planned: PlannedSchedule
    record: EpochRecord
    passages: Sequence[Passage]
    recordings: Sequence[Recording]


@dataclass(frozen=True)
class FinishedTexts:
    """A finished simulation of a decoder."""

    load: TextLoad
    data_rank: int
    steps: SimulatedSteps
    epochs: tuple[_Epoch, ...]
    undisturbed_s: float
    """Length of the run without a loss, in seconds."""
    notes: tuple[str, ...]
    costs: PlanCosts
    """Costs of the last schedule for these texts."""

    @property
    def schedule(self) -> Schedule:
        """Last schedule."""
        return self.epochs[-1].planned.schedule

    @property
    def length_s(self) -> float:
        """Length of the run in seconds."""
        return self.steps.now_s

    def report(self) -> RunReport:
        """Return the report in the form of a real run's."""
        load, lossy, scheduler = self.load, len(self.epochs) > 1, self.steps.scheduler
        cache_bytes = [stage.state_bytes for stage in self.costs.schedule]
        state = TextState(
            repeated_tokens=scheduler.repeated_tokens,
            partly_repeated_tokens=scheduler.partly_repeated_tokens,
            kept_tokens=scheduler.kept_tokens,
        )
        return RunReport(
            model=load.model_name,
            schedule=self.schedule,
            items=load.lengths.texts,
            microbatches=sum(len(one.passages) for one in self.epochs),
            microbatch_size=load.streams,
            startup_s=0.0,
            elapsed_s=self.length_s,
            latency=Latency.of(self._latencies_s()),
            accuracy=None,
            stages=[self._stats(stage) for stage in range(len(self.schedule.stages))],
            skipped=(),
            prediction=self.epochs[-1].planned.prediction,
            steady_items_per_s=None,
            epochs=[one.record for one in self.epochs] if lossy else (),
            text=self.steps.figures.result(load.lengths.longest, list(map(round, cache_bytes)), state),
            planned_cache_bytes=sum(cache_bytes),
            simulated=True,
            undisturbed_s=self.undisturbed_s if lossy else None,
        )

    def _latencies_s(self) -> list[float]:
        passages = (passage for one in self.epochs for passage in one.passages)
        return [one.ended_s - one.began_s for one in passages if math.isfinite(one.ended_s)]

    def _stats(self, stage: int) -> StageStats:
        last = self.epochs[-1]
        number = max(1, len(last.passages))
        seconds = self._seconds(stage)
        costs = self.costs.schedule[stage]
        sent = sum(end - start for one in last.passages for start, end in one.links[stage + 1 : stage + 2])
        rows = sum(one.step.rows for one in last.passages) / number
        return StageStats(
            stage=stage,
            rank=self.schedule.stages[stage].rank,
            microbatches=number,
            compute_s_mean=seconds[ThreadState.COMPUTE] / number,
            send_s_mean=sent / number,
            send_s_best=0.0,
            recv_wait_s_mean=(seconds[ThreadState.FILL] + seconds[ThreadState.WAIT_INPUT]) / number,
            bytes_out_mean=costs.sent_bytes / self.costs.batch_size * rows if sent else 0.0,
            busy_fraction=seconds[ThreadState.COMPUTE] / max(1e-12, sum(seconds.values())),
            rss_peak_mb=costs.mem_bytes / BYTES_PER_MB,
            parameters=round(self.weights_of(stage) / ELEMENT_BYTES["float32"]),  # as models.yml counts them
            compute_cpu_s_mean=seconds[ThreadState.COMPUTE] / number,
            threads=costs.threads or 1,
            encode_s_mean=0.0,
            decode_s_mean=0.0,
        )

    def weights_of(self, stage: int) -> float:
        """Return the bytes of the weights of a stage."""
        costs = self.costs.schedule[stage]
        return costs.mem_bytes - costs.activation_bytes - costs.buffer_bytes - costs.state_bytes

    def _seconds(self, stage: int) -> dict[ThreadState, float]:
        """Return the seconds that a stage spent on each activity in the last epoch."""
        last = self.epochs[-1]
        spans = [one.stages[stage] for one in last.passages if len(one.stages) > stage]
        since = last.record.started_s
        start, end = (spans[0][0], spans[-1][1]) if spans else (self.length_s, self.length_s)
        computing = sum(until - begun for begun, until in spans)
        return {
            ThreadState.COMPUTE: computing,
            ThreadState.FILL: start - since,
            ThreadState.WAIT_INPUT: max(0.0, end - start - computing),
            ThreadState.DRAIN: self.length_s - end,
        }

    def to_body(self, command: Sequence[str]) -> dict[str, Any]:
        """Return the report as it is saved, with the fields that only a simulation has."""
        report = self.report()
        body = report.to_body()
        for stage, (entry, costs) in enumerate(zip(body["stages"], self.costs.schedule, strict=True)):
            entry["seconds"] = {doing.value: spent for doing, spent in self._seconds(stage).items()}
            entry["memory_mb"] = {
                "weights": self.weights_of(stage) / BYTES_PER_MB,
                "buffers": costs.buffer_bytes / BYTES_PER_MB,
                "working": (costs.activation_bytes + costs.state_bytes) / BYTES_PER_MB,
                "available": costs.mem_available_bytes / BYTES_PER_MB,
            }
        *earlier, now = [one.recordings for one in self.epochs]
        timeline = assemble(now, 0.0, self.length_s, [each for one in earlier for each in one], report.epochs)
        return body | {
            "data_rank": self.data_rank,
            "timeline": timeline.to_body(),
            "latencies_s": self._latencies_s(),
            "command": list(command),
            "versions": {"pipeedge": pipeedge.__version__},
            "notes": list(self.notes),
        }


def simulate_texts(
    load: TextLoad,
    planned: PlannedSchedule,
    world: LossyWorld,
    names: Sequence[str],
    costs_of: CostsOfTexts,
    request: SimulationRequest,
) -> FinishedTexts:
    """Simulate a run of a decoder.

    Args:
        load: Its texts.
        planned: Its first plan.
        world: Its ranks.
        names: Host of each rank.
        costs_of: Returns what a schedule costs for some texts.
        request: What is asked.

    Raises:
        RequestError: A rank to lose does not exist.
        InfeasibleError: A loss ends the run.
    """

    @cache
    def seconds_of(schedule: Schedule) -> StepSeconds:
        return load.seconds(schedule, schedule.stage_of(world.data_rank), costs_of)

    def played(recoveries: Recoveries) -> tuple[SimulatedSteps, list[_Epoch]]:
        return _play(load, recoveries, names, world.data_rank, seconds_of, request.recovery)

    steps, epochs = played(Recoveries(world, planned, request.losses, request.recovery))
    undisturbed_s = steps.now_s
    if len(epochs) > 1:
        undisturbed_s = played(Recoveries(world, planned, (), request.recovery))[0].now_s
    costs = costs_of(epochs[-1].planned.schedule, load.request)
    return FinishedTexts(load, world.data_rank, steps, tuple(epochs), undisturbed_s, planned.notes, costs)


def _play(
    load: TextLoad,
    recoveries: Recoveries,
    names: Sequence[str],
    data_rank: int,
    seconds_of: Callable[[Schedule], StepSeconds],
    recovery: RecoveryRequest,
) -> tuple[SimulatedSteps, list[_Epoch]]:
    """Return the steps of a run, and its epochs."""
    one, data_host = load.lengths, names[data_rank]

    def limits(planned: PlannedSchedule) -> StepLimits:
        found = load.limits([names[stage.rank] for stage in planned.schedule.stages], data_host)
        text = None if planned.prediction is None else planned.prediction.text
        return found if text is None else replace(found, planned=text.planned_groups)

    planned = recoveries.planned
    record, held = EpochRecord(1, planned.schedule, 0.0), Held()
    owners = _owners(record, held, recovery)
    cache = load.cache(owners)
    scheduler = StepScheduler(limits(planned), cache)
    for text in range(one.texts):
        scheduler.add(text, [text] * one.prompt, one.answer)
    trial = StepTrial(scheduler.limits, cache) if one.texts > 1 else None
    steps = SimulatedSteps(
        scheduler, trial, dict.fromkeys(range(one.texts), (one.prompt, one.answer)), data_host
    )
    epochs: list[_Epoch] = []
    while True:
        lost = recoveries.next_lost(math.inf)
        stages = [(names[stage.rank], stage.layers) for stage in planned.schedule.stages]
        host = None
        if lost is not None:
            host = LostHost(names[lost.rank], lost.at_s, lost.at_s + recovery.detect_s)
        before = steps.figures.answers
        steps.run(seconds_of(planned.schedule), stages, host)
        came = [passage.ended_s for passage in steps.passages if math.isfinite(passage.ended_s)]
        record = with_fields(
            record,
            items=steps.figures.answers - before,
            filling_s=came[0] - record.started_s if came and record.cause else 0.0,
        )
        ranks = planned.schedule.ranks
        recordings = steps.recordings(ranks, epoch=record.number, kept=_DRAWN_STEPS)
        epochs.append(_Epoch(planned, record, steps.passages, recordings))
        if steps.is_over or lost is None:
            return steps, epochs
        record = recoveries.recover(lost, record.number + 1)
        planned = recoveries.planned
        after = _owners(record, held, recovery, owners, cache)
        lost_layers, cache = after.lost_since(owners), load.cache(after)
        steps.resume(record.started_s, limits(planned), cache, lost_layers)
        owners = after


def _owners(
    record: EpochRecord,
    held: Held,
    recovery: RecoveryRequest,
    before: CacheOwners | None = None,
    cache: CacheSize | None = None,
) -> CacheOwners:
    """Return the stages of a plan, which its ranks load, with since when they have their layers.

    Args:
        record: The plan.
        held: What the ranks have.
        recovery: What they keep for a loss.
        before: The plan before.
        cache: Its pages, of which all full ones were copied, if so asked.
    """
    stages = record.schedule.stages
    since = held.since(record.schedule, record.number)
    outputs = held.outputs(record.schedule, record.number) if recovery.keep_outputs else ()
    held.loads(record.schedule, record.number, outputs=outputs)
    copies: list[CopiedPages] = []
    if recovery.replicate and before is not None and cache is not None:
        until = (sys.maxsize,) * cache.pages
        copies = [CopiedPages(one.layers, one.dtype, before.number, until) for one in stages]
    return CacheOwners(
        record.number,
        [
            CacheOwner(one.rank, one.layers, one.dtype, since[one.layers.start : one.layers.stop])
            for one in stages
        ],
        copies,
        outputs,
    )
