"""DINOv2, https://arxiv.org/abs/2304.07193, also with registers, https://arxiv.org/abs/2309.16588.

The blocks are ViT's, with a learnt factor for each channel before each residual, and a gated MLP in the
largest model. Positions are interpolated if images are of another size than their table was trained for.
Registers are additional tokens behind the class token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from pipeedge.base.errors import ModelError
from pipeedge.base.shapes import Shape
from pipeedge.models.architecture import Architecture, FamilyOptions, ImageInput, check_range
from pipeedge.models.family import Family, Head, ImageDefaults, ModelClass, classes_of
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.shapes import block_shapes, linear_shapes, norm_shapes, patch_shapes
from pipeedge.models.weights.names import Dialect, modules, tensors

__all__ = ["DINOV2", "DINOV2_REGISTERS", "DinoOptions"]

_MOST_REGISTERS = 1 << 10
_MOST_HIDDEN = 1 << 16
_MOST_RATIO = 1 << 10


@dataclass(frozen=True)
class DinoOptions(FamilyOptions):
    """Options of DINOv2."""

    registers: int
    """Number of registers."""
    gated: bool
    """Whether the MLP is gated."""
    antialias: bool
    """Whether positions are smoothed before they are interpolated to fewer."""

    def __post_init__(self) -> None:
        check_range("num_register_tokens", self.registers, _MOST_REGISTERS, least=0)


# The configuration ------------------------------------------------------------------------------------


def _read(family: str, patch: int, default_registers: int, config: HubConfig, head: Head) -> Architecture:
    hidden = config.integer("hidden_size", 768)
    check_range("hidden", hidden, _MOST_HIDDEN)
    gated = config.flag("use_swiglu_ffn", False)
    ratio = config.number("mlp_ratio", 4)
    if not 0 < ratio <= _MOST_RATIO:
        raise ModelError(f"mlp_ratio is {ratio}; it must be above 0 and up to {_MOST_RATIO}")
    inner = int(hidden * ratio)
    if gated:
        inner = (int(inner * 2 / 3) + 7) // 8 * 8
    registers = config.integer("num_register_tokens", default_registers) if default_registers else 0
    image = ImageInput(
        config.square("image_size", 224),
        config.pair("patch_size", patch),
        config.integer("num_channels", 3),
        1 + registers,
    )
    rows, columns = image.grid
    if rows != columns:
        raise ModelError(f"an image has {rows} x {columns} patches, but the table of positions is a square")
    return Architecture(
        family=family,
        hidden=hidden,
        blocks=config.integer("num_hidden_layers", 12),
        heads=config.integer("num_attention_heads", 12),
        intermediate=inner,
        eps=config.number("layer_norm_eps", 1e-6),
        activation="silu" if gated else config.text("hidden_act", "gelu"),
        input=image,
        head=head.kind,
        qkv_bias=config.flag("qkv_bias", True),
        num_labels=head.num_labels,
        options=DinoOptions(registers, gated, antialias=bool(default_registers)),
    )


def _shapes(architecture: Architecture, _block: int) -> dict[str, Shape]:
    hidden, options = architecture.hidden, architecture.own(DinoOptions)
    classes = linear_shapes("head.classifier", architecture.num_labels, 2 * hidden)
    return {
        "embeddings.cls_token": (1, 1, hidden),
        "embeddings.position": (1, 1 + math.prod(architecture.image.trained_grid), hidden),
        **({"embeddings.registers": (1, options.registers, hidden)} if options.registers else {}),
        **patch_shapes(architecture),
        **scaled_block_shapes(architecture, gated=options.gated),
        **norm_shapes("head.norm", hidden),
        **({} if architecture.head == "vector" else classes),
    }


def scaled_block_shapes(architecture: Architecture, *, gated: bool) -> dict[str, Shape]:
    """Return the tensors of a block with a factor for each channel before each residual."""
    scales: dict[str, Shape] = {f"block.{{n}}.scale{number}": (architecture.hidden,) for number in (1, 2)}
    return {**block_shapes(architecture, gated=gated), **scales}


# Names in files ---------------------------------------------------------------------------------------

_ENDS: Dialect = {
    **tensors(
        {
            "embeddings.cls_token": "embeddings.cls_token",
            "embeddings.registers": "embeddings.register_tokens",
            "embeddings.position": "embeddings.position_embeddings",
            "block.{n}.scale1": "encoder.layer.{n}.layer_scale1.lambda1",
            "block.{n}.scale2": "encoder.layer.{n}.layer_scale2.lambda1",
        }
    ),
    **modules(
        {
            "embeddings.patch": ("embeddings.patch_embeddings.projection",),
            "block.{n}.norm1": ("encoder.layer.{n}.norm1",),
            "block.{n}.norm2": ("encoder.layer.{n}.norm2",),
            "head.norm": ("layernorm",),
            "head.classifier": ("classifier",),
        }
    ),
}
_ATTENTION: Mapping[str, tuple[str, ...]] = {
    "block.{n}.qkv": tuple(
        f"encoder.layer.{{n}}.attention.attention.{part}" for part in ("query", "key", "value")
    ),
    "block.{n}.proj": ("encoder.layer.{n}.attention.output.dense",),
}
_ATTENTION_MEMORY: Mapping[str, tuple[str, ...]] = {
    "block.{n}.qkv": tuple(f"encoder.layer.{{n}}.attention.{part}_proj" for part in "qkv"),
    "block.{n}.proj": ("encoder.layer.{n}.attention.o_proj",),
}


def _dialects(architecture: Architecture) -> tuple[Dialect, ...]:
    mlp = "encoder.layer.{n}.mlp"
    disk: dict[str, tuple[str, ...]]
    memory: dict[str, tuple[str, ...]]
    if architecture.own(DinoOptions).gated:
        disk = {"block.{n}.up": (f"{mlp}.weights_in",), "block.{n}.down": (f"{mlp}.weights_out",)}
        memory = {
            "block.{n}.up": (f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            "block.{n}.down": (f"{mlp}.down_proj",),
        }
    else:
        disk = memory = {"block.{n}.up": (f"{mlp}.fc1",), "block.{n}.down": (f"{mlp}.fc2",)}
    return (
        {**_ENDS, **modules({**_ATTENTION, **disk})},
        {**_ENDS, **modules({**_ATTENTION_MEMORY, **memory})},
    )


def _family(name: str, classes: str, patch: int, registers: int) -> Family:
    return Family(
        name=name,
        model_types=(name,),
        classes=classes_of(
            classes,
            {
                "ForImageClassification": ModelClass("classifier", sign="classifier.weight"),
                "Model": ModelClass("vector"),
            },
        ),
        read=partial(_read, name, patch, registers),
        dialects=_dialects,
        shapes=_shapes,
        prefix=f"{name}.",
        any_image_size=True,
        image_defaults=ImageDefaults(
            resize=256 / 224, bicubic=True, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
        ),
    )


DINOV2 = _family("dinov2", "Dinov2", 14, 0)
DINOV2_REGISTERS = _family("dinov2_with_registers", "Dinov2WithRegisters", 16, 4)
