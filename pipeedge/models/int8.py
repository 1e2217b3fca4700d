"""Linear layers with 8-bit weights.

    y[m, n] = b[n] + s[m] * t[n] * sum_k X[m, k] * W[n, k]

W holds whole numbers from -127 to 127, with a scale t for each output channel that is computed when the
weights are loaded. X holds whole numbers in the same range, with a scale s for each token that is computed in
every pass (dynamic quantisation): a token's result does not depend on its neighbours in the microbatch, and a
token with large values does not cost the others precision. Both are symmetric about zero, so the sum needs no
correction. It is exact, because it always fits 32 bits.

Three of torch's kernels compute this sum. They give the same result, so the choice among those that a machine
supports (``int8_kernels``) only affects speed:

    onednn      onednn::qlinear_pointwise   weights packed once; t applied to the sums in registers; needs
                                            AVX512-VNNI
    torch       _int_mm                     the plain sum, on any device whose kernel proves to be exact
    emulated    linear                      in float32, everywhere; weights still take one byte each
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge.models.linear import Linear, PackedLinear, finish

__all__ = ["Int8Linear", "Product", "int8_kernels", "product_for", "quantize_rows", "quantize_tokens"]

_LARGEST = 127
_OFFSET = 128
"""Code that stands for zero in the unsigned codes."""
_ROUND = 0.5
_LEAST_SCALE = 1e-30
_PIECE_BYTES = 1 << 20
_LEAST_SIDE = 8
_CUDA_LEAST_ROWS = 17
_CUDA_MULTIPLE = 8


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix row by row.

    Args:
        weight: Matrix, float32 [outputs, inputs]. It is overwritten, to avoid a second copy.

    Returns:
        Codes, int8 [outputs, inputs], and scales, float32 [outputs]. Their product differs from the matrix by
        at most half a step.
    """
    largest = torch.maximum(weight.amax(1), weight.amin(1).neg_())
    scale = largest.div_(_LARGEST).clamp_(min=_LEAST_SCALE)
    return weight.div_(scale[:, None]).round_().to(torch.int8), scale


