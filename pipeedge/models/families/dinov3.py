"""DINOv3, https://arxiv.org/abs/2508.10104: DINOv2's blocks with rotary positions of patches, no key bias.

Class token and registers are not rotated. Nothing travels; each stage computes the rotations from the sizes
of the image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeedge.base.errors import ModelError
from pipeedge.base.shapes import Shape
from pipeedge.models.architecture import Architecture, FamilyOptions, ImageInput, check_range
from pipeedge.models.families.dinov2 import scaled_block_shapes
from pipeedge.models.family import Family, Head, ImageDefaults, ModelClass, classes_of
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.shapes import norm_shapes, patch_shapes
from pipeedge.models.weights.names import Dialect, FileTensor, modules, same, tensors

__all__ = ["DINOV3", "Dinov3Options"]

_MOST_REGISTERS = 1 << 10


@dataclass(frozen=True)
class Dinov3Options(FamilyOptions):
    """Options of DINOv3."""

    registers: int
    gated: bool
    """Whether the MLP is gated."""
    base: float
    """Base of the wave lengths of rotations."""

    def __post_init__(self) -> None:
        check_range("num_register_tokens", self.registers, _MOST_REGISTERS, least=0)
        if not 1 <= self.base < math.inf:
            raise ModelError(f"rope_theta {self.base} is not a base of wave lengths; it must be at least 1")


# The configuration ------------------------------------------------------------------------------------


def _read(config: HubConfig, head: Head) -> Architecture:
    for name, usual in (("query", True), ("key", False), ("value", True), ("proj", True), ("mlp", True)):
        if config.flag(f"{name}_bias", usual) is not usual:
            shown = str(not usual).lower()
            raise ModelError(f"{name}_bias is {shown}: only the usual biases of DINOv3 are supported")
    registers = config.integer("num_register_tokens", 0)
    sizes = config.block_sizes(hidden=384, heads=6, intermediate=1536)
    architecture = Architecture(
        family="dinov3",
        **{**sizes, "eps": config.number("layer_norm_eps", 1e-5)},
        input=ImageInput(
            config.pair("image_size", 224),
            config.pair("patch_size", 16),
            config.integer("num_channels", 3),
            1 + registers,
        ),
        head=head.kind,
        options=Dinov3Options(
            registers, config.flag("use_gated_mlp", False), config.number("rope_theta", 100.0)
        ),
    )
    width = architecture.hidden // architecture.heads
    if width % 4:
        raise ModelError(
            f"heads of {width} values cannot be rotated along two sides; a multiple of 4 is needed"
        )
    return architecture


def _shapes(architecture: Architecture, _block: int) -> dict[str, Shape]:
    hidden, options = architecture.hidden, architecture.own(Dinov3Options)
    block = scaled_block_shapes(architecture, gated=options.gated)
    del block["block.{n}.qkv.bias"]
    return {
        "embeddings.cls_token": (1, 1, hidden),
        **({"embeddings.registers": (1, options.registers, hidden)} if options.registers else {}),
        **patch_shapes(architecture),
        **block,
        "block.{n}.query_bias": (hidden,),
        "block.{n}.value_bias": (hidden,),
        **norm_shapes("head.norm", hidden),
    }


# Names in files ---------------------------------------------------------------------------------------


def _names(layers: str, *, gated: bool) -> Dialect:
    block = f"{layers}.{{n}}"
    up = (f"{block}.mlp.gate_proj", f"{block}.mlp.up_proj") if gated else (f"{block}.mlp.up_proj",)
    return {
        **tensors(
            {
                "embeddings.cls_token": "embeddings.cls_token",
                "embeddings.registers": "embeddings.register_tokens",
                "block.{n}.scale1": f"{block}.layer_scale1.lambda1",
                "block.{n}.scale2": f"{block}.layer_scale2.lambda1",
                "block.{n}.query_bias": f"{block}.attention.q_proj.bias",
                "block.{n}.value_bias": f"{block}.attention.v_proj.bias",
            }
        ),
        **modules(
            {
                "embeddings.patch": ("embeddings.patch_embeddings",),
                "block.{n}.norm1": (f"{block}.norm1",),
                "block.{n}.proj": (f"{block}.attention.o_proj",),
                "block.{n}.norm2": (f"{block}.norm2",),
                "block.{n}.up": up,
                "block.{n}.down": (f"{block}.mlp.down_proj",),
                "head.norm": ("norm",),
            }
        ),
        "block.{n}.qkv.weight": tuple(
            FileTensor(f"{block}.attention.{one}_proj.weight", same) for one in "qkv"
        ),
    }


def _dialects(architecture: Architecture) -> tuple[Dialect, ...]:
    gated = architecture.own(Dinov3Options).gated
    return _names("layer", gated=gated), _names("model.layer", gated=gated)


DINOV3 = Family(
    name="dinov3",
    model_types=("dinov3_vit",),
    classes=classes_of("DINOv3ViT", {"Model": ModelClass("vector")}),
    read=_read,
    dialects=_dialects,
    shapes=_shapes,
    prefix="",
    any_image_size=True,
    image_defaults=ImageDefaults(bicubic=False, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
)
