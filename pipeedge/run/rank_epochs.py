"""The epochs of one rank of a run.

    [ next ] ──> connect, load, open links ──> ready ──> stream ──all passed──> wait for the end ──> finish
       ^                          └──────────────────────┴──the hub stops the epoch──┐   └──retired
       └──stopped: all threads have ended, all links are closed <────────────────────┘

Each epoch has a thread of its own, links of its own, and a crew of its own, and takes the steps of
``control.epoch_member``. While the plan changes, there are two of them: the second prepares beside the first,
and gets what follows once all ranks are ready. A run that does not go on after a loss has one epoch, which no
abort and no other epoch follows.

A rank without a part waits in ``next`` as a spare. What lasts for the whole run is the data rank's ledger,
its open output, the metrics, and the layers that this rank has loaded last.
"""

from __future__ import annotations

import dataclasses
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pipeedge.base.errors import PeerError, PipeEdgeError, one_line
from pipeedge.base.heap import keep_freed_memory
from pipeedge.base.machine import process_age_s
from pipeedge.control.epoch_member import MemberStep
from pipeedge.control.messages import Declined, LinkLost, Passed, Prepare, Stopped
from pipeedge.control.turns import EpochOrder, EpochStoppedError, Turns
from pipeedge.observe.monitoring import Monitor
from pipeedge.plan.planning import Plan
from pipeedge.run.context import RankContext
from pipeedge.run.decision import RunSession
from pipeedge.run.epoch_log import EpochLog
from pipeedge.run.loaded_layers import LoadedLayers
from pipeedge.run.outcome import finish, make_recording
from pipeedge.run.phases import Prepared, connect, open_parts, results_kept, stream, tell_plan
from pipeedge.run.rank_parts import Attempt, Parts, open_monitor

if TYPE_CHECKING:  # only the data rank needs it
    from pipeedge.report.run_report import RunReport

__all__ = ["take_turns"]

_MOST_RECORDED = 4 << 20
"""Number of characters that a rank records of all epochs but the last."""
_JOIN_S = 0.05
"""Seconds between two attempts to wake the threads of a stopped epoch."""
_LAST_ENDS_S = 2.0
"""Seconds to wait, once all results are written, for the links to end; then they are cut."""


def take_turns(context: RankContext, session: RunSession, prepared: Prepared) -> RunReport | None:
    """Take part in the epochs of a run until its results are complete; return what ``finish`` does.

    Raises:
        PipeEdgeError: This rank failed, or the run did.
    """
    rank = _Rank(context, session, prepared)
    with rank.kept:
        while (order := session.member.turns.next()) is not None:
            rank.begin(order)
    turn = rank.end()
    if turn is None or turn.parts is None:
        if session.serves_hub:
            session.summary()
        return None
    # Not with the crew of the epoch, which may have been stopped.
    of_last = dataclasses.replace(context, transport=turn.context.transport)
    return finish(
        of_last,
        session,
        turn.plan,
        turn.parts,
        startup_s=rank.startup_s,
        device=prepared.device,
        epoch=turn.epoch,
    )


