"""Run a session, in which the ranks of a program meet, agree on a plan, start together and end together.

    every rank   connect ─hello─> brief ─> facts ──┐                            ┌─> ready ─┐
    rank 0 (hub)           all facts ─> decide ─> plan or refusal, prepare ─────┘         run ─> work ─┐
    every rank                                                                  done ─> summary <──────┘

The runtime, training, the doctor and the auction run this protocol. A program supplies the types of its
facts, its plan and its stats (``Forms``), and a function that makes the plan from all facts. Rank 0 may brief
the others before they state their facts; a session may continue without ranks that do not come, and may end
with the plan. It reports every failure in its ``with`` block to the other ranks, and traces the loss of a
peer to its cause.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, TypeVar

from msgspec import Raw

from pipeedge.base.errors import (
    EXIT_FAULT,
    EXIT_PEER,
    PeerError,
    PeerFailedError,
    PipeEdgeError,
    one_line,
)
from pipeedge.base.fields import decoding, encode
from pipeedge.control.admission import Newcomer, Terms
from pipeedge.control.announcement import Announcement
from pipeedge.control.changing import Dropped, RunSnapshot, Switched
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.forms import Forms, GoingOn, Refusal
from pipeedge.control.hub import Decision, Hub
from pipeedge.control.hub_address import HubAddress
from pipeedge.control.hub_client import Callbacks, HubClient
from pipeedge.control.messages import Brief, Planned, Prepare, Summary
from pipeedge.control.plans import Wanted
from pipeedge.request.config import WorldRequest
from pipeedge.transport.frame import FrameError
from pipeedge.transport.interfaces import listen
from pipeedge.transport.membership import Membership
from pipeedge.transport.place import TOKEN_BYTES, Place
from pipeedge.transport.rendezvous import agent_store

__all__ = ["Session", "report_early_failure"]

_Facts = TypeVar("_Facts")
_Plan = TypeVar("_Plan")
_Stats = TypeVar("_Stats")


class Session(Generic[_Facts, _Plan, _Stats]):
    """One rank's part in a session. A context manager, which closes everything that ``open`` opened.

    Args:
        world: This rank, all ranks, and the address where they meet.
        forms: Message format of the facts, the plan and the stats.
        callbacks: Functions that the member's thread calls.
        terms: Terms on which ranks join (all are required, within the timeout of ``world``).
        host: Name of this rank's host (the host name of this machine).
        membership: Key of the run, or None to speak in clear.
    """

    def __init__(
        self,
        world: WorldRequest,
        forms: Forms[_Facts, _Plan, _Stats],
        callbacks: Callbacks,
        *,
        terms: Terms | None = None,
        host: str | None = None,
        membership: Membership | None = None,
    ) -> None:
        self._world = world
        self._membership = membership
        self._forms = forms
        self._callbacks = callbacks
        self._terms = terms or Terms(world.timeout_s)
        self._silence_s = self._terms.silence_s or self._terms.appear_s
        self._host = socket.gethostname() if host is None else host
        self._stack = ExitStack()
        # No other rank connects to a single one, so it uses any free port, and several can run at once.
        self._port = world.port if world.size > 1 else 0
        self._agent: Any = None
        self._hub: Hub | None = None
        self._member: HubClient | None = None

    def __enter__(self) -> Session[_Facts, _Plan, _Stats]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def open(self, brief: object = None) -> HubClient:
        """Open the hub on rank 0, connect to it on every rank, and introduce this rank.

        Args:
            brief: On rank 0, what every rank must know before it states its facts.

        Raises:
            RequestError: Rank 0 cannot listen at its address, or the address cannot be resolved.
            PeerError: Rank 0 did not appear in time.
        """
        self.open_hub(brief)
        return self.connect()

    def open_hub(self, brief: object = None) -> None:
        """Open the hub on rank 0; do nothing on other ranks."""
        world = self._world
        if world.agent_store:
            # torchrun's agent listens at --port already; rank 0 announces its own port through it.
            self._agent = agent_store(world.addr, world.port, world.agent_run, timeout_s=world.timeout_s)
            self._port = 0
        if world.rank != 0:
            return
        listener = listen(world.addr, self._port)
        self._hub = self._stack.enter_context(
            Hub(
                listener,
                world_size=world.size,
                timeout_s=self._silence_s,
                terms=replace(
                    self._terms,
                    brief=None if brief is None else Raw(encode(brief)),
                    max_message_bytes=self._forms.max_message_bytes,
                ),
                membership=self._membership,
            )
        )
        self._port = listener.getsockname()[1]
        if self._agent is not None:
            self._agent.set("hub", str(self._port))

    def connect(self) -> HubClient:
        """Connect to the hub and introduce this rank. From now on, failures are reported to the hub."""
        world = self._world
        if self._agent is not None and world.rank != 0:
            try:
                self._port = int(self._agent.get("hub"))
            except RuntimeError as error:
                raise PeerFailedError(f"rank 0 did not announce itself through torchrun: {error}") from error
        hub_at = HubAddress.of(world.addr, self._port, self._membership)
        member = self._stack.enter_context(
            HubClient(
                hub_at.dial(self._terms.appear_s, self._callbacks.show_waiting),
                rank=world.rank,
                timeout_s=self._silence_s,
                callbacks=self._callbacks,
                hub_at=hub_at,
            )
        )
        self._stack.enter_context(_report_failures(member))
        member.hello(world_size=world.size, host=self._host)
        self._member = member
        return member

    @property
    def serves_hub(self) -> bool:
        """Whether this rank is the one that serves the hub."""
        return self._hub is not None

    @property
    def member(self) -> HubClient:
        """This rank's connection to the hub."""
        if self._member is None:
            raise PipeEdgeError("the session is not connected")
        return self._member

    @property
    def left_out(self) -> Mapping[int, Failure]:
        """Reason why the session goes on without a rank, for each that is left out. Known to rank 0."""
        return {} if self._hub is None else self._hub.left_out()

    def brief(self) -> Raw:
        """Wait for what rank 0 tells every rank when it opens the session, and return it as JSON."""
        return self.member.wait(Brief).brief

    def agree(
        self,
        facts: _Facts,
        decide: Callable[[Mapping[int, _Facts]], Announcement[_Plan] | Refusal],
        going_on: GoingOn[_Facts, _Plan] | None = None,
        place: Place | None = None,
    ) -> _Plan:
        """Send the facts of this rank and return the plan.

        Args:
            facts: Facts of this rank.
            decide: Called on rank 0 with the facts of all ranks that are not left out, by rank.
            going_on: Further decisions of rank 0, if the session goes on after failures.
            place: Place at which this rank listens for others, who hear it with each plan.

        Raises:
            PipeEdgeError: There is no plan; every rank has the same line.
        """
        self.state(facts, place)
        if self.serves_hub and self.decide(decide) and going_on is not None:
            further = threading.Thread(
                target=self._decide_further, args=(going_on,), name="planner", daemon=True
            )
            further.start()
        return self.plan()

    def _decide_further(self, going_on: GoingOn[_Facts, _Plan]) -> None:
        hub = self._hub
        while hub is not None and (task := hub.next_task()) is not None:
            hub.apply(self._answer(going_on, task))

    def _answer(self, going_on: GoingOn[_Facts, _Plan], task: Newcomer | Wanted) -> Decision:
        """Decide about a process that has come, or about the plan that is wanted."""
        if isinstance(task, Newcomer):
            refusal = self._review(going_on, task)
            return lambda state, now: state.judge_newcomer(task.connection, refusal, now)
        decision = self._plan_again(going_on, task)
        if isinstance(decision, Refusal):
            failure = Failure(FailureKind.REFUSED, decision.line, exit_code=decision.exit_code)
            return lambda state, now: state.give_up(task.members, failure, now)
        announcement = _encoded(decision)
        return lambda state, now: state.plan_again(task.members, announcement, now)

    def _review(self, going_on: GoingOn[_Facts, _Plan], newcomer: Newcomer) -> str | None:
        """Return why a process cannot be a spare, or None if it can."""
        try:
            return going_on.review(newcomer.rank, self._forms.facts(newcomer.facts))
        except Exception as error:  # whatever it says, it must not end the run of the others
            return f"the facts of rank {newcomer.rank} cannot be used: {one_line(error)}"

    def _plan_again(self, going_on: GoingOn[_Facts, _Plan], wanted: Wanted) -> Announcement[_Plan] | Refusal:
        """Return the plan for the members of now, or why there is none."""
        try:
            facts = {rank: self._forms.facts(text) for rank, text in wanted.facts.items()}
            return going_on.plan(wanted, facts)
        except PipeEdgeError as error:
            return Refusal(f"{wanted.cause}; {one_line(error)}", error.exit_code)
        except Exception as error:  # the others must not wait for a plan forever
            return Refusal(f"{wanted.cause}; rank 0 failed to plan again: {one_line(error)}", EXIT_FAULT)

    def snapshot(self) -> RunSnapshot | None:
        """On rank 0, return what is known of the run; None before its plan and after its end."""
        return None if self._hub is None else self._hub.snapshot()

    def change_to(self, announcement: Announcement[_Plan], since: RunSnapshot) -> Switched | Dropped:
        """On rank 0, prepare another plan beside the one that runs, and wait until it has taken over or not.

        Called in a thread of its own, one change at a time, in a session that goes on after failures.

        Args:
            announcement: The plan for the members of ``since``; its ``line`` is shown when it is prepared.
            since: What the decision was based on.
        """
        if self._hub is None:
            raise PipeEdgeError("only rank 0 decides")
        return self._hub.change_to(since, _encoded(announcement))

    def state(self, facts: _Facts, place: Place | None = None) -> None:
        """Send the facts of this rank, and the place at which it listens for others, if it does."""
        self.member.facts(facts, place)

    def decide(
        self,
        decide: Callable[[Mapping[int, _Facts]], Announcement[_Plan] | Refusal],
        review: Callable[[int, _Facts], Refusal | None] = lambda rank, facts: None,
    ) -> bool:
        """On rank 0, which has sent its own facts, wait for those of the others and announce the decision.

        Returns whether further decisions may follow, because the session goes on after failures.

        Args:
            decide: Called with the facts of all ranks that are not left out, by rank.
            review: Called before, with each rank and its facts as they come; a refusal ends the session at
                once.
        """
        if self._hub is None:
            raise PipeEdgeError("only rank 0 decides")
        decision = self._decision(self._hub, decide, review)
        if isinstance(decision, Refusal):
            self._hub.refuse(decision.line, decision.exit_code)
        elif decision is not None:
            announcement = _encoded(decision)
            self._hub.apply(lambda state, now: state.plan(announcement, now))
            return decision.goes_on
        return False

    def _decision(
        self,
        hub: Hub,
        decide: Callable[[Mapping[int, _Facts]], Announcement[_Plan] | Refusal],
        review: Callable[[int, _Facts], Refusal | None],
    ) -> Announcement[_Plan] | Refusal | None:
        """Return the decision on the facts of all ranks; None if the session has failed already."""
        facts: dict[int, _Facts] = {}
        for rank, text in hub.arrivals():
            with decoding(f"the facts message of rank {rank}"):
                facts[rank] = self._forms.facts(text)
            refusal = review(rank, facts[rank])
            if refusal is not None:
                return refusal
        gathered = hub.gather()
        return None if gathered is None else decide({rank: facts[rank] for rank in gathered})

    def plan(self) -> _Plan:
        """Wait for the plan and return it.

        Raises:
            PipeEdgeError: There is no plan; every rank has the same line.
        """
        return self.read_plan(self.member.wait(Planned).plan)

    def read_plan(self, plan: Raw) -> _Plan:
        """Return the plan that rank 0 has sent as JSON."""
        with decoding("the plan of rank 0"):
            return self._forms.plan(plan)

    def prepare(self) -> Prepare:
        """Wait until this rank, a participant of a session of one epoch, is to prepare its part.

        Raises:
            PipeEdgeError: The session failed.
        """
        order = self.member.turns.next()
        if order is None:
            raise PipeEdgeError("the session is over before it has begun")
        return order.prepare

    def start(self, prepared: Prepare) -> None:
        """Report that this rank has prepared its part, and wait until all have."""
        self.member.turns.ready(prepared.epoch)

    def finish(self, stats: _Stats) -> Mapping[int, _Stats]:
        """Report that this rank has done its part; return the stats of all ranks, by rank."""
        self.member.done(stats)
        return self.summary()

    def summary(self) -> Mapping[int, _Stats]:
        """Wait for the end of the session; return the stats of all ranks, by rank."""
        stats = {}
        for rank, text in self.member.wait(Summary).stats.items():
            with decoding(f"the result of rank {rank}"):
                stats[rank] = self._forms.stats(text)
        return stats


