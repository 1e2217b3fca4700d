"""Assemble the records of all ranks: the timeline of the run, and the speed of its stages. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeedge.observe.records import EpochRecord, LaneRecord, LinkRecord, Recording, Row, Transfer, WorkRecord
from pipeedge.observe.timeline import LaneId, LaneKind, Span, ThreadState, Timeline, lane_of_epoch

__all__ = ["assemble", "series"]

_POINTS = 200
"""Number of points in a series."""
_US = 1e-6


@dataclass(frozen=True)
class _Stretch:
    """The part of a run that an epoch takes on a lane, in seconds from the beginning of the run."""

    start_s: float | None = 0.0
    """Time at which the epoch before it failed; None to begin with the lane's own wait."""
    ready_s: float = 0.0
    """Time at which its ranks started."""
    end_s: float | None = None
    """Time at which it failed; None to end with the lane's last microbatch."""
    is_first: bool = True


def assemble(
    recordings: Sequence[Recording],
    began_s: float,
    length_s: float,
    earlier: Sequence[Recording] = (),
    epochs: Sequence[EpochRecord] = (),
) -> Timeline:
    """Return the timeline of a run.

    Lanes with phases leave no gap: before its first microbatch a lane waits for the pipeline to fill, after
    its last one for the others to be done. In a run of one epoch they reach from 0 to the end. After a
    failure, the lanes of an epoch begin where the one before it failed, with the recovery.

    Args:
        recordings: Recordings of all ranks.
        began_s: Beginning of the run on the hub's clock.
        length_s: Length of the run in seconds.
        earlier: Recordings of epochs that ended before the last one, which have lanes of their own.
        epochs: Epochs of a run that can go on after failures, in order.
    """
    stretches = _stretches(epochs, length_s)
    spans: list[Span] = []
    for recording in sorted(recordings, key=lambda one: one.rank):
        # Two recordings of one rank are of a change that was under way.
        stretch = stretches.get(recording.epoch, _Stretch(end_s=length_s, is_first=recording.epoch <= 1))
        for lane in recording.lanes:
            spans += _lane_spans(recording.rank, lane, began_s, length_s, stretch)
        for link in recording.links:
            spans += _link_spans(recording.rank, link, began_s, length_s)
        for work in recording.works:
            spans += _work_spans(recording.rank, work, began_s, length_s)
    for recording in sorted(earlier, key=lambda one: (one.epoch, one.rank)):
        stretch = stretches.get(recording.epoch, _Stretch(None, is_first=False))
        spans += _earlier_spans(recording, began_s, length_s, stretch)
    return Timeline(length_s, tuple(spans))


def _stretches(epochs: Sequence[EpochRecord], length_s: float) -> dict[int, _Stretch]:
    """Return the parts of a run that its epochs take."""
    found = {}
    for number, epoch in enumerate(epochs):
        after = epochs[number + 1] if number + 1 < len(epochs) else None
        found[epoch.number] = _Stretch(
            start_s=0.0 if number == 0 else epoch.failed_s if epoch.recovered else None,
            ready_s=epoch.started_s if epoch.recovered else 0.0,
            end_s=length_s if after is None else after.failed_s if after.recovered else None,
            is_first=number == 0,
        )
    return found


def _earlier_spans(
    recording: Recording, began_s: float, length_s: float, stretch: _Stretch
) -> Iterator[Span]:
    """Yield what a rank did in an epoch that has ended, on lanes of their own."""
    for lane in recording.lanes:
        for span in _lane_spans(recording.rank, lane, began_s, length_s, stretch):
            yield replace(span, lane=lane_of_epoch(recording.epoch, span.lane))
    for link in recording.links:
        for span in _link_spans(recording.rank, link, began_s, length_s):
            yield replace(span, lane=lane_of_epoch(recording.epoch, span.lane))


def _lane_spans(
    rank: int, lane: LaneRecord, began_s: float, length_s: float, stretch: _Stretch
) -> Iterator[Span]:
    first_s = lane.rows[0].start_s - began_s if lane.rows else stretch.ready_s
    # An epoch that the run changed to begins on each lane as soon as the one before it has ended there.
    at = max(0.0, first_s - lane.fill_s if stretch.start_s is None else min(first_s, stretch.start_s))

    def until(end_s: float, doing: ThreadState, microbatch: int | None = None) -> Iterator[Span]:
        # Each span begins where the one before it ended: clocks that drift leave no gap.
        nonlocal at
        end_s = min(end_s, length_s)
        if end_s > at:
            yield Span(rank, lane.lane.label, doing, at, end_s, microbatch)
            at = end_s

    yield from until(min(first_s, stretch.ready_s), ThreadState.RECOVER)
    if lane.rows and (not stretch.is_first or lane.phases[0].is_wait):
        yield from until(first_s, ThreadState.FILL)
    for row in lane.rows:
        end = row.start_s - began_s
        for phase, seconds in zip(lane.phases, row.seconds, strict=True):
            end += seconds
            if seconds > 0:
                yield from until(end, phase, row.number)
    if stretch.end_s is not None:
        yield from until(stretch.end_s, ThreadState.DRAIN)


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
        recordings: Recordings of all ranks.
        began_s: Beginning of the run on the hub's clock.
        window: Least number of microbatches per point.
        points: Largest number of points.

    Returns:
        For each stage, of each epoch, columns of equal length: ``t_s`` (end of each window), ``items_per_s``,
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
                    **({"epoch": recording.epoch} if recording.epoch else {}),
                    **columns,
                    **({"decided": decided} if decided else {}),
                }
            )
    return sorted(found, key=lambda one: (int(one["stage"]), int(one.get("epoch", 0))))


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
