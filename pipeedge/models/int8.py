"""Linear layers with 8-bit weights.

    y[m, n] = b[n] + s[m] * t[n] * sum_k X[m, k] * W[n, k]

W are whole numbers from -127 to 127 with a scale t for each output channel, found when the weights are
loaded. X are whole numbers in the same range with a scale s for each token, found anew in every pass
(dynamic quantisation): a token's result does not depend on its neighbours in the microbatch, and one
token with large values costs the others nothing. Both are symmetric about zero, so the sum needs no
correction, and it is exact: 32 bits hold any of them.

Three of torch's kernels give that sum; all give the same, so which one a machine has is a question of
speed alone (``choose_product``):

    onednn::qlinear_pointwise   weights packed once; scales with t on the way out; needs AVX512-VNNI
    _int_mm                     the bare sum, on any device whose kernel proves exact
    linear                      in float32, everywhere; the weights still take a byte each
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Int8Linear", "Product", "choose_product", "quantize_rows", "quantize_tokens"]

_LARGEST = 127
_OFFSET = 128
"""Where zero lies in the unsigned codes."""
_ROUND = 0.5
_LEAST_SCALE = 1e-30
_PIECE_BYTES = 1 << 20
_LEAST_SIDE = 8
_CUDA_LEAST_ROWS = 17
_CUDA_MULTIPLE = 8


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers and scales for a matrix, row by row.

    Args:
        weight: [outputs, inputs] of float32; it is overwritten, to need no second one.

    Returns:
        int8 [outputs, inputs] and float32 [outputs]; their product is the matrix, but for half a step.
    """
    largest = torch.maximum(weight.amax(1), weight.amin(1).neg_())
    scale = largest.div_(_LARGEST).clamp_(min=_LEAST_SCALE)
    return weight.div_(scale[:, None]).round_().to(torch.int8), scale


