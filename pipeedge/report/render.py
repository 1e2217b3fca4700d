"""Rendering of pages as HTML. Jinja escapes every string that comes from a report."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from typing import Any, TypeAlias

from pipeedge.base.wording import count, figure
from pipeedge.observe.timeline import ThreadState, Timeline
from pipeedge.report.bottleneck import Part, find_bottleneck
from pipeedge.report.charts import Chart, Curve, histogram, lines, si
from pipeedge.report.comparison import compare_runs
from pipeedge.report.gantt import Mark, Shade, coarsened, legend, shade, to_data
from pipeedge.report.saved import SavedEpoch, SavedRun, SavedSeries, SavedStage

__all__ = ["gantt_section", "render_comparison", "render_run"]

_ASSETS = resources.files("pipeedge") / "assets" / "page"
_SERIES_SHOWN = 8
_Tile: TypeAlias = tuple[str, str, str]
"""Name, value and remark of a headline figure."""
"""Largest number of lines that can be told apart in a chart."""


def render_run(run: SavedRun) -> str:
    """Return the page of one run."""
    return _page("run.html", title=f"PipeEdge: {run.model}", run=_RunView(run))


def render_comparison(a: SavedRun, b: SavedRun) -> str:
    """Return the page of two runs, side by side."""
    return _page(
        "comparison.html",
        title=f"PipeEdge: {a.name} and {b.name}",
        views=[_RunView(a), _RunView(b)],
        groups=compare_runs(a, b),
    )


@dataclass(frozen=True)
class Gantt:
    """A timeline as the template needs it."""

    data: dict[str, Any]
    """Data for ``page.js``."""
    shades: Sequence[Shade]
    lanes: int
    coarse: bool
    """Whether the timeline was too large to draw span by span."""


def gantt_section(timeline: Timeline | None, epochs: Sequence[SavedEpoch] = ()) -> Gantt | None:
    """Return a timeline for the template, or None if there is nothing to draw.

    Args:
        timeline: Timeline of the run, if it has one.
        epochs: Epochs of the run; the time between a failure and the next new result is marked.
    """
    if timeline is None or not timeline.spans or timeline.length_s <= 0:
        return None
    drawn = coarsened(timeline)
    marks = [
        Mark(f"epoch {one.number}", one.failed_s, one.failed_s + one.lost_s) for one in epochs if one.cause
    ]
    return Gantt(
        to_data(drawn, marks), legend(drawn), len(drawn.lanes), len(drawn.spans) != len(timeline.spans)
    )


class _RunView:
    """A run as the templates show it."""

    def __init__(self, run: SavedRun) -> None:
        self.run = run
        self.bottleneck = find_bottleneck(run)
        self.gantt = gantt_section(run.timeline, run.epochs)
        self.latency = _latency(run)
        self.over_time = _over_time(run)
        self.tiles = _tiles(run)

    @property
    def boxes(self) -> list[_Box]:
        """The schedule."""
        layers = self.run.stages[-1].layers[1]
        return [
            _Box(
                stage,
                (stage.layers[0] - 1) / max(1, layers),
                (stage.layers[1] - stage.layers[0] + 1) / max(1, layers),
                self._is_bottleneck(Part.STAGE, stage.stage),
                self._flag(stage),
            )
            for stage in self.run.stages
        ]

    def _is_bottleneck(self, part: Part, number: int) -> bool:
        found = self.bottleneck
        return found is not None and (found.part, found.number) == (part, number)

    def _flag(self, stage: SavedStage) -> str:
        """Return what limits the throughput on the way to ``stage``, in two or three words, or nothing."""
        if stage.stage == 0:
            is_local = self.run.data_rank in (None, stage.rank)
            if self._is_bottleneck(Part.INPUT, 0) or (is_local and self._is_bottleneck(Part.LINK, 0)):
                return "waits for input"
        return "slow link" if self._is_bottleneck(Part.LINK, stage.stage) else ""

    @property
    def slow_end(self) -> str:
        """Bottleneck after the last stage, as the subject of a sentence; empty if there is none."""
        last = self.run.stages[-1]
        if not self._is_bottleneck(Part.LINK, len(self.run.stages)):
            return ""
        is_local = self.run.data_rank == last.rank
        return "Writing the results" if is_local else "The link back to the data rank"

    @property
    def times(self) -> list[_TimeGroup]:
        """Distribution of each stage's time, epoch by epoch and then in sum; empty if not known."""
        run = self.run
        if len(run.epochs) < 2 or not any(stage.seconds for one in run.epochs[:-1] for stage in one.stages):
            found = [_TimeGroup("", run.stages, run.length_s or 0.0)]
        else:
            found = [
                _TimeGroup(f"epoch {one.number}", one.stages, until_s - since_s)
                for one, (since_s, until_s) in zip(run.epochs, _stretches(run), strict=True)
            ]
            found.append(_in_sum(run))
        return [group for group in found if group.times]

    @property
    def time_shades(self) -> list[Shade]:
        """Shades of all activities of any stage."""
        times = [time for group in self.times for time in group.times]
        used = {doing for time in times for doing, seconds in time.seconds.items() if seconds > 0}
        return [shade(doing) for doing in _ordered(dict.fromkeys(used, 0.0))]

    @property
    def predicted(self) -> list[tuple[str, str, str, str]]:
        """Name, predicted value, measured value and error; empty without a prediction."""
        rows = [
            (
                f"throughput of epoch {one.number}, full pipeline",
                f"{figure(one.predicted_items_per_s)} items/s",
                f"{figure(one.steady_items_per_s)} items/s",
                f"{100 * one.error:+.1f} %",
            )
            for one in self.run.epochs[:-1]
            if one.error is not None and one.predicted_items_per_s and one.steady_items_per_s is not None
        ]
        last = f" of epoch {self.run.epochs[-1].number}" if len(self.run.epochs) > 1 else ""
        for key, name in (
            ("throughput_items_per_s", "full pipeline"),
            ("run_items_per_s", "with filling and draining"),
        ):
            rows += _prediction_rows(self.run.predicted, key, f"throughput{last}, {name}", "items/s")
        for key, name, unit in (
            ("tokens_per_s", "throughput of all streams", "tokens/s"),
            ("between_tokens_s", "between two tokens", "s"),
            ("first_token_s", "first token", "s"),
            ("cache_bytes", "cache", "B"),
        ):
            rows += _prediction_rows(self.run.predicted, key, name, unit)
        rows += _prediction_rows(self.run.predicted, "joules_per_item", "energy an item", "J")
        unit = "items/s" if self.run.text is None else "tokens/s"
        as_run = self.run.as_run or {}
        rows += _prediction_rows(as_run, "items_per_s", "throughput, hosts as fast as they were", unit)
        rows += [
            (f"layers on {host}, times of its profile", "1", figure(slow), f"{100 * (slow - 1):+.1f} %")
            for host, slow in self.run.slowness.items()
        ]
        for place, stage in enumerate(self.run.predicted_stages):
            number = round(stage.get("stage", place))
            rows += _prediction_rows(stage, "compute_s", f"stage {number}{last}, a microbatch", "s")
            rows += _prediction_rows(stage, "link_s", f"stage {number}{last}, its link", "s")
        return rows

    @property
    def failures(self) -> Sequence[SavedEpoch]:
        """Epochs, if the run has survived a failure."""
        return self.run.epochs if any(one.cause for one in self.run.epochs) else ()

    @property
    def foretold(self) -> bool:
        """Whether the throughput of some epoch was predicted."""
        return any(one.predicted_items_per_s is not None for one in self.run.epochs)

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Columns of the table of stages for which some stage has a figure."""
        known = {key for stage in self.run.stages for key, value in stage.figures.items() if value}
        if any(stage.kernels for stage in self.run.stages):
            known.add("kernels")
        return [(key, name) for key, name in _COLUMNS if key in known]

    def cell(self, stage: SavedStage, key: str) -> str:
        """Return a figure of the table of stages as text."""
        if key == "kernels":
            return stage.kernels or "–"
        value = stage.figures.get(key)
        if value is None:
            return "–"
        if key == "busy_fraction":
            return f"{value:.0%}"
        if key in ("rss_peak_mb", "threads"):
            return figure(round(value)) + (" MB" if key == "rss_peak_mb" else "")
        unit = "s" if "_s_" in key else "B" if key.startswith("bytes") else ""
        return f"{si(value)}{unit}"


_COLUMNS = (
    ("parameters", "parameters"),
    ("compute_s_mean", "compute"),
    ("decode_s_mean", "decode"),
    ("encode_s_mean", "encode"),
    ("recv_wait_s_mean", "wait for input"),
    ("send_s_mean", "sending"),
    ("bytes_out_mean", "sent"),
    ("busy_fraction", "busy"),
    ("rss_peak_mb", "peak memory"),
    ("threads", "threads"),
    ("kernels", "kernels"),
)


@dataclass(frozen=True)
class _Box:
    """A stage as a box in the drawing of the schedule."""

    stage: SavedStage
    before: float
    """Fraction of the model's layers that precede it."""
    share: float
    """Fraction of the model's layers that it has."""
    is_bottleneck: bool
    """Whether the stage itself is the bottleneck."""
    flag: str
    """Bottleneck on the way to this stage, in a few words; empty if there is none."""

    @property
    def memory_mb(self) -> float | None:
        """Peak memory in MB."""
        return self.stage.figures.get("rss_peak_mb")

    @property
    def memory_part(self) -> float | None:
        """Fraction of the available memory that weights and buffers take, or None if not known."""
        memory = self.stage.memory_mb
        if not memory or not memory.get("available"):
            return None
        return (memory.get("weights", 0.0) + memory.get("buffers", 0.0)) / memory["available"]

    @property
    def sent(self) -> str:
        """Bytes sent for each microbatch, as text."""
        size = self.stage.figures.get("bytes_out_mean")
        return f"{si(size)}B" if size else ""

    @property
    def bits(self) -> str:
        """Bits per value on the outgoing link."""
        return count(self.stage.quant_bits, "bit") if self.stage.quant_bits else ""


