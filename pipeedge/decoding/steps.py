"""Which tokens of which sequences the next step of a decoder computes; the data rank decides for all stages.

    add ──> waiting ──pages free──> running: prompt in chunks, then one row a step ──> ended
                ^                       │
                └───── gives way ───────┘

A step is in flight from ``next`` until ``finished``. Stages execute steps in the order of their numbers, so
pages that a sequence leaves may be given to another one in the very next step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pipeedge.base.errors import InputError
from pipeedge.base.wording import count
from pipeedge.decoding.pages import PageLists, PagePool, pages_of

__all__ = ["CacheSize", "DecodingStep", "StepLimits", "StepPart", "StepScheduler"]


@dataclass(frozen=True)
class CacheSize:
    """The cache of every block, in pages whose numbers serve all stages."""

    pages: int
    """Number of pages of blocks that attend to everything; 0 without such blocks."""
    window_pages: int = 0
    """Number of pages of blocks with a window; 0 without such blocks."""
    window: int = 0
    """Widest window in positions; 0 without one."""
    page: int = 32
    """Number of positions of a page."""


@dataclass(frozen=True)
class StepLimits:
    """Bounds of steps."""

    context: int
    """Longest sequence in tokens, prompt and answer together."""
    groups: int = 1
    """Most steps in flight: stages plus one for the head, or 1 if one processor does everything."""
    rows: int = 64
    """Most rows of a step, and so most tokens of a chunk of a prompt."""
    sequences: int = 64
    """Most sequences that run at a time."""


@dataclass(frozen=True)
class StepPart:
    """The rows of one sequence in a step."""

    sequence: int
    position: int
    """Position of the first row in the sequence."""
    tokens: tuple[int, ...]
    """Token of each row."""
    pages: tuple[int, ...]
    """Numbers of the pages from the beginning to the last row; empty without blocks that need them."""
    window_pages: tuple[int, ...]
    """The same for blocks with a window, in which only those that the window reaches count."""
    scored: bool
    """Whether the last row decides the next token."""


@dataclass(frozen=True)
class DecodingStep:
    """Rows that travel through all stages together."""

    number: int
    """Number of the step, from 0 and without gaps."""
    parts: tuple[StepPart, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(len(part.tokens) for part in self.parts)


@dataclass
class _Generated:
    number: int
    tokens: list[int]
    end: int
    """Number of tokens at which the sequence is as long as it may become."""
    lists: PageLists
    position: int = 0
    """Number of tokens that steps have been made for."""
    waits_for: int | None = None
    """Step whose last row decides the next token, or None if all tokens so far are known."""


@dataclass
class _StepInFlight:
    scored: set[int] = field(default_factory=set)


class StepScheduler:
    """Decides the rows of every step.

    Args:
        limits: Bounds of steps.
        cache: Pages of every block.
    """

    def __init__(self, limits: StepLimits, cache: CacheSize) -> None:
        self.limits = limits
        self.cache = cache
        self._pool = PagePool(cache.pages) if cache.pages else None
        self._window_pool = PagePool(cache.window_pages) if cache.window_pages else None
        self._waiting: dict[int, _Generated] = {}
        self._running: dict[int, _Generated] = {}
        self._flights: dict[int, _StepInFlight] = {}
        self._next = 0

    def add(self, sequence: int, tokens: Sequence[int], most_tokens: int) -> None:
        """Take a sequence in; it waits for its turn.

        Args:
            sequence: Number of the sequence, used once.
            tokens: The prompt, at least one token.
            most_tokens: Most tokens to generate, at least one.

        Raises:
            InputError: The sequence can never fit the context or the cache.
        """
        if not tokens:
            raise InputError("the prompt has no tokens: give at least one")
        end = len(tokens) + most_tokens
        if end > self.limits.context:
            raise InputError(
                f"{count(len(tokens), 'token')} of the prompt and {most_tokens} more are longer than the "
                f"context of {self.limits.context}"
            )
        lists = PageLists(self._pool, self._window_pool, self.cache.window, self.cache.page)
        self._waiting[sequence] = _Generated(sequence, list(tokens), end, lists)

    def next(self) -> DecodingStep | None:
        """Return the next step, or None if none can start before a step finishes or a sequence is added."""
        if len(self._flights) >= self.limits.groups:
            return None
        self._admit()
        parts: list[StepPart] = []
        rows = self.limits.rows
        ready = [one for one in self._running.values() if one.waits_for is None]
        flight = _StepInFlight()
        share = -(-len(self._running) // self.limits.groups)
        for one in sorted(ready, key=lambda one: len(one.tokens) - one.position)[:share]:
            taken = min(rows, len(one.tokens) - one.position)
            if not taken:
                break
            parts.append(self._part(one, taken))
            rows -= taken
            if parts[-1].scored:
                one.waits_for = self._next
                flight.scored.add(one.number)
        if not parts:
            return None
        self._flights[self._next] = flight
        self._next += 1
        return DecodingStep(self._next - 1, tuple(parts))

    def finished(self, step: int, drawn: Mapping[int, int], ended: Collection[int] = ()) -> None:
        """Take the result of the oldest step in flight.

        Args:
            step: Number of the step.
            drawn: Next token of each sequence of the step that had one drawn.
            ended: Sequences of the step that end; others end when they have their last token.
        """
        for number in self._flights.pop(step).scored:
            one = self._running.get(number)
            if one is None or one.waits_for != step:
                continue
            one.waits_for = None
            if number in drawn:
                one.tokens.append(drawn[number])
            if number in ended or len(one.tokens) == one.end:
                self.cancel(number)

    def cancel(self, sequence: int) -> None:
        """Forget a sequence, if it is still there; its pages are free at once."""
        one = self._running.pop(sequence, None) or self._waiting.pop(sequence, None)
        if one is not None:
            one.lists.give_back()

    def _admit(self) -> None:
        """Let sequences run whose pages are free up to their end."""
        while self._waiting and len(self._running) < self.limits.sequences:
            one = next(iter(self._waiting.values()))
            if self._pool is not None and pages_of(one.end, self.cache.page) > self._pool.free:
                return
            one.lists.reserve(one.end)
            self._running[one.number] = self._waiting.pop(one.number)

    def _part(self, one: _Generated, rows: int) -> StepPart:
        end = one.position + rows
        pages, window_pages = one.lists.reserve(end)
        part = StepPart(
            one.number,
            one.position,
            tuple(one.tokens[one.position : end]),
            tuple(pages.tolist()),
            tuple(window_pages.tolist()),
            scored=end == len(one.tokens),
        )
        one.position = end
        return part
