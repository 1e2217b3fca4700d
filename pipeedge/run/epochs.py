"""The epochs of one rank, in a run that goes on after failures.

    [ next ] ──> connect, load, open links ──> ready ──> stream ──all passed──> wait for the end ──> finish
       ^                          └──────────────────────┴──the hub stops the epoch──┐
       └──stopped: all threads have ended, all links are closed <────────────────────┘

A rank without a part waits in ``next`` as a spare. What lasts for the whole run is the data rank's ledger,
its open output, the metrics, and the layers that this rank has loaded last.
"""

from __future__ import annotations

import dataclasses
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pipeedge.base.crew import Crew
from pipeedge.base.errors import PeerError, one_line
from pipeedge.base.heap import keep_freed_memory
from pipeedge.base.machine import process_age_s
from pipeedge.base.wording import count
from pipeedge.control.epoch_messages import Prepare
from pipeedge.control.turns import EpochStoppedError, Turns
from pipeedge.observe.monitoring import Exporter, Monitor
from pipeedge.observe.records import EpochRecord
from pipeedge.plan.planning import Plan
from pipeedge.run.context import RankContext
from pipeedge.run.decision import RunSession
from pipeedge.run.outcome import finish
from pipeedge.run.parts import Parts, open_monitor
from pipeedge.run.phases import Prepared, connect, open_parts, results_kept, stream
from pipeedge.run.shelf import Shelf

if TYPE_CHECKING:  # only the data rank needs it
    from pipeedge.data.ends import Watcher
    from pipeedge.report.run_report import RunReport
    from pipeedge.run.under_way import DataProgress

__all__ = ["take_turns"]

_STAGES_AHEAD = 3
"""Number of microbatches under way for each stage: one computes, one waits for it, one is on its way."""
_JOIN_S = 0.05
"""Seconds between two attempts to wake the threads of a stopped epoch."""


def take_turns(context: RankContext, session: RunSession, prepared: Prepared) -> RunReport | None:
    """Take part in the epochs of a run until its results are complete; return what ``finish`` does.

    Raises:
        PipeEdgeError: This rank failed, or the run did.
    """
    rank = _Rank(context, session, prepared)
    with rank.kept:
        while (order := session.member.turns.next()) is not None:
            if rank.take(order):
                break
    if rank.turn is None or rank.turn.parts is None:
        if session.serves_hub:
            session.summary()
        return None
    # Not with the crew of the last epoch, which may have been stopped.
    plan, parts = rank.turn.plan, rank.turn.parts
    return finish(context, session, plan, parts, startup_s=rank.startup_s, device=prepared.device)


@dataclasses.dataclass
class _Turn:
    """One epoch of this rank."""

    context: RankContext
    """This rank, with a crew of its own for the epoch."""
    epoch: int
    plan: Plan
    parts: Parts | None = None


class _Rank:
    """What lasts from epoch to epoch."""

    def __init__(self, context: RankContext, session: RunSession, prepared: Prepared) -> None:
        self._context = context
        self._session = session
        self._prepared = prepared
        self._turns: Turns = session.member.turns
        self._log: _EpochLog | None = None
        if prepared.progress is not None:
            watcher = None if prepared.data is None else prepared.data.watcher
            self._log = _EpochLog(context, prepared.progress, self._turns, prepared.exporter, watcher)
        self._monitor: Monitor | None = None
        self._shelf = Shelf(prepared.device)
        self.kept = ExitStack()
        """Closes the output and the metrics."""
        self.turn: _Turn | None = None
        """The latest epoch in which this rank has a part."""
        self.startup_s = 0.0
        """Seconds from the start of the process to the first microbatch."""

    def take(self, order: Prepare) -> bool:
        """Go through one epoch. Return whether the results are complete; if not, another one may follow.

        Raises:
            PipeEdgeError: This rank failed, or the run did.
        """
        plan = self._session.read_plan(order.plan)
        self._context.activity.restart()
        crew = Crew()
        turn = self.turn = _Turn(dataclasses.replace(self._context, crew=crew), order.epoch, plan)
        member, transport = self._session.member, self._context.transport

        def stop() -> None:
            crew.stop(EpochStoppedError())
            transport.abort()

        member.on_end(lambda: crew.stop(member.error))
        self._turns.on_stop(stop)
        try:
            self._work(turn)
            if turn.parts is not None and turn.parts.data is not None:
                return True  # it has all results, so it need not wait for word from others
        except EpochStoppedError:
            pass
        except PeerError as error:
            if error is member.error:
                raise
            self._report(turn, error)
        if not self._has_all and not self._turns.wait_for_end():
            self._stop(turn)
            self._turns.stopped(None if self._log is None else self._log.stopped())
            return False
        self._stop(turn)
        return True

    def _work(self, turn: _Turn) -> None:
        """Prepare the part of this rank, and let microbatches flow until all have passed."""
        context, plan, prepared = turn.context, turn.plan, self._prepared
        if self._log is not None:
            self._log.prepared(turn.epoch, plan)
        connect(context, plan, prepared.interface, turn.epoch)
        stage = self._shelf.take(context, plan)
        if self._monitor is None:
            self._monitor = open_monitor(context, plan, prepared.exporter)
            self.kept.enter_context(self._monitor)
        turn.parts = open_parts(context, plan, self._session.member, prepared, stage, self._monitor)
        keep_freed_memory()
        self._turns.ready(turn.epoch)
        if not self.startup_s:
            self.startup_s = process_age_s()
            self.kept.enter_context(results_kept(context, prepared.data))
        if self._log is not None:
            self._log.runs()
        stream(context, plan, turn.parts)

    @property
    def _has_all(self) -> bool:
        """Whether this rank is the data rank and has written all results."""
        progress = self._prepared.progress
        return progress is not None and progress.under_way.complete

    def _report(self, turn: _Turn, error: PeerError) -> None:
        """Tell the hub which link is broken; without a name it is taken for that to rank 0's rendezvous."""
        peer = 0 if error.peer is None else error.peer
        if peer != self._context.rank:
            self._turns.link_lost(turn.epoch, peer, one_line(error))

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


