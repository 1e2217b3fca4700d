"""Show the progress of a run on the data rank: a table that is updated, or a line every few seconds.

items done, waits, heartbeats of the stages ──Progress (pure)──> Shown ──┬─ on a terminal: a table
                                                                         └─ elsewhere: lines
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from pipeedge.base.wording import count, figure
from pipeedge.observe.metrics import StageWork

if TYPE_CHECKING:  # rich takes a while to import, and a short run shows nothing
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["Display", "DisplayState", "Progress", "StageShown"]

_TABLE_S = 1.0
_LINE_S = 5.0
_NOW_S = 5.0
"""Seconds over which the current rate is averaged."""
_BEATS = 6
"""Heartbeats over which a stage's fractions are averaged; a microbatch may take longer than one second."""
_BAR = 24
_ANY_WIDTH = 10_000
_FELT = 0.05
"""Smallest fraction of time spent waiting for input that is shown."""
_BUSY, _INPUT, _LINK = "█", "░", "▒"


@dataclass(frozen=True)
class StageShown:
    """Fractions of its recent time that a stage spent computing and waiting."""

    stage: int
    rank: int
    busy: float
    wait_input: float
    wait_link: float
    bits: int
    """Bits per value on its outgoing link."""


@dataclass(frozen=True)
class DisplayState:
    """State of the display at one moment."""

    items: int
    total: int
    items_per_s: float | None
    """Current rate of items, or of tokens where text is generated; None before the first result."""
    mean_items_per_s: float | None
    wait_input: float
    """Fraction of the recent time in which nothing was sent because the input was being read."""
    stages: tuple[StageShown, ...]
    counts: str = "items"
    """What the rates are of: ``items``, or ``tokens``, of which nobody knows how many are left."""

    @property
    def left_s(self) -> float | None:
        """Seconds until all items are done, at the current pace; None if it is not known."""
        pace = self.items_per_s or self.mean_items_per_s
        return (self.total - self.items) / pace if pace and self.counts == "items" else None


class Progress:
    """Rates and fractions computed from growing counters. Pure: times are passed in.

    Args:
        total: Number of items of the run.
        ranks: Rank of each stage.
        began_s: Time at which the run began, in seconds.
        items: Number of items that were done before.
        counts: What rates are of, ``items`` or ``tokens``.
    """

    def __init__(
        self, total: int, ranks: Sequence[int], began_s: float, items: int = 0, *, counts: str = "items"
    ) -> None:
        self._total = total
        self._counts = counts
        self._ranks = tuple(ranks)
        self._began_s = began_s
        self._before = items
        self._past: deque[tuple[float, int, float]] = deque([(began_s, items, 0.0)])
        """Recent times, with the items done and the seconds spent waiting for input until then."""
        self._work: dict[int, deque[StageWork]] = {}
        self._shown: dict[int, StageShown] = {}

    def heard(self, statuses: Mapping[int, StageWork]) -> None:
        """Record the work of the stages, by rank. Its counters only grow."""
        for stage, rank in enumerate(self._ranks):
            now = statuses.get(rank)
            known = self._work.setdefault(rank, deque([StageWork()], maxlen=_BEATS))
            if now is None or now.seconds <= known[-1].seconds:
                continue
            before = known[0]
            spent = now.seconds - before.seconds
            known.append(now)
            self._shown[rank] = StageShown(
                stage,
                rank,
                (now.busy_s - before.busy_s) / spent,
                (now.wait_input_s - before.wait_input_s) / spent,
                (now.wait_link_s - before.wait_link_s) / spent,
                now.bits,
            )

    def at(self, now_s: float, items: int, waited_s: float = 0.0, counted: int | None = None) -> DisplayState:
        """Return the state at ``now_s``.

        Args:
            now_s: The time.
            items: Number of items that are done.
            waited_s: Seconds so far in which input was waited for.
            counted: What rates are computed of, if not of the items.
        """
        rated = items if counted is None else counted
        self._past.append((now_s, rated, waited_s))
        while len(self._past) > 2 and self._past[1][0] <= now_s - _NOW_S:
            self._past.popleft()
        then_s, then, waited_then_s = self._past[0]
        done = rated - self._before
        return DisplayState(
            items,
            self._total,
            (rated - then) / (now_s - then_s) if done and now_s > then_s else None,
            done / (now_s - self._began_s) if done and now_s > self._began_s else None,
            min(1.0, (waited_s - waited_then_s) / (now_s - then_s)) if now_s > then_s else 0.0,
            tuple(self._shown[rank] for rank in self._ranks if rank in self._shown),
            self._counts,
        )


