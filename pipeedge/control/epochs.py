"""Rules of a session at the hub: which epoch is active, and what a loss changes. Pure.

                  ┌──────────────── a plan for the members of now
                  v                                        ┌─> COMPLETE   all results are written
    PLANNING ──────> PREPARING e ──all are prepared──> RUNNING e
    GATHERING         │                                    │
       │  │           └──────a member or a link is lost────┤
       │  └─> ENDED  no plan fits                          v
       └──────────all that are left have stopped─────── STOPPING
                                                           └─> ENDED  a rank is lost that is essential

    RUNNING e ──a better plan──> CHANGING ──all are prepared──> SWITCHING ──all has passed──> RUNNING e + 1
        ^                        e runs,                        e drains,
        │                        e + 1 is prepared              e + 1 runs
        └──all have dropped it── DROPPING <─┘ a fault of e + 1 alone

Every session is a sequence of *epochs*, each one attempt to run one plan, with a number of its own. What
happens next is in one table, ``TABLE``:

    step                 event       sent, and to whom                          next step
    GATHERING, PLANNING  PLAN        prepare e, to its participants             PREPARING
    GATHERING            OVERTAKEN                                              PLANNING
    PREPARING            PREPARED    run e, to its participants                 RUNNING
    PREPARING, RUNNING   FAULT       abort e, to all of it that are left        STOPPING
    RUNNING              CHANGE      prepare e + 1, to its participants         CHANGING
    CHANGING             PREPARED    run e + 1, to its participants             SWITCHING
    CHANGING             NEXT_FAULT  abort e + 1, to all of it that are left    DROPPING
    CHANGING, SWITCHING  FAULT       abort both, to all that are left           STOPPING
    SWITCHING            NEXT_FAULT  abort both, to all that are left           STOPPING
    SWITCHING            PASSED      retire e, to all of it that are left       RUNNING
    DROPPING             STOPPED                                                RUNNING
    DROPPING             FAULT       abort e, to all of it that are left        STOPPING
    STOPPING             STOPPED                                                PLANNING
    any that is active   COMPLETE    complete, to everybody                     COMPLETE
    any but ENDED        END         verdict, to everybody                      ENDED

An event without a row changes nothing. The *policy* decides which event a loss is (``losses.Losses``):

    what is lost or broken                                    event
    any participant, where the session does not go on         END
    rank 0, the data rank                                     END
    another participant of e                                  FAULT
    a participant of e + 1 alone, before it runs              NEXT_FAULT
    a rank without a part                                     none; all hear a notice
    a link of e, or nothing moves, for the first time         FAULT
    a link of e + 1 alone, before it runs                     NEXT_FAULT
    a link again, with nothing written in between             as its end that can be dismissed
    nothing moves again, or a microbatch fails a second time  END

After a failure, e + 1 is not prepared before all members that are left have stopped e. A loss while an epoch
is prepared is treated like one while it runs: there are no special cases for a second failure.

A *change* is for a better plan, with nothing lost: e + 1 is prepared beside e, and gets what the data rank
reads from the moment at which all are prepared. What e was fed before takes its way through e.

``Epochs`` uses neither sockets nor clocks: events go in, messages to send come out. Each effect in the table
is a function of it. Who makes events:

    plans          rank 0's decisions: PLAN, OVERTAKEN, CHANGE
    losses         ranks and links that are lost, and who does not stop in time: FAULT, NEXT_FAULT, END
    rank_messages  what members answer: PREPARED, STOPPED, PASSED, COMPLETE

The other end of the messages is ``pipeedge.control.epoch_member``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any, TypeAlias

from msgspec import Raw

from pipeedge.control.announcement import Announcement
from pipeedge.control.attempts import Attempts, EpochAttempt, Part
from pipeedge.control.changing import Dropped, Switched
from pipeedge.control.failures import Failure
from pipeedge.control.messages import Abort, Complete, Message, Prepare, Retire, Run, Verdict
from pipeedge.control.roster import Outgoing, Roster

__all__ = ["TABLE", "Causes", "Effect", "Epochs", "Event", "Step", "Table"]


class Step(enum.Enum):
    """Step of a session."""

    GATHERING = "gathering"
    """Ranks come and state their facts, until there is a first plan."""
    PLANNING = "planning"
    """The hub waits for a plan; no epoch is active."""
    PREPARING = "preparing"
    """The participants load their parts and open their links."""
    RUNNING = "running"
    CHANGING = "changing"
    """An epoch runs, and another one is prepared beside it."""
    DROPPING = "dropping"
    """An epoch runs, and the participants stop to prepare another one."""
    SWITCHING = "switching"
    """An epoch drains, and another one is fed."""
    STOPPING = "stopping"
    """The participants that are left stop all that is active."""
    COMPLETE = "complete"
    """The data rank has written all results; nothing that happens to a rank matters any longer."""
    ENDED = "ended"
    """The session has failed."""


class Event(enum.Enum):
    """Event that may lead to another step."""

    PLAN = "plan"
    """There is a plan for the members of now."""
    OVERTAKEN = "overtaken"
    """There is a plan, of which a participant has left meanwhile."""
    CHANGE = "change"
    """There is a better plan for them."""
    PREPARED = "prepared"
    """All that were asked to prepare have done so."""
    STOPPED = "stopped"
    """All that were asked to stop have done so."""
    PASSED = "passed"
    """All that the epoch was fed has passed all of its participants."""
    FAULT = "fault"
    """The epoch has lost a participant or a link, or nothing moves."""
    NEXT_FAULT = "next fault"
    """The next epoch has lost a participant or a link, or cannot be prepared."""
    COMPLETE = "complete"
    """The data rank has written all results."""
    END = "end"
    """The session cannot go on."""


_RUNS = (Step.RUNNING, Step.CHANGING, Step.DROPPING, Step.SWITCHING, Step.COMPLETE)
"""Steps in which an epoch runs, or has ended well."""
_WRITES = (*_RUNS[:-1], Step.STOPPING)
"""Steps in which the data rank may write the last result."""
_GOES = tuple(step for step in Step if step is not Step.ENDED)
_STOPS = (Step.STOPPING, Step.DROPPING)
"""Steps in which members are asked to stop."""


class Causes:
    """Reasons why the latest epoch has ended, for the next plan."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        """Lines about ranks that were lost."""
        self.broken: list[str] = []
        """Lines about links that broke, and about standstills."""
        self.ranks: list[int] = []
        """Ranks that were lost since the last plan, those without a part in it too."""
        self.copied: dict[int, Raw] = {}
        """What each rank has copied of the state of others when it stopped."""

    @property
    def line(self) -> str:
        """All reasons, for the user."""
        return "; ".join(self.losses or self.broken)


class Epochs:
    """The epochs of a session. Messages to send are returned as (connection, message).

    Args:
        roster: Ranks of the session.
        attempts: The active epochs, and the parts of them that are awaited.
        table: What follows from an event; ``TABLE`` but in tests.
    """

    def __init__(self, roster: Roster, attempts: Attempts | None = None, table: Table | None = None) -> None:
        self.roster = roster
        self.attempts = Attempts(roster) if attempts is None else attempts
        self._table = TABLE if table is None else table
        self.step = Step.GATHERING
        self.verdict: Failure | None = None
        """Reason why the session has ended, or None if it has not."""
        self.goes_on = False
        """Policy: whether the session goes on after a loss."""
        self.plan = Raw(b"")
        """The latest plan, for those that join."""
        self.causes = Causes()
        """Reasons for another plan."""
        self.change: Announcement[Raw] | None = None
        """Plan of the epoch that is to take the place of the one that runs; None while there is none."""
        self.outcome: Switched | Dropped | None = None
        """Outcome of the latest change; None before its end."""
        self.changed_at = 0.0
        """Time at which the latest change was asked for."""
        self.first_of_next = 0
        """Lowest number of a microbatch that the next epoch is fed, as the data rank has said."""
        self.stopping_since: float | None = None
        """Time since which members are asked to stop; None while none is."""
        self.now = 0.0
        """Time of the event that happens."""

    # -- queries ----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of the latest epoch that ran or was to run, from 1; 0 before the first plan.

        The next one counts once it has taken its place.
        """
        return self.attempts.current.number

    @property
    def participants(self) -> frozenset[int]:
        """Ranks with a part in that epoch, or in the next one if that runs; some may have been lost."""
        both = [self.attempts.current]
        if self.step is Step.SWITCHING and self.attempts.next is not None:
            both.append(self.attempts.next)
        return frozenset(rank for attempt in both for rank in attempt.participants)

    @property
    def recovers(self) -> bool:
        """Whether a loss may lead to another epoch, so that any rank may be needed."""
        return self.goes_on and self.step not in (Step.COMPLETE, Step.ENDED)

    def has_passed(self, rank: int) -> bool:
        """Return whether an epoch that nothing follows needs a rank no longer, as all has passed there."""
        return not self.goes_on and self.step is Step.RUNNING and self.attempts.has_passed(rank)

    def awaits(self, rank: int) -> bool:
        """Return whether an epoch cannot begin before ``rank`` has loaded its part, and nothing runs."""
        return self.step is Step.PREPARING and self.attempts.awaits(rank)

    def takes(self, event: Event) -> bool:
        """Return whether an event changes anything now."""
        return (self.step, event) in self._table

    # -- events -----------------------------------------------------------------------------------

    def happen(self, event: Event, what: object, now: float) -> Outgoing:
        """Follow the table at an event, and at those that follow from it.

        Args:
            event: The event.
            what: What belongs to it: a plan, a line for the user, or a failure.
            now: Present time.
        """
        row = self._table.get((self.step, event))
        if row is None:
            return self.settle(now)
        self.now = now
        effect, after = row
        outgoing = effect(self, what)
        self.step = after
        self.roster.runs = after in _RUNS
        if after not in _STOPS:
            self.stopping_since = None
        elif self.stopping_since is None:
            self.stopping_since = now
        return outgoing + self.settle(now)

    def settle(self, now: float) -> Outgoing:
        """Let the event happen that the step has waited for, if nobody is awaited any longer."""
        is_due, event = not self.attempts.awaited, None
        if self.step is Step.SWITCHING:
            is_due, event = self.attempts.all_passed, Event.PASSED
        elif self.step in (Step.PREPARING, Step.CHANGING):
            event = Event.PREPARED
        elif self.step in _STOPS:
            event = Event.STOPPED
        return [] if event is None or not is_due else self.happen(event, "", now)

    # -- what effects have in common --------------------------------------------------------------

    def drop_change(self, why: str) -> None:
        """Note that a change of the plan, if there is one, has come to nothing."""
        if self.change is not None:
            self.outcome, self.change = Dropped(why), None

    def ask_to_prepare(self, attempt: EpochAttempt, announcement: Announcement[Raw]) -> Outgoing:
        """Ask the participants of an epoch to prepare it."""
        places = self.roster.places()
        prepare = Prepare(attempt.number, announcement.plan, announcement.token, places)
        return self.to(self.attempts.parts(attempt), prepare)

    def ask_to_stop(self, parts: Iterable[Part], line: str) -> Outgoing:
        """Ask members to stop their parts, for the reason in ``line``."""
        return [message for part in parts for message in self.to([part], Abort(part[0], line))]

    def to(self, parts: Iterable[Part], message: Message) -> Outgoing:
        """Address a message to the ranks that have these parts."""
        return [(self.roster.seats[rank].connection, message) for _, rank in parts]

    def to_everybody(self, message: Message) -> Outgoing:
        """Address the last message to all ranks, and to those that wait for a number."""
        return self.roster.to_all(message) + self.roster.to_claimants(message)


