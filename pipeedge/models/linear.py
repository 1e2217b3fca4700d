"""The linear layers of blocks: a product, and what directly precedes and follows it.

    y = norm(x) W' + b         queries, keys and values; x itself where norms come last
    y = f(norm(x) W' + b)      the upper half of the MLP, f its activation
    y = x W' + b + residual    the projection and the lower half of the MLP

There are several classes with this interface (``models.kernels`` chooses): ``Linear`` computes the steps one
after the other with torch's own functions, ``OnednnLinear`` with the activation and the residual inside the
product, ``int8.Int8Linear`` and ``int4.Int4Linear`` with 8-bit and 4-bit weights.

The weights of a ``PackedLinear`` are stored in the order in which its kernel reads them. They are packed
once, while they are loaded; a plain product packs them each time, or reads them in a less suitable order.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge.models.activations import ACTIVATIONS

__all__ = ["Linear", "OnednnLinear", "PackedLinear"]


class Linear(nn.Linear):
    """A linear layer as torch computes it, on ``meta`` until it is filled.

    Args:
        inputs: Number of input features K.
        outputs: Number of output features N.
        bias: Whether the layer has a bias.
        activation: Name of the function applied to the result (``activations.ACTIVATIONS``).
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, activation: str = "linear") -> None:
        super().__init__(inputs, outputs, bias=bias, device="meta")
        self.activation = activation

    def forward(
        self, x: torch.Tensor, *, norm: nn.LayerNorm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply ``norm``, the layer and its activation, and add ``residual``: [..., K] -> [..., N]."""
        normed = x if norm is None else norm(x)
        return finish(F.linear(normed, self.weight, self.bias), self.activation, residual)


def finish(product: torch.Tensor, activation: str, residual: torch.Tensor | None) -> torch.Tensor:
    """Apply an activation to ``product``, which may be overwritten, and add ``residual``."""
    result = ACTIVATIONS[activation](product)
    return result if residual is None else result.add_(residual)


class PackedLinear(nn.Module):
    """A linear layer whose weights are packed while they are loaded; on ``meta`` until then.

    Args:
        layer: Layer with the sizes, bias and activation to use.
        dtype: Number type of input, bias and output.
        stored: Number type of the weights.
    """

    weight: torch.Tensor
    """Weights: [N, K] while on ``meta``, then in the kernel's own order."""

    def __init__(self, layer: Linear, dtype: torch.dtype, stored: torch.dtype) -> None:
        super().__init__()
        self.inputs = layer.in_features
        self.outputs = layer.out_features
        self.activation = layer.activation
        self.dtype = dtype
        self.register_buffer("weight", torch.empty(self.outputs, self.inputs, dtype=stored, device="meta"))
        bias = torch.empty(self.outputs, dtype=dtype, device="meta")
        has_bias = layer._parameters["bias"] is not None
        self.bias = nn.Parameter(bias, requires_grad=False) if has_bias else None

    @property
    def stored(self) -> torch.Tensor:
        """Weights as a file has them: shape and number type, while on ``meta``."""
        return self.weight


class OnednnLinear(PackedLinear):
    """A linear layer with weights packed for oneDNN, which applies activation and residual in registers."""

    FUSED: Mapping[str, tuple[str, str]] = MappingProxyType(
        {
            "linear": ("none", ""),
            "gelu": ("gelu", "none"),
            "gelu_python": ("gelu", "none"),
            "gelu_accurate": ("gelu", "tanh"),
            "gelu_fast": ("gelu", "tanh"),
            "gelu_new": ("gelu", "tanh"),
            "gelu_python_tanh": ("gelu", "tanh"),
            "gelu_pytorch_tanh": ("gelu", "tanh"),
        }
    )
    """Activations that the product applies itself, with the name and the variant that oneDNN gives them.

    oneDNN's ReLU is not among them: it turns NaN into 0, which would hide damaged weights.
    """

    def __init__(self, layer: Linear, dtype: torch.dtype) -> None:
        super().__init__(layer, dtype, dtype)
        self._fused, self._variant = self.FUSED.get(self.activation, self.FUSED["linear"])
        self._rest = "linear" if self.activation in self.FUSED else self.activation

    def set_weight(self, weight: torch.Tensor) -> None:
        """Pack the weights [N, K]; ``weight`` may be overwritten afterwards."""
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def forward(
        self, x: torch.Tensor, *, norm: nn.LayerNorm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply ``norm``, the layer and its activation, and add ``residual``: [..., K] -> [..., N]."""
        if norm is not None:
            x = norm(x)
        product = torch.ops.mkldnn._linear_pointwise
        if residual is not None and self.activation == "linear":
            result: torch.Tensor = product.binary(x, residual, self.weight, self.bias, "add")
            return result
        result = product(x, self.weight, self.bias, self._fused, [], self._variant)
        return finish(result, self._rest, residual)
