"""A timeline as a Gantt chart that can be zoomed: data for the browser, and a legend. Pure functions.

    Timeline ──coarsened──> limited number of spans ──to_data──> JSON in the page ──page.js──> canvas

It works for timelines of runs, simulations and training. A timeline may have more spans than a screen can
show or a page should hold. Beyond a limit, each lane is cut into slices of equal length, and only the time
per activity is kept within a slice, so sums stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeedge.observe.timeline import Span, ThreadState, Timeline

__all__ = ["Mark", "Shade", "coarsened", "legend", "shade", "to_data"]

MAX_SPANS = 12_000
"""Largest number of spans, which take about 250 kB in the page."""
MAX_LANES = 128
_US = 1e-6


@dataclass(frozen=True)
class Shade:
    """Appearance of an activity.

    Colours are from Okabe and Ito's palette, which everybody can tell apart. Waits are also hatched, so that
    they can be recognised without colour.
    """

    doing: str
    label: str
    colour: str
    pattern: str = ""
    """Pattern: ``/``, ``\\``, ``.`` or empty."""

    @property
    def key(self) -> str:
        """Name for style sheets."""
        return self.doing.replace(" ", "-")


_SHADES = (
    Shade("compute", "computing", "#0072b2"),
    Shade("forward", "forward", "#0072b2"),
    Shade("backward", "backward", "#882255"),
    Shade("update", "update of the weights", "#117733"),
    Shade("decode", "decoding, receiving", "#56b4e9"),
    Shade("encode", "encoding, sending", "#009e73"),
    Shade("read", "reading input", "#44aa99"),
    Shade("write", "writing results", "#999933"),
    Shade("send", "on the link", "#cc79a7"),
    Shade("receive", "arriving", "#aa4499"),
    Shade("fill", "bubble: fill", "#b0b7bf", "."),
    Shade("drain", "bubble: drain", "#8a929b", "\\"),
    Shade("recover", "bubble: recovery", "#f0e442", "/"),
    Shade("idle", "bubble: waiting for requests", "#9aa8c7", "."),
    Shade("wait input", "bubble: waiting for input", "#e69f00", "/"),
    Shade("wait link", "bubble: waiting for the link", "#d55e00", "\\"),
)


def shade(doing: str) -> Shade:
    """Return the shade of an activity, given by the value of its ``ThreadState``."""
    return next((known for known in _SHADES if known.doing == doing), Shade(doing, doing, "#777777"))


def legend(timeline: Timeline) -> tuple[Shade, ...]:
    """Return the shades of all activities in the timeline, work before waits."""
    drawn = {span.doing.value for span in timeline.spans}
    listed = tuple(known for known in _SHADES if known.doing in drawn)
    return listed + tuple(shade(doing) for doing in sorted(drawn - {known.doing for known in listed}))


def coarsened(timeline: Timeline, *, spans: int = MAX_SPANS, lanes: int = MAX_LANES) -> Timeline:
    """Return ``timeline`` reduced to a size that can be drawn.

    Args:
        timeline: Timeline of any size.
        spans: Largest number of spans, plus a few for each lane.
        lanes: Largest number of lanes, evenly chosen, including the first and the last.
    """
    by_lane: dict[tuple[int, str], list[Span]] = {}
    for span in timeline.spans:
        by_lane.setdefault((span.rank, span.lane), []).append(span)
    names = list(by_lane)
    if len(names) > lanes:
        names = [names[round(at * (len(names) - 1) / (lanes - 1))] for at in range(lanes)]
    total = sum(len(by_lane[name]) for name in names)
    kept: list[Span] = []
    for name in names:
        share = max(8, spans // max(1, len(names)))
        kept += by_lane[name] if total <= spans else _slices(by_lane[name], timeline.length_s, share)
    return Timeline(timeline.length_s, tuple(kept))


def _slices(lane: Sequence[Span], length_s: float, limit: int) -> Iterator[Span]:
    """Yield the spans of a lane or, if they are too many, slices with the same sums."""
    if len(lane) <= limit or length_s <= 0:
        yield from lane
        return
    kinds = len({span.doing for span in lane})
    count = max(1, limit // kinds)
    width = length_s / count
    slices: list[dict[ThreadState, float]] = [{} for _ in range(count)]
    begins = [length_s] * count
    for span in lane:
        for number, start, end in _pieces(span, width, count):
            slices[number][span.doing] = slices[number].get(span.doing, 0.0) + end - start
            begins[number] = min(begins[number], start)
    rank, name = lane[0].rank, lane[0].lane
    for begin, spent in zip(begins, slices, strict=True):
        at = begin
        for doing, seconds in spent.items():
            if seconds > 0:
                yield Span(rank, name, doing, at, at + seconds)
                at += seconds


def _pieces(span: Span, width: float, count: int) -> Iterator[tuple[int, float, float]]:
    """Yield the parts of ``span`` by slice."""
    start = span.start_s
    number = min(count - 1, int(start / width))
    while number < count - 1 and (number + 1) * width < span.end_s:
        end = max(start, (number + 1) * width)
        yield number, start, end
        start, number = end, number + 1
    yield number, start, max(start, span.end_s)


@dataclass(frozen=True)
class Mark:
    """A time between two moments, marked over all lanes."""

    label: str
    start_s: float
    end_s: float


def to_data(timeline: Timeline, marks: Sequence[Mark] = ()) -> dict[str, Any]:
    """Return the data that ``page.js`` draws: lanes of columns, times in microseconds.

    ``doing`` holds indices into ``shades``; ``start`` holds differences to the previous start.
    """
    shades = legend(timeline)
    places = {known.doing: place for place, known in enumerate(shades)}
    lanes = []
    for rank, name in timeline.lanes:
        spans = [span for span in timeline.spans if (span.rank, span.lane) == (rank, name)]
        starts = [round(span.start_s / _US) for span in spans]
        lanes.append(
            {
                "rank": rank,
                "lane": name,
                "doing": [places[span.doing.value] for span in spans],
                "start": [at - before for at, before in zip(starts, [0, *starts], strict=False)],
                "length": [
                    round(span.end_s / _US) - start for span, start in zip(spans, starts, strict=True)
                ],
                "microbatch": [-1 if span.microbatch is None else span.microbatch for span in spans],
            }
        )
    return {
        "length": round(timeline.length_s / _US),
        "shades": [
            {"label": known.label, "colour": known.colour, "pattern": known.pattern} for known in shades
        ],
        "lanes": lanes,
        "marks": [
            {"label": mark.label, "start": round(mark.start_s / _US), "end": round(mark.end_s / _US)}
            for mark in marks
        ],
    }