def _encoded(announcement: Announcement[_Plan]) -> Announcement[Raw]:
    """Return an announcement as the hub sends it, with a token of its own."""
    return announcement.encoded(secrets.token_bytes(TOKEN_BYTES))


@contextmanager
def _report_failures(member: HubClient) -> Iterator[None]:
    """Report failures to the other ranks, and trace the loss of a peer to its cause."""
    try:
        yield
    except BaseException as error:
        if error is member.error:
            raise  # it came from the hub, so all ranks have it
        if isinstance(error, PeerError) and not isinstance(error, FrameError):
            found = member.explain(error)
            if found is error:
                raise  # with the cause that it has
            raise found from error
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        number = error.microbatch if isinstance(error, PipeEdgeError) else None
        member.failed("it was interrupted" if interrupted else one_line(error), number)
        raise


@contextmanager
def report_early_failure(world: WorldRequest, membership: Membership | None = None) -> Iterator[None]:
    """Tell ranks that connect soon why rank 0 failed before it opened the session."""
    try:
        yield
    except PipeEdgeError as error:
        if world.rank == 0 and world.size > 1 and not world.agent_store:
            with (
                suppress(PipeEdgeError),
                Hub(
                    listen(world.addr, world.port),
                    world_size=world.size,
                    timeout_s=world.timeout_s,
                    membership=membership,
                ) as hub,
            ):
                hub.refuse(f"rank 0 failed: {one_line(error)}", EXIT_PEER)
        raise
