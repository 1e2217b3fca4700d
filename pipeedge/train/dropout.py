"""Dropout whose mask depends on the item, the layer and the seed, and on nothing else.

With torch's own, a mask depends on what was drawn before it, and so on the cut, the schedule and the size of
the microbatches. Here an item loses the same values wherever and with whomever it is computed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["ItemDropout", "Position"]


@dataclass
class Position:
    """Where in the run a stage is; the engine moves it, dropout reads it."""

    item: int = 0
    """Number of the microbatch's first item, counted from the beginning of the run."""


class ItemDropout(nn.Module):
    """Each value of an item is zero with ``probability``, else divided by what is left, while training.

    Args:
        probability: from 0 to below 1.
        layer: this layer's number, which tells its masks from others'.
        seed: of the run.
        position: of the stage.
    """

    def __init__(self, probability: float, layer: int, seed: int, position: Position) -> None:
        super().__init__()
        self._probability = probability
        self._layer = layer
        self._seed = seed
        self._position = position

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[N, ...] -> [N, ...]"""
        if not self.training or self._probability == 0:
            return values
        mask = torch.empty_like(values)
        for place, row in enumerate(mask):
            text = f"{self._seed} {self._layer} {self._position.item + place}".encode()
            generator = torch.Generator().manual_seed(zlib.crc32(text))
            row.bernoulli_(1 - self._probability, generator=generator)
        return values * mask.div_(1 - self._probability)
