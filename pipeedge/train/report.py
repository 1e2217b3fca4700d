"""Report the results of a training: plain data for programs, a table for people.

The JSON has the form of an inference run's (``schedule``, ``stages``, ``timeline``, ...), so that
``pipeedge-report`` can draw it, and a ``training`` section for what only a training has.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeedge.base.console import Column, print_table
from pipeedge.base.files import named_output
from pipeedge.base.schedule import LayerRange
from pipeedge.observe.timeline import ThreadState, Timeline, stages_label
from pipeedge.train.recording import BatchResult, WorkerRecord, to_timeline

__all__ = ["TrainingReport", "print_report"]


@dataclass(frozen=True)
class TrainingReport:
    """The results of a finished training."""

    model: str
    schedule: str
    layers: Sequence[LayerRange]
    """Layers of each stage."""
    placement: Sequence[int]
    """Worker of each stage."""
    batch_size: int
    """Number of items per update."""
    microbatch_size: int
    """Number of items in a microbatch."""
    threads: int
    """Number of threads of each worker."""
    bubble_in_theory: float
    """Fraction of time that the schedule makes workers wait in theory."""
    records: Mapping[int, WorkerRecord]
    """Record of each worker."""
    startup_s: float
    """Seconds from the start of the program to the first batch."""
    hosts: Mapping[int, str] = field(default_factory=dict)
    """Host of each worker."""
    command: Sequence[str] = ()
    """Command line."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the software."""

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.records)

    @property
    def batches(self) -> Sequence[BatchResult]:
        """Results of the batches; in very long runs, only of the last ones."""
        return self.records[self.placement[-1]].batches

    @property
    def batch_seconds(self) -> tuple[float, ...]:
        """Seconds from the end of each batch to the next; the first counts from the start of the run."""
        ends = [self.begun_s, *(batch.end_s for batch in self.batches)]
        if self.batches and len(self.batches) < self._steps:
            ends = ends[1:]
        return tuple(after - before for before, after in itertools.pairwise(ends))

    @property
    def _steps(self) -> int:
        steps = self.records[self.placement[-1]].figures.steps
        return len(self.batches) if steps is None else steps

    @property
    def begun_s(self) -> float:
        """Start of the first batch, in seconds on the hub's clock."""
        return min(record.work.begun_s for record in self.records.values())

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start of the first batch to the end of the last update."""
        return max(record.work.until_s for record in self.records.values()) - self.begun_s

    @property
    def bubble(self) -> float:
        """Fraction of all workers' time that they waited for each other."""
        work = sum(record.work.work_s for record in self.records.values())
        return max(0.0, 1.0 - work / (self.elapsed_s * self.workers)) if self.elapsed_s else 0.0

    @property
    def accuracy(self) -> tuple[int, int] | None:
        """Number of held-out items classified correctly, and number of all of them, or None."""
        return self.records[self.placement[-1]].figures.accuracy

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """Return the stages on ``worker``, in order."""
        return tuple(stage for stage, place in enumerate(self.placement) if place == worker)

    def peak_mb(self, worker: int) -> float:
        """Return the peak memory of a worker, in MB of 2^20 bytes."""
        return self.records[worker].figures.peak_rss_mb

    def before_mb(self, worker: int) -> float:
        """Return the memory of a worker before its first batch, in MB of 2^20 bytes."""
        return self.records[worker].figures.rss_before_mb

    @property
    def timeline(self) -> Timeline:
        """Activities of each worker; in very long runs, only the last ones."""
        return to_timeline(self.records)

    def to_body(self) -> dict[str, Any]:
        """Return the report as it is saved."""
        items = self._steps * self.batch_size
        accuracy = self.accuracy
        return {
            "model": self.model,
            "schedule": [
                {
                    "stage": stage,
                    "rank": self.placement[stage],
                    "host": self.hosts.get(self.placement[stage]),
                    "layers": [layers.first, layers.last],
                    "quant_bits": 0,
                }
                for stage, layers in enumerate(self.layers)
            ],
            "items": items,
            "microbatches": items // self.microbatch_size,
            "ubatch_size": self.microbatch_size,
            "startup_s": self.startup_s,
            "elapsed_s": self.elapsed_s,
            "throughput_items_per_s": items / self.elapsed_s if self.elapsed_s else 0.0,
            "accuracy": (
                None
                if accuracy is None
                else {"correct": accuracy[0], "labelled": accuracy[1], "top1": accuracy[0] / accuracy[1]}
            ),
            "stages": [self._stage_body(stage) for stage in range(len(self.layers))],
            "training": {
                "schedule": self.schedule,
                "workers": self.workers,
                "threads": self.threads,
                "batch_size": self.batch_size,
                "batches": [{"batch": one.step, "loss": one.loss} for one in self.batches],
                "batch_s": list(self.batch_seconds),
                "bubble": self.bubble,
                "bubble_in_theory": self.bubble_in_theory,
                "rss_peak_mb": [self.peak_mb(worker) for worker in sorted(self.records)],
                "rss_before_mb": [self.before_mb(worker) for worker in sorted(self.records)],
            },
            "timeline": self.timeline.to_body(),
            "command": list(self.command),
            "versions": dict(self.versions),
        }

    def _stage_body(self, stage: int) -> dict[str, Any]:
        worker = self.placement[stage]
        seconds = {
            doing.value: spent for at, doing, spent in self.records[worker].work.seconds if at == stage
        }
        busy = sum(seconds.values())
        return {
            "stage": stage,
            "rank": worker,
            # Work that the worker does for its other stages is not this stage's.
            "seconds": {**seconds, ThreadState.WAIT_INPUT.value: max(0.0, self.elapsed_s - busy)},
            "busy_fraction": busy / self.elapsed_s if self.elapsed_s else 0.0,
            "rss_peak_mb": self.peak_mb(worker),
        }


