"""Layers of ModernBERT: norms come first, positions are rotations, MLPs are gated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pipeedge.models.activations import ACTIVATIONS
from pipeedge.models.architecture import LAYERS_PER_BLOCK, Architecture
from pipeedge.models.attention import MaskBias, attend
from pipeedge.models.families.modernbert import ModernBertOptions
from pipeedge.models.layers.parts import FamilyLayers
from pipeedge.models.linear import Linear
from pipeedge.models.rotary import Rotation, rotation_by_position
from pipeedge.models.words import look_up

__all__ = ["MODERNBERT_LAYERS"]


def _norm(architecture: Architecture) -> nn.LayerNorm:
    bias = architecture.own(ModernBertOptions).norm_bias
    return nn.LayerNorm(architecture.hidden, eps=architecture.eps, bias=bias, device="meta")


class WordEmbeddings(nn.Module):
    """Embeddings of words, normalised."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.word = nn.Parameter(torch.empty(architecture.vocab, architecture.hidden, device="meta"))
        self.norm = _norm(architecture)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Embed inputs [N, T] -> [N, T, D], mask [N, T]."""
        return self.norm(look_up(self.word, input_ids, self.norm.weight.dtype)), attention_mask != 0


@dataclass(frozen=True)
class AttentionInputs:
    """Values that the attentions of a stage share, besides their own queries, keys and values."""

    everywhere: Rotation
    nearby: Rotation
    bias: torch.Tensor | None
    """Bias on the scores of padding, [N, 1, 1, T], or None if nothing is padding."""


class SharedInputs(nn.Module):
    """Rotations and biases for the length of a microbatch."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        options = architecture.own(ModernBertOptions)
        self.width = architecture.hidden // architecture.heads
        self.bases = options.global_base, options.local_base
        self.padding = MaskBias(architecture)

    def forward(self, state: torch.Tensor, mask: torch.Tensor) -> AttentionInputs:
        """Compute them from the hidden state [N, T, D] and the mask [N, T]."""
        everywhere, nearby = (
            rotation_by_position(state.shape[1], self.width, base, state.device) for base in self.bases
        )
        return AttentionInputs(everywhere, nearby, self.padding(state, mask))


class ModernBertAttention(nn.Module):
    """Part 0: norm unless in the first block, queries, keys and values in one product, then attention."""

    def __init__(self, architecture: Architecture, block: int) -> None:
        super().__init__()
        options = architecture.own(ModernBertOptions)
        hidden = architecture.hidden
        self.heads = architecture.heads
        self.reach = options.reach if options.near[block] else None
        self.norm1 = _norm(architecture) if block else None
        self.qkv = Linear(hidden, 3 * hidden, bias=architecture.qkv_bias)

    def forward(self, hidden: torch.Tensor, around: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute [N, T, D] -> context [N, T, D], skip [N, T, D]."""
        qkv = self.qkv(hidden, norm=self.norm1)
        rotation = around.everywhere if self.reach is None else around.nearby
        return attend(qkv, self.heads, around.bias, rotation=rotation, reach=self.reach), hidden


class ModernBertProjection(nn.Module):
    """Part 1: projection of the heads' outputs, and the residual."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.proj = Linear(architecture.hidden, architecture.hidden, bias=architecture.qkv_bias)

    def forward(self, context: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor]:
        """Compute context [N, T, D], skip [N, T, D] -> [N, T, D]."""
        return (self.proj(context, residual=skip),)


class ModernBertExpansion(nn.Module):
    """Part 2: norm, then the upper half of a gated MLP, https://arxiv.org/abs/2002.05202."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        bias = architecture.own(ModernBertOptions).mlp_bias
        self.activation = ACTIVATIONS[architecture.activation]
        self.norm2 = _norm(architecture)
        self.up = Linear(architecture.hidden, 2 * architecture.intermediate, bias=bias)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute [N, T, D] -> inner [N, T, I], skip [N, T, D]."""
        inner, gate = self.up(hidden, norm=self.norm2).chunk(2, -1)
        return self.activation(inner.clone(memory_format=torch.contiguous_format)).mul_(gate), hidden


class ModernBertContraction(nn.Module):
    """Part 3: the lower half of the MLP, and the residual."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        bias = architecture.own(ModernBertOptions).mlp_bias
        self.down = Linear(architecture.intermediate, architecture.hidden, bias=bias)

    def forward(self, inner: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor]:
        """Compute inner [N, T, I], skip [N, T, D] -> [N, T, D]."""
        return (self.down(inner, residual=skip),)


def _part(architecture: Architecture, layer: int) -> nn.Module:
    block, part = divmod(layer, LAYERS_PER_BLOCK)
    if part == 0:
        return ModernBertAttention(architecture, block)
    return (ModernBertProjection, ModernBertExpansion, ModernBertContraction)[part - 1](architecture)


class ModernBertHead(nn.Module):
    """Final norm, then the first token itself, or a dense layer, an activation, a norm and the classes.

    The classes are those of the first token, of the mean of all tokens, or of each token.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        options, hidden = architecture.own(ModernBertOptions), architecture.hidden
        self.each = architecture.head == "tokens"
        self.norm = _norm(architecture)
        self.activation = ACTIVATIONS[options.head_activation]
        self.classifier = None
        if architecture.head != "vector":
            self.dense = Linear(hidden, hidden, bias=options.head_bias)
            self.dense_norm = _norm(architecture)
            self.classifier = Linear(hidden, architecture.num_labels)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Compute [N, T, D] and the mask [N, T], for a mean -> [N, classes], [N, T, classes] or [N, D]."""
        if mask is not None:
            weight = mask[:, :, None].to(hidden.dtype)
            hidden = (self.norm(hidden) * weight).sum(1) / weight.sum(1)
        else:
            hidden = self.norm(hidden if self.each else hidden[:, 0].contiguous())
        if self.classifier is not None:
            hidden = self.classifier(self.dense_norm(self.activation(self.dense(hidden))))
        return hidden.float()


MODERNBERT_LAYERS = FamilyLayers(
    embeddings=WordEmbeddings, part=_part, head=ModernBertHead, shared=SharedInputs, final_norm=_norm
)
