"""The composition root: one rank of a run, from request to report.

    every rank        hello ──> facts ──┐                 ┌─> shard, links ─> ready ─┐
    rank 0 (hub)          all there, all agree? ─> plan ──┘                    start ┴─> run ─> done
    data rank                                                       results written, summary ─> report

A run is done when the data rank has written the results under their name. What happens to a rank after
that is a warning; without the figures of every stage there is no report, and only if one was asked for,
the data rank fails.

Rank 0 decides the schedule and announces it; nobody else needs its files. A rank without a stage
leaves as soon as it knows that.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import psutil
import torch
from rich.console import Console

import pipeedge
from pipeedge.base.crew import Crew
from pipeedge.base.errors import (
    DeadlineError,
    PeerError,
    PeerFailedError,
    PipeEdgeError,
    WeightsError,
    one_line,
)
from pipeedge.base.fields import convert, decoding, plain, to_plain
from pipeedge.base.files import OutputFile, check_writable, write_whole
from pipeedge.base.payload import PixelTable
from pipeedge.base.wording import count, figure, plural
from pipeedge.compress.adaptation import AdaptiveBits, FixedBits
from pipeedge.compress.policies import Decided, make_policy
from pipeedge.control.liveness import Limits, StageWork
from pipeedge.control.member import Callbacks, Member
from pipeedge.control.session import Announcement, Forms, Refusal, Session, report_early_failure
from pipeedge.data import InputSource, ReadAhead, open_run_input, read_threads
from pipeedge.data.protected_files import check_run_outputs
from pipeedge.data.results import ResultWriter
from pipeedge.models import Model, find_model
from pipeedge.models.dtypes import find_dtype, slow_here, stream_dtype
from pipeedge.models.progress import ByteBar
from pipeedge.observe.assembly import assemble, series
from pipeedge.observe.energy import EnergyMeter, open_source
from pipeedge.observe.lanes import COLLECT, FEED, STAGE, Lane, LinkLane
from pipeedge.observe.live import Display, Progress
from pipeedge.observe.metrics import EnergyUse, Latency, StageStats, energy_body
from pipeedge.observe.monitoring import (
    DATA_KEYS,
    KEYS,
    STAGE_KEYS,
    CsvFiles,
    Exporter,
    Monitor,
    Sink,
    check_metrics_dir,
    metrics_files,
    output_samples,
    send_samples,
    stage_samples,
)
from pipeedge.observe.records import Recording, Row
from pipeedge.observe.timeline import Doing, LaneId, LaneKind
from pipeedge.observe.trace import trace_events
from pipeedge.plan.facts import disagreement, rank_facts
from pipeedge.plan.planning import InputFacts, Plan
from pipeedge.plan.schedule_choice import plan_schedule
from pipeedge.report.agreement import Agreement, Outputs, agreement, outputs_by_block
from pipeedge.report.run_report import RunReport, print_report, save_report
from pipeedge.request.config import DEFAULT_WORKER_THREADS, RunRequest
from pipeedge.run.data_rank import Collector, Feeder
from pipeedge.run.stage import Decode, Encode, Stage, resolve_device
from pipeedge.run.worker import Activity, Outgoing, StageLoop
from pipeedge.transport.base import Link, Receiver, Sender, Transport
from pipeedge.transport.interfaces import choose_interface, interface_addresses, use_interface
from pipeedge.transport.loopback import LocalLink
from pipeedge.transport.p2p import P2PTransport
from pipeedge.transport.rendezvous import connect_store, serve_store
from pipeedge.transport.rpc import RpcTransport, exposure

__all__ = ["run", "show_schedule"]

_Result = TypeVar("_Result")

_PATIENCE_S = 2.0
"""What takes longer is said."""


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
    counts = request.schedule.automatic and model.family == "bert"
    if not counts or request.world.rank != request.schedule.data_rank:
        return None
    return open_run_input(request, model).max_tokens


def run(request: RunRequest, console: Console, warn: Callable[[str], None]) -> RunReport | None:
    """Take part in a run. Returns the report on the data rank, None on the others.

    Args:
        request: what to do.
        console: where the data rank prints its table.
        warn: called with a line for the user that ends nothing; from any thread.

    Raises:
        PipeEdgeError: the run failed; the message is one line for the user.
    """
    with report_early_failure(request.world):
        model = find_model(request.model.name)
        if request.schedule.partition is not None:
            plan_schedule(request, model)  # every rank has -pt, so each answers before it waits for others
    rank = _Rank(request, model, console, warn)
    callbacks = Callbacks(
        status=rank.activity.status,
        notify=warn,
        show_waiting=warn if sys.stderr.isatty() else lambda line: None,
        record_stage_work=rank.record_stage_work,
    )
    with Session(request.world, _FORMS, callbacks) as session:
        session.open()
        return rank.run(session)


_Session: TypeAlias = Session[Mapping[str, Any], Plan]

_FORMS: Forms[Mapping[str, Any], Plan] = Forms(
    write_facts=dict,
    read_facts=plain,
    write_plan=to_plain,
    read_plan=functools.partial(convert, kind=Plan),
)
"""The facts of a run are an open list of options to compare, and stay a mapping."""


class _Rank:
    """One rank of one run. Built once, run once."""

    def __init__(
        self,
        request: RunRequest,
        model: Model,
        console: Console,
        warn: Callable[[str], None],
    ) -> None:
        self.activity = Activity()
        self._request = request
        self._rank = request.world.rank
        self._model = model
        self._console = console
        self._warn = warn
        self._crew = Crew()
        self._display: Display | None = None
        self._store: Any = None

    def record_stage_work(self, work: Mapping[int, StageWork]) -> None:
        """Show, on the data rank, how the stages spend their time; called by the member's thread."""
        if self._display is not None:
            self._display.heard(work)

    def run(self, session: _Session) -> RunReport | None:
        """Take part in the session, from facts to summary."""
        with ExitStack() as stack:
            return self._run(session, stack)

    def _run(self, session: _Session, stack: ExitStack) -> RunReport | None:
        member = session.member
        data_end = None
        with self.activity.busy("reading its weights and input"):
            world = self._request.world
            # Only now: the others are to hear that this rank's weights do not fit.
            self._model.check_sizes(self._request.model.weights)
            device = resolve_device(self._request.model.device)
            interface = choose_interface(world.socket_ifname, world.addr, world.port)
            exporter = self._check_metrics(interface, stack)
            if self._rank == self._request.schedule.data_rank:
                metrics = metrics_files(self._request.metrics.directory, self._rank)
                data_end = _DataEnd(self._request, self._model, metrics)
            facts = self._facts(data_end)
        plan = session.agree(facts, self._decide)
        if self._rank not in plan.participants:
            self._say_waiting("the schedule gives it no stage, so it has nothing to do")
            if session.serves_hub:
                member.wait("start")
                self._close_store()
                session.summary()
            return None
        member.set_hub_name(plan.name(0) or "without a part in the pipeline")
        member.on_end(lambda: self._crew.stop(member.error))
        transport = self._connect(plan, interface)
        stage = self._create_stage(plan, device, transport)
        ends = _LinkEnds(self._rank, plan.links(self._model), transport, self._crew)
        monitor = self._monitor(plan, exporter)
        loops = None
        if stage is not None:
            tell = functools.partial(self._tell_of, stage)
            bits = _link_bits(plan, self._model, stage.number, member, tell)
            loops = _StageLoops(stage, plan, ends, bits, self.activity, self._crew, monitor)
        if data_end is not None:
            data_end.open(plan, ends, self.activity, self._crew, monitor)
        session.start()
        startup_s = time.time() - psutil.Process().create_time()
        with monitor, self._showing(plan, data_end), data_end.writer if data_end is not None else ExitStack():
            ends.start()
            if loops is not None:
                loops.start(self._crew)
            if data_end is not None:
                data_end.start(self._crew)
            self._crew.wait()
        if data_end is not None:
            member.complete()
        unclosed = self._close_links(transport)
        member.record(self._recording(member, loops, data_end, monitor.use()).to_text())
        member.done(to_plain(loops.stats(self._rank)) if loops is not None else {})
        summary = self._summary(session, whole=data_end is not None)
        if unclosed is not None:
            self._warn(f"{one_line(unclosed)}; the results are complete")
        if data_end is None:
            return None
        if data_end.not_finite:
            self._warn(
                f"{count(data_end.not_finite, 'item')} {plural(data_end.not_finite, 'has', 'have')} "
                "outputs that are no numbers: are the weights whole?"
            )
        missing = [rank for rank in plan.schedule.ranks if str(rank) not in summary]
        if missing:
            self._go_without_report(missing)
            return None
        report = data_end.report(plan, summary, startup_s, self._recordings(member), member.hub_clock)
        if self._request.output.check_items:
            # The others have ended: what is computed from now on holds nobody up.
            report = dataclasses.replace(report, check=data_end.check(device))
        output = self._request.output
        if output.report is not None:
            save_report(report, output.report)
        if output.trace is not None and report.timeline is not None:
            events = trace_events(report.timeline, plan.schedule, plan.data_rank)
            write_whole(output.trace, json.dumps(events, separators=(",", ":")), "--trace")
        if not output.quiet:
            print_report(
                report,
                self._console,
                results=output.results,
                saved=output.report,
                trace=output.trace,
                replaced=data_end.replaced,
            )
        return report

    def _close_links(self, transport: Transport | None) -> PeerError | None:
        """Close the links; all that they had to carry has arrived. Return why it did not work, if so."""
        try:
            if isinstance(transport, RpcTransport):
                # All close together: the first waits while the last still computes.
                self._in_crew("close", transport.close)
            elif transport is not None:
                with self.activity.busy("closing its links"):
                    self._in_crew("close", transport.close, "the links could not be closed")
        except PeerError as error:
            return error
        return None

    def _summary(self, session: _Session, *, whole: bool) -> Mapping[str, Any]:
        """Wait for the figures of every stage; return what is known of them.

        Args:
            session: of this rank.
            whole: whether this rank has written the results.
        """
        try:
            return session.summary()
        except PeerError as error:
            if not whole and not session.member.results_complete:
                raise
            self._warn(f"{one_line(error)}; the results are complete")
            return {}

    def _go_without_report(self, missing: Sequence[int]) -> None:
        """Say that there is no report because of the ``missing`` ranks; fail if one was asked for."""
        output = self._request.output
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
            raise PeerFailedError(
                f"{why}, but there is nothing for {' and '.join(asked)}; run again for that"
            )
        self._warn(f"{why}, without a table")

    def _check_metrics(self, interface: str, stack: ExitStack) -> Exporter | None:
        """Refuse places for metrics that cannot take them; the port is taken at once."""
        metrics = self._request.metrics
        if metrics.directory is not None:
            check_metrics_dir(metrics.directory, metrics.csv_file_mode, self._rank, KEYS)
        if metrics.prometheus_port is None:
            return None
        address = interface_addresses()[interface][0]
        exporter = Exporter(address, metrics.prometheus_port, self._rank)
        stack.callback(exporter.close)
        return exporter

    def _monitor(self, plan: Plan, exporter: Exporter | None) -> Monitor:
        metrics = self._request.metrics
        sinks: list[Sink] = [] if exporter is None else [exporter]
        if metrics.directory is not None:
            keys: tuple[str, ...] = DATA_KEYS if self._rank == plan.data_rank else ()
            if plan.schedule.stage_of(self._rank) is not None:
                keys += STAGE_KEYS
            sinks.append(CsvFiles(metrics.directory, metrics.csv_file_mode, self._rank, keys))
        meter = EnergyMeter(*open_source())
        return Monitor(meter, sinks, metrics.window_size, time.perf_counter, self._warn)

    @contextmanager
    def _showing(self, plan: Plan, data_end: _DataEnd | None) -> Iterator[None]:
        """Show the progress of the run, on the data rank, unless it is to be quiet."""
        if data_end is None or self._request.output.quiet:
            yield
            return
        progress = Progress(plan.items, plan.schedule.ranks, time.monotonic())
        with Display(
            progress,
            self._console,
            lambda: data_end.writer.items,
            time.monotonic,
            data_end.waited_for_input_s,
        ) as display:
            self._display = display
            try:
                yield
            finally:
                self._display = None

    def _recording(
        self,
        member: Member,
        loops: _StageLoops | None,
        data_end: _DataEnd | None,
        energy: EnergyUse,
    ) -> Recording:
        """Collect the activities of this rank's threads."""
        parts = [part for part in (data_end, loops) if part is not None]
        return Recording(
            rank=self._rank,
            host=socket.gethostname(),
            lanes=tuple(lane.record(member.hub_clock) for part in parts for lane in part.lanes),
            links=tuple(part.link.record(member.hub_clock) for part in parts),
            clock_error_s=member.hub_clock.error_s,
            decided=loops.decided(member.hub_clock) if loops is not None else (),
            energy=energy,
        )

    @staticmethod
    def _recordings(member: Member) -> list[Recording]:
        """On the data rank: those of all ranks."""
        found = []
        for rank, text in member.records().items():
            with decoding(f"what rank {rank} recorded of the run", peer=rank):
                found.append(Recording.from_text(rank, text))
        return found

    def _tell_of(self, stage: _NumberedStage, line: str) -> None:
        self._warn(f"stage {stage.number}: {line}")

    def _facts(self, data_end: _DataEnd | None) -> dict[str, Any]:
        try:
            weights = self._model.fingerprint(self._request.model.weights)
        except WeightsError:
            # Not every rank needs weights. One that does says what is wrong when it loads them.
            weights = None
        return rank_facts(
            self._request,
            self._model,
            weights=weights,
            items=len(data_end.source) if data_end is not None else None,
            max_tokens=data_end.source.max_tokens if data_end is not None else None,
            pixels=data_end.source.pixels if data_end is not None else None,
        )

    def _decide(self, facts: Mapping[int, Mapping[str, Any]]) -> Announcement[Plan] | Refusal:
        """Compare, on rank 0, the facts of all ranks and decide the schedule."""
        mismatch = disagreement(facts)
        if mismatch is not None:
            return Refusal(mismatch)
        data = facts[self._request.schedule.data_rank]
        with decoding(f"what rank {self._request.schedule.data_rank} says of its input"):
            known: InputFacts = convert(data, InputFacts)
        eight_bit = known.pixel_table is not None
        with self.activity.busy("scheduling"):
            planned = plan_schedule(self._request, self._model, known.max_tokens, eight_bit=eight_bit)
        for note in planned.notes:
            self._warn(note)
        plan = Plan(
            schedule=planned.schedule,
            data_rank=self._request.schedule.data_rank,
            items=known.items,
            ubatch_size=self._request.ubatch_size,
            max_tokens=known.max_tokens,
            pixel_table=known.pixel_table,
            store_port=None,
            prediction=planned.prediction,
            compression=self._request.links.compression,
            record_rows=known.record_rows,
        )
        if len(plan.participants) > 1:
            plan = dataclasses.replace(plan, store_port=self._serve_store())
        names = {rank: name for rank in plan.participants if (name := plan.name(rank)) is not None}
        return Announcement(plan, plan.participants, names, plan.data_rank)

    def _serve_store(self) -> int:
        """Serve the rendezvous of the links at ``--addr``, at any free port, until they stand."""
        self._store, port = serve_store(self._request.world.addr)
        return port

    def _say_waiting(self, line: str) -> None:
        """Tell who sits in front of this rank why nothing happens here."""
        if sys.stderr.isatty():
            self._warn(line)

    @contextmanager
    def _patience(self, what: str) -> Iterator[None]:
        """Say ``what`` this rank does, on a terminal, if it takes more than a moment."""
        timer = threading.Timer(_PATIENCE_S, self._say_waiting, (what,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _close_store(self) -> None:
        """Stop serving the rendezvous, so that no stranger can fill this rank's memory through it.

        RPC asks the store for addresses until the end, so there it stays open.
        """
        if self._request.transport.comm != "rpc":
            self._store = None

    def _create_stage(
        self, plan: Plan, device: torch.device, transport: Transport | None
    ) -> _NumberedStage | None:
        """Create the stage of this rank. Over RPC, wait for the data rank's order and report the outcome."""
        if not isinstance(transport, RpcTransport):
            return self._load_stage(plan, device)
        if self._rank == plan.data_rank:
            # The first call to a rank asks the store where it is, for as long as rank 0 may be stopped.
            self._in_crew("create", functools.partial(transport.create_stages, plan.schedule.ranks))
        stage = None
        number = plan.schedule.stage_of(self._rank)
        if number is not None:
            order = self._in_crew(
                "order",
                transport.wait_for_order,
                f"rank {self._rank} was not told by rank {plan.data_rank} to create its stage",
            )
            if order.stage != number:
                raise PeerFailedError(
                    f"rank {plan.data_rank} wants stage {order.stage} here, the plan says {number}",
                    peer=plan.data_rank,
                )
            try:
                stage = self._load_stage(plan, device)
            except BaseException as error:
                order.failed(one_line(error))
                raise
            order.done()
        if self._rank == plan.data_rank:
            self._in_crew("created", transport.wait_created)
        return stage

    def _load_stage(self, plan: Plan, device: torch.device) -> _NumberedStage | None:
        number = plan.schedule.stage_of(self._rank)
        if number is None:
            return None
        stage = plan.schedule.stages[number]
        dtype = find_dtype(stage.dtype)
        slow = slow_here(dtype, device)
        if slow is not None:
            self._warn(f"stage {number} on rank {self._rank}: {slow}")
        with (
            self.activity.busy(f"loading {stage.layers.named}"),
            self._patience(f"loading {stage.layers.named} of {self._model.name}"),
        ):
            weights, total = self._request.model.weights, self._model.weight_bytes(stage.layers, dtype)
            with ByteBar(f"rank {self._rank}: {stage.layers.named}", total, delay_s=_PATIENCE_S) as bar:
                shard = self._model.load(stage.layers, weights, device, dtype, progress=bar.advance)
        table = plan.pixel_table if number == 0 else None
        pixels = None if table is None else PixelTable.from_text(table)
        return _NumberedStage(number, shard.parameter_count, Stage(shard, device, pixels))

    def _connect(self, plan: Plan, interface: str) -> Transport | None:
        if plan.store_port is None:
            return None
        use_interface(interface)
        world, comm = self._request.world, self._request.transport
        port = plan.store_port
        exposed = exposure(interface_addresses().get(interface, ())) if comm.comm == "rpc" else None
        if exposed is not None:
            self._warn(exposed)

        def connect() -> Transport:
            if comm.comm == "rpc":
                transport = RpcTransport(
                    addr=world.addr,
                    port=port,
                    rank=self._rank,
                    members=plan.participants,
                    worker_threads=comm.worker_threads or DEFAULT_WORKER_THREADS,
                    timeout_s=world.timeout_s,
                )
                self._crew.on_stop(transport.abort)
                return transport
            store = connect_store(world.addr, port, timeout_s=world.timeout_s)
            links = P2PTransport(store=store, rank=self._rank, members=plan.participants)
            self._close_store()
            return links

        # Everybody who has the plan connects at once, so who does not answer cannot be reached.
        peers = ", ".join(str(rank) for rank in plan.participants if rank != self._rank)
        with self.activity.busy("connecting to its peers"):
            return self._in_crew(
                "connect",
                connect,
                f"the links of rank {self._rank} to {peers} over {interface} do not open: is there a "
                "firewall between them, or another interface to choose with -s?",
            )

    def _in_crew(self, name: str, wait: Callable[[], _Result], too_long: str | None = None) -> _Result:
        """Call ``wait`` in a separate thread and return its result.

        ``wait`` waits for peers. When one of them dies, torch may go on waiting, but this rank must end.

        Args:
            name: of the thread.
            wait: what is to be waited for.
            too_long: what to say where it may take no longer than a dead link may; None: as long as the
                peers live.
        """
        found: list[_Result] = []
        self._crew.start(name, lambda: found.append(wait()))
        limit_s = Limits.within(self._request.world.timeout_s).stall_s if too_long is not None else None
        if not self._crew.wait(limit_s):
            raise DeadlineError(f"{too_long} ({limit_s:.1f} s)")
        return found[0]


@dataclasses.dataclass(frozen=True)
class _NumberedStage:
    number: int
    parameters: int
    compute: Stage


class _LinkEnds:
    """The ends of this rank's links: in memory where both ends are here, else on the network."""

    def __init__(self, rank: int, links: list[Link], transport: Transport | None, crew: Crew) -> None:
        self._rank = rank
        self._links = links
        self._transport = transport
        self._crew = crew
        self._telling: list[Receiver] = []
        self._local = {
            number: LocalLink()
            for number, link in enumerate(links)
            if link.source == rank and link.destination == rank
        }
        for local in self._local.values():
            crew.on_stop(local.close)

    def sender(self, number: int) -> tuple[Sender, int | None]:
        """Return the sending end of link ``number`` and its destination, or None if that is local."""
        if number in self._local:
            return self._local[number], None
        link = self._links[number]
        return self._network().sender(link), link.destination

    def receiver(self, number: int) -> tuple[Receiver, int | None]:
        """Return the receiving end of link ``number`` (-1: last) and its source, or None if that is local."""
        number %= len(self._links)
        if number in self._local:
            return self._local[number], None
        link = self._links[number]
        receiver = self._network().receiver(link)
        if link.receipts:
            self._crew.on_stop(receiver.close)
            self._telling.append(receiver)
        return receiver, link.source

    def start(self) -> None:
        """Begin to send receipts."""
        for receiver in self._telling:
            self._crew.start("receipts", receiver.run)

    def _network(self) -> Transport:
        if self._transport is None:
            raise PipeEdgeError("a link leaves this rank although it runs alone")
        return self._transport


class _StageLoops:
    """A stage between its links: link ``n`` leads to stage n, link n + 1 away from it."""

    def __init__(
        self,
        stage: _NumberedStage,
        plan: Plan,
        ends: _LinkEnds,
        bits: AdaptiveBits | FixedBits | None,
        activity: Activity,
        crew: Crew,
        monitor: Monitor,
    ) -> None:
        self._stage = stage
        self._bits = bits
        number, stages, compression = stage.number, plan.schedule.stages, plan.compression
        decode = _decode(plan, number - 1) if number else None
        layers = len(stages[number].layers)
        plain_bits = torch.finfo(stream_dtype(find_dtype(stages[number].dtype))).bits

        def computed(row: Row, received: float) -> None:
            came_bits = decode.latest_bits if decode is not None else 0
            monitor.tell(stage_samples(row, STAGE, int(received), layers, came_bits))

        def sent(size: int, start_s: float, end_s: float) -> None:
            monitor.tell(send_samples(size, start_s, end_s))

        sender, peer = ends.sender(number + 1)
        self.link = LinkLane(
            LaneId.link(number), peer, plan.record_rows, sent if monitor.wants_samples else None
        )
        receipts = plan.measures(number)
        if isinstance(bits, AdaptiveBits):
            self._outgoing = Outgoing(
                sender, peer, activity, lane=self.link, receipts=receipts, arrived=bits.arrived
            )
        else:
            self._outgoing = Outgoing(sender, peer, activity, lane=self.link, receipts=receipts)
        crew.on_stop(self._outgoing.close)
        self._compute = StageLoop(
            stage.compute,
            *ends.receiver(number),
            self._outgoing,
            activity,
            decode=decode,
            encode=None
            if bits is None
            else Encode(
                bits,
                compression.clamp,
                compression.window_size,
                stage=number,
                rank=plan.schedule.stages[number].rank,
            ),
            bits=lambda: (bits.latest if bits is not None else 0) or plain_bits,
            lane=Lane(
                LaneId.stage(number),
                STAGE,
                time.perf_counter,
                plan.record_rows,
                computed if monitor.wants_samples else None,
            ),
        )
        activity.stage(self._compute.work)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Lanes of its threads."""
        return (self._compute.lane,)

    def decided(self, hub_clock: Callable[[float], float]) -> tuple[Decided, ...]:
        """Return the bit widths that were chosen, timed by the hub's clock."""
        if not isinstance(self._bits, AdaptiveBits):
            return ()
        return tuple(dataclasses.replace(one, time_s=hub_clock(one.time_s)) for one in self._bits.decided)

    def start(self, crew: Crew) -> None:
        """Begin to compute."""
        crew.start("compute", self._compute.run)
        crew.start("watch", self._outgoing.run)

    def stats(self, rank: int) -> StageStats:
        """Return the statistics of this stage."""
        lane = self._compute.lane
        return StageStats(
            stage=self._stage.number,
            rank=rank,
            microbatches=lane.microbatches,
            compute_s_mean=lane.tally(Doing.COMPUTE).mean,
            send_s_mean=self._outgoing.seconds.mean,
            send_s_best=self._outgoing.send_s_best,
            recv_wait_s_mean=lane.tally(Doing.WAIT_INPUT).mean,
            bytes_out_mean=self._outgoing.bytes.mean,
            busy_fraction=self._compute.busy_fraction,
            rss_peak_mb=peak_rss_mb(),
            parameters=self._stage.parameters,
            compute_cpu_s_mean=self._compute.compute_cpu_seconds.mean,
            threads=torch.get_num_threads(),
            encode_s_mean=lane.tally(Doing.ENCODE).mean,
            decode_s_mean=lane.tally(Doing.DECODE).mean,
            # Where the bits change, so does what a microbatch takes, and none of it is what was promised.
            link_s=None if isinstance(self._bits, AdaptiveBits) else self._outgoing.link_s,
        )


def _decode(plan: Plan, stage: int) -> Decode | None:
    """Undoes what ``stage`` does to what it sends."""
    stage %= len(plan.schedule.stages)
    return Decode(plan.schedule.stages[stage].rank) if plan.compresses(stage) else None


def _link_bits(
    plan: Plan, model: Model, stage: int, member: Member, tell: Callable[[str], None]
) -> AdaptiveBits | FixedBits | None:
    """Return the bit width policy for the output of ``stage``, or None if it is not encoded."""
    bits, compression = plan.schedule.stages[stage].quant_bits, plan.compression
    if compression.adaptive is None or not plan.adapts(stage):
        return FixedBits(bits) if bits else None
    policy, target = compression.adaptive, compression.send_constraint or 0.0
    sizes = plan.sizes(model, stage)
    return AdaptiveBits(
        lambda sizes: make_policy(policy, sizes, target),
        sizes,
        window=compression.window_size,
        first_bits=bits if bits in sizes.bytes_at else 0,
        slowest_s=lambda: member.slowest_stage_s,
        clock=time.perf_counter,
        tell=tell,
    )


class _DataEnd:
    """The data rank's part of the pipeline: the input, the results and the final report."""

    def __init__(self, request: RunRequest, model: Model, metrics: Sequence[OutputFile]) -> None:
        self._model = model
        self._command = request.command
        self.replaced = check_run_outputs(request, model, metrics)
        """Outputs that were there before the run."""
        if request.output.report is not None:
            check_writable(request.output.report, "--report")
        if request.output.trace is not None:
            check_writable(request.output.trace, "--trace")
        self._request = request
        if request.output.check_items:
            with _naming("--check computes in float32"):
                model.check_weights(request.model.weights)
        self.writer = ResultWriter(request.output.results, model, None)
        self.source: InputSource = open_run_input(request, model)
        if request.output.check_items:
            self.source.check_distinct(request.output.check_items, "--check")
        self.link: LinkLane
        self._outgoing: Outgoing
        self._reading: ReadAhead | None = None
        self._feeder: Feeder
        self._collector: Collector

    def open(self, plan: Plan, ends: _LinkEnds, activity: Activity, crew: Crew, monitor: Monitor) -> None:
        """Take hold of the first and the last link."""
        last_at = 0.0

        def came(row: Row, right: float) -> None:
            nonlocal last_at
            # Until the first result comes the pipeline fills; its time is that of its way through.
            since = last_at or self._feeder.started_at or row.start_s
            last_at = row.start_s + row.seconds[0]
            monitor.tell(output_samples(since, last_at, row.items, right))

        sender, peer = ends.sender(0)
        self.link = LinkLane(LaneId.link(), peer, plan.record_rows)
        self._outgoing = Outgoing(sender, peer, activity, lane=self.link)
        crew.on_stop(self._outgoing.close)
        if not self.source.in_memory:
            self._reading = ReadAhead(
                self.source, plan.ubatch_size, threads=read_threads(), rows=plan.record_rows
            )
        self._feeder = Feeder(
            self.source,
            plan.ubatch_size,
            self._outgoing,
            activity,
            lane=Lane(LaneId(LaneKind.FEED), FEED, time.perf_counter, plan.record_rows),
            dtype=stream_dtype(find_dtype(plan.schedule.stages[0].dtype)),
            readings=None if self._reading is None else self._reading.readings(),
        )
        self._collector = Collector(
            self._feeder,
            *ends.receiver(-1),
            self.writer,
            activity,
            counts_accuracy=self._model.output_kind == "logits",
            decode=_decode(plan, -1),
            lane=Lane(
                LaneId(LaneKind.COLLECT),
                COLLECT,
                time.perf_counter,
                plan.record_rows,
                came if monitor.wants_samples else None,
            ),
            keep_items=self._request.output.check_items,
        )

    def start(self, crew: Crew) -> None:
        """Begin to feed and to collect."""
        crew.start("feed", self._feeder.run)
        if self._reading is not None:
            self._reading.start(crew)
        crew.start("watch", self._outgoing.run)
        crew.start("collect", self._collector.run)

    def check(self, device: torch.device) -> Agreement:
        """Compare the first items with the outputs of the model in float32, computed here."""
        kept = self._collector.kept
        numbers = tuple(number for each, _ in kept for number in each)
        found = Outputs(numbers, torch.cat([outputs for _, outputs in kept]))
        exact = outputs_by_block(
            self._model,
            self.source.first(self._request.output.check_items),
            self._request.ubatch_size,
            weights=self._request.model.weights,
            device=device,
            dtype=torch.float32,
        )
        return agreement(found, exact, classes=self._model.output_kind == "logits")

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Lanes of its threads."""
        ahead = () if self._reading is None else self._reading.lanes
        return (*ahead, self._feeder.lane, self._collector.lane)

    def waited_for_input_s(self) -> float:
        """Seconds until now in which the pipeline could not be fed because the input was being read."""
        return self._feeder.waited_for_input_s()

    @property
    def not_finite(self) -> int:
        """Items whose outputs hold NaN or infinity."""
        return self._collector.not_finite

    def report(
        self,
        plan: Plan,
        summary: Mapping[str, Any],
        startup_s: float,
        recordings: Sequence[Recording],
        hub_clock: Callable[[float], float],
    ) -> RunReport:
        """Build the report from the data collected here and the statistics of the stages."""
        began_s = hub_clock(self._feeder.started_at or 0.0)
        with decoding("what the stages say of the run"):
            stages = [convert(summary[str(rank)], StageStats) for rank in plan.schedule.ranks]
        return RunReport(
            model=self._model.name,
            schedule=plan.schedule,
            items=self.writer.items,
            microbatches=len(self._collector.latencies),
            ubatch_size=plan.ubatch_size,
            startup_s=startup_s,
            elapsed_s=self._collector.elapsed_s,
            latency=Latency.of(self._collector.latencies),
            accuracy=self._collector.accuracy,
            stages=stages,
            skipped=[skipped.reason for skipped in self.source.skipped],
            prediction=plan.prediction,
            steady_items_per_s=self._collector.steady_items_per_s,
            latencies_s=self._collector.latencies,
            timeline=assemble(recordings, began_s, self._collector.elapsed_s),
            series=series(recordings, began_s),
            energy=energy_body({one.rank: (one.host, one.energy) for one in recordings}, self.writer.items),
            command=self._command,
            versions=_versions(),
        )


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Weights that do not fit are an error that says what they were for."""
    try:
        yield
    except WeightsError as error:
        raise WeightsError(f"{what}: {error}") from error


def _versions() -> dict[str, str]:
    return {
        "pipeedge": pipeedge.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def peak_rss_mb() -> float:
    """Peak resident memory of this process, MB of 2^20 bytes."""
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return float(psutil.Process().memory_info().rss) / 2**20
