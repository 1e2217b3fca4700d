"""What crosses a cut: a tuple of tensors, whose first dimension is the items of the microbatch.

Between the layers of a block the tuple is ``(hidden,)`` or ``(context or mlp, skip)``; a model that
masks its attention (BERT) adds the mask at the end as long as a later layer attends. The input of
layer 1 and the output of the last layer are payloads too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch

__all__ = ["Payload", "TensorSpec", "specs_bytes"]

Payload: TypeAlias = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of one tensor of a payload."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """How many values it holds."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """How many bytes its values take."""
        return self.elements * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """Such a tensor, whose values are yet to be written."""
        return torch.empty(self.shape, dtype=self.dtype)


def specs_bytes(specs: tuple[TensorSpec, ...]) -> int:
    """Bytes of all values of a payload of these ``specs``."""
    return sum(spec.bytes for spec in specs)
