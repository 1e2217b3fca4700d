"""Bounds of the steps of a decoder, what they cost, and how many groups and chunks are best.

Costs are counted in *rows*: that of one row at the beginning of a sequence. ``StepTimes`` says how long steps
take by the cost of their rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeedge.decoding.slowest_place import MARGIN
from pipeedge.decoding.step_times import StepTimes

__all__ = ["UNMEASURED", "CacheSize", "PlannedGroups", "StepLimits"]

_LEAST_CHUNK = 64
"""Cost below which chunks are not made cheaper to fill the stages sooner, whatever was measured."""
_CHUNK_STEP = 8
"""Difference of the costs of chunks among which the best one is sought."""
UNMEASURED = StepTimes.linear(8.0)
"""Times of steps that nobody has measured: reading the weights takes as long as eight rows."""
_TOLERANCE = 1.05
"""Longest round with which more groups are better, in times of the shortest: they keep a place busy while the
step before comes late.
"""
_PLANNED = 1.25
"""Longest round with which the planned number of groups is better, in times of the shortest: profiles tell
the times of steps better than a few steps at the start.
"""
_LIKE_PLANNED = 1.5
"""Largest ratio of the numbers of sequences, those that there are and those of the plan, of such groups."""


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
    outputs: frozenset[int] = frozenset()
    """Cuts, by the number of layers before, whose payloads are kept by page."""


@dataclass(frozen=True)
class PlannedGroups:
    """Number of groups that a plan has chosen by the profiles of its hosts."""

    sequences: int
    """Number of sequences that it is for."""
    groups: int

    def are_for(self, sequences: int) -> bool:
        """Return whether so many sequences are about as many as the plan is for."""
        few, many = sorted((sequences, self.sequences))
        return many <= _LIKE_PLANNED * few


@dataclass(frozen=True)
class StepLimits:
    """Bounds of steps, and what they cost."""

    context: int
    """Longest sequence in tokens, prompt and answer together."""
    groups: int = 1
    """Most steps in flight, or 1 if one processor does everything."""
    stages: int = 1
    """Number of stages that compute a step one after the other."""
    rows: int = 64
    """Most rows of a step, at least 2, and so most tokens of a chunk of a prompt."""
    sequences: int = 64
    """Most sequences that run at a time."""
    slowdown: float = 1.4
    """Most that a chunk of a prompt may lengthen a step while others generate, as a factor; infinity where
    nobody waits for single tokens.
    """
    times: StepTimes = UNMEASURED
    """Time of a step alone, through all stages, by the cost of its rows."""
    planned: PlannedGroups | None = None
    """Number of groups that was planned; None without a plan by profiles."""
    proposals: int = 0
    """Most proposed tokens of a sequence in a step; 0 for none."""
    attention: float = 1e-4
    """Additional cost of a row for each position in front of it, in rows."""
    reading: float = 0.0
    """Additional cost of consecutive rows together for each position in front of them, in rows: the cache is
    read once for all of them.
    """

    def cost(self, position: int, rows: int) -> float:
        """Return the cost of consecutive rows of a sequence, in rows."""
        return rows * (1 + self.attention * (position + (rows - 1) / 2)) + self.reading * position

    def timed_as(self, known: StepLimits) -> StepLimits:
        """Return these bounds with the costs and times of steps that others have."""
        return replace(self, times=known.times, attention=known.attention, reading=known.reading)

    def best_groups(self, cost: float, sequences: int, busy: float | None = None) -> int:
        """Return among how many groups to deal sequences that generate, so that all have a token soonest.

        A token of each takes as long as the slowest place takes for all groups, and as long as the largest
        one needs to return. More groups keep the places busy; fewer read the weights less often. Where that
        makes little difference, there are more; a planned number is another one only where that makes much.

        Args:
            cost: Cost of the next row of all of them.
            sequences: Number of them.
            busy: Part of a step's time for which the slowest place is busy; None if that is not known, for
                as many groups as there are places.
        """
        part, each = 1 / self.groups if busy is None else busy, cost / sequences

        def round_time(groups: int) -> float:
            few, larger = divmod(sequences, groups)
            small, large = (self.times.of(each * rows) for rows in (few, few + 1))
            smaller = groups - larger if few else 0
            return max(part * (smaller * small + larger * large), MARGIN * (large if larger else small))

        rounds = {groups: round_time(groups) for groups in range(1, self.groups + 1)}
        shortest, planned = min(rounds.values()), self.planned
        if (
            planned is not None
            and planned.are_for(sequences)
            and rounds.get(planned.groups, math.inf) <= _PLANNED * shortest
        ):
            return planned.groups
        return max(groups for groups, found in rounds.items() if found <= _TOLERANCE * shortest)

    def rows_for(self, cost: float, position: int) -> int:
        """Return the most rows from ``position`` on that cost no more than ``cost``."""
        half, linear = self.attention / 2, 1 + self.attention * (position - 0.5)
        cost = max(cost - self.reading * position, 0.0)
        return math.floor(2 * cost / (linear + math.sqrt(linear * linear + 4 * half * cost)))

    def best_chunk(self, lengths: Sequence[int]) -> float:
        """Return the most that a chunk should cost so that stages have computed some prompts soonest.

        The last stage ends after (chunks + stages - 1) steps of a chunk. Stages count as equal: how busy the
        slowest one is was measured with single rows, which says little of chunks, and with much noise. One
        stage takes chunks as large as they may be.

        Args:
            lengths: Number of tokens of each prompt.
        """
        if self.stages == 1:
            return math.inf
        total = sum(self.cost(0, tokens) for tokens in lengths)

        def last_ends(chunks: int) -> float:
            return (chunks + self.stages - 1) * self.times.of(total / chunks)

        most = max(1, math.floor(total / _LEAST_CHUNK))
        costs = range(_LEAST_CHUNK, max(self.rows, _LEAST_CHUNK) + 1, _CHUNK_STEP)
        chunks = min((min(math.ceil(total / cost), most) for cost in costs), key=last_ends)
        # Rows are whole: with one more, the last chunk is not followed by the rest of all.
        return total / chunks + self.cost(max(lengths), 1)
