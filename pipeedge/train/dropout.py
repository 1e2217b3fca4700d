"""Apply dropout with a mask that depends only on the item, the layer and the seed.

With torch's own dropout, a mask depends on the numbers drawn before it, and so on the cut, the schedule and
the size of the microbatches. Here an item loses the same values wherever and together with whichever other
items it is computed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["ItemDropout", "Position"]


@dataclass
class Position:
    """Position of a stage in the run; the engine advances it and dropout reads it."""

    item: int = 0
    """Number of the microbatch's first item, counted from the beginning of the run."""


class ItemDropout(nn.Module):
    """Zeroes each value of an item with ``probability`` and scales up the others, while training.

    Args:
        probability: Probability of a zero, from 0 to below 1.
        layer: Number of this layer, which makes its masks differ from those of others.
        seed: Seed of the run.
        position: Position of the stage.
    """

    def __init__(self, probability: float, layer: int, seed: int, position: Position) -> None:
        super().__init__()
        self._probability = probability
        self._layer = layer
        self._seed = seed
        self._position = position

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Map [N, ...] to [N, ...]."""
        if not self.training or self._probability == 0:
            return values
        mask = torch.empty_like(values)
        for place, row in enumerate(mask):
            text = f"{self._seed} {self._layer} {self._position.item + place}".encode()
            generator = torch.Generator().manual_seed(zlib.crc32(text))
            row.bernoulli_(1 - self._probability, generator=generator)
        return values * mask.div_(1 - self._probability)