class _TimeGroup:
    """Distribution of the time of an epoch, or of the whole run.

    Args:
        title: Heading; empty in a run without epochs.
        stages: Stages, whose seconds may be unknown.
        length_s: Length in seconds.
    """

    def __init__(self, title: str, stages: Sequence[SavedStage], length_s: float) -> None:
        self.title = title if not title or length_s <= 0 else f"{title}, {si(length_s)}s"
        self.times = [
            _TimeShares(f"stage {stage.stage}", stage.place, _ordered(stage.seconds), length_s)
            for stage in stages
            if stage.seconds
        ]
        self.unknown = [stage.words for stage in stages if not stage.seconds]
        """Stages of which nothing was recorded, in words."""


def _stretches(run: SavedRun) -> list[tuple[float, float]]:
    """Return the beginning and the end of each epoch in seconds, with the recovery before it."""
    begins = [one.failed_s if one.recovered else one.started_s for one in run.epochs]
    begins = [0.0, *begins[1:], run.length_s or 0.0]
    return list(pairwise(begins))


def _in_sum(run: SavedRun) -> _TimeGroup:
    """Return the time of each rank in all epochs."""
    group = _TimeGroup("all epochs", (), run.length_s or 0.0)
    sums: dict[str, dict[str, float]] = {}
    stages = [stage for one in run.epochs for stage in one.stages]
    for stage in sorted(stages, key=lambda stage: stage.rank):
        total = sums.setdefault(stage.place, {})
        for doing, seconds in (stage.seconds or {}).items():
            total[doing] = total.get(doing, 0.0) + seconds
    group.times = [
        _TimeShares(place, "", _ordered(total), run.length_s or 0.0) for place, total in sums.items() if total
    ]
    return group


