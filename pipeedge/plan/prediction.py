"""Compare what the scheduler predicted with what a run measured. Pure.

    stage 0   |handling| layers      |handling|
    link 0-1                                  |--------|
    stage 1                                            |handling| layers  |handling|

    throughput = items of a microbatch / period, once the pipeline is full

Handling is what a stage spends beside its layers: taking a microbatch from a link, passing it on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeedge.base.fields import Count, Number, Text
from pipeedge.base.program import program_name
from pipeedge.base.wording import count
from pipeedge.decoding.step_limits import PlannedGroups
from pipeedge.observe.metrics import StageStats
from pipeedge.observe.token_figures import TextResult

__all__ = [
    "Comparison",
    "PredictedFigure",
    "Prediction",
    "StageComparison",
    "StagePrediction",
    "TextComparison",
    "TextPrediction",
    "compare",
    "compare_text",
]

REMARKABLE = 0.15
"""A stage that is off by more than this part of what was predicted is worth a line."""
OWN_PROCESSOR = 0.9
"""Smallest fraction of its time that an undisturbed computation spends on a processor."""


@dataclass(frozen=True)
class StagePrediction:
    """Prediction for one stage."""

    busy_s: Number
    """Seconds per microbatch for its layers, receiving and sending, on the data rank also for reading and
    collecting."""
    link_s: Number
    """Seconds per microbatch of its outgoing link; 0 where nothing is counted."""
    threads: Count | None
    """Threads its device was profiled with, or None if the profile does not say."""
    tokens: tuple[Count, ...] = ()
    """Sentence lengths its device was profiled with; empty for images or if the profile does not say."""
    kernels: str | None = None
    """Kernels its device was profiled with, or None if the profile does not record them."""

    def fits_tokens(self, tokens: int | None) -> bool:
        """Return whether the profile covers sentences of ``tokens`` tokens. True for images (None)."""
        return tokens is None or len(self.tokens) > 1 or self.tokens == (tokens,)


@dataclass(frozen=True)
class TextPrediction:
    """Prediction for the texts of a decoder."""

    streams: Count
    """Number of texts that grow at a time."""
    groups: Count
    """Number of groups in which they step."""
    chunk: Count
    """Tokens of a prompt that a step computes while nothing else runs."""
    context: Count
    """Longest text in tokens that memory is planned for."""
    prompt_tokens: Count
    answer_tokens: Count
    tokens_per_s: Number
    """Tokens a second of all streams together."""
    between_tokens_s: Number
    """Seconds between two tokens of a stream, while all of them grow."""
    token_s: Number
    """Seconds of a token of a lone stream."""
    first_token_s: Number
    """Seconds to the first token of a lone prompt."""
    cache_bytes: tuple[Number, ...]
    """Bytes of the cache of each stage for all streams."""
    limited_by: Text
    """Description of what limits the tokens a second."""

    @property
    def planned_groups(self) -> PlannedGroups:
        """Number of groups, and of how many texts."""
        return PlannedGroups(self.streams, self.groups)


@dataclass(frozen=True)
class Prediction:
    """Prediction for a schedule."""

    stages: tuple[StagePrediction, ...]
    microbatch_size: Count
    """Number of items in a microbatch."""
    period_s: Number
    """Seconds between microbatches once the pipeline is full."""
    latency_s: Number
    """Seconds from reading a microbatch to its result, through the idle pipeline."""
    bottleneck: Text
    """Description of what takes the longest time for a microbatch: ``stage 1 on desk computes 1.264 s``."""
    tokens: Count | None = None
    """Tokens of the longest sentence, or None for images."""
    input_link_s: Number = 0.0
    """Seconds of the link from the data rank to the first stage; 0 where nothing is counted."""
    joules_per_item: Number | None = None
    """Energy of all hosts that are on, once the pipeline is full, or None if it is unknown."""
    mixed: bool = False
    """Whether times are averages over sentences of several lengths, rather than those of the longest."""
    text: TextPrediction | None = None
    """Prediction for the texts of a decoder, whose other figures here are those of a step; else None."""

    @property
    def scaled(self) -> bool:
        """Whether the profiles of all stages cover the sentence length of the run."""
        return all(stage.fits_tokens(self.tokens) for stage in self.stages)

    @property
    def throughput_items_per_s(self) -> float | None:
        """Items per second once the pipeline is full, or None if nothing takes time."""
        return self.microbatch_size / self.period_s if self.period_s else None

    def run_items_per_s(self, items: int) -> float | None:
        """Return the items per second of a run of ``items``, including filling and draining the pipeline."""
        microbatches = items / self.microbatch_size
        elapsed_s = self.latency_s * min(1.0, microbatches) + self.period_s * max(0.0, microbatches - 1)
        return items / elapsed_s if elapsed_s else None


@dataclass(frozen=True)
class PredictedFigure:
    """A predicted figure and the measured one."""

    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        """Relative difference of the measured value from the prediction, or None without a prediction."""
        return self.measured / self.predicted - 1 if self.predicted else None

    def to_body(self, name: str) -> dict[str, float | None]:
        """Return three entries of a report, whose keys begin with ``name``."""
        error = self.error
        return {
            name: self.predicted,
            f"{name}_measured": self.measured,
            f"{name}_error_percent": None if error is None else 100 * error,
        }


@dataclass(frozen=True)
class StageComparison:
    """Comparison of one stage."""

    stage: int
    rank: int
    compute: PredictedFigure
    link: PredictedFigure | None
    """Seconds of the outgoing link, or None if there is none, or it was not predicted or not measured."""
    remark: str | None
    """Likely cause of a large difference, or None."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of a run with its prediction."""

    steady: PredictedFigure | None
    """Items per second once the pipeline is full, or None if it never was."""
    run: PredictedFigure | None
    """Items per second of the whole run."""
    stages: tuple[StageComparison, ...]
    bottleneck: str = ""
    """Description of what was predicted to limit the pipeline."""

    @property
    def remarks(self) -> Iterator[str]:
        """Remarks, one for each stage that differs from its prediction."""
        return (stage.remark for stage in self.stages if stage.remark is not None)


