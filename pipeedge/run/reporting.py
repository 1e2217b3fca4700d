"""The report of a run, on the data rank: made of what all ranks recorded, saved and printed."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

import pipeedge
from pipeedge.base.errors import PeerFailedError
from pipeedge.base.fields import decoding
from pipeedge.base.files import write_whole
from pipeedge.control.hub_client import HubClient
from pipeedge.data.step_queue import StepQueue
from pipeedge.decoding.pages import pages_of, window_pages_of
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.layers.decoder import PAGE
from pipeedge.observe.assembly import assemble as assemble_timeline
from pipeedge.observe.assembly import series
from pipeedge.observe.metrics import Latency, StageStats, energy_body
from pipeedge.observe.records import Recording
from pipeedge.observe.token_figures import TextResult
from pipeedge.observe.trace import trace_events
from pipeedge.plan.cache_size import stage_cache_bytes
from pipeedge.plan.planning import Plan
from pipeedge.report.run_report import RunReport, print_report, save_report
from pipeedge.request.files import STANDARD_OUTPUT
from pipeedge.run.context import RankContext
from pipeedge.run.data_flow import DataFlow

__all__ = ["make_report", "save_and_print"]

_EARLIER_EPOCHS = 8
"""Largest number of epochs before the last whose activities are in the report."""


def make_report(
    context: RankContext,
    plan: Plan,
    data: DataFlow,
    stages: Sequence[StageStats],
    member: HubClient,
    startup_s: float,
) -> RunReport:
    """Build the report from what the data rank collected and the figures of the stages, as far as known."""
    collected, ledger, sink = data.progress.collected, data.progress.ledger, data.ends.sink
    began_s = member.hub_clock(ledger.began_at or 0.0)
    epochs = collected.finished_epochs()
    last_epoch = epochs[-1].number if epochs else 0
    found = _recordings(member, {one.rank for one in stages}, last_epoch)
    latencies = tuple(collected.latencies)
    return RunReport(
        model=context.model.name,
        schedule=plan.schedule,
        items=sink.items,
        microbatches=ledger.written,
        microbatch_size=plan.microbatch_size,
        startup_s=startup_s,
        elapsed_s=collected.elapsed_s,
        latency=Latency.of(latencies),
        accuracy=collected.accuracy,
        stages=stages,
        skipped=[skipped.reason for skipped in data.ends.source.skipped],
        prediction=plan.prediction,
        steady_items_per_s=collected.steady_items_per_s,
        latencies_s=latencies,
        timeline=assemble_timeline(found.last_epoch, began_s, collected.elapsed_s, found.earlier, epochs),
        series=series([*found.earlier, *found.last_epoch], began_s),
        energy=energy_body({one.rank: (one.host, one.energy) for one in found.latest}, sink.items),
        command=context.request.command,
        versions=_versions(),
        epochs=tuple(epochs),
        text=_text_result(context, plan, data),
        planned_cache_bytes=_planned_cache_bytes(context, plan),
        replans=tuple(replace(one, at_s=one.at_s - began_s) for each in found.latest for one in each.replans),
        as_run=next((each.as_run for each in found.latest if each.as_run is not None), None),
    )


def _text_result(context: RankContext, plan: Plan, data: DataFlow) -> TextResult | None:
    """Return the figures of tokens, if the run generated text."""
    queue, model = data.ends.source, context.model
    if not isinstance(queue, StepQueue) or not isinstance(model, DecoderModel):
        return None
    bounds = plan.step_bounds
    sizes = stage_cache_bytes(model, plan.schedule, bounds)
    return queue.figures.result(bounds.context, sizes, queue.state())


def _planned_cache_bytes(context: RankContext, plan: Plan) -> float:
    """Return the bytes of the pages that the stages keep for the texts of the prediction; 0 without one."""
    model, text = context.model, None if plan.prediction is None else plan.prediction.text
    if text is None or not isinstance(model, DecoderModel):
        return 0.0
    full = pages_of(text.context, PAGE)
    pages = text.streams * full if model.attends_to_all else 0
    windowed = text.streams * min(full, window_pages_of(model.window, PAGE)) if model.window else 0
    bounds = dataclasses.replace(plan.step_bounds, pages=pages, window_pages=windowed)
    return sum(stage_cache_bytes(model, plan.schedule, bounds))


@dataclass(frozen=True)
class _Recordings:
    """Recordings of a run by its ranks."""

    latest: list[Recording]
    """The last recording of each rank, with what it counted in the whole run."""
    last_epoch: list[Recording]
    earlier: list[Recording]
    """Recordings of some epochs before the last."""


def _recordings(member: HubClient, whole: Collection[int], last_epoch: int) -> _Recordings:
    """Return the recordings of the ranks, on the data rank.

    Args:
        member: Connection to the hub, through which they came.
        whole: Ranks of the stages whose figures are known; another one may have left in the middle of its
            recording.
        last_epoch: Number of the last epoch, or 0 for a run that has none.
    """
    latest, found = {}, {}
    for rank, text in member.records().items():
        lines = [line for line in text.splitlines() if line]
        for line in lines:
            try:
                with decoding(f"what rank {rank} recorded of the run", peer=rank):
                    latest[rank] = Recording.from_text(rank, line)
                    found[rank, latest[rank].epoch] = latest[rank]
            except PeerFailedError:
                if rank in whole and line is lines[-1]:
                    raise
    shown = sorted({epoch for _, epoch in found if epoch < last_epoch})[-_EARLIER_EPOCHS:]
    return _Recordings(
        list(latest.values()),
        [one for (_, epoch), one in found.items() if epoch >= last_epoch],
        [one for (_, epoch), one in found.items() if epoch in shown],
    )


def save_and_print(context: RankContext, plan: Plan, data: DataFlow, report: RunReport) -> None:
    """Write report and trace where they were asked for, and print the table unless the run is to be quiet."""
    output = context.request.output
    if output.report is not None:
        save_report(report, output.report)
    if output.trace is not None and report.timeline is not None:
        events = trace_events(report.timeline, plan.schedule, plan.data_rank, report.epochs)
        write_whole(output.trace, json.dumps(events, separators=(",", ":")), "--trace")
    if not output.quiet:
        print_report(
            report,
            context.program.open_console(),
            results=None if output.results == STANDARD_OUTPUT else output.results,
            saved=output.report,
            trace=output.trace,
            replaced=data.ends.replaced,
        )


def _versions() -> dict[str, str]:
    return {
        "pipeedge": pipeedge.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }
