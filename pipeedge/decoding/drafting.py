"""Draft the next tokens of a few sequences with a small decoder in this process.

    tokens of the sequence    5 7 2 9 4 4
    tokens that it has read   5 7 2 9 1         the last one was drafted, and refused
    the next step reads                 4 4     and then drafts one token after the other

A long text is read in pieces, one with each draft that is wanted, so that nobody waits for long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from pipeedge.base.schedule import LayerRange
from pipeedge.decoding.loop import LocalDecoder
from pipeedge.decoding.pages import PageLists, pages_of, window_pages_of
from pipeedge.decoding.speculation import DraftedTokens, DraftFigures, WantedDraft
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.dtypes import INT4, find_dtype
from pipeedge.models.layers.decoder import PAGE

__all__ = ["DraftMemory", "Drafter"]

_PLACES = 4
"""Most sequences whose tokens are in the cache."""
_CONTEXT = 4096
"""Most positions of each."""
_PIECE = 64
"""Most tokens that are read with a draft."""
_SLACK = 64
"""Most drafted tokens of a sequence, which all may be refused."""
_FEW = 2
"""Most tokens that are read as fast as one is drafted."""


@dataclass
class _Read:
    """What was read of a sequence."""

    lists: PageLists
    tokens: list[int] = field(default_factory=list)
    known: int = 0
    """Number of those that are certainly tokens of the sequence."""


@dataclass(frozen=True)
class DraftMemory:
    """Number type, context and memory of a draft."""

    dtype: torch.dtype
    """Number type of the weights."""
    context: int
    """Longest text in tokens that it drafts for."""
    weights_bytes: int
    """Bytes of all of its weights."""
    cache_bytes: int
    """Most bytes of its cache, of which the system provides what is used."""

    @classmethod
    def of(cls, model: DecoderModel, context: int) -> DraftMemory:
        """Return what a draft takes.

        Args:
            model: The decoder.
            context: Longest sequence of the run.
        """
        packed = find_dtype(model.stored_dtype) if model.stored_dtype is not None else torch.int8
        dtype = packed if packed is INT4 else torch.int8
        context = min(context, model.max_tokens, _CONTEXT)
        layers = LayerRange(0, model.n_layers)
        pages, window_pages = model.page_bytes(layers, dtype)
        most = pages_of(context, PAGE)
        windows = min(window_pages_of(model.window + _SLACK, PAGE), most)
        return cls(
            dtype,
            context,
            model.weight_bytes(layers, dtype) + model.end_bytes(dtype),
            _PLACES * (most * pages + windows * window_pages),
        )


class Drafter:
    """A small decoder that drafts tokens, for one thread at a time.

    Args:
        model: The decoder.
        vocab: Number of tokens of the large model.
        context: Longest sequence of the run.
        end_tokens: Tokens behind which there is nothing to draft.
        clock: Clock in seconds.

    Raises:
        WeightsError: Its weights are missing or damaged.
    """

    def __init__(
        self,
        model: DecoderModel,
        vocab: int,
        context: int,
        end_tokens: Collection[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.memory = DraftMemory.of(model, context)
        context = self.memory.context
        self.figures = DraftFigures(context, _PLACES)
        """How long it takes, as measured now and later."""
        self._decoder = LocalDecoder(
            model, self.memory.dtype, context=context, sequences=_PLACES, slack=_SLACK
        )
        self._vocab = min(vocab, model.config.vocab)
        self._end_tokens = frozenset(end_tokens)
        self._clock = clock
        self._read: dict[int, _Read] = {}
        self._lock = threading.Lock()
        self._measure()

    def _measure(self) -> None:
        """Read and draft a little, twice: the first time also reads the weights."""
        tokens = (0,) * min(_PIECE + 1, self.figures.context - _FEW)
        for _ in range(2):
            for _ in range(3):
                (draft,) = self.draft([WantedDraft(-1, tokens, _FEW)], {-1})
                self.figures.note_times(draft)
            self._keep(())

    def draft(self, wanted: Sequence[WantedDraft], readers: Collection[int]) -> list[DraftedTokens]:
        """Draft tokens.

        Args:
            wanted: What is to be drafted.
            readers: Sequences whose tokens are wanted later on; those of all others are forgotten.
        """
        with self._lock:
            self._keep(readers)
            return [self._drafted(one) for one in wanted]

    def _keep(self, readers: Collection[int]) -> None:
        for sequence in [one for one in self._read if one not in readers]:
            self._read.pop(sequence).lists.give_back()

    def _drafted(self, wanted: WantedDraft) -> DraftedTokens:
        tokens, number = wanted.tokens, wanted.sequence
        one = self._read.get(number)
        if one is None:
            one = self._read[number] = _Read(self._decoder.begin())
        most = min(len(one.tokens), len(tokens) - 1)
        differing = (i for i in range(one.known, most) if one.tokens[i] != tokens[i])
        same = one.known = next(differing, most)
        del one.tokens[same:]
        piece = tokens[same : same + _PIECE]
        if max(piece) >= self._vocab:
            return DraftedTokens(number, len(tokens), (), same)
        began = self._clock()
        hidden = self._step(one, piece)
        one.known = same + len(piece)
        if one.known < len(tokens):
            read_s = (self._clock() - began) / len(piece)
            return DraftedTokens(number, len(tokens), (), one.known, read_s=read_s)
        found: list[int] = []
        while True:
            scores = self._decoder.score(hidden[-1:])[0, : self._vocab]
            found.append(int(scores.numpy().argmax()))
            if len(found) == wanted.most or found[-1] in self._end_tokens:
                break
            hidden = self._step(one, found[-1:])
        token_s = (self._clock() - began) / len(found) if len(piece) <= _FEW else None
        return DraftedTokens(number, len(tokens), tuple(found), len(tokens), token_s=token_s)

    def _step(self, one: _Read, tokens: Sequence[int]) -> torch.Tensor:
        """Read further tokens; return their hidden states [R, D]."""
        hidden = self._decoder.step([(one.lists, len(one.tokens), tokens)])
        one.tokens += tokens
        return hidden
