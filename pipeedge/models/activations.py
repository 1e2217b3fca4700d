"""The activation functions that a ``hidden_act`` or ``pooler_act`` of ``config.json`` may name.

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


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _clipped_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x).clip(-10.0, 10.0)


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


_tanh_gelu = partial(F.gelu, approximate="tanh")

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_10": _clipped_gelu,
        "gelu_accurate": _tanh_gelu,
        "gelu_fast": _tanh_gelu,
        "gelu_new": _tanh_gelu,
        "gelu_python": F.gelu,
        "gelu_python_tanh": _tanh_gelu,
        "gelu_pytorch_tanh": _tanh_gelu,
        "hardswish": F.hardswish,
        "leaky_relu": F.leaky_relu,
        "linear": _identity,
        "mish": F.mish,
        "quick_gelu": _quick_gelu,
        "relu": F.relu,
        "relu2": _relu2,
        "relu6": F.relu6,
        "sigmoid": torch.sigmoid,
        "silu": F.silu,
        "swish": F.silu,
        "tanh": torch.tanh,
    }
)