# -- effects: what is sent on the way to the next step -----------------------------------------------

Effect: TypeAlias = Callable[[Epochs, Any], Outgoing]
"""A function of the epochs and of what belongs to the event: a plan, a line for the user, or a failure."""
Table: TypeAlias = Mapping[tuple[Step, Event], tuple[Effect, Step]]


def prepare(epochs: Epochs, announcement: Announcement[Raw]) -> Outgoing:
    """Prepare the next epoch, with nothing beside it."""
    epochs.plan, epochs.causes = announcement.plan, Causes()
    epochs.roster.participants, epochs.roster.names = announcement.participants, announcement.names
    return epochs.ask_to_prepare(epochs.attempts.begin(announcement.participants), announcement)


def plan_without_the_lost(epochs: Epochs, announcement: Announcement[Raw]) -> Outgoing:
    """Wait for another first plan, as a participant of this one has left meanwhile."""
    roster, left_out = epochs.roster, epochs.roster.left_out
    epochs.causes.ranks = [rank for rank in announcement.participants if rank in left_out]
    epochs.causes.losses = [left_out[rank].line for rank in epochs.causes.ranks]
    epochs.plan = announcement.plan
    roster.participants, roster.names = announcement.participants, announcement.names
    return []


def run(epochs: Epochs, _: object) -> Outgoing:
    """Let the epoch begin."""
    return epochs.to(epochs.attempts.parts(epochs.attempts.current), Run(epochs.epoch))


