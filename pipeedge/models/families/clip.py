"""CLIP, https://arxiv.org/abs/2103.00020: a vision and a text tower, whose vectors are compared.

Both have ViT's blocks with a quick GELU. The vision tower has a norm before block 1, and its vector is the
class token's. The text tower attends to earlier tokens alone, and its vector is that of the token that ends
the sentence. The mask of the text travels, at a byte a token, and the place of its end, at 8 bytes an item;
each stage makes the causal bias from the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from pipeedge.base.shapes import Shape
from pipeedge.models.architecture import Architecture, FamilyOptions, ImageInput, TextInput
from pipeedge.models.family import MASK, Carried, Family, Head, ImageDefaults, ModelClass
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.shapes import block_shapes, linear_shapes, norm_shapes, patch_shapes
from pipeedge.models.weights.names import Dialect, modules, tensors

__all__ = ["CLIP_TEXT", "CLIP_VISION", "ClipTextOptions", "TOWER_BLOCKS", "TOWER_TEXT", "tower_config"]


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


def _vision_shapes(architecture: Architecture, _block: int) -> dict[str, Shape]:
    hidden, image = architecture.hidden, architecture.image
    if architecture.head == "vector":
        head = norm_shapes("head.norm", hidden)
        if architecture.pooler:
            head |= linear_shapes("head.projection", architecture.pooler_size, hidden, bias=False)
    else:
        head = linear_shapes("head.classifier", architecture.num_labels, hidden)
    return {
        "embeddings.cls_token": (hidden,),
        "embeddings.position": (image.trained_tokens, hidden),
        **patch_shapes(architecture, bias=False),
        **norm_shapes("embeddings.norm", hidden),
        **block_shapes(architecture),
        **head,
    }


def plain_text_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Return the tensors of embeddings of words and learnt positions, and of a block."""
    text, hidden = architecture.text, architecture.hidden
    return {
        "embeddings.word": (text.vocab, hidden),
        "embeddings.position": (text.max_positions, hidden),
        **block_shapes(architecture),
    }


def _text_shapes(architecture: Architecture, _block: int) -> dict[str, Shape]:
    hidden, head = architecture.hidden, dict[str, Shape]()
    if architecture.pooling is None:
        head = norm_shapes("head.norm", hidden)
    if architecture.pooler:
        head |= linear_shapes("head.projection", architecture.pooler_size, hidden, bias=False)
    return {**plain_text_shapes(architecture), **head}


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
    shapes=_vision_shapes,
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
    shapes=_text_shapes,
    prefix="text_model.",
    unprefixed=("text_projection",),
    carried=(MASK, Carried("ends", "int64", per_token=False, attention=False, head=lambda _: True)),
)
