"""Statistics of stages, energy, and the metrics of the original. Pure: times are passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct

from pipeedge.base.fields import Amount, Count, Line, Name, Number

__all__ = [
    "CSV_COLUMNS",
    "MetricSample",
    "EnergyUse",
    "Latency",
    "MeasuredSample",
    "NOT_MEASURED",
    "Scope",
    "StageStats",
    "StageWork",
    "Tally",
    "TextWork",
    "Windows",
    "csv_row",
    "energy_body",
]


@dataclass
class Tally:
    """Number of events, and the sum of their amounts."""

    count: int = 0
    total: float = 0.0

    def add(self, amount: float) -> None:
        """Count one more event of size ``amount``."""
        self.count += 1
        self.total += amount

    @property
    def mean(self) -> float:
        """Mean amount per event, or 0 if there were none."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True)
class StageStats:
    """Statistics of one stage of a run."""

    stage: Count
    rank: Count
    microbatches: Count
    compute_s_mean: Number
    """Seconds spent computing a microbatch."""
    send_s_mean: Number
    """Seconds until a microbatch had left this rank, including the wait for the next stage to take it or the
    earlier ones; over TCP the network may still carry it then. 0 if the next stage is on this rank."""
    send_s_best: Number
    """``send_s_mean`` at the rate of the fastest microbatch: the time to send without the wait."""
    recv_wait_s_mean: Number
    """Seconds that the stage waited for a microbatch to arrive."""
    bytes_out_mean: Number
    """Bytes of a microbatch on the outgoing link; 0 if there is none."""
    busy_fraction: Number
    """Fraction of the run that was spent computing."""
    rss_peak_mb: Number
    """Peak resident memory of the rank, in MB of 2^20 bytes."""
    parameters: Count
    """Number of weights of the shard."""
    compute_cpu_s_mean: Number = 0.0
    """Seconds of processor time that the computing thread used for a microbatch."""
    threads: Count = 1
    """Number of compute threads."""
    kernels: str = ""
    """Kernels of its linear layers (``pipeedge.models.kernels``), empty if the report does not say."""
    encode_s_mean: Number = 0.0
    """Seconds spent encoding a microbatch; 0 if the outgoing link is not compressed."""
    decode_s_mean: Number = 0.0
    """Seconds spent decoding a microbatch; 0 if the incoming link is not compressed."""
    transformed_fraction: Number = 0.0
    """Fraction of the tensors encoded for the outgoing link that were transformed (``--link-transform``)."""
    link_s: Number | None = None
    """Median seconds of a microbatch on the outgoing link, as measured at the receiving end, or None if
    that was not measured. The end of a send says little about the network, which buffers megabytes."""


class StageWork(Struct, frozen=True, array_like=True):
    """Seconds that a stage has spent working and waiting until now."""

    busy_s: Amount = 0.0
    """Seconds spent decoding, computing and encoding."""
    wait_input_s: Amount = 0.0
    wait_link_s: Amount = 0.0
    bits: Annotated[int, Meta(ge=0, le=64)] = 0
    """Bits per value on its outgoing link."""
    items: Count = 0
    """Number of items of the microbatches that it has finished; those of a decoder that continue texts, as a
    prompt takes another time."""
    compute_s: Amount = 0.0
    """Seconds spent computing them, without decoding and encoding."""
    link_items: Count = 0
    """Number of items that crossed its outgoing link, as far as receipts measure that."""
    link_s: Amount = 0.0
    """Seconds that they occupied the link."""
    finished_s: Amount = 0.0
    """Seconds from its start until it finished the latest of its ``items``."""
    cpu_s: Amount = 0.0
    """Processor seconds of the thread that computed its ``items``."""
    stretch: Amount = 1.0
    """Seconds that pass for each of these where a quota makes a rank pause that always has work."""

    @property
    def seconds(self) -> float:
        """Total of all parts, in seconds."""
        return self.busy_s + self.wait_input_s + self.wait_link_s


class TextWork(Struct, frozen=True, array_like=True):
    """Results of the steps of a decoder that continue texts, and read no prompts, until now."""

    steps: Count = 0
    rows: Count = 0
    """Number of tokens that they have continued texts by."""
    positions: Count = 0
    """Number of tokens in front of all these rows."""
    seconds: Amount = 0.0
    """Seconds from the result before each to its own, as far as texts grew throughout."""
    text_s: Amount = 0.0
    """The same seconds, times the number of texts that grew."""


