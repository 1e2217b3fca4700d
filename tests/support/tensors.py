"""Comparison of named tensors."""

from __future__ import annotations

import torch

TOLERANCE = 1e-5


def assert_close(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        difference = float((ours[name] - tensor).norm() / tensor.norm().clamp(min=1e-12))
        assert difference <= TOLERANCE, f"{name}: {difference:.2e}"
