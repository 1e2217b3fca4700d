"""Assemble the records of all ranks: the timeline of the run, and the speed of its stages. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from pipeedge.observe.records import LaneRecord, LinkRecord, Recording, Row, Transfer, WorkRecord
from pipeedge.observe.timeline import LaneId, LaneKind, Span, ThreadState, Timeline, lane_of_epoch

__all__ = ["assemble", "series"]

_POINTS = 200
"""Number of points in a series."""
_US = 1e-6


def assemble(
    recordings: Sequence[Recording], began_s: float, length_s: float, earlier: Sequence[Recording] = ()
) -> Timeline:
    """Return the timeline of a run.

    Lanes with phases reach from 0 to the end without a gap: before its first microbatch a lane waits for the
    pipeline to fill, after its last one for the others to be done.

    Args:
        recordings: recordings of all ranks.
        began_s: beginning of the run on the hub's clock.
        length_s: length of the run in seconds.
        earlier: recordings of epochs that ended before the last one, which have lanes of their own.
    """
    spans: list[Span] = []
    for recording in sorted(recordings, key=lambda one: one.rank):
        for lane in recording.lanes:
            spans += _lane_spans(recording.rank, lane, began_s, length_s, is_later=recording.epoch > 1)
        for link in recording.links:
            spans += _link_spans(recording.rank, link, began_s, length_s)
        for work in recording.works:
            spans += _work_spans(recording.rank, work, began_s, length_s)
    for recording in sorted(earlier, key=lambda one: (one.epoch, one.rank)):
        spans += _earlier_spans(recording, began_s, length_s)
    return Timeline(length_s, tuple(spans))


def _earlier_spans(recording: Recording, began_s: float, length_s: float) -> Iterator[Span]:
    """Yield what a rank did in an epoch that has ended, on lanes of their own, without fill and drain."""
    for lane in recording.lanes:
        for span in _lane_spans(recording.rank, lane, began_s, length_s, is_later=True):
            if span.doing not in (ThreadState.FILL, ThreadState.DRAIN):
                yield replace(span, lane=lane_of_epoch(recording.epoch, span.lane))
    for link in recording.links:
        for span in _link_spans(recording.rank, link, began_s, length_s):
            yield replace(span, lane=lane_of_epoch(recording.epoch, span.lane))


def _lane_spans(
    rank: int, lane: LaneRecord, began_s: float, length_s: float, *, is_later: bool
) -> Iterator[Span]:
    at = 0.0

    def until(end_s: float, doing: ThreadState, microbatch: int | None = None) -> Iterator[Span]:
        # Each span begins where the one before it ended: clocks that drift leave no gap.
        nonlocal at
        end_s = min(end_s, length_s)
        if end_s > at:
            yield Span(rank, lane.lane.label, doing, at, end_s, microbatch)
            at = end_s

    if lane.rows and (is_later or lane.phases[0].is_wait):
        yield from until(lane.rows[0].start_s - began_s, ThreadState.FILL)
    for row in lane.rows:
        end = row.start_s - began_s
        for phase, seconds in zip(lane.phases, row.seconds, strict=True):
            end += seconds
            if seconds > 0:
                yield from until(end, phase, row.number)
    yield from until(length_s, ThreadState.DRAIN)


def _link_spans(rank: int, link: LinkRecord, began_s: float, length_s: float) -> Iterator[Span]:
    for one in link.transfers:
        start, end = max(0.0, one.start_s - began_s), min(length_s, one.end_s - began_s)
        if end > start:
            yield Span(rank, link.lane.label, ThreadState.SEND, start, end, one.number)


def _work_spans(rank: int, record: WorkRecord, began_s: float, length_s: float) -> Iterator[Span]:
    for one in record.works:
        if one.start_s >= began_s:
            start = one.start_s - began_s
            yield Span(
                rank, record.lane.label, one.doing, start, max(start, one.end_s - began_s), one.microbatch
            )
    done = max(0.0, record.until_s - began_s)
    if record.works and done < length_s:
        yield Span(rank, record.lane.label, ThreadState.DRAIN, done, length_s)


def series(
    recordings: Sequence[Recording], began_s: float, *, window: int = 1, points: int = _POINTS
) -> list[dict[str, Any]]:
    """Return how fast each stage and its outgoing link were over time.

    Args:
        recordings: recordings of all ranks.
        began_s: beginning of the run on the hub's clock.
        window: least number of microbatches per point.
        points: largest number of points.

    Returns:
        For each stage columns of equal length: ``t_s`` (end of each window), ``items_per_s``,
        ``bytes_per_s`` (put on the link), ``link_bytes_per_s`` (while it was occupied; None if nothing
        was watched) and ``bits`` (mean; 32 for float32 as it is). Where the bits follow the bandwidth, also
        ``decided``: ``microbatch``, ``time_s``, ``bits`` (0: uncompressed), ``bytes_per_s``, ``reason`` of
        each decision.
    """
    found = []
    for recording in recordings:
        links = {link.lane: link for link in recording.links}
        for lane in recording.lanes:
            if lane.lane.kind is not LaneKind.STAGE or not lane.rows:
                continue
            stage = lane.lane.stages[0]
            link = links.get(LaneId.link(stage))
            columns = _columns(lane.rows, link.transfers if link else (), began_s, window, points)
            decided = [asdict(replace(one, time_s=one.time_s - began_s)) for one in recording.decided]
            found.append(
                {
                    "stage": stage,
                    "rank": recording.rank,
                    **columns,
                    **({"decided": decided} if decided else {}),
                }
            )
    return sorted(found, key=lambda one: int(one["stage"]))


def _columns(
    rows: Sequence[Row], transfers: Sequence[Transfer], began_s: float, window: int, points: int
) -> dict[str, list[float | None]]:
    columns: dict[str, list[float | None]] = {
        name: [] for name in ("t_s", "items_per_s", "bytes_per_s", "link_bytes_per_s", "bits")
    }
    since = rows[0].start_s
    for group in _groups(rows, window, points):
        whole = group[0]
        for row in group[1:]:
            whole = whole.with_next(row)
        until = group[-1].end_s
        length = max(until - since, _US)
        watched = [one for one in transfers if since <= one.end_s < until]
        busy = sum(one.end_s - one.start_s for one in watched)
        columns["t_s"].append(round(until - began_s, 6))
        columns["items_per_s"].append(_figure(whole.items / length))
        columns["bytes_per_s"].append(_figure(whole.bytes / length))
        columns["link_bytes_per_s"].append(
            _figure(sum(one.bytes for one in watched) / busy) if busy else None
        )
        columns["bits"].append(_figure(whole.bits / whole.microbatches))
        since = until
    return columns


def _groups(rows: Sequence[Row], window: int, points: int) -> Iterator[Sequence[Row]]:
    """Split rows into at most ``points`` groups of at least ``window`` microbatches."""
    size = max(1, -(-window // rows[0].microbatches), -(-len(rows) // points))
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _figure(value: float) -> float:
    """Round to six digits, more than any measurement has."""
    return float(f"{value:.6g}")
