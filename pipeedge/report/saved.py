"""Saved reports, checked when they are read: existing parts have the right type, missing ones are None."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeedge.observe.timeline import LaneId, LaneKind, ThreadState, Timeline, lane_of_epoch
from pipeedge.report.document import Value, shown

__all__ = ["Energy", "RankEnergy", "SavedEpoch", "SavedRun", "SavedSeries", "SavedStage", "read_run"]


_LONGEST_US = 1e15
"""Longest time in microseconds, about thirty years."""


@dataclass(frozen=True)
class SavedStage:
    """One stage: its place in the schedule, and its measurements as far as known."""

    stage: int
    rank: int
    host: str | None
    layers: tuple[int, int]
    """First and last layer, from 1."""
    quant_bits: int
    dtype: str
    figures: Mapping[str, float]
    """Figures by their names in the report, such as ``compute_s_mean``."""
    seconds: Mapping[str, float] | None
    """Seconds of each activity (values of ``ThreadState``) over the whole run."""
    memory_mb: Mapping[str, float] | None
    """Memory in MB by use (``weights``, ``buffers``, ``working``, ``available``); only for simulations."""
    kernels: str = ""
    """Kernels of the linear layers; empty if the report does not say."""

    @property
    def place(self) -> str:
        """Rank, and host if it has a name."""
        return f"rank {self.rank}" + (f" ({self.host})" if self.host else "")

    @property
    def words(self) -> str:
        """Name of the stage, its place and its layers."""
        return f"stage {self.stage} on {self.place}, {self.which}"

    @property
    def which(self) -> str:
        """Its layers, for use in a sentence."""
        first, last = self.layers
        return f"layer {last}" if first == last else f"layers {first}–{last}"


@dataclass(frozen=True)
class SavedSeries:
    """One stage over time, or a part of it. All columns have the same length; None is for unknown values."""

    stage: int
    rank: int
    t_s: Sequence[float | None]
    columns: Mapping[str, Sequence[float | None]]
    """Columns by name: ``items_per_s``, ``bytes_per_s``, ``link_bytes_per_s``, ``bits``."""
    epoch: int = 0
    """Epoch of this part, or 0 in a run that has none."""


@dataclass(frozen=True)
class RankEnergy:
    """Energy that one rank used."""

    rank: int
    host: str | None
    source: str
    joules: float | None
    mean_watts: float | None
    why_not: tuple[str, ...]
    """Sources that were tried and rejected, with the reasons."""


@dataclass(frozen=True)
class Energy:
    """Energy that the run used."""

    ranks: tuple[RankEnergy, ...]
    joules: float | None
    mean_watts: float | None
    joules_per_item: float | None
    unmeasured_hosts: tuple[str, ...]


@dataclass(frozen=True)
class SavedEpoch:
    """One epoch of a run that went on after failures."""

    number: int
    started_s: float
    cause: str
    """Reason why the epoch before it ended; empty for the first one."""
    seconds: Mapping[str, float]
    """Seconds without a new result by what happened: ``waiting_s``, ``preparing_s``, ``filling_s``."""
    repeated: int
    """Number of microbatches that were computed again."""
    stages: tuple[SavedStage, ...]
    """Its schedule, with the seconds of each activity of the stages that were recorded, and no figures."""
    predicted_items_per_s: float | None = None
    """Throughput that was predicted of its plan, or None."""
    steady_items_per_s: float | None = None
    """Throughput that was measured once the pipeline was full, or None."""

    @property
    def recovered(self) -> bool:
        """Whether all ranks stopped for it, instead of changing to it while they went on."""
        return self.seconds["waiting_s"] + self.seconds["preparing_s"] > 0

    @property
    def error(self) -> float | None:
        """Relative difference of its throughput from the prediction, or None if either is unknown."""
        if not self.predicted_items_per_s or self.steady_items_per_s is None:
            return None
        return self.steady_items_per_s / self.predicted_items_per_s - 1

    @property
    def lost_s(self) -> float:
        """Seconds without a new result."""
        return sum(self.seconds.values())

    @property
    def failed_s(self) -> float:
        """Time of the failure before it, in seconds from the beginning of the run."""
        return self.started_s - self.seconds["waiting_s"] - self.seconds["preparing_s"]


@dataclass(frozen=True)
class SavedReplan:
    """A better plan that was found while the run went on."""

    why: str
    predicted_percent: float
    """Predicted gain in throughput."""
    measured_percent: float | None
    """Measured gain, or None if it was not measured."""


@dataclass(frozen=True)
class SavedRun:
    """A measured or simulated report of any version."""

    name: str
    """Name of the file that it was read from."""
    model: str
    simulated: bool
    stages: tuple[SavedStage, ...]
    figures: Mapping[str, float]
    """Figures by their names in the report, such as ``items`` and ``throughput_items_per_s``."""
    latency_s: Mapping[str, float] | None
    latencies_s: Sequence[float]
    accuracy: tuple[int, int] | None
    """Number of correct items, and of those with a label."""
    predicted: Mapping[str, float]
    predicted_stages: tuple[Mapping[str, float], ...]
    remarks: tuple[str, ...]
    skipped: tuple[str, ...]
    notes: tuple[str, ...]
    timeline: Timeline | None
    series: tuple[SavedSeries, ...]
    energy: Energy | None
    command: str | None
    versions: Mapping[str, str]
    data_rank: int | None
    feed_s: Mapping[str, float] | None
    """Seconds of each activity (values of ``ThreadState``) of the thread that feeds the pipeline."""
    epochs: tuple[SavedEpoch, ...] = ()
    """Epochs, in order; empty for a run that cannot go on after a failure."""
    replans: tuple[SavedReplan, ...] = ()
    as_run: Mapping[str, float] | None = None
    """Throughput with hosts as fast as they were, by the names of the report; None if that is not known."""
    slowness: Mapping[str, float] = field(default_factory=dict)
    """Time that the layers of each host took, as a multiple of what its profile says."""
    text: Mapping[str, float] | None = None
    """Figures of a run that generated text, such as ``decode_tokens_per_s`` and ``first_token_s_p50``."""

    @property
    def length_s(self) -> float | None:
        """Length of the run in seconds."""
        if self.timeline is not None:
            return self.timeline.length_s
        return self.figures.get("elapsed_s")

    @property
    def last_epoch_s(self) -> float | None:
        """Length of the last epoch in seconds, which is that of a run without others."""
        length_s = self.length_s
        if len(self.epochs) < 2 or length_s is None:
            return length_s
        return max(0.0, length_s - self.epochs[-1].started_s)


def read_run(body: Any, name: str) -> SavedRun:
    """Read a report that ``RunReport.to_body`` wrote, in this version or an older one.

    Args:
        body: Parsed JSON of the report.
        name: Name of the file, for messages.

    Raises:
        RequestError: The document is not a report, or a part of it has the wrong type.
    """
    root = Value(body, name)
    timeline = _timeline(root)
    predicted = root.find("predicted")
    simulated, as_run = root.find("simulated"), root.find("as_run")
    return SavedRun(
        name=name,
        model=root.at("model").text(),
        simulated=simulated is not None and simulated.value is True,
        stages=_stages(root, timeline),
        figures=_numbers(root),
        latency_s=_optional_amounts(root.find("latency_s")),
        latencies_s=[value.amount() for value in _list(root, "latencies_s")],
        accuracy=_accuracy(root.find("accuracy")),
        predicted={} if predicted is None else _numbers(predicted),
        predicted_stages=()
        if predicted is None
        else tuple(_numbers(stage) for stage in _list(predicted, "stages")),
        remarks=() if predicted is None else _texts(predicted, "remarks"),
        skipped=_texts(root, "skipped"),
        notes=_texts(root, "notes"),
        timeline=timeline,
        series=tuple(_series(entry) for entry in _list(root, "series")),
        energy=_energy(root.find("energy")),
        command=_command(root.find("command")),
        versions=_versions(root.find("versions")),
        data_rank=_data_rank(root, timeline),
        feed_s=_feed_seconds(timeline),
        epochs=_epochs(_list(root, "epochs"), timeline),
        replans=tuple(_replan(entry) for entry in _list(root, "replans")),
        as_run=None if as_run is None else _numbers(as_run),
        slowness={} if as_run is None else _numbers(as_run.at("slowness")),
        text=_text_figures(root.find("text")),
    )


def _text_figures(value: Value | None) -> dict[str, float] | None:
    """Read the figures of tokens; those of a distribution get one name each."""
    if value is None:
        return None
    found = _numbers(value)
    for key in ("first_token_s", "between_tokens_s"):
        times = _optional_amounts(value.find(key)) or {}
        found |= {f"{key}_{name}": seconds for name, seconds in times.items()}
    sizes = [entry.amount() for entry in _list(value, "cache_bytes")]
    return {**found, "cache_bytes": sum(sizes)}


def _list(value: Value, key: str) -> list[Value]:
    found = value.find(key)
    return [] if found is None else found.items()


def _texts(value: Value, key: str) -> tuple[str, ...]:
    return tuple(entry.text() for entry in _list(value, key))


def _numbers(value: Value) -> dict[str, float]:
    """Return the entries that are numbers."""
    return {
        key: entry.number()
        for key, entry in value.entries()
        if isinstance(entry.value, int | float) and not isinstance(entry.value, bool)
    }


def _optional_amounts(value: Value | None) -> dict[str, float] | None:
    return None if value is None else {key: entry.amount() for key, entry in value.entries()}


def _whole(value: Value | None) -> int | None:
    return None if value is None else value.whole()


def _stages(root: Value, timeline: Timeline | None) -> tuple[SavedStage, ...]:
    plans = root.at("schedule").items()
    if not plans:
        root.at("schedule").fail("has no stages")
    stats = {entry.at("stage").whole(): entry for entry in _list(root, "stages")}
    return tuple(_stage(number, plan, stats.get(number), timeline) for number, plan in enumerate(plans))


def _stage(
    number: int, plan: Value, stats: Value | None, timeline: Timeline | None, ended: int | None = None
) -> SavedStage:
    """Read one stage.

    Args:
        number: Number of the stage.
        plan: Its entry in the schedule.
        stats: Its figures, or None.
        timeline: Timeline of the run, or None.
        ended: Epoch of the stage if that ended before the last one, which has lanes of its own.
    """
    layers = [bound.whole() for bound in plan.at("layers").items()]
    if len(layers) != 2:
        plan.at("layers").fail("is not a pair of first and last layer")
    host, bits, dtype = plan.find("host"), plan.find("quant_bits"), plan.find("dtype")
    rank = plan.at("rank").whole()
    kernels = None if stats is None else stats.find("kernels")
    return SavedStage(
        stage=number,
        rank=rank,
        host=None if host is None else host.text(),
        layers=(layers[0], layers[1]),
        quant_bits=0 if bits is None else bits.whole(),
        dtype="float32" if dtype is None else dtype.text(),
        figures={} if stats is None else _numbers(stats),
        seconds=_seconds(stats, timeline, rank, number, ended),
        memory_mb=None if stats is None else _optional_amounts(stats.find("memory_mb")),
        kernels="" if kernels is None else kernels.text(),
    )


def _epochs(entries: Sequence[Value], timeline: Timeline | None) -> tuple[SavedEpoch, ...]:
    return tuple(_epoch(entry, timeline, is_last=entry is entries[-1]) for entry in entries)


def _epoch(entry: Value, timeline: Timeline | None, *, is_last: bool) -> SavedEpoch:
    plans, number = entry.at("schedule").items(), entry.at("epoch").whole()
    predicted, steady = entry.find("predicted_items_per_s"), entry.find("steady_items_per_s")
    return SavedEpoch(
        number=number,
        started_s=entry.at("started_s").amount(),
        cause=entry.at("cause").text(),
        seconds={key: entry.at(key).amount() for key in ("waiting_s", "preparing_s", "filling_s")},
        repeated=entry.at("repeated").whole(),
        stages=tuple(
            _stage(stage, plan, None, timeline, None if is_last else number)
            for stage, plan in enumerate(plans)
        ),
        predicted_items_per_s=None if predicted is None else predicted.amount(),
        steady_items_per_s=None if steady is None else steady.amount(),
    )


def _replan(entry: Value) -> SavedReplan:
    measured = entry.find("measured_gain_percent")
    return SavedReplan(
        why=entry.at("why").text(),
        predicted_percent=entry.at("predicted_gain_percent").number(),
        measured_percent=None if measured is None else measured.number(),
    )


_FEED = LaneId(LaneKind.FEED).label
"""Label of the thread that feeds the pipeline."""


def _data_rank(root: Value, timeline: Timeline | None) -> int | None:
    """Return the data rank that the report names, else the rank that fed the pipeline."""
    said = _whole(root.find("data_rank"))
    if said is not None or timeline is None:
        return said
    return next((rank for rank, lane in timeline.lanes if lane == _FEED), None)


def _feed_seconds(timeline: Timeline | None) -> dict[str, float] | None:
    if timeline is None:
        return None
    found = (timeline.seconds(rank, lane) for rank, lane in timeline.lanes if lane == _FEED)
    return {doing.value: seconds for doing, seconds in next(found, {}).items()} or None


def _seconds(
    stats: Value | None, timeline: Timeline | None, rank: int, stage: int, ended: int | None
) -> dict[str, float] | None:
    """Return the seconds that the report names, else the sums of the spans."""
    said = None if stats is None else _optional_amounts(stats.find("seconds"))
    if said is not None or timeline is None:
        return said
    label = LaneId.stage(stage).label
    drawn = timeline.seconds(rank, label if ended is None else lane_of_epoch(ended, label))
    return {doing.value: seconds for doing, seconds in drawn.items()} or None


def _accuracy(value: Value | None) -> tuple[int, int] | None:
    return None if value is None else (value.at("correct").whole(), value.at("labelled").whole())


def _timeline(root: Value) -> Timeline | None:
    value = root.find("timeline")
    if value is None:
        return None
    value.at("length_s").amount()
    known = {doing.value for doing in ThreadState}
    for lane in value.at("lanes").items():
        for doing in lane.at("doing").items():
            if doing.text() not in known:
                doing.fail(f"is {shown(doing.value)}, which this version does not know")
        lane.at("rank").whole()
        lane.at("lane").text()
        for key in ("start_us", "end_us"):
            for time in lane.at(key).items():
                if abs(time.number()) > _LONGEST_US:
                    time.fail(f"is {shown(time.value)}, which is not a time of a run")
        for microbatch in lane.at("microbatch").items():
            if microbatch.value is not None:
                microbatch.whole()
    try:
        return Timeline.from_body(value.value)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        value.fail(f"cannot be read ({error})")


def _series(entry: Value) -> SavedSeries:
    columns = {}
    for key, column in entry.entries():
        if isinstance(column.value, list) and key != "decided":  # entries of "decided" are objects
            columns[key] = [None if value.value is None else value.amount() for value in column.items()]
    times = columns.pop("t_s", [])
    for key, values in columns.items():
        if len(values) != len(times):
            entry.at(key).fail(f"has {len(values)} values for {len(times)} times")
    stage, rank, epoch = entry.at("stage").whole(), entry.at("rank").whole(), _whole(entry.find("epoch"))
    return SavedSeries(stage, rank, times, columns, epoch or 0)


def _energy(value: Value | None) -> Energy | None:
    if value is None:
        return None

    def figure(of: Value, key: str) -> float | None:
        found = of.find(key)
        return None if found is None else found.amount()

    ranks = []
    for entry in _list(value, "ranks"):
        source, host = entry.find("source"), entry.find("host")
        ranks.append(
            RankEnergy(
                entry.at("rank").whole(),
                None if host is None else host.text(),
                "none" if source is None else source.text(),
                figure(entry, "joules"),
                figure(entry, "mean_watts"),
                _texts(entry, "why_not"),
            )
        )
    return Energy(
        tuple(ranks),
        figure(value, "joules"),
        figure(value, "mean_watts"),
        figure(value, "joules_per_item"),
        _texts(value, "unmeasured_hosts"),
    )


def _command(value: Value | None) -> str | None:
    if value is None:
        return None
    if isinstance(value.value, list):
        return shlex.join(part.text() for part in value.items()) or None
    return value.text()


def _versions(value: Value | None) -> dict[str, str]:
    return {} if value is None else {key: str(entry.value)[:200] for key, entry in value.entries()}
