"""The examination of one rank: alone, together with the others, and of the links between them."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeedge.base.errors import DeadlineError, PeerError, PipeEdgeError, RequestError, one_line
from pipeedge.base.fields import decoding, flag, nonnegative, number, plain, text, whole_number
from pipeedge.base.files import OutputFile, check_writable
from pipeedge.base.program import program_name
from pipeedge.base.wording import count, figure
from pipeedge.control.liveness import RankStatus
from pipeedge.control.member import Callbacks, Member
from pipeedge.control.session import Announcement, Deadlines, Forms, Session
from pipeedge.doctor import checks
from pipeedge.doctor.checks import SchedulerFiles
from pipeedge.doctor.findings import Finding, Level, exit_status, ok, problem, problem_from
from pipeedge.doctor.probe import Probe
from pipeedge.plan.link_speed import Estimate, estimate_link
from pipeedge.plan.specs import (
    Link,
    load_neighbors,
    save_neighbors,
)
from pipeedge.request.config import RunRequest, WorldRequest
from pipeedge.request.options import DoctorCommand
from pipeedge.transport.interfaces import choose_interface, interface_addresses, use_interface

if TYPE_CHECKING:  # imports torch, which takes seconds: a rank is to be seen before that
    import torch

    from pipeedge.base.payload import PixelTable
    from pipeedge.models import Model

__all__ = ["examine"]

_PORTS = 1 << 16
_LEAST_LIVENESS_S = 30.0
"""Importing torch can keep a small board from beating for seconds."""
_CONNECT_S = 4.0
"""For connecting the links."""
_LINK_S = 1.5
"""For measuring one link, unless it is so slow that a few frames take longer."""
_LINK_SLACK_S = 5.0
"""What a few frames may take beyond that."""


def examine(command: DoctorCommand, say: Callable[[str], None], probe: Probe | None = None) -> int:
    """Examine this rank and, with the others, the run.

    Args:
        command: what would be run.
        say: called with each line for the user.
        probe: the machine.

    Returns:
        The exit status.
    """
    return _Examination(command, say, probe or Probe()).run()


class _Over(Exception):  # noqa: N818 - the examination cannot go on; its findings say why
    """Nothing more can be found out."""


@dataclass(frozen=True)
class _Plan:
    """What rank 0 found, and what is to be measured."""

    findings: tuple[Finding, ...]
    pairs: tuple[tuple[int, int], ...]
    """Source and destination rank of each link."""
    members: tuple[int, ...]
    """Ranks at the ends of the links."""
    measure: bool
    store_port: int | None
    """Port of the rendezvous store on rank 0; None if nothing is measured."""

    def to_body(self) -> dict[str, Any]:
        """Write the plan as a message."""
        return {**vars(self), "findings": _texts(self.findings)}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> _Plan:
        """Parse a message. Raises ValueError, TypeError or KeyError if it is malformed."""
        port = body["store_port"]
        return cls(
            findings=tuple(Finding.from_text(told) for told in body["findings"]),
            pairs=tuple((whole_number(source), whole_number(end)) for source, end in body["pairs"]),
            members=tuple(whole_number(member) for member in body["members"]),
            measure=flag(body["measure"]),
            store_port=None if port is None else whole_number(port, below=_PORTS),
        )


_Session: TypeAlias = Session[Mapping[str, Any], _Plan]

_FORMS: Forms[Mapping[str, Any], _Plan] = Forms(
    write_facts=dict, read_facts=plain, write_plan=_Plan.to_body, read_plan=_Plan.from_body
)


class _Examination:
    """One rank's. Built once, run once."""

    def __init__(self, command: DoctorCommand, say: Callable[[str], None], probe: Probe) -> None:
        self._command = command
        self._request: RunRequest = command.request
        self._world: WorldRequest = command.request.world
        self._rank = command.request.world.rank
        self._say = say
        self._probe = probe
        self._findings: list[Finding] = []
        self._began = time.monotonic()
        self._model: Model | None = None
        self._interface: str | None = None
        self._files: SchedulerFiles | None = None
        self._store: Any = None

    def run(self) -> int:
        """Examine this rank, alone and with the others; return the exit status."""
        try:
            resolved = self._look_at_network()
            self._examine_together(resolved)
        except _Over:
            pass
        problems = sum(finding.level is Level.PROBLEM for finding in self._findings)
        warnings = sum(finding.level is Level.WARNING for finding in self._findings)
        if problems:
            self._say(f"not fit to run: {count(problems, 'problem')}, {count(warnings, 'warning')}")
        else:
            self._say("fit to run" + (f", with {count(warnings, 'warning')}" if warnings else ""))
        return exit_status(self._findings)

    def _note(self, *findings: Finding, quiet: bool = False) -> None:
        """Keep findings and print them; ``quiet``: only if they are not good."""
        for finding in findings:
            self._findings.append(finding)
            if not (quiet and finding.level is Level.OK):
                self._say(finding.line())

    @contextmanager
    def _noting(self, check: str) -> Iterator[None]:
        """Record an error of the block as a problem and go on."""
        try:
            yield
        except PipeEdgeError as error:
            self._note(problem_from(check, error).of(self._rank))

    # -- alone ------------------------------------------------------------------------------------

    def _look_at_network(self) -> str:
        """Name, interface, address. Returns the IP address behind ``--addr``."""
        world = self._world
        if world.agent_store:
            self._note(
                problem(
                    "port",
                    "torchrun's agent holds the port; give RANK WORLD, or use "
                    f"{program_name('pipeedge-launch')} --doctor",
                )
            )
            raise _Over
        try:
            resolved = _resolve(world.addr, world.port, world.timeout_s)
        except OSError as error:
            self._note(
                problem(
                    "name",
                    f"--addr {world.addr} cannot be resolved ({error.strerror or error}): correct it, add it "
                    "to /etc/hosts, or give the IP address",
                ).of(self._rank)
            )
            raise _Over from None
        finding = checks.check_addr(
            world.addr, resolved, rank=self._rank, world_size=world.size, own=_own_addresses()
        )
        self._note(finding.of(self._rank))
        if finding.level is Level.PROBLEM:
            raise _Over
        with self._noting("interface"):
            self._interface = choose_interface(world.socket_ifname, world.addr, world.port)
            routed: str | None = self._interface
            if world.socket_ifname is not None:
                try:
                    routed = choose_interface(None, world.addr, world.port)
                except RequestError:
                    routed = None
            self._note(checks.check_interface(self._interface, routed, world.addr).of(self._rank))
        return resolved

    def _examine_together(self, resolved: str) -> None:
        world = self._world
        callbacks = Callbacks(
            # Always busy: the hub ends no examination because nothing seems to move.
            status=lambda: RankStatus(busy=("examining", time.monotonic() - self._began)),
            notify=self._say,
        )
        session: _Session = Session(
            world,
            _FORMS,
            callbacks,
            deadlines=Deadlines(world.timeout_s, silence_s=max(_LEAST_LIVENESS_S, world.timeout_s)),
            host=self._probe.machine().host,
        )
        try:
            with session:
                self._open_hub(session)
                self._connect(session, resolved)
                self._tell_and_hear(session)
        except PipeEdgeError as error:
            self._note(problem_from("ranks", error))
            raise _Over from error

    def _open_hub(self, session: _Session) -> None:
        world = self._world
        try:
            session.open_hub()
        except RequestError as error:
            self._note(problem_from("port", error).of(0))
            raise _Over from error
        if self._rank == 0 and world.size > 1:
            self._note(ok("port", f"{world.port} is free at {world.addr}").of(0))
            self._say(f"waiting up to {figure(world.timeout_s)} s for {world.size - 1} more to start")

    def _connect(self, session: _Session, resolved: str) -> None:
        """Connect to rank 0 and introduce this rank, before anything that takes time."""
        world = self._world
        try:
            session.connect()
        except PeerError as error:
            cause = error.__cause__ if isinstance(error, DeadlineError) else None
            self._note(
                checks.diagnose_dial(
                    world.addr,
                    world.port,
                    cause if isinstance(cause, OSError) else None,
                    resolved=resolved,
                    timeout_s=world.timeout_s,
                    own=_own_addresses(),
                ).of(self._rank)
            )
            raise _Over from error
        if self._rank != 0:
            self._note(ok("port", f"rank 0 answers at {world.addr}:{world.port}").of(self._rank))

    # -- together ---------------------------------------------------------------------------------

    def _tell_and_hear(self, session: _Session) -> None:
        facts = self._look_at_run()
        own = {f"finding.{number}": finding.to_text() for number, finding in enumerate(self._findings)}
        plan = session.agree({**facts, **own}, self._decide)
        self._hear(plan)
        session.start()
        clock = self._probe.clock()  # every rank hears the start at the same moment, nearly
        stats: dict[str, Any] = {"clock": clock}
        if plan.measure:
            stats |= self._measure(session.member, plan)
        told = session.finish(stats)
        measured_pairs = plan.pairs if plan.measure else ()
        with decoding("what the ranks say of the links"):
            clocks = {whole_number(int(rank)): number(one["clock"]) for rank, one in told.items()}
            measured = {
                link: _link_from_stats(link, told[str(source)])
                for link, (source, _) in enumerate(measured_pairs)
                if f"link.{link}.rounds" in told[str(source)]
            }
            error = next((text(one["error"]) for one in told.values() if "error" in one), None)
        self._conclude(clocks, measured_pairs, measured, error)

    def _look_at_run(self) -> dict[str, Any]:
        """Device, model, weights, input, output, memory: this rank's findings and facts."""
        # What torch logs of a broken connection is told in one line here; it reads this on import.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from pipeedge.models import find_model
        from pipeedge.plan.planning import rank_facts
        from pipeedge.run.stage import resolve_device

        request, rank = self._request, self._rank
        self._check_metrics()
        device = None
        with self._noting("device"):
            device = resolve_device(request.model.device)
            self._note(ok("device", str(device)).of(rank))
        with self._noting("model"):
            self._model = find_model(request.model.name)
        facts: dict[str, Any] = {}
        if self._model is not None:
            weights, weights_error = None, None
            try:
                weights = self._model.fingerprint(request.model.weights)
                self._model.check_weights(request.model.weights, self._likely_dtype())
                self._note(ok("weights", f"{request.model.weights or self._model.weights_path()}").of(rank))
            except PipeEdgeError as error:
                weights_error = one_line(error)  # a problem where the rank has a stage: rank 0 will know
            items, max_tokens, pixels = self._look_at_data_end(self._model)
            facts = rank_facts(
                request, self._model, weights=weights, items=items, max_tokens=max_tokens, pixels=pixels
            )
            facts["weights_error"] = weights_error
        machine = self._probe.machine()
        facts |= {
            "host": machine.host,
            "machine": machine.machine,
            "free_bytes": machine.free_bytes,
            "limit_free_bytes": machine.limit_free_bytes,
            "process_bytes": machine.process_bytes,
            "device": str(device),
            "device_free_bytes": _device_free_bytes(device),
        }
        return {**facts, **self._probe.software()}

    def _check_metrics(self) -> None:
        """Check that the metrics of this rank can be written, without making their directory."""
        from pipeedge.observe.monitoring import KEYS, check_metrics_dir

        metrics = self._request.metrics
        if metrics.directory is not None:
            with self._noting("output"):
                check_metrics_dir(metrics.directory, metrics.csv_file_mode, self._rank, KEYS, make=False)

    def _likely_dtype(self) -> torch.dtype:
        """Return the dtype that this rank will load, assuming that it runs the stage of its own number."""
        from pipeedge.models.dtypes import find_dtype

        wanted = self._request.schedule
        if wanted.dtypes is None or wanted.automatic_dtype:
            return find_dtype("float32")
        return find_dtype(wanted.dtypes[min(self._rank, len(wanted.dtypes) - 1)])

    def _look_at_data_end(self, model: Model) -> tuple[int | None, int | None, PixelTable | None]:
        """On the data rank, look at input and output. Return items, longest sentence, and table of pixels."""
        if self._rank != self._request.schedule.data_rank:
            return None, None, None
        from pipeedge.data import open_run_input
        from pipeedge.data.protected_files import check_run_outputs
        from pipeedge.data.results import check_output_path
        from pipeedge.observe.monitoring import metrics_files

        output = self._request.output
        with self._noting("output"):
            metrics = metrics_files(self._request.metrics.directory, self._rank)
            check_run_outputs(self._request, model, [*self._neighbors_outputs(), *metrics])
            if output.results is not None:
                check_output_path(output.results, model)
            if output.report is not None:
                check_writable(output.report, "--report")
            if output.trace is not None:
                check_writable(output.trace, "--trace")
            named = [str(path) for path in (output.results, output.report, output.trace) if path is not None]
            if named:
                self._note(ok("output", f"{' and '.join(named)} can be written").of(self._rank))
        items, max_tokens, pixels = None, None, None
        with self._noting("input"):
            source = open_run_input(self._request, model)
            if output.check_items:
                source.check_distinct(output.check_items, "--check")
            items, max_tokens, pixels = len(source), source.max_tokens, source.pixels
            self._note(ok("input", count(items, "item")).of(self._rank))
        return items, max_tokens, pixels

    def _decide(self, facts: Mapping[int, Mapping[str, Any]]) -> Announcement[_Plan]:
        """Examine, on rank 0, all ranks together, and decide which links to measure."""
        from pipeedge.doctor.review import review

        findings: list[Finding] = []
        for rank, known in facts.items():
            with decoding(f"what rank {rank} says of itself"):
                checks.check_facts(known)
                findings += (
                    Finding.from_text(value) for name, value in known.items() if name.startswith("finding.")
                )
        pairs: list[tuple[int, int]] = []
        members: list[int] = []
        if self._model is not None:
            reviewed = review(self._request, self._model, facts)
            self._files = reviewed.files
            findings += reviewed.findings
            if reviewed.plan is not None:
                links = reviewed.plan.links(self._model)
                pairs = [(end.source, end.destination) for end in links if end.source != end.destination]
                members = list(reviewed.plan.participants)
        with self._noting("output"):
            self._check_neighbors_file()
        findings += [finding for finding in self._findings if finding.to_text() not in _texts(findings)]
        measure = bool(pairs) and exit_status(findings) == 0
        plan = _Plan(
            findings=tuple(findings),
            pairs=tuple(pairs),
            members=tuple(members),
            measure=measure,
            store_port=self._serve_store() if measure else None,
        )
        return Announcement(plan, participants=tuple(range(self._world.size)))

    def _neighbors_outputs(self) -> list[OutputFile]:
        path = self._command.neighbors_file
        return [] if path is None else [OutputFile("--neighbors-file", path)]

    def _check_neighbors_file(self) -> None:
        path = self._command.neighbors_file
        if path is None:
            return
        if self._model is not None:
            from pipeedge.data.protected_files import check_run_outputs

            check_run_outputs(self._request, self._model, self._neighbors_outputs())
        if path.is_file():
            load_neighbors(path)
        check_writable(path, "--neighbors-file")

    def _serve_store(self) -> int:
        from pipeedge.transport.rendezvous import serve_store

        self._store, port = serve_store(self._world.addr)
        return port

    def _hear(self, plan: _Plan) -> None:
        """Note the findings of the other ranks. Each rank has printed its own good ones, rank 0 the rest."""
        known = set(_texts(self._findings))
        for finding in plan.findings:
            if finding.to_text() not in known:
                self._note(finding, quiet=self._rank != 0 or finding.rank is not None)

    # -- the links --------------------------------------------------------------------------------

    def _measure(self, member: Member, plan: _Plan) -> dict[str, Any]:
        """Measure the links that begin here, and answer on those that end here; return stats for the hub."""
        if self._rank not in plan.members or plan.store_port is None:
            return {}
        pairs, members, port = plan.pairs, plan.members, plan.store_port
        from pipeedge.doctor.links import PASSES, LinkMeter, answer_link
        from pipeedge.transport.p2p import P2PTransport
        from pipeedge.transport.rendezvous import connect_store

        use_interface(self._interface or "")
        stats: dict[str, Any] = {}
        connected, over = threading.Event(), threading.Event()

        def work() -> None:
            try:
                store = connect_store(self._world.addr, port, timeout_s=self._world.timeout_s)
                transport = P2PTransport(store=store, rank=self._rank, members=members)
                self._store = None  # served no longer: all have met
                connected.set()
                meters = {number: LinkMeter(*pair) for number, pair in enumerate(pairs)}
                for _ in range(PASSES):
                    for number, (source, destination) in enumerate(pairs):
                        if source == self._rank:
                            meters[number].measure(transport, _LINK_S / PASSES)
                            # One assignment: the other thread may take the figures at any moment.
                            stats.update(_link_stats(number, estimate_link(meters[number].rounds)))
                        elif destination == self._rank:
                            answer_link(transport, source, destination)
                transport.close()
            except Exception as error:  # told to all, by the thread that waits for this one
                stats["error"] = one_line(error)[:_MAX_ERROR]
            finally:
                end()

        def end() -> None:
            connected.set()
            over.set()

        member.on_end(end)
        # In a thread of its own: gloo cannot be told to stop waiting, so it is left behind instead.
        threading.Thread(target=work, name="links", daemon=True).start()
        if connected.wait(_CONNECT_S):
            over.wait(len(pairs) * (_LINK_S + _LINK_SLACK_S))
        error = member.error
        if error is not None:
            raise error
        return dict(stats)

    def _conclude(
        self,
        clocks: Mapping[int, float],
        pairs: Sequence[tuple[int, int]],
        measured: Mapping[int, Estimate],
        error: str | None,
    ) -> None:
        quiet = self._rank != 0
        self._note(*checks.check_clocks(clocks), quiet=quiet)
        if not pairs:
            return
        self._note(*checks.check_links(pairs, measured, error), quiet=quiet)
        if self._rank != 0:
            return
        hosts = self._request.schedule.hosts or tuple(str(rank) for rank in range(self._world.size))
        if self._files is not None:
            self._note(*checks.check_promises(pairs, measured, self._files, hosts))
        path = self._command.neighbors_file
        steady = {
            (hosts[pairs[number][0]], hosts[pairs[number][1]]): estimate.link
            for number, estimate in measured.items()
            if estimate.steady
        }
        if path is not None and steady:
            with self._noting("output"):
                _save_links(path, steady)
                self._note(ok("output", f"{count(len(steady), 'link')} written to {path}"))


