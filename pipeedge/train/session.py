"""One worker of a training, from request to report.

    every worker   hello ──> facts ──┐                          ┌─> stages ─> ready ─┐
    worker 0       all there, all agree? ─> layers' costs ─> partition              start ─> batches ─> done
    worker 0                                                                                 summary ─> report

What goes wrong, and who hears of it, is as in an inference run (``pipeedge.control``). The batches run in a
thread of their own, so that a worker that waits for gloo can still be told that another has died.
"""

from __future__ import annotations

import json
import math
import platform
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import torch
import torch.distributed as dist
from msgspec.structs import replace
from rich.console import Console

import pipeedge
from pipeedge.base.crew import Crew
from pipeedge.base.errors import PeerFailedError, RequestError, one_line
from pipeedge.base.fields import Port, convert, decoding, plain, to_plain
from pipeedge.base.files import InputPath, OutputFile, check_outputs, check_writable, write_whole
from pipeedge.base.machine import available_bytes, peak_rss_mb, resident_bytes
from pipeedge.base.schedule import LayerRange
from pipeedge.control.member import Callbacks, Member
from pipeedge.control.session import Announcement, Forms, Refusal, Session, report_early_failure
from pipeedge.data.images import is_image
from pipeedge.data.protected_files import model_paths
from pipeedge.observe.lanes import WorkLane
from pipeedge.observe.records import Recording
from pipeedge.observe.timeline import Doing, LaneId, stages_label
from pipeedge.observe.trace import timeline_events
from pipeedge.report.run_report import save_body
from pipeedge.run.worker import Activity
from pipeedge.train.checkpoint import Checkpoint, CheckpointWriter, is_checkpoint_file, latest
from pipeedge.train.costs import measure_costs
from pipeedge.train.engine import Engine, Watch
from pipeedge.train.heap import return_freed_memory
from pipeedge.train.networks import Network, Transformer, find_network
from pipeedge.train.orders import Order, bubble, make_order
from pipeedge.train.partition import check_partition, check_stages, find_partition
from pipeedge.train.recording import BatchResult, WorkerFigures, WorkerRecord
from pipeedge.train.report import TrainingReport, print_report
from pipeedge.train.request import DIGITS, RANDOM, TrainingRequest
from pipeedge.train.samples import Samples, open_samples
from pipeedge.transport.interfaces import choose_interface, use_interface
from pipeedge.transport.rendezvous import connect_store, join_group, serve_store

__all__ = ["show", "train"]

_MB = 1 << 20
_FLOAT_BYTES = 4
_START = "batches done"
_KEPT_BATCHES = 20_000
"""Among the facts: where a worker would go on from."""


def show(request: TrainingRequest, console: Console) -> None:
    """Print which worker would have which layers (``--dry-run``).

    Raises:
        PipeEdgeError: as ``train`` would, as far as one process can see it.
    """
    network = find_network(request.model, seed=request.seed, pretrained=request.pretrained)
    order = _order(request)
    for stage, layers in enumerate(_partition(request, network, order)):
        console.print(f"stage {stage}: {layers.named} on worker {order.placement[stage]}", highlight=False)
    console.print(f"bubble in theory: {bubble(order):.1%}", highlight=False)


def train(request: TrainingRequest, console: Console, warn: Callable[[str], None]) -> TrainingReport | None:
    """Take part in a training. Returns the report on worker 0, None on the others.

    Args:
        request: what to do.
        console: where losses and the table are printed.
        warn: called with a line for the user that ends nothing; from any thread.

    Raises:
        PipeEdgeError: the training failed; the message is one line for the user.
    """
    with report_early_failure(request.world):
        worker = _Worker(request, console, warn)
    callbacks = Callbacks(status=worker.activity.status, notify=warn)
    with Session(request.world, worker.forms, callbacks) as session:
        session.open()
        return worker.run(session)


