"""Choose the next token of one answer from the scores of all tokens. Pure.

    scores [V] -> bias -> penalties -> words that are forbidden -> the allowed tokens of a structure
               -> temperature -> top-k -> top-p -> min-p -> a draw

The order is that of transformers' processors, which the tests hold it to. Those take batches of tensors and
sort the whole vocabulary: for 150,000 tokens, ``docs/sampling.md`` has what both take.

The random number of a token depends on the seed, the number of the answer and the position of the token
alone, so an answer is the same whoever else asks.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeedge.base.errors import RequestError
from pipeedge.decoding.sampling import Sampling
from pipeedge.decoding.structure import Mask

__all__ = ["DrawnToken", "Sampler", "Scores", "kept_tokens", "random_number"]

Scores: TypeAlias = npt.NDArray[np.float32]
Numbers: TypeAlias = npt.NDArray[np.int64]

_BLOCK = 512
"""Tokens that are summed, or compared, together."""
_CHUNK = 64 * _BLOCK
"""Tokens whose weights are computed together."""
_BOUNDS = (2.0**-6, 2.0**-12, 2.0**-18, 2.0**-24, 0.0)
"""Weights, of at most 1, above which the tokens of top-p are looked for."""


@dataclass(frozen=True)
class DrawnToken:
    """A token of an answer."""

    token: int
    logprob: float | None = None
    """Its log probability in the model's own distribution, or None if nobody asked."""
    top: tuple[tuple[int, float], ...] = ()
    """Best tokens with their log probabilities, the best first, as many as were asked for."""


