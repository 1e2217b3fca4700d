"""Distributions and series as SVG, drawn here so that they need no script and follow the page's colours.

The picture stretches to the available width while lines keep theirs. Labels are ordinary text beside it, so
that they stay readable on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pipeedge.base.wording import count, figure

__all__ = ["Chart", "Curve", "histogram", "lines", "si"]

_WIDTH, _HEIGHT = 1000.0, 300.0
_BINS = 40
_TICKS = 4


@dataclass(frozen=True)
class Curve:
    """One series. A value of None is a gap."""

    name: str
    x: Sequence[float | None]
    y: Sequence[float | None]


@dataclass(frozen=True)
class Chart:
    """A picture and the text around it."""

    title: str
    svg: Markup
    y_ticks: tuple[str, ...]
    """Labels of the y axis from top to bottom, evenly spaced."""
    x_ticks: tuple[str, ...]
    """Labels of the x axis from left to right, evenly spaced."""
    names: tuple[str, ...] = ()
    """Names of the lines, in the order of their colours."""
    words: str = ""
    """Description of the picture for people who cannot see it."""


def histogram(title: str, values: Sequence[float], marks: Sequence[tuple[str, float]]) -> Chart:
    """Return a histogram of values, with marks.

    Args:
        title: Title of the chart.
        values: Values in seconds; at least one.
        marks: Names and values of vertical lines.
    """
    low, high = min(values), max(values)
    if high - low <= 1e-9 * high:  # all values are equal: draw a bar in the middle
        low, high = (0.95 * low, 1.05 * high) if high > 1e-12 else (0.0, 1.0)
    bins = min(_BINS, max(1, math.isqrt(len(values)) * 2))
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - low) / (high - low) * bins))] += 1
    top = max(counts)
    width = _WIDTH / bins
    parts = [
        Markup('<rect class="bar" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>').format(
            _at(number * width + 1),
            _at(_HEIGHT * (1 - count / top)),
            _at(width - 2),
            _at(_HEIGHT * count / top),
            f"{count} of {len(values)}: {si(low + number * (high - low) / bins)}s to "
            f"{si(low + (number + 1) * (high - low) / bins)}s",
        )
        for number, count in enumerate(counts)
        if count
    ]
    for name, value in marks:
        x = _at(_WIDTH * min(1.0, max(0.0, (value - low) / (high - low))))
        parts.append(
            Markup('<line class="mark" x1="{0}" x2="{0}" y1="0" y2="{1}"><title>{2}</title></line>').format(
                x, _at(_HEIGHT), f"{name}: {si(value)}s"
            )
        )
    said = ", ".join(f"{name} {si(value)}s" for name, value in marks)
    return Chart(
        title,
        _svg(parts, title),
        (str(top), "0"),
        tuple(f"{si(low + step * (high - low) / _TICKS)}s" for step in range(_TICKS + 1)),
        words=", ".join(filter(None, (count(len(values), "microbatch"), said))),
    )


def lines(title: str, series: Sequence[Curve], unit: str) -> Chart | None:
    """Return a chart of series over time in seconds, from 0, or None if there is nothing to draw.

    Args:
        title: Title of the chart.
        series: The series, in the order of their colours.
        unit: Unit of the values.
    """
    known = [
        (x, y)
        for line in series
        for x, y in zip(line.x, line.y, strict=True)
        if x is not None and y is not None
    ]
    if not known:
        return None
    right, top = max(x for x, _ in known) or 1.0, _round_up(max(y for _, y in known))
    parts = [
        Markup('<polyline class="series series-{}" points="{}"><title>{}</title></polyline>').format(
            number % 8,
            " ".join(f"{_at(_WIDTH * x / right)},{_at(_HEIGHT * (1 - y / top))}" for x, y in piece),
            line.name,
        )
        for number, line in enumerate(series)
        for piece in _pieces(line)
    ]
    return Chart(
        title,
        _svg(parts, title),
        tuple(_figure(top * (1 - step / 2), unit) for step in range(3)),
        tuple(f"{si(right * step / _TICKS)}s" for step in range(_TICKS + 1)),
        tuple(line.name for line in series),
        f"over {si(right)}s, up to {_figure(max(y for _, y in known), unit)}",
    )


def _pieces(line: Curve) -> Iterator[list[tuple[float, float]]]:
    """Yield the pieces of a line between gaps; a single point becomes a short line."""
    piece: list[tuple[float, float]] = []
    for x, y in [*zip(line.x, line.y, strict=True), (None, None)]:
        if x is not None and y is not None:
            piece.append((x, y))
        elif piece:
            (x, y), *more = piece
            yield piece if more else [(0.99 * x, y), (x, y)]
            piece = []


def _svg(parts: Sequence[Markup], title: str) -> Markup:
    grid = Markup("").join(
        Markup('<line class="grid" x1="0" x2="{}" y1="{}" y2="{}"/>').format(_at(_WIDTH), y, y)
        for y in (_at(0), _at(_HEIGHT / 2), _at(_HEIGHT))
    )
    return Markup(
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}{}</svg>'
    ).format(_at(_WIDTH), _at(_HEIGHT), title, grid, Markup("").join(parts))


def _figure(value: float, unit: str) -> str:
    """Format a value; units that are counted, such as items and bits, get no prefix."""
    return f"{si(value)}{unit}" if unit in ("s", "B", "B/s") else f"{figure(value)} {unit}"


def _at(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _round_up(value: float) -> float:
    """Round up to 1, 2, 2.5 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * (1 - 1e-9))


def si(value: float) -> str:
    """Return three digits with a prefix, such as ``1.25 m``, to be followed by the unit."""
    if value == 0:
        return "0 "
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ")):
        if abs(value) >= factor * 0.9995:
            return f"{figure(value / factor, 3)} {prefix}"
    return f"{figure(value / 1e-6, 2)} µ"