def print_report(
    report: TrainingReport, console: Console, saved: Path | None, replaced: Collection[Path] = ()
) -> None:
    """Print a table of the workers, and the figures of the whole training."""
    workers = sorted(report.records)
    of: list[dict[ThreadState, float]] = [{} for _ in workers]
    for worker, seconds_of in zip(workers, of, strict=True):
        for _, doing, seconds in report.records[worker].work.seconds:
            seconds_of[doing] = seconds_of.get(doing, 0.0) + seconds
    stages = [report.stages_of(worker) for worker in workers]
    waiting = [max(0.0, report.elapsed_s - report.records[worker].work.work_s) for worker in workers]

    def spent(doing: ThreadState) -> list[str]:
        return [f"{each.get(doing, 0.0):.2f} s" for each in of]

    columns = [
        Column("worker", list(map(str, workers))),
        Column("stages", [stages_label(each).partition(" ")[2] for each in stages], left=True, rank=3),
        Column("layers", [" ".join(str(report.layers[one]) for one in each) for each in stages], left=True),
        Column("forward", spent(ThreadState.FORWARD), rank=1),
        Column("backward", spent(ThreadState.BACKWARD), rank=2),
        Column("update", spent(ThreadState.UPDATE), rank=5),
        Column("waiting", [f"{each / report.elapsed_s:.1%}" if report.elapsed_s else "" for each in waiting]),
        Column("peak memory", [f"{report.peak_mb(worker):.0f} MB" for worker in workers], rank=4),
    ]
    print_table(console, columns)
    times = report.batch_seconds
    if times:
        console.print(
            f"{report.schedule}: {statistics.median(times):.3f} s a batch of {report.batch_size} "
            f"(median of {len(times)}), bubble {report.bubble:.1%} ({report.bubble_in_theory:.1%} in theory)",
            highlight=False,
            soft_wrap=True,
        )
    if report.accuracy is not None:
        correct, items = report.accuracy
        console.print(f"held-out accuracy {correct / items:.4f} ({correct}/{items})", highlight=False)
    if saved is not None:
        console.print(
            f"report: {named_output(saved, replaced)}", highlight=False, markup=False, soft_wrap=True
        )
