"""Attention and norms of all families, and what masks do to attention.

Shapes in docstrings: N items, T tokens, D hidden, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge.models.architecture import Architecture
from pipeedge.models.family import Carried

__all__ = ["MASK", "MaskBias", "attend", "norm"]

MASK = Carried("mask", torch.bool)
"""Mask of a microbatch of sentences: true for tokens and false for padding, one byte a token."""


def norm(architecture: Architecture) -> nn.LayerNorm:
    """Return a LayerNorm over the hidden size without storage, to be filled later."""
    return nn.LayerNorm(architecture.hidden, eps=architecture.eps, device="meta")


def attend(qkv: torch.Tensor, heads: int, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute multi-head scaled dot-product attention, https://arxiv.org/abs/1706.03762, eq. 1.

    Args:
        qkv: Queries, keys and values side by side, [N, T, 3D].
        heads: Number of heads H, which divides D.
        bias: Bias added to the scores, which broadcasts to [N, H, T, T].

    Returns:
        Context [N, T, D], contiguous.
    """
    items, tokens, width = qkv.shape
    by_head = qkv.view(items, tokens, 3, heads, width // (3 * heads))
    query, key, value = by_head.permute(2, 0, 3, 1, 4).unbind(0)
    context = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    return context.transpose(1, 2).reshape(items, tokens, width // 3)


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