@dataclass(frozen=True)
class TextComparison:
    """Comparison of the texts of a run with their prediction. None stands for what was not measured."""

    tokens_per_s: PredictedFigure | None
    between_tokens_s: PredictedFigure | None
    first_token_s: PredictedFigure | None
    cache_bytes: PredictedFigure | None
    """Bytes of all stages for the texts that the prediction is for."""

    def figures(self) -> Iterator[tuple[str, PredictedFigure]]:
        """Yield the name of each figure that was measured, with the figure."""
        for name, value in vars(self).items():
            if value is not None:
                yield name, value


def compare_text(prediction: TextPrediction, text: TextResult, pages_bytes: float) -> TextComparison:
    """Compare the texts of a run with their prediction.

    Args:
        prediction: Prediction of the plan.
        text: What was measured.
        pages_bytes: Bytes of the pages that the stages keep for as many and as long texts.
    """

    def figure(predicted: float, measured: float | None) -> PredictedFigure | None:
        return None if measured is None else PredictedFigure(predicted, measured)

    first, between = text.first_token_s, text.between_tokens_s
    all_grew = text.texts_together == prediction.streams
    return TextComparison(
        figure(prediction.tokens_per_s, text.tokens_per_s_together if all_grew else None),
        figure(prediction.between_tokens_s, None if between is None else between.p50),
        # Prompts that are read together take longer than the one that the prediction is for.
        figure(prediction.first_token_s, None if first is None or prediction.streams > 1 else first.p50),
        figure(sum(prediction.cache_bytes), pages_bytes),
    )