class Display:
    """Shows the progress of a run, in a thread of its own, until it is left. A context manager.

    Args:
        progress: Progress of the run.
        open_console: Opens the console to print on; called by the display's thread, after a while.
        items: Function that returns the number of items done.
        clock: Clock of ``progress``, in seconds.
        waited_s: Function that returns the seconds spent waiting for input.
        counted: Function that returns what the rates are of; None for the items.
    """

    def __init__(
        self,
        progress: Progress,
        open_console: Callable[[], Console],
        items: Callable[[], int],
        clock: Callable[[], float],
        waited_s: Callable[[], float] = lambda: 0.0,
        counted: Callable[[], int] | None = None,
    ) -> None:
        self._counted = counted
        self._progress = progress
        self._open_console = open_console
        self._items = items
        self._clock = clock
        self._waited_s = waited_s
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._show, name="display", daemon=True)

    def heard(self, statuses: Mapping[int, StageWork]) -> None:
        """Record the work of the stages, by rank. Safe to call from any thread."""
        with self._lock:
            self._progress.heard(statuses)

    def __enter__(self) -> Display:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()

    def _show(self) -> None:
        if self._ending.wait(_TABLE_S):
            return
        with suppress(OSError, ValueError):  # the run continues without a display
            console = self._open_console()
            if console.is_terminal:
                self._show_table(console)
            else:
                self._show_lines(console)

    def _show_table(self, console: Console) -> None:
        from rich.live import Live

        # Output of other threads goes through ``Live`` and appears above the table. Standard error is only
        # redirected if it is a terminal too; messages that go to a file must stay there.
        with Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=not console.stderr,
            redirect_stderr=sys.stderr.isatty(),
        ) as live:
            live.update(_table(self._now(), console), refresh=True)
            while not self._ending.wait(_TABLE_S):
                live.update(_table(self._now(), console), refresh=True)

    def _show_lines(self, console: Console) -> None:
        wait_s = max(0.0, _LINE_S - _TABLE_S)
        while not self._ending.wait(wait_s):
            console.print(_line(self._now()), highlight=False, markup=False, soft_wrap=True)
            wait_s = _LINE_S

    def _now(self) -> DisplayState:
        with self._lock:
            counted = None if self._counted is None else self._counted()
            return self._progress.at(self._clock(), self._items(), self._waited_s(), counted)


def _table(shown: DisplayState, console: Console) -> RenderableType:
    """Return the display, with as many of its columns as the console has room for."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    done = f"{figure(shown.items)} of {count(shown.total, 'item')}"
    bar = ProgressBar(total=max(1, shown.total), completed=shown.items, width=_BAR)
    rate, waits = Text(_rate_text(shown)), Text(_input(shown))
    heads: list[list[RenderableType]] = [
        [bar, Text(done), rate, waits],
        [Text(done), rate, waits],
        [Text(done), rate],
        [Text(done)],
    ]
    full: list[list[RenderableType]] = [
        [f"stage {one.stage}, rank {one.rank}", _bar(one), _parts(one), _bits(one)] for one in shown.stages
    ]
    grids: list[list[list[RenderableType]]] = [
        full,
        [[name, bars, parts] for name, bars, parts, _ in full],
        [[name, parts] for name, _, parts, _ in full],
        [[f"stage {one.stage}", _parts(one)] for one in shown.stages],
        [[f"stage {one.stage}", f"{one.busy:.0%} busy"] for one in shown.stages],
    ]
    return Group(_first_that_fits([[head] for head in heads], console), _first_that_fits(grids, console))


def _first_that_fits(choices: Sequence[Sequence[Sequence[RenderableType]]], console: Console) -> Table:
    """Return the first choice of rows that is no wider than the console, or the last one."""
    from rich.table import Table

    for rows in choices:
        grid = Table.grid(padding=(0, 2))
        for row in rows:
            grid.add_row(*row)
        if console.measure(grid, options=console.options.update(width=_ANY_WIDTH)).maximum <= console.width:
            break
    return grid


def _bar(stage: StageShown) -> Text:
    busy = round(_BAR * stage.busy)
    link = min(_BAR - busy, round(_BAR * stage.wait_link))
    from rich.text import Text

    bar = Text()
    bar.append(_BUSY * busy, style="green")
    bar.append(_LINK * link, style="red")
    bar.append(_INPUT * (_BAR - busy - link), style="yellow")
    return bar


def _line(shown: DisplayState) -> str:
    parts = [f"{figure(shown.items)} of {count(shown.total, 'item')}"]
    if shown.items_per_s is not None:
        parts.append(_rate_text(shown))
    if waits := _input(shown):
        parts.append(waits)
    parts += [f"stage {stage.stage} {_parts(stage)}, {_bits(stage)}" for stage in shown.stages]
    return "; ".join(parts)


def _rate_text(shown: DisplayState) -> str:
    if shown.items_per_s is None or shown.mean_items_per_s is None:
        return "no result yet"
    left = f", {_duration(shown.left_s)} left" if shown.left_s is not None else ""
    rate = f"{figure(shown.items_per_s)} {shown.counts}/s now"
    return f"{rate}, {figure(shown.mean_items_per_s)} on average{left}"


def _input(shown: DisplayState) -> str:
    return f"waits {shown.wait_input:.0%} for input" if shown.wait_input >= _FELT else ""


def _parts(stage: StageShown) -> str:
    return f"{stage.busy:.0%} busy, {stage.wait_input:.0%} input, {stage.wait_link:.0%} link"


def _bits(stage: StageShown) -> str:
    return count(stage.bits, "bit")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
