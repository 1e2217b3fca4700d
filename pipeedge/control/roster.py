"""Keep track of the ranks of a session: who is here, who has a part, and who waits for a number. Pure.

A process is known by its *incarnation*, the number of its connection: one that comes back has a new one.
The *members* are a complete snapshot of the ranks that are here, each with its incarnation. A process whose
number is taken by another one, which may only seem to live, is a *claimant* until that one is heard or lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import Raw

from pipeedge.control.failures import Failure
from pipeedge.control.liveness import RankStatus
from pipeedge.control.messages import Message
from pipeedge.transport.place import Place

__all__ = ["Claim", "Members", "Outgoing", "Roster", "Seat"]

Members: TypeAlias = Mapping[int, int]
"""Incarnation of each rank that takes part or may do so."""
Outgoing: TypeAlias = list[tuple[int, Message]]
"""Messages to send, each with the number of its connection."""


@dataclass
class Seat:
    """State of one rank that has introduced itself."""

    connection: int
    host: str
    heard_at: float
    """Time of its last message, in seconds of the hub's clock."""
    facts: Raw | None = None
    place: Place | None = None
    """Place at which it listens for other ranks, if it does."""
    agrees: bool = False
    """Whether rank 0 has found its facts to agree with those of the others."""
    status: RankStatus = field(default_factory=RankStatus)
    stats: Raw | None = None
    recorded: int = 0
    """Number of characters of its records."""
    left: bool = False
    """Whether the rank ended when nothing more was to be computed, but before it had sent its stats."""

    @property
    def finished(self) -> bool:
        """Whether nothing more is expected of it."""
        return self.stats is not None or self.left


@dataclass
class Claim:
    """A process that waits for word of the rank that has its number."""

    connection: int
    host: str
    facts: Raw | None = None
    place: Place | None = None


class Roster:
    """The ranks of a world, their connections, and their parts in the plan."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.seats: dict[int, Seat] = {}
        self.rank_of: dict[int, int] = {}
        """Rank of each connection that belongs to one."""
        self.claims: dict[int, Claim] = {}
        """Claimant of each rank that has one."""
        self.left_out: dict[int, Failure] = {}
        """Reason why the session does without a rank, for each that is left out; it has no seat."""
        self.participants: tuple[int, ...] | None = None
        """Ranks with a part in the plan; None before the plan."""
        self.runs = False
        """Whether all participants were ready, and work."""
        self.names: Mapping[int, str] = {}
        self.data_rank: int | None = None

    # -- queries ----------------------------------------------------------------------------------

    @property
    def members(self) -> Members:
        """Present members."""
        return {rank: seat.connection for rank, seat in self.seats.items()}

    def absent(self) -> list[int]:
        """Return the ranks that have not introduced themselves and may still come."""
        return [
            rank for rank in range(self.world_size) if rank not in self.seats and rank not in self.left_out
        ]

    def facts(self) -> dict[int, Raw] | None:
        """Return the facts of each rank that is not left out, or None until all of these have sent them."""
        facts = {rank: known.facts for rank, known in sorted(self.seats.items()) if known.facts is not None}
        return facts if len(facts) + len(self.left_out) == self.world_size else None

    def agreed_facts(self) -> dict[int, Raw]:
        """Return the facts of the ranks that may have a part in the next plan."""
        return {
            rank: seat.facts
            for rank, seat in sorted(self.seats.items())
            if seat.facts is not None and seat.agrees
        }

    def places(self) -> dict[int, Place]:
        """Return the place of each member that listens for others."""
        return {rank: seat.place for rank, seat in sorted(self.seats.items()) if seat.place is not None}

    def name(self, rank: int) -> str:
        """Return ``rank 2 (stage 1, layers 13-24, on host pi3)``, as far as it is known."""
        known = self.seats.get(rank)
        parts = [self.names[rank]] if rank in self.names else []
        if known is not None:
            parts.append(f"on {known.host}")
        return f"rank {rank}" + (f" ({', '.join(parts)})" if parts else "")

    def connections(self) -> tuple[int, ...]:
        """Return the connections that belong to a rank."""
        return tuple(self.rank_of)

    def present(self) -> tuple[int, ...]:
        """Return the participants that are here; none before the plan."""
        return tuple(rank for rank in self.participants or () if rank in self.seats)

    def takes_part(self, rank: int) -> bool:
        """Return whether ``rank`` has a part in the plan, or still may have one."""
        return self.participants is None or rank in self.participants

    def to_all(self, message: Message) -> Outgoing:
        """Address ``message`` to every rank."""
        return [(connection, message) for connection in self.rank_of]

    def to_claimants(self, message: Message) -> Outgoing:
        """Address the last ``message`` to every process that waits for a number, and forget it."""
        claims, self.claims = self.claims, {}
        return [(claim.connection, message) for claim in claims.values()]

    # -- changes ----------------------------------------------------------------------------------

    def seat(self, rank: int, connection: int, host: str, now: float) -> Seat:
        """Give a process the seat of ``rank``, which is free, and return it."""
        self.seats[rank] = Seat(connection, host, now)
        self.rank_of[connection] = rank
        return self.seats[rank]

    def remove(self, rank: int, now: float) -> None:
        """Free the seat of ``rank``, which is lost; its claimant gets it, if there is one."""
        self.rank_of.pop(self.seats.pop(rank).connection, None)
        claim = self.claims.pop(rank, None)
        if claim is not None:
            seat = self.seat(rank, claim.connection, claim.host, now)
            seat.facts, seat.place = claim.facts, claim.place
