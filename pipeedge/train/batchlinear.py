"""Linear layers with many weights for few rows: their gradient once a batch, not once a microbatch.

    forward, M times     y = x W' + b       x [rows, inputs] is kept, as always
    backward, M times    dx = dy W          dy [rows, outputs] is kept too
    end of the batch     dW = dY' X         X, dY: those of all microbatches, one below the other

By autograd each microbatch writes a gradient as large as the weights and adds it to the sum: for each weight
16 bytes to move (one value written, two read, one written) and 2 x rows operations. A core that does 8
operations while it moves a byte spends more on moving below 64 rows. vgg19's first linear layer has 134 MB
of weights and 4 rows a microbatch. At the end of the batch it is one product, which moves 4 bytes a weight.

What is kept instead are inputs + outputs values for each row of the batch. That must be little beside the
gradient, inputs x outputs values, which does not exist meanwhile: at most an eighth. For 4096 inputs and
outputs this allows batches of 256 rows; for 256 and 1024, as in a small transformer, 25, and there each token
is a row. A batch in one piece has nothing to gain.

The weights are no part of autograd's graph then, so what splits the backward pass in two by walking the graph
(zero-bubble) finds nothing left to do here in the second part.
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
    """A linear layer that may leave the gradients of its parameters to the end of the batch.

    It does so after ``expect`` and as described above; otherwise it is an ``nn.Linear``.
    """

    def __init__(self, inputs: int, outputs: int, device: torch.device | str | None = None) -> None:
        super().__init__(inputs, outputs, device=device)
        self._microbatches = 1
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def expect(self, microbatches: int) -> None:
        """From now on a batch has so many; whoever runs them calls ``finish`` after the last."""
        self._microbatches = microbatches

    def waits(self, rows: int) -> bool:
        """Whether gradients of microbatches of ``rows`` rows are left to the end of the batch."""
        values = self.in_features + self.out_features
        return (
            self._microbatches > 1
            and rows < _FEW_ROWS
            and _LITTLE * self._microbatches * rows * values <= self.in_features * self.out_features
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]"""
        # Behind an input without a gradient no backward pass would come by.
        if values.requires_grad and self.waits(values.numel() // self.in_features):
            return _product(values, self)
        return super().forward(values)

    def keep(self, values: torch.Tensor, gradient: torch.Tensor) -> None:
        """What came in with a microbatch, and the gradient of what went out."""
        # Detached: else the graph behind the values would stay with them.
        self._kept.append((values.detach().flatten(0, -2), gradient.detach().flatten(0, -2)))

    @property
    def is_due(self) -> bool:
        """Whether there are gradients to compute."""
        return bool(self._kept)

    def finish(self) -> None:
        """Compute the gradients of the parameters from what was kept, and add them to what is there."""
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
    """[..., inputs] -> [..., outputs]; autograd sees the values and not the parameters."""

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
