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
from typing import Protocol

from pipeedge.decoding.step_times import StepTimes

__all__ = [
    "Acceptance",
    "DraftedTokens",
    "DraftFigures",
    "DraftedText",
    "LoneSteps",
    "ProposalOffer",
    "PromptLookup",
    "Proposer",
    "WantedDraft",
    "best_offer",
    "best_proposals",
]

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
_DRAFT_MEMORY = 0.995
"""The same for drafts, of all sequences together. Where they do not pay, trying them again takes 1 to 2 %."""
_DRAFT_EXPECTED = 0.75
"""Probability that a drafted token is right, as long as nothing is known."""


@dataclass(frozen=True)
class ProposalOffer:
    """Tokens that could be proposed for a sequence."""

    probability: float
    """Probability that one is right if all in front of it are."""
    most: int
    """Number of tokens, at most."""
    tokens: tuple[int, ...] | None = None
    """The tokens, or None if they have to be drafted first."""
    token_s: float = 0.0
    """Seconds that drafting each takes."""
    once_s: float = 0.0
    """Seconds that drafting takes besides."""


class Proposer(Protocol):
    """Proposes the next tokens of one sequence."""

    def offer(self, tokens: Sequence[int], most: int) -> ProposalOffer:
        """Return what could follow all tokens of the sequence, up to ``most`` tokens."""

    def note(self, proposed: int, accepted: int) -> None:
        """Take the outcome of a step that has verified so many of its tokens."""


@dataclass
class Acceptance:
    """How probable it is that a proposed token is the next one, by what was seen so far."""

    expected: float = 0.5
    """Probability as long as nothing is known."""
    memory: float = _MEMORY
    """Part of what was seen that still counts a step later."""
    _accepted: float = 0.0
    _refused: float = 0.0

    @property
    def probability(self) -> float:
        """Probability that a token is accepted if all in front of it are."""
        return (self._accepted + 2 * self.expected) / (self._accepted + self._refused + 2)

    def note(self, proposed: int, accepted: int) -> None:
        """Take the outcome of a step; without proposals, what is known only becomes older."""
        self._accepted = self.memory * self._accepted + accepted
        self._refused = self.memory * self._refused + (accepted < proposed)


class PromptLookup:
    """Proposes what followed the last tokens of a sequence where they occurred before."""

    def __init__(self) -> None:
        self._acceptance = Acceptance()
        self._latest: dict[tuple[int, int], int] = {}
        """Place behind the latest occurrence of two tokens."""
        self._before: list[int] = [0, 0]
        """Place behind the occurrence before, of the two tokens in front of each place; 0 without one."""

    def offer(self, tokens: Sequence[int], most: int) -> ProposalOffer:
        """Return what ``propose`` finds."""
        found = self.propose(tokens, most)
        return ProposalOffer(self._acceptance.probability, len(found), found)

    def note(self, proposed: int, accepted: int) -> None:
        """Take the outcome of a step."""
        self._acceptance.note(proposed, accepted)

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


@dataclass(frozen=True)
class WantedDraft:
    """Tokens that are to be drafted."""

    sequence: int
    tokens: tuple[int, ...]
    """All tokens of the sequence."""
    most: int
    """Number of tokens to draft."""


@dataclass(frozen=True)
class DraftedTokens:
    """Tokens that were drafted."""

    sequence: int
    length: int
    """Number of tokens of the sequence."""
    tokens: tuple[int, ...]
    """Tokens that may follow; none as long as the small model has not read all in front of them."""
    read: int
    """Number of tokens that it has read."""
    token_s: float | None = None
    """Seconds that each drafted token took, if they were measured."""
    read_s: float | None = None
    """Seconds that reading each token took, if they were measured."""


@dataclass
class DraftFigures:
    """How long a small model takes, how often it is right, and whose tokens it has read."""

    context: int
    """Number of positions behind which it drafts nothing."""
    places: int
    """Most sequences that it reads at a time."""
    readers: set[int] = field(default_factory=set)
    """Sequences that have a place."""
    proposed_tokens: int = 0
    """Number of drafted tokens that were verified."""
    accepted_tokens: int = 0
    """Number of those that were right."""
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(_DRAFT_EXPECTED, _DRAFT_MEMORY))
    _token_s: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    _read_s: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    _idle: int = 0

    @property
    def token_s(self) -> float:
        """Seconds to draft a token; what has not been measured for long counts less and less."""
        return median(self._token_s or [0.0]) * _DRAFT_MEMORY**self._idle

    @property
    def read_s(self) -> float:
        """Seconds to read a token."""
        return median(self._read_s or [0.0]) * _DRAFT_MEMORY**self._idle

    def has_place(self, sequence: int) -> bool:
        """Return whether a sequence has a place, or one is free."""
        return sequence in self.readers or len(self.readers) < self.places

    def note_times(self, draft: DraftedTokens) -> None:
        """Take the times of a draft."""
        self._idle = 0
        self._token_s += [] if draft.token_s is None else [draft.token_s]
        self._read_s += [] if draft.read_s is None else [draft.read_s]

    def note(self, proposed: int, accepted: int) -> None:
        """Take the outcome of a step of one sequence."""
        self._idle += 1
        self.acceptance.note(proposed, accepted)
        self.proposed_tokens += proposed
        self.accepted_tokens += accepted