def random_number(seed: int, sequence: int, choice: int, index: int) -> float:
    """Return a number of [0, 1) that depends on its arguments alone.

    Args:
        seed: Seed of the request or of the run, of 64 bits.
        sequence: Number of the prompt.
        choice: Number of the answer to it.
        index: Position of the token in the answer.
    """
    digest = hashlib.blake2b(struct.pack("<qqqq", seed, sequence, choice, index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def kept_tokens(scores: Scores, options: Sampling) -> tuple[Numbers, Scores]:
    """Return the tokens that temperature, top-k, top-p and min-p leave, and their weights.

    Args:
        scores: Scores of all tokens [V], the best of them finite.
        options: A temperature above 0.

    Returns:
        Numbers of the tokens, ascending; and their probabilities, up to a common factor.
    """
    best = scores.max()
    scale = np.float32(1 / options.temperature)
    kept: Numbers | None = None
    if 0 < options.top_k < len(scores):
        kept = np.flatnonzero(scores >= _kth_best(scores, options.top_k))
        scores = scores[kept]
    if options.top_p < 1:
        weights = _weights(scores, best, scale)
        nucleus = _nucleus(weights, options.top_p)
        kept = nucleus if kept is None else kept[nucleus]
        scores = scores[nucleus]
    if options.min_p > 0:
        likely = np.flatnonzero(scores >= best + np.float32(math.log(options.min_p) * options.temperature))
        kept = likely if kept is None else kept[likely]
        scores = scores[likely]
    return np.arange(len(scores)) if kept is None else kept, _weights(scores, best, scale)


def _weights(scores: Scores, best: np.float32, scale: np.float32) -> Scores:
    weights = scores - best
    weights *= scale
    np.exp(weights, out=weights)
    return weights


def _kth_best(scores: Scores, k: int) -> np.float32:
    """Return the ``k``-th best score."""
    whole = len(scores) // _BLOCK
    if k <= whole:
        # As many blocks have a best score of this or more, so no fewer tokens have.
        bounds = scores[: whole * _BLOCK].reshape(whole, _BLOCK).max(axis=1)
        scores = scores[scores >= np.partition(bounds, whole - k)[whole - k]]
    return np.float32(np.partition(scores, len(scores) - k)[len(scores) - k])


def _nucleus(weights: Scores, share: float) -> Numbers:
    """Return the numbers, ascending, of the fewest largest weights that make up a share of all."""
    wanted = share * float(block_sums(weights).sum(dtype=np.float64))
    for bound in _BOUNDS:
        likely = np.flatnonzero(weights >= bound)
        if bound == 0 or weights[likely].sum(dtype=np.float64) > wanted:
            break
    order = likely[np.argsort(-weights[likely], kind="stable")]
    before = np.cumsum(weights[order], dtype=np.float64) - weights[order]
    return np.sort(order[: max(1, int(np.searchsorted(before, wanted)))])


def draw_from_all(scores: Scores, temperature: float, number: float) -> int:
    """Return the token, of all, at which ``number``, of [0, 1), stands in the sum of their probabilities.

    The weights of a few thousand tokens at a time stay in the processor's cache, and only those of the block
    in which the number falls are needed again.
    """
    best, scale = scores.max(), np.float32(1 / temperature)
    sums = [
        block_sums(_weights(scores[start : start + _CHUNK], best, scale))
        for start in range(0, len(scores), _CHUNK)
    ]
    return draw(np.concatenate(sums), lambda part: _weights(scores[part], best, scale), number)


def block_sums(weights: Scores) -> Scores:
    """Return the sum of each ``_BLOCK`` weights."""
    whole = len(weights) // _BLOCK
    sums = np.empty(-(-len(weights) // _BLOCK), np.float32)
    weights[: whole * _BLOCK].reshape(whole, _BLOCK).sum(axis=1, out=sums[:whole])
    if whole < len(sums):
        sums[whole] = weights[whole * _BLOCK :].sum()
    return sums


def draw(sums: Scores, weights_of: Callable[[slice], Scores], number: float) -> int:
    """Return the place of the weight at which ``number``, of [0, 1), stands in the sum of all.

    Args:
        sums: Sum of each ``_BLOCK`` weights.
        weights_of: Returns the weights at some places.
        number: Where to stand.
    """
    ends = np.cumsum(sums, dtype=np.float64)
    target = number * ends[-1]
    # The sums are rounded, so what they say may be a little behind the last weight that is not zero.
    block = min(int(np.searchsorted(ends, target, side="right")), int(np.flatnonzero(sums)[-1]))
    weights = weights_of(slice(block * _BLOCK, (block + 1) * _BLOCK))
    within = np.cumsum(weights, dtype=np.float64)
    place = int(np.searchsorted(within, target - (ends[block - 1] if block else 0.0), side="right"))
    return block * _BLOCK + min(place, int(np.flatnonzero(weights)[-1]))


class Sampler:
    """Chooses the tokens of one answer.

    Args:
        options: How they are chosen; ``bad_words`` are tokens.
        prompt: Tokens of the prompt.
        end_tokens: Tokens that end the answer.
        seed: Seed of the run, for options without one of their own.
        sequence: Number of the prompt.
        choice: Number of the answer to it.
    """

    def __init__(
        self,
        options: Sampling,
        prompt: Sequence[int],
        *,
        end_tokens: Collection[int] = (),
        seed: int = 0,
        sequence: int = 0,
        choice: int = 0,
    ) -> None:
        self._options = options
        self._ends = np.array(sorted(end_tokens), np.int64)
        self._place = (seed if options.seed is None else options.seed, sequence, choice)
        self._bias = (
            np.array(list(options.logit_bias), np.int64),
            np.array(list(options.logit_bias.values()), np.float32),
        )
        self._bad_words = tuple(word for word in options.bad_words if not isinstance(word, str))
        self._prompt = Occurrences()
        self._answer = Occurrences()
        if options.repetition_penalty != 1:
            self._prompt.add(prompt)
        longest = max(map(len, self._bad_words), default=0)
        self._context = list(prompt[-longest:]) if longest else []
        self._drawn = 0
        self._is_plain = not (
            options.logit_bias
            or options.repetition_penalty != 1
            or options.presence_penalty
            or options.frequency_penalty
            or self._bad_words
        )

    def choose(self, scores: Scores, allowed: Mask | None = None) -> DrawnToken:
        """Return the next token.

        Args:
            scores: Scores of all tokens [V]. They are not changed.
            allowed: Tokens that may follow, bool [V]; None for all.

        Raises:
            RequestError: The scores are NaN or infinite, or no token is left to choose from.
        """
        options = self._options
        processed = self._processed(scores, allowed)
        best = int(processed.argmax())
        if not math.isfinite(processed[best]):
            if math.isfinite(scores.max()):
                raise RequestError("no token is left to choose: bad_words or a structure forbid them all")
            raise RequestError("the model produced NaN or infinity: check that the weights are complete")
        if options.is_greedy:
            token = best
        else:
            number = random_number(*self._place, self._drawn)
            if options.keeps_all:
                token = draw_from_all(processed, options.temperature, number)
            else:
                kept, weights = kept_tokens(processed, options)
                token = int(kept[draw(block_sums(weights), weights.__getitem__, number)])
        self._note(token)
        if options.logprobs is None:
            return DrawnToken(token)
        return _with_logprobs(token, scores, options.logprobs)

    def _note(self, token: int) -> None:
        self._drawn += 1
        if not self._is_plain:
            self._answer.add([token])
            self._prompt.add([token])
            self._context.append(token)

    def _processed(self, scores: Scores, allowed: Mask | None) -> Scores:
        """Return the scores after everything that depends on the tokens so far, in a copy if they change."""
        options = self._options
        waits = self._drawn < options.min_tokens and len(self._ends) > 0
        if self._is_plain and allowed is None and not waits:
            return scores
        scores = scores.copy()
        tokens, bias = self._bias
        scores[tokens] += bias
        if options.repetition_penalty != 1:
            seen = self._prompt.tokens
            before = scores[seen]
            penalty = np.float32(options.repetition_penalty)
            scores[seen] = np.where(before < 0, before * penalty, before / penalty)
        if options.presence_penalty or options.frequency_penalty:
            scores[self._answer.tokens] -= np.float32(
                options.presence_penalty
            ) + self._answer.counts * np.float32(options.frequency_penalty)
        for word in self._bad_words:
            before_last = len(word) - 1
            if before_last == 0 or tuple(self._context[-before_last:]) == word[:-1]:
                scores[word[-1]] = -np.inf
        if waits:
            scores[self._ends] = -np.inf
        if allowed is not None:
            scores[~allowed] = -np.inf
        return scores


class Occurrences:
    """How often each token has occurred."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._tokens = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.float32)

    @property
    def tokens(self) -> Numbers:
        """Tokens that have occurred."""
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> Scores:
        """Number of times that each of them has."""
        return self._counts[: len(self._places)]

    def add(self, tokens: Sequence[int]) -> None:
        """Count more tokens."""
        for token in tokens:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._tokens):
                self._tokens, self._counts = (
                    np.resize(self._tokens, 2 * place),
                    np.resize(self._counts, 2 * place),
                )
                self._counts[place:] = 0
            self._tokens[place] = token
            self._counts[place] += 1


def _with_logprobs(token: int, scores: Scores, alternatives: int) -> DrawnToken:
    best = scores.max()
    total = float(best) + math.log(_weights(scores, best, np.float32(1)).sum(dtype=np.float64))
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        alternatives = min(alternatives, len(scores))
        found = np.flatnonzero(scores >= _kth_best(scores, alternatives))
        order = found[np.argsort(-scores[found], kind="stable")][:alternatives]
        top = tuple((int(one), float(scores[one]) - total) for one in order)
    return DrawnToken(token, float(scores[token]) - total, top)
