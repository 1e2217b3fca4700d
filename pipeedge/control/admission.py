"""Decide which ranks are admitted to a session, awaited, or left out. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Raw

from pipeedge.base.errors import EXIT_REQUEST
from pipeedge.base.wording import count, figure, plural
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.messages import Brief, Facts, Hello, Notice, Planned, Verdict, Waiting
from pipeedge.control.roster import Claim, Outgoing, Roster

__all__ = ["Attendance", "Newcomer", "Terms"]

_LOSSES = frozenset({FailureKind.GONE, FailureKind.SILENT, FailureKind.HUNG})
"""Kinds of failures by which a rank is lost without a word of its own."""
_MAX_NAMED = 10
"""Largest number of ranks that a message names."""
_MAX_WAITING_NAMED = 8
"""Largest number of ranks named in the line of missing ranks, which a terminal rewrites in place."""
_START_EACH = "start each rank, with the same --addr and --port"
_PATIENCE_S = 2.0
"""Seconds after which the missing ranks are named."""
_TELL_AGAIN_S = 10.0
"""Seconds between two notices about processes that were not admitted."""


@dataclass(frozen=True)
class Terms:
    """Terms on which ranks join a session."""

    appear_s: float
    """Seconds within which a rank must appear. One that is not required must also send its facts."""
    silence_s: float | None = None
    """Seconds within which a silent rank is reported; None for as many as ``appear_s``."""
    required: frozenset[int] | None = None
    """Ranks without which there is no session, or None for all. Others are left out if they are late."""
    joins_later: bool = False
    """Whether a rank that is left out may still join after the plan. Then one is left out if it is absent or
    lost; a failure that it reports before the plan ends the session, as nothing is lost yet and a mistake in
    its command is likely."""
    ends_if_refused: bool = False
    """Whether absent ranks end the session if a process was refused for its key, as it may be one of them."""
    brief: Raw | None = None
    """Information that a rank needs to state its facts, sent to each when it is admitted."""
    max_message_bytes: int = 64 << 10
    """Length of the longest message that a rank may send, in bytes."""


@dataclass(frozen=True)
class Newcomer:
    """A process that wants to be a spare, and whose facts rank 0 has to compare with those of the members."""

    rank: int
    connection: int
    facts: Raw


class Attendance:
    """Rules for admitting ranks. Messages to send are returned as (connection, message).

    A rank is admitted when it has introduced itself. Before the plan, a rank that is not required is left out
    if it is lost or late; it may come again as long as ranks are admitted. In a session that goes on after
    losses, ranks may come after the plan, too: one is a spare once its facts agree with those of the others,
    and one whose number is taken waits until the rank that has it is heard or lost.
    """

    def __init__(self, roster: Roster, terms: Terms, now: float) -> None:
        self._roster = roster
        self._terms = terms
        self._opened_at = now
        self._sent_away: set[int] = set()  # connections that have been refused
        self._told_absent: tuple[int, ...] = ()
        self._refused = ""  # the last process that was refused for its key
        self._stranger = ""  # the last process that was not admitted
        self._stranger_untold = False  # because rank 0 itself had not come yet
        self._stranger_told_at = -_TELL_AGAIN_S

    # -- connections ------------------------------------------------------------------------------

    def admit(self, connection: int, hello: Hello | None, now: float) -> tuple[Outgoing, Failure | None]:
        """Handle a hello; return the reply, and the reason if it ends the session for all.

        Args:
            connection: Number of the connection.
            hello: The hello, or None if it is malformed.
            now: Present time, in seconds of the hub's clock.
        """
        size = self._roster.world_size
        if hello is None:
            line = "your hello is malformed; do all ranks run the same version?"
            return self._refuse(connection, line), None
        world, rank, host = hello.world, hello.rank, hello.host
        disagrees = ""
        if world != size:
            theirs = count(world, "rank")
            disagrees = f"rank {rank} on {host} says the world has {theirs}, rank 0 says {size}: "
        # A process that asks for a rank that is taken or does not exist is not part of this run. It was
        # started with the address of another run, which it must not end.
        if rank in self._roster.seats:
            other = self._roster.seats[rank].host
            remedy = "choose another --port for another run" if disagrees else "start each rank once"
            line = f"{disagrees}rank {rank} has already joined, from {other}: {remedy}"
            return self._refuse(connection, line), None
        if rank >= size:
            return self._refuse(connection, f"{disagrees}rank {rank} is outside the world of {size}"), None
        if disagrees:
            # One of the two is wrong, so the run cannot start: tell all ranks at once.
            line = f"{disagrees}start all with the same WORLD"
            failure = Failure(FailureKind.REFUSED, line, exit_code=EXIT_REQUEST)
            return self._refuse(connection, line), failure if self._roster.participants is None else None
        if rank in self._roster.left_out and not self._admits_again(now):
            return self._send_away(connection, self._lateness(rank, f"rank {rank} (on {host})")), None
        self._roster.left_out.pop(rank, None)
        self._roster.seat(rank, connection, host, now)
        brief = self._terms.brief
        outgoing: Outgoing = [] if brief is None else [(connection, Brief(brief))]
        if self._told_absent and not self._roster.absent() and not self._roster.left_out:
            outgoing += self._roster.to_all(Waiting(f"all {figure(size)} ranks are here", over=True))
        if rank == 0 and self._stranger_untold and self._roster.absent():
            outgoing += self._tell_stranger(now)
        return outgoing, None

    def has_sent_away(self, connection: int) -> bool:
        """Return whether a connection has been refused, so that its messages are ignored."""
        return connection in self._sent_away

    def forget(self, connection: int) -> bool:
        """Forget a connection that has closed; return whether it had been refused."""
        claims = self._roster.claims
        self._roster.claims = {rank: one for rank, one in claims.items() if one.connection != connection}
        sent_away = connection in self._sent_away
        self._sent_away.discard(connection)
        return sent_away

    def stranger(self, what: str, now: float, *, has_other_key: bool = False) -> Outgoing:
        """Tell rank 0 about a process that was not admitted, as it may have been meant to be a rank.

        Args:
            what: Address of the process, and why it was not admitted.
            now: Present time, in seconds of the hub's clock.
            has_other_key: Whether it was refused for its key, or for the lack of one.
        """
        if has_other_key:
            self._refused = f"a process at {what}"
        if self._roster.participants is not None or not self._roster.absent():
            return []
        self._stranger = f"a process at {what}"
        if 0 not in self._roster.seats:
            self._stranger_untold = True
            return []
        return [] if now < self._stranger_told_at + _TELL_AGAIN_S else self._tell_stranger(now)

    def _tell_stranger(self, now: float) -> Outgoing:
        self._stranger_untold = False
        self._stranger_told_at = now
        line = f"{self._stranger}; ranks still missing: {_listed(self._roster.absent())}"
        return [(self._roster.seats[0].connection, Notice(line))]

    # -- ranks that come after the plan -----------------------------------------------------------

    def newcomer(self) -> Newcomer | None:
        """Return a process whose facts are to be compared, or None."""
        for rank, seat in self._roster.seats.items():
            if seat.facts is not None and not seat.agrees:
                return Newcomer(rank, seat.connection, seat.facts)
        return None

    def agrees(self, connection: int, plan: Raw) -> Outgoing:
        """Take a process, whose facts agree with those of the others, for a spare."""
        rank = self._roster.rank_of.get(connection)
        if rank is None:
            return []
        self._roster.seats[rank].agrees = True
        host = self._roster.seats[rank].host  # its number may still go by the stage of the process before it
        line = f"rank {rank} (on {host}) has joined, and is there to take the place of another"
        return [(connection, Planned(plan)), *self._roster.to_all(Notice(line))]

    def claim(self, connection: int, hello: Hello) -> Outgoing:
        """Let a process wait for word of the rank that has its number."""
        replaced = self._roster.claims.pop(hello.rank, None)
        self._roster.claims[hello.rank] = Claim(connection, hello.host)
        return [] if replaced is None else self._refuse_claim(hello.rank, replaced)

    def claims(self, connection: int) -> bool:
        """Return whether a process waits for word of the rank that has its number."""
        return any(claim.connection == connection for claim in self._roster.claims.values())

    def keep(self, connection: int, message: object) -> None:
        """Keep the facts that a waiting process states meanwhile; its heartbeats do not matter."""
        for claim in self._roster.claims.values():
            if claim.connection == connection and isinstance(message, Facts):
                claim.facts, claim.place = message.facts, message.place

    def heard(self, rank: int) -> Outgoing:
        """Note that a rank lives, whatever it said; refuse a process that wants to have its number."""
        claim = self._roster.claims.pop(rank, None)
        return [] if claim is None else self._refuse_claim(rank, claim)

    def _refuse_claim(self, rank: int, claim: Claim) -> Outgoing:
        return self._refuse(claim.connection, f"rank {rank} has already joined: start each rank once")

    # -- passage of time --------------------------------------------------------------------------

    def admits_at(self, now: float) -> bool:
        """Return whether ranks may still appear."""
        return now - self._opened_at <= self._terms.appear_s

    def absence(self, now: float) -> Failure | None:
        """Return the failure of the required ranks that have not appeared in time, or None."""
        if self._roster.participants is not None or self.admits_at(now):
            return None
        is_mistake = self._terms.ends_if_refused and self._refused
        absent = [rank for rank in self._roster.absent() if is_mistake or not self._may_be_absent(rank)]
        return Failure(FailureKind.ABSENT, self._never_appeared(absent), absent[0]) if absent else None

    def close(self, now: float) -> Outgoing:
        """Leave out the ranks that are not required and have not sent their facts in time."""
        if self.admits_at(now) or self._roster.facts() is not None:
            return []
        outgoing = []
        for rank in filter(self._may_be_absent, range(self._roster.world_size)):
            seat = self._roster.seats.get(rank)
            name = self._roster.name(rank)
            if seat is not None and seat.facts is None and not self._terms.joins_later:
                outgoing += self.leave_out(rank, self._lateness(rank, name))
            if seat is None and rank not in self._roster.left_out:
                cause = f"never appeared within {figure(self._terms.appear_s)} s"
                self.leave_out(rank, Failure(FailureKind.ABSENT, cause, rank, name))
        return outgoing

    def tell_absent(self, now: float) -> Outgoing:
        """Name the missing ranks to those that wait, once after a while and whenever they change."""
        absent = tuple(self._roster.absent())
        if self._roster.participants is not None or not absent or now - self._opened_at < _PATIENCE_S:
            return []
        if absent == self._told_absent:
            return []
        self._told_absent = absent
        which = ", ".join(map(str, absent[:_MAX_WAITING_NAMED]))
        if len(absent) > _MAX_WAITING_NAMED:
            which += f" and {figure(len(absent) - _MAX_WAITING_NAMED)} more"
        size = figure(self._roster.world_size)
        line = f"waiting for {plural(len(absent), 'rank')} {which} of {size} to start"
        return self._roster.to_all(Waiting(line))

    # -- ranks that are left out ------------------------------------------------------------------

    def can_do_without(self, rank: int, kind: FailureKind) -> bool:
        """Return whether the session continues after a failure of ``rank``; never after the plan."""
        return self._may_be_absent(rank) and (kind in _LOSSES or not self._terms.joins_later)

    def _may_be_absent(self, rank: int) -> bool:
        required = self._terms.required
        return self._roster.participants is None and required is not None and rank not in required

    def _admits_again(self, now: float) -> bool:
        """Return whether a rank that was left out is admitted; not while the plan is made without it."""
        if self._roster.participants is not None:
            return self._terms.joins_later
        return self.admits_at(now) and self._roster.facts() is None

    def leave_out(self, rank: int, failure: Failure) -> Outgoing:
        """Continue without ``rank``, and tell it if it is connected."""
        self._roster.left_out[rank] = failure
        seat = self._roster.seats.pop(rank, None)
        if seat is None or self._roster.rank_of.pop(seat.connection, None) is None:
            return []
        return self._send_away(seat.connection, failure)

    def _lateness(self, rank: int, name: str) -> Failure:
        within = figure(self._terms.appear_s)
        cause = f"is too late, and the others go on without it: start all ranks within {within} s"
        return Failure(FailureKind.LATE, cause, rank, name, EXIT_REQUEST)

    def _refuse(self, connection: int, line: str) -> Outgoing:
        return self._send_away(connection, Failure(FailureKind.REFUSED, line, exit_code=EXIT_REQUEST))

    def _send_away(self, connection: int, failure: Failure) -> Outgoing:
        self._sent_away.add(connection)
        return [(connection, Verdict(failure))]

    def _never_appeared(self, absent: list[int]) -> str:
        which = f"{plural(len(absent), 'rank')} {_listed(absent)} of {self._roster.world_size}"
        within = f"{figure(self._terms.appear_s)} s"
        stranger = self._refused or self._stranger
        if stranger:
            within += f" ({stranger})"
        remedy = "give every rank the same --key" if self._refused else _START_EACH
        return f"{which} never appeared within {within}: {remedy}"


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _MAX_NAMED:,} more" if len(ranks) > _MAX_NAMED else ""
    return f"{', '.join(map(str, ranks[:_MAX_NAMED]))}{more}"
