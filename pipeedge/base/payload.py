"""What crosses a cut: a tuple of tensors, whose first dimension is the items of the microbatch.

Between the layers of a block the tuple is ``(hidden,)`` or ``(context or mlp, skip)``; a model that
masks its attention (BERT) adds the mask at the end as long as a later layer attends. The input of
layer 1 and the output of the last layer are payloads too.

Pictures cross the link to the first stage as they were decoded, a byte a value, with a table of what each
byte stands for (announced once, in the plan); the first stage looks the values up. That gives the same bits
as scaling and normalising them before, on any device, with a quarter of the bytes.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

__all__ = ["BYTE_VALUES", "Payload", "PixelTable", "TensorSpec", "specs_bytes"]

Payload: TypeAlias = tuple[torch.Tensor, ...]

BYTE_VALUES = 256
"""How many values a byte has."""


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


@dataclass(frozen=True, eq=False)
class PixelTable:
    """What each 8-bit value of each channel of a picture is in the input of a model."""

    values: torch.Tensor
    """float32 [channels, 256]"""

    def __post_init__(self) -> None:
        shape = tuple(self.values.shape)
        if (
            self.values.dtype is not torch.float32
            or len(shape) != 2
            or shape[1] != BYTE_VALUES
            or not shape[0]
        ):
            raise ValueError(
                f"a table of pixels is float32 [channels, 256], not {self.values.dtype} {list(shape)}"
            )
        if not bool(self.values.isfinite().all()):
            raise ValueError("a table of pixels holds a value that is not finite")

    def look_up(self, pixels: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the values of ``pixels`` in type ``dtype``, contiguous.

        Args:
            pixels: uint8 [items, channels, height, width].
            dtype: as if the values had been converted from float32.

        Raises:
            ValueError: the pictures have another number of channels.
        """
        channels = len(self.values)
        if pixels.ndim != 4 or pixels.shape[1] != channels:
            raise ValueError(f"pictures {list(pixels.shape)} do not fit a table of {channels} channels")
        values = self.values.to(dtype).to(pixels.device).flatten()
        first = torch.arange(channels, dtype=torch.int32, device=pixels.device)[:, None, None] * BYTE_VALUES
        return values.index_select(0, (pixels + first).flatten()).view(pixels.shape)

    def to_text(self) -> str:
        """Return the table as a message has it."""
        return base64.b64encode(self.values.numpy().astype("<f4").tobytes()).decode("ascii")

    @classmethod
    def from_text(cls, text: str) -> PixelTable:
        """Read what ``to_text`` made.

        Raises:
            ValueError: it was made by something else.
        """
        values = np.frombuffer(base64.b64decode(text, validate=True), "<f4").astype(np.float32)
        return cls(torch.from_numpy(values.reshape(-1, BYTE_VALUES)))