@dataclass(frozen=True)
class _Plan:
    """What worker 0 decided."""

    layers: tuple[LayerRange, ...]
    """Layers of each stage."""
    store_port: Port
    """Port of the rendezvous store on worker 0."""

    def check(self, *, stages: int, n_layers: int) -> _Plan:
        """Return self, or raise ValueError if it does not fit the stages and the model of this worker."""
        if len(self.layers) != stages:
            raise ValueError(f"{len(self.layers)} of {stages} stages")
        if any(part.stop > n_layers for part in self.layers):
            raise ValueError(f"layers beyond {n_layers}")
        return self


_Session: TypeAlias = Session[Mapping[str, Any], _Plan]


def _order(request: TrainingRequest) -> Order:
    return make_order(
        request.pipeline.schedule,
        stages=request.pipeline.stages,
        workers=request.pipeline.workers,
        microbatches=request.microbatches,
    )


def _partition(request: TrainingRequest, network: Network, order: Order) -> tuple[LayerRange, ...]:
    """Return the layers of each stage, as given or as found by profiling."""
    given = request.pipeline.partition
    if given is not None:
        return check_partition(given, network.n_layers)
    if order.stages == 1:
        return (LayerRange(0, network.n_layers),)
    check_stages(order.stages, network.n_layers)
    memory_mb = request.pipeline.memory_mb
    allowed = available_bytes() / order.workers if memory_mb is None else memory_mb * _MB
    torch.set_num_threads(request.pipeline.threads)
    return find_partition(
        measure_costs(network, request.microbatch_size, request.microbatches),
        order,
        optimizer=request.optimizer,
        memory_bytes=max(1.0, allowed - resident_bytes()),
    )


def _check_outputs(request: TrainingRequest, network: Network) -> frozenset[Path]:
    """Refuse outputs that would replace what is read, or each other; return those that are there already."""
    outputs = [
        OutputFile(option, path)
        for option, path in (("--report", request.report), ("--trace", request.trace))
        if path is not None
    ]
    inputs: list[InputPath] = []
    if isinstance(network, Transformer):
        inputs += model_paths(network.model, None)
    if request.data not in (RANDOM, DIGITS):
        inputs.append(InputPath("--data", Path(request.data), is_image, nested=True))
    if request.checkpoint_dir is not None:
        inputs.append(InputPath("--checkpoint-dir", request.checkpoint_dir, is_checkpoint_file, nested=True))
    return check_outputs(outputs, inputs)


class _Watch(Watch):
    """What the engine does goes into the lane and into the beats."""

    def __init__(self, lane: WorkLane, activity: Activity) -> None:
        self._lane = lane
        self._activity = activity

    @contextmanager
    def doing(self, what: Doing, stage: int, microbatch: int | None) -> Iterator[None]:
        busy = self._activity.busy(f"at the {what.value} of stage {stage}")
        with busy, self._lane.doing(what, stage, microbatch):
            yield
        # One worker alone sends nothing, and is not stuck for that.
        self._activity.finished()

    def sent(self, worker: int) -> None:
        self._activity.sent(worker)

    def received(self, worker: int) -> None:
        self._activity.received(worker)


