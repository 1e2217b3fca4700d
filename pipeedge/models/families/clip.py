"""CLIP, https://arxiv.org/abs/2103.00020: a vision and a text tower, whose vectors are compared.

Both have ViT's blocks with a quick GELU. The vision tower has a norm before block 1, and its vector is the
class token's. The text tower attends to earlier tokens alone, and its vector is that of the token that ends
the sentence. The mask of the text travels, at a byte a token, and the place of its end, at 8 bytes an item;
each stage makes the causal bias from the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge.models.architecture import Architecture, FamilyOptions, ImageInput, TextInput
from pipeedge.models.attention import MASK, DistanceBias, MaskBias, norm
from pipeedge.models.families.vit import pre_norm_part
from pipeedge.models.family import Carried, Family, Head, ImageDefaults, ModelClass
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.linear import Linear
from pipeedge.models.weights.names import Dialect, modules, tensors

__all__ = ["CLIP_TEXT", "CLIP_VISION", "TOWER_BLOCKS", "TOWER_TEXT", "PlainTextEmbeddings", "tower_config"]

_LEGACY_END = 2
"""``eos_token_id`` in early files, which is not the one of the tokenizer: the highest id ends a sentence."""


class ClipImageEmbeddings(nn.Module):
    """Class token and patches, with learnt positions, normalised."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, image = architecture.hidden, architecture.image
        patch = image.patch_size
        self.patch = nn.Conv2d(image.channels, hidden, patch, stride=patch, bias=False, device="meta")
        self.cls_token = nn.Parameter(torch.empty(hidden, device="meta"))
        self.position = nn.Parameter(torch.empty(image.tokens, hidden, device="meta"))
        self.norm = norm(architecture)

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor]:
        """Embed [N, C, height, width] -> [N, T, D]."""
        patches = self.patch(pixel_values.to(self.position.dtype)).flatten(2).transpose(1, 2)
        first = self.cls_token.expand(patches.shape[0], 1, -1)
        return (self.norm(torch.cat([first, patches], dim=1).add_(self.position)),)


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
        embedded = F.embedding(input_ids, self.word).add_(self.position[: input_ids.shape[1]])
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


# The configuration ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClipTextOptions(FamilyOptions):
    """Option of CLIP's text tower."""

    end_id: int
    """Token id that ends a sentence, or 2 if it is the highest id of a sentence."""


def tower_config(config: HubConfig, tower: str) -> HubConfig:
    """Return the configuration of a tower: the section of a file of both, else the file itself.

    Args:
        config: Contents of ``config.json``.
        tower: ``vision`` or ``text``.
    """
    if f"{tower}_config" not in config.values:
        return config
    older = config.section(f"{tower}_config_dict").values  # early files repeat the section under this name
    return HubConfig({**config.section(f"{tower}_config").values, **older})


def _read_vision(config: HubConfig, head: Head) -> Architecture:
    own = tower_config(config, "vision")
    sizes = own.block_sizes(activation="quick_gelu")
    return Architecture(
        family="clip_vision",
        **{**sizes, "eps": own.number("layer_norm_eps", 1e-5)},
        input=ImageInput(
            own.square("image_size", 224), own.square("patch_size", 32), own.integer("num_channels", 3)
        ),
        head=head.kind,
        pooler=head.pooler,
        pooler_size=config.integer("projection_dim", 512) if head.pooler else 0,
        num_labels=head.num_labels,
    )


def _read_text(config: HubConfig, head: Head) -> Architecture:
    own = tower_config(config, "text")
    sizes = own.block_sizes(hidden=512, heads=8, intermediate=2048, activation="quick_gelu")
    return Architecture(
        family="clip_text",
        **{**sizes, "eps": own.number("layer_norm_eps", 1e-5)},
        input=TextInput(own.integer("vocab_size", 49408), own.integer("max_position_embeddings", 77)),
        head=head.kind,
        pooler=head.pooler,
        pooler_size=config.integer("projection_dim", 512) if head.pooler else 0,
        options=ClipTextOptions(own.integer("eos_token_id", 49407)),
    )


# Names in files ---------------------------------------------------------------------------------------

TOWER_BLOCKS: Dialect = modules(
    {
        "block.{n}.norm1": ("encoder.layers.{n}.layer_norm1",),
        "block.{n}.qkv": tuple(f"encoder.layers.{{n}}.self_attn.{part}_proj" for part in "qkv"),
        "block.{n}.proj": ("encoder.layers.{n}.self_attn.out_proj",),
        "block.{n}.norm2": ("encoder.layers.{n}.layer_norm2",),
        "block.{n}.up": ("encoder.layers.{n}.mlp.fc1",),
        "block.{n}.down": ("encoder.layers.{n}.mlp.fc2",),
    }
)
"""Blocks of the towers of CLIP and SigLIP."""
TOWER_TEXT: Dialect = {
    **TOWER_BLOCKS,
    **tensors(
        {
            "embeddings.word": "embeddings.token_embedding.weight",
            "embeddings.position": "embeddings.position_embedding.weight",
        }
    ),
}
"""Text towers of CLIP and SigLIP, without their ends."""
_VISION: Dialect = {
    **TOWER_BLOCKS,
    **tensors(
        {
            "embeddings.cls_token": "embeddings.class_embedding",
            "embeddings.position": "embeddings.position_embedding.weight",
        }
    ),
    **modules(
        {
            "embeddings.patch": ("embeddings.patch_embedding",),
            "embeddings.norm": ("pre_layrnorm",),
            "head.norm": ("post_layernorm",),
            "head.projection": ("visual_projection",),
            "head.classifier": ("classifier",),
        }
    ),
}
_TEXT: Dialect = {
    **TOWER_TEXT,
    **modules({"head.norm": ("final_layer_norm",), "head.projection": ("text_projection",)}),
}

CLIP_VISION = Family(
    name="clip_vision",
    model_types=("clip", "clip_vision_model"),
    classes=MappingProxyType(
        {
            "CLIPModel": ModelClass("vector", pooler=True, sign="visual_projection.weight"),
            "CLIPVisionModelWithProjection": ModelClass("vector", pooler=True),
            "CLIPVisionModel": ModelClass("vector"),
            "CLIPForImageClassification": ModelClass("classifier", sign="classifier.weight"),
        }
    ),
    tower="vision",
    read=_read_vision,
    dialects=lambda _: (_VISION,),
    embeddings=ClipImageEmbeddings,
    part=pre_norm_part,
    head=ClipImageHead,
    prefix="vision_model.",
    unprefixed=("visual_projection", "classifier"),
    image_defaults=ImageDefaults(
        bicubic=True,
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
    ),
)

CLIP_TEXT = Family(
    name="clip_text",
    model_types=("clip", "clip_text_model"),
    classes=MappingProxyType(
        {
            "CLIPModel": ModelClass("vector", pooler=True, sign="text_projection.weight"),
            "CLIPTextModelWithProjection": ModelClass("vector", pooler=True),
            "CLIPTextModel": ModelClass("vector"),
        }
    ),
    tower="text",
    read=_read_text,
    dialects=lambda _: (_TEXT,),
    embeddings=ClipTextEmbeddings,
    part=pre_norm_part,
    head=ClipTextHead,
    prefix="text_model.",
    unprefixed=("text_projection",),
    carried=(MASK, Carried("ends", torch.int64, per_token=False, attention=False, head=lambda _: True)),
    shared=CausalBias,
)