@dataclass(frozen=True)
class Latency:
    """Seconds from handing a microbatch to the first stage to having its result."""

    p50: float
    p95: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency | None:
        """Return the statistics of all microbatches of a run, or None if there are none.

        Percentiles are by nearest rank.
        """
        if not seconds:
            return None
        ordered = sorted(seconds)

        def percentile(fraction: float) -> float:
            return ordered[max(0, -(-int(fraction * 100) * len(ordered) // 100) - 1)]

        return cls(p50=percentile(0.50), p95=percentile(0.95), max=ordered[-1])


@dataclass(frozen=True)
class EnergyUse:
    """Energy that a machine used while a rank ran."""

    source: Name | None
    """Name of the source that measured it, or None if none did."""
    joules: Number | None
    seconds: Number | None
    """Duration of the measurement in seconds."""
    why_not: tuple[Line, ...] = ()
    """Reasons why the sources that are preferred to it were not used."""

    @property
    def mean_watts(self) -> float | None:
        """Mean power in watts, or None if nothing is measured."""
        return self.joules / self.seconds if self.joules is not None and self.seconds else None


NOT_MEASURED = EnergyUse(None, None, None)


def energy_body(uses: Mapping[int, tuple[str, EnergyUse]], items: int) -> dict[str, Any]:
    """Return the energy of a run for JSON. Ranks on one host measure the same machine, which counts once.

    Args:
        uses: Host and energy use of each rank.
        items: Number of items of the run.
    """
    hosts: dict[str, EnergyUse] = {}
    for host, use in uses.values():
        known = hosts.get(host)
        if use.joules is not None and (known is None or known.joules is None or use.joules > known.joules):
            hosts[host] = use
        hosts.setdefault(host, use)
    measured = [use for use in hosts.values() if use.joules is not None]
    joules = sum(use.joules or 0.0 for use in measured) if measured else None
    return {
        "ranks": [
            {
                "rank": rank,
                "host": host,
                **asdict(use),
                "why_not": list(use.why_not),
                "mean_watts": use.mean_watts,
            }
            for rank, (host, use) in sorted(uses.items())
        ],
        "joules": joules,
        "mean_watts": sum(use.mean_watts or 0.0 for use in measured) if measured else None,
        "joules_per_item": joules / items if joules is not None and items else None,
        "unmeasured_hosts": sorted(host for host, use in hosts.items() if use.joules is None),
    }


@dataclass(frozen=True)
class MetricSample:
    """One operation: a microbatch was computed, sent, received, ..."""

    start_s: float
    end_s: float
    work: float
    """Amount of work in the unit of its key: items, or Mbit (10^6 bits) sent."""
    start_j: float = 0.0
    """Reading of the machine's energy source in joules; 0 without one."""
    end_j: float = 0.0
    accuracy: float = 0.0
    """Quality of the work in the unit of its key: layers, bits, correct predictions."""


@dataclass(frozen=True)
class Scope:
    """Sums over samples: the last one, a window, or all."""

    samples: int = 0
    time_s: float = 0.0
    """Sum of the durations in seconds; they may overlap."""
    work: float = 0.0
    energy_j: float = 0.0
    accuracy: float = 0.0

    def plus(self, sample: MetricSample) -> Scope:
        """Return the sums with one more sample."""
        return Scope(
            self.samples + 1,
            self.time_s + (sample.end_s - sample.start_s),
            self.work + sample.work,
            self.energy_j + (sample.end_j - sample.start_j),
            self.accuracy + sample.accuracy,
        )

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self._per_second(self.samples)

    @property
    def performance(self) -> float:
        """Work per second."""
        return self._per_second(self.work)

    @property
    def power_w(self) -> float:
        """Joules per second."""
        return self._per_second(self.energy_j)

    @property
    def accuracy_rate(self) -> float:
        """Accuracy per second."""
        return self._per_second(self.accuracy)

    def _per_second(self, amount: float) -> float:
        return amount / self.time_s if self.time_s > 0 else 0.0


@dataclass(frozen=True)
class MeasuredSample:
    """A sample, and the sums after it."""

    tag: int
    """Number of the sample, from 0."""
    sample: MetricSample
    run: Scope
    window: Scope
    instant: Scope


class Windows:
    """Sums over the samples of one key: all, the last ``size``, and the last one."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a window has at least one sample, not {size}")
        self._size = size
        self._last: deque[MetricSample] = deque()
        self._run = Scope()

    def add(self, sample: MetricSample) -> MeasuredSample:
        """Add ``sample`` and return it with the sums after it."""
        self._run = self._run.plus(sample)
        self._last.append(sample)
        if len(self._last) > self._size:
            self._last.popleft()
        window = Scope()
        for one in self._last:  # recomputed, so that rounding errors do not accumulate
            window = window.plus(one)
        return MeasuredSample(self._run.samples - 1, sample, self._run, window, Scope().plus(sample))


CSV_COLUMNS = (
    "Heartbeat",
    "Tag",
    *("Start Time (ns)", "End Time (ns)", "Global Time (ns)", "Window Time (ns)", "Instant Time (ns)"),
    *("Global Heart Rate (/s)", "Window Heart Rate (/s)", "Instant Heart Rate (/s)"),
    *("Work", "Global Work", "Window Work", "Instant Work"),
    *("Global Performance (/s)", "Window Performance (/s)", "Instant Performance (/s)"),
    *(
        "Start Energy (uJ)",
        "End Energy (uJ)",
        "Global Energy (uJ)",
        "Window Energy (uJ)",
        "Instant Energy (uJ)",
    ),
    *("Global Power (W)", "Window Power (W)", "Instant Power (W)"),
    *("Accuracy", "Global Accuracy", "Window Accuracy", "Instant Accuracy"),
    *("Global Accuracy Rate (/s)", "Window Accuracy Rate (/s)", "Instant Accuracy Rate (/s)"),
)
"""Columns of the original's files, so that the same tools can read these."""

_NS = 1e9
_UJ = 1e6


def csv_row(measured: MeasuredSample) -> list[str]:
    """Return a line under ``CSV_COLUMNS``.

    Times are whole nanoseconds, energies whole microjoules, and other figures have 15 decimals.
    """
    sample, scopes = measured.sample, (measured.run, measured.window, measured.instant)
    values: list[float] = [measured.tag, measured.tag]
    values += [round(sample.start_s * _NS), round(sample.end_s * _NS)]
    values += [round(scope.time_s * _NS) for scope in scopes]
    values += [scope.rate for scope in scopes]
    values += [sample.work, *(scope.work for scope in scopes)]
    values += [scope.performance for scope in scopes]
    values += [round(sample.start_j * _UJ), round(sample.end_j * _UJ)]
    values += [round(scope.energy_j * _UJ) for scope in scopes]
    values += [scope.power_w for scope in scopes]
    values += [sample.accuracy, *(scope.accuracy for scope in scopes)]
    values += [scope.accuracy_rate for scope in scopes]
    return [f"{value:.15f}" if isinstance(value, float) else str(value) for value in values]