class DraftedText:
    """Proposes what a small model drafts for one sequence.

    Args:
        figures: Figures of the model.
        sequence: Number of the sequence.
        prompt: Number of tokens of its prompt.
        end: Number of tokens at which it is as long as it may become.
    """

    def __init__(self, figures: DraftFigures, sequence: int, prompt: int, end: int) -> None:
        self._figures = figures
        self._sequence = sequence
        self._prompt = prompt
        self._end = end
        self._read = 0
        self._draft: DraftedTokens | None = None

    def offer(self, tokens: Sequence[int], most: int) -> ProposalOffer:
        """Return what was drafted to follow, or what could be.

        Reading what the small model has not read yet pays in the course of time: it is spread over as many
        tokens as the answer has, if as many can follow, since nobody knows how many will.
        """
        figures, length = self._figures, len(tokens)
        likely = figures.acceptance.probability
        if self._draft is not None and self._draft.length == length:
            found = self._draft.tokens[:most]
            return ProposalOffer(likely, len(found), found)
        if length >= figures.context:
            self.forget()
        room = figures.context - length
        if not figures.has_place(self._sequence):
            room = 0
        coming = max(1, min(length - self._prompt, self._end - length))
        once_s = figures.read_s * max(0, length - self._read) / coming
        return ProposalOffer(likely, max(0, min(most, room)), None, figures.token_s, once_s)

    def want(self, tokens: Sequence[int], most: int) -> list[WantedDraft]:
        """Return the wish for so many drafted tokens, if the sequence has a place, as it has from now on."""
        if not self._figures.has_place(self._sequence):
            return []
        self._figures.readers.add(self._sequence)
        return [WantedDraft(self._sequence, tuple(tokens), most)]

    def take(self, draft: DraftedTokens) -> None:
        """Take the tokens, unless the sequence has lost its place meanwhile."""
        if self._sequence in self._figures.readers:
            self._draft, self._read = draft, draft.read

    def forget(self) -> None:
        """Give the place back."""
        self._figures.readers.discard(self._sequence)
        self._draft, self._read = None, 0

    def note(self, proposed: int, accepted: int) -> None:
        """Take the outcome of a step."""
        self._figures.note(proposed, accepted)


@dataclass
class LoneSteps:
    """Times of steps that were alone in the pipeline, as they come."""

    _seen: dict[int, tuple[int, deque[tuple[float, float]]]] = field(default_factory=dict)
    """Number of the latest step, and costs and times of some, by the number of bits of the cost."""
    _noted: int = 0

    @property
    def known(self) -> bool:
        """Whether a step was alone."""
        return bool(self._seen)

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


def best_offer(offers: Sequence[ProposalOffer], cost: float, times: StepTimes) -> ProposalOffer:
    """Return the offer with which a sequence whose next row costs ``cost`` would grow fastest alone."""
    return max(offers, key=lambda offer: _fastest([offer], cost, times, cost)[0])


def best_proposals(
    offers: Sequence[ProposalOffer], cost: float, times: StepTimes, row_cost: float = 1.0
) -> list[int]:
    """Return how many proposed tokens of each sequence a step verifies, so that tokens come fastest.

    The likeliest rows come first: the n-th of a sequence counts if all in front of it are right.

    Args:
        offers: What could be proposed, for each sequence of the step.
        cost: Cost of the rows that the step has in any case, one for each sequence.
        times: Times of steps, in seconds if anything has to be drafted.
        row_cost: Cost of each further row.
    """
    return _fastest(offers, cost, times, row_cost)[1]


def _fastest(
    offers: Sequence[ProposalOffer], cost: float, times: StepTimes, row_cost: float
) -> tuple[float, list[int]]:
    """Return the highest number of tokens in a unit of time, and ``best_proposals``."""
    rows = sorted(
        (
            (offer.probability**number, sequence, offer.token_s + (number == 1) * offer.once_s)
            for sequence, offer in enumerate(offers)
            for number in range(1, offer.most + 1)
        ),
        key=lambda row: -row[0],
    )
    expected, best, drafting = float(len(offers)), 0, 0.0
    fastest = expected / times.of(cost)
    for taken, (probability, _, seconds) in enumerate(rows, start=1):
        expected, drafting = expected + probability, drafting + seconds
        rate = expected / (times.of(cost + taken * row_cost) + drafting)
        if rate > fastest:
            fastest, best = rate, taken
    counts = [0] * len(offers)
    for _, sequence, _ in rows[:best]:
        counts[sequence] += 1
    return fastest, counts
