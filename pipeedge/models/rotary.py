"""Rotary positions, https://arxiv.org/abs/2104.09864: queries and keys are rotated by their places.

Shapes in docstrings: N items, T tokens, H heads, E width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Rotation", "rotation_by_position"]


@dataclass(frozen=True)
class Rotation:
    """Angles by which queries and keys are rotated, for the last tokens of a sentence or all of them.

    Value i of a head and value i + E/2 are one point, which turns about the origin.
    """

    cos: torch.Tensor
    """Cosines of the angles, float32 [at most T, E/2]."""
    sin: torch.Tensor
    """Sines of the angles, float32 [at most T, E/2]."""

    @classmethod
    def by(cls, angles: torch.Tensor) -> Rotation:
        """Return the rotation by ``angles`` in radians, float32 [at most T, E/2]."""
        return cls(angles.cos(), angles.sin())

    def apply(self, states: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys [N, H, T, E]; tokens in front of those with angles stay as they are."""
        prefix = states.shape[2] - len(self.cos)
        if prefix:
            return torch.cat([states[:, :, :prefix], self.apply(states[:, :, prefix:])], dim=2)
        cos, sin = self.cos.to(states.dtype), self.sin.to(states.dtype)
        x, y = states.chunk(2, -1)
        return torch.cat([x * cos - y * sin, y * cos + x * sin], -1)


def rotation_by_position(tokens: int, width: int, base: float, device: torch.device) -> Rotation:
    """Return the rotation of tokens by their positions in the sentence.

    Args:
        tokens: Number of tokens T.
        width: Width E of a head, an even number.
        base: Base of the wave lengths.
        device: Device of the result.
    """
    frequency = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    return Rotation.by(torch.outer(torch.arange(tokens, dtype=torch.float32, device=device), frequency))
