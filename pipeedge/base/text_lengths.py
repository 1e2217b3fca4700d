"""Histograms of the lengths of sentences, as ranks state them and ``sched-pipeline --lengths`` reads them.

sentences of 5, 9, 9, 12 tokens  ->  5:1,9:2,12:1
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = [
    "RecentLengths",
    "InputSizes",
    "TextLengths",
    "are_alike",
    "check_lengths",
    "lengths_text",
    "longest_of",
    "mean_of",
]

_MOST = 64
"""Number of different lengths that are told apart, besides the longest."""
_MINUTES = 5
"""Number of minutes of which sentences count as recent."""
_FEWEST = 50
"""Number of sentences below which their lengths say too little of those to come."""
_ALIKE = 1.25
"""Largest ratio of the average lengths of sentences that are planned for as if they were the same."""
_ENTRY = re.compile(r"[1-9]\d{0,8}:[1-9]\d{0,14}")


@dataclass(frozen=True)
class TextLengths:
    """Lengths of the texts that a decoder is to write, in tokens."""

    prompt: int
    """Tokens of a prompt, on average."""
    answer: int
    """Most tokens of an answer, on average."""
    longest: int
    """Tokens of the longest prompt and answer together."""
    texts: int
    """Number of answers."""

    def __post_init__(self) -> None:
        if min(self.prompt, self.answer, self.texts) < 1 or self.longest < 2:
            raise ValueError(f"{self} has a length below 1")

    def to_text(self) -> str:
        """Return the four numbers as ranks state them: ``96:64:200:8``."""
        return f"{self.prompt}:{self.answer}:{self.longest}:{self.texts}"

    @classmethod
    def from_text(cls, text: str) -> TextLengths:
        """Return what ``to_text`` has written. Raises ValueError if it is something else."""
        prompt, answer, longest, texts = map(int, text.split(":"))
        return cls(prompt, answer, longest, texts)


@dataclass(frozen=True)
class InputSizes:
    """Sizes of the input of a run, as far as a plan needs them."""

    tokens: int | None = None
    """Tokens of the longest sentence; None for images, and if it is not known."""
    lengths: str | None = None
    """Histogram of the lengths of the sentences; None if they do not differ or are unknown."""
    texts: TextLengths | None = None
    """Lengths of the texts to generate; None if they are unknown, or none are."""
    eight_bit: bool = True
    """Whether pictures are sent as bytes."""


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
    return max(_counts(text))


def mean_of(text: str) -> float:
    """Return the average number of tokens of the sentences of a histogram."""
    counts = _counts(text)
    return sum(tokens * number for tokens, number in counts.items()) / sum(counts.values())


def are_alike(one: str, other: str) -> bool:
    """Return whether the sentences of two histograms have about the same average length."""
    shorter, longer = sorted((mean_of(one), mean_of(other)))
    return longer <= _ALIKE * shorter


def _counts(text: str) -> dict[int, int]:
    entries = (entry.partition(":") for entry in text.split(","))
    return {int(tokens): int(number) for tokens, _, number in entries}


class RecentLengths:
    """The lengths of the sentences of the last minutes."""

    def __init__(self) -> None:
        self._minutes: deque[tuple[int, Counter[int]]] = deque()

    def add(self, lengths: Iterable[int], now_s: float) -> None:
        """Count sentences with these numbers of tokens."""
        minute = int(now_s // 60)
        if not self._minutes or self._minutes[-1][0] != minute:
            self._minutes.append((minute, Counter()))
        self._minutes[-1][1].update(lengths)
        self._forget(minute)

    def histogram(self, now_s: float) -> str | None:
        """Return their histogram, or None if there are too few."""
        self._forget(int(now_s // 60))
        counts: Counter[int] = sum((each for _, each in self._minutes), Counter())
        if counts.total() < _FEWEST:
            return None
        return lengths_text(counts) or ",".join(f"{tokens}:{number}" for tokens, number in counts.items())

    def _forget(self, minute: int) -> None:
        while self._minutes and self._minutes[0][0] <= minute - _MINUTES:
            self._minutes.popleft()
