"""Decide which event the loss of a rank or a link is; the table of ``epochs`` says what follows. Pure.

What a former member sends is ignored. A rank that comes back is a spare until the next plan. A member that
does not stop its part of a failed epoch in time is lost. A link that breaks while both its ends live may be a
passing fault, so the members try again. If the same link breaks again before anything else was written, or
breaks two epochs in a row, one of its ends is dismissed; so every epoch either writes something, or brings a
decision closer. A standstill that comes again without a result ends the session, and so does a microbatch
whose values lead to an exception a second time, as it would cost rank after rank.
"""

from __future__ import annotations

from pipeedge.base.errors import EXIT_PEER
from pipeedge.base.wording import figure
from pipeedge.control.admission import Attendance
from pipeedge.control.attempts import Faults
from pipeedge.control.epochs import Epochs, Event, Step
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.messages import Failed, Message, Notice, Verdict
from pipeedge.control.roster import Outgoing, Roster
from pipeedge.control.telemetry import summary

__all__ = ["Losses"]


class Losses:
    """Losses of a session, from its beginning to its end.

    Args:
        roster: Ranks of the session.
        epochs: Epochs of the session.
        attendance: Ranks that are admitted, or left out before the plan.
        faults: Links that have broken.
        patience_s: Longest time in seconds for a member to stop its part of a failed epoch.
    """

    def __init__(
        self, roster: Roster, epochs: Epochs, attendance: Attendance, faults: Faults, patience_s: float
    ) -> None:
        self.roster = roster
        self.epochs = epochs
        self.faults = faults
        self.admitted_others = True
        """Whether other ranks were still admitted when the session ended."""
        self._attendance = attendance
        self._patience_s = patience_s
        self._raised: dict[int, str] = {}  # name of the rank on which a microbatch led to an exception

    # -- before the plan, and after the end ---------------------------------------------------------

    def lose(self, failure: Failure, now: float) -> Outgoing:
        """Do what follows from a failure, unless another one has ended the session."""
        rank, step = failure.rank, self.epochs.step
        if step is Step.ENDED:
            return []
        if failure.exit_code == EXIT_PEER and step is Step.COMPLETE:
            return self.go_on_without(failure.line, rank)
        if failure.exit_code != EXIT_PEER or rank is None:
            return self.end(failure, now)
        if step is not Step.GATHERING:
            return self.lost(rank, failure, now)
        if self._attendance.can_do_without(rank, failure.kind):
            return self._attendance.leave_out(rank, failure)
        return self.end(failure, now)

    def go_on_without(self, line: str, rank: int | None) -> Outgoing:
        """Stop waiting for ``rank``, or for all unfinished ranks if it is None: the results are complete."""
        roster = self.roster
        waited_for = roster.present() if rank is None else (rank,)
        leaving = [seat for each in waited_for if (seat := roster.seats.get(each)) and not seat.finished]
        for seat in leaving:
            seat.left = True
        if not leaving:
            return []
        return roster.to_all(Notice(f"{line}; the results are complete")) + summary(roster)

    def end(self, failure: Failure, now: float) -> Outgoing:
        """End the session for a reason that no other plan would remove."""
        self.admitted_others = self._attendance.admits_at(now)
        return self.epochs.happen(Event.END, failure, now)

    # -- ranks --------------------------------------------------------------------------------------

    def is_watched(self, rank: int) -> bool:
        """Return whether the loss of ``rank``, which has a seat, matters."""
        if self.epochs.recovers:
            return True  # any rank may be needed
        is_done = self.roster.seats[rank].finished or self.epochs.has_passed(rank)
        return self.roster.takes_part(rank) and not is_done

    def is_essential(self, rank: int) -> bool:
        """Return whether the session ends with ``rank``."""
        return not self.epochs.goes_on or rank in (0, self.roster.data_rank)

    def lost(self, rank: int, failure: Failure, now: float) -> Outgoing:
        """Go on without a rank that is gone, has failed or is silent, if that is possible."""
        roster, epochs, attempts = self.roster, self.epochs, self.epochs.attempts
        if self.is_essential(rank):
            return self.end(failure, now)
        if rank not in roster.seats:
            return []
        parts = [*attempts.parts(attempts.current), *attempts.parts(attempts.next)]
        numbers = [number for number, of in parts if of == rank and epochs.step is not Step.PLANNING]
        outgoing: Outgoing = [(roster.seats[rank].connection, Verdict(failure))]
        had_part = bool(numbers) and rank in epochs.participants
        roster.remove(rank, now)
        attempts.forget(rank)
        epochs.causes.ranks.append(rank)
        if had_part or epochs.step is Step.PLANNING:
            epochs.causes.losses.append(failure.line)
        elif failure.kind is not FailureKind.REFUSED:
            outgoing += roster.to_all(Notice(f"{failure.line}; it had no part in the pipeline"))
        if numbers:
            event = Event.FAULT if epochs.epoch in numbers else Event.NEXT_FAULT
            return outgoing + epochs.happen(event, failure.line, now)
        return outgoing + epochs.settle(now)

    def hung(self, rank: int, failure: Failure, now: float) -> Outgoing:
        """Go on without a rank whose loading does not get on, if others wait for it or it is none of them.

        A better plan is dropped instead: what its rank has loaded for the present one serves still.
        """
        epochs = self.epochs
        if rank not in self.roster.seats:
            return []
        if epochs.awaits(rank) or not self.roster.seats[rank].agrees:
            return self.lost(rank, failure, now)
        is_next = epochs.step is Step.CHANGING and epochs.attempts.awaits(rank)
        return epochs.happen(Event.NEXT_FAULT, failure.line, now) if is_next else []

    def failed(self, rank: int, failed: Failed, failure: Failure, now: float) -> Outgoing:
        """Go on without a rank that reports its own failure, unless the same would befall the next one."""
        number, name = failed.microbatch, self.roster.name(rank)
        if number is not None and number in self._raised:
            before = self._raised[number]
            both = f"{before} and {name}" if before != name else f"{name}, twice"
            line = f"microbatch {number} cannot be computed, as it failed on {both}: {failed.line}"
            return self.end(Failure(FailureKind.FAILED, line), now)
        if number is not None and self.epochs.goes_on:
            self._raised[number] = name
        return self.lost(rank, failure, now)

    def overdue(self, now: float) -> Outgoing:
        """Do without the members that do not stop their part of an epoch in time."""
        epochs, outgoing = self.epochs, list[tuple[int, Message]]()
        if epochs.stopping_since is None or now - epochs.stopping_since <= self._patience_s:
            return outgoing
        cause = f"has not stopped within {figure(self._patience_s)} s what it computes for a failed plan"
        for rank in sorted({rank for _, rank in epochs.attempts.awaited}):
            if epochs.stopping_since is not None:
                stuck = Failure(FailureKind.STUCK, cause, rank, self.roster.name(rank))
                outgoing += self.lost(rank, stuck, now)
        return outgoing

    # -- links --------------------------------------------------------------------------------------

    def link_lost(self, rank: int, peer: int, failure: Failure, now: float, cause: str = "") -> Outgoing:
        """Try again without the broken link of the active epoch, or without one of its ends.

        Args:
            rank: Participant that noticed it.
            peer: Participant at the other end.
            failure: Reason for the user.
            now: Present time.
            cause: Reason for another plan, if it is not the line of ``failure``.
        """
        epochs, seats = self.epochs, self.roster.seats
        if not epochs.goes_on:
            return self.end(failure, now)
        epochs.causes.broken.append(cause or failure.line)
        link = frozenset({seats[rank].connection, seats[peer].connection})
        if self.faults.is_first(link, epochs.epoch):
            return epochs.happen(Event.FAULT, failure.line, now)
        culprit = rank if self.is_essential(peer) else peer
        return self.lost(culprit, Failure(FailureKind.STUCK, failure.line, culprit), now)

    def stalled(self, failure: Failure, now: float) -> Outgoing:
        """Try again if nothing moves in the active epoch although no rank and no link is at fault."""
        epochs = self.epochs
        if not epochs.goes_on or not self.faults.is_first(frozenset(), epochs.epoch):
            return self.end(failure, now)
        epochs.causes.broken.append(failure.line)
        return epochs.happen(Event.FAULT, failure.line, now)
