"""Measure the metrics of the original while a rank runs: time, work, energy and accuracy for each key.

    compute, watch, collect ──rows──> queue ──> [monitor] ──samples─> Windows ──> CSV files, Prometheus
                                                    └─ reads the energy source four times per second

    key            one sample                              work      accuracy
    shard          computing a microbatch                  items     layers of the shard
    recv           the wait for a microbatch               Mbit      0
    quant_decode   decoding a microbatch                   items     bits
    quant_encode   encoding a microbatch                   items     bits
    send           a microbatch on the outgoing link       Mbit      0
    output         from one result to the next             items     correct predictions, or the sum of the
                                                                     highest scores without labels

The threads of the rank only put samples into a queue; the monitor does everything else. Energy is that of
the machine, interpolated between two readings, so it includes what other processes use.
"""

from __future__ import annotations

import csv
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

from pipeedge.base.errors import RequestError
from pipeedge.base.files import OutputFile, check_writable_directory, make_writable_directory
from pipeedge.observe.energy import EnergyMeter
from pipeedge.observe.metrics import CSV_COLUMNS, EnergyUse, MeasuredSample, MetricSample, Windows, csv_row
from pipeedge.observe.records import EpochRecord, Row
from pipeedge.observe.timeline import ThreadState

__all__ = [
    "DATA_KEYS",
    "KEYS",
    "STAGE_KEYS",
    "CsvFiles",
    "Exporter",
    "Monitor",
    "Sink",
    "check_metrics_dir",
    "metrics_files",
    "metrics_path",
    "output_samples",
    "send_samples",
    "stage_samples",
]

STAGE_KEYS = ("shard", "recv", "quant_decode", "quant_encode", "send")
DATA_KEYS = ("output",)
KEYS = (*STAGE_KEYS, *DATA_KEYS)
"""Keys of the files that a rank may write; the schedule determines which of them it does write."""

_INTERVAL_S = 0.25
_MBIT = 8e-6
"""Mbit per byte; a Mbit is 10^6 bits, as in the original."""

Samples = Iterator[tuple[str, MetricSample]]


def stage_samples(
    row: Row, phases: Sequence[ThreadState], received: int, layers: int, decoded_bits: int
) -> Samples:
    """Yield the samples of one microbatch in a stage.

    Args:
        row: Times of the microbatch.
        phases: Phases that the seconds of ``row`` belong to.
        received: Bytes received over the network.
        layers: Number of layers of the shard.
        decoded_bits: Bits per value of the input; 0 if it is not compressed.
    """
    at = row.start_s
    for phase, seconds in zip(phases, row.seconds, strict=True):
        start, at = at, at + seconds
        if phase is ThreadState.WAIT_INPUT and received:
            yield "recv", MetricSample(start, at, received * _MBIT)
        elif phase is ThreadState.COMPUTE:
            yield "shard", MetricSample(start, at, row.items, accuracy=layers)
        elif phase is ThreadState.DECODE and decoded_bits:
            yield "quant_decode", MetricSample(start, at, row.items, accuracy=decoded_bits)
        elif phase is ThreadState.ENCODE and seconds > 0:
            yield "quant_encode", MetricSample(start, at, row.items, accuracy=round(row.bits))


def send_samples(size: int, start_s: float, end_s: float) -> Samples:
    """Yield the sample of a packet of ``size`` bytes that occupied the link."""
    yield "send", MetricSample(start_s, end_s, size * _MBIT)


def output_samples(since_s: float, until_s: float, items: int, accuracy: float) -> Samples:
    """Yield the sample of a result at ``until_s``, after the previous one at ``since_s``."""
    yield "output", MetricSample(since_s, until_s, items, accuracy=accuracy)


class Sink(Protocol):
    """A consumer of samples."""

    def take(self, key: str, measured: MeasuredSample) -> None:
        """Take one more sample of ``key``.

        Raises:
            OSError: The sink accepts no more samples.
        """

    def flush(self) -> None:
        """Make all samples taken so far visible."""

    def close(self) -> None:
        """Close the sink, after the last sample."""


