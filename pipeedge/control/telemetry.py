"""Forward telemetry: the hub's clock, records, and the stages' work. Pure.

Nothing here affects a decision or delays the end of a session: a verdict replaces all queued messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeedge.base.fields import number
from pipeedge.control.messages import Message
from pipeedge.control.roster import Roster, Seat

__all__ = ["clock_answer", "forward_record", "pace", "stage_work"]

_MAX_RECORD_CHARS = 8 << 20
"""Number of characters that a rank may record in total."""


def clock_answer(seat: Seat, body: Mapping[str, Any], elapsed_s: float) -> list[tuple[int, Message]]:
    """Answer a rank that asks for the hub's clock."""
    return [(seat.connection, Message("clock", {"sent": number(body["sent"]), "there": elapsed_s}))]


def pace(roster: Roster) -> Message:
    """Return a heartbeat with the seconds that the slowest stage takes for a microbatch, if known."""
    slowest_s = max((seat.status.stage_s or 0.0 for seat in roster.seats.values()), default=0.0)
    return Message("beat", {"slowest_s": slowest_s})


def stage_work(roster: Roster) -> list[tuple[int, Message]]:
    """Tell the data rank how the stages spend their time, for its display."""
    data = _data_seat(roster)
    if data is None or not roster.started():
        return []
    statuses = {rank: roster.seats[rank].status for rank in roster.running()}
    work = {str(rank): status.work.to_body() for rank, status in statuses.items() if status.work}
    return [(data.connection, Message("work", {"work": work}))]


def forward_record(roster: Roster, rank: int, body: Mapping[str, Any]) -> list[tuple[int, Message]]:
    """Forward a part of what ``rank`` recorded to the data rank."""
    part = body["text"]
    if not isinstance(part, str):
        raise TypeError(f"{type(part).__name__} instead of text")
    seat = roster.seats[rank]
    seat.recorded += len(part)
    if seat.recorded > _MAX_RECORD_CHARS:
        raise ValueError("a record that is too long")
    data = _data_seat(roster)
    if data is None:
        return []
    return [(data.connection, Message("record", {"rank": rank, "text": part}))]


def _data_seat(roster: Roster) -> Seat | None:
    return roster.seats.get(roster.data_rank) if roster.data_rank is not None else None
