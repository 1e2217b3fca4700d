"""Test figures, counts and untrusted text in messages."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeedge.base.wording import count, excerpt, figure, hint, percent, plural, printable, shortened
from pipeedge.report.charts import Curve, lines, si


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (12113.4, "12,110"),
        (8168.2, "8,168"),
        (9999.96, "10,000"),
        (1e4, "10,000"),
        (1234567.0, "1,235,000"),
        (5.1652, "5.165"),
        (4.0, "4"),
        (0.1 + 0.2, "0.3"),
        (0.00001234, "0.00001234"),
        (-12113.4, "-12,110"),
        (0.0, "0"),
        (-1e-15, "0"),
        (12345678, "12,345,678"),
        (1e300, "above 10^18"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_figure_has_four_digits_and_no_exponent(value: float, shown: str) -> None:
    assert figure(value) == shown


@given(st.floats(), st.integers(1, 10))
def test_no_figure_has_an_exponent(value: float, digits: int) -> None:
    for shown in (figure(value, digits), percent(value), si(value) if math.isfinite(value) else ""):
        assert not any(mark in shown for mark in ("e+", "e-", "E+", "E-"))


@given(st.floats(1e-6, 1e15))
def test_a_figure_is_close_to_its_value(value: float) -> None:
    assert float(figure(value).replace(",", "")) == pytest.approx(value, rel=5e-4)


def test_axes_of_charts_have_no_exponents() -> None:
    chart = lines("pace", [Curve("stage 0", [1.0, 2.0], [9000.0, 9500.0])], "items/s")
    assert chart is not None
    assert chart.y_ticks == ("10,000 items/s", "5,000 items/s", "0 items/s")


@pytest.mark.parametrize(
    ("number", "noun", "shown"),
    [
        (1, "thread", "1 thread"),
        (0, "thread", "0 threads"),
        (2, "microbatch", "2 microbatches"),
        (1, "microbatch", "1 microbatch"),
        (3, "class", "3 classes"),
        (2, "entry", "2 entries"),
        (12000, "day", "12,000 days"),
    ],
)
def test_noun_agrees_with_its_number(number: int, noun: str, shown: str) -> None:
    assert count(number, noun) == shown
    assert plural(number, "is", "are") == ("is" if number == 1 else "are")


@pytest.mark.parametrize("text", ["\x1b[2J", "a\x07", "\x9b31m", "a\nb", "\u202egpj.exe", "\udcff", "\u2028"])
def test_control_characters_are_escaped(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown != text


@pytest.mark.parametrize("text", ["photos/été 1.png", "日本語", "a b", "C:\\x"])
def test_ordinary_names_are_unchanged(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    "pattern",
    ["edge-board-number-{}.example.org", "board-{}", "{}.a.long.domain.example.org", "room-{}-of-the-house"],
)
@pytest.mark.parametrize("width", [8, 12, 22])
def test_shortened_names_stay_distinct(pattern: str, width: int) -> None:
    names = [pattern.format(number) for number in range(20)]
    short = shortened(names, width)
    assert len(set(short)) == len(names)
    assert max(map(len, short)) <= width


def test_hint_suggests_the_closest_name() -> None:
    assert hint("vit-digts", ["bert-base-uncased", "vit-digits"]) == "; did you mean vit-digits?"
    assert hint("resnet", ["bert-base-uncased", "vit-digits"]) == ""


def test_excerpts_are_printable_and_short() -> None:
    assert excerpt(17) == "17"
    assert excerpt("x" * 40) == "x" * 40
    assert excerpt("x" * 41) == "x" * 39 + "…"
    assert excerpt("\x1b" * 99, 9) == "\\x1b\\x1b…"