class _Worker:
    """One worker of one training. Built once, run once; what can be refused alone is refused here."""

    def __init__(self, request: TrainingRequest, console: Console, warn: Callable[[str], None]) -> None:
        self.activity = Activity()
        self._request = request
        self._console = console
        self._warn = warn
        self._rank = request.world.rank
        self._network = find_network(request.model, seed=request.seed, pretrained=request.pretrained)
        self._order = _order(request)
        images = request.batch_size * math.prod(self._network.image_shape) * _FLOAT_BYTES
        if images > available_bytes():
            raise RequestError(
                f"--batch-size {request.batch_size}: its images alone take {images / _MB:.0f} MB, "
                "more than is free"
            )
        if request.pipeline.partition is not None:
            check_partition(request.pipeline.partition, self._network.n_layers)
        check_stages(self._order.stages, self._network.n_layers)
        self._samples = open_samples(
            request.data,
            self._network,
            batch_size=request.batch_size,
            seed=request.seed,
            max_image_pixels=request.max_image_pixels,
        )
        self._replaced = _check_outputs(request, self._network)
        if request.report is not None:
            check_writable(request.report, "--report")
        if request.trace is not None:
            check_writable(request.trace, "--trace")
        self._checkpoint = self._find_checkpoint()
        self._writer = None
        if request.checkpoint_dir is not None:
            self._writer = CheckpointWriter(request.checkpoint_dir, self._description())
            self._writer.make_directory()
        self._crew = Crew()
        self._lane = WorkLane(time.perf_counter)
        self._watch = _Watch(self._lane, self.activity)
        self._batches: deque[BatchResult] = deque(maxlen=_KEPT_BATCHES)
        self._figures = WorkerFigures()
        self._store: Any = None

    @property
    def forms(self) -> Forms[Mapping[str, Any], _Plan]:
        """Form of the facts, an open list of options to compare, and of the plan."""
        return Forms(write_facts=dict, read_facts=plain, write_plan=to_plain, read_plan=self._read_plan)

    def _read_plan(self, body: Mapping[str, Any]) -> _Plan:
        plan: _Plan = convert(body, _Plan)
        return plan.check(stages=self._order.stages, n_layers=self._network.n_layers)

    def run(self, session: _Session) -> TrainingReport | None:
        """Take part in the session, from facts to report."""
        request, member = self._request, session.member
        plan = session.agree({**request.facts(), _START: self._start}, self._decide)
        layers = plan.layers
        member.set_hub_name(self._name(0, layers))
        member.on_end(lambda: self._crew.stop(member.error))
        with self.activity.busy("making its stages"):
            self._connect(plan.store_port)
            training = _Training(self, layers)
        session.start()
        startup_s = time.time() - psutil.Process().create_time()
        self._crew.start("train", training.run)
        self._crew.wait()
        self.tell(peak_rss_mb=peak_rss_mb())
        lane = LaneId.stage(*self._order.stages_of(self._rank))
        works = (self._lane.record(lane, member.hub_clock),)
        batches = tuple(replace(batch, end_s=member.hub_clock(batch.end_s)) for batch in self._batches)
        recording = Recording(self._rank, socket.gethostname(), works=works)
        member.record(WorkerRecord(recording, batches, self._figures).to_text())
        session.finish({})
        if not session.serves_hub:
            return None
        report = self._report(layers, _records(member), startup_s)
        if request.report is not None:
            save_body(report.to_body(), request.report)
        if request.trace is not None:
            names = {rank: self._name(rank, layers) for rank in range(self._order.workers)}
            events = timeline_events(report.timeline, names)
            write_whole(request.trace, json.dumps(events, separators=(",", ":")), "--trace")
        print_report(report, self._console, request.report, self._replaced)
        return report

    # -- what the parts of a training need ---------------------------------------------------------

    @property
    def request(self) -> TrainingRequest:
        """What to do."""
        return self._request

    @property
    def order(self) -> Order:
        """Who does what when."""
        return self._order

    @property
    def network(self) -> Network:
        """What is trained."""
        return self._network

    @property
    def samples(self) -> Samples:
        """What it learns from."""
        return self._samples

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Where it goes on from."""
        return self._checkpoint

    @property
    def writer(self) -> CheckpointWriter | None:
        """Of checkpoints, where they are wanted."""
        return self._writer

    def keep(self, result: BatchResult) -> None:
        """Keep the result of a batch for the report."""
        self._batches.append(result)

    @property
    def lane(self) -> WorkLane:
        """What this worker was at."""
        return self._lane

    @property
    def watch(self) -> Watch:
        """Told of what is done."""
        return self._watch

    def tell(self, **figures: Any) -> None:
        """Set figures for the report, by their names in ``WorkerFigures``."""
        self._figures = replace(self._figures, **figures)

    def print(self, line: str) -> None:
        """Print a line of progress."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def warn(self, line: str) -> None:
        """Warn the user in one line."""
        self._warn(line)

    # -- the steps ---------------------------------------------------------------------------------

    @property
    def _start(self) -> int:
        return 0 if self._checkpoint is None else self._checkpoint.step

    def _description(self) -> dict[str, Any]:
        """Return the options that a run resumed from this one's checkpoints must share."""
        names = ("model", "data", "batch_size", "optimizer", "seed")
        return {name: getattr(self._request, name) for name in names}

    def _find_checkpoint(self) -> Checkpoint | None:
        directory = self._request.checkpoint_dir
        if not self._request.resume or directory is None:
            return None
        found = latest(directory)
        found.check(self._description())
        if found.step >= self._request.batches:
            raise RequestError(
                f"{found.path}: has {found.step} batches behind it, --batches asks for "
                f"{self._request.batches} in all; ask for more"
            )
        return found

    def _decide(self, facts: Mapping[int, Mapping[str, Any]]) -> Announcement[_Plan] | Refusal:
        """Compare, on worker 0, what the workers were asked, and find the partition."""
        mismatch = _disagreement(facts)
        if mismatch is not None:
            return Refusal(mismatch)
        with self.activity.busy("measuring layers"):
            layers = _partition(self._request, self._network, self._order)
        self._store, port = serve_store(self._request.world.addr)
        return Announcement(
            _Plan(layers, port),
            participants=tuple(range(self._order.workers)),
            names={rank: self._name(rank, layers) for rank in range(self._order.workers)},
            data_rank=0,
        )

    def _name(self, rank: int, layers: Sequence[LayerRange]) -> str:
        stages = self._order.stages_of(rank)
        return f"{stages_label(stages)}, layers {' '.join(str(layers[stage]) for stage in stages)}"

    def _connect(self, store_port: int) -> None:
        world = self._request.world
        use_interface(choose_interface(world.socket_ifname, world.addr, world.port))
        store = connect_store(world.addr, store_port, timeout_s=world.timeout_s)
        try:
            join_group(store, index=self._rank, size=world.size)
        except (RuntimeError, ValueError) as error:
            raise PeerFailedError(
                f"the links of rank {self._rank} could not be opened: {one_line(error)}"
            ) from error
        self._store = None  # served no longer: all have met

    def _report(
        self, layers: Sequence[LayerRange], records: Mapping[int, WorkerRecord], startup_s: float
    ) -> TrainingReport:
        request = self._request
        return TrainingReport(
            model=request.model,
            schedule=request.pipeline.schedule,
            layers=layers,
            placement=self._order.placement,
            batch_size=request.batch_size,
            microbatch_size=request.microbatch_size,
            threads=request.pipeline.threads,
            bubble_in_theory=bubble(self._order),
            records=records,
            startup_s=startup_s,
            hosts={rank: record.recording.host for rank, record in records.items()},
            command=request.command,
            versions={
                "pipeedge": pipeedge.__version__,
                "python": platform.python_version(),
                "torch": str(torch.__version__),
            },
        )


