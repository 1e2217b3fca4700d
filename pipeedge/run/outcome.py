"""End of a run: the record of each rank, and on the data rank the report.

A run is done when the data rank has written the results under their name. What happens to a rank after
that is a warning, and the report goes without the figures of the ranks that did not tell them.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from pipeedge.base.errors import PeerError, one_line
from pipeedge.base.wording import count, plural
from pipeedge.control.hub_client import HubClient
from pipeedge.observe.metrics import StageStats
from pipeedge.observe.records import Recording
from pipeedge.run.composition import Composition
from pipeedge.run.context import EpochContext, RankContext
from pipeedge.run.decision import RunSession
from pipeedge.run.phases import close_links

if TYPE_CHECKING:  # only the data rank needs it
    from pipeedge.report.run_report import RunReport

__all__ = ["explain_missing_figures", "finish", "make_recording"]


def finish(
    epoch: EpochContext,
    session: RunSession,
    parts: Composition,
    *,
    startup_s: float,
    device: torch.device,
) -> RunReport | None:
    """End the run after the last microbatch: close the links, tell what was recorded, make the report.

    Args:
        epoch: This rank in the last epoch in which it had a part.
        session: Session of the ranks.
        parts: What this rank consisted of.
        startup_s: Seconds from the start of the process to the first microbatch.
        device: Device for the check of the outputs.

    Returns:
        The report on the data rank; None on the others.
    """
    context, plan = epoch.rank, epoch.plan
    member, data = session.member, parts.data
    if data is not None:
        member.complete()
    unclosed = close_links(epoch)
    # On a line of its own: an earlier process of this rank may have left in the middle of one.
    member.record(f"\n{make_recording(epoch, member, parts).to_text()}")
    member.done(parts.stage.stats(context.rank) if parts.stage is not None else None)
    summary = _wait_for_summary(context, session, is_whole=data is not None)
    if unclosed is not None:
        context.warn(f"{one_line(unclosed)}; the results are complete")
    if data is None:
        return None
    if data.progress.collected.not_finite:
        context.warn(_explain_not_finite(data.progress.collected.not_finite))
    stages = [stats for rank in plan.schedule.ranks if (stats := summary.get(rank)) is not None]
    missing = [rank for rank in plan.schedule.ranks if summary.get(rank) is None]
    if missing:
        context.warn(explain_missing_figures(missing))
    # Imported late, because it takes a while, and only the data rank makes a report.
    from pipeedge.run.reporting import make_report, save_and_print

    report = make_report(context, plan, data, stages, member, startup_s)
    # The others have ended: what is computed from now on holds nobody up.
    report = dataclasses.replace(report, check=data.check(context.request, context.model, device))
    save_and_print(context, plan, data, report)
    return report


def _explain_not_finite(items: int) -> str:
    return f"{count(items, 'item')} produced NaN or infinity: check that the weights are complete"


def make_recording(epoch: EpochContext, member: HubClient, parts: Composition) -> Recording:
    """Collect the activities of this rank's threads in an epoch."""
    hub_clock, stage = member.hub_clock, parts.stage
    return Recording(
        rank=epoch.rank.rank,
        host=socket.gethostname(),
        lanes=tuple(lane.record(hub_clock) for part in parts.all for lane in part.lanes),
        links=tuple(part.link.record(hub_clock) for part in parts.all),
        decided=stage.decided(hub_clock) if stage is not None else (),
        energy=parts.monitor.use(),
        replans=tuple(epoch.rank.watched.replans),
        as_run=epoch.rank.watched.as_run,
        epoch=epoch.number,
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


def explain_missing_figures(missing: Sequence[int]) -> str:
    """Return the warning that the report lacks the figures of the ``missing`` ranks."""
    ranks = f"{plural(len(missing), 'rank')} {', '.join(map(str, missing))}"
    figures = f"{plural(len(missing), 'its', 'their')} figures are missing from the table and the report"
    return f"{ranks} left without saying how the run went: the results are complete, but {figures}"
