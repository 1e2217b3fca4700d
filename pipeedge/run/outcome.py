"""What is left of a run: the record of each rank, and on the data rank the report.

A run is done when the data rank has written the results under their name. What happens to a rank after
that is a warning; without the figures of every stage there is no report, and only if one was asked for,
the data rank fails.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import socket
from collections.abc import Mapping, Sequence

import numpy as np
import torch

import pipeedge
from pipeedge.base.errors import PeerError, PeerFailedError, one_line
from pipeedge.base.fields import decoding
from pipeedge.base.files import write_whole
from pipeedge.base.wording import count, plural
from pipeedge.control.member import Member
from pipeedge.observe.assembly import assemble as assemble_timeline
from pipeedge.observe.assembly import series
from pipeedge.observe.metrics import Latency, StageStats, energy_body
from pipeedge.observe.records import Recording
from pipeedge.observe.trace import trace_events
from pipeedge.plan.planning import Plan
from pipeedge.report.run_report import RunReport, print_report, save_report
from pipeedge.request.files import OutputRequest
from pipeedge.run.context import RankContext
from pipeedge.run.data_part import DataPart
from pipeedge.run.decision import RunSession
from pipeedge.run.parts import Parts
from pipeedge.run.phases import close_links

__all__ = ["explain_missing_report", "finish"]


def finish(
    context: RankContext,
    session: RunSession,
    plan: Plan,
    parts: Parts,
    *,
    startup_s: float,
    device: torch.device,
) -> RunReport | None:
    """End the run after the last microbatch: close the links, tell what was recorded, make the report.

    Args:
        context: This rank.
        session: Session of the ranks.
        plan: Plan of the run.
        parts: What this rank consisted of.
        startup_s: Seconds from the start of the process to the first microbatch.
        device: Device for the check of the outputs.

    Returns:
        The report on the data rank; None on the others, or without the figures of a stage.

    Raises:
        PeerFailedError: There are no figures for a report that was asked for.
    """
    member, data = session.member, parts.data
    if data is not None:
        member.complete()
    unclosed = close_links(context)
    member.record(_recording(context.rank, member, parts).to_text())
    member.done(parts.stage.stats(context.rank) if parts.stage is not None else None)
    summary = _wait_for_summary(context, session, is_whole=data is not None)
    if unclosed is not None:
        context.warn(f"{one_line(unclosed)}; the results are complete")
    if data is None:
        return None
    if data.collector.not_finite:
        context.warn(_explain_not_finite(data.collector.not_finite))
    stages = [stats for rank in plan.schedule.ranks if (stats := summary.get(rank)) is not None]
    missing = [rank for rank in plan.schedule.ranks if summary.get(rank) is None]
    if missing:
        context.warn(explain_missing_report(context.request.output, missing))
        return None
    report = _make_report(context, plan, data, stages, member, startup_s)
    if context.request.output.check_items:
        # The others have ended: what is computed from now on holds nobody up.
        report = dataclasses.replace(report, check=data.check(context.request, context.model, device))
    _save_and_print(context, plan, data, report)
    return report


def _explain_not_finite(items: int) -> str:
    outputs = f"{count(items, 'item')} {plural(items, 'has', 'have')} outputs that are no numbers"
    return f"{outputs}: are the weights whole?"


def _recording(rank: int, member: Member, parts: Parts) -> Recording:
    """Collect the activities of this rank's threads."""
    hub_clock, stage = member.hub_clock, parts.stage
    return Recording(
        rank=rank,
        host=socket.gethostname(),
        lanes=tuple(lane.record(hub_clock) for part in parts.all for lane in part.lanes),
        links=tuple(part.link.record(hub_clock) for part in parts.all),
        clock_error_s=hub_clock.error_s,
        decided=stage.decided(hub_clock) if stage is not None else (),
        energy=parts.monitor.use(),
    )


def _wait_for_summary(
    context: RankContext, session: RunSession, *, is_whole: bool
) -> Mapping[int, StageStats | None]:
    """Wait for the figures of every stage; return what is known of them.

    Args:
        context: This rank.
        session: Session of the ranks.
        is_whole: Whether this rank has written the results.
    """
    try:
        return session.summary()
    except PeerError as error:
        if not is_whole and not session.member.results_complete:
            raise
        context.warn(f"{one_line(error)}; the results are complete")
        return {}


def explain_missing_report(output: OutputRequest, missing: Sequence[int]) -> str:
    """Return the warning that there is no report because of the ``missing`` ranks.

    Raises:
        PeerFailedError: A report was asked for.
    """
    ranks = f"{plural(len(missing), 'rank')} {', '.join(map(str, missing))}"
    why = f"{ranks} left without saying how the run went: the results are complete"
    asked = [
        option
        for option, value in (
            ("--report", output.report),
            ("--trace", output.trace),
            ("--check", output.check_items),
        )
        if value
    ]
    if asked:
        raise PeerFailedError(f"{why}, but there is nothing for {' and '.join(asked)}; run again for that")
    return f"{why}, without a table"


def _make_report(
    context: RankContext,
    plan: Plan,
    data: DataPart,
    stages: Sequence[StageStats],
    member: Member,
    startup_s: float,
) -> RunReport:
    """Build the report from what the data rank collected and the figures of the stages."""
    collector, writer = data.collector, data.files.writer
    began_s = member.hub_clock(data.feeder.started_at or 0.0)
    recordings = _recordings(member)
    return RunReport(
        model=context.model.name,
        schedule=plan.schedule,
        items=writer.items,
        microbatches=len(collector.latencies),
        microbatch_size=plan.microbatch_size,
        startup_s=startup_s,
        elapsed_s=collector.elapsed_s,
        latency=Latency.of(collector.latencies),
        accuracy=collector.accuracy,
        stages=stages,
        skipped=[skipped.reason for skipped in data.files.source.skipped],
        prediction=plan.prediction,
        steady_items_per_s=collector.steady_items_per_s,
        latencies_s=collector.latencies,
        timeline=assemble_timeline(recordings, began_s, collector.elapsed_s),
        series=series(recordings, began_s),
        energy=energy_body({one.rank: (one.host, one.energy) for one in recordings}, writer.items),
        command=context.request.command,
        versions=_versions(),
    )


def _recordings(member: Member) -> list[Recording]:
    """Return the recordings of all ranks, on the data rank."""
    found = []
    for rank, text in member.records().items():
        with decoding(f"what rank {rank} recorded of the run", peer=rank):
            found.append(Recording.from_text(rank, text))
    return found


def _save_and_print(context: RankContext, plan: Plan, data: DataPart, report: RunReport) -> None:
    output = context.request.output
    if output.report is not None:
        save_report(report, output.report)
    if output.trace is not None and report.timeline is not None:
        events = trace_events(report.timeline, plan.schedule, plan.data_rank)
        write_whole(output.trace, json.dumps(events, separators=(",", ":")), "--trace")
    if not output.quiet:
        print_report(
            report,
            context.console,
            results=output.results,
            saved=output.report,
            trace=output.trace,
            replaced=data.files.replaced,
        )


def _versions() -> dict[str, str]:
    return {
        "pipeedge": pipeedge.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }
