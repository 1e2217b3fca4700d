"""Run one worker of a training, from request to report.

    every worker   hello ──> facts ──┐                          ┌─> stages ─> ready ─┐
    worker 0       all there, all agree? ─> layers' costs ─> partition              start ─> batches ─> done
    worker 0                                                                                 summary ─> report

What goes wrong, and who hears of it, is as in an inference run (``pipeedge.control``). The batches run in a
thread of their own, so that a worker that waits for gloo can still be told that another has died.
"""

from __future__ import annotations

import functools
import json
import platform
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import psutil
import torch
from rich.console import Console

import pipeedge
from pipeedge.base.crew import Crew
from pipeedge.base.errors import PeerFailedError, one_line
from pipeedge.base.fields import Options, decoding, reader
from pipeedge.base.files import write_whole
from pipeedge.base.machine import peak_rss_mb
from pipeedge.control.announcement import Announcement
from pipeedge.control.forms import Forms, Refusal
from pipeedge.control.hub_client import Callbacks, HubClient
from pipeedge.control.messages import Prepare
from pipeedge.control.session import Session, report_early_failure
from pipeedge.observe.records import Recording
from pipeedge.observe.timeline import LaneId
from pipeedge.observe.trace import timeline_events
from pipeedge.report.run_report import save_body
from pipeedge.request.config import WorldRequest
from pipeedge.train.batches import BatchLoop, WorkerLog
from pipeedge.train.dividing import (
    TrainingPlan,
    divide_layers,
    find_disagreement,
    read_plan,
    training_facts,
    worker_name,
)
from pipeedge.train.networks import find_network
from pipeedge.train.orders import bubble
from pipeedge.train.preparing import TrainingSetup, order_of, prepare_training
from pipeedge.train.recording import WorkerRecord
from pipeedge.train.report import TrainingReport, print_report
from pipeedge.train.request import TrainingRequest
from pipeedge.transport.base import STORE_RANK, Rendezvous
from pipeedge.transport.interfaces import choose_interface, is_loopback, use_interface
from pipeedge.transport.membership import Membership, load_membership
from pipeedge.transport.place import Place
from pipeedge.transport.rendezvous import StoreServer, connect_store, join_group

__all__ = ["describe_openness", "show", "train"]

_LINKS_OPEN = (
    "--key protects the control connection alone: activations, gradients and weights cross the network in "
    "clear, because gloo cannot encrypt; train in a network that you trust, or through a VPN"
)
_OPEN = (
    "links and control are open: whoever is on the network can take part, read and change what is sent; "
    "--key closes the control connection alone, so train in a network that you trust, or through a VPN"
)

_TrainingSession: TypeAlias = Session[Options, TrainingPlan, None]


def show(request: TrainingRequest, console: Console) -> None:
    """Print which worker would have which layers (``--dry-run``).

    Raises:
        PipeEdgeError: As ``train`` would, as far as one process can see it.
    """
    network = find_network(request.model, seed=request.seed, pretrained=request.pretrained)
    order = order_of(request)
    for stage, layers in enumerate(divide_layers(request, network, order)):
        console.print(f"stage {stage}: {layers.named} on worker {order.placement[stage]}", highlight=False)
    console.print(f"bubble in theory: {bubble(order):.1%}", highlight=False)


def train(request: TrainingRequest, console: Console, warn: Callable[[str], None]) -> TrainingReport | None:
    """Take part in a training. Returns the report on worker 0, None on the others.

    Args:
        request: What to do.
        console: Console where losses and the table are printed.
        warn: Called with a line for the user that ends nothing; from any thread.

    Raises:
        PipeEdgeError: The training failed; the message is one line for the user.
    """
    membership = load_membership(request.world.keys)
    with report_early_failure(request.world, membership):
        setup = prepare_training(request)
    if request.world.rank == 0 and request.world.size > 1 and not is_loopback(request.world.addr):
        warn(describe_openness(membership))
    log = WorkerLog()
    callbacks = Callbacks(status=log.activity.status, notify=warn)
    with Session(request.world, _forms(setup), callbacks, membership=membership) as session:
        session.open()
        store = StoreServer(request.world.addr)
        plan = _agree(setup, session, log, store.listen() if request.world.rank == STORE_RANK else None)
        order = session.prepare()
        crew, member = Crew(), session.member
        member.set_hub_name(worker_name(setup.order, 0, plan.layers))
        member.on_end(lambda: crew.stop(member.error))
        with log.activity.busy("making its stages"):
            _connect(request.world, order)
            store.close()  # all have met
            loop = BatchLoop(setup, plan.layers, log, console, warn)
        session.start(order)
        startup_s = time.time() - psutil.Process().create_time()
        crew.start("train", loop.run)
        crew.wait()
        member.record(_record(setup, log, member).to_text())
        session.finish(None)
        if not session.serves_hub:
            return None
        report = _make_report(setup, plan, _records(member), startup_s)
        _save_and_print(setup, report, console)
        return report


def describe_openness(membership: Membership | None) -> str:
    """Return the warning about what is open in a training on a network, with a key or without one."""
    return _OPEN if membership is None else _LINKS_OPEN


def _forms(setup: TrainingSetup) -> Forms[Options, TrainingPlan, None]:
    """Return the form of the facts, an open list of options to compare, and of the plan."""
    return Forms(facts=reader(Options), plan=functools.partial(read_plan, setup), stats=reader(None))


def _agree(
    setup: TrainingSetup, session: _TrainingSession, log: WorkerLog, place: Place | None
) -> TrainingPlan:
    """Compare the facts of all workers; return worker 0's plan.

    Args:
        setup: The training.
        session: Session of the workers.
        log: Log of this worker.
        place: Place of the store through which the workers connect, on worker 0.
    """

    def decide(
        facts: Mapping[int, Mapping[str, Any]],
    ) -> Announcement[TrainingPlan] | Refusal:
        mismatch = find_disagreement(facts)
        if mismatch is not None:
            return Refusal(mismatch)
        with log.activity.busy("measuring layers"):
            layers = divide_layers(setup.request, setup.network, setup.order)
        workers = tuple(range(setup.order.workers))
        return Announcement(
            TrainingPlan(layers),
            participants=workers,
            names={worker: worker_name(setup.order, worker, layers) for worker in workers},
            data_rank=0,
        )

    return session.agree(training_facts(setup), decide, place=place)


def _connect(world: WorldRequest, order: Prepare) -> None:
    """Join torch's default group, over which ``torch.distributed.pipelining`` sends."""
    use_interface(choose_interface(world.socket_ifname, world.addr, world.port))
    workers = tuple(range(world.size))
    rendezvous = Rendezvous(world.addr, workers, order.places, world.timeout_s)
    store = connect_store(world.addr, rendezvous.store_port, timeout_s=world.timeout_s)
    try:
        join_group(store, index=world.rank, size=world.size)
    except (RuntimeError, ValueError) as error:
        raise PeerFailedError(
            f"the links of rank {world.rank} could not be opened: {one_line(error)}"
        ) from error


def _record(setup: TrainingSetup, log: WorkerLog, member: HubClient) -> WorkerRecord:
    """Return the record of this worker."""
    works = (log.lane.record(LaneId.stage(*setup.order.stages_of(setup.rank)), member.hub_clock),)
    recording = Recording(setup.rank, socket.gethostname(), works=works)
    log.note(peak_rss_mb=peak_rss_mb())
    return WorkerRecord(recording, log.results_at(member.hub_clock), log.figures)


def _records(member: HubClient) -> dict[int, WorkerRecord]:
    """Return the records of all workers, on worker 0."""
    found = {}
    for rank, text in member.records().items():
        with decoding(f"what rank {rank} recorded", peer=rank):
            found[rank] = WorkerRecord.from_text(rank, text)
    return found


def _make_report(
    setup: TrainingSetup, plan: TrainingPlan, records: Mapping[int, WorkerRecord], startup_s: float
) -> TrainingReport:
    request = setup.request
    return TrainingReport(
        model=request.model,
        schedule=request.pipeline.schedule,
        layers=plan.layers,
        placement=setup.order.placement,
        batch_size=request.batch_size,
        microbatch_size=request.microbatch_size,
        threads=request.pipeline.threads,
        bubble_in_theory=bubble(setup.order),
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


def _save_and_print(setup: TrainingSetup, report: TrainingReport, console: Console) -> None:
    request = setup.request
    if request.report is not None:
        save_body(report.to_body(), request.report)
    if request.trace is not None:
        names = {rank: worker_name(setup.order, rank, report.layers) for rank in range(setup.order.workers)}
        events = timeline_events(report.timeline, names)
        write_whole(request.trace, json.dumps(events, separators=(",", ":")), "--trace")
    print_report(report, console, request.report, setup.replaced)
