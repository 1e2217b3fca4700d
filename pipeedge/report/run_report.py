"""The report of a run: plain data for programs, a table for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pipeedge.base.console import Column, print_table
from pipeedge.base.files import named_output, write_whole
from pipeedge.base.schedule import Schedule
from pipeedge.base.wording import count, figure, percent
from pipeedge.observe.metrics import Latency, StageStats
from pipeedge.observe.records import EpochRecord, HostsAsRun, ReplanRecord
from pipeedge.observe.timeline import Timeline
from pipeedge.observe.token_figures import TextResult
from pipeedge.plan.prediction import (
    Comparison,
    PredictedFigure,
    Prediction,
    TextComparison,
    TextPrediction,
    compare,
    compare_text,
)
from pipeedge.report import Part, find_bottleneck, read_run, render_run
from pipeedge.report.plan_changes import epoch_lines, epochs_body, replan_lines, replans_body, schedule_body

if TYPE_CHECKING:  # a simulation needs neither, nor torch
    from pipeedge.data.agreement import Agreement
    from pipeedge.data.results import Accuracy

__all__ = ["RunReport", "print_report", "save_body", "save_report"]


_UNLIKE = 1.1
"""Ratio of the times of a host and of its profile, or its inverse, from which on it is told."""


@dataclass(frozen=True)
class RunReport:
    """A finished run."""

    model: str
    schedule: Schedule
    items: int
    microbatches: int
    microbatch_size: int
    startup_s: float
    """Seconds from the start of the data rank's process until it begins to read the input."""
    elapsed_s: float
    """Seconds from the beginning of reading the input until the last result is written."""
    latency: Latency | None
    accuracy: Accuracy | None
    stages: Sequence[StageStats]
    """Figures of the stages in order, without those of ranks that left before they told them."""
    skipped: Sequence[str]
    """Inputs that were skipped, and why."""
    prediction: Prediction | None
    """Prediction of the scheduler, or None if it was not used."""
    steady_items_per_s: float | None
    """Throughput from the first result to the last; None for a single microbatch."""
    latencies_s: Sequence[float] = ()
    """Latency of each microbatch in seconds, in order."""
    timeline: Timeline | None = None
    """Activities of each thread of each rank."""
    series: Sequence[Mapping[str, Any]] = ()
    """Figures of each stage over time, as made by ``pipeedge.observe.assembly.series``."""
    command: Sequence[str] = ()
    """Command line of the data rank, program first."""
    energy: Mapping[str, Any] | None = None
    """Energy, as made by ``pipeedge.observe.metrics.energy_body``."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the data rank's software."""
    check: Agreement | None = None
    """Comparison of the first items with float32, or None if it was not requested."""
    epochs: Sequence[EpochRecord] = ()
    """Epochs of a run that can go on after a failure, in order; empty for one that cannot."""
    replans: Sequence[ReplanRecord] = ()
    """Better plans that were found while the run went on."""
    as_run: HostsAsRun | None = None
    """What hosts were like, or None if they were not watched."""
    text: TextResult | None = None
    """Figures of a run that generated text, or None."""
    planned_cache_bytes: float = 0.0
    """Bytes of the pages of all stages for the texts that the prediction is for."""
    simulated: bool = False
    """Whether the figures were computed instead of measured."""
    undisturbed_s: float | None = None
    """Length in seconds of a simulated run without the losses that it has, or None if it has none."""

    @property
    def throughput_items_per_s(self) -> float:
        """Items a second, including filling and draining the pipeline."""
        return self.items / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def comparison(self) -> Comparison | None:
        """Comparison of the prediction with the measurement, or None without a prediction."""
        if self.prediction is None or self.prediction.text is not None:
            return None
        return compare(
            self.prediction,
            # Those of a simulation come from the profiles that the prediction is made of.
            () if self.simulated else self.stages,
            items=self.items,
            # The prediction is that of the last plan, which other epochs did not run.
            run_items_per_s=None if len(self.epochs) > 1 else self.throughput_items_per_s,
            steady_items_per_s=self.steady_items_per_s,
        )

    @property
    def text_comparison(self) -> TextComparison | None:
        """Comparison of the texts with their prediction, or None without either."""
        # The prediction is that of the last plan, which other epochs did not run.
        if (
            self.text is None
            or self.prediction is None
            or self.prediction.text is None
            or len(self.epochs) > 1
        ):
            return None
        return compare_text(self.prediction.text, self.text, self.planned_cache_bytes)

    @property
    def comparison_as_run(self) -> PredictedFigure | None:
        """Items or tokens a second, with hosts as fast as they were, and as measured; None if unknown."""
        if self.as_run is None or self.as_run.items_per_s is None:
            return None
        texts, whole = self.text_comparison, self.comparison
        found = whole.steady if texts is None and whole is not None else None
        found = found if texts is None else texts.tokens_per_s
        return None if found is None else PredictedFigure(self.as_run.items_per_s, found.measured)

    def to_body(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        accuracy = self.accuracy
        return {
            "model": self.model,
            "schedule": schedule_body(self.schedule),
            "epochs": epochs_body(self.epochs),
            "replans": replans_body(self.replans),
            "items": self.items,
            "microbatches": self.microbatches,
            "ubatch_size": self.microbatch_size,
            "startup_s": self.startup_s,
            "elapsed_s": self.elapsed_s,
            "throughput_items_per_s": self.throughput_items_per_s,
            "latency_s": asdict(self.latency) if self.latency else None,
            "accuracy": (
                {"correct": accuracy.correct, "labelled": accuracy.labelled, "top1": accuracy.top1}
                if accuracy and accuracy.labelled
                else None
            ),
            "check": self.check.to_body() if self.check is not None else None,
            "stages": [asdict(stats) for stats in self.stages],
            "skipped": list(self.skipped),
            "predicted": self._predicted(),
            **({} if self.as_run is None else {"as_run": self._as_run_body(self.as_run)}),
            "latencies_s": _thinned(self.latencies_s),
            "series": list(self.series),
            "timeline": self.timeline.to_body() if self.timeline is not None else None,
            "energy": dict(self.energy) if self.energy is not None else None,
            **({} if self.text is None else {"text": self.text.to_body()}),
            "command": list(self.command),
            "versions": dict(self.versions),
            **({"simulated": True} if self.simulated else {}),
            **({} if self.undisturbed_s is None else {"undisturbed_s": self.undisturbed_s}),
        }

    def _predicted_text(self, text: TextPrediction) -> dict[str, Any]:
        """Return the predictions for the texts of a decoder."""
        body: dict[str, Any] = {"throughput_items_per_s": None, "bottleneck": text.limited_by}
        body |= {
            name: value for name, value in asdict(text).items() if name not in ("cache_bytes", "limited_by")
        }
        body["cache_bytes"] = sum(text.cache_bytes)
        comparison = self.text_comparison
        for name, figures in () if comparison is None else comparison.figures():
            body |= figures.to_body(name)
        return body

    def _as_run_body(self, as_run: HostsAsRun) -> dict[str, Any]:
        """Return what hosts were like, and what is predicted with such hosts."""
        comparison = self.comparison_as_run
        rate = {} if comparison is None else comparison.to_body("items_per_s")
        return {"slowness": dict(as_run.slowness), **rate}

    def _predicted(self) -> dict[str, Any]:
        """Return the predictions for the full pipeline, for the whole run, and for each stage."""
        comparison = self.comparison
        if self.prediction is not None and self.prediction.text is not None:
            return self._predicted_text(self.prediction.text)
        if self.prediction is None or comparison is None:
            return {"throughput_items_per_s": None}
        body: dict[str, Any] = {
            "throughput_items_per_s": self.prediction.throughput_items_per_s,
            "bottleneck": self.prediction.bottleneck,
            "input_link_s": self.prediction.input_link_s,
            "joules_per_item": self.prediction.joules_per_item,
        }
        predicted_j, measured_j = self.prediction.joules_per_item, self._measured_joules_per_item()
        if predicted_j is not None and measured_j is not None:
            body |= PredictedFigure(predicted_j, measured_j).to_body("joules_per_item")
        if comparison.steady is not None:
            body |= comparison.steady.to_body("throughput_items_per_s")
        if comparison.run is not None:
            body |= comparison.run.to_body("run_items_per_s")
        body["stages"] = [
            {
                "stage": stage.stage,
                "rank": stage.rank,
                **stage.compute.to_body("compute_s"),
                **(stage.link.to_body("link_s") if stage.link is not None else {"link_s": None}),
            }
            for stage in comparison.stages
        ]
        body["remarks"] = list(comparison.remarks)
        return body

    def _measured_joules_per_item(self) -> float | None:
        """Return the energy of an item, or None unless it was measured on every host."""
        if self.energy is None or self.energy["unmeasured_hosts"]:
            return None
        joules: float | None = self.energy["joules_per_item"]
        return joules


_LATENCIES = 2000
"""Largest number of microbatches, equally spaced, whose latency is in the report."""


def _thinned(latencies_s: Sequence[float]) -> list[float]:
    stride = max(1, -(-len(latencies_s) // _LATENCIES))
    return [round(seconds, 6) for seconds in latencies_s[::stride]]


def _pretty(value: object, indent: str = "") -> str:
    """Return JSON that people can read: nested values are indented, a list of plain values takes one line."""
    nested = indent + "  "
    if isinstance(value, Mapping) and value:
        entries = [f"{nested}{json.dumps(key)}: {_pretty(entry, nested)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(entry, list | Mapping) for entry in value):
        return "[\n" + ",\n".join(nested + _pretty(entry, nested) for entry in value) + f"\n{indent}]"
    return json.dumps(value)


def save_report(report: RunReport, path: Path) -> None:
    """Write ``report`` atomically.

    Raises:
        RequestError: The disk is full or no longer writable.
    """
    save_body(report.to_body(), path)


def save_body(body: dict[str, Any], path: Path) -> None:
    """Write the result of ``RunReport.to_body`` atomically, as JSON, or as a page if ``path`` ends in .html.

    Raises:
        RequestError: The disk is full or no longer writable.
    """
    page = path.suffix == ".html"
    text = render_run(read_run(body, path.name)) if page else _pretty(body) + "\n"
    write_whole(path, text, "--report")


def print_report(
    report: RunReport,
    console: Console,
    *,
    results: Path | None,
    saved: Path | None,
    trace: Path | None = None,
    replaced: Collection[Path] = (),
) -> None:
    """Print the stages as a table, followed by throughput, latency, accuracy and the paths of output files.

    Args:
        report: The run.
        console: Console to print on.
        results: File of the predictions, if any.
        saved: File of the report, if any.
        trace: File of the trace, if any.
        replaced: Files that replaced an existing one.
    """
    if report.text is None:
        what = f"{count(report.items, 'item')} in {count(report.microbatches, 'microbatch')}"
    else:
        answers, tokens = count(report.items, "answer"), count(report.text.completion_tokens, "token")
        what = f"{answers} of {tokens} in {count(report.microbatches, 'step')}"
    console.print(
        f"{report.model}: {what}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    print_table(console, _stage_columns(report))
    if report.comparison is not None and report.comparison.stages:
        print_table(console, _comparison_columns(report.comparison))
    lines = list(_summary_lines(report))
    rows = "predictions" if report.text is None else "answers"
    for what, path in ((rows, results), ("report", saved), ("trace", trace)):
        if path is not None:
            lines.append(f"{what:<11} {named_output(path, replaced)}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _summary_lines(report: RunReport) -> Iterator[str]:
    how = "simulated" if report.simulated else "measured"
    if report.text is None:
        rate = f"{figure(report.throughput_items_per_s)} items/s"
    else:
        whole = report.text.completion_tokens / report.elapsed_s if report.elapsed_s else 0.0
        rate = f"{figure(whole)} tokens/s"
    yield f"throughput  {rate} ({report.elapsed_s:.2f} s, after {report.startup_s:.1f} s to start)"
    if report.text is not None:
        yield from _text_lines(report.text)
    if report.undisturbed_s is not None and report.undisturbed_s > 0 and report.elapsed_s > 0:
        undisturbed_s, lost = report.undisturbed_s, percent(report.undisturbed_s / report.elapsed_s - 1)
        done, unit = report.items, "items"
        if report.text is not None:
            done, unit = report.text.completion_tokens, "tokens"
        yield (
            f"losses      cost {report.elapsed_s - undisturbed_s:.2f} s, {lost} throughput; without them "
            f"{figure(done / undisturbed_s)} {unit}/s ({undisturbed_s:.2f} s)"
        )
    for number, line in enumerate(epoch_lines(report.epochs, how)):
        yield f"{'' if number else 'epochs':<12}{line}"
    for number, line in enumerate(replan_lines(report.replans)):
        yield f"{'' if number else 're-planned':<12}{line}"
    if report.comparison is not None:
        yield from _comparison_lines(report.comparison, how)
    if report.text_comparison is not None and report.prediction is not None:
        yield from _text_comparison_lines(report.text_comparison, report.prediction, how)
    yield from _as_run_lines(report)
    bottleneck = find_bottleneck(read_run(report.to_body(), "the report"))
    # The next step of a sequence waits for its last token, so few of them leave a pipeline idle.
    waits = (Part.INPUT, Part.REQUESTS) if report.text is None else ()
    if bottleneck is not None and bottleneck.part in waits:
        yield f"bottleneck  {bottleneck.line}"
    if report.latency:
        yield (
            f"latency     {_seconds(report.latency.p50)} median, {_seconds(report.latency.p95)} at 95 %, "
            f"{_seconds(report.latency.max)} at most, per {'microbatch' if report.text is None else 'step'}"
        )
    if report.accuracy and report.accuracy.top1 is not None:
        accuracy = report.accuracy
        yield f"accuracy    {accuracy.top1:.4f} ({accuracy.correct}/{accuracy.labelled})"
    if report.check is not None:
        yield f"check       {report.check}"
    energy = [*_energy_lines(report.energy), *_predicted_energy_lines(report.prediction)]
    for number, line in enumerate(energy):
        yield f"{'' if number else 'energy':<12}{line}"
    if report.skipped:
        yield f"skipped     {count(len(report.skipped), 'input')} that cannot be used:"
        yield from (f"            {line}" for line in report.skipped[:_LISTED])
        if len(report.skipped) > _LISTED:
            yield f"            and {figure(len(report.skipped) - _LISTED)} more, which --report lists"


def _text_lines(text: TextResult) -> Iterator[str]:
    """Yield the lines about tokens."""
    for name, rate, tokens in (
        ("prefill", text.prefill_tokens_per_s, f"{count(text.prompt_tokens, 'token')} of prompts"),
        ("decode", text.decode_tokens_per_s, f"{count(text.completion_tokens, 'token')} of answers"),
    ):
        if rate is not None:
            yield f"{name:<11} {figure(rate)} tokens/s ({tokens})"
    for name, times in (("first token", text.first_token_s), ("next token", text.between_tokens_s)):
        if times is not None:
            yield f"{name:<11} {_seconds(times.p50)} median, {_seconds(times.p95)} at 95 %"
    sizes = ", ".join(f"{_format_amount(size)}B" for size in text.cache_bytes)
    yield f"{'cache':<11} {sizes} for contexts of {count(text.context, 'token')}"
    drafted, right = text.drafted_tokens, text.accepted_drafted_tokens
    for source, proposed, accepted in (
        ("from earlier text", text.proposed_tokens - drafted, text.accepted_tokens - right),
        ("drafted", drafted, right),
    ):
        if proposed:
            yield f"{'proposed':<11} {count(proposed, 'token')} {source}, {accepted / proposed:.0%} right"
    if text.repeated_tokens or text.kept_tokens:
        again, partly = count(text.repeated_tokens, "token"), figure(text.partly_repeated_tokens)
        kept = figure(text.kept_tokens)
        yield f"{'again':<11} {again} computed ({partly} by some layers alone), {kept} kept in the cache"


_LISTED = 20
"""Largest number of skipped inputs that are listed on a terminal."""


def _stage_columns(report: RunReport) -> list[Column]:
    """Return the table of stages; the column of hosts is empty if none has a name."""
    known = {stats.stage: stats for stats in report.stages}
    plans = report.schedule.stages
    figures = [_figure_cells(known[stage]) if stage in known else ("-",) * 7 for stage in range(len(plans))]
    params, compute, wait, send, sent, busy, peak = zip(*figures, strict=True)
    return [
        Column("stage", [str(stage) for stage in range(len(plans))]),
        Column("rank", [str(plan.rank) for plan in plans], rank=2),
        Column("host", [plan.host or "" for plan in plans], left=True, names=True, rank=1),
        Column("layers", [str(plan.layers) for plan in plans], left=True),
        Column("params", params, rank=6),
        Column("compute", compute),
        Column("wait", wait, rank=3),
        Column("send", send, rank=5),
        Column("sent", sent, rank=7),
        Column("busy", busy),
        Column("peak", peak, rank=4),
    ]


def _figure_cells(stats: StageStats) -> tuple[str, ...]:
    return (
        _format_amount(stats.parameters),
        _seconds(stats.compute_s_mean),
        _seconds(stats.recv_wait_s_mean),
        _seconds(stats.send_s_mean) if stats.bytes_out_mean else "-",
        f"{_format_amount(stats.bytes_out_mean)}B" if stats.bytes_out_mean else "-",
        f"{stats.busy_fraction:.0%}",
        f"{stats.rss_peak_mb:,.0f}MB",
    )


def _energy_lines(energy: Mapping[str, Any] | None) -> Iterator[str]:
    if energy is None or energy["joules"] is None:
        return
    sources = ", ".join(dict.fromkeys(rank["source"] for rank in energy["ranks"] if rank["source"]))
    line = f"{figure(energy['joules'])} J, {figure(energy['mean_watts'])} W ({sources})"
    if energy["joules_per_item"] is not None:
        line += f", {figure(energy['joules_per_item'])} J an item"
    if energy["unmeasured_hosts"]:
        line += f"; not measured on {', '.join(energy['unmeasured_hosts'])}"
    yield line


def _predicted_energy_lines(prediction: Prediction | None) -> Iterator[str]:
    if prediction is not None and prediction.joules_per_item is not None:
        yield f"{figure(prediction.joules_per_item)} J an item predicted, on the hosts that take part"


def _comparison_columns(comparison: Comparison) -> list[Column]:
    """Return the table of stages with predicted and measured times."""
    compute = [_comparison_cells(stage.compute) for stage in comparison.stages]
    link = [_comparison_cells(stage.link) for stage in comparison.stages]
    columns = [Column("stage", [str(stage.stage) for stage in comparison.stages])]
    for what, cells, rank in (("compute", compute, 0), ("link out", link, 2)):
        measured, predicted, errors = zip(*cells, strict=True)
        columns.append(Column(what, measured, rank=rank))
        columns.append(Column("predicted", predicted, rank=rank + 1))
        columns.append(Column("error", errors, rank=rank))
    return columns


def _comparison_cells(figures: PredictedFigure | None) -> tuple[str, str, str]:
    if figures is None:
        return "-", "-", "-"
    error = "-" if figures.error is None else percent(figures.error)
    return _seconds(figures.measured), _seconds(figures.predicted), error


def _comparison_lines(comparison: Comparison, how: str) -> Iterator[str]:
    for figures, when in (
        (comparison.steady, "once the pipeline is full"),
        (comparison.run, "with filling and draining it"),
    ):
        if figures is not None:
            yield (
                f"predicted   {figure(figures.predicted)} items/s {when}, {how} "
                f"{figure(figures.measured)} "
                f"({percent(figures.error or 0.0)})"
            )
    if comparison.steady is not None and comparison.bottleneck:
        yield f"            predicted bottleneck: {comparison.bottleneck}"
    for remark in comparison.remarks:
        yield f"            {remark}"


def _as_run_lines(report: RunReport) -> Iterator[str]:
    """Yield what is predicted with hosts as fast as they were, if some were not as their profiles say."""
    if report.as_run is None:
        return
    unlike = {
        host: slow for host, slow in report.as_run.slowness.items() if not 1 / _UNLIKE <= slow <= _UNLIKE
    }
    comparison = report.comparison_as_run
    if not unlike:
        return
    if comparison is not None:
        unit = "items/s" if report.text is None else "tokens/s"
        yield (
            f"as run      {figure(comparison.predicted)} {unit} with hosts as fast as they were, measured "
            f"{figure(comparison.measured)} ({percent(comparison.error or 0.0)})"
        )
    for number, (host, slow) in enumerate(unlike.items()):
        head = "" if number or comparison is not None else "as run"
        yield f"{head:<12}layers on {host} took {figure(slow)} times as long as its profile says"


def _text_comparison_lines(comparison: TextComparison, prediction: Prediction, how: str) -> Iterator[str]:
    """Yield a line for each figure of texts that was predicted, and measured or simulated."""
    text = prediction.text
    streams = "" if text is None else f" of {count(text.streams, 'stream')}"
    shown: Mapping[str, tuple[str, Callable[[float], str]]] = {
        "tokens_per_s": (f"tokens/s{streams}", figure),
        "between_tokens_s": ("between two tokens", _seconds),
        "first_token_s": ("to the first token", _seconds),
        "cache_bytes": ("of cache for them", lambda value: f"{_format_amount(value)}B"),
    }
    for name, figures in comparison.figures():
        what, format_value = shown[name]
        yield (
            f"predicted   {format_value(figures.predicted)} {what}, {how} "
            f"{format_value(figures.measured)} ({percent(figures.error or 0.0)})"
        )
    if text is not None:
        yield f"            predicted bottleneck: {text.limited_by}"


def _seconds(value: float) -> str:
    return f"{value:,.2f}s" if value >= 1 else f"{1e3 * value:.1f}ms"


def _format_amount(value: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:,.1f}{unit}"
    return f"{value:.0f}"
