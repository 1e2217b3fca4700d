"""One rank of a run, from request to report.

    every rank        hello ──> facts ──┐                 ┌─> links, shard ─> ready ─┐
    rank 0 (hub)          all there, all agree? ─> plan ──┘                      run ┴─> work ─> done
    data rank                                                       results written, summary ─> report

Rank 0 decides the schedule and announces it; nobody else needs its files. A rank without a stage leaves as
soon as it knows that, unless the run goes on after a loss: then it waits for another plan. From the plan on,
a run is a sequence of epochs (``run.rank_epochs``); one that does not go on has one. Between ``ready`` and
``done``, a rank consists of these threads, each a [ ], and of what they wait for:

    data rank   pictures ──> [read] ──> [feed] ──> link 0 ──> stage 0            [display]
                                        or its [compute], if stage 0 is here
                results <── [collect] <── last link <── last stage
    stage       link n ──> [compute] ──> link n + 1        [watch] times the link, on the data rank too
                  └──> [receipts], where the bits of the link or a prediction are to be measured
    every rank  [member] hears the hub: a failure anywhere stops the crew of these threads
                [epoch n] waits for the crew; the main thread, for the next epoch or the end
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeedge.base.crew import Crew, Threads
from pipeedge.control.admission import Terms
from pipeedge.control.hub_client import Callbacks
from pipeedge.control.session import Session, report_early_failure
from pipeedge.models.decoder import find_runnable
from pipeedge.plan.model_limits import fitting_request
from pipeedge.plan.schedule_choice import check_schedule
from pipeedge.request.config import RunRequest
from pipeedge.run.context import (
    OpenEnds,
    Program,
    RankContext,
    Transports,
    WaitingShown,
    aborted_on_failure,
)
from pipeedge.run.decision import FORMS, RunSession
from pipeedge.run.phases import agree, prepare
from pipeedge.run.rank_epochs import take_turns
from pipeedge.transport.choice import make_endpoint
from pipeedge.transport.interfaces import is_loopback
from pipeedge.transport.membership import load_membership, open_to_all

if TYPE_CHECKING:  # only the data rank needs them
    from rich.console import Console

    from pipeedge.report.run_report import RunReport

__all__ = ["run"]


def run(
    request: RunRequest,
    open_console: Callable[[], Console],
    warn: Callable[[str], None],
    open_ends: OpenEnds | None = None,
    begins: Callable[[], None] = lambda: None,
    threads: Threads | None = None,
) -> RunReport | None:
    """Take part in a run. Returns the report on the data rank, None on the others.

    Args:
        request: What to do.
        open_console: Opens the console where the data rank prints its table.
        warn: Called with a line for the user that ends nothing; from any thread.
        open_ends: Opens input and results on the data rank, if they are not the files of the request.
        begins: Called on rank 0 once there is a plan, so that from then on a rank may be lost.
        threads: Starts the threads that do the work, for a caller that waits until none is left.

    Raises:
        PipeEdgeError: The run failed; the message is one line for the user.
    """
    membership = load_membership(request.world.keys)
    with report_early_failure(request.world, membership):
        model = find_runnable(request.model.name)
        request = fitting_request(request, model)
        check_schedule(request, model)
    world = request.world
    if membership is None and _speaks_openly(request):
        warn(open_to_all())
    transports = Transports(make_endpoint(request.transport, world.rank, world.addr, membership))
    program = Program(open_console, warn, open_ends, begins, threads or Threads())
    context = RankContext(request, model, program, transports, Crew(program.threads))
    callbacks = Callbacks(
        status=context.activity.status,
        notify=warn,
        show_waiting=WaitingShown(warn, every_change=sys.stderr.isatty()),
        record_stage_work=context.display_feed,
    )
    with (
        aborted_on_failure(transports),
        Session(world, FORMS, callbacks, terms=_terms(request), membership=membership) as session,
    ):
        session.open()
        return _take_part(context, session)


def _speaks_openly(request: RunRequest) -> bool:
    """Return whether rank 0 should warn of a run without a key: if its network can be read by others."""
    # With -c rpc, every rank has something worse to warn of.
    world = request.world
    can_be_read = request.transport.comm != "rpc" and world.size > 1 and not is_loopback(world.addr)
    return can_be_read and world.rank == 0


def _terms(request: RunRequest) -> Terms:
    """Return how the ranks of a run come together; one that goes on after failures needs two of them."""
    goes_on = request.transport.goes_on
    required = frozenset({0, request.schedule.data_rank}) if goes_on else None
    # A rank that was refused for its key is not one that may be absent, unless the user says so.
    ends_if_refused = request.transport.on_failure != "continue"
    appear_s = request.world.timeout_s
    return Terms(appear_s, required=required, joins_later=goes_on, ends_if_refused=ends_if_refused)


def _take_part(context: RankContext, session: RunSession) -> RunReport | None:
    """Go through the phases of a run, once the rank has introduced itself."""
    member, crew = session.member, context.crew
    member.on_end(lambda: crew.stop(member.error))
    with prepare(context) as prepared:
        plan = agree(context, session, prepared)
        if context.rank not in plan.participants and not plan.goes_on:
            context.say_waiting("the schedule gives it no stage, so it has nothing to do")
            if not session.serves_hub:
                return None
        return take_turns(context, session, prepared)
