"""Attention and norms of all families, and what masks do to attention.

Shapes in docstrings: N items, T tokens, D hidden, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge import _native as native
from pipeedge.models.architecture import Architecture
from pipeedge.models.family import Carried

__all__ = ["MASK", "MaskBias", "attend", "norm", "pools_tokens"]


def pools_tokens(architecture: Architecture) -> bool:
    """Return whether the vector of a sentence depends on which of its positions are padding."""
    return architecture.pooling is not None and architecture.pooling.needs_mask


MASK = Carried("mask", torch.bool, head=pools_tokens)
"""Mask of a microbatch of sentences: true for tokens and false for padding, one byte a token."""

_NATIVE = frozenset(getattr(torch, name) for name in native.attention_types())
"""Number types for which this processor has native attention."""


def norm(architecture: Architecture) -> nn.LayerNorm:
    """Return a LayerNorm over the hidden size without storage, to be filled later."""
    return nn.LayerNorm(architecture.hidden, eps=architecture.eps, device="meta")


def attend(qkv: torch.Tensor, heads: int, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute multi-head scaled dot-product attention, https://arxiv.org/abs/1706.03762, eq. 1.

    Inference uses native code (``src-native/attention``), which transposes nothing in memory, on processors
    with AVX-512, and in bfloat16 with its instructions for bfloat16. Otherwise torch computes.

    Args:
        qkv: Queries, keys and values side by side, [N, T, 3D].
        heads: Number of heads H, which divides D.
        bias: Bias added to the scores, which broadcasts to [N, H, T, T].

    Returns:
        Context [N, T, D], contiguous.
    """
    items, tokens, width = qkv.shape
    size = width // (3 * heads)
    if _is_native(qkv, size, bias):
        out = torch.empty((items, tokens, width // 3), dtype=qkv.dtype)
        native.attend(
            qkv=_array(qkv.contiguous()),
            heads=heads,
            bias=None if bias is None else bias.reshape(items, tokens).float().numpy(),
            out=_array(out),
            threads=torch.get_num_threads(),
        )
        return out
    query, key, value = qkv.view(items, tokens, 3, heads, size).permute(2, 0, 3, 1, 4).unbind(0)
    context = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    return context.transpose(1, 2).reshape(items, tokens, width // 3)


def _is_native(qkv: torch.Tensor, size: int, bias: torch.Tensor | None) -> bool:
    """Return whether native code computes attention with heads of ``size``.

    It takes the biases of keys, [N, 1, 1, T], not those of pairs of tokens, and has no gradients.
    """
    if not torch.is_inference_mode_enabled() or qkv.device.type != "cpu" or qkv.dtype not in _NATIVE:
        return False
    items, tokens, _ = qkv.shape
    of_keys = bias is None or bias.shape == (items, 1, 1, tokens)
    return of_keys and size % native.ATTENTION_HEAD_MULTIPLE == 0


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