class _EpochLog:
    """What the data rank notes of each epoch, and tells the user."""

    def __init__(
        self,
        context: RankContext,
        progress: DataProgress,
        turns: Turns,
        exporter: Exporter | None,
        watcher: Watcher | None,
    ) -> None:
        self._context = context
        self._progress = progress
        self._exporter = exporter
        self._watcher = watcher
        self._turns = turns
        self._fed = 0  # of the last epoch, and not written
        self._silent_since: float | None = None
        self._repeated = 0  # since then
        self._record: EpochRecord | None = None
        self._prepared_at = 0.0

    def stopped(self) -> int:
        """Note that the epoch has stopped; return the lowest number of a microbatch that is not written."""
        self._fed = self._progress.under_way.fed
        self._repeated += self._fed
        if self._silent_since is None:
            self._silent_since = self._last_sign()
        return self._progress.under_way.written

    def _last_sign(self) -> float:
        """Return the time since which results are missing; while nothing is asked, none are."""
        last, fed_at = self._progress.collected.last_at, self._progress.under_way.oldest_fed_at
        if self._watcher is not None:  # an input without end: the last result may be hours ago
            return self._turns.stopped_at if fed_at is None else max(fed_at, last or 0.0)
        return self._turns.stopped_at if last is None else last

    def prepared(self, epoch: int, plan: Plan) -> None:
        """Note that an epoch is prepared."""
        now = time.perf_counter()
        self._prepared_at = now
        waiting_s = max(0.0, now - self._turns.stopped_at) if self._silent_since is not None else 0.0
        self._record = EpochRecord(
            epoch,
            plan.schedule,
            0.0,
            cause=plan.cause,
            lost=plan.lost,
            waiting_s=waiting_s,
            repeated=self._fed,
        )
        window = _STAGES_AHEAD * len(plan.schedule.stages)
        self._progress.under_way.restart(epoch, window)
        if self._watcher is not None:
            self._watcher.prepares(epoch, plan.cause, plan.lost)

    def runs(self) -> None:
        """Note that the epoch runs."""
        collected, record = self._progress.collected, self._record
        if record is None:
            return
        now, began = time.perf_counter(), self._progress.under_way.began_at
        preparing_s = now - self._prepared_at if self._silent_since is not None else 0.0
        record = replace(record, started_s=0.0 if began is None else now - began, preparing_s=preparing_s)
        collected.epochs.append(record)
        if self._exporter is not None:
            self._exporter.add_epoch(record)

        def came(at: float) -> None:
            if self._silent_since is None:
                return
            collected.epochs[-1] = replace(record, filling_s=max(0.0, at - now))
            seconds, again = at - self._silent_since, count(self._repeated, "microbatch")
            self._context.warn(
                f"the run goes on after {seconds:.1f} s without a result; {again} computed again"
            )
            if self._watcher is not None:
                self._watcher.goes_on(seconds, self._repeated)
            self._silent_since, self._repeated = None, 0

        collected.restart(came)
        if self._watcher is not None and not self._repeated:
            collected.went_on(now)  # nobody waits for a result
