"""The activation functions that a ``hidden_act`` or ``pooler_act`` of ``config.json`` may name.

All of them may write into the tensor they are given, which therefore must be the caller's own: the
inner layer of the MLP is the largest tensor of a block, and a second one of its size costs memory and,
fresh from the operating system each time, the time to fault its pages in.

The tanh approximations of GELU that Hugging Face keeps apart for history's sake (``gelu_new``,
``gelu_fast``, ...) are one function up to the last bits of a float32, and so one kernel here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import torch
import torch.nn.functional as F

__all__ = ["ACTIVATIONS", "Activation"]

Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Elementwise; may overwrite its argument."""


def _gelu(x: torch.Tensor) -> torch.Tensor:
    # torch.nn.functional offers no GELU in place; the operator itself does.
    result: torch.Tensor = torch.ops.aten.gelu_(x)
    return result


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten.gelu_(x, approximate="tanh")
    return result


def _clipped_gelu(x: torch.Tensor) -> torch.Tensor:
    return _gelu(x).clip_(-10.0, 10.0)


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(torch.sigmoid(1.702 * x))


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return x.relu_().square_()


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": _gelu,
        "gelu_10": _clipped_gelu,
        "gelu_accurate": _tanh_gelu,
        "gelu_fast": _tanh_gelu,
        "gelu_new": _tanh_gelu,
        "gelu_python": _gelu,
        "gelu_python_tanh": _tanh_gelu,
        "gelu_pytorch_tanh": _tanh_gelu,
        "hardswish": partial(F.hardswish, inplace=True),
        "leaky_relu": partial(F.leaky_relu, inplace=True),
        "linear": _identity,
        "mish": partial(F.mish, inplace=True),
        "quick_gelu": _quick_gelu,
        "relu": torch.relu_,
        "relu2": _relu2,
        "relu6": partial(F.relu6, inplace=True),
        "sigmoid": torch.sigmoid_,
        "silu": partial(F.silu, inplace=True),
        "swish": partial(F.silu, inplace=True),
        "tanh": torch.tanh_,
    }
)
