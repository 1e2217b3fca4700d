"""The epochs of one rank of a run.

    [ next ] ──> connect, load, open links ──> ready ──> stream ──all passed──> wait for the end ──> finish
       ^                          └──────────────────────┴──the hub stops the epoch──┐   └──retired
       └──stopped: all threads have ended, all links are closed <────────────────────┘

Each epoch has a thread of its own, links of its own, and a crew of its own, and takes the steps of
``control.epoch_member``. While the plan changes, there are two of them: the second prepares beside the first,
and gets what follows once all ranks are ready. A run that does not go on after a loss has one epoch, which no
abort and no other epoch follows.

What a thread does when its epoch cannot go on is one table, ``_explain``:

    what was raised          in which epoch                        what the thread says, or does
    the epoch was stopped                                          nothing
    a peer or link is lost   of a run that goes on                 linklost, if it is no verdict
    any error of PipeEdge    of a change that does not run yet     declined
    anything else                                                  the rank fails

How an epoch ends is another, ``ENDINGS``; what is left when the run is complete, ``end`` closes:

    what the hub says        what the epoch was for                links    layers      the thread says
    retire                   microbatches have passed              close    keep last
    abort                    microbatches could pass               cut      keep all    stopped
    abort                    prepared alone, and has not run       cut      keep all    stopped
    abort                    prepared beside one that runs         cut      give back   stopped

A rank without a part waits in ``next`` as a spare. What lasts for the whole run is the data rank's ledger,
its open output, the metrics, and the layers that this rank has loaded last.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from msgspec import Raw

from pipeedge.base.errors import PeerError, PipeEdgeError, one_line
from pipeedge.base.fields import encode
from pipeedge.base.heap import keep_freed_memory
from pipeedge.base.machine import process_age_s
from pipeedge.control.epoch_member import MemberStep
from pipeedge.control.messages import Declined, LinkLost, Passed, Stopped
from pipeedge.control.turns import EpochOrder, EpochStoppedError, Turns
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.layers.decoder import DecoderStage
from pipeedge.observe.monitoring import Monitor
from pipeedge.plan.cache_owners import Standby
from pipeedge.plan.planning import Plan
from pipeedge.run.composition import Composition, compose, open_monitor
from pipeedge.run.context import EpochContext, Prepared, RankContext
from pipeedge.run.decision import RunSession
from pipeedge.run.epoch_log import EpochLog
from pipeedge.run.loaded_layers import LoadedLayers
from pipeedge.run.loading import begin_text
from pipeedge.run.outcome import finish, make_recording
from pipeedge.run.phases import connect, results_kept, stream, tell_plan

if TYPE_CHECKING:  # only the data rank needs it
    from pipeedge.report.run_report import RunReport

__all__ = ["ENDINGS", "Ending", "Layers", "Use", "take_turns"]

_MOST_RECORDED = 4 << 20
"""Number of characters that a rank records of all epochs but the last."""
_JOIN_S = 0.05
"""Seconds between two attempts to wake the threads of a stopped epoch."""
_LAST_ENDS_S = 2.0
"""Seconds to wait, once all results are written, for the links to end; then they are cut."""


class Use(enum.Enum):
    """How far an epoch has come on this rank."""

    PREPARED = "prepared"
    """It was prepared alone, and has not run."""
    BESIDE = "beside"
    """It was prepared beside one that runs, and has not run itself."""
    RAN = "ran"
    """Microbatches could pass."""


class Layers(enum.Enum):
    """What becomes of the layers that a rank has loaded when an epoch ends."""

    KEEP_ALL = "keep all"
    """The next epoch may need them."""
    KEEP_LAST = "keep last"
    """Those of the epoch are freed, as another one has taken its place."""
    GIVE_BACK = "give back"
    """Those of the epoch are freed, as the one before it goes on."""


@dataclasses.dataclass(frozen=True)
class Ending:
    """How an epoch ends on this rank."""

    cuts_links: bool
    """Whether its threads and links are ended early, rather than after the last microbatch."""
    layers: Layers
    is_told: bool
    """Whether the hub waits to hear that it has stopped."""


ENDINGS: Mapping[tuple[MemberStep, Use], Ending] = {
    (MemberStep.SPARE, Use.RAN): Ending(cuts_links=False, layers=Layers.KEEP_LAST, is_told=False),
    (MemberStep.STOPPING, Use.RAN): Ending(cuts_links=True, layers=Layers.KEEP_ALL, is_told=True),
    (MemberStep.STOPPING, Use.PREPARED): Ending(cuts_links=True, layers=Layers.KEEP_ALL, is_told=True),
    (MemberStep.STOPPING, Use.BESIDE): Ending(cuts_links=True, layers=Layers.GIVE_BACK, is_told=True),
}
"""Ending of an epoch, by the step that the hub wants of it and by its use; none once the run is complete."""


def take_turns(context: RankContext, session: RunSession, prepared: Prepared) -> RunReport | None:
    """Take part in the epochs of a run until its results are complete; return what ``finish`` does.

    Raises:
        PipeEdgeError: This rank failed, or the run did.
    """
    rank = _Rank(context, session, prepared)
    with rank.observed:
        with rank.kept:
            while (order := session.member.turns.next()) is not None:
                rank.begin(order)
        turn = rank.end()
    if turn is None or turn.parts is None:
        if session.serves_hub:
            session.summary()
        return None
    return finish(turn.epoch, session, turn.parts, startup_s=rank.startup_s, device=prepared.device)


@dataclasses.dataclass(eq=False)
class _Turn:
    """Progress of this rank in one epoch."""

    epoch: EpochContext
    before: _Turn | None
    """Progress in the epoch that runs, if this one is to take its place, until that has ended."""
    parts: Composition | None = None
    runs: bool = False
    hidden: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set once its progress is not shown any longer."""
    closed: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set once its links and copies are closed."""

    @property
    def use(self) -> Use:
        """How far the epoch has come."""
        if self.runs:
            return Use.RAN
        return Use.BESIDE if self.epoch.is_change else Use.PREPARED


class _Rank:
    """Objects that last from epoch to epoch."""

    def __init__(self, context: RankContext, session: RunSession, prepared: Prepared) -> None:
        self._context = context
        self._session = session
        self._prepared = prepared
        self._turns: Turns = session.member.turns
        self._log: EpochLog | None = None
        if prepared.progress is not None:
            watcher, text = None, None
            if prepared.data is not None:
                watcher, text = prepared.data.watcher, prepared.data.text
            self._log = EpochLog(context, prepared.progress, self._turns, prepared.exporter, watcher, text)
        self._monitor: Monitor | None = None
        self._loaded = LoadedLayers(prepared.device)
        self.kept = ExitStack()
        """Closes the output."""
        self.observed = ExitStack()
        """Closes the metrics, once the links have ended: the last samples are theirs."""
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
        plan, is_change = self._session.read_plan(order.prepare.plan), order.replaces is not None
        epoch = self._context.for_epoch(order.prepare, plan, is_change=is_change)
        with self._changing:
            # If it has ended since, the hub has stopped both.
            before = next((one for one in self._active if one.epoch.number == order.replaces), None)
            turn = _Turn(epoch, before)
            self._active = (*self._active, turn)

        def stop() -> None:
            epoch.crew.stop(EpochStoppedError())
            epoch.transport.abort()

        self._turns.on_stop(epoch.number, stop)
        self._context.program.threads.start(f"epoch {epoch.number}", lambda: self._go_through(turn))

    def end(self) -> _Turn | None:
        """Stop what is left of the epochs; return the last one in which microbatches have passed here."""
        here = [turn for turn in self._active if turn.parts is not None]
        used = [turn for turn in here if turn.parts is not None and turn.parts.microbatches]
        last = [self._latest, *here[:1], *used][-1]
        for turn in self._active:
            # All results are written: links that carry no end mark soon lead to a rank that is lost.
            if turn is not last or not turn.epoch.crew.join(_LAST_ENDS_S):
                self._stop(turn)
        self._loaded.clear()
        with self._telling:
            self._recorded = _MOST_RECORDED  # what follows is the last one's, and the end
        return last

    def _stop_all(self) -> None:
        """Stop all epochs, as the run has failed."""
        error = self._session.member.error
        for crew in (self._context.crew, *(turn.epoch.crew for turn in self._active)):
            crew.stop(error)

    # -- the thread of an epoch ---------------------------------------------------------------------

    def _go_through(self, turn: _Turn) -> None:
        """Go through one epoch, in its thread."""
        try:
            try:
                self._work(turn)
            except (EpochStoppedError, PipeEdgeError) as error:
                self._explain(turn, error)
            finally:
                turn.hidden.set()
            self._close(turn)
        except BaseException as error:  # kept whole, to be raised in the main thread
            self._turns.fail(error)

    def _work(self, turn: _Turn) -> None:
        """Prepare the part of this rank, and let microbatches flow until all have passed."""
        closed = None if turn.before is None else turn.before.closed
        parts, hidden = self._open(turn)
        self._stand_by(turn.epoch, parts, closed)
        stream(turn.epoch, parts, hidden)
        if self._has_all:
            self._turns.has_all()  # so it need not wait for word from others
        else:
            self._turns.say(Passed(turn.epoch.number, None if self._log is None else self._log.first_of_next))

    def _open(self, turn: _Turn) -> tuple[Composition, threading.Event | None]:
        """Prepare the part of this rank, and wait until all ranks are ready.

        Nothing of the epoch before is kept, which is to be freed while this one runs.

        Returns:
            The part, and what tells when the progress of the epoch before is no longer shown.
        """
        epoch, prepared, before = turn.epoch, self._prepared, turn.before
        number, plan = epoch.number, epoch.plan
        if self._log is not None and not epoch.is_change:
            self._log.prepared(number, plan)
        connect(epoch, prepared.interface)
        stage = self._loaded.take(self._context, plan, epoch.crew, beside=epoch.is_change)
        if not epoch.is_change:
            self._loaded.keep_standbys(self._standbys(plan), alone=stage is None)
        model = self._context.model
        if isinstance(model, DecoderModel) and prepared.data is not None:
            ends = self._loaded.take_ends(self._context, plan, epoch.crew)
            begin_text(model, plan, ends, prepared.data, is_change=epoch.is_change)
        if self._monitor is None:
            self._monitor = open_monitor(self._context, plan, prepared.exporter)
            self.observed.enter_context(self._monitor)
        member, monitor = self._session.member, self._monitor
        parts_before = None if before is None else before.parts
        parts = epoch.wait_for_links(
            prepared.interface, lambda: compose(epoch, member, prepared, stage, monitor, parts_before)
        )
        turn.parts = parts
        keep_freed_memory()  # not before: what loading frees is returned
        self._turns.ready(number)
        turn.runs = True
        if before is None:
            tell_plan(plan, prepared.data)
        if not self.startup_s:
            self.startup_s = process_age_s()
            self.kept.enter_context(results_kept(self._context, prepared.data))
        if self._log is not None:
            if epoch.is_change:
                self._log.changes(number, plan)
            else:
                self._log.runs()
        return parts, None if before is None else before.hidden

    def _stand_by(self, epoch: EpochContext, parts: Composition, closed: threading.Event | None) -> None:
        """Begin to take copies of what others have, once those of the epoch before are freed.

        Args:
            epoch: This rank in the epoch.
            parts: Its parts.
            closed: Set once an epoch that still runs is closed; None without one.
        """

        def load(standby: Standby, ended: threading.Event) -> DecoderStage | None:
            if closed is not None:
                closed.wait()
            return self._loaded.stand_by(self._context, epoch.plan, standby, epoch.crew, ended)

        if closed is not None and parts.receivers:
            epoch.crew.on_stop(closed.set)
        for one in parts.receivers:
            one.start(epoch.crew, load, self._loaded.wake)

    def _standbys(self, plan: Plan) -> list[Standby]:
        """Return what this rank stands by for."""
        return [one for one in plan.standbys if one.rank == self._context.rank]

    @property
    def _has_all(self) -> bool:
        """Whether this rank is the data rank and has written all results."""
        progress = self._prepared.progress
        return progress is not None and progress.ledger.complete

    def _explain(self, turn: _Turn, error: EpochStoppedError | PipeEdgeError) -> None:
        """Tell the hub why an epoch cannot go on here; raise an error that ends the rank."""
        epoch = turn.epoch
        if isinstance(error, EpochStoppedError):
            return
        if isinstance(error, PeerError):
            if error is self._session.member.error or not epoch.plan.goes_on:
                raise error
            # Without a name it is taken for the link to rank 0.
            peer = 0 if error.peer is None else error.peer
            if peer != self._context.rank:
                self._turns.say(LinkLost(epoch.number, peer, one_line(error)))
        elif turn.use is Use.BESIDE:
            self._turns.say(Declined(epoch.number, one_line(error)))
        else:
            raise error

    def _close(self, turn: _Turn) -> None:
        """Wait for the end of an epoch, and close what it has opened, unless the run has ended with it."""
        epoch = turn.epoch
        ending = ENDINGS.get((self._turns.wait_for_end(epoch.number), turn.use))
        if ending is None:
            return
        if ending.cuts_links:
            self._stop(turn)
        else:
            epoch.transport.close()
        self._context.activity.drop(epoch.activity)
        with self._changing:
            self._forget(turn, ending)
        turn.closed.set()
        if ending.is_told:
            written = None if self._log is None else self._log.stopped(dropped=turn.use is Use.BESIDE)
            copied = () if turn.parts is None else tuple(one.copied for one in turn.parts.receivers)
            self._turns.say(Stopped(epoch.number, written, Raw(encode(copied))))
        self._record(turn)

    def _forget(self, turn: _Turn, ending: Ending) -> None:
        """Let go of an epoch that has ended, and of layers that nobody needs any longer."""
        self._active = tuple(one for one in self._active if one is not turn)
        follower = next((one for one in self._active if one.before is turn), None)
        if follower is not None:
            follower.before = None
        if turn.runs and (ending.cuts_links or follower is None):
            self._latest = turn
        if ending.layers is Layers.GIVE_BACK:
            self._loaded.give_back()
        elif ending.layers is Layers.KEEP_LAST and all(one is follower for one in self._active):
            self._loaded.keep_last()  # if there are more, the one after it sees to that

    def _record(self, turn: _Turn) -> None:
        """Tell the data rank what was recorded of an epoch that has ended, as far as there is room for it."""
        if not turn.runs or turn.parts is None:
            return
        member = self._session.member
        text = make_recording(turn.epoch, member, turn.parts).to_text()
        with self._telling:
            self._recorded += len(text)
            if self._recorded <= _MOST_RECORDED:
                member.record(f"\n{text}")

    def _stop(self, turn: _Turn) -> None:
        """End all threads and links of an epoch."""
        crew, transport = turn.epoch.crew, turn.epoch.transport
        crew.stop(EpochStoppedError())
        transport.abort()
        while not crew.join(_JOIN_S):
            if self._session.member.error is not None:
                raise self._session.member.error
            transport.abort()  # again, as it may have been opened only now
        transport.close()
