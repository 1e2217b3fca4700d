"""Generation with all stages in one process, for tests and measurements; a run puts links between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from pipeedge.base.errors import InputError
from pipeedge.base.schedule import LayerRange
from pipeedge.base.wording import count
from pipeedge.decoding.pages import PageLists, PagePool, pages_of, window_pages_of
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.families.decoder import DecoderOptions
from pipeedge.models.layers.decoder import PAGE, StepRows

__all__ = ["LocalDecoder"]


class LocalDecoder:
    """All stages and both ends of a decoder.

    Args:
        model: The decoder.
        dtype: Number type of the weights.
        cuts: Number of layers in front of each cut, ascending.
        context: Longest sequence in tokens.
        sequences: Most sequences at a time.
        slack: Number of positions by which a sequence may go back, and on with other tokens.
        threads: Number of threads, or None for torch's.
        variant: One of ``native.decoder_variants``, or None for the best.
    """

    def __init__(
        self,
        model: DecoderModel,
        dtype: torch.dtype = torch.float32,
        *,
        cuts: Sequence[int] = (),
        context: int = 512,
        sequences: int = 1,
        slack: int = 0,
        threads: int | None = None,
        variant: str | None = None,
    ) -> None:
        windows = model.config.own(DecoderOptions).windows
        self.context = context
        self._window = max(windows) + slack if any(windows) else 0
        self._pool = PagePool(sequences * pages_of(context, PAGE)) if 0 in windows else None
        most = min(window_pages_of(self._window, PAGE), pages_of(context, PAGE)) if self._window else 0
        self._window_pool = PagePool(sequences * most) if self._window else None
        edges = [0, *cuts, model.n_layers]
        self.stages = [
            model.stage(
                LayerRange(start, stop),
                dtype,
                pages=0 if self._pool is None else self._pool.size,
                window_pages=0 if self._window_pool is None else self._window_pool.size,
                context=context,
            )
            for start, stop in itertools.pairwise(edges)
        ]
        self.ends = model.ends(dtype)
        self._threads, self._variant = threads, variant
        self._vocab = model.config.vocab

    def begin(self) -> PageLists:
        """Return the lists of pages of a new sequence."""
        return PageLists(self._pool, self._window_pool, self._window, PAGE)

    def step(self, rows: Sequence[tuple[PageLists, int, Sequence[int]]]) -> torch.Tensor:
        """Execute a step in all stages, and return the hidden states [R, D] behind the last block.

        Args:
            rows: Pages, position of the first token, and the tokens, of each sequence.
        """
        sequences = [
            StepRows(position, len(tokens), *_reserved(lists, position + len(tokens)))
            for lists, position, tokens in rows
        ]
        tokens = [token for _, _, own in rows for token in own]
        positions = [position + i for _, position, own in rows for i in range(len(own))]
        payload: tuple[torch.Tensor, ...] = (self.ends.embed(tokens, positions),)
        for stage in self.stages:
            payload = stage.step(sequences, payload, threads=self._threads, variant=self._variant)
        for lists, position, own in rows:
            lists.leave(position + len(own))
        return payload[0]

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the scores of all tokens [R, V] for hidden states [R, D]."""
        return self.ends.score(hidden, threads=self._threads, variant=self._variant)

    def generate(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        chunk: int = 256,
        choose: Callable[[torch.Tensor, Sequence[int]], int] = lambda scores, _: int(scores.numpy().argmax()),
    ) -> list[int]:
        """Return up to ``tokens`` tokens that follow ``prompt``.

        Args:
            prompt: Numbers of the tokens of the prompt.
            tokens: Number of tokens to generate.
            chunk: Most tokens of the prompt in a step.
            choose: Function from scores [V] and the tokens so far, with the prompt, to the next token.

        Raises:
            InputError: The prompt is empty, has unknown tokens, or is too long for the context.
        """
        if not prompt:
            raise InputError("the prompt has no tokens: give at least one")
        strange = next((token for token in prompt if not 0 <= token < self._vocab), None)
        if strange is not None:
            raise InputError(f"the prompt has token {strange}; the model's are 0 to {self._vocab - 1}")
        if len(prompt) + tokens > self.context:
            raise InputError(
                f"{count(len(prompt), 'token')} of the prompt and {tokens} more are longer than the context "
                f"of {self.context}"
            )
        lists = self.begin()
        try:
            for start in range(0, len(prompt), chunk):
                hidden = self.step([(lists, start, prompt[start : start + chunk])])
            found = list(prompt)
            while True:
                found.append(choose(self.score(hidden[-1:])[0], found))
                if len(found) == len(prompt) + tokens:
                    return found[len(prompt) :]
                hidden = self.step([(lists, len(found) - 1, found[-1:])])
        finally:
            lists.give_back()


def _reserved(lists: PageLists, positions: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Reserve so many positions, and return both lists of pages as stages expect them."""
    lists.reserve(positions)
    return np.array(lists.pages, np.int32), np.array(lists.window_pages, np.int32)
