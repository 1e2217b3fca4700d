"""Histograms of the lengths of sentences, as ranks state them and ``sched-pipeline --lengths`` reads them.

sentences of 5, 9, 9, 12 tokens  ->  5:1,9:2,12:1
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["check_lengths", "lengths_text", "longest_of"]

_MOST = 64
"""Number of different lengths that are told apart, besides the longest."""
_ENTRY = re.compile(r"[1-9]\d{0,8}:[1-9]\d{0,14}")


def lengths_text(counts: Mapping[int, int]) -> str | None:
    """Return the histogram of sentences, or None if they have the same length, or none is known.

    Of many lengths, those close to each other become one, their average.

    Args:
        counts: How many sentences there are of each number of tokens.
    """
    known = {tokens: number for tokens, number in counts.items() if tokens > 0 and number > 0}
    if len(known) < 2:
        return None
    shortest, longest = min(known), max(known)
    width = (longest - shortest + _MOST) // _MOST
    sums: dict[int, tuple[int, int]] = {}
    for tokens, number in known.items():
        # Counted from the longest, which remains what it is in a group of its own.
        group = -((longest - tokens + width - 1) // width)
        total, sentences = sums.get(group, (0, 0))
        sums[group] = (total + tokens * number, sentences + number)
    return ",".join(f"{round(total / number)}:{number}" for _, (total, number) in sorted(sums.items()))


def check_lengths(text: str | None) -> None:
    """Raise ValueError unless ``text`` is a histogram as ``lengths_text`` writes it, or None."""
    if text is not None and not all(_ENTRY.fullmatch(entry) for entry in text.split(",")):
        raise ValueError(f"{text[:40]!r} is not a histogram of lengths")


def longest_of(text: str) -> int:
    """Return the number of tokens of the longest sentence of a histogram."""
    return max(int(entry.partition(":")[0]) for entry in text.split(","))