@dataclass(frozen=True)
class _TimeShares:
    """Distribution of a stage's time, or of a rank's."""

    name: str
    place: str
    """Where the stage was; empty for a rank."""
    seconds: dict[str, float]
    length_s: float
    """Length of the run, or of the epoch."""

    @property
    def total_s(self) -> float:
        """Sum in seconds, which is the length of the run if everything is known."""
        return sum(self.seconds.values())

    @property
    def parts(self) -> list[tuple[Shade, float, float]]:
        """Shade, seconds, and fraction of the whole, for each activity."""
        whole = max(self.total_s, self.length_s) or 1.0
        return [
            (shade(doing), seconds, seconds / whole) for doing, seconds in self.seconds.items() if seconds > 0
        ]


def _ordered(seconds: dict[str, float] | Any) -> dict[str, float]:
    """Return the entries with work first and waits last, in the order of ``ThreadState``."""
    order = [doing.value for doing in ThreadState]
    known = [doing for doing in order if doing in seconds]
    return {doing: seconds[doing] for doing in [*known, *(set(seconds) - set(known))]}


def _prediction_rows(of: Any, key: str, name: str, unit: str) -> list[tuple[str, str, str, str]]:
    predicted, measured = of.get(key), of.get(f"{key}_measured")
    if predicted is None or (measured is None and unit != "J"):
        return []
    error = of.get(f"{key}_error_percent")

    def shown(value: float) -> str:
        return f"{figure(value)} {unit}" if unit.endswith("/s") else f"{si(value)}{unit}"

    off = "–" if error is None else f"{error:+.1f} %"
    # Few machines can measure energy, so its prediction is shown alone, too.
    return [(name, shown(predicted), "–" if measured is None else shown(measured), off)]


