"""One rank of a run, from request to report.

    every rank        hello ──> facts ──┐                 ┌─> links, shard ─> ready ─┐
    rank 0 (hub)          all there, all agree? ─> plan ──┘                    start ┴─> run ─> done
    data rank                                                       results written, summary ─> report

Rank 0 decides the schedule and announces it; nobody else needs its files. A rank without a stage leaves as
soon as it knows that. Every phase is a function in ``run.phases`` or ``run.outcome``; between ``start`` and
``done`` a rank consists of these threads, each a [ ], and of what they wait for:

    data rank   pictures ──> [read] ──> [feed] ──> link 0 ──> stage 0            [display]
                results <── [collect] <── last link <── last stage
    stage       link n ──> [compute] ──> link n + 1        [watch] times the link, on the data rank too
                  └──> [receipts], where the bits of the link or a prediction are to be measured
    every rank  [member] hears the hub: a failure anywhere stops the crew of these threads
                main thread: waits for the crew
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import psutil
from rich.console import Console

from pipeedge.base.wording import figure
from pipeedge.control.member import Callbacks
from pipeedge.control.session import Session, report_early_failure
from pipeedge.data import open_run_input
from pipeedge.models import Model, find_model
from pipeedge.plan.schedule_choice import plan_schedule
from pipeedge.report.run_report import RunReport
from pipeedge.request.config import RunRequest
from pipeedge.run.context import RankContext, aborted_on_failure
from pipeedge.run.decision import FORMS, RunSession
from pipeedge.run.outcome import finish
from pipeedge.run.phases import agree, connect, leave, load_stage, open_parts, prepare, stream
from pipeedge.transport.choice import make_rendezvous, make_transport

__all__ = ["run", "show_schedule"]


def show_schedule(request: RunRequest, console: Console) -> None:
    """Print the schedule that would run (``--dry-run``), starting nothing.

    Raises:
        PipeEdgeError: as ``run`` would, as far as this rank can see it alone.
    """
    model = find_model(request.model.name)
    model.check_sizes(request.model.weights)
    arrays = any(path.suffix.lower() == ".npz" for path in request.input.paths)
    planned = plan_schedule(request, model, _tokens_here(request, model), eight_bit=not arrays)
    for line in planned.schedule.lines():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    predicted = None if planned.prediction is None else planned.prediction.throughput_items_per_s
    if planned.prediction is not None and predicted is not None:
        console.print(f"predicted throughput: {figure(predicted)} items/s", highlight=False)
        console.print(f"predicted bottleneck: {planned.prediction.bottleneck}", highlight=False)
    for note in planned.notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def _tokens_here(request: RunRequest, model: Model) -> int | None:
    """Tokens of the longest sentence, where this rank has the input and its length counts."""
    counts = request.schedule.automatic and model.takes_text
    if not counts or request.world.rank != request.schedule.data_rank:
        return None
    return open_run_input(request, model).max_tokens


def run(request: RunRequest, console: Console, warn: Callable[[str], None]) -> RunReport | None:
    """Take part in a run. Returns the report on the data rank, None on the others.

    Args:
        request: What to do.
        console: Console where the data rank prints its table.
        warn: Called with a line for the user that ends nothing; from any thread.

    Raises:
        PipeEdgeError: The run failed; the message is one line for the user.
    """
    with report_early_failure(request.world):
        model = find_model(request.model.name)
        if request.schedule.partition is not None:
            plan_schedule(request, model)  # every rank has -pt, so each answers before it waits for others
    transport = make_transport(request.transport, request.world.rank)
    rendezvous = make_rendezvous(request.transport, request.world.addr)
    context = RankContext(request, model, console, warn, transport, rendezvous)
    callbacks = Callbacks(
        status=context.activity.status,
        notify=warn,
        show_waiting=warn if sys.stderr.isatty() else lambda line: None,
        record_stage_work=context.display_feed,
    )
    with aborted_on_failure(transport), Session(request.world, FORMS, callbacks) as session:
        session.open()
        return _take_part(context, session)


def _take_part(context: RankContext, session: RunSession) -> RunReport | None:
    """Go through the phases of a run, once the rank has introduced itself."""
    with prepare(context) as prepared:
        plan = agree(context, session, prepared)
        if context.rank not in plan.participants:
            leave(context, session)
            return None
        connect(context, plan, prepared.interface)
        stage = load_stage(context, plan, prepared.device)
        parts = open_parts(context, plan, session.member, prepared, stage)
        session.start()
        startup_s = time.time() - psutil.Process().create_time()
        stream(context, plan, parts)
        return finish(context, session, plan, parts, startup_s=startup_s, device=prepared.device)
