"""Forward telemetry: records, the stages' work, and their statistics. Pure.

Nothing here affects a decision or delays the end of a session: a verdict replaces all queued messages.
"""

from __future__ import annotations

from pipeedge.control.messages import Message, Pace, RankRecord, Summary, WorkByRank
from pipeedge.control.roster import Outgoing, Roster, Seat

__all__ = ["forward_record", "pace", "stage_work", "summary"]

_MAX_RECORD_CHARS = 8 << 20
"""Number of characters that a rank may record in total."""


def pace(roster: Roster) -> Message:
    """Return a heartbeat with the seconds that the slowest stage takes for a microbatch, if known."""
    slowest_s = max((seat.status.stage_s or 0.0 for seat in roster.seats.values()), default=0.0)
    return Pace(slowest_s)


def stage_work(roster: Roster) -> Outgoing:
    """Tell the data rank how the stages spend their time, for its display."""
    data = _data_seat(roster)
    if data is None or not roster.runs:
        return []
    statuses = {rank: roster.seats[rank].status for rank in roster.present()}
    work = {rank: status.work for rank, status in statuses.items() if status.work is not None}
    return [(data.connection, WorkByRank(work))]


def forward_record(roster: Roster, rank: int, part: str) -> Outgoing:
    """Forward a part of what ``rank`` recorded to the data rank.

    Raises:
        ValueError: The rank has recorded more than it may.
    """
    seat = roster.seats[rank]
    seat.recorded += len(part)
    if seat.recorded > _MAX_RECORD_CHARS:
        raise ValueError("a record that is too long")
    data = _data_seat(roster)
    if data is None:
        return []
    return [(data.connection, RankRecord(rank, part))]


def summary(roster: Roster) -> Outgoing:
    """Send the statistics of each rank to all when no rank is awaited any longer."""
    running = {rank: roster.seats[rank] for rank in roster.present()}
    if not all(seat.finished for seat in running.values()):
        return []
    return roster.to_all(
        Summary({rank: seat.stats for rank, seat in running.items() if seat.stats is not None})
    )


def _data_seat(roster: Roster) -> Seat | None:
    return roster.seats.get(roster.data_rank) if roster.data_rank is not None else None
