"""Linear layers with 8-bit weights.

    y[m, n] = b[n] + s[m] * t[n] * sum_k X[m, k] * W[n, k]

W holds whole numbers from -127 to 127, with a scale t for each output channel that is computed when the
weights are loaded. X holds whole numbers in the same range, with a scale s for each token that is computed in
every pass (dynamic quantisation): a token's result does not depend on its neighbours in the microbatch, and a
token with large values does not cost the others precision. Both are symmetric about zero, so the sum needs no
correction. It is exact, because it always fits 32 bits.

Everything between the input and the output of a layer, LayerNorm and GELU included, is computed in float32
and rounded once, to the type of the output.
"""

from __future__ import annotations

import torch
from torch import nn

from pipeedge.models.int8_kernels import Int8Kernel, int8_kernel
from pipeedge.models.int8_passes import FUSED, LARGEST_CODE, LEAST_SCALE, Finish
from pipeedge.models.linear import Linear, PackedLinear, finish

__all__ = ["Int8Linear", "quantize_rows"]


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix row by row.

    Args:
        weight: Matrix, float32 [outputs, inputs]. It is overwritten, to avoid a second copy.

    Returns:
        Codes, int8 [outputs, inputs], and scales, float32 [outputs]. Their product differs from the matrix by
        at most half a step.
    """
    largest = torch.maximum(weight.amax(1), weight.amin(1).neg_())
    scale = largest.div_(LARGEST_CODE).clamp_(min=LEAST_SCALE)
    return weight.div_(scale[:, None]).round_().to(torch.int8), scale


class Int8Linear(PackedLinear):
    """A linear layer with 8-bit weights.

    Args:
        layer: Layer with the sizes, bias and activation to use.
        dtype: Number type of input, bias and output: bfloat16.
        kernels: Name of the kernel, one of ``int8_kernels``.
    """

    scale: torch.Tensor
    """Scales of the weights, float32 [N]."""

    def __init__(self, layer: Linear, dtype: torch.dtype, kernels: str) -> None:
        super().__init__(layer, dtype, torch.int8)
        self._kernels = kernels
        self._kernel: Int8Kernel | None = None
        self._fused = self.activation if self.activation in FUSED else "linear"
        self._rest = "linear" if self.activation in FUSED else self.activation
        self.register_buffer("scale", torch.empty(self.outputs, device="meta"))

    def set_weight(self, weight: torch.Tensor, scale: torch.Tensor, device: torch.device) -> None:
        """Pack the weights.

        Args:
            weight: Weights, int8 [N, K].
            scale: Scales, float32 [N].
            device: Device to compute on.
        """
        self._kernel = int8_kernel(self._kernels, device, self.inputs, self.outputs)
        self.weight = self._kernel.pack(weight.to(device))
        self.scale = scale.to(device)

    def forward(
        self, x: torch.Tensor, *, norm: nn.LayerNorm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply ``norm``, the layer and its activation, and add ``residual``: [..., K] -> [..., N]."""
        if self._kernel is None:
            raise RuntimeError("the layer has no weights yet")
        shape = (*x.shape[:-1], self.outputs)
        within = residual if self._rest == "linear" else None
        if within is not None:
            within = within.reshape(-1, self.outputs).contiguous()
        steps = Finish(self.scale, self.bias, self._fused, within)
        rows = x.reshape(-1, self.inputs).contiguous()
        result = self._kernel(rows, norm, self.weight, steps).view(shape)
        return finish(result, self._rest, residual if within is None else None)
