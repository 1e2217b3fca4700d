"""Rotary positions, https://arxiv.org/abs/2104.09864, and attention within a window.

Shapes in docstrings: N items, T tokens, D hidden, H heads, E width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = ["Rotation", "attend_nearby", "attend_rotated", "rotation_by_position"]

_QUERIES = 256
"""Number of queries that attend at once within a window: fewer repeat more keys, more mask more of them."""


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines by which queries and keys are rotated, [T, E] each, for the last T tokens."""

    cos: torch.Tensor
    sin: torch.Tensor

    def apply(self, states: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys [N, H, T, E]; tokens in front of those with a position stay as they are."""
        prefix = states.shape[2] - len(self.cos)
        if prefix:
            return torch.cat([states[:, :, :prefix], self.apply(states[:, :, prefix:])], dim=2)
        first, second = states.chunk(2, -1)
        return torch.addcmul(states * self.cos, torch.cat([-second, first], -1), self.sin)


def rotation_by_position(tokens: int, width: int, base: float, like: torch.Tensor) -> Rotation:
    """Return the rotation of tokens by their positions in the sentence.

    Args:
        tokens: Number of tokens T.
        width: Width E of a head, an even number.
        base: Base of the wave lengths.
        like: Tensor with the number type and device of the result.
    """
    frequency = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    angle = torch.outer(torch.arange(tokens, dtype=torch.float32), frequency).repeat(1, 2)
    return Rotation(angle.cos().to(like), angle.sin().to(like))


def attend_rotated(
    qkv: torch.Tensor, heads: int, rotation: Rotation, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute attention as ``attention.attend`` does, with rotated queries and keys."""
    query, key, value = _by_head(qkv, heads, rotation)
    return _joined(F.scaled_dot_product_attention(query, key, value, attn_mask=bias))


def attend_nearby(
    qkv: torch.Tensor, heads: int, rotation: Rotation, reach: int, mask: torch.Tensor | None
) -> torch.Tensor:
    """Compute attention of each token to those at most ``reach`` away, with rotated queries and keys.

    A few hundred queries at a time attend to the keys that any of them reaches, so time and memory grow with
    T rather than its square.

    Args:
        qkv: Queries, keys and values side by side, [N, T, 3D].
        heads: Number of heads H, which divides D.
        rotation: Rotation of queries and keys.
        reach: Largest distance between a token and one that it attends to.
        mask: True for tokens and false for padding, [N, T]; None if nothing is padding.

    Returns:
        Context [N, T, D], contiguous.
    """
    query, key, value = _by_head(qkv, heads, rotation)
    tokens, places = query.shape[2], torch.arange(query.shape[2], device=qkv.device)
    parts = []
    for start in range(0, tokens, _QUERIES):
        stop = min(start + _QUERIES, tokens)
        low, high = max(0, start - reach), min(stop + reach, tokens)
        seen = (places[start:stop, None] - places[None, low:high]).abs() <= reach
        if mask is not None:
            seen = seen & mask[:, None, low:high]
        bias = None
        if mask is not None or not bool(seen.all()):
            bias = torch.zeros(seen.shape, dtype=qkv.dtype, device=qkv.device)
            bias = bias.masked_fill_(~seen, torch.finfo(qkv.dtype).min).view(-1, 1, stop - start, high - low)
        parts.append(
            F.scaled_dot_product_attention(
                query[:, :, start:stop], key[:, :, low:high], value[:, :, low:high], attn_mask=bias
            )
        )
    return _joined(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))


def _by_head(
    qkv: torch.Tensor, heads: int, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rotated queries, rotated keys, and values, [N, H, T, E] each."""
    items, tokens, width = qkv.shape
    by_head = qkv.view(items, tokens, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
    query, key, value = by_head.unbind(0)
    return rotation.apply(query), rotation.apply(key), value


def _joined(context: torch.Tensor) -> torch.Tensor:
    return context.transpose(1, 2).flatten(2).contiguous()