def quantize_tokens(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales for activations, token by token.

    In pieces that stay in the cache, one after the other in the same memory: there are several passes over
    each, and the whole of it in float32 would be the largest tensor of a block.

    Args:
        tokens: [M, K]

    Returns:
        uint8 [M, K], whose zero is 128, and [M, 1] in the type of ``tokens``.
    """
    count, width = tokens.shape
    codes = torch.empty((count, width), dtype=torch.uint8, device=tokens.device)
    scales = torch.empty((count, 1), dtype=tokens.dtype, device=tokens.device)
    at_once = count if tokens.device.type != "cpu" else max(1, _PIECE_BYTES // (4 * width))
    memory = torch.empty((min(at_once, count), width), device=tokens.device)
    for start in range(0, count, max(1, at_once)):
        piece = memory[: min(at_once, count - start)].copy_(tokens[start : start + at_once])
        largest = torch.maximum(piece.amax(1, keepdim=True), piece.amin(1, keepdim=True).neg_())
        # Rounded to the type in which results are scaled, before codes are made with it: no error then.
        scale = largest.div_(_LARGEST).clamp_(min=_LEAST_SCALE).to(tokens.dtype)
        scales[start : start + at_once] = scale
        # All are positive, so cutting off the fraction rounds to the nearest.
        codes[start : start + at_once] = piece.mul_(scale.float().reciprocal_()).add_(_OFFSET + _ROUND)
    return codes, scales


class Product(Protocol):
    """A kernel with the weights as it wants them."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` [N, K] int8 in the order in which the kernel reads it."""

    def __call__(
        self, codes: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Sums of products with the weights, times the weights' scales.

        Args:
            codes: [M, K] uint8; zero is 128.
            packed: what ``pack`` made of the weights.
            scale: [N] float32.
            dtype: of the result.

        Returns:
            [M, N]
        """


class OnednnProduct:
    """oneDNN, with packed weights; scales in the registers that hold the sums."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """In oneDNN's own order."""
        packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
        return packed

    def __call__(
        self, codes: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """As ``Product``."""
        zeros = torch.zeros(scale.shape, dtype=torch.int64)
        result: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, _OFFSET, packed, scale, zeros, None, 1.0, 0, dtype, "none", [], ""
        )
        return result


class IntProduct:
    """The exact sum as int32, scaled in a pass of its own."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """[K, N]"""
        return weight.t().contiguous()

    def __call__(
        self, codes: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """As ``Product``."""
        signed = codes.bitwise_xor(_OFFSET).view(torch.int8)
        rows = signed.shape[0]
        if signed.device.type == "cuda" and rows < _CUDA_LEAST_ROWS:
            signed = F.pad(signed, (0, 0, 0, _CUDA_LEAST_ROWS - rows))
        sums = torch._int_mm(signed, packed)[:rows]
        return sums.float().mul_(scale).to(dtype)


class FloatProduct:
    """The same sum from whole numbers in float32, up to the rounding of large ones."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """As it is."""
        return weight.contiguous()

    def __call__(
        self, codes: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """As ``Product``."""
        return F.linear(codes.float().sub_(_OFFSET), packed.float()).mul_(scale).to(dtype)


def choose_product(device: torch.device, inputs: int, outputs: int) -> Product:
    """The fastest kernel for a layer of this size that gives the exact sum on ``device``."""
    if device.type == "cuda":
        fits = inputs % _CUDA_MULTIPLE == 0 and outputs % _CUDA_MULTIPLE == 0
        return IntProduct() if fits else FloatProduct()
    # _int_mm takes the strides of a matrix of one row or column for those of another.
    if device.type != "cpu" or min(inputs, outputs) < _LEAST_SIDE or not _int_mm_is_exact():
        return FloatProduct()
    return OnednnProduct() if _has_vnni() else IntProduct()


def _int_mm_is_exact() -> bool:
    """Whether the processor sums products of 8-bit numbers in 32 bits.

    x86 before VNNI sums pairs in 16 bits, which overflow without a word. Found by trying: what oneDNN does
    depends on more than the processor.
    """
    largest = torch.full((16, 64), _LARGEST, dtype=torch.int8)
    sums = torch._int_mm(largest, largest.t().contiguous())
    return bool((sums == 64 * _LARGEST**2).all())


def _has_vnni() -> bool:
    """Whether oneDNN's fused kernel may be used: without these instructions it overflows, or crashes."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    return ask is not None and bool(ask().get("avx512_vnni"))


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights; on ``meta`` until ``set_weight``.

    Args:
        inputs: K.
        outputs: N.
        bias: whether there is one.
        dtype: of what comes in, of the bias, and of what goes out.
    """

    weight: torch.Tensor
    """int8; [N, K] on ``meta``, then as the kernel wants it."""
    scale: torch.Tensor
    """float32 [N]"""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.inputs = inputs
        self.outputs = outputs
        self._dtype = dtype
        self._product: Product = FloatProduct()
        self.register_buffer("weight", torch.empty(outputs, inputs, dtype=torch.int8, device="meta"))
        self.register_buffer("scale", torch.empty(outputs, device="meta"))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype, device="meta"), False) if bias else None

    def set_weight(self, weight: torch.Tensor, scale: torch.Tensor, device: torch.device) -> None:
        """Take the weights.

        Args:
            weight: int8 [N, K].
            scale: float32 [N].
            device: where to compute.
        """
        self._product = choose_product(device, self.inputs, self.outputs)
        self.weight = self._product.pack(weight.to(device))
        self.scale = scale.to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]"""
        codes, scale = quantize_tokens(x.reshape(-1, self.inputs))
        sums = self._product(codes, self.weight, self.scale, self._dtype)
        if self.bias is None:
            sums.mul_(scale)
        else:
            torch.addcmul(self.bias, sums, scale, out=sums)
        return sums.view(*x.shape[:-1], self.outputs)
