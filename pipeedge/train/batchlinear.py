"""Compute the gradient of large linear layers once per batch instead of once per microbatch.

    forward, M times     y = x W' + b       x [rows, inputs] is kept, as always
    backward, M times    dx = dy W          dy [rows, outputs] is kept too
    end of the batch     dW = dY' X         X, dY: the rows of all microbatches, stacked

With autograd, each microbatch writes a gradient as large as the weights and adds it to the sum: 16 bytes of
memory traffic for each weight (one value written, two read, one written) and 2 x rows operations. A core
that does 8 operations in the time of moving a byte is limited by memory below 64 rows. vgg19's first linear
layer has 134 MB of weights and 4 rows per microbatch. At the end of the batch, one product does the same and
moves 4 bytes per weight.

Instead, inputs + outputs values are kept for each row of the batch. They may take at most an eighth of the
gradient's inputs x outputs values, which need no memory in the meantime. For 4096 inputs and outputs this
allows batches of 256 rows; for 256 and 1024, as in a small transformer, 25, where each token is a row. A
batch in one piece gains nothing.

The weights are then not part of autograd's graph, so a schedule that splits the backward pass by walking the
graph (zero-bubble) finds no weight gradients to compute here in the second part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["BatchLinear"]

_FEW_ROWS = 64
_LITTLE = 8


class BatchLinear(nn.Linear):
    """A linear layer that may defer the gradients of its parameters to the end of the batch.

    It does so after ``expect``, under the conditions above; otherwise it behaves as ``nn.Linear``.
    """

    def __init__(self, inputs: int, outputs: int, device: torch.device | str | None = None) -> None:
        super().__init__(inputs, outputs, device=device)
        self._microbatches = 1
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def expect(self, microbatches: int) -> None:
        """Set the number of microbatches in a batch, after which the caller must call ``finish``."""
        self._microbatches = microbatches

    def waits(self, rows: int) -> bool:
        """Return whether the gradients of microbatches with ``rows`` rows are deferred."""
        values = self.in_features + self.out_features
        return (
            self._microbatches > 1
            and rows < _FEW_ROWS
            and _LITTLE * self._microbatches * rows * values <= self.in_features * self.out_features
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Map [..., inputs] to [..., outputs]."""
        # An input without a gradient never sees a backward pass, so nothing would be kept.
        if values.requires_grad and self.waits(values.numel() // self.in_features):
            return _product(values, self)
        return super().forward(values)

    def keep(self, values: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep the input of a microbatch and the gradient of its output."""
        # Detached, because otherwise the values would keep the graph that computed them.
        self._kept.append((values.detach().flatten(0, -2), gradient.detach().flatten(0, -2)))

    @property
    def is_due(self) -> bool:
        """Whether deferred gradients remain to be computed."""
        return bool(self._kept)

    def finish(self) -> None:
        """Compute the deferred gradients, and add them to those of the parameters."""
        if not self._kept:
            return
        values, gradients = map(torch.cat, zip(*self._kept, strict=True))
        self._kept.clear()
        _add(self.weight, gradients.t() @ values)
        if self.bias is not None:
            _add(self.bias, gradients.sum(0))


def _add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class _Product(torch.autograd.Function):
    """A linear map [..., inputs] -> [..., outputs] whose parameters autograd does not see."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, layer: BatchLinear) -> torch.Tensor:
        ctx.save_for_backward(values)
        ctx.layer = layer
        return F.linear(values, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (values,) = ctx.saved_tensors
        ctx.layer.keep(values, gradient)
        return gradient @ ctx.layer.weight, None


def _product(values: torch.Tensor, layer: BatchLinear) -> torch.Tensor:
    result: torch.Tensor = _Product.apply(values, layer)  # type: ignore[no-untyped-call]
    return result