def compare(
    prediction: Prediction,
    stages: Sequence[StageStats],
    *,
    items: int,
    run_items_per_s: float | None,
    steady_items_per_s: float | None,
) -> Comparison:
    """Compare a run of ``items`` with its prediction.

    Args:
        prediction: Prediction for the schedule of the run.
        stages: Measurements of the stages that are known, in order.
        items: Number of items of the run.
        run_items_per_s: Measured from the beginning of reading to the last result, or None if that was not
            one run of one plan.
        steady_items_per_s: Measured from the first result to the last, or None for a single microbatch.
    """
    promised, whole = prediction.throughput_items_per_s, prediction.run_items_per_s(items)
    return Comparison(
        steady=None
        if promised is None or steady_items_per_s is None
        else PredictedFigure(promised, steady_items_per_s),
        run=None if whole is None or run_items_per_s is None else PredictedFigure(whole, run_items_per_s),
        stages=tuple(_compare_stage(prediction, stats) for stats in stages),
        bottleneck=prediction.bottleneck,
    )


def _compare_stage(prediction: Prediction, stats: StageStats) -> StageComparison:
    predicted, period_s = prediction.stages[stats.stage], prediction.period_s
    compute = PredictedFigure(predicted.busy_s, stats.compute_s_mean)
    measured_s = stats.link_s
    link = (
        PredictedFigure(predicted.link_s, measured_s)
        if predicted.link_s > 0 and measured_s is not None
        else None
    )
    remark = None
    if predicted.kernels and stats.kernels and predicted.kernels != stats.kernels:
        remark = (
            f"stage {stats.stage} (rank {stats.rank}) computes with the kernels {stats.kernels} and was "
            f"profiled with {predicted.kernels}; use --kernels {predicted.kernels}, or profile as it runs"
        )
    elif compute.error is not None and abs(compute.error) > REMARKABLE:
        remark = f"stage {stats.stage} (rank {stats.rank}) is off by {compute.error:+.0%}: " + _why(
            prediction, stats, slower=compute.error > 0
        )
    elif link is not None and link.measured - link.predicted > REMARKABLE * max(link.predicted, period_s):
        # A link that is fast enough not to be felt may be as slow as it likes.
        remark = (
            f"the link from stage {stats.stage} (rank {stats.rank}) is off by {link.error or 0.0:+.0%}: is "
            "other traffic on it, or is bw_Mbps of its devices too high?"
        )
    return StageComparison(stats.stage, stats.rank, compute, link, remark)


def _why(prediction: Prediction, stats: StageStats, *, slower: bool) -> str:
    predicted, tokens = prediction.stages[stats.stage], prediction.tokens
    if tokens is not None and not predicted.fits_tokens(tokens):
        known = (
            f"with {predicted.tokens[0]} tokens" if predicted.tokens else "with an unknown number of tokens"
        )
        return (
            f"it was profiled {known} and the longest sentence here has {tokens}: profile several lengths "
            f"({program_name('profiler.py')} --tokens)"
        )
    if predicted.threads is not None and predicted.threads != stats.threads:
        return (
            f"it computes with {count(stats.threads, 'thread')} and was profiled with {predicted.threads}; "
            f"set OMP_NUM_THREADS={predicted.threads}, or profile as it runs"
        )
    if not slower and tokens is not None and not prediction.mixed:
        return (
            f"its times are those of the longest sentence, {tokens} tokens, and a microbatch is only as long "
            "as its own longest; are most sentences shorter?"
        )
    if not slower:
        return "was it profiled under load, or on slower hardware? profile this device again"
    on_processor = stats.compute_cpu_s_mean / stats.compute_s_mean
    if on_processor < OWN_PROCESSOR:
        return (
            f"it was kept from its processor for {1 - on_processor:.0%} of the time; is other load there, or "
            "a CPU quota that was not there when it was profiled?"
        )
    return (
        "it had its processor for itself, so that is slower than when it was profiled: throttling, less "
        "memory bandwidth, or longer sentences or padding"
    )