def _tiles(run: SavedRun) -> list[_Tile]:
    """Return the headline figures."""
    return [*_result_tiles(run), *_cost_tiles(run)]


def _result_tiles(run: SavedRun) -> list[_Tile]:
    """Return the headline figures about the results."""
    figures = run.figures
    found: list[_Tile] = [] if run.text is None else _text_tiles(run.text)
    rate = figures.get("throughput_items_per_s")
    if rate is not None and run.text is None:
        elapsed = figures.get("elapsed_s")
        found.append(
            ("throughput", f"{figure(rate)} items/s", "" if elapsed is None else f"over {si(elapsed)}s")
        )
    if run.latency_s and "p50" in run.latency_s:
        rest = [
            f"{si(run.latency_s[key])}s {name}"
            for key, name in (("p95", "at 95 %"), ("max", "maximum"))
            if key in run.latency_s
        ]
        what = "microbatch" if run.text is None else "step"
        found.append((f"latency of a {what}", f"{si(run.latency_s['p50'])}s", ", ".join(rest)))
    if run.accuracy and run.accuracy[1]:
        correct, labelled = run.accuracy
        found.append(("accuracy", f"{correct / labelled:.2%}", f"{correct} of {labelled} with a label"))
    return found


def _text_tiles(text: Mapping[str, float]) -> list[_Tile]:
    """Return the headline figures about tokens."""
    found: list[_Tile] = []
    for name, key, tokens in (
        ("prompts", "prefill_tokens_per_s", "prompt_tokens"),
        ("answers", "decode_tokens_per_s", "completion_tokens"),
    ):
        if key in text:
            of = count(round(text.get(tokens, 0)), "token")
            found.append((name, f"{figure(text[key])} tokens/s", of))
    for name, key in (("first token", "first_token_s"), ("next token", "between_tokens_s")):
        if f"{key}_p50" in text:
            rest = f"{si(text[f'{key}_p95'])}s at 95 %" if f"{key}_p95" in text else ""
            found.append((name, f"{si(text[f'{key}_p50'])}s", rest))
    context = f"contexts of {count(round(text['context']), 'token')}" if "context" in text else ""
    found.append(("cache", f"{si(text.get('cache_bytes', 0.0))}B", context))
    return found