class Monitor:
    """A thread that computes metrics, so that the working threads need not. A context manager.

    Args:
        meter: Energy meter of this machine.
        sinks: Consumers of every sample.
        window: Number of samples in a window.
        clock: Clock in seconds by which rows are recorded.
        warn: Called with a line for the user when a sink fails; the run goes on.
    """

    def __init__(
        self,
        meter: EnergyMeter,
        sinks: Sequence[Sink],
        window: int,
        clock: Callable[[], float],
        warn: Callable[[str], None],
    ) -> None:
        self._meter = meter
        self._sinks = list(sinks)
        self._window = window
        self._clock = clock
        self._warn = warn
        self._windows: dict[str, Windows] = {}
        self._samples: queue.SimpleQueue[Samples] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    @property
    def wants_samples(self) -> bool:
        """Whether there is a consumer of samples."""
        return bool(self._sinks)

    def add_samples(self, samples: Samples) -> None:
        """Queue ``samples``, which the monitor evaluates later. Cheap, and safe to call from any thread."""
        self._samples.put(samples)

    def __enter__(self) -> Monitor:
        if self._sinks or self._meter.measures:
            self._meter.sample(self._clock())
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        for sink in self._sinks:
            with suppress(OSError):
                sink.close()

    def use(self) -> EnergyUse:
        """Return the energy used between the first reading and the last."""
        return self._meter.use()

    def _run(self) -> None:
        ending = False
        while not ending:
            ending = self._ending.wait(_INTERVAL_S)
            self._meter.sample(self._clock())
            self._pass_on()

    def _pass_on(self) -> None:
        for key, sample in self._drain():
            windows = self._windows.setdefault(key, Windows(self._window))
            start_j, end_j = self._meter.joules_at(sample.start_s), self._meter.joules_at(sample.end_s)
            measured = windows.add(
                MetricSample(sample.start_s, sample.end_s, sample.work, start_j, end_j, sample.accuracy)
            )
            self._each_sink(partial(_take, key=key, measured=measured))
        self._each_sink(_flush)

    def _drain(self) -> Samples:
        with suppress(queue.Empty):
            while True:
                yield from self._samples.get_nowait()

    def _each_sink(self, act: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                act(sink)
            except OSError as error:
                self._sinks.remove(sink)
                self._warn(f"metrics are no longer written ({error.strerror or error}); the run continues")


def _take(sink: Sink, key: str, measured: MeasuredSample) -> None:
    sink.take(key, measured)


def _flush(sink: Sink) -> None:
    sink.flush()


def check_metrics_dir(
    directory: Path, mode: str, rank: int, keys: Sequence[str], *, make: bool = True
) -> None:
    """Refuse a directory that cannot take the metrics of this rank.

    Args:
        directory: Directory of the files.
        mode: Treatment of existing files: ``x`` refuses, ``w`` replaces, ``a`` appends to them.
        rank: This rank.
        keys: Keys of its files.
        make: Whether to create the directory if it does not exist.

    Raises:
        RequestError: The directory cannot be written, or a file exists already.
    """
    if make:
        make_writable_directory(directory, "--metrics-dir")
    else:
        check_writable_directory(directory, "--metrics-dir")
    for key in keys:
        path = metrics_path(directory, rank, key)
        if mode == "x" and path.exists():
            raise RequestError(
                f"--metrics-dir {directory}: {path.name} exists already; choose another directory, or "
                "--csv-file-mode w to replace it or a to append to it"
            )
        if mode != "x" and path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise RequestError(f"--metrics-dir {directory}: {path.name} cannot be written")


def metrics_path(directory: Path, rank: int, key: str) -> Path:
    """Return the file for one key of one rank."""
    return directory / f"{key}-rank{rank}.csv"


def metrics_files(directory: Path | None, rank: int) -> list[OutputFile]:
    """Return the files that ``rank`` may write; none without a directory."""
    if directory is None:
        return []
    return [OutputFile("--metrics-dir", metrics_path(directory, rank, key)) for key in KEYS]


def _writer(stream: IO[str]) -> Any:
    return csv.writer(stream, lineterminator="\n")


class CsvFiles:
    """A file for each key, a line for each sample.

    Raises:
        RequestError: On creation, if a file cannot be opened.
    """

    def __init__(self, directory: Path, mode: str, rank: int, keys: Sequence[str]) -> None:
        self._streams: dict[str, IO[str]] = {}
        for key in keys:
            path = metrics_path(directory, rank, key)
            try:
                stream = path.open(mode, encoding="utf-8", newline="")
                self._streams[key] = stream
                if not stream.tell():
                    _writer(stream).writerow(CSV_COLUMNS)
            except OSError as error:
                self.close()
                raise RequestError(f"--metrics-dir {directory}: {path.name}: {error.strerror}") from error
        self._writers = {
            key: csv.writer(stream, lineterminator="\n") for key, stream in self._streams.items()
        }

    def take(self, key: str, measured: MeasuredSample) -> None:
        """Write ``measured`` as a line."""
        if key in self._writers:
            self._writers[key].writerow(csv_row(measured))

    def flush(self) -> None:
        """Flush all lines to the files."""
        for stream in self._streams.values():
            stream.flush()

    def close(self) -> None:
        """Close the files."""
        for stream in self._streams.values():
            stream.close()


_FIGURES: Mapping[str, tuple[str, Callable[[Any], float]]] = {
    "time_seconds": ("Time spent, summed over microbatches", lambda scope: scope.time_s),
    "rate": ("Microbatches per second of that time", lambda scope: scope.rate),
    "work": ("Items, or Mbit for send and recv", lambda scope: scope.work),
    "performance": ("Work per second of that time", lambda scope: scope.performance),
    "energy_joules": ("Energy of the machine in that time", lambda scope: scope.energy_j),
    "power_watts": ("Energy per second of that time", lambda scope: scope.power_w),
    "accuracy": ("Layers, bits or correct predictions, by key", lambda scope: scope.accuracy),
    "accuracy_rate": ("Accuracy per second of that time", lambda scope: scope.accuracy_rate),
}


class Exporter:
    """Serves the last sample of every key to Prometheus, and on the data rank the number of epochs.

    Args:
        address: Address of the interface to listen on.
        port: Port to listen on.
        rank: This rank, a label of every figure.

    Raises:
        RequestError: ``prometheus-client`` is not installed, or the port is taken.
    """

    def __init__(self, address: str, port: int, rank: int) -> None:
        try:
            import prometheus_client
            from prometheus_client import core
        except ImportError:
            raise RequestError(
                "--prometheus-port needs the package prometheus-client: pip install 'pipeedge[prometheus]'"
            ) from None
        self._family = core.GaugeMetricFamily
        self._rank = str(rank)
        self._counter = core.CounterMetricFamily
        self._latest: dict[str, MeasuredSample] = {}
        self._epochs = self._repeated = self._lost_ranks = 0
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, address, registry)
        except OSError as error:
            raise RequestError(
                f"--prometheus-port {port}: cannot listen at {address} ({error.strerror}); choose another "
                "port, one for each rank of a machine"
            ) from error

    def collect(self) -> Iterator[Any]:
        """Yield all figures. ``prometheus_client`` calls this from its own thread."""
        latest = dict(self._latest)
        for name, (text, figure) in _FIGURES.items():
            family = self._family(f"pipeedge_{name}", text, labels=("rank", "key", "scope"))
            for key, measured in sorted(latest.items()):
                scopes = {"instant": measured.instant, "window": measured.window, "global": measured.run}
                for scope, values in scopes.items():
                    family.add_metric((self._rank, key, scope), figure(values))
            yield family
        if self._epochs:
            yield from self._counts()

    def take(self, key: str, measured: MeasuredSample) -> None:
        """Replace the last sample with ``measured``."""
        self._latest[key] = measured

    def add_epoch(self, epoch: EpochRecord) -> None:
        """Count an epoch that runs. Safe to call from any thread."""
        self._epochs += 1
        self._repeated += epoch.repeated
        self._lost_ranks += len(epoch.lost)

    def _counts(self) -> Iterator[Any]:
        """Yield the counts of epochs, on the rank that counts them."""
        for name, text, total in (
            ("epochs", "Plans that the run has had, one more for each recovery", self._epochs),
            ("repeated_microbatches", "Microbatches computed again after failures", self._repeated),
            ("lost_ranks", "Ranks that were lost", self._lost_ranks),
        ):
            family = self._counter(f"pipeedge_{name}", text, labels=("rank",))
            family.add_metric((self._rank,), total)
            yield family

    def flush(self) -> None:
        """Do nothing: every sample is visible at once."""

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
