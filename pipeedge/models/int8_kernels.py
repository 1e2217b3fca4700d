"""The kernels of linear layers with 8-bit weights, and which of them a machine has.

    native      src-native/linear8           PipeEdge's own; weights packed; what precedes and follows the
                                             product is computed on rows that are in the cache; needs AVX2
                                             or ARM
    onednn      onednn::qlinear_pointwise    weights packed; needs AVX512-VNNI
    torch       _int_mm                      on any device whose kernel proves to be exact
    emulated    linear                       in float32, everywhere; weights still take one byte each

All compute the same sums and share the passes around them (``int8_passes``). On the CPU they give the same
bits, so the choice only affects speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge import _native as native
from pipeedge.models.int8_passes import ZERO_CODE, Finish, apply_native, finish_sums, quantize_tokens

__all__ = ["Int8Kernel", "int8_kernel", "int8_kernels"]

_LARGEST = 127
_LEAST_SIDE = 8
_CUDA_LEAST_ROWS = 17
_CUDA_MULTIPLE = 8
_WITHOUT_PRODUCT = "portable"


class Int8Kernel(Protocol):
    """A kernel for linear layers, which defines the order of its packed weights."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ``weight``, int8 [N, K], in the order in which the kernel reads it."""

    def __call__(
        self, x: torch.Tensor, norm: nn.LayerNorm | None, packed: torch.Tensor, finish: Finish
    ) -> torch.Tensor:
        """Apply a layer.

        Args:
            x: Activations, bfloat16 [M, K], contiguous.
            norm: LayerNorm to apply first.
            packed: Weights returned by ``pack``.
            finish: What to do with the sums.

        Returns:
            Results, bfloat16 [M, N].
        """


class NativeKernel:
    """The whole layer in native code, a few rows after the other."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weights in panels of columns."""
        packed = torch.empty(native.linear8_packed_bytes(*weight.shape), dtype=torch.int8)
        native.linear8_pack(weights=weight.contiguous().numpy(), packed=packed.numpy())
        return packed

    def __call__(
        self, x: torch.Tensor, norm: nn.LayerNorm | None, packed: torch.Tensor, finish: Finish
    ) -> torch.Tensor:
        """Apply a layer, as ``Int8Kernel`` specifies."""
        return apply_native(x, norm, packed, finish)


class Product(Protocol):
    """A matrix multiplication, which defines the order of its packed weights."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return ``weight``, int8 [N, K], in the order in which the product reads it."""

    def __call__(self, codes: torch.Tensor, packed: torch.Tensor, outputs: int) -> torch.Tensor:
        """Return the sums, int32 [M, N].

        Args:
            codes: Codes of the activations, uint8 [M, K] with ``ZERO_CODE`` for zero.
            packed: Weights returned by ``pack``.
            outputs: N.
        """


class SeparateKernel:
    """Quantisation, a product, and what follows it, one after the other.

    Args:
        product: Product to use.
    """

    def __init__(self, product: Product) -> None:
        self.product = product

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weights in the order of the product."""
        return self.product.pack(weight)

    def __call__(
        self, x: torch.Tensor, norm: nn.LayerNorm | None, packed: torch.Tensor, finish: Finish
    ) -> torch.Tensor:
        """Apply a layer, as ``Int8Kernel`` specifies."""
        codes, row_scales = quantize_tokens(x, norm)
        return finish_sums(self.product(codes, packed, len(finish.scale)), row_scales, finish)


class OnednnProduct:
    """oneDNN's product with packed weights."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weights in oneDNN's own order."""
        packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
        return packed

    def __call__(self, codes: torch.Tensor, packed: torch.Tensor, outputs: int) -> torch.Tensor:
        """Return the sums, as ``Product`` specifies."""
        # It returns no integers. Its float32 are nearest to the sums, and the passes would round them alike.
        scales, zeros = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64)
        sums: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, ZERO_CODE, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return sums.to(torch.int32)


class IntProduct:
    """torch's product of integers."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weights transposed, [K, N]."""
        return weight.t().contiguous()

    def __call__(self, codes: torch.Tensor, packed: torch.Tensor, outputs: int) -> torch.Tensor:
        """Return the sums, as ``Product`` specifies."""
        signed = codes.bitwise_xor(ZERO_CODE).view(torch.int8)
        rows = signed.shape[0]
        if signed.device.type == "cuda" and rows < _CUDA_LEAST_ROWS:
            signed = F.pad(signed, (0, 0, 0, _CUDA_LEAST_ROWS - rows))
        return torch._int_mm(signed, packed)[:rows]


class FloatProduct:
    """A sum of products computed in float32, with rounding once sums are large."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weights unchanged."""
        return weight.contiguous()

    def __call__(self, codes: torch.Tensor, packed: torch.Tensor, outputs: int) -> torch.Tensor:
        """Return the sums, as ``Product`` specifies."""
        return F.linear(codes.float().sub_(ZERO_CODE), packed.float()).to(torch.int32)


def int8_kernels(device: torch.device) -> tuple[str, ...]:
    """Return the names of the kernels that compute the exact sum on ``device``, fastest first."""
    if device.type == "cuda":
        return ("torch", "emulated")
    if device.type != "cpu":
        return ("emulated",)
    found = ["native"] if native.linear8_variants()[0] != _WITHOUT_PRODUCT else []
    if _int_mm_is_exact():
        capabilities = _capabilities()
        if capabilities.get("avx512_vnni"):
            # AMX multiplies whole matrices, which only oneDNN uses.
            found.insert(0 if capabilities.get("amx_int8") else len(found), "onednn")
        found.append("torch")
    return (*found, "emulated")


def int8_kernel(name: str, device: torch.device, inputs: int, outputs: int) -> Int8Kernel:
    """Return the kernel called ``name``, or the emulated one if the layer's sizes do not suit it."""
    if name == "native":
        return NativeKernel()
    if device.type == "cuda":
        fits = inputs % _CUDA_MULTIPLE == 0 and outputs % _CUDA_MULTIPLE == 0
    else:
        # _int_mm misreads the strides of a matrix that has a single row or column.
        fits = min(inputs, outputs) >= _LEAST_SIDE
    products: Mapping[str, type[Product]] = {"onednn": OnednnProduct, "torch": IntProduct}
    return SeparateKernel(products.get(name, FloatProduct)() if fits else FloatProduct())


def _int_mm_is_exact() -> bool:
    """Return whether the processor sums products of 8-bit numbers in 32 bits.

    x86 processors before VNNI sum pairs in 16 bits, which overflow silently. This is tested by computing,
    because oneDNN's choice of kernel depends on more than the processor.
    """
    largest = torch.full((16, 64), _LARGEST, dtype=torch.int8)
    sums = torch._int_mm(largest, largest.t().contiguous())
    return bool((sums == 64 * _LARGEST**2).all())


def _capabilities() -> Mapping[str, object]:
    """Return what torch says about the processor. Without VNNI, oneDNN's product overflows or crashes."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    return {} if ask is None else dict(ask())
