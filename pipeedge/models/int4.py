"""Linear layers with 4-bit weights, in groups of 32 with a scale and a zero, as decoders have them.

Rows are quantised to 8 bits in every pass, with a scale for each group of 32 values, so the products of a
group are sums of whole numbers. The result of a row depends on no other row. Bias, activation and residual
are applied in float32, and the result is rounded once, to the type of the output.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from pipeedge import _native as native
from pipeedge.models.dtypes import INT4, dtype_name
from pipeedge.models.linear import Linear, PackedLinear, finish

__all__ = ["Int4Linear"]

_CODING = dtype_name(INT4)
_ROWS_AT_ONCE = 192
"""Rows of a product that are computed together, as many as native code takes at a time: their codes and sums
are small beside the weights.
"""


class Int4Linear(PackedLinear):
    """A linear layer with 4-bit weights.

    Args:
        layer: Layer with the sizes, bias and activation to use.
        dtype: Number type of input, bias and output: bfloat16.
    """

    def __init__(self, layer: Linear, dtype: torch.dtype) -> None:
        super().__init__(layer, dtype, INT4)
        values, size = next(
            (values, size) for name, values, size in native.weight_codings() if name == _CODING
        )
        row = -(-self.inputs // values) * size
        self.coded_bytes = self.outputs * row
        """Size of codes, scales and zeros in bytes."""
        self.register_buffer("weight", torch.empty(self.outputs, row, dtype=torch.uint8, device="meta"))
        self._product: native.DecoderHead | None = None  # without a norm, a head is a linear layer

    @property
    def stored(self) -> torch.Tensor:
        """Weights as a file has them, on ``meta``."""
        return torch.empty(self.outputs, self.inputs, dtype=INT4, device="meta")

    def set_rows(self, first: int, rows: npt.NDArray[np.float32] | npt.NDArray[np.uint8]) -> None:
        """Pack rows of the weights, or of their codes, from row ``first`` on.

        Raises:
            ValueError: A scale of the codes is not finite.
        """
        if self._product is None:
            self._product = native.DecoderHead(
                weights=_CODING,
                stream=dtype_name(self.dtype),
                hidden=self.inputs,
                tokens=self.outputs,
                norm_centred=False,
                eps=0,
                scale=1,
                cap=0,
            )
        coding = _CODING if rows.dtype == np.uint8 else None
        self._product.fill("weight", first, rows, threads=torch.get_num_threads(), coding=coding)
        self.weight = torch.empty(0, dtype=torch.uint8)  # native code has them

    def forward(
        self, x: torch.Tensor, *, norm: nn.LayerNorm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply ``norm``, the layer and its activation, and add ``residual``: [..., K] -> [..., N]."""
        if self._product is None:
            raise RuntimeError("the layer has no weights yet")
        rows = x.reshape(-1, self.inputs)
        skipped = None if residual is None else residual.reshape(-1, self.outputs)
        out = torch.empty((len(rows), self.outputs), dtype=self.dtype)
        sums = torch.empty((min(len(rows), _ROWS_AT_ONCE), self.outputs))
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            some = (rows[part] if norm is None else norm(rows[part])).contiguous()
            result = sums[: len(some)]
            self._product.score(
                some.view(torch.uint16).numpy(), result.numpy(), threads=torch.get_num_threads()
            )
            if self.bias is not None:
                result.add_(self.bias)
            out[part] = finish(result, self.activation, None if skipped is None else skipped[part])
        return out.view(*x.shape[:-1], self.outputs)
