"""Layers of the towers of CLIP."""

from __future__ import annotations

import torch
from torch import nn

from pipeedge.models.architecture import Architecture
from pipeedge.models.attention import DistanceBias, MaskBias, norm
from pipeedge.models.families.clip import ClipTextOptions
from pipeedge.models.layers.parts import FamilyLayers
from pipeedge.models.layers.patches import PatchEmbedding
from pipeedge.models.layers.positions import placed
from pipeedge.models.layers.vit import pre_norm_part
from pipeedge.models.linear import Linear
from pipeedge.models.words import look_up

__all__ = ["CLIP_TEXT_LAYERS", "CLIP_VISION_LAYERS", "PlainTextEmbeddings"]

_LEGACY_END = 2
"""``eos_token_id`` in early files, which is not the one of the tokenizer: the highest id ends a sentence."""


class ClipImageEmbeddings(nn.Module):
    """Class token and patches, with learnt positions, normalised."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, image = architecture.hidden, architecture.image
        self.patch = PatchEmbedding(image, hidden, bias=False)
        self.cls_token = nn.Parameter(torch.empty(hidden, device="meta"))
        self.position = nn.Parameter(torch.empty(image.trained_tokens, hidden, device="meta"))
        self.image = image
        self.norm = norm(architecture)

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor]:
        """Embed [N, C, height, width] -> [N, T, D]."""
        patches = self.patch(pixel_values)
        first = self.cls_token.expand(patches.shape[0], 1, -1)
        positions = placed(self.position, self.image)
        return (self.norm(torch.cat([first, patches], dim=1).add_(positions)),)


class ClipImageHead(nn.Module):
    """Norm and projection of the class token, or the classes of the mean of the patches."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, labels = architecture.hidden, architecture.num_labels
        vector = architecture.head == "vector"
        self.norm = norm(architecture) if vector else None
        projected = vector and architecture.pooler
        self.projection = Linear(hidden, architecture.pooler_size, bias=False) if projected else None
        self.classifier = None if vector else Linear(hidden, labels)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [N, T, D] -> [N, classes], or [N, output] without a classifier."""
        if self.classifier is not None:
            logits: torch.Tensor = self.classifier(hidden[:, 1:].mean(1))
            return logits.float()
        first = hidden[:, 0].contiguous()
        if self.norm is not None:
            first = self.norm(first)
        if self.projection is not None:
            first = self.projection(first)
        return first.float()


class PlainTextEmbeddings(nn.Module):
    """Embeddings of words and learnt positions."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        text, hidden = architecture.text, architecture.hidden
        self.word = nn.Parameter(torch.empty(text.vocab, hidden, device="meta"))
        self.position = nn.Parameter(torch.empty(text.max_positions, hidden, device="meta"))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Embed inputs [N, T] -> [N, T, D], mask [N, T]."""
        position = self.position[: input_ids.shape[1]]
        embedded = look_up(self.word, input_ids, position.dtype).add_(position)
        return embedded, attention_mask != 0


class ClipTextEmbeddings(PlainTextEmbeddings):
    """Embeddings of words and learnt positions, and the place where each sentence ends."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__(architecture)
        self.end_id = architecture.own(ClipTextOptions).end_id

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Embed inputs [N, T] -> [N, T, D], mask [N, T], places [N]."""
        ends = input_ids if self.end_id == _LEGACY_END else (input_ids == self.end_id).int()
        return *super().forward(input_ids, attention_mask), ends.argmax(1)


class CausalBias(nn.Module):
    """Bias on attention scores by which tokens attend to earlier tokens and to themselves."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.padding = MaskBias(architecture)

    def forward(self, state: torch.Tensor, mask: torch.Tensor) -> DistanceBias:
        """Return the biases of the mask and of tokens ahead."""
        tokens = mask.shape[1]
        by_distance = torch.zeros((1, 2 * tokens - 1), dtype=state.dtype, device=mask.device)
        by_distance[:, tokens:] = torch.finfo(state.dtype).min
        return DistanceBias(by_distance, self.padding(state, mask))


class ClipTextHead(nn.Module):
    """Norm and projection of the token that ends the sentence."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.norm = norm(architecture)
        width = architecture.pooler_size
        self.projection = Linear(architecture.hidden, width, bias=False) if architecture.pooler else None

    def forward(self, hidden: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Compute [N, T, D] and the places of the ends [N] -> [N, output]."""
        places = ends.clamp(0, hidden.shape[1] - 1)  # a profile's made-up sentences may have no such place
        last: torch.Tensor = self.norm(hidden[torch.arange(len(hidden), device=ends.device), places])
        if self.projection is not None:
            last = self.projection(last)
        return last.float()


CLIP_VISION_LAYERS = FamilyLayers(embeddings=ClipImageEmbeddings, part=pre_norm_part, head=ClipImageHead)

CLIP_TEXT_LAYERS = FamilyLayers(
    embeddings=ClipTextEmbeddings, part=pre_norm_part, head=ClipTextHead, shared=CausalBias
)
