"""The phases of a rank's run, each a function from values to values, in the order in which they happen.

    prepare ──> agree ──> connect ──> load_stage ──> compose ──> stream ──> close_links
     Prepared    Plan      the group   LoadedStage    Composition    results

``run.pipeline`` joins the first two, ``run.rank_epochs`` the others, once for each epoch. ``run.loading`` has
``load_stage``, ``run.composition`` has ``compose``, and ``run.outcome`` what follows.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from pipeedge.base.errors import PeerError
from pipeedge.base.wording import printable
from pipeedge.control.forms import GoingOn
from pipeedge.models.decoder import DecoderModel
from pipeedge.observe.monitoring import KEYS, Exporter, check_metrics_dir, metrics_files
from pipeedge.plan.planning import Plan
from pipeedge.run.composition import Composition
from pipeedge.run.context import EpochContext, Prepared, RankContext
from pipeedge.run.decision import Decider, RunSession, find_facts, find_weights
from pipeedge.run.stage import resolve_device
from pipeedge.transport.base import Rendezvous
from pipeedge.transport.interfaces import (
    choose_interface,
    interface_addresses,
    link_address,
    use_interface,
)

if TYPE_CHECKING:  # only the data rank needs them
    from pipeedge.data import DataEnds, ResultSink
    from pipeedge.run.data_flow import DataFlow

__all__ = [
    "agree",
    "close_links",
    "connect",
    "prepare",
    "results_kept",
    "stream",
    "tell_plan",
]


_IN_TIME = 0.6
"""Part of ``--timeout`` after which a rank gives up on a single link of a run that goes on after failures."""


@contextmanager
def prepare(context: RankContext) -> Iterator[Prepared]:
    """Check and open all that this rank can alone; close it at the end of the run.

    Raises:
        PipeEdgeError: This rank cannot take part. The others are told.
    """
    request = context.request
    with ExitStack() as stack:
        with context.activity.loading("reading its weights", 0):
            weights = context.wait_in_thread(context.crew, "read", lambda: _look_at_weights(context))
        device = resolve_device(request.model.device)
        interface = choose_interface(request.world.socket_ifname, request.world.addr, request.world.port)
        place = None
        if request.world.size > 1:
            stack.callback(context.transports.stop_listening)
            address = link_address(interface, request.world.addr, request.world.port)
            place = context.transports.listen(address)
        exporter = _open_exporter(context, interface)
        if exporter is not None:
            stack.callback(exporter.close)
        data = progress = None
        if context.rank == request.schedule.data_rank:
            from pipeedge.run.progress import DataProgress

            with context.activity.loading("reading its input", None):
                data, progress = _open_ends(context), DataProgress()
            for note in data.notes:
                context.warn(note)
        facts = find_facts(context, weights, data)
        prepared = Prepared(device, interface, exporter, data, facts, progress, place)
        to_close = stack.pop_all()
    with to_close:
        yield prepared


def _look_at_weights(context: RankContext) -> str | None:
    """Check that the sizes of the weights fit the model; return their fingerprint, or None without any."""
    context.model.check_sizes(context.request.model.weights)
    return find_weights(context)


def _open_ends(context: RankContext) -> DataEnds:
    """Open input and results of the run, on the data rank."""
    open_ends, model = context.program.open_ends, context.model
    if open_ends is not None:
        return open_ends(context.request, model)
    metrics = metrics_files(context.request.metrics.directory, context.rank)
    if isinstance(model, DecoderModel):
        from pipeedge.run.text_ends import open_text_ends  # only the data rank needs it

        return open_text_ends(context.request, model, metrics)
    from pipeedge.run.data_flow import open_data_ends

    return open_data_ends(context.request, model, metrics)


def _open_exporter(context: RankContext, interface: str) -> Exporter | None:
    """Refuse places for metrics that cannot take them; open the port for them, if one was asked for."""
    metrics = context.request.metrics
    if metrics.directory is not None:
        check_metrics_dir(metrics.directory, metrics.csv_file_mode, context.rank, KEYS)
    if metrics.prometheus_port is None:
        return None
    return Exporter(interface_addresses()[interface][0], metrics.prometheus_port, context.rank)


def agree(context: RankContext, session: RunSession, prepared: Prepared) -> Plan:
    """Tell rank 0 the facts of this rank, and return the plan that it makes of all of them.

    Raises:
        PipeEdgeError: There is no plan; the same line on every rank. Or the rows that an earlier run has left
            are of another plan.
    """
    trial = None
    if prepared.data is not None and prepared.data.held_out is not None:
        from pipeedge.run.held_out import held_out_trial  # only the data rank needs it

        trial = held_out_trial(context.request, context.encoder, prepared.data.held_out, prepared.device)
    decider = Decider(context, trial, lambda: session.left_out)
    going_on = GoingOn(decider.plan_again, decider.review)
    plan = session.agree(prepared.facts, decider.decide, going_on, prepared.place)
    if session.serves_hub:
        if context.request.schedule.watched and context.request.world.size > 1:
            from pipeedge.run.live_planning import watch_run  # only rank 0 needs the scheduler

            watch_run(context, session, decider, None if prepared.data is None else prepared.data.watcher)
        context.program.begins()
    if prepared.data is not None:
        from pipeedge.run.resuming import plan_dependencies  # only the data rank needs it

        prepared.data.sink.add_dependencies(plan_dependencies(plan))
    if context.rank in plan.participants:
        session.member.set_hub_name(plan.name(0) or "without a part in the pipeline")
    return plan


def connect(epoch: EpochContext, interface: str) -> None:
    """Join the group of all that have a part in the plan, unless this rank is alone.

    Args:
        epoch: This rank in the epoch.
        interface: Network interface of the links.

    Raises:
        PeerError: The links do not open.
    """
    plan, transport = epoch.plan, epoch.transport
    if len(plan.participants) < 2:
        if not plan.goes_on:
            epoch.rank.transports.stop_listening()  # nobody comes
        return
    use_interface(interface)
    world = epoch.rank.request.world
    exposed = transport.exposure(interface_addresses().get(interface, ()))
    if exposed is not None:
        epoch.rank.warn(exposed)
    # In a run that goes on, a link that does not open is to be named before everybody gives up on it.
    timeout_s = _IN_TIME * world.timeout_s if plan.goes_on else world.timeout_s
    order = epoch.order
    rendezvous = Rendezvous(world.addr, plan.participants, order.places, timeout_s, order.epoch, order.token)
    # Everybody who has the plan connects at once, so who does not answer cannot be reached.
    epoch.wait_for_links(interface, lambda: transport.open(rendezvous))


@contextmanager
def results_kept(context: RankContext, data: DataEnds | None) -> Iterator[None]:
    """Take the results in the body, on the data rank, and write them under their name at its end."""
    if data is None:
        yield
        return
    try:
        with data.sink:
            yield
    except BaseException:
        if not context.request.output.quiet:
            _show_unfinished(context, data.sink)
        raise


def tell_plan(plan: Plan, data: DataEnds | None) -> None:
    """Tell the watcher, if there is one, of the plan; before anybody can ask it, if that is the first."""
    if data is not None and data.watcher is not None:
        data.watcher.planned(plan.schedule)


def stream(epoch: EpochContext, parts: Composition, shown: threading.Event | None = None) -> None:
    """Let microbatches flow until all have passed.

    Args:
        epoch: This rank in the epoch, whose plan is known to those who show the pipeline, unless it follows
            another one without a stop.
        parts: The parts of this rank.
        shown: Set once the progress of the plan before is no longer shown; None without one.

    Raises:
        PipeEdgeError: This rank or another failed.
    """
    crew = epoch.crew
    parts.ends.start()
    for part in reversed(parts.all):
        part.start(crew)
    if shown is not None:
        crew.on_stop(shown.set)
        shown.wait()
        tell_plan(epoch.plan, None if parts.data is None else parts.data.ends)
    with _progress_shown(epoch.rank, epoch.plan, parts.data):
        crew.wait()


def _show_unfinished(context: RankContext, sink: ResultSink) -> None:
    """Print where the rows are that are written already."""
    if sink.unfinished is not None:
        line = f"unfinished  {printable(sink.unfinished)}; a run with --resume goes on from there"
        context.program.open_console().print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _progress_shown(context: RankContext, plan: Plan, data: DataFlow | None) -> Iterator[None]:
    """Show the progress of the run, on the data rank, unless it is to be quiet; without an end, its work."""
    if data is not None and data.ends.watcher is not None:
        with context.display_feed.to(data.ends.watcher):
            yield
        return
    request = context.request
    lines_show_it = request.prints_results and sys.stdout.isatty()
    if data is None or plan.items is None or request.output.quiet or lines_show_it:
        yield
        return
    from pipeedge.observe.live import Display, Progress

    sink, text = data.ends.sink, data.ends.text
    tokens = None if text is None else lambda: text().completion_tokens
    began_s, counts = time.monotonic(), "items" if tokens is None else "tokens"
    before = sink.items if tokens is None else tokens()
    progress = Progress(plan.items, plan.schedule.ranks, began_s, before, counts=counts)
    with (
        Display(
            progress,
            context.program.open_console,
            lambda: sink.items,
            time.monotonic,
            data.feeder.waited_for_input_s,
            tokens,
        ) as display,
        context.display_feed.to(display),
    ):
        yield


def close_links(epoch: EpochContext) -> PeerError | None:
    """Close the links; all that they had to carry has arrived. Return why it did not work, if so."""
    rank, transport = epoch.rank, epoch.transport
    # Not with the crew of the epoch, which may have been stopped.
    try:
        if transport.closes_together:
            # The first waits while the last still computes.
            rank.wait_in_thread(rank.crew, "close", transport.close)
        else:
            with rank.activity.busy("closing its links"):
                rank.wait_in_thread(rank.crew, "close", transport.close, "the links could not be closed")
    except PeerError as error:
        return error
    return None