def _cost_tiles(run: SavedRun) -> list[_Tile]:
    """Return the headline figures about energy, epochs and memory."""
    found: list[_Tile] = []
    if run.energy and run.energy.joules_per_item is not None:
        total = run.energy.joules
        found.append(
            (
                "energy",
                f"{si(run.energy.joules_per_item)}J/item",
                "" if total is None else f"{si(total)}J in total",
            )
        )
    later = [one for one in run.epochs if one.cause]
    if later:
        repeated = count(sum(one.repeated for one in later), "microbatch")
        found.append(
            (
                "epochs",
                str(len(run.epochs)),
                f"{si(sum(one.lost_s for one in later))}s without a new result, {repeated} computed again",
            )
        )
    undisturbed_s, elapsed_s = run.figures.get("undisturbed_s"), run.figures.get("elapsed_s")
    if undisturbed_s and elapsed_s:
        detail = f"{undisturbed_s / elapsed_s - 1:+.1%} throughput; {si(undisturbed_s)}s without them"
        found.append(("cost of the losses", f"{si(max(0.0, elapsed_s - undisturbed_s))}s", detail))
    for better in run.replans:
        gain, detail = f"{better.predicted_percent:+.0f}% predicted", better.why
        if better.measured_percent is not None:
            gain, detail = f"{better.measured_percent:+.0f}%", f"{gain}; {better.why}"
        found.append(("gain of a better plan", gain, detail))
    memory = [stage.figures["rss_peak_mb"] for stage in run.stages if stage.figures.get("rss_peak_mb")]
    if memory:
        found.append(
            (
                "largest peak memory of a rank",
                f"{figure(round(max(memory)))} MB",
                f"{figure(round(sum(memory)))} MB in total",
            )
        )
    return found


def _latency(run: SavedRun) -> Chart | None:
    if not run.latencies_s:
        return None
    marks = [
        (name, run.latency_s[key])
        for key, name in (("p50", "median"), ("p95", "95 %"))
        if run.latency_s and key in run.latency_s
    ]
    return histogram("Latency of a microbatch", run.latencies_s, marks)


def _over_time(run: SavedRun) -> list[Chart]:
    """Return charts of throughput, bits and bandwidth of the first stages that have them."""
    found = []
    shown = [_joined(stage, run.series) for stage in sorted({one.stage for one in run.series})]
    for key, title, unit in (
        ("items_per_s", "Throughput of each stage", "items/s" if run.text is None else "tokens/s"),
        ("bytes_per_s", "Bytes per second sent by each stage", "B/s"),
        ("link_bytes_per_s", "Bandwidth of each link while occupied", "B/s"),
        ("bits", "Bits per value on each link", "bits"),
    ):
        series = [
            Curve(f"stage {one.stage}", one.t_s, one.columns[key])
            for one in shown[:_SERIES_SHOWN]
            if key in one.columns
        ]
        if key != "items_per_s":
            series = [line for line in series if any(line.y)]
        chart = lines(title, series, unit)
        if chart is not None:
            found.append(chart)
    return found


def _joined(stage: int, series: Sequence[SavedSeries]) -> SavedSeries:
    """Return the parts of one stage's series in the order of their epochs, with a gap between two."""
    parts = sorted((one for one in series if one.stage == stage), key=lambda one: one.epoch)
    joined = parts[0]
    for part in parts[1:]:
        blank = [None] * len(part.t_s)
        columns = {
            key: [*values, None, *part.columns.get(key, blank)] for key, values in joined.columns.items()
        }
        joined = SavedSeries(stage, part.rank, [*joined.t_s, None, *part.t_s], columns)
    return joined


def _page(template: str, **values: Any) -> str:
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # most reports are no pages

    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["si"] = si
    environment.filters["figure"] = figure
    environment.filters["count"] = count
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        style=_asset("page.css"), script=script, script_hash=digest, **values
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text("utf-8")
