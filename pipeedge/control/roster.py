"""Keep track of the ranks of a session, and of the phase of each. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Raw

from pipeedge.control.failures import Failure
from pipeedge.control.liveness import RankStatus
from pipeedge.control.messages import Message

__all__ = ["Phase", "Roster", "Seat"]


class Phase(enum.Enum):
    """Phase of a rank."""

    MET = "met"
    """The rank has introduced itself."""
    KNOWN = "known"
    """The rank has sent its facts."""
    PLANNED = "planned"
    """The rank has a part in the plan."""
    READY = "ready"
    """The rank waits for the other participants."""
    RUNNING = "running"
    FINISHED = "finished"
    BYSTANDER = "bystander"
    """The rank has no part in the plan."""
    LEFT = "left"
    """The rank ended after the results were complete, but before it had finished."""


@dataclass
class Seat:
    """State of one rank that has introduced itself."""

    connection: int
    host: str
    heard_at: float
    """Time of its last message, in seconds of the hub's clock."""
    facts: Raw | None = None
    status: RankStatus = field(default_factory=RankStatus)
    ready: bool = False
    stats: Raw | None = None
    recorded: int = 0
    """Number of characters of its records."""
    left: bool = False
    """Whether the rank ended after the results were complete, but before it had finished."""

    @property
    def finished(self) -> bool:
        """Whether nothing more is expected of it."""
        return self.stats is not None or self.left


class Roster:
    """The ranks of a world, their connections, and their parts in the plan."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.seats: dict[int, Seat] = {}
        self.rank_of: dict[int, int] = {}
        """Rank of each connection that belongs to one."""
        self.left_out: dict[int, Failure] = {}
        """Reason why the session does without a rank, for each that is left out; it has no seat."""
        self.participants: tuple[int, ...] | None = None
        """Ranks with a part in the plan; None before the plan."""
        self.names: Mapping[int, str] = {}
        self.data_rank: int | None = None

    def phase(self, rank: int) -> Phase:
        """Return the phase of ``rank``, which has introduced itself."""
        seat = self.seats[rank]
        if seat.left:
            return Phase.LEFT
        if seat.stats is not None:
            return Phase.FINISHED
        if self.participants is None:
            return Phase.MET if seat.facts is None else Phase.KNOWN
        if rank not in self.participants:
            return Phase.BYSTANDER
        if not seat.ready:
            return Phase.PLANNED
        return Phase.RUNNING if self.started() else Phase.READY

    def absent(self) -> list[int]:
        """Return the ranks that have not introduced themselves and may still come."""
        return [
            rank for rank in range(self.world_size) if rank not in self.seats and rank not in self.left_out
        ]

    def facts(self) -> dict[int, Raw] | None:
        """Return the facts of each rank that is not left out, or None until all of these have sent them."""
        facts = {rank: known.facts for rank, known in sorted(self.seats.items()) if known.facts is not None}
        return facts if len(facts) + len(self.left_out) == self.world_size else None

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

    def started(self) -> bool:
        """Return whether all participants are ready."""
        return self.participants is not None and all(
            rank in self.seats and self.seats[rank].ready for rank in self.participants
        )

    def running(self) -> tuple[int, ...]:
        """Return the participants that are here; none before the plan."""
        return tuple(rank for rank in self.participants or () if rank in self.seats)

    def remove(self, rank: int) -> None:
        """Free the seat of ``rank`` for another process."""
        self.rank_of.pop(self.seats.pop(rank).connection, None)

    def takes_part(self, rank: int) -> bool:
        """Return whether ``rank`` has a part in the plan, or still may have one."""
        return self.participants is None or rank in self.participants

    def to_all(self, message: Message) -> list[tuple[int, Message]]:
        """Address ``message`` to every rank."""
        return [(connection, message) for connection in self.rank_of]
