"""Examine one rank, alone and together with the others, and the links between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from pipeedge.base.errors import DeadlineError, PipeEdgeError, RequestError
from pipeedge.base.fields import Number, Options, decoding, reader
from pipeedge.base.files import OutputFile, check_writable
from pipeedge.base.wording import count, figure
from pipeedge.control.admission import Terms
from pipeedge.control.announcement import Announcement
from pipeedge.control.forms import Forms
from pipeedge.control.hub_client import Callbacks
from pipeedge.control.liveness import RankStatus
from pipeedge.control.session import Session
from pipeedge.doctor.findings import Finding, Level, exit_status, ok, problem_from, warning
from pipeedge.doctor.link_checks import check_links, check_promises
from pipeedge.doctor.link_work import LinkRound, MeasuredLinks, link_endpoint, measure_links
from pipeedge.doctor.network_checks import diagnose_dial
from pipeedge.doctor.network_look import NetworkLook, look_at_network, own_addresses
from pipeedge.doctor.notes import ExaminationOver, FindingLog
from pipeedge.doctor.probe import Probe
from pipeedge.doctor.rank_checks import check_clocks, check_facts
from pipeedge.doctor.run_look import RunLook, look_at_run
from pipeedge.plan.link_speed import Estimate
from pipeedge.plan.spec_files import load_neighbors
from pipeedge.plan.spec_writing import add_links
from pipeedge.plan.specs import SpecFiles
from pipeedge.request.config import RunRequest, WorldRequest
from pipeedge.request.options import DoctorCommand
from pipeedge.transport.base import Endpoint, Rendezvous
from pipeedge.transport.interfaces import is_loopback, link_address, use_interface
from pipeedge.transport.membership import Membership, load_membership, open_to_all

__all__ = ["examine"]

_LEAST_LIVENESS_S = 30.0
"""Importing torch can keep a small board from beating for seconds."""


def examine(command: DoctorCommand, say: Callable[[str], None], probe: Probe | None = None) -> int:
    """Examine this rank and, with the others, the run.

    Args:
        command: Run to examine.
        say: Function that prints a line for the user.
        probe: Probe of this machine.

    Returns:
        The exit status.
    """
    return _Examination(command, say, probe or Probe()).run()


class _Facts(Struct, frozen=True):
    """Facts and findings of a rank, before it knows the others."""

    options: Options
    """Facts that rank 0 compares and checks."""
    findings: tuple[Finding, ...]


class _ExaminationPlan(Struct, frozen=True):
    """Findings of rank 0, and the links to be measured."""

    findings: tuple[Finding, ...]
    links: LinkRound | None
    """Links to measure, or None."""


class _Stats(Struct, frozen=True):
    """Observations of a rank, made together with the others."""

    clock: Number
    """Time of day at the start by its clock, in seconds."""
    links: MeasuredLinks = MeasuredLinks()


_Session: TypeAlias = Session[_Facts, _ExaminationPlan, _Stats]

_FORMS: Forms[_Facts, _ExaminationPlan, _Stats] = Forms(
    facts=reader(_Facts), plan=reader(_ExaminationPlan), stats=reader(_Stats)
)


class _Examination:
    """The examination of one rank. Built once, run once."""

    def __init__(self, command: DoctorCommand, say: Callable[[str], None], probe: Probe) -> None:
        self._request: RunRequest = command.request
        self._world: WorldRequest = command.request.world
        self._rank = command.request.world.rank
        self._neighbors_file: Path | None = command.neighbors_file
        self._probe = probe
        self._notes = FindingLog(self._rank, say)
        self._files: SpecFiles | None = None  # on rank 0, once it has reviewed all ranks

    def run(self) -> int:
        """Examine this rank, alone and with the others; return the exit status."""
        try:
            membership = self._look_at_key()
            network = look_at_network(self._world, self._notes)
            self._examine_together(network, membership)
        except ExaminationOver:
            pass
        findings = self._notes.findings
        problems = sum(finding.level is Level.PROBLEM for finding in findings)
        warnings = sum(finding.level is Level.WARNING for finding in findings)
        if problems:
            self._notes.say(f"not fit to run: {count(problems, 'problem')}, {count(warnings, 'warning')}")
        else:
            self._notes.say("fit to run" + (f", with {count(warnings, 'warning')}" if warnings else ""))
        return exit_status(findings)

    def _look_at_key(self) -> Membership | None:
        """Return the key of the run, if this rank has one that can be used."""
        try:
            membership = load_membership(self._world.keys)
        except RequestError as error:
            self._notes.add_own(problem_from("key", error))
            raise ExaminationOver from error
        if membership is not None:
            self._notes.add_own(ok("key", f"{membership.source}, fingerprint {membership.fingerprint}"))
        elif self._rank == 0 and self._world.size > 1 and not is_loopback(self._world.addr):
            self._notes.add(warning("key", open_to_all()))
        return membership

    def _examine_together(self, network: NetworkLook, membership: Membership | None) -> None:
        world, began = self._world, time.monotonic()
        callbacks = Callbacks(
            # Always busy: the hub ends no examination because nothing seems to move.
            status=lambda: RankStatus(busy=("examining", time.monotonic() - began)),
            notify=self._notes.say,
        )
        session: _Session = Session(
            world,
            _FORMS,
            callbacks,
            terms=Terms(world.timeout_s, silence_s=max(_LEAST_LIVENESS_S, world.timeout_s)),
            host=self._probe.machine().host,
            membership=membership,
        )
        try:
            with session:
                self._open_hub(session)
                self._connect(session, network.resolved)
                with closing(link_endpoint(self._request.transport, world, membership)) as endpoint:
                    self._exchange(session, network, endpoint)
        except PipeEdgeError as error:
            self._notes.add(problem_from("ranks", error))
            raise ExaminationOver from error

    def _open_hub(self, session: _Session) -> None:
        world = self._world
        try:
            session.open_hub()
        except RequestError as error:
            self._notes.add(problem_from("port", error).of(0))
            raise ExaminationOver from error
        if self._rank == 0 and world.size > 1:
            self._notes.add_own(ok("port", f"{world.port} is free at {world.addr}"))
            self._notes.say(f"waiting up to {figure(world.timeout_s)} s for {world.size - 1} more to start")

    def _connect(self, session: _Session, resolved: str) -> None:
        """Connect to rank 0 and introduce this rank, before anything that takes time."""
        world = self._world
        try:
            session.connect()
        except DeadlineError as error:
            self._notes.add_own(
                diagnose_dial(
                    world.addr,
                    world.port,
                    error.__cause__ if isinstance(error.__cause__, OSError) else None,
                    resolved=resolved,
                    timeout_s=world.timeout_s,
                    own=own_addresses(),
                )
            )
            raise ExaminationOver from error
        except PipeEdgeError as error:  # somebody answers, but with another key or none
            self._notes.add_own(problem_from("key", error))
            raise ExaminationOver from error
        if self._rank != 0:
            self._notes.add_own(ok("port", f"rank 0 answers at {world.addr}:{world.port}"))

    def _exchange(self, session: _Session, network: NetworkLook, endpoint: Endpoint) -> None:
        """Tell the others what this rank is, hear the plan, and measure its links."""
        look = look_at_run(self._request, self._notes, self._probe, self._neighbors_outputs())
        own = _Facts(dict(look.facts), _as_sent(self._notes.findings))
        world, place = self._world, None
        interface = network.interface or ""
        if world.size > 1:
            place = endpoint.listen(link_address(interface, world.addr, world.port))
        plan = session.agree(own, lambda known: self._decide(known, look), place=place)
        self._note_findings(plan)
        order = session.prepare()
        session.start(order)
        clock = self._probe.clock()  # every rank hears the start at the same moment, nearly
        links = MeasuredLinks()
        if plan.links is not None and self._rank in plan.links.members:
            use_interface(interface)
            rendezvous = Rendezvous(
                world.addr, plan.links.members, order.places, world.timeout_s, order.epoch, order.token
            )
            transport = endpoint.transport()
            links = measure_links(plan.links, self._rank, transport, rendezvous, session.member)
        told = session.finish(_Stats(clock, links))
        pairs = () if plan.links is None else plan.links.pairs
        measured = {
            link: told[source].links.estimates[link]
            for link, (source, _) in enumerate(pairs)
            if source in told and link in told[source].links.estimates
        }
        error = next((one.links.error for one in told.values() if one.links.error is not None), None)
        self._conclude({rank: one.clock for rank, one in told.items()}, pairs, measured, error)

    def _decide(self, known: Mapping[int, _Facts], look: RunLook) -> Announcement[_ExaminationPlan]:
        """Examine, on rank 0, all ranks together, and decide which links to measure."""
        from pipeedge.doctor.review import review

        findings: list[Finding] = []
        facts = {rank: one.options for rank, one in known.items()}
        for rank, one in known.items():
            with decoding(f"the facts message of rank {rank}"):
                check_facts(one.options)
            findings += one.findings
        pairs: list[tuple[int, int]] = []
        members: tuple[int, ...] = ()
        if look.model is not None:
            reviewed = review(self._request, look.model, facts)
            self._files = reviewed.files
            findings += reviewed.findings
            if reviewed.plan is not None:
                links = reviewed.plan.links(look.model)
                pairs = [(end.source, end.destination) for end in links if end.source != end.destination]
                members = reviewed.plan.participants
        with self._notes.recording("output"):
            self._check_neighbors_file(look)
        findings += [finding for finding in _as_sent(self._notes.findings) if finding not in findings]
        measured = None
        if pairs and exit_status(findings) == 0:
            measured = LinkRound(tuple(pairs), members)
        return Announcement(
            _ExaminationPlan(tuple(findings), measured), participants=tuple(range(self._world.size))
        )

    def _neighbors_outputs(self) -> list[OutputFile]:
        path = self._neighbors_file
        return [] if path is None else [OutputFile("--neighbors-file", path)]

    def _check_neighbors_file(self, look: RunLook) -> None:
        path = self._neighbors_file
        if path is None:
            return
        if look.model is not None:
            from pipeedge.data.protected_files import check_run_outputs

            check_run_outputs(self._request, look.model, self._neighbors_outputs())
        if path.is_file():
            load_neighbors(path)
        check_writable(path, "--neighbors-file")

    def _note_findings(self, plan: _ExaminationPlan) -> None:
        """Note the findings of the other ranks. Each rank has printed its own good ones, rank 0 the rest."""
        known = _as_sent(self._notes.findings)
        for finding in plan.findings:
            if finding not in known:
                self._notes.add(finding, quiet=self._rank != 0 or finding.rank is not None)

    def _conclude(
        self,
        clocks: Mapping[int, float],
        pairs: Sequence[tuple[int, int]],
        measured: Mapping[int, Estimate],
        error: str | None,
    ) -> None:
        """Note what clocks and links say; on rank 0 also compare them with the files and save them."""
        quiet = self._rank != 0
        self._notes.add(*check_clocks(clocks), quiet=quiet)
        if not pairs:
            return
        self._notes.add(*check_links(pairs, measured, error), quiet=quiet)
        if self._rank != 0:
            return
        hosts = self._request.schedule.hosts or tuple(str(rank) for rank in range(self._world.size))
        if self._files is not None:
            self._notes.add(*check_promises(pairs, measured, self._files, hosts))
        path = self._neighbors_file
        steady = {
            (hosts[pairs[link][0]], hosts[pairs[link][1]]): estimate.link
            for link, estimate in measured.items()
            if estimate.steady
        }
        if path is not None and steady:
            with self._notes.recording("output"):
                add_links(path, steady)
                self._notes.add(ok("output", f"{count(len(steady), 'link')} written to {path}"))


def _as_sent(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(finding.as_sent() for finding in findings)
