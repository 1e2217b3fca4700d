"""Figures, counts and foreign text, as people read them in messages, tables and pages. Pure.

figure(12113.4)          12,110        four significant digits, never an exponent
count(1, "thread")       1 thread      count(2, "thread")    2 threads
printable("a\\x1b[2J")    a\\x1b[2J      what would steer a terminal becomes visible
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
"""Figures beyond these are not read digit by digit."""


def figure(value: float, digits: int = 4) -> str:
    """Return ``value`` with separators between thousands and without an exponent.

    Args:
        value: a whole number is shown in full.
        digits: significant digits of any other number; zeros at its end are left out.
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
    """Return a change, of 1, as a signed percentage: ``+3.2%``, ``+12,340.0%``."""
    return f"{part:+,.1%}" if abs(part) < _LARGEST else figure(part)


def plural(number: float, one: str, many: str | None = None) -> str:
    """Return the form of a noun that goes with ``number``.

    Args:
        number: how many there are.
        one: its singular.
        many: its plural, where neither ``-s`` nor ``-es`` nor ``-ies`` makes it.
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
    """Return ``text`` on one line, with everything that a terminal would act upon made visible.

    Names of files and hosts, arguments and what peers and servers send may hold escape sequences, line
    breaks, and marks that reverse the direction of writing.
    """
    return "".join(
        letter
        if letter.isprintable() or unicodedata.category(letter) == "Zs"
        else letter.encode("unicode_escape").decode("ascii")
        for letter in str(text)
    )


def excerpt(text: object, most: int = 40) -> str:
    """Return the beginning of foreign ``text``, printable, for a message: at most ``most`` characters."""
    shown = printable(str(text)[: most + 1])
    return shown if len(shown) <= most else f"{shown[: max(0, most - 1)]}…"


def shortened(names: Sequence[str], width: int) -> list[str]:
    """Return ``names`` in at most ``width`` characters each, still distinct if there is a way.

    What is cut off is replaced by an ellipsis: the middle of each name, or else what all have in common at
    their ends, as hosts of one domain do.
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
    return max(ways, key=lambda way: len(set(way)))  # the first of the best


def _common(names: Sequence[str]) -> int:
    """Return the number of letters with which all names begin."""
    same = (len(set(letters)) == 1 for letters in zip(*names, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, same))


def _cut(name: str, width: int) -> str:
    if len(name) <= width:
        return name
    kept = max(0, width - 1)
    tail = (kept + 1) // 2
    return name[: kept - tail] + "…"[:width] + name[len(name) - tail :]


def hint(wrong: str, known: Sequence[str]) -> str:
    """Return ``; did you mean NAME?`` with the name closest to ``wrong``, or nothing if none is close."""
    by_letters = {_letters(name): name for name in known}
    near = get_close_matches(_letters(wrong), by_letters, n=1)
    return f"; did you mean {by_letters[near[0]]}?" if near else ""


def _letters(name: str) -> str:
    """Return what to compare of a name: dashes before an option make no two options alike."""
    return name.lower().lstrip("-")
