"""Passes before and after the integer product of a linear layer with 8-bit weights.

    before    LayerNorm, if there is one; a scale for each row; whole numbers
    after     scales, bias, activation, residual, number type of the result

On the CPU, each is one native pass over a row (``src-native/linear8``), which gives the same bits with any
instruction set. On other devices, torch computes the same in several passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge import _native as native
from pipeedge.models.activations import ACTIVATIONS

__all__ = [
    "FUSED",
    "LARGEST_CODE",
    "LEAST_SCALE",
    "ZERO_CODE",
    "Finish",
    "apply_native",
    "finish_sums",
    "finish_with_torch",
    "quantize_tokens",
    "quantize_with_torch",
]

ZERO_CODE = 128
"""Code that stands for zero."""
LARGEST_CODE = 127
LEAST_SCALE = 1e-30
_ROUND = 0.5

NativeActivation: TypeAlias = Literal["none", "gelu", "gelu_tanh"]

FUSED: Mapping[str, NativeActivation] = MappingProxyType(
    {
        "linear": "none",
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_accurate": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu_python_tanh": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
    }
)
"""Activations applied while the values are in registers, with the name that the native code gives them."""


class Finish(NamedTuple):
    """Operations on the sums of a product."""

    scale: torch.Tensor
    """Scales of the weights, float32 [N]."""
    bias: torch.Tensor | None
    """Bias [N]."""
    activation: str
    """Name of the activation, a key of ``FUSED``."""
    residual: torch.Tensor | None
    """Residual [M, N]."""


def quantize_tokens(x: torch.Tensor, norm: nn.LayerNorm | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations token by token.

    Args:
        x: Activations, bfloat16 [M, K], contiguous.
        norm: LayerNorm to apply first.

    Returns:
        Codes, uint8 [M, K] with ``ZERO_CODE`` for zero, and scales, float32 [M]. The scale of a token that
        holds NaN or infinity is NaN.
    """
    if x.device.type != "cpu":
        return quantize_with_torch(x, norm)
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scales = torch.empty(len(x))
    native.linear8_quantise(
        x=_array(x),
        norm=_norm(norm),
        codes=codes.numpy(),
        row_scales=scales.numpy(),
        threads=torch.get_num_threads(),
    )
    return codes, scales


def quantize_with_torch(x: torch.Tensor, norm: nn.LayerNorm | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as ``quantize_tokens`` on any device."""
    values = x.float()
    if norm is not None:
        weight, bias = norm.weight.float(), _norm_bias(norm).float()
        values = F.layer_norm(values, norm.normalized_shape, weight, bias, norm.eps)
    scales = values.abs().amax(1).div_(LARGEST_CODE).clamp_(min=LEAST_SCALE)
    scales.masked_fill_(scales.isinf(), torch.nan)
    # All values are positive, so truncation rounds to the nearest code.
    codes = (values * scales.reciprocal()[:, None]).add_(ZERO_CODE + _ROUND).nan_to_num_(ZERO_CODE)
    return codes.to(torch.uint8), scales


def finish_sums(sums: torch.Tensor, row_scales: torch.Tensor, finish: Finish) -> torch.Tensor:
    """Return the results, bfloat16 [M, N], from the sums, int32 [M, N], and the scales of the tokens."""
    if sums.device.type != "cpu":
        return finish_with_torch(sums, row_scales, finish)
    out = torch.empty(sums.shape, dtype=torch.bfloat16)
    native.linear8_finish(
        sums=sums.numpy(),
        row_scales=row_scales.numpy(),
        out=_array(out),
        threads=torch.get_num_threads(),
        **_arrays(finish),
    )
    return out


def finish_with_torch(sums: torch.Tensor, row_scales: torch.Tensor, finish: Finish) -> torch.Tensor:
    """Do the same as ``finish_sums`` on any device."""
    values = sums.float().mul_(finish.scale).mul_(row_scales[:, None])
    if finish.bias is not None:
        values.add_(finish.bias)
    values = ACTIVATIONS[finish.activation](values)
    if finish.residual is not None:
        values.add_(finish.residual)
    return values.to(torch.bfloat16)


def apply_native(
    x: torch.Tensor, norm: nn.LayerNorm | None, packed: torch.Tensor, finish: Finish
) -> torch.Tensor:
    """Return a whole layer's results, bfloat16 [M, N], from ``x``, bfloat16 [M, K], contiguous on the CPU."""
    out = torch.empty((len(x), len(finish.scale)), dtype=torch.bfloat16)
    native.linear8_apply(
        x=_array(x),
        norm=_norm(norm),
        packed=packed.numpy(),
        out=_array(out),
        threads=torch.get_num_threads(),
        **_arrays(finish),
    )
    return out


def _array(tensor: torch.Tensor) -> Any:
    """Return the bits of a bfloat16 tensor, without a copy."""
    return tensor.view(torch.uint16).numpy()


def _norm(norm: nn.LayerNorm | None) -> Any:
    return None if norm is None else (_array(norm.weight), _array(_norm_bias(norm)), norm.eps)


def _norm_bias(norm: nn.LayerNorm) -> torch.Tensor:
    """Return the bias of a norm, or zeros if it has none."""
    bias: torch.Tensor | None = norm.bias
    return torch.zeros_like(norm.weight) if bias is None else bias


def _arrays(finish: Finish) -> dict[str, Any]:
    return {
        "scales": finish.scale.numpy(),
        "bias": None if finish.bias is None else _array(finish.bias),
        "activation": FUSED[finish.activation],
        "residual": None if finish.residual is None else _array(finish.residual),
    }
