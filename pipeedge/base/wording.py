r"""Formatting of figures, counts and foreign text for messages, tables and pages. Pure functions.

figure(12113.4)          12,110        four significant digits, never an exponent
count(1, "thread")       1 thread      count(2, "thread")    2 threads
printable("a\x1b[2J")    a\x1b[2J      control characters are escaped
"""

from __future__ import annotations

import itertools
import math
import unicodedata
from collections.abc import Sequence
from decimal import Decimal
from difflib import get_close_matches

__all__ = ["count", "excerpt", "figure", "hint", "percent", "plural", "printable", "shortened"]

_LARGEST = 1e18
_SMALLEST = 1e-12
"""Absolute values above and below which a figure is not printed digit by digit."""


def figure(value: float, digits: int = 4) -> str:
    """Return ``value`` with thousands separators and without an exponent.

    Args:
        value: Number to format; an integer is shown in full.
        digits: Significant digits of any other number; trailing zeros are dropped.
    """
    if isinstance(value, int) and abs(value) < _LARGEST:
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= _LARGEST:
        return "above 10^18" if value > 0 else "below -10^18"
    if abs(value) < _SMALLEST:
        return "0"
    text = f"{Decimal(f'{value:.{digits}g}'):,f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(part: float) -> str:
    """Return a relative change as a signed percentage: ``+3.2%``, ``+12,340.0%``."""
    return f"{round(part, 3) + 0.0:+,.1%}" if abs(part) < _LARGEST else figure(part)  # without a zero's sign


def plural(number: float, one: str, many: str | None = None) -> str:
    """Return the form of a noun that goes with ``number``.

    Args:
        number: Number of things.
        one: Singular of the noun.
        many: Plural of the noun, if it is not formed with ``-s``, ``-es`` or ``-ies``.
    """
    if number == 1:
        return one
    if many is not None:
        return many
    if one.endswith("y") and one[-2:-1] not in ("a", "e", "o", "u"):
        return f"{one[:-1]}ies"
    return f"{one}es" if one.endswith(("ch", "sh", "s", "x")) else f"{one}s"


def count(number: int, one: str, many: str | None = None) -> str:
    """Return ``number`` with the form of the noun that goes with it: ``1 rank``, ``12,000 ranks``."""
    return f"{figure(number)} {plural(number, one, many)}"


def printable(text: object) -> str:
    """Return ``text`` on one line, with control characters escaped so that they cannot steer a terminal.

    File and host names, arguments, and text from peers and servers may contain escape sequences, line
    breaks, and characters that reverse the writing direction.
    """
    return "".join(
        letter
        if letter.isprintable() or unicodedata.category(letter) == "Zs"
        else letter.encode("unicode_escape").decode("ascii")
        for letter in str(text)
    )


def excerpt(text: object, most: int = 40) -> str:
    """Return at most ``most`` characters from the start of foreign ``text``, printable, for a message."""
    shown = printable(str(text)[: most + 1])
    return shown if len(shown) <= most else f"{shown[: max(0, most - 1)]}…"


def shortened(names: Sequence[str], width: int) -> list[str]:
    """Return ``names`` shortened to at most ``width`` characters each, still distinct if possible.

    An ellipsis replaces the middle of each name, or else the prefix or suffix that all names share, such as
    a common domain.
    """
    if all(len(name) <= width for name in names):
        return list(names)
    head = _common(names)
    tail = _common([name[::-1] for name in names])
    ways = [
        [_cut(name, width) for name in names],
        [_cut(name[: len(name) - tail] + "…", width) for name in names],
        [_cut("…" + name[head:], width) for name in names],
        [_cut("…" + name[head : max(head, len(name) - tail)] + "…", width) for name in names],
    ]
    return max(ways, key=lambda way: len(set(way)))  # on a tie, the first one


def _common(names: Sequence[str]) -> int:
    """Return the length of the prefix that all names share."""
    same = (len(set(letters)) == 1 for letters in zip(*names, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, same))


def _cut(name: str, width: int) -> str:
    if len(name) <= width:
        return name
    kept = max(0, width - 1)
    tail = (kept + 1) // 2
    return name[: kept - tail] + "…"[:width] + name[len(name) - tail :]


def hint(wrong: str, known: Sequence[str]) -> str:
    """Return ``; did you mean NAME?`` with the name closest to ``wrong``, or an empty string if none is."""
    by_letters = {_letters(name): name for name in known}
    near = get_close_matches(_letters(wrong), by_letters, n=1)
    return f"; did you mean {by_letters[near[0]]}?" if near else ""


def _letters(name: str) -> str:
    """Return the part of a name to compare: leading dashes would make unrelated options look similar."""
    return name.lower().lstrip("-")
