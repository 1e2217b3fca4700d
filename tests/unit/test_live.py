"""Test the live display: rates and fractions from counters, with and without a terminal."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from pipeedge.observe import live
from pipeedge.observe.live import Display, Progress
from pipeedge.observe.metrics import StageWork


def test_rates_are_the_current_and_the_mean() -> None:
    progress = Progress(1000, [0], 100.0)
    assert progress.at(101.0, 0).items_per_s is None
    for second in range(1, 11):
        progress.at(100.0 + second, 10 * second)
    shown = progress.at(115.0, 100 + 5 * 40)
    assert shown.items_per_s == pytest.approx(40)
    assert shown.mean_items_per_s == pytest.approx(300 / 15)
    assert shown.left_s == pytest.approx(700 / 40)


def test_waiting_for_input_is_recent() -> None:
    progress = Progress(1000, [0], 0.0)
    assert progress.at(0.0, 0).wait_input == 0
    assert progress.at(4.0, 0, 4.0).wait_input == 1
    for second in range(5, 15):
        shown = progress.at(second, 10, 4.0 + 0.2 * (second - 4))
    assert shown.wait_input == pytest.approx(0.2)
    assert live._line(shown).startswith("10 of 1,000 items; 0 items/s now, ")
    assert "waits 20% for input" in live._line(shown)
    assert "for input" not in live._line(progress.at(100.0, 20, 6.0))


def test_fractions_cover_the_last_heartbeats() -> None:
    progress = Progress(10, [1, 0], 0.0)
    progress.heard({0: StageWork(1.0, 1.0, 0.0, 8)})
    progress.heard({0: StageWork(1.0, 3.0, 0.0, 4), 1: StageWork(0.5, 0.0, 1.5)})
    first, second = progress.at(1.0, 5).stages
    assert (first.stage, first.rank, first.busy, first.wait_link, first.bits) == (0, 1, 0.25, 0.75, 0)
    assert (second.stage, second.rank, second.busy, second.wait_input, second.bits) == (1, 0, 0.25, 0.75, 4)
    progress.heard({0: StageWork(1.0, 3.0, 0.0, 4)})  # the same beat again
    assert progress.at(2.0, 5).stages[1] == second
    for beat in range(1, 8):
        progress.heard({0: StageWork(1.0 + beat, 3.0, 0.0, 4)})
    assert progress.at(3.0, 5).stages[1].busy == 1.0


def displayed(console: Console, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the output of a display until it has shown both stages."""
    monkeypatch.setattr(live, "_TABLE_S", 0.01)
    monkeypatch.setattr(live, "_LINE_S", 0.01)
    shown = threading.Event()
    asked = 0

    def items() -> int:
        nonlocal asked
        asked += 1
        if asked > 2:
            shown.set()
        return 250

    progress = Progress(1000, [0, 1], 0.0)
    display = Display(progress, lambda: console, items, lambda: 10.0)
    display.heard({0: StageWork(3.0, 1.0, 0.0, 8), 1: StageWork(0.0, 0.5, 0.5)})  # before it shows anything
    with display:
        assert shown.wait(60)
    stream = console.file
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


def test_without_a_terminal_there_are_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = displayed(Console(file=io.StringIO(), width=80), monkeypatch)
    assert "\x1b" not in text
    assert text.splitlines()[0] == (
        "250 of 1,000 items; 25 items/s now, 25 on average, 0:30 left; stage 0 75% busy, 25% input, 0% link, "
        "8 bits; stage 1 0% busy, 50% input, 50% link, 0 bits"
    )


@pytest.mark.parametrize("width", [60, 120])
def test_a_terminal_shows_an_updating_table(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor")
    text = displayed(console, monkeypatch)
    assert "\x1b[?25l" in text  # hidden while it runs,
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # and shown again
    assert "stage 1" in text


@pytest.mark.parametrize(
    ("width", "shown"), [(120, "8 bits"), (90, "▒"), (60, "link"), (45, "link"), (30, "busy")]
)
def test_the_table_leaves_columns_out_rather_than_wrap(width: int, shown: str) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    stages = tuple(live.StageShown(stage, stage, 0.5, 0.25, 0.25, 8) for stage in range(3))
    state = live.DisplayState(2500, 100_000, 1234.5, 1200.4, 0.5, stages)
    lines = console.render_lines(live._table(state, console), console.options, pad=False)
    texts = ["".join(segment.text for segment in line) for line in lines]
    assert len(texts) == 1 + len(stages)
    assert all(len(text) <= width for text in texts)
    assert texts[0].lstrip("━╸╺ ").startswith("2,500 of 100,000 items")
    assert shown in texts[2]


def test_durations_read_as_people_write_them() -> None:
    assert [live._duration(seconds) for seconds in (0, 59.6, 3599, 3600)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
    ]