def quantize_tokens(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations token by token.

    The work is done in pieces that fit the cache and reuse one buffer: there are several passes over each
    piece, and a float32 copy of the whole tensor would be the largest tensor of a block.

    Args:
        tokens: Activations [M, K].

    Returns:
        Codes, uint8 [M, K] with 128 for zero, and scales [M, 1] in the type of ``tokens``.
    """
    count, width = tokens.shape
    codes = torch.empty((count, width), dtype=torch.uint8, device=tokens.device)
    scales = torch.empty((count, 1), dtype=tokens.dtype, device=tokens.device)
    at_once = count if tokens.device.type != "cpu" else max(1, _PIECE_BYTES // (4 * width))
    memory = torch.empty((min(at_once, count), width), device=tokens.device)
    for start in range(0, count, max(1, at_once)):
        piece = memory[: min(at_once, count - start)].copy_(tokens[start : start + at_once])
        largest = torch.maximum(piece.amax(1, keepdim=True), piece.amin(1, keepdim=True).neg_())
        # The scale is rounded to the type of the results before the codes are computed from it, so that
        # rounding it adds no error.
        scale = largest.div_(_LARGEST).clamp_(min=_LEAST_SCALE).to(tokens.dtype)
        scales[start : start + at_once] = scale
        # All values are positive, so truncation rounds to the nearest code.
        codes[start : start + at_once] = piece.mul_(scale.float().reciprocal_()).add_(_OFFSET + _ROUND)
    return codes, scales


class Product(Protocol):
    """A matrix multiplication kernel that defines the order of its packed weights."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ``weight``, int8 [N, K], in the order in which the kernel reads it."""

    def __call__(
        self, codes: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the products with the weights, times the weights' scales.

        Args:
            codes: Codes of the activations, uint8 [M, K] with 128 for zero.
            packed: Weights returned by ``pack``.
            scale: Scales of the weights, float32 [N].
            dtype: Number type of the result.

        Returns:
            Products [M, N].
        """


class OnednnProduct:
    """oneDNN's kernel, which packs the weights and applies their scales in registers."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weights in oneDNN's own order."""
        packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
        return packed

    def __call__(
        self, codes: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the products, as ``Product`` specifies."""
        zeros = torch.zeros(scale.shape, dtype=torch.int64)
        result: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, _OFFSET, packed, scale, zeros, None, 1.0, 0, dtype, "none", [], ""
        )
        return result


class IntProduct:
    """The exact sum in int32, scaled in a separate pass."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weights transposed, [K, N]."""
        return weight.t().contiguous()

    def __call__(
        self, codes: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the products, as ``Product`` specifies."""
        signed = codes.bitwise_xor(_OFFSET).view(torch.int8)
        rows = signed.shape[0]
        if signed.device.type == "cuda" and rows < _CUDA_LEAST_ROWS:
            signed = F.pad(signed, (0, 0, 0, _CUDA_LEAST_ROWS - rows))
        sums = torch._int_mm(signed, packed)[:rows]
        return sums.float().mul_(scale).to(dtype)


class FloatProduct:
    """The same sum computed in float32, with rounding once sums are large."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weights unchanged."""
        return weight.contiguous()

    def __call__(
        self, codes: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the products, as ``Product`` specifies."""
        return F.linear(codes.float().sub_(_OFFSET), packed.float()).mul_(scale).to(dtype)


def int8_kernels(device: torch.device) -> tuple[str, ...]:
    """Return the names of the kernels that compute the exact sum on ``device``, fastest first."""
    if device.type == "cuda":
        return ("torch", "emulated")
    if device.type != "cpu" or not _int_mm_is_exact():
        return ("emulated",)
    return ("onednn", "torch", "emulated") if _has_vnni() else ("torch", "emulated")


def product_for(kernels: str, device: torch.device, inputs: int, outputs: int) -> Product:
    """Return the product called ``kernels``, or the emulated one if the layer's sizes do not suit it."""
    if device.type == "cuda":
        fits = inputs % _CUDA_MULTIPLE == 0 and outputs % _CUDA_MULTIPLE == 0
    else:
        # _int_mm misreads the strides of a matrix that has a single row or column.
        fits = min(inputs, outputs) >= _LEAST_SIDE
    products: Mapping[str, type[Product]] = {"onednn": OnednnProduct, "torch": IntProduct}
    return products.get(kernels, FloatProduct)() if fits else FloatProduct()


def _int_mm_is_exact() -> bool:
    """Return whether the processor sums products of 8-bit numbers in 32 bits.

    x86 processors before VNNI sum pairs in 16 bits, which overflow silently. This is tested by computing,
    because oneDNN's choice of kernel depends on more than the processor.
    """
    largest = torch.full((16, 64), _LARGEST, dtype=torch.int8)
    sums = torch._int_mm(largest, largest.t().contiguous())
    return bool((sums == 64 * _LARGEST**2).all())


def _has_vnni() -> bool:
    """Return whether oneDNN's fused kernel is usable: without VNNI it overflows or crashes."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    return ask is not None and bool(ask().get("avx512_vnni"))


class Int8Linear(PackedLinear):
    """A linear layer with 8-bit weights.

    Args:
        layer: Layer with the sizes, bias and activation to use.
        dtype: Number type of input, bias and output.
        kernels: Name of the product, one of ``int8_kernels``.
    """

    scale: torch.Tensor
    """Scales of the weights, float32 [N]."""

    def __init__(self, layer: Linear, dtype: torch.dtype, kernels: str) -> None:
        super().__init__(layer, dtype, torch.int8)
        self._kernels = kernels
        self._product: Product = FloatProduct()
        self.register_buffer("scale", torch.empty(self.outputs, device="meta"))

    def set_weight(self, weight: torch.Tensor, scale: torch.Tensor, device: torch.device) -> None:
        """Pack the weights.

        Args:
            weight: Weights, int8 [N, K].
            scale: Scales, float32 [N].
            device: Device to compute on.
        """
        self._product = product_for(self._kernels, device, self.inputs, self.outputs)
        self.weight = self._product.pack(weight.to(device))
        self.scale = scale.to(device)

    def forward(
        self, x: torch.Tensor, *, norm: nn.LayerNorm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply ``norm``, the layer and its activation, and add ``residual``: [..., K] -> [..., N]."""
        if norm is not None:
            x = norm(x)
        codes, scale = quantize_tokens(x.reshape(-1, self.inputs))
        sums = self._product(codes, self.weight, self.scale, self.dtype)
        if self.bias is None:
            sums.mul_(scale)
        else:
            torch.addcmul(self.bias, sums, scale, out=sums)
        return finish(sums.view(*x.shape[:-1], self.outputs), self.activation, residual)
