"""The flow of data on the data rank: the input, the first and the last link, and the results.

source ──> [read ahead] ──> Feeder ──> stage 0, if that is on this rank; its thread takes the input
                               └─[feed]─> Outgoing ──> link 0 ──> ..., if it is not
                                             └──> [watch] times the link
... ──> last link ──> Incoming ──> [collect] ──> sink
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pipeedge.base.crew import Crew
from pipeedge.base.errors import WeightsError
from pipeedge.base.files import OutputFile
from pipeedge.data import DataEnds, ItemStream, open_run_input
from pipeedge.data.agreement import Agreement, Outputs, agreement, joined, outputs_by_block
from pipeedge.data.fingerprint import input_fingerprint
from pipeedge.data.protected_files import check_written_outputs
from pipeedge.data.results import ResultWriter
from pipeedge.models import Model
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.dtypes import find_dtype, stream_dtype
from pipeedge.observe.lanes import COLLECT, FEED, Lane, LinkLane
from pipeedge.observe.monitoring import Monitor, output_samples
from pipeedge.observe.records import Row
from pipeedge.observe.timeline import LaneId, LaneKind
from pipeedge.request.config import RunRequest
from pipeedge.run.context import EpochContext
from pipeedge.run.feed_collect import Collection, Collector, Feed, Feeder
from pipeedge.run.linked_stage import make_decoder
from pipeedge.run.links import LinkEnds
from pipeedge.run.priority import give_way
from pipeedge.run.progress import DataProgress
from pipeedge.run.resuming import find_rows, made_with, request_dependencies
from pipeedge.run.worker import Outgoing
from pipeedge.transport.base import unbound

__all__ = ["DataFlow", "make_data_flow", "open_data_ends"]


def open_data_ends(request: RunRequest, model: Model, metrics: Sequence[OutputFile]) -> DataEnds:
    """Open the input, and check that all outputs can be written.

    Args:
        request: The request of the data rank.
        model: The model.
        metrics: Files that this rank's metrics go to.

    Raises:
        PipeEdgeError: One of the files cannot be used.
    """
    output = request.output
    replaced = check_written_outputs(request, model, metrics)
    if output.check_items:
        with _naming("--check computes in float32"):
            model.check_weights(request.model.weights)
    results = request.results
    source = open_run_input(request, model)
    held_out = None
    if request.schedule.held_out:
        from pipeedge.run.held_out import open_held_out  # which needs the planner

        held_out = open_held_out(request, model, source)
    compared = None
    if output.check_items:
        source.check_distinct(output.check_items, "--check")
        compared = source.first(output.check_items)
    if results is None or request.prints_results:
        writer = ResultWriter(results, model, None)
        return DataEnds(source, writer, compared, replaced, held_out=held_out)
    found, note = find_rows(results, resume=output.resume)
    depends_on = request_dependencies(request, model, input_fingerprint(request.input, source))
    writer = ResultWriter(results, model, None, depends_on, found, made_with())
    if found is not None:
        source = source.rest(found.position)
    notes = () if note is None else (note,)
    return DataEnds(source, writer, compared, replaced, notes, held_out=held_out)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Add ``what`` the weights were for to the message about weights that do not fit."""
    try:
        yield
    except WeightsError as error:
        raise WeightsError(f"{what}: {error}") from error


