"""Rules of a run that goes on after failures, beside those of ``pipeedge.control.rules``. Pure.

    a rank is lost ──> epochs ──abort──> all stopped ──> rank 0 plans ──prepare──> ready ──run──> ...
    a process comes, with a number that is free ──> spare, once its facts agree with those of the others
    rank 0 has a better plan ──> prepare beside ──> ready ──> run ──> all has passed ──> retire

``Failover`` joins ``Epochs`` (who is a member, which epoch is active) to the roster (what each rank is called
and doing), and decides three things that ``Epochs`` does not know:

- A process whose number is taken waits until the rank that has it is heard or lost.
- A member that does not stop its part of a failed epoch in time is lost, so it delays nobody for longer.
- A microbatch whose values lead to an exception a second time ends the run: it would cost rank after rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Raw

from pipeedge.base.errors import EXIT_REQUEST
from pipeedge.base.wording import figure
from pipeedge.control.announcement import Announcement
from pipeedge.control.changing import Dropped, RunSnapshot, Switched
from pipeedge.control.epoch_messages import Abort, LinkLost, Passed, Prepare
from pipeedge.control.epochs import Epochs, EpochStep
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.members import Members
from pipeedge.control.messages import Complete, Facts, Failed, Hello, Message, Notice, Planned, Verdict
from pipeedge.control.roster import Roster, Seat

__all__ = ["Failover", "Newcomer", "Wanted"]

_Outgoing = list[tuple[int, Message]]
_STOPPING = (EpochStep.STOPPING, EpochStep.DROPPING)
_CHANGING = (EpochStep.CHANGING, EpochStep.SWITCHING)
_RUNS = (EpochStep.RUNNING, *_CHANGING, EpochStep.DROPPING, EpochStep.COMPLETE)


@dataclass(frozen=True)
class Newcomer:
    """A process that wants to be a spare, and whose facts rank 0 has to compare with those of the members."""

    rank: int
    connection: int
    facts: Raw


@dataclass(frozen=True)
class Wanted:
    """The members for which rank 0 has to make a plan."""

    members: Members
    facts: Mapping[int, Raw]
    """Facts of the members that may take part, by rank."""
    cause: str
    """Reason why the last epoch ended, for the user."""
    lost: tuple[int, ...]
    """Ranks that were lost since the last plan, those without a part in it too."""


@dataclass(frozen=True)
class _Change:
    """A change of the plan that goes on."""

    epoch: int
    announcement: Announcement[Raw]
    asked_at: float


class Failover:
    """Rules of a run that goes on after failures. Messages to send are returned as (connection, message).

    Args:
        roster: the ranks; all of them are here when the run is planned first.
        data_rank: rank that reads the input and writes the results.
        patience_s: longest time in seconds for a member to stop its part of a failed epoch.
    """

    def __init__(self, roster: Roster, data_rank: int, patience_s: float) -> None:
        members = {rank: seat.connection for rank, seat in roster.seats.items()}
        self.epochs = Epochs(members, data_rank)
        """Members and epochs; to be changed through this object alone."""
        self._roster = roster
        self._patience_s = patience_s
        self._plan = Raw(b"")  # the latest, for those that join
        self._agreed = set(members.values())  # connections of the processes whose facts agree
        self._claims: dict[int, tuple[Hello, list[Facts]]] = {}
        self._losses: list[str] = []  # what the latest epoch ended by
        self._faults: list[str] = []
        self._lost: list[int] = []
        self._raised: dict[int, str] = {}  # name of the rank on which a microbatch led to an exception
        self._stopping_since: float | None = None
        self._change: _Change | None = None
        self._first_of_next = 0
        self.outcome: Switched | Dropped | None = None
        """Outcome of the latest change; None before its end."""

    # -- queries ----------------------------------------------------------------------------------

    @property
    def verdict(self) -> Failure | None:
        """Reason why the run has ended, or None if it has not."""
        return self.epochs.verdict

    @property
    def complete(self) -> bool:
        """Whether the data rank has written all results."""
        return self.epochs.step is EpochStep.COMPLETE

    def newcomer(self) -> Newcomer | None:
        """Return a process whose facts are to be compared, or None."""
        for rank, seat in self._roster.seats.items():
            if seat.facts is not None and seat.connection not in self._agreed:
                return Newcomer(rank, seat.connection, seat.facts)
        return None

    def wanted(self) -> Wanted | None:
        """Return the members that need a plan, or None."""
        members = self.epochs.wanted_plan
        if members is None:
            return None
        return Wanted(members, self._facts(), "; ".join(self._losses or self._faults), tuple(self._lost))

    def snapshot(self) -> RunSnapshot:
        """Return what is known of the run at this moment."""
        statuses = {rank: self._roster.seats[rank].status for rank in self._roster.running()}
        epochs = self.epochs
        return RunSnapshot(epochs.epoch, epochs.can_change, epochs.membership, self._facts(), statuses)

    def _facts(self) -> dict[int, Raw]:
        """Return the facts of the ranks that may have a part."""
        return {
            rank: seat.facts
            for rank, seat in sorted(self._roster.seats.items())
            if seat.facts is not None and seat.connection in self._agreed
        }

    # -- members ----------------------------------------------------------------------------------

    def welcome(self, rank: int, connection: int) -> _Outgoing:
        """Make a process that has got a seat a member."""
        outgoing = self.epochs.joined(rank, connection)
        return [(connection, Planned(self._plan)), *outgoing] if self.complete else outgoing

    def claim(self, connection: int, hello: Hello) -> _Outgoing:
        """Let a process wait for word of the rank that has its number."""
        if self.complete:
            return self.welcome(hello.rank, connection)
        self._claims[connection] = (hello, [])
        return self._forget_refused(self.epochs.joined(hello.rank, connection))

    def claims(self, connection: int) -> bool:
        """Return whether a process waits for word of the rank that has its number."""
        return connection in self._claims

    def keep(self, connection: int, message: object) -> None:
        """Keep the facts that a waiting process states meanwhile; its heartbeats do not matter."""
        if isinstance(message, Facts):
            self._claims[connection][1][:] = [message]

    def withdrawn(self, connection: int) -> None:
        """Forget a waiting process, which has closed its connection."""
        if self._claims.pop(connection, None) is not None:
            self.epochs.lost(connection, Failure(FailureKind.GONE, "left"))

    def heard(self, connection: int) -> _Outgoing:
        """Note that a member lives, whatever it said."""
        return self._forget_refused(self.epochs.heard(connection))

    def agrees(self, connection: int) -> _Outgoing:
        """Take a process, whose facts agree with those of the others, for a spare."""
        rank = self._roster.rank_of.get(connection)
        if rank is None:
            return []
        self._agreed.add(connection)
        host = self._roster.seats[rank].host  # its number may still go by the stage of the process before it
        line = f"rank {rank} (on {host}) has joined, and is there to take the place of another"
        return [(connection, Planned(self._plan)), *self._roster.to_all(Notice(line))]

    def disagrees(self, connection: int, line: str, now: float) -> _Outgoing:
        """Send a process away whose facts do not agree with those of the others."""
        rank = self._roster.rank_of.get(connection)
        if rank is None:
            return []
        return self.lost(rank, Failure(FailureKind.REFUSED, line, rank, exit_code=EXIT_REQUEST), now)

    def lost(self, rank: int, failure: Failure, now: float) -> _Outgoing:
        """Go on without a rank, if that is possible."""
        if rank not in self._roster.seats:
            return []
        connection, step = self._roster.seats[rank].connection, self.epochs.step
        had_part = rank in self.epochs.participants and step is not EpochStep.PLANNING
        outgoing = self.epochs.lost(connection, failure)
        if self.verdict is None:
            self._roster.remove(rank)
            self._agreed.discard(connection)
            self._lost.append(rank)
            outgoing = [(connection, Verdict(failure)), *outgoing]
            if had_part or step is EpochStep.PLANNING:
                self._losses.append(failure.line)
            elif failure.kind is not FailureKind.REFUSED:
                outgoing += self._roster.to_all(Notice(f"{failure.line}; it had no part in the pipeline"))
            self._seat_claimant(rank, now)
        return self._update(outgoing, now)

    def failed(self, rank: int, failed: Failed, failure: Failure, now: float) -> _Outgoing:
        """Go on without a rank that reports its own failure, unless the same would befall the next one."""
        number = failed.microbatch
        if number is not None and number in self._raised:
            before, name = self._raised[number], self._roster.name(rank)
            both = f"{before} and {name}" if before != name else f"{name}, twice"
            line = f"microbatch {number} cannot be computed, as it failed on {both}: {failed.line}"
            return self.epochs.ended(Failure(FailureKind.FAILED, line))
        if number is not None:
            self._raised[number] = self._roster.name(rank)
        return self.lost(rank, failure, now)

    # -- epochs -----------------------------------------------------------------------------------

    def begin(self, announcement: Announcement[Raw], lost: Mapping[int, Failure], now: float) -> _Outgoing:
        """Prepare the first epoch, unless some of its ranks were ``lost`` while its plan was made."""
        self._plan = announcement.plan
        self._losses, self._lost = [failure.line for failure in lost.values()], list(lost)
        return self.planned(self.epochs.membership, announcement, now)

    def planned(self, members: Members, announcement: Announcement[Raw], now: float) -> _Outgoing:
        """Prepare an epoch with a plan for ``members``, unless they have changed."""
        before = self.epochs.epoch
        outgoing = self.epochs.planned(members, announcement)
        if self.epochs.epoch == before:
            return []
        self._plan, self._losses, self._faults, self._lost = announcement.plan, [], [], []
        self._roster.participants = announcement.participants
        self._roster.names = announcement.names
        return self._update(outgoing, now)

    def change(self, since: RunSnapshot, announcement: Announcement[Raw], now: float) -> _Outgoing:
        """Prepare a better plan beside the one that runs, unless the run has changed; see ``outcome``."""
        members, before = since.members, self.epochs.epoch
        if members is None or since.epoch != before or not self.epochs.can_change:
            self.outcome = Dropped("the run has another plan meanwhile")
            return []
        outgoing = self.epochs.changed(members, announcement)
        if not outgoing:
            self.outcome = Dropped("a rank has left or come again meanwhile")
            return []
        (epoch,) = {message.epoch for _, message in outgoing if isinstance(message, Prepare)}
        self.outcome, self._change = None, _Change(epoch, announcement, now)
        return self._update(outgoing, now)

    def unplanned(self, members: Members, failure: Failure) -> _Outgoing:
        """End the run because no plan fits ``members``, unless they have changed."""
        return self.epochs.planned(members, failure)

    def received(self, rank: int, message: Message, now: float) -> _Outgoing:
        """Handle a message about an epoch.

        Raises:
            ValueError: the member breaks the protocol.
        """
        step, seat = self.epochs.step, self._roster.seats[rank]
        if isinstance(message, Passed) and message.first is not None:
            self._first_of_next = message.first
        outgoing = self.epochs.received(seat.connection, message)
        stops = step is not EpochStep.STOPPING and self.epochs.step is EpochStep.STOPPING
        if stops and isinstance(message, LinkLost):
            self._faults.append(f"{self._roster.name(rank)}: {message.line}")
        return self._update(outgoing, now)

    def link_lost(self, rank: int, peer: int, line: str, now: float) -> _Outgoing:
        """Stop the epoch because of a link that carries nothing."""
        self._faults.append(line)
        return self._update(self.epochs.link_lost(rank, peer, line), now)

    def hung(self, rank: int, failure: Failure, now: float) -> _Outgoing:
        """Go on without a rank whose loading does not get on, if others wait for it or it is none of them.

        A better plan is dropped instead: what its rank has loaded for the present one serves still.
        """
        if rank not in self._roster.seats:
            return []
        if self.epochs.awaits(rank) or self._roster.seats[rank].connection not in self._agreed:
            return self.lost(rank, failure, now)
        return self._update(self.epochs.postponed(rank, failure.line), now)

    def stalled(self, failure: Failure, now: float) -> _Outgoing:
        """Stop the epoch because nothing moves."""
        self._faults.append(failure.line)
        return self._update(self.epochs.stalled(failure), now)

    def tick(self, now: float) -> _Outgoing:
        """Do without the members that do not stop their part of an epoch in time."""
        outgoing: _Outgoing = []
        if self._stopping_since is None or now - self._stopping_since <= self._patience_s:
            return outgoing
        for rank in sorted(self.epochs.awaited):
            cause = f"has not stopped within {figure(self._patience_s)} s what it computes for a failed plan"
            if self.epochs.step in _STOPPING:
                failure = Failure(FailureKind.STUCK, cause, rank, self._roster.name(rank))
                outgoing += self.lost(rank, failure, now)
        return outgoing

    # -- details ----------------------------------------------------------------------------------

    def _update(self, outgoing: _Outgoing, now: float) -> _Outgoing:
        """Bring what is derived from the step of the run up to date."""
        step = self.epochs.step
        if step not in _STOPPING:
            self._stopping_since = None
        elif self._stopping_since is None:
            self._stopping_since = now
        self._follow_change(outgoing, now)
        for rank in self._roster.running():
            self._roster.seats[rank].ready = step in _RUNS
        self._dismiss_links(outgoing, now)
        return self._forget_refused(outgoing)

    def _follow_change(self, outgoing: _Outgoing, now: float) -> None:
        """Note how far the change of the plan is, if there is one."""
        change, epochs = self._change, self.epochs
        if change is None:
            return
        if epochs.step is EpochStep.CHANGING:
            return
        if epochs.step is EpochStep.SWITCHING or epochs.epoch == change.epoch:
            # Those that retire keep their figures for the summary.
            before = self._roster.participants or ()
            self._plan = change.announcement.plan
            self._roster.participants = tuple(sorted({*before, *epochs.participants}))
            self._roster.names = {**self._roster.names, **change.announcement.names}
            if epochs.step is EpochStep.SWITCHING:
                return
            self.outcome = Switched(change.epoch, self._first_of_next, now - change.asked_at)
        elif epochs.step is EpochStep.COMPLETE:
            self.outcome = Dropped("the results are complete")
        elif epochs.verdict is not None:
            self.outcome = Dropped(epochs.verdict.line)
        else:
            reasons = (message.line for _, message in outgoing if isinstance(message, Abort))
            self.outcome = Dropped(next(reasons, "a rank was lost that it needs"))
        self._change = None

    def _dismiss_links(self, outgoing: _Outgoing, now: float) -> None:
        """Free the seats of ranks that ``Epochs`` has dismissed for a link that broke again."""
        if self.verdict is not None:
            return
        for connection, message in outgoing:
            rank = self._roster.rank_of.get(connection)
            if isinstance(message, Verdict) and rank is not None:
                self._roster.remove(rank)
                self._agreed.discard(connection)
                self._losses.append(message.failure.line)
                self._lost.append(rank)
                self._seat_claimant(rank, now)

    def _forget_refused(self, outgoing: _Outgoing) -> _Outgoing:
        """Forget the claims that are refused."""
        for connection, message in outgoing:
            if isinstance(message, Verdict | Complete):
                self._claims.pop(connection, None)
        return outgoing

    def _seat_claimant(self, rank: int, now: float) -> None:
        """Give the seat of a lost rank to the process that has waited for it, if one has."""
        connection = self.epochs.membership.incarnations.get(rank)
        if connection is None or connection not in self._claims:
            return
        hello, facts = self._claims.pop(connection)
        seat = Seat(connection, hello.host, now, facts=facts[0].facts if facts else None)
        self._roster.seats[rank] = seat
        self._roster.rank_of[connection] = rank