class _Training:
    """The batches, in a thread of their own."""

    def __init__(self, worker: _Worker, layers: Sequence[LayerRange]) -> None:
        self._worker = worker
        request, order, network = worker.request, worker.order, worker.network
        self._request = request
        self._rank = request.world.rank
        cuts = [0, *(part.stop for part in layers)]
        self._engine = Engine(
            order,
            self._rank,
            {stage: network.build(layers[stage]) for stage in order.stages_of(self._rank)},
            [network.crossing(cut, request.microbatch_size) for cut in cuts],
            microbatches=request.microbatches,
            microbatch_size=request.microbatch_size,
            watch=worker.watch,
        )
        parameters = list(self._engine.parameters.values())
        kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        # A worker may have nothing but poolings, and an optimizer refuses an empty list.
        self._optimizer = kinds[request.optimizer](
            parameters or [torch.nn.Parameter(torch.zeros(0))], lr=request.rate
        )
        self._start = 0
        if worker.checkpoint is not None:
            worker.checkpoint.restore(self._engine.parameters, self._optimizer)
            self._start = worker.checkpoint.step
        self._writer = worker.writer
        if self._writer is not None and self._rank == 0:
            self._writer.clear()

    def run(self) -> None:
        """All batches, then the accuracy."""
        request, lane = self._request, self._worker.lane
        torch.set_num_threads(request.pipeline.threads)
        return_freed_memory()  # what building and measuring layers took is no part of what a batch needs
        self._worker.tell(rss_before_mb=resident_bytes() / _MB)
        self._engine.wait_for_all()
        lane.begin()
        began = time.perf_counter()
        told = False
        for step in range(self._start, request.batches):
            loss = self._batch(step)
            if loss is not None:
                result = BatchResult(step, loss if math.isfinite(loss) else None, time.perf_counter())
                self._worker.keep(result)
                self._worker.print(f"batch {step + 1}: loss {loss:.6f}, {result.end_s - began:.2f} s")
                began = result.end_s
                if result.loss is None and not told:
                    told = True
                    self._worker.warn(f"the loss of batch {step + 1} is no number: try a smaller --lr")
            due = (step + 1) % request.checkpoint_every == 0 or step + 1 == request.batches
            if self._writer is not None and due:
                with self._worker.watch.doing(
                    Doing.WRITE, worker_stage(self._worker.order, self._rank), None
                ):
                    self._save(step + 1)
        self._worker.tell(steps=request.batches - self._start)
        self._measure_accuracy()
        self._engine.wait_for_all()
        dist.destroy_process_group()

    def _batch(self, step: int) -> float | None:
        request, engine, samples = self._request, self._engine, self._worker.samples
        stage = worker_stage(self._worker.order, self._rank)
        self._worker.lane.refill()
        images = labels = None
        if engine.has_first or engine.has_last:
            with self._worker.watch.doing(Doing.READ, stage, None):
                images = samples.images(step) if engine.has_first else None
                labels = samples.labels(step) if engine.has_last else None
        loss = engine.batch(step * request.batch_size, images, labels)
        self._update(stage)
        for _ in engine.late_gradients():
            self._update(stage)
        return loss

    def _update(self, stage: int) -> None:
        """Change what has a gradient, and let go of the gradient."""
        with self._worker.watch.doing(Doing.UPDATE, stage, None):
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _save(self, step: int) -> None:
        if self._writer is None:
            return
        self._writer.write_part(step, f"worker-{self._rank}", self._engine.parameters, self._optimizer)
        self._engine.wait_for_all()
        if self._rank == 0:
            self._writer.finish(step)

    def _measure_accuracy(self) -> None:
        held_out = self._worker.samples.held_out
        if held_out is not None:
            with self._worker.activity.busy("measuring the accuracy"):
                correct = self._engine.correct(held_out.images, held_out.labels)
            if self._engine.has_last:
                self._worker.tell(accuracy=(correct, len(held_out.labels)))


def worker_stage(order: Order, worker: int) -> int:
    """Return the first stage of ``worker``, to which work for all its stages is attributed."""
    return order.stages_of(worker)[0]


def _disagreement(facts: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Describe the first option whose value on a worker differs from that of worker 0."""
    wanted = facts[0]
    for rank, said in facts.items():
        for option, value in wanted.items():
            if option != _START and said.get(option) != value:
                return f"rank {rank} was asked for {option} {said.get(option)}, rank 0 for {option} {value}"
        if said.get(_START) != wanted[_START]:
            return (
                f"rank {rank} finds a checkpoint of {said.get(_START)} batches, rank 0 one of "
                f"{wanted[_START]}: all must see the same --checkpoint-dir"
            )
    return None


def _records(member: Member) -> dict[int, WorkerRecord]:
    found = {}
    for rank, text in member.records().items():
        with decoding(f"what rank {rank} recorded", peer=rank):
            found[rank] = WorkerRecord.from_text(rank, text)
    return found
