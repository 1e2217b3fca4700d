"""SigLIP, https://arxiv.org/abs/2303.15343: a vision and a text tower, whose vectors are compared.

Both have ViT's blocks. The vision tower has no class token: its vector is what a learnt query gets from all
patches. The vector of the text tower is the last token's, so every sentence is padded to the same length;
padding is attended to like words, unless a mask says otherwise.
"""

from __future__ import annotations

from types import MappingProxyType

from pipeedge.base.errors import ModelError
from pipeedge.base.shapes import Shape
from pipeedge.models.architecture import Architecture, ImageInput, TextInput
from pipeedge.models.families.clip import TOWER_BLOCKS, TOWER_TEXT, plain_text_shapes, tower_config
from pipeedge.models.family import MASK, Family, Head, ImageDefaults, ModelClass
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.shapes import block_shapes, linear_shapes, norm_shapes, patch_shapes
from pipeedge.models.weights.names import Dialect, modules, tensors

__all__ = ["SIGLIP_TEXT", "SIGLIP_VISION"]


# The configuration ------------------------------------------------------------------------------------


def _read_vision(config: HubConfig, head: Head) -> Architecture:
    own = tower_config(config, "vision")
    if not own.flag("vision_use_head", True) and head.kind == "vector":
        raise ModelError("vision_use_head is false: a vision tower without its pooling head is not supported")
    sizes = own.block_sizes(activation="gelu_pytorch_tanh")
    return Architecture(
        family="siglip_vision",
        **{**sizes, "eps": own.number("layer_norm_eps", 1e-6)},
        input=ImageInput(
            own.square("image_size", 224),
            own.square("patch_size", 16),
            own.integer("num_channels", 3),
            prefix_tokens=0,
        ),
        head=head.kind,
        num_labels=head.num_labels,
    )


def _read_text(config: HubConfig, head: Head) -> Architecture:
    own = tower_config(config, "text")
    sizes = own.block_sizes(activation="gelu_pytorch_tanh")
    return Architecture(
        family="siglip_text",
        **{**sizes, "eps": own.number("layer_norm_eps", 1e-6)},
        input=TextInput(
            own.integer("vocab_size", 32000),
            own.integer("max_position_embeddings", 64),
        ),
        head=head.kind,
        pooler=True,
        pooler_size=own.integer("projection_size", sizes["hidden"]),
    )


def _vision_shapes(architecture: Architecture, _block: int) -> dict[str, Shape]:
    hidden, inner = architecture.hidden, architecture.intermediate
    if architecture.head == "vector":
        head: dict[str, Shape] = {
            "head.pooling.probe": (1, 1, hidden),
            **linear_shapes("head.pooling.in_proj", 3 * hidden, hidden),
            **linear_shapes("head.pooling.out_proj", hidden, hidden),
            **norm_shapes("head.pooling.norm", hidden),
            **linear_shapes("head.pooling.up", inner, hidden),
            **linear_shapes("head.pooling.down", hidden, inner),
        }
    else:
        head = linear_shapes("head.classifier", architecture.num_labels, hidden)
    return {
        "embeddings.position": (architecture.image.trained_tokens, hidden),
        **patch_shapes(architecture),
        **block_shapes(architecture),
        **norm_shapes("head.norm", hidden),
        **head,
    }


def _text_shapes(architecture: Architecture, _block: int) -> dict[str, Shape]:
    hidden, head = architecture.hidden, dict[str, Shape]()
    if architecture.pooling is None:
        head = {
            **norm_shapes("head.norm", hidden),
            **linear_shapes("head.projection", architecture.pooler_size, hidden),
        }
    return {**plain_text_shapes(architecture), **head}


# Names in files ---------------------------------------------------------------------------------------

_VISION: Dialect = {
    **TOWER_BLOCKS,
    **tensors(
        {
            "embeddings.position": "embeddings.position_embedding.weight",
            "head.pooling.probe": "head.probe",
            "head.pooling.in_proj.weight": "head.attention.in_proj_weight",
            "head.pooling.in_proj.bias": "head.attention.in_proj_bias",
        }
    ),
    **modules(
        {
            "embeddings.patch": ("embeddings.patch_embedding",),
            "head.norm": ("post_layernorm",),
            "head.pooling.out_proj": ("head.attention.out_proj",),
            "head.pooling.norm": ("head.layernorm",),
            "head.pooling.up": ("head.mlp.fc1",),
            "head.pooling.down": ("head.mlp.fc2",),
            "head.classifier": ("classifier",),
        }
    ),
}
_TEXT: Dialect = {
    **TOWER_TEXT,
    **modules({"head.norm": ("final_layer_norm",), "head.projection": ("head",)}),
}

SIGLIP_VISION = Family(
    name="siglip_vision",
    model_types=("siglip", "siglip_vision_model"),
    classes=MappingProxyType(
        {
            "SiglipModel": ModelClass("vector"),
            "SiglipVisionModel": ModelClass("vector"),
            "SiglipForImageClassification": ModelClass("classifier", sign="classifier.weight"),
        }
    ),
    tower="vision",
    read=_read_vision,
    dialects=lambda _: (_VISION,),
    shapes=_vision_shapes,
    prefix="vision_model.",
    image_defaults=ImageDefaults(bicubic=True),
)

SIGLIP_TEXT = Family(
    name="siglip_text",
    model_types=("siglip", "siglip_text_model"),
    classes=MappingProxyType({"SiglipModel": ModelClass("vector"), "SiglipTextModel": ModelClass("vector")}),
    tower="text",
    read=_read_text,
    dialects=lambda _: (_TEXT,),
    shapes=_text_shapes,
    prefix="text_model.",
    carried=(MASK,),
    full_length=True,
)