@dataclasses.dataclass(eq=False)
class _Turn:
    """One epoch of this rank."""

    context: RankContext
    """This rank, with a crew, links and counters of its own for the epoch."""
    order: Prepare
    """Message of the hub that has begun it."""
    plan: Plan
    before: _Turn | None
    """The epoch that runs, if this one is to take its place, until it has ended."""
    is_change: bool
    """Whether it is prepared beside an epoch that runs."""
    parts: Parts | None = None
    runs: bool = False
    hidden: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set once its progress is not shown any longer."""

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self.order.epoch


class _Rank:
    """Objects that last from epoch to epoch."""

    def __init__(self, context: RankContext, session: RunSession, prepared: Prepared) -> None:
        self._context = context
        self._session = session
        self._prepared = prepared
        self._turns: Turns = session.member.turns
        self._log: EpochLog | None = None
        if prepared.progress is not None:
            watcher = None if prepared.data is None else prepared.data.watcher
            self._log = EpochLog(context, prepared.progress, self._turns, prepared.exporter, watcher)
        self._monitor: Monitor | None = None
        self._loaded = LoadedLayers(prepared.device)
        self.kept = ExitStack()
        """Closes the output and the metrics."""
        self._changing = threading.Lock()
        """Held while epochs are added or removed, by the main thread and by their own."""
        self._active: tuple[_Turn, ...] = ()
        self._latest: _Turn | None = None  # the latest epoch in which this rank had a part and that ran
        self.startup_s = 0.0
        """Seconds from the start of the process to the first microbatch."""
        self._telling = threading.Lock()
        """Held while an epoch's record is told, in several messages."""
        self._recorded = 0
        session.member.on_end(self._stop_all)

    def begin(self, order: EpochOrder) -> None:
        """Begin an epoch, in a thread of its own."""
        plan = self._session.read_plan(order.prepare.plan)
        with self._changing:
            # If it has ended since, the hub has stopped both.
            before = next((one for one in self._active if one.epoch == order.beside), None)
            turn = _Turn(self._context.for_epoch(), order.prepare, plan, before, order.beside is not None)
            self._active = (*self._active, turn)

        def stop() -> None:
            turn.context.crew.stop(EpochStoppedError())
            turn.context.transport.abort()

        self._turns.on_stop(turn.epoch, stop)
        self._context.threads.start(f"epoch {turn.epoch}", lambda: self._go_through(turn))

    def end(self) -> _Turn | None:
        """Stop what is left of the epochs; return the last one in which microbatches have passed here."""
        here = [turn for turn in self._active if turn.parts is not None]
        for turn in here:
            if turn is here[0] or (turn.parts is not None and turn.parts.microbatches):
                self._latest = turn
        for turn in self._active:
            # All results are written: links that carry no end mark soon lead to a rank that is lost.
            if turn is not self._latest or not turn.context.crew.join(_LAST_ENDS_S):
                self._stop(turn)
        self._loaded.clear()
        with self._telling:
            self._recorded = _MOST_RECORDED  # what follows is the last one's, and the end
        return self._latest

    def _stop_all(self) -> None:
        """Stop all epochs, as the run has failed."""
        error = self._session.member.error
        self._context.crew.stop(error)
        for turn in self._active:
            turn.context.crew.stop(error)

    def _go_through(self, turn: _Turn) -> None:
        """Go through one epoch, in its thread."""
        try:
            try:
                self._work(turn)
            except EpochStoppedError:
                pass
            except PeerError as error:
                if error is self._session.member.error or not turn.plan.goes_on:
                    raise
                self._report(turn, error)
            except PipeEdgeError as error:
                if turn.runs or not turn.is_change:
                    raise
                self._turns.say(Declined(turn.epoch, one_line(error)))
            finally:
                turn.hidden.set()
            self._close(turn)
        except BaseException as error:  # kept whole, to be raised in the main thread
            self._turns.fail(error)

    def _work(self, turn: _Turn) -> None:
        """Prepare the part of this rank, and let microbatches flow until all have passed."""
        parts, hidden = self._open(turn)
        stream(turn.context, turn.plan, parts, hidden)
        if self._has_all:
            self._turns.has_all()  # so it need not wait for word from others
        else:
            self._turns.say(Passed(turn.epoch, None if self._log is None else self._log.first_of_next))

    def _open(self, turn: _Turn) -> tuple[Parts, threading.Event | None]:
        """Prepare the part of this rank, and wait until all ranks are ready.

        Nothing of the epoch before is kept, which is to be freed while this one runs.

        Returns:
            The part, and what tells when the progress of the epoch before is no longer shown.
        """
        context, plan, prepared, before = turn.context, turn.plan, self._prepared, turn.before
        if self._log is not None and not turn.is_change:
            self._log.prepared(turn.epoch, plan)
        connect(context, plan, prepared.interface, turn.order)
        stage = self._loaded.take(self._context, plan, context.crew, beside=turn.is_change)
        if self._monitor is None:
            self._monitor = open_monitor(context, plan, prepared.exporter)
            self.kept.enter_context(self._monitor)
        attempt = Attempt(plan, turn.epoch, None if before is None else before.parts)
        parts = open_parts(context, self._session.member, attempt, prepared, stage, self._monitor)
        turn.parts = parts
        keep_freed_memory()  # not before: what loading frees is returned
        self._turns.ready(turn.epoch)
        turn.runs = True
        if before is None:
            tell_plan(plan, prepared.data)
        if not self.startup_s:
            self.startup_s = process_age_s()
            self.kept.enter_context(results_kept(context, prepared.data))
        if self._log is not None:
            if turn.is_change:
                self._log.changes(turn.epoch, plan)
            else:
                self._log.runs()
        return parts, None if before is None else before.hidden

    @property
    def _has_all(self) -> bool:
        """Whether this rank is the data rank and has written all results."""
        progress = self._prepared.progress
        return progress is not None and progress.ledger.complete

    def _report(self, turn: _Turn, error: PeerError) -> None:
        """Tell the hub which link is broken; without a name it is taken for that to rank 0."""
        peer = 0 if error.peer is None else error.peer
        if peer != self._context.rank:
            self._turns.say(LinkLost(turn.epoch, peer, one_line(error)))

    def _close(self, turn: _Turn) -> None:
        """Wait for the end of an epoch, and close what it has opened, unless the run has ended with it."""
        step = self._turns.wait_for_end(turn.epoch)
        if step is MemberStep.ENDED:
            return
        if step is MemberStep.SPARE:
            turn.context.transport.close()
        else:
            self._stop(turn)
        self._context.activity.drop(turn.context.activity)
        with self._changing:
            self._active = tuple(one for one in self._active if one is not turn)
            follower = next((one for one in self._active if one.before is turn), None)
            if follower is not None:
                follower.before = None
            if turn.runs and (step is not MemberStep.SPARE or follower is None):
                self._latest = turn
            if step is not MemberStep.SPARE:
                if turn.is_change and not turn.runs:
                    self._loaded.give_back()
            elif not self._active or self._active[-1] is follower:  # else the one after it sees to that
                self._loaded.keep_last()
        if step is MemberStep.STOPPING:
            dropped = turn.is_change and not turn.runs
            written = None if self._log is None else self._log.stopped(dropped=dropped)
            self._turns.say(Stopped(turn.epoch, written))
        self._record(turn)

    def _record(self, turn: _Turn) -> None:
        """Tell the data rank what was recorded of an epoch that has ended, as far as there is room for it."""
        if not turn.runs or turn.parts is None:
            return
        member = self._session.member
        text = make_recording(turn.context, member, turn.parts, turn.epoch).to_text()
        with self._telling:
            self._recorded += len(text)
            if self._recorded <= _MOST_RECORDED:
                member.record(f"\n{text}")

    def _stop(self, turn: _Turn) -> None:
        """End all threads and links of an epoch."""
        turn.context.crew.stop(EpochStoppedError())
        transport = turn.context.transport
        transport.abort()
        while not turn.context.crew.join(_JOIN_S):
            if self._session.member.error is not None:
                raise self._session.member.error
            transport.abort()  # again, as it may have been opened only now
        transport.close()
