"""Layers of BERT: norms come after each residual, attention takes a mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge.models.activations import ACTIVATIONS
from pipeedge.models.architecture import Architecture
from pipeedge.models.attention import Bias, MaskBias, attend, norm
from pipeedge.models.layers.parts import FamilyLayers, cycle
from pipeedge.models.linear import Linear
from pipeedge.models.words import look_up

__all__ = ["BERT_LAYERS", "PooledHead", "TextEmbeddings", "TokenHead", "post_norm_part", "text_head"]


class TextEmbeddings(nn.Module):
    """Embeddings of words, token types if the model has any, and learnt positions, normalised.

    Args:
        architecture: Dimensions of the model.
        width: Width E of the embeddings.
        unused: Number of rows of the position table in front of the first position.
    """

    def __init__(self, architecture: Architecture, *, width: int | None = None, unused: int = 0) -> None:
        super().__init__()
        width = architecture.hidden if width is None else width
        rows = unused + architecture.max_positions
        self.word = nn.Parameter(torch.empty(architecture.vocab, width, device="meta"))
        self.position = nn.Parameter(torch.empty(rows, width, device="meta"))
        types = torch.empty(architecture.type_vocab, width, device="meta")
        self.token_type = nn.Parameter(types) if architecture.type_vocab else None
        self.norm = nn.LayerNorm(width, eps=architecture.eps, device="meta")

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embed inputs [N, T] -> [N, T, E], mask [N, T]; without token types, all have the first one."""
        embedded = look_up(self.word, input_ids, self.position.dtype)
        if self.token_type is not None:
            if token_type_ids is None:
                embedded.add_(self.token_type[0])
            else:
                embedded.add_(F.embedding(token_type_ids, self.token_type))
        embedded.add_(self.positions(input_ids))
        return self.norm(embedded), attention_mask != 0

    def positions(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of the positions of ``input_ids`` [N, T], which broadcast to [N, T, E]."""
        return self.position[: input_ids.shape[1]]


class BertAttention(nn.Module):
    """Part 0: queries, keys and values in one product, then attention."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.heads = architecture.heads
        self.qkv = Linear(architecture.hidden, 3 * architecture.hidden, bias=architecture.qkv_bias)

    def forward(self, hidden: torch.Tensor, bias: Bias) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute [N, T, D] -> context [N, T, D], skip [N, T, D]."""
        return attend(self.qkv(hidden), self.heads, bias), hidden


class BertProjection(nn.Module):
    """Part 1: projection of the heads' outputs, residual, norm."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.proj = Linear(architecture.hidden, architecture.hidden)
        self.norm1 = norm(architecture)

    def forward(self, context: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor]:
        """Compute context [N, T, D], skip [N, T, D] -> [N, T, D]."""
        return (self.norm1(self.proj(context, residual=skip)),)


class BertExpansion(nn.Module):
    """Part 2: the upper half of the MLP."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.up = Linear(architecture.hidden, architecture.intermediate, activation=architecture.activation)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute [N, T, D] -> inner [N, T, I], skip [N, T, D]."""
        return self.up(hidden), hidden


class BertContraction(nn.Module):
    """Part 3: the lower half of the MLP, residual, norm."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.down = Linear(architecture.intermediate, architecture.hidden)
        self.norm2 = norm(architecture)

    def forward(self, inner: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor]:
        """Compute inner [N, T, I], skip [N, T, D] -> [N, T, D]."""
        return (self.norm2(self.down(inner, residual=skip)),)


post_norm_part = cycle(BertAttention, BertProjection, BertExpansion, BertContraction)
"""The four parts of a block whose norms come last."""


class PooledHead(nn.Module):
    """Pooler and classifier on the first token, as far as the model has them."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.pooler = Linear(architecture.hidden, architecture.hidden) if architecture.pooler else None
        self.activation = ACTIVATIONS[architecture.pooler_activation]
        vector = architecture.head == "vector"
        self.classifier = None if vector else Linear(architecture.hidden, architecture.num_labels)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [N, T, D] -> [N, classes], or [N, D] without a classifier."""
        first = hidden[:, 0].contiguous()
        if self.pooler is not None:
            first = self.activation(self.pooler(first))
        if self.classifier is not None:
            first = self.classifier(first)
        return first.float()


class TokenHead(nn.Module):
    """Classifier on every token."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.classifier = Linear(architecture.hidden, architecture.num_labels)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [N, T, D] -> [N, T, classes]."""
        logits: torch.Tensor = self.classifier(hidden)
        return logits.float()


def text_head(architecture: Architecture) -> nn.Module:
    """Return the head of a model whose classes are those of the first token, or of each token."""
    return TokenHead(architecture) if architecture.head == "tokens" else PooledHead(architecture)


BERT_LAYERS = FamilyLayers(embeddings=TextEmbeddings, part=post_norm_part, head=text_head, shared=MaskBias)
