"""How fast a run reads prompts and writes answers. Pure.

sequence 1   ├─ prompt ─┤ token  token  token │ ended
sequence 2        ├── prompt ──┤  token  token  token │
reading      ├─────────────────┤                          prompt tokens over these seconds
writing                 ├─────────────────────────────┤   tokens but the first of each over these
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeedge.observe.metrics import TextWork

__all__ = ["Quantiles", "StepPace", "TextResult", "TextState", "TokenFigures", "quantile"]

_KEPT = 100_000
"""Number of times that are kept, the last ones of a longer run."""


def quantile(values: Sequence[float], fraction: float) -> float | None:
    """Return the value that ``fraction`` of the values do not exceed, or None without any."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else None


@dataclass
class _Span:
    """The time in which at least one sequence is in some state."""

    seconds: float = 0.0
    members: set[int] = field(default_factory=set)
    _since: float = 0.0

    def enter(self, sequence: int, now: float) -> None:
        if not self.members:
            self._since = now
        self.members.add(sequence)

    def leave(self, sequence: int, now: float) -> None:
        if sequence in self.members:
            self.members.remove(sequence)
            if not self.members:
                self.seconds += now - self._since


@dataclass
class TokenFigures:
    """Figures of the sequences of a run, told one event after the other."""

    prompt_tokens: int = 0
    """Tokens of the prompts whose first token has come."""
    completion_tokens: int = 0
    """Tokens drawn so far."""
    answers: int = 0
    """Answers that have ended."""
    first_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Seconds from the first step of a sequence to its first token."""
    between_tokens_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Seconds between two tokens of a sequence."""
    longest_pause_s: float = 0.0
    """Longest time between two tokens of a sequence in seconds."""
    _reading: _Span = field(default_factory=_Span)
    _writing: _Span = field(default_factory=_Span)
    _later: int = 0
    _together: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Seconds in which so many sequences were written and no prompt was read, and the tokens drawn then."""
    _now: float = 0.0
    _last_at: dict[int, float] = field(default_factory=dict)
    _began: dict[int, tuple[float, int]] = field(default_factory=dict)

    def began(self, sequence: int, prompt_tokens: int, now: float) -> None:
        """Note that the first step of a sequence has begun."""
        self._pass(now)
        self._began[sequence] = (now, prompt_tokens)
        self._reading.enter(sequence, now)

    def drew(self, sequence: int, now: float, tokens: int = 1) -> None:
        """Note further tokens of a sequence, which share the time since those before."""
        before = self._last_at.get(sequence)
        self._pass(now, 0 if before is None else tokens)
        self.completion_tokens += tokens
        if before is not None and tokens:
            self.between_tokens_s += [(now - before) / tokens] * tokens
            self.longest_pause_s = max(self.longest_pause_s, now - before)
            self._later += tokens
        elif sequence in self._began:
            since, prompt_tokens = self._began.pop(sequence)
            self.first_token_s.append(now - since)
            self.prompt_tokens += prompt_tokens
            self._reading.leave(sequence, now)
            self._writing.enter(sequence, now)
        self._last_at[sequence] = now

    def ended(self, sequence: int, now: float) -> None:
        """Note that a sequence has ended, or was given up."""
        self._pass(now)
        self.answers += sequence in self._last_at
        self._began.pop(sequence, None)
        self._last_at.pop(sequence, None)
        self._reading.leave(sequence, now)
        self._writing.leave(sequence, now)

    def _pass(self, now: float, drawn: int = 0) -> None:
        """Count the time since the latest event, and the tokens that come at its end."""
        if self._writing.members and not self._reading.members:
            texts = len(self._writing.members)
            seconds, tokens = self._together.get(texts, (0.0, 0))
            self._together[texts] = seconds + now - self._now, tokens + drawn
        self._now = now

    @property
    def together(self) -> tuple[int, float] | None:
        """Most sequences that were written at a time, and their tokens a second while no prompt was read."""
        known = ((texts, tokens / s) for texts, (s, tokens) in self._together.items() if s > 0 and tokens)
        return max(known, default=None)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens a second, while prompts were read."""
        return self.prompt_tokens / self._reading.seconds if self._reading.seconds else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens a second, without the first of each answer, while answers were written."""
        return self._later / self._writing.seconds if self._writing.seconds and self._later else None

    def result(self, context: int, cache_bytes: Sequence[int], state: TextState) -> TextResult:
        """Return the figures of a run that has ended.

        Args:
            context: Longest sequence in tokens.
            cache_bytes: Size of the cache of each stage in bytes.
            state: State of the queue at the end.
        """
        texts, rate = self.together or (0, None)
        first, between = list(self.first_token_s), list(self.between_tokens_s)
        return TextResult(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_tokens_per_s=self.decode_tokens_per_s,
            texts_together=texts,
            tokens_per_s_together=rate,
            first_token_s=Quantiles.of(first),
            between_tokens_s=Quantiles.of(between),
            longest_pause_s=self.longest_pause_s or None,
            context=context,
            cache_bytes=tuple(cache_bytes),
            repeated_tokens=state.repeated_tokens,
            partly_repeated_tokens=state.partly_repeated_tokens,
            kept_tokens=state.kept_tokens,
            proposed_tokens=state.proposed_tokens,
            accepted_tokens=state.accepted_tokens,
            drafted_tokens=state.drafted_tokens,
            accepted_drafted_tokens=state.accepted_drafted_tokens,
        )


@dataclass
class StepPace:
    """Results of the steps that only continue texts, told as they come."""

    work: TextWork = field(default_factory=TextWork)
    """Their sums; replaced as a whole."""
    _since: float | None = None
    """Time of the latest result, while texts have grown ever since."""
    _growing: int = 0

    def note(self, rows: int, positions: int | None, now: float, growing: int) -> None:
        """Note the result of a step.

        Args:
            rows: Number of its rows.
            positions: Number of tokens in front of all of them; None if it has read prompts.
            now: Time in seconds.
            growing: Number of texts that grow from now on.
        """
        since, texts = self._since, self._growing
        self._since, self._growing = (now if growing else None), growing
        if since is None or positions is None:
            return
        before, seconds = self.work, now - since
        self.work = TextWork(
            before.steps + 1,
            before.rows + rows,
            before.positions + positions,
            before.seconds + seconds,
            before.text_s + seconds * texts,
        )

    def pause(self) -> None:
        """Note that the next result says nothing of the pace, as another plan begins."""
        self._since = None


@dataclass(frozen=True)
class Quantiles:
    """Median and 95 % quantile of times in seconds."""

    p50: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles | None:
        """Return those of ``values``, or None without any."""
        p50, p95 = quantile(values, 0.5), quantile(values, 0.95)
        return None if p50 is None or p95 is None else cls(p50, p95)


@dataclass(frozen=True)
class TextResult:
    """Figures of a run that generated text."""

    prompt_tokens: int
    completion_tokens: int
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    first_token_s: Quantiles | None
    """Time from the first step of a sequence to its first token."""
    between_tokens_s: Quantiles | None
    """Time between two tokens of a sequence."""
    longest_pause_s: float | None
    """Longest one in seconds."""
    context: int
    """Longest sequence in tokens."""
    cache_bytes: tuple[int, ...]
    """Size of the cache of each stage in bytes, of which the system provides what is used."""
    texts_together: int = 0
    """Most sequences that were written at a time while no prompt was read."""
    tokens_per_s_together: float | None = None
    """Tokens a second of so many sequences."""
    repeated_tokens: int = 0
    """Number of tokens to be computed again because a rank was lost, or the plan has changed."""
    partly_repeated_tokens: int = 0
    """Number of those that only some layers have computed again, as the others had kept their pages."""
    kept_tokens: int = 0
    """Number of tokens that no layer has computed again then, as all had kept their pages."""
    proposed_tokens: int = 0
    """Number of tokens that were proposed, and verified."""
    accepted_tokens: int = 0
    """Number of those that were right."""
    drafted_tokens: int = 0
    """Number of proposed tokens that a small model drafted; the others are from earlier text."""
    accepted_drafted_tokens: int = 0
    """Number of those that were right."""

    def to_body(self) -> dict[str, Any]:
        """Return the figures as plain data for a report, without those that are not known."""
        known = {key: value for key, value in asdict(self).items() if value is not None}
        return known | {"cache_bytes": list(self.cache_bytes)}


@dataclass(frozen=True)
class TextState:
    """State of the queue of a decoder at one moment, and counts since it was opened."""

    waiting: int = 0
    """Number of sequences that wait to begin."""
    running: int = 0
    steps: int = 0
    """Number of steps in flight."""
    answered: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    """Number of tokens that were not computed, as those of an equal beginning were kept."""
    yields: int = 0
    """How often a sequence has yielded its pages to older ones."""
    repeated_tokens: int = 0
    """Number of tokens computed again because a rank was lost, or the plan has changed."""
    partly_repeated_tokens: int = 0
    """Number of those that only some layers have computed again, as the others had kept their pages."""
    kept_tokens: int = 0
    """Number of tokens that no layer has computed again then, as all had kept their pages."""
    proposed_tokens: int = 0
    """Number of tokens that were proposed, and verified."""
    accepted_tokens: int = 0
    """Number of those that were right."""
    drafted_tokens: int = 0
    """Number of proposed tokens that a small model drafted; the others are from earlier text."""
    accepted_drafted_tokens: int = 0
    """Number of those that were right."""
    pages: int = 0
    free_pages: int = 0
    """Number of pages that no sequence needs."""
    kept_pages: int = 0
    """Number of those that hold beginnings of sequences."""
    work: TextWork = field(default_factory=TextWork)
    """Results of the steps that only continue texts."""
