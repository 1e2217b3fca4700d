"""The phases of a rank's run, each a function from values to values, in the order in which they happen.

    prepare ──> agree ──> connect ──> load_stage ──> open_parts ──> stream ──> close_links
     Prepared    Plan      the group   LoadedStage    Parts, links   results

``run.pipeline`` joins the first two, ``run.rank_epochs`` the others, once for each epoch. ``run.loading`` has
``load_stage``, and ``run.outcome`` what follows.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pipeedge.base.errors import PeerError
from pipeedge.base.wording import printable
from pipeedge.control.forms import GoingOn
from pipeedge.control.hub_client import HubClient
from pipeedge.control.messages import Prepare
from pipeedge.observe.monitoring import KEYS, Exporter, Monitor, check_metrics_dir, metrics_files
from pipeedge.plan.planning import Plan
from pipeedge.run.context import RankContext
from pipeedge.run.decision import Decider, RunSession, find_facts, find_weights
from pipeedge.run.rank_parts import Attempt, Parts, make_parts
from pipeedge.run.stage import resolve_device
from pipeedge.run.stage_part import LoadedStage
from pipeedge.transport.base import Rendezvous
from pipeedge.transport.interfaces import (
    choose_interface,
    interface_addresses,
    link_address,
    use_interface,
)
from pipeedge.transport.place import Place

if TYPE_CHECKING:  # only the data rank needs them
    from pipeedge.data import DataEnds, ResultSink
    from pipeedge.run.data_part import DataPart
    from pipeedge.run.progress import DataProgress

__all__ = [
    "Prepared",
    "agree",
    "close_links",
    "connect",
    "open_parts",
    "prepare",
    "results_kept",
    "stream",
    "tell_plan",
]


_IN_TIME = 0.6
"""Part of ``--timeout`` after which a rank gives up on a single link of a run that goes on after failures."""


@dataclass(frozen=True)
class Prepared:
    """Everything that a rank opens and states before it hears of the others."""

    device: torch.device
    interface: str
    """Network interface of the links."""
    exporter: Exporter | None
    """Server of the metrics, or None."""
    data: DataEnds | None
    """Input and results of the run, on the data rank."""
    facts: dict[str, Any]
    """Options of this rank, for comparison with the others."""
    progress: DataProgress | None = None
    """Progress through the input, on the data rank."""
    place: Place | None = None
    """Place at which this rank listens for others, if they need to find it."""


@contextmanager
def prepare(context: RankContext) -> Iterator[Prepared]:
    """Check and open all that this rank can alone; close it at the end of the run.

    Raises:
        PipeEdgeError: This rank cannot take part. The others are told.
    """
    request = context.request
    with ExitStack() as stack:
        with context.activity.loading("reading its weights", 0):
            weights = context.wait_for_value("read", lambda: _look_at_weights(context))
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
    if context.open_ends is not None:
        return context.open_ends(context.request, context.model)
    from pipeedge.run.data_part import open_data_ends  # only the data rank needs it

    metrics = metrics_files(context.request.metrics.directory, context.rank)
    return open_data_ends(context.request, context.model, metrics)


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
        from pipeedge.run.held_out import HeldOutTrial  # only the data rank needs it

        trial = HeldOutTrial(context.request, context.model, prepared.data.held_out, prepared.device)
    decider = Decider(context, trial, lambda: session.left_out)
    going_on = GoingOn(decider.plan_again, decider.review)
    plan = session.agree(prepared.facts, decider.decide, going_on, prepared.place)
    if session.serves_hub:
        if context.request.schedule.watched and context.request.world.size > 1:
            from pipeedge.run.live_planning import watch_run  # only rank 0 needs the scheduler

            watch_run(context, session, decider)
        context.begins()
    if prepared.data is not None:
        from pipeedge.run.resuming import plan_dependencies  # only the data rank needs it

        prepared.data.sink.add_dependencies(plan_dependencies(plan))
    if context.rank in plan.participants:
        session.member.set_hub_name(plan.name(0) or "without a part in the pipeline")
    return plan


def connect(context: RankContext, plan: Plan, interface: str, order: Prepare) -> None:
    """Join the group of all that have a part in the plan, unless this rank is alone.

    Args:
        context: This rank.
        plan: The plan.
        interface: Network interface of the links.
        order: Message of the hub with the plan, which says where the others listen.

    Raises:
        PeerError: The links do not open.
    """
    if len(plan.participants) < 2:
        if not plan.goes_on:
            context.transports.stop_listening()  # nobody comes
        return
    use_interface(interface)
    world, transport = context.request.world, context.transport
    exposed = transport.exposure(interface_addresses().get(interface, ()))
    if exposed is not None:
        context.warn(exposed)
    # In a run that goes on, a link that does not open is to be named before everybody gives up on it.
    timeout_s = _IN_TIME * world.timeout_s if plan.goes_on else world.timeout_s
    rendezvous = Rendezvous(world.addr, plan.participants, order.places, timeout_s, order.epoch, order.token)
    # Everybody who has the plan connects at once, so who does not answer cannot be reached.
    _wait_for_links(context, plan, interface, lambda: transport.open(rendezvous))


def _wait_for_links(context: RankContext, plan: Plan, interface: str, connect: Callable[[], None]) -> None:
    """Call ``connect``, which waits for other ranks.

    Raises:
        PeerError: The links do not open.
    """
    peers = ", ".join(str(rank) for rank in plan.participants if rank != context.rank)
    with context.activity.busy("connecting to its peers"):
        context.wait_in_thread(
            "connect",
            connect,
            f"the links of rank {context.rank} to {peers} over {interface} do not open: is there a "
            "firewall between them, or another interface to choose with -s?",
        )


def open_parts(
    context: RankContext,
    member: HubClient,
    attempt: Attempt,
    prepared: Prepared,
    stage: LoadedStage | None,
    monitor: Monitor,
) -> Parts:
    """Make the parts of this rank and connect their links.

    Args:
        context: This rank.
        member: Connection to the hub.
        attempt: Plan that this rank takes part in.
        prepared: What this rank has opened.
        stage: Stage of this rank, or None.
        monitor: Takes the samples of the metrics.

    Raises:
        PeerError: The links do not open.
    """
    made: list[Parts] = []
    data, progress = prepared.data, prepared.progress

    def make() -> None:
        made.append(
            make_parts(
                context, member, attempt, stage=stage, data_ends=data, progress=progress, monitor=monitor
            )
        )

    _wait_for_links(context, attempt.plan, prepared.interface, make)
    return made[0]


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


def stream(context: RankContext, plan: Plan, parts: Parts, shown: threading.Event | None = None) -> None:
    """Let microbatches flow until all have passed.

    Args:
        context: This rank.
        plan: The plan; the watcher knows it, unless it is one that follows another without a stop.
        parts: The parts of this rank.
        shown: Set once the progress of the plan before is no longer shown; None without one.

    Raises:
        PipeEdgeError: This rank or another failed.
    """
    parts.ends.start()
    for part in reversed(parts.all):
        part.start(context.crew)
    if shown is not None:
        context.crew.on_stop(shown.set)
        shown.wait()
        tell_plan(plan, None if parts.data is None else parts.data.ends)
    with _progress_shown(context, plan, parts.data):
        context.crew.wait()


def _show_unfinished(context: RankContext, sink: ResultSink) -> None:
    """Print where the rows are that are written already."""
    if sink.unfinished is not None:
        line = f"unfinished  {printable(sink.unfinished)}; a run with --resume goes on from there"
        context.open_console().print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _progress_shown(context: RankContext, plan: Plan, data: DataPart | None) -> Iterator[None]:
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

    sink = data.ends.sink
    progress = Progress(plan.items, plan.schedule.ranks, time.monotonic(), sink.items)
    with (
        Display(
            progress,
            context.open_console,
            lambda: sink.items,
            time.monotonic,
            data.feeder.waited_for_input_s,
        ) as display,
        context.display_feed.to(display),
    ):
        yield


def close_links(context: RankContext) -> PeerError | None:
    """Close the links; all that they had to carry has arrived. Return why it did not work, if so."""
    transport = context.transport
    try:
        if transport.closes_together:
            # The first waits while the last still computes.
            context.wait_in_thread("close", transport.close)
        else:
            with context.activity.busy("closing its links"):
                context.wait_in_thread("close", transport.close, "the links could not be closed")
    except PeerError as error:
        return error
    return None
