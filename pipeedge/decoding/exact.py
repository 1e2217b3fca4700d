"""The hidden states of texts that are known already, computed in float32 a block at a time.

    tokens ─> embed ─> block 1 ─> block 2 ─> ... ─> hidden states in front of the head

Each block is loaded after the previous one is released, so a machine that cannot hold the whole model can do
it. Embedding and head are in memory all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from pipeedge.base.payload import Payload
from pipeedge.base.schedule import LayerRange
from pipeedge.decoding.pages import PageLists, PagePool, pages_of
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.decoder_ends import DecoderEnds
from pipeedge.models.layers.decoder import PAGE, DecoderStage, StepRows

__all__ = ["hidden_by_block"]

_LAYERS_AT_ONCE = 4
_CHUNK = 256
"""Tokens that are computed together."""


def hidden_by_block(
    model: DecoderModel, ends: DecoderEnds, texts: Sequence[Sequence[int]], weights: Path | None = None
) -> list[torch.Tensor]:
    """Return the hidden states [tokens, D] behind the last block of each text.

    Args:
        model: The decoder.
        ends: Its ends in float32.
        texts: Tokens of each text. Between two blocks, the hidden states of all are in memory.
        weights: File of the weights, or None for the model's own.

    Raises:
        WeightsError: The weights are missing, or do not fit the model.
    """
    hidden = [ends.embed(list(text), list(range(len(text)))) for text in texts]
    longest = max(map(len, texts), default=0)
    pages = pages_of(longest, PAGE)
    for start in range(0, model.n_layers, _LAYERS_AT_ONCE):
        layers = LayerRange(start, min(start + _LAYERS_AT_ONCE, model.n_layers))
        stage = model.stage(layers, pages=pages, window_pages=pages, context=longest, weights=weights)
        hidden = [_through(stage, states, pages) for states in hidden]
        del stage  # released before the next one is loaded
    return hidden


def _through(stage: DecoderStage, hidden: torch.Tensor, pages: int) -> torch.Tensor:
    """Return the hidden states of a text behind a stage of whole blocks."""
    # A window finds the pages of all positions, of which it needs the last ones.
    lists = PageLists(PagePool(pages), PagePool(pages), pages * PAGE, PAGE)
    found = []
    for start in range(0, len(hidden), _CHUNK):
        chunk = hidden[start : start + _CHUNK]
        lists.reserve(start + len(chunk))
        rows = StepRows(
            start, len(chunk), np.array(lists.pages, np.int32), np.array(lists.window_pages, np.int32)
        )
        payload: Payload = stage.step([rows], (chunk,))
        found.append(payload[0])
    return torch.cat(found)