def prepare_next(epochs: Epochs, announcement: Announcement[Raw]) -> Outgoing:
    """Prepare an epoch beside the one that runs."""
    epochs.outcome, epochs.change, epochs.changed_at = None, announcement, epochs.now
    return epochs.ask_to_prepare(epochs.attempts.begin_next(announcement.participants), announcement)


def run_next(epochs: Epochs, _: object) -> Outgoing:
    """Let the next epoch begin beside the one that drains."""
    change, attempt, roster = epochs.change, epochs.attempts.next, epochs.roster
    if change is None or attempt is None:
        raise RuntimeError("a change of the plan without a next epoch")
    # Those that retire keep their figures for the summary.
    epochs.plan = change.plan
    roster.participants = tuple(sorted({*(roster.participants or ()), *attempt.participants}))
    roster.names = {**roster.names, **change.names}
    return epochs.to(epochs.attempts.parts(attempt), Run(attempt.number))


def retire(epochs: Epochs, _: object) -> Outgoing:
    """Let the next epoch take the place of the one that has drained."""
    replaced = epochs.attempts.replace()
    if epochs.change is not None:
        seconds = epochs.now - epochs.changed_at
        epochs.outcome, epochs.change = Switched(epochs.epoch, epochs.first_of_next, seconds), None
    return epochs.to(epochs.attempts.parts(replaced), Retire(replaced.number))


