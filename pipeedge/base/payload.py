"""Payloads: the tensors that cross a cut, as a tuple. Their first dimension counts items of the microbatch.

Between the layers of a block the tuple is ``(hidden,)`` or ``(context or mlp, skip)``. A model that
masks its attention (BERT) appends the mask as long as a later layer needs it. The input of layer 1 and
the output of the last layer are payloads too.

Images cross the link to the first stage as decoded, one byte a value, together with a table of the value
that each byte stands for (announced once, in the plan). The first stage looks the values up. On any device
this gives the same bits as scaling and normalising beforehand, with a quarter of the bytes.
"""

from __future__ import annotations

import base64
import functools
import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from pipeedge.base.shapes import TensorShape

__all__ = ["BYTE_VALUES", "Payload", "PixelTable", "TensorSpec", "specs_bytes"]

Payload: TypeAlias = tuple[torch.Tensor, ...]

BYTE_VALUES = 256
"""Number of values that a byte can have."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and number type of one tensor of a payload."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Number of values in the tensor."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the values in bytes."""
        return self.elements * self.dtype.itemsize

    @property
    def named(self) -> TensorShape:
        """Shape of a tensor with the name of its number type."""
        return TensorShape(self.shape, str(self.dtype).removeprefix("torch."))

    @classmethod
    def of(cls, shape: TensorShape) -> TensorSpec:
        """Return the specification of a tensor of ``shape``."""
        return cls(shape.shape, getattr(torch, shape.dtype))

    def empty(self) -> torch.Tensor:
        """Return an uninitialised tensor of this shape and type."""
        return torch.empty(self.shape, dtype=self.dtype)


def specs_bytes(specs: tuple[TensorSpec, ...]) -> int:
    """Return the size in bytes of a payload with these ``specs``."""
    return sum(spec.bytes for spec in specs)


@dataclass(frozen=True, eq=False)
class PixelTable:
    """Model input value for each 8-bit value of each image channel."""

    values: torch.Tensor
    """Input values, float32 [channels, 256]."""

    def __post_init__(self) -> None:
        shape = tuple(self.values.shape)
        if (
            self.values.dtype is not torch.float32
            or len(shape) != 2
            or shape[1] != BYTE_VALUES
            or not shape[0]
        ):
            raise ValueError(
                f"a pixel table must be float32 [channels, 256], not {self.values.dtype} {list(shape)}"
            )
        if not bool(self.values.isfinite().all()):
            raise ValueError("a pixel table has values that are not finite")

    def look_up(self, pixels: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the input values of ``pixels`` as a contiguous tensor.

        Args:
            pixels: Images, uint8 [items, channels, height, width].
            dtype: Number type of the result; values are converted from float32.

        Raises:
            ValueError: The images have another number of channels than the table.
        """
        channels = len(self.values)
        if pixels.ndim != 4 or pixels.shape[1] != channels:
            raise ValueError(f"images {list(pixels.shape)} do not fit a pixel table of {channels} channels")
        values = self._flat.to(pixels.device, dtype)
        places = pixels + self._first.to(pixels.device)
        return values.index_select(0, places.flatten()).view(pixels.shape)

    # What does not change is computed once: for small images, each operation costs as much as the look-up.
    @functools.cached_property
    def _flat(self) -> torch.Tensor:
        return self.values.flatten()

    @functools.cached_property
    def _first(self) -> torch.Tensor:
        """Index of each channel's first value in ``_flat``."""
        return (torch.arange(len(self.values), dtype=torch.int32) * BYTE_VALUES)[:, None, None]

    def to_text(self) -> str:
        """Return the table as text for a control message."""
        return base64.b64encode(self.values.numpy().astype("<f4").tobytes()).decode("ascii")

    @classmethod
    def from_text(cls, text: str) -> PixelTable:
        """Parse the result of ``to_text``.

        Raises:
            ValueError: The text is malformed.
        """
        values = np.frombuffer(base64.b64decode(text, validate=True), "<f4").astype(np.float32)
        return cls(torch.from_numpy(values.reshape(-1, BYTE_VALUES)))