@dataclass(frozen=True)
class DataFlow:
    """Input and results, with the threads that move data between them and the pipeline."""

    ends: DataEnds
    progress: DataProgress
    """Items of it that are under way, and those that are done."""
    stream: ItemStream
    """Input as it is read, which outlasts a plan that is replaced by a better one."""
    feeder: Feeder
    outgoing: Outgoing | None
    """The first link, or None if the first stage is on this rank."""
    collector: Collector
    link: LinkLane
    """Record of the first link."""
    collecting_gives_way: bool = False
    """Whether other threads of this rank go before the one that collects."""

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Lanes of its threads."""
        return (*self.stream.lanes, self.feeder.lane, self.collector.lane)

    def start(self, crew: Crew) -> None:
        """Begin to feed and to collect."""
        crew.on_stop(self.progress.ledger.close)
        if (outgoing := self.outgoing) is not None:
            crew.on_stop(outgoing.close)
            crew.start("feed", lambda: self.feeder.run(outgoing))
            crew.start("watch", outgoing.run)
        self.stream.start(crew)
        crew.start("collect", self._collect)

    def _collect(self) -> None:
        if self.collecting_gives_way:
            give_way()
        self.collector.run()

    def check(
        self, request: RunRequest, model: Model | DecoderModel, device: torch.device
    ) -> Agreement | None:
        """Compare the first items, if any, with the outputs of the model in float32, computed here."""
        if isinstance(model, DecoderModel):
            # Only the data rank of a decoder needs them.
            from pipeedge.data.step_queue import StepQueue
            from pipeedge.run.text_check import check_text

            queue = self.ends.source
            if not request.output.check_items or not isinstance(queue, StepQueue):
                return None

            return check_text(queue, model, request.model.weights)
        if self.ends.compared is None:
            return None
        kept = self.progress.collected.kept
        numbers = tuple(number for each, _ in kept for number in each)
        found = Outputs(numbers, joined([outputs for _, outputs in kept]))
        exact = outputs_by_block(
            model,
            self.ends.compared,
            request.microbatch_size,
            weights=request.model.weights,
            device=device,
            dtype=torch.float32,
        )
        return agreement(found, exact, classes=model.output_kind != "vector")


def make_data_flow(
    data: DataEnds,
    progress: DataProgress,
    epoch: EpochContext,
    ends: LinkEnds,
    monitor: Monitor,
    before: DataFlow | None = None,
) -> DataFlow:
    """Join input and results to the first and the last link.

    Args:
        data: Input and results of the run.
        progress: What of it is under way, and what is done.
        epoch: This rank in the epoch.
        ends: Links of this rank.
        monitor: Takes a sample of each microbatch, if anybody wants them.
        before: The flow of the epoch before, while that still runs; its input goes on.
    """
    plan, activity = epoch.plan, epoch.activity
    first, outgoing = plan.schedule.stages[0], None
    is_away = first.rank != plan.data_rank
    link = LinkLane(LaneId.link(), first.rank if is_away else None, plan.record_rows)
    if is_away:
        outgoing = Outgoing(ends.outgoing(0), activity, lane=link)
    if before is not None:
        stream = before.stream.following()
    else:
        stream = data.source.stream(position=progress.ledger.position, rows=plan.record_rows)
    dtype = stream_dtype(find_dtype(first.dtype))
    feed = Feed(stream, plan.microbatch_size, dtype, progress.ledger, takes_over=before is not None)
    feed_lane = Lane(LaneId(LaneKind.FEED), FEED, time.perf_counter, plan.record_rows)
    feeder = Feeder(feed, activity, feed_lane, unbound if outgoing is None else outgoing.reserve)
    # Those of an input that has an end are in the plan.
    text = data.text
    activity.feeder(
        lambda: feeder.is_idle,
        lambda: data.source.lengths if data.source.total is None else None,
        lambda: None if text is None else text().work,
    )
    observer = _OutputObserver(feeder, monitor) if monitor.wants_samples else None
    collector = Collector(
        feeder,
        ends.incoming(-1),
        Collection(
            data.sink,
            epoch.rank.model.output_kind == "logits",
            make_decoder(plan, -1),
            keep_items=0 if data.compared is None else len(data.compared),
            collected=progress.collected,
            epoch=epoch.number,
        ),
        Lane(LaneId(LaneKind.COLLECT), COLLECT, time.perf_counter, plan.record_rows, observer),
    )
    gives_way = epoch.gives_way("collect")
    return DataFlow(data, progress, stream, feeder, outgoing, collector, link, gives_way)


class _OutputObserver:
    """Turns each microbatch that comes back into a sample of the run's output."""

    def __init__(self, feeder: Feeder, monitor: Monitor) -> None:
        self._feeder = feeder
        self._monitor = monitor
        self._last_at = 0.0

    def __call__(self, row: Row, right: float) -> None:
        # Until the first result the pipeline fills; the time of that one is the time of its way through.
        since = self._last_at or self._feeder.started_at or row.start_s
        self._last_at = row.start_s + row.seconds[0]
        self._monitor.add_samples(output_samples(since, self._last_at, row.items, right))
