"""Attention and norms of all families, and what masks do to attention.

Shapes in docstrings: N items, T tokens, D hidden, H heads, E width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge import _native as native
from pipeedge.models.architecture import Architecture
from pipeedge.models.rotary import Rotation

__all__ = ["Bias", "DistanceBias", "MaskBias", "attend", "norm"]


_NATIVE = frozenset(getattr(torch, name) for name in native.attention_types())
"""Number types for which this processor has native attention."""
_QUERIES = 256
"""Number of queries that attend at once within a window where torch computes: fewer repeat more keys, more
mask more of them.
"""


def norm(architecture: Architecture) -> nn.LayerNorm:
    """Return a LayerNorm over the hidden size without storage, to be filled later."""
    return nn.LayerNorm(architecture.hidden, eps=architecture.eps, device="meta")


@dataclass(frozen=True)
class DistanceBias:
    """Bias on the score of each pair of tokens that depends on their distance, besides that of keys."""

    by_distance: torch.Tensor
    """Bias for each distance from a query to a key, from 1 - T to T - 1, [H or 1, 2T - 1]."""
    of_keys: torch.Tensor | None
    """Bias of each key, [N, 1, 1, T], or None."""

    @cached_property
    def of_pairs(self) -> torch.Tensor:
        """Bias of each pair, [N or 1, H or 1, T, T]."""
        tokens = (self.by_distance.shape[1] + 1) // 2
        # Row i begins with distance -i: the windows of T distances, the last one first.
        relative = self.by_distance.unfold(1, tokens, 1).flip(1)[None]
        return relative if self.of_keys is None else relative + self.of_keys


Bias: TypeAlias = torch.Tensor | DistanceBias | None
"""Bias on the scores of keys, [N, 1, 1, T], or also of pairs of tokens."""


def attend(
    qkv: torch.Tensor,
    heads: int,
    bias: Bias,
    *,
    rotation: Rotation | None = None,
    reach: int | None = None,
) -> torch.Tensor:
    """Compute multi-head scaled dot-product attention, https://arxiv.org/abs/1706.03762, eq. 1.

    Inference uses native code (``src-native/attention``), which transposes nothing in memory, on processors
    with AVX-512 or NEON, and on x86 in bfloat16 with its instructions for bfloat16. Otherwise torch computes.

    Args:
        qkv: Queries, keys and values side by side, [N, T, 3D].
        heads: Number of heads H, which divides D.
        bias: Bias added to the scores.
        rotation: Rotation of queries and keys, if positions are rotary.
        reach: Largest distance between a token and those that it attends to, or None for all tokens. Time and
            memory then grow with T rather than its square.

    Returns:
        Context [N, T, D], contiguous.
    """
    if _is_native(qkv, heads):
        return _attend_natively(qkv, heads, bias, rotation, reach)
    items, tokens, width = qkv.shape
    by_head = qkv.view(items, tokens, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
    query, key, value = by_head.unbind(0)
    if rotation is not None:
        query, key = rotation.apply(query), rotation.apply(key)
    scores_bias = bias.of_pairs if isinstance(bias, DistanceBias) else bias
    if reach is None or reach >= tokens - 1:
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=scores_bias)
    else:
        context = _attend_nearby(query, key, value, scores_bias, reach)
    return context.transpose(1, 2).reshape(items, tokens, width // 3)


def _attend_natively(
    qkv: torch.Tensor,
    heads: int,
    bias: Bias,
    rotation: Rotation | None,
    reach: int | None,
) -> torch.Tensor:
    """Compute attention as ``attend`` does, in native code."""
    items, tokens, width = qkv.shape
    of_keys, by_distance = (
        (bias.of_keys, bias.by_distance) if isinstance(bias, DistanceBias) else (bias, None)
    )
    out = torch.empty((items, tokens, width // 3), dtype=qkv.dtype)
    native.attend(
        qkv=_array(qkv.contiguous()),
        heads=heads,
        bias=None if of_keys is None else of_keys.reshape(items, tokens).float().numpy(),
        distances=None if by_distance is None else by_distance.expand(heads, -1).float().contiguous().numpy(),
        rotation=None if rotation is None else (rotation.cos.numpy(), rotation.sin.numpy()),
        reach=reach,
        out=_array(out),
        threads=torch.get_num_threads(),
    )
    return out


def _attend_nearby(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, reach: int
) -> torch.Tensor:
    """Compute attention [N, H, T, E] of queries to keys at most ``reach`` away.

    A few hundred queries at a time attend to the keys that any of them reaches.
    """
    tokens = query.shape[2]
    places, parts = torch.arange(tokens, device=query.device), []
    if bias is None:
        bias = torch.zeros((1, 1, 1, 1), dtype=query.dtype, device=query.device)
    bias = bias.expand(-1, -1, tokens, tokens)
    for start in range(0, tokens, _QUERIES):
        stop = min(start + _QUERIES, tokens)
        low, high = max(0, start - reach), min(stop + reach, tokens)
        beyond = (places[start:stop, None] - places[None, low:high]).abs() > reach
        parts.append(
            F.scaled_dot_product_attention(
                query[:, :, start:stop],
                key[:, :, low:high],
                value[:, :, low:high],
                attn_mask=bias[:, :, start:stop, low:high].masked_fill(beyond, torch.finfo(query.dtype).min),
            )
        )
    return torch.cat(parts, dim=2)


def _is_native(qkv: torch.Tensor, heads: int) -> bool:
    """Return whether native code, which has no gradients, computes attention with ``heads``."""
    if not torch.is_inference_mode_enabled() or qkv.device.type != "cpu" or qkv.dtype not in _NATIVE:
        return False
    return qkv.shape[2] % (3 * heads * native.ATTENTION_HEAD_MULTIPLE) == 0


def _array(tensor: torch.Tensor) -> Any:
    """Return a tensor's memory as the native code expects it: float32, or the bits of bfloat16."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


class MaskBias(nn.Module):
    """The mask as a bias on attention scores."""

    def __init__(self, architecture: Architecture) -> None:
        del architecture  # the same for all sizes
        super().__init__()

    def forward(self, state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """Return the bias [N, 1, 1, T] in the type of ``state``, or None if nothing is masked.

        The bias is the most negative finite number instead of minus infinity: a row without any token then
        attends evenly to everything, as in the reference, while infinities would give NaN.
        """
        if bool(mask.all()):
            return None
        bias = torch.zeros(mask.shape, dtype=state.dtype, device=mask.device)
        bias.masked_fill_(~mask, torch.finfo(state.dtype).min)
        return bias[:, None, None, :]