_MAX_ERROR = 400


def _texts(findings: Sequence[Finding]) -> list[str]:
    return [finding.to_text() for finding in findings]


def _resolve(addr: str, port: int, timeout_s: float) -> str:
    """Return the IP address of ``addr``.

    Raises:
        OSError: it has none, or the name server does not answer in time.
    """
    answers: queue.Queue[str | OSError] = queue.Queue()

    def ask() -> None:
        try:
            address = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)[0][4]
            answers.put(str(address[0]).split("%")[0])
        except UnicodeError:
            answers.put(OSError("no host name"))
        except OSError as error:
            answers.put(error)

    # In a thread, which is left behind: the system's resolver takes no deadline.
    threading.Thread(target=ask, name="resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise OSError("no name server answers") from None
    if isinstance(answer, OSError):
        raise answer
    return answer


def _own_addresses() -> list[str]:
    return [address for found in interface_addresses().values() for address in found]


def _device_free_bytes(device: Any) -> int | None:
    """Free memory of a device that is not the processor."""
    if device is None or device.type != "cuda":
        return None
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


def _link_stats(number: int, estimate: Estimate) -> dict[str, float]:
    """Return the figures of link ``number`` that are sent to the hub."""
    return {
        f"link.{number}.bw_bytes_per_s": estimate.link.bw_bytes_per_s,
        f"link.{number}.latency_s": estimate.link.latency_s,
        f"link.{number}.low_bytes_per_s": estimate.low_bytes_per_s,
        f"link.{number}.high_bytes_per_s": estimate.high_bytes_per_s,
        f"link.{number}.rounds": estimate.rounds,
    }


def _link_from_stats(link: int, told: Mapping[str, Any]) -> Estimate:
    bandwidth, latency, low, high, rounds = (
        nonnegative(told[f"link.{link}.{name}"])
        for name in ("bw_bytes_per_s", "latency_s", "low_bytes_per_s", "high_bytes_per_s", "rounds")
    )
    return Estimate(Link(bandwidth, latency), low, high, int(rounds))


def _save_links(path: Path, links: Mapping[tuple[str, str], Link]) -> None:
    """Write ``links`` into a neighbours file; what it says of other pairs stays."""
    neighbors = load_neighbors(path) if path.exists() else {}
    for (source, destination), link in links.items():
        neighbors.setdefault(source, {})[destination] = link
    save_neighbors(path, neighbors)
