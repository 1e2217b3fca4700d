"""Measure the work of a decoder's data rank: making steps, scoring their rows, and choosing the tokens.

    head, choice of tokens      x  rows 1, 2, 4, 8, 16   ──> what the tokens of a step cost
    a rank with a local stage   x  1 and 8 texts         ──> what a step costs besides (``rehearsal``)

The rank has the runtime's own queue, scheduler of steps and threads. What it costs that these hand over each
step is work of the data rank, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from pipeedge.base.errors import ModelError, PipeEdgeError
from pipeedge.data.companions import companion_directories
from pipeedge.data.prompts import open_vocabulary, read_generation_defaults
from pipeedge.data.step_queue import StepQueue
from pipeedge.decoding.generation import AnswerTexts, Piece, WrittenAnswer
from pipeedge.decoding.prompt import Prompt
from pipeedge.decoding.sampler import Sampler
from pipeedge.decoding.sampling import Sampling
from pipeedge.decoding.structure import Structure
from pipeedge.decoding.structure_matching import StructureMatcher
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.decoder_ends import DecoderEnds
from pipeedge.models.step_rows import StepBounds
from pipeedge.plan.specs import EndCosts
from pipeedge.profile.data_work import DataRank
from pipeedge.profile.job import SEED
from pipeedge.profile.measuring import without_delays
from pipeedge.profile.rehearsal import ReserveMemory
from pipeedge.profile.step_fit import fit_rows
from pipeedge.request.files import InputRequest
from pipeedge.run.activity import Activity
from pipeedge.run.feed_collect import Collection as Collecting
from pipeedge.run.feed_collect import Collector, Feed, Feeder
from pipeedge.run.worker import Incoming
from pipeedge.transport.base import PacketSource, unbound

__all__ = ["TextRank"]

_ROWS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class TextRank:
    """A data rank that writes texts."""

    model: DecoderModel
    ends: DecoderEnds
    dtype: torch.dtype
    """Number type of the weights."""
    bounds: StepBounds

    @functools.cached_property
    def sampling(self) -> Sampling:
        """Options of answers that the files of the model give."""
        try:
            return read_generation_defaults(self.model).sampling
        except ModelError:
            return Sampling()

    @functools.cached_property
    def texts(self) -> AnswerTexts:
        """Texts of tokens: those of the model's tokenizer if it lies beside it, as making them takes time."""
        if self.model.directory is None:
            return _NoTexts()
        try:
            return open_vocabulary(self.model, companion_directories(InputRequest(), self.model))
        except PipeEdgeError:
            return _NoTexts()

    @functools.cached_property
    def _hidden(self) -> torch.Tensor:
        width, generator = self.ends.architecture.hidden, torch.Generator().manual_seed(SEED)
        return torch.randn((_ROWS[-1], width), generator=generator).to(self.ends.stream_dtype)

    def score(self, rows: int) -> torch.Tensor:
        """Return the scores [rows, vocabulary] of up to 16 rows of random hidden states."""
        return self.ends.score(self._hidden[:rows])

    @contextmanager
    def open(
        self, texts: int, tokens: int, results: PacketSource, reserve: ReserveMemory = unbound
    ) -> Iterator[DataRank]:
        """Open a data rank for texts that grow together.

        Args:
            texts: Number of texts.
            tokens: Number of tokens of each, behind a prompt of one.
            results: Source of the results.
            reserve: Reserves memory for a step.

        Raises:
            RequestError: A text could not grow, as the model produces NaN.
        """
        queue = StepQueue(self.texts, measures=False)
        queue.begin(self.ends, self.bounds, 0, self.model.window)
        options = replace(self.sampling, max_tokens=tokens, ignore_eos=True)
        reader = _Reader()
        for text in range(texts):
            queue.submit(Prompt((0,), options, text), reader)
        queue.drain()
        activity, stream = Activity(), queue.stream()
        feeder = Feeder(Feed(stream, texts, self.ends.stream_dtype), activity, reserve=reserve)
        collection = Collecting(queue, counts_accuracy=False)
        with queue:
            yield DataRank(stream, feeder, Collector(feeder, Incoming(results, None, activity), collection))
        if reader.error is not None:
            raise reader.error

    def costs(
        self, steps_s: Mapping[int, float], clock: Callable[[], float], stretch: float = 1.0
    ) -> EndCosts:
        """Return what the ends cost.

        Args:
            steps_s: Seconds of ``clock`` that the data rank takes for a step, for two numbers of texts.
            clock: Time of the process in seconds.
            stretch: Elapsed seconds per second of ``clock``.
        """
        sampler = Sampler(self.sampling, ())

        def decide(rows: int) -> None:
            for row in self.score(rows).numpy():
                sampler.choose(row)

        decided = [_mean_seconds(functools.partial(decide, rows), clock) for rows in _ROWS]
        fixed, start, row = fit_rows(_ROWS, np.array(decided))
        (few, few_s), (many, many_s) = (
            (texts, seconds - max(fixed, start + texts * row)) for texts, seconds in sorted(steps_s.items())
        )
        feed_row_s = max(0.0, (many_s - few_s) / (many - few))
        return EndCosts(
            stretch * float(fixed),
            stretch * float(start),
            stretch * float(row),
            stretch * float(max(0.0, few_s - few * feed_row_s)),
            stretch * float(feed_row_s),
            self.model.end_bytes(self.dtype),
        )


def _mean_seconds(work: Callable[[], None], clock: Callable[[], float]) -> float:
    work()
    times = []
    for _ in range(9):
        began = clock()
        work()
        times.append(clock() - began)
    return float(without_delays(times).mean())


@dataclass
class _Reader:
    """Listener to answers, of which it keeps an error alone."""

    error: PipeEdgeError | None = None

    def grew(self, sequence: int, piece: Piece) -> None:
        """Do nothing."""

    def ended(self, sequence: int, answer: WrittenAnswer) -> None:
        """Do nothing."""

    def failed(self, sequence: int, error: PipeEdgeError) -> None:
        """Keep the error."""
        self.error = error

    def broke(self, error: BaseException) -> None:
        """Do nothing."""


class _NoTexts:
    """Texts of tokens, all of which are empty."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return no text."""
        return ""

    def is_silent(self, token: int) -> bool:
        """Return that every token may have a text, as those of answers do."""
        return False

    def is_byte(self, token: int) -> bool:
        """Return that no token is a single byte."""
        return False

    def matcher(self, structure: Structure, end_tokens: Collection[int]) -> StructureMatcher:
        """Refuse: no answer follows a structure."""
        raise NotImplementedError