def abort_all(epochs: Epochs, line: str) -> Outgoing:
    """Stop all that is active."""
    epochs.drop_change(line)
    parts = epochs.attempts.stop(epochs.attempts.current, epochs.attempts.next)
    epochs.attempts.next = None
    return epochs.ask_to_stop(parts, line)


def abort_current(epochs: Epochs, line: str) -> Outgoing:
    """Stop what runs; the parts of the next epoch stop already."""
    epochs.attempts.next = None
    return epochs.ask_to_stop(epochs.attempts.stop(epochs.attempts.current), line)


def abort_next(epochs: Epochs, line: str) -> Outgoing:
    """Stop what is prepared beside the epoch that runs."""
    epochs.drop_change(line)
    return epochs.ask_to_stop(epochs.attempts.stop(epochs.attempts.next), line)


def forget_next(epochs: Epochs, _: object) -> Outgoing:
    """Forget the next epoch, which all have stopped."""
    epochs.attempts.next = None
    return []


def send_nothing(epochs: Epochs, _: object) -> Outgoing:
    """Send nothing."""
    return []


def tell_complete(epochs: Epochs, line: str) -> Outgoing:
    """Tell everybody that the results are complete."""
    epochs.drop_change(line)
    return epochs.to_everybody(Complete())


def tell_verdict(epochs: Epochs, failure: Failure) -> Outgoing:
    """Tell everybody why the session has ended."""
    epochs.drop_change(failure.line)
    epochs.verdict = failure
    return epochs.to_everybody(Verdict(failure))


# -- the table ---------------------------------------------------------------------------------------

TABLE: Table = {
    (Step.GATHERING, Event.PLAN): (prepare, Step.PREPARING),
    (Step.GATHERING, Event.OVERTAKEN): (plan_without_the_lost, Step.PLANNING),
    (Step.PLANNING, Event.PLAN): (prepare, Step.PREPARING),
    (Step.PREPARING, Event.PREPARED): (run, Step.RUNNING),
    (Step.PREPARING, Event.FAULT): (abort_all, Step.STOPPING),
    (Step.RUNNING, Event.FAULT): (abort_all, Step.STOPPING),
    (Step.RUNNING, Event.CHANGE): (prepare_next, Step.CHANGING),
    (Step.CHANGING, Event.PREPARED): (run_next, Step.SWITCHING),
    (Step.CHANGING, Event.NEXT_FAULT): (abort_next, Step.DROPPING),
    (Step.CHANGING, Event.FAULT): (abort_all, Step.STOPPING),
    (Step.SWITCHING, Event.FAULT): (abort_all, Step.STOPPING),
    (Step.SWITCHING, Event.NEXT_FAULT): (abort_all, Step.STOPPING),
    (Step.SWITCHING, Event.PASSED): (retire, Step.RUNNING),
    (Step.DROPPING, Event.STOPPED): (forget_next, Step.RUNNING),
    (Step.DROPPING, Event.FAULT): (abort_current, Step.STOPPING),
    (Step.STOPPING, Event.STOPPED): (send_nothing, Step.PLANNING),
    **dict.fromkeys(product(_WRITES, [Event.COMPLETE]), (tell_complete, Step.COMPLETE)),
    **dict.fromkeys(product(_GOES, [Event.END]), (tell_verdict, Step.ENDED)),
}
"""What is sent at an event, and the step that follows; an event without a row changes nothing."""
