"""BERT, https://arxiv.org/abs/1810.04805: norms come after each residual, attention takes a mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge.models.architecture import Architecture
from pipeedge.models.linear import Linear
from pipeedge.models.shard import Family, attend, norm

__all__ = ["BERT"]


class TextEmbeddings(nn.Module):
    """Embeddings of words, token types and learnt positions, normalised."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden = architecture.hidden
        self.word = nn.Parameter(torch.empty(architecture.vocab, hidden, device="meta"))
        self.position = nn.Parameter(torch.empty(architecture.max_positions, hidden, device="meta"))
        self.token_type = nn.Parameter(torch.empty(architecture.type_vocab, hidden, device="meta"))
        self.norm = norm(architecture)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor) -> torch.Tensor:
        """Embed two inputs [N, T] -> [N, T, D]."""
        embedded = F.embedding(input_ids, self.word)
        embedded.add_(F.embedding(token_type_ids, self.token_type))
        embedded.add_(self.position[: input_ids.shape[1]])
        normed: torch.Tensor = self.norm(embedded)
        return normed


class BertAttention(nn.Module):
    """Part 0: queries, keys and values in one product, then attention."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.heads = architecture.heads
        self.qkv = Linear(architecture.hidden, 3 * architecture.hidden, bias=architecture.qkv_bias)

    def forward(self, hidden: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
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


class PooledHead(nn.Module):
    """Pooler and classifier on the first token, as far as the model has them."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.pooler = Linear(architecture.hidden, architecture.hidden) if architecture.pooler else None
        vector = architecture.head == "vector"
        self.classifier = None if vector else Linear(architecture.hidden, architecture.num_labels)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [N, T, D] -> [N, classes], or [N, D] without a classifier."""
        first = hidden[:, 0].contiguous()
        if self.pooler is not None:
            first = torch.tanh_(self.pooler(first))
        if self.classifier is not None:
            first = self.classifier(first)
        return first.float()


BERT = Family(
    inputs=("input_ids", "attention_mask", "token_type_ids"),
    masked=True,
    embeddings=TextEmbeddings,
    parts=(BertAttention, BertProjection, BertExpansion, BertContraction),
    head=PooledHead,
)
