"""Propose the next tokens of a sequence, and decide how many of them a step is to verify. Pure.

    ... the cat sat on the mat ... the cat | sat on the    what followed the same tokens before is proposed
    rows of the step               cat  sat  on  the       the last token, and the proposals
    what the sampler chooses       sat  on   a             after each row: "the" is refused

A row is the same whether the tokens behind it are right or not, and the sampler chooses after each row what
it would choose after a step of its own. So the text does not depend on proposals. They pay where rows cost
little: reading the weights and crossing slow links take as long for a few rows as for one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from pipeedge.decoding.step_times import StepTimes

__all__ = ["Acceptance", "LoneSteps", "PromptLookup", "best_proposals"]

_LONGEST_MATCH = 8
"""Most tokens in front of a place that are compared."""
_CANDIDATES = 16
"""Most earlier places that are compared."""
_MEMORY = 0.97
"""Part of what was seen of a sequence's proposals that still counts a step later."""
_SAMPLES = 5
"""Number of steps whose median time counts."""
_FRESH = 200
"""Steps after which times that have not been seen again are forgotten."""


class PromptLookup:
    """Proposes what followed the last tokens of a sequence where they occurred before."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}
        """Place behind the latest occurrence of two tokens."""
        self._before: list[int] = [0, 0]
        """Place behind the occurrence before, of the two tokens in front of each place; 0 without one."""

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Return up to ``most`` tokens that may follow.

        Args:
            tokens: All tokens of the sequence, which has only grown since the last call.
            most: Most tokens to return.
        """
        for place in range(len(self._before), len(tokens) + 1):
            pair = (tokens[place - 2], tokens[place - 1])
            self._before.append(self._latest.get(pair, 0))
            self._latest[pair] = place
        place, best, longest = self._before[len(tokens)], 0, 0
        for _ in range(_CANDIDATES):
            if not place or longest == _LONGEST_MATCH:
                break
            matching = self._matching(tokens, place)
            if matching > longest:
                best, longest = place, matching
            place = self._before[place]
        # Behind the end, what is proposed goes on as it began.
        period = len(tokens) - best
        return tuple(tokens[best + index % period] for index in range(most)) if best else ()

    def _matching(self, tokens: Sequence[int], place: int) -> int:
        """Return how many tokens in front of a place are those in front of the end."""
        matching, end = 2, len(tokens)
        while (
            matching < min(place, _LONGEST_MATCH)
            and tokens[place - matching - 1] == tokens[end - matching - 1]
        ):
            matching += 1
        return matching


@dataclass
class Acceptance:
    """How probable it is that a proposed token of a sequence is the next one, by what was seen so far."""

    _accepted: float = 0.0
    _refused: float = 0.0

    @property
    def probability(self) -> float:
        """Probability that a token is accepted if all in front of it are; 1/2 as long as nothing is known."""
        return (self._accepted + 1) / (self._accepted + self._refused + 2)

    def note(self, proposed: int, accepted: int) -> None:
        """Take the outcome of a step; without proposals, what is known only becomes older."""
        self._accepted = _MEMORY * self._accepted + accepted
        self._refused = _MEMORY * self._refused + (accepted < proposed)


@dataclass
class LoneSteps:
    """Times of steps that were alone in the pipeline, as they come."""

    _seen: dict[int, tuple[int, deque[tuple[float, float]]]] = field(default_factory=dict)
    """Number of the latest step, and costs and times of some, by the number of bits of the cost."""
    _noted: int = 0

    def note(self, cost: float, seconds: float) -> None:
        """Take the time of a step whose rows cost so much."""
        self._noted += 1
        place = int(cost).bit_length()
        _, samples = self._seen.get(place, (0, deque[tuple[float, float]](maxlen=_SAMPLES)))
        samples.append((cost, seconds))
        self._seen[place] = self._noted, samples
        self._seen = {key: one for key, one in self._seen.items() if one[0] > self._noted - _FRESH}

    def correct(self, times: StepTimes) -> StepTimes:
        """Return times of steps as they were seen; behind the costliest, they grow as ``times`` do."""
        points: list[tuple[float, float]] = []
        for _, (_, samples) in sorted(self._seen.items()):
            cost, seconds = (median(values) for values in zip(*samples, strict=True))
            if not points or cost > points[-1][0]:
                points.append((cost, max(seconds, points[-1][1] if points else 0.0)))
        if not points or not points[-1][1]:
            return times
        cost, seconds = points[-1]
        further = 4 * cost
        return StepTimes((*points, (further, seconds * max(times.of(further) / times.of(cost), 1 + 1e-6))))


def best_proposals(
    candidates: Sequence[tuple[float, int]], cost: float, times: StepTimes, row_cost: float = 1.0
) -> list[int]:
    """Return how many proposed tokens of each sequence a step verifies, so that tokens come fastest.

    The likeliest rows come first: the n-th of a sequence counts if all in front of it are right.

    Args:
        candidates: Of each sequence of the step, the probability that a proposed token is right, and how many
            there are.
        cost: Cost of the rows that the step has in any case, one for each sequence.
        times: Times of steps.
        row_cost: Cost of each further row.
    """
    rows = sorted(
        (
            (probability**number, sequence)
            for sequence, (probability, most) in enumerate(candidates)
            for number in range(1, most + 1)
        ),
        key=lambda row: -row[0],
    )
    expected, best, taken = float(len(candidates)), 0, 0
    fastest = expected / times.of(cost)
    for probability, _ in rows:
        expected, taken = expected + probability, taken + 1
        rate = expected / times.of(cost + taken * row_cost)
        if rate > fastest:
            fastest, best = rate, taken
    counts = [0] * len(candidates)
    for _, sequence in rows[:best]:
        counts[sequence] += 1
    return counts
