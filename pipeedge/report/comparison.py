"""Two runs side by side, as rows of a table. Pure functions.

A measured and a simulated run can be compared too.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from pipeedge.base.wording import excerpt, figure, percent
from pipeedge.report.bottleneck import find_bottleneck
from pipeedge.report.charts import si
from pipeedge.report.saved import SavedRun, SavedStage

__all__ = ["ComparedFigure", "FigureGroup", "compare_lines", "compare_runs", "summary_lines"]


@dataclass(frozen=True)
class ComparedFigure:
    """One figure of both runs."""

    name: str
    a: str
    b: str
    change: str = ""
    """Change from a to b, if both are numbers."""
    better: bool | None = None
    """Whether b is noticeably better than a, or None if neither direction is better."""


@dataclass(frozen=True)
class FigureGroup:
    """Rows that belong together."""

    title: str
    rows: tuple[ComparedFigure, ...]


_HAIR = 0.01
_TIMES = 9.0
"""Relative change above which the change is shown as a factor."""
NONE = "–"


def compare_runs(a: SavedRun, b: SavedRun) -> list[FigureGroup]:
    """Compare throughput and latency, each stage, and the requests."""
    groups = [FigureGroup("Whole run", tuple(_whole(a, b)))]
    for number, (left, right) in enumerate(zip_longest(a.stages, b.stages)):
        groups.append(FigureGroup(f"Stage {number}", tuple(_stage(left, right))))
    groups.append(FigureGroup("Asked differently", tuple(_asked(a, b))))
    return [group for group in groups if group.rows]


def _whole(a: SavedRun, b: SavedRun) -> Iterator[ComparedFigure]:
    for key, name, unit, more in (
        ("throughput_items_per_s", "throughput", "items/s", True),
        ("elapsed_s", "length", "s", None),
        ("items", "items", "", None),
    ):
        yield from _figures(name, a.figures.get(key), b.figures.get(key), unit, more)
    for key, name, unit, more in (
        ("prefill_tokens_per_s", "prompts", "tokens/s", True),
        ("decode_tokens_per_s", "answers", "tokens/s", True),
        ("first_token_s_p50", "first token, median", "s", False),
        ("first_token_s_p95", "first token, 95 %", "s", False),
        ("between_tokens_s_p50", "next token, median", "s", False),
        ("between_tokens_s_p95", "next token, 95 %", "s", False),
        ("cache_bytes", "cache", "B", False),
    ):
        yield from _figures(name, (a.text or {}).get(key), (b.text or {}).get(key), unit, more)
    for key, name in (("p50", "latency, median"), ("p95", "latency, 95 %"), ("max", "latency, maximum")):
        yield from _figures(name, (a.latency_s or {}).get(key), (b.latency_s or {}).get(key), "s", False)
    yield from _figures("accuracy", _top1(a), _top1(b), "", True)
    yield from _figures(
        "energy per item",
        a.energy.joules_per_item if a.energy else None,
        b.energy.joules_per_item if b.energy else None,
        "J",
        False,
    )


def _top1(run: SavedRun) -> float | None:
    return run.accuracy[0] / run.accuracy[1] if run.accuracy and run.accuracy[1] else None


def _stage(a: SavedStage | None, b: SavedStage | None) -> Iterator[ComparedFigure]:
    def both(of: Callable[[SavedStage], str]) -> tuple[str, str]:
        return (NONE if a is None else of(a)), (NONE if b is None else of(b))

    yield ComparedFigure("layers", *both(lambda stage: f"{stage.layers[0]}–{stage.layers[1]}"))
    yield ComparedFigure("on", *both(lambda stage: stage.place))
    yield ComparedFigure("number type", *both(lambda stage: stage.dtype))
    if (a and a.kernels) or (b and b.kernels):
        yield ComparedFigure("kernels", *both(lambda stage: stage.kernels or NONE))
    yield ComparedFigure("bits out", *both(lambda stage: str(stage.quant_bits or "uncompressed")))
    for key, name, unit, more in (
        ("compute_s_mean", "compute a microbatch", "s", False),
        ("recv_wait_s_mean", "wait for a microbatch", "s", None),
        ("send_s_mean", "send a microbatch", "s", False),
        ("bytes_out_mean", "bytes sent per microbatch", "B", None),
        ("rss_peak_mb", "peak memory", "MB", False),
    ):
        figures = [None if stage is None else stage.figures.get(key) for stage in (a, b)]
        yield from _figures(name, figures[0], figures[1], unit, more)
    for key in dict.fromkeys([*((a and a.seconds) or {}), *((b and b.seconds) or {})]):
        parts = [_part(stage, key) for stage in (a, b)]
        if any(parts):
            left, right = (NONE if part is None else f"{part:.1%}" for part in parts)
            yield ComparedFigure(f"{key}, part of its time", left, right)


def _part(stage: SavedStage | None, key: str) -> float | None:
    if stage is None or not stage.seconds:
        return None
    total = sum(stage.seconds.values())
    return stage.seconds.get(key, 0.0) / total if total else None


def _figures(
    name: str, a: float | None, b: float | None, unit: str, more: bool | None
) -> Iterator[ComparedFigure]:
    """Yield a row, unless neither run has the figure.

    Args:
        name: Name of the figure.
        a: Value of the first run.
        b: Value of the second run.
        unit: Unit of both.
        more: Whether more is better, or None if neither direction is better.
    """
    if a is None and b is None:
        return
    change, better = "", None
    if a and b is not None:
        part = b / a - 1
        change = percent(part) if part < _TIMES else f"× {figure(b / a, 3)}"
        if more is not None and abs(part) > _HAIR:
            better = (part > 0) == more
    left, right = (NONE if value is None else _figure(value, unit) for value in (a, b))
    yield ComparedFigure(name, left, right, change, better)


def _figure(value: float, unit: str) -> str:
    if unit in ("MB", "items/s", ""):
        return f"{figure(value, 5)} {unit}".rstrip()
    return f"{si(value)}{unit}"


def _asked(a: SavedRun, b: SavedRun) -> Iterator[ComparedFigure]:
    """Yield the differences in what was requested, rather than in results."""
    for name, left, right in (
        ("model", a.model, b.model),
        ("kind", _kind(a), _kind(b)),
        ("microbatch", _count(a, "ubatch_size"), _count(b, "ubatch_size")),
        ("items", _count(a, "items"), _count(b, "items")),
    ):
        if left != right:
            yield ComparedFigure(name, left, right)
    for name in dict.fromkeys([*a.versions, *b.versions]):
        left, right = a.versions.get(name, NONE), b.versions.get(name, NONE)
        if left != right:
            yield ComparedFigure(f"version of {name}", left, right)
    left_words, right_words = (_words(run.command) for run in (a, b))
    if left_words != right_words and a.command and b.command:
        yield ComparedFigure(
            "command",
            " ".join(word for word in left_words if word not in right_words) or NONE,
            " ".join(word for word in right_words if word not in left_words) or NONE,
        )


def _kind(run: SavedRun) -> str:
    return "simulated" if run.simulated else "measured"


def _count(run: SavedRun, key: str) -> str:
    value = run.figures.get(key)
    return NONE if value is None else figure(round(value))


def _words(command: str | None) -> list[str]:
    """Return options together with their values, so that a difference shows its option."""
    try:
        words = shlex.split(command or "")
    except ValueError:  # an unclosed quote
        words = (command or "").split()
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("-") and not word.startswith("-"):
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def compare_lines(a: SavedRun, b: SavedRun, room: int | None = None) -> list[str]:
    """Return the comparison as lines for a terminal.

    Args:
        a: First run.
        b: Second run.
        room: Width in characters that the table should not exceed, or None for any.
    """
    groups = compare_runs(a, b)
    rows = [(group.title, row) for group in groups for row in group.rows]
    widths = [
        min(_WIDEST, max(len(text) for text in texts))
        for texts in zip(*((row.name, row.a, row.b) for _, row in rows), strict=True)
    ]
    lines = [f"A  {a.name} ({_kind(a)})", f"B  {b.name} ({_kind(b)})"]
    wide = 2 * len(widths) + sum(widths)
    changes = room is None or wide + _CHANGE <= room  # they follow from the others
    if room is not None:
        half = max(_NARROWEST, (room - 2 * len(widths) - _NARROWEST) // 2)
        widths[1:] = [min(width, half) for width in widths[1:]]
        wide = 2 * len(widths) + sum(widths)
        widths[0] = max(_NARROWEST, min(widths[0], room - (wide - widths[0]) - _CHANGE * changes))
    for group in groups:
        lines += ["", group.title]
        for row in group.rows:
            cells = [row.name, row.a, row.b]
            if room is not None:
                cells = [excerpt(text, width) for text, width in zip(cells, widths, strict=True)]
            line = f"  {cells[0]:<{widths[0]}}  {cells[1]:>{widths[1]}}  {cells[2]:>{widths[2]}}"
            lines.append((line + f"{row.change:>{_CHANGE}}" * changes).rstrip())
    lines += [""] if changes else ["", "no room for: change", ""]
    for letter, run in (("A", a), ("B", b)):
        lines += [f"{letter}: {line}" for line in _bottleneck(run)]
    return lines


def summary_lines(run: SavedRun) -> list[str]:
    """Return a summary of one run in a few lines."""
    rate = run.figures.get("throughput_items_per_s")
    lines = [f"{run.model} ({_kind(run)})"]
    if rate is not None:
        lines.append(f"throughput  {figure(rate)} items/s")
    return lines + list(_bottleneck(run))


_WIDEST = 24
"""Widest column in characters on a terminal; longer texts stick out."""
_NARROWEST = 12
"""Characters below which a name is not shortened."""
_CHANGE = 10
"""Width of the column of changes, with the space before it."""


def _bottleneck(run: SavedRun) -> Iterator[str]:
    found = find_bottleneck(run)
    if found is not None:
        yield f"bottleneck  {found.line}"
