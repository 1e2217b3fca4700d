"""Train batch by batch, in a thread of its own, and note what is done.

read ──> Engine.batch: forward, backward ──> update ──> checkpoint, now and then ──> ... ──> accuracy
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from rich.console import Console

from pipeedge.base.heap import return_freed_memory
from pipeedge.base.machine import resident_bytes
from pipeedge.base.schedule import LayerRange
from pipeedge.observe.lanes import WorkLane
from pipeedge.observe.timeline import ThreadState
from pipeedge.run.activity import Activity
from pipeedge.train.engine import BatchSize, Engine, Watch
from pipeedge.train.preparing import TrainingSetup
from pipeedge.train.recording import BatchResult, WorkerFigures

__all__ = ["BatchLoop", "WorkerLog"]

_MB = 1 << 20
_KEPT_BATCHES = 20_000
"""Number of results that are kept; in longer trainings, those of the last batches."""


class WorkerLog(Watch):
    """Activity and figures of one worker, for its heartbeats and for the report."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.activity = Activity()
        self.lane = WorkLane(clock)
        self.results: deque[BatchResult] = deque(maxlen=_KEPT_BATCHES)
        self.figures = WorkerFigures()
        """Figures for the report."""

    @contextmanager
    def doing(self, what: ThreadState, stage: int, microbatch: int | None) -> Iterator[None]:
        """Note the body as operation ``what`` of ``stage``."""
        busy = self.activity.busy(f"at the {what.value} of stage {stage}")
        with busy, self.lane.doing(what, stage, microbatch):
            yield
        # One worker alone sends nothing, and is not stuck for that.
        self.activity.finished()

    def sent(self, worker: int) -> None:
        """Count a payload that was handed to the link to ``worker``."""
        self.activity.sent(worker)

    def received(self, worker: int) -> None:
        """Count a payload that has arrived from ``worker``."""
        self.activity.received(worker)

    def note(self, **figures: Any) -> None:
        """Set figures for the report, by their names in ``WorkerFigures``."""
        self.figures = replace(self.figures, **figures)

    def results_at(self, hub_clock: Callable[[float], float]) -> tuple[BatchResult, ...]:
        """Return the results, timed by the hub's clock."""
        return tuple(replace(one, end_s=hub_clock(one.end_s)) for one in self.results)


class BatchLoop:
    """The batches of one worker. Creating it makes the worker's stages.

    Args:
        setup: The training.
        layers: Layers of each stage.
        log: Takes what is done.
        console: Console for a line after each batch.
        warn: Takes a line for the user that ends nothing.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        layers: Sequence[LayerRange],
        log: WorkerLog,
        console: Console,
        warn: Callable[[str], None],
    ) -> None:
        request, order, network = setup.request, setup.order, setup.network
        self._setup = setup
        self._log = log
        self._console = console
        self._warn = warn
        cuts = [0, *(part.stop for part in layers)]
        self._engine = Engine(
            order,
            setup.rank,
            {stage: network.build(layers[stage]) for stage in order.stages_of(setup.rank)},
            [network.crossing(cut, request.microbatch_size) for cut in cuts],
            BatchSize(request.microbatches, request.microbatch_size),
            log,
        )
        self._optimizer = _make_optimizer(request.optimizer, request.rate, self._engine.parameters)
        if setup.checkpoint is not None:
            setup.checkpoint.restore(self._engine.parameters, self._optimizer)
        if setup.writer is not None and setup.rank == 0:
            setup.writer.clear()
        self._stage = order.stages_of(setup.rank)[0]
        """Stage to which work for all stages of this worker is attributed."""

    def run(self) -> None:
        """Train on all batches, then measure the accuracy."""
        request, log = self._setup.request, self._log
        torch.set_num_threads(request.pipeline.threads)
        return_freed_memory()  # what building and measuring layers took is no part of what a batch needs
        log.note(rss_before_mb=resident_bytes() / _MB)
        self._engine.wait_for_all()
        log.lane.begin()
        self._train()
        log.note(steps=request.batches - self._setup.first_step)
        self._measure_accuracy()
        self._engine.wait_for_all()
        dist.destroy_process_group()

    def _train(self) -> None:
        request = self._setup.request
        began = time.perf_counter()
        has_warned = False
        for step in range(self._setup.first_step, request.batches):
            loss = self._batch(step)
            if loss is not None:
                result = BatchResult(step, loss if math.isfinite(loss) else None, time.perf_counter())
                self._log.results.append(result)
                which = f"batch {step + 1} of {request.batches}"
                self._print(f"{which}: loss {loss:.6f}, {result.end_s - began:.2f} s")
                began = result.end_s
                if result.loss is None and not has_warned:
                    has_warned = True
                    self._warn(f"the loss of batch {step + 1} is not a number: try a smaller --lr")
            if (step + 1) % request.checkpoint_every == 0 or step + 1 == request.batches:
                self._save(step + 1)

    def _batch(self, step: int) -> float | None:
        """Train on one batch; return its loss on the worker with the last stage."""
        request, engine, samples = self._setup.request, self._engine, self._setup.samples
        self._log.lane.refill()
        images = labels = None
        if engine.has_first or engine.has_last:
            with self._log.doing(ThreadState.READ, self._stage, None):
                images = samples.images(step) if engine.has_first else None
                labels = samples.labels(step) if engine.has_last else None
        loss = engine.batch(step * request.batch_size, images, labels)
        self._update()
        for _ in engine.late_gradients():
            self._update()
        return loss

    def _update(self) -> None:
        """Change what has a gradient, and let go of the gradient."""
        with self._log.doing(ThreadState.UPDATE, self._stage, None):
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _save(self, step: int) -> None:
        """Write a checkpoint, if they are wanted."""
        writer = self._setup.writer
        if writer is None:
            return
        with self._log.doing(ThreadState.WRITE, self._stage, None):
            name = f"worker-{self._setup.rank}"
            writer.write_part(step, name, self._engine.parameters, self._optimizer)
            self._engine.wait_for_all()
            if self._setup.rank == 0:
                writer.finish(step)

    def _measure_accuracy(self) -> None:
        held_out = self._setup.samples.held_out
        if held_out is not None:
            with self._log.activity.busy("measuring the accuracy"):
                correct = self._engine.correct(held_out.images, held_out.labels)
            if self._engine.has_last:
                self._log.note(accuracy=(correct, len(held_out.labels)))

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _make_optimizer(
    name: str, rate: float, parameters: Mapping[str, torch.nn.Parameter]
) -> torch.optim.Optimizer:
    # A worker may have nothing but poolings, and an optimizer refuses an empty list.
    given = list(parameters.values()) or [torch.nn.Parameter(torch.zeros(0))]
    if name == "adamw":
        return torch.optim.AdamW(given, lr=rate)
    return torch.optim.SGD(given, lr=rate)
