"""Rotary positions, https://arxiv.org/abs/2104.09864: queries and keys are rotated by their places.

Shapes in docstrings: N items, T tokens, H heads, E width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pipeedge.models.families.decoder import Rotary

__all__ = ["Rotation", "rotation_by_position", "scaled_frequencies"]


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


def scaled_frequencies(rotary: Rotary, context: int) -> torch.Tensor:
    """Return the radians that each pair of values turns at each position, float32 [rotated / 2].

    They are those of transformers. With longrope, they depend on whether contexts may be longer than what the
    model was trained with, and not on the length of a sequence, since its cache would have to change with it.

    Args:
        rotary: The rotation; of dynamic scaling, the frequencies are those of short sequences.
        context: Longest sequence in tokens.
    """
    width = rotary.rotated
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    frequency = 1.0 / (rotary.base**exponents)
    if rotary.scaling == "linear":
        return frequency / rotary.factor
    if rotary.scaling == "longrope":
        divisors = torch.tensor(rotary.long if context > rotary.original else rotary.short)
        return 1.0 / (divisors * rotary.base**exponents)
    if rotary.scaling == "llama3":
        return _llama3_frequencies(frequency, rotary)
    if rotary.scaling == "yarn":
        return _yarn_frequencies(exponents, rotary)
    return frequency


def _llama3_frequencies(frequency: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Stretch long waves, leave short ones, and pass smoothly from one to the other between."""
    wave_length = 2 * math.pi / frequency
    longest, shortest = rotary.original / rotary.low, rotary.original / rotary.high
    found = torch.where(wave_length > longest, frequency / rotary.factor, frequency)
    smooth = (rotary.original / wave_length - rotary.low) / (rotary.high - rotary.low)
    between = (1 - smooth) * found / rotary.factor + smooth * found
    return torch.where((wave_length >= shortest) & (wave_length <= longest), between, found)


def _yarn_frequencies(exponents: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Interpolate and extrapolate by frequency, https://arxiv.org/abs/2309.00071, eq. 23."""
    width = rotary.rotated

    def limit(rotations: float) -> float:
        turns = rotary.original / (rotations * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(rotary.base))

    low, high = limit(rotary.high), limit(rotary.low)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    own = 1 - ramp
    wave = rotary.base**exponents
    return 1.0 / (rotary.factor * wave) * (1 - own) + 1.0 / wave * own
