"""DINOv3, https://arxiv.org/abs/2508.10104: DINOv2's blocks with rotary positions of patches, no key bias.

Class token and registers are not rotated. Nothing travels; each stage computes the rotations from the sizes
of the image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from pipeedge.base.errors import ModelError
from pipeedge.models.architecture import (
    LAYERS_PER_BLOCK,
    Architecture,
    FamilyOptions,
    ImageInput,
    check_range,
)
from pipeedge.models.attention import attend, norm
from pipeedge.models.families.dinov2 import GatedExpansion, ScaledContraction, ScaledProjection
from pipeedge.models.families.vit import ViTExpansion
from pipeedge.models.family import Family, Head, ImageDefaults, ModelClass, classes_of
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.linear import Linear
from pipeedge.models.rotary import Rotation
from pipeedge.models.weights.names import Dialect, FileTensor, modules, same, tensors

__all__ = ["DINOV3"]

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


class UnplacedEmbeddings(nn.Module):
    """Class token, registers and patches, without positions."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, image = architecture.hidden, architecture.image
        registers = architecture.own(Dinov3Options).registers
        self.patch = nn.Conv2d(
            image.channels, hidden, image.patch_size, stride=image.patch_size, device="meta"
        )
        self.cls_token = nn.Parameter(torch.empty(1, 1, hidden, device="meta"))
        tokens = torch.empty(1, registers, hidden, device="meta")
        self.registers = nn.Parameter(tokens) if registers else None

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor]:
        """Embed [N, C, height, width] -> [N, T, D]."""
        patches = self.patch(pixel_values.to(self.cls_token.dtype)).flatten(2).transpose(1, 2)
        tokens = (self.cls_token,) if self.registers is None else (self.cls_token, self.registers)
        return (torch.cat([*(each.expand(len(patches), -1, -1) for each in tokens), patches], dim=1),)


class PatchRotation(nn.Module):
    """Rotation of the patches by the places of their centres, from -1 to 1 along both sides of the image."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        image = architecture.image
        sides = zip(image.image_size, image.patch_size, strict=True)
        self.rows, self.columns = (side // patch for side, patch in sides)
        self.width = architecture.hidden // architecture.heads
        self.base = architecture.own(Dinov3Options).base

    def forward(self, state: torch.Tensor) -> Rotation:
        """Return the rotation, on the device of ``state`` [N, T, D]."""
        frequency = 1 / self.base ** torch.arange(0, 1, 4 / self.width, dtype=torch.float32)
        centres = [2 * torch.arange(0.5, count) / count - 1 for count in (self.rows, self.columns)]
        places = torch.stack(torch.meshgrid(*centres, indexing="ij"), -1).flatten(0, 1)
        return Rotation.by((2 * math.pi * places[:, :, None] * frequency).flatten(1).to(state.device))


class RotatedAttention(nn.Module):
    """Part 0: norm, queries, keys and values in one product, biases of all but keys, then attention."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden = architecture.hidden
        self.heads = architecture.heads
        self.norm1 = norm(architecture)
        self.qkv = Linear(hidden, 3 * hidden, bias=False)
        self.query_bias = nn.Parameter(torch.empty(hidden, device="meta"))
        self.value_bias = nn.Parameter(torch.empty(hidden, device="meta"))

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute [N, T, D] -> context [N, T, D], skip [N, T, D]."""
        qkv = self.qkv(hidden, norm=self.norm1)
        query, _, value = qkv.chunk(3, -1)
        query.add_(self.query_bias)
        value.add_(self.value_bias)
        return attend(qkv, self.heads, None, rotation=rotation), hidden


def _part(architecture: Architecture, layer: int) -> nn.Module:
    expansion = GatedExpansion if architecture.own(Dinov3Options).gated else ViTExpansion
    parts = (RotatedAttention, ScaledProjection, expansion, ScaledContraction)
    return parts[layer % LAYERS_PER_BLOCK](architecture)


class ClassTokenHead(nn.Module):
    """Final norm of the class token."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.norm = norm(architecture)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [N, T, D] -> [N, D]."""
        first: torch.Tensor = self.norm(hidden[:, 0].contiguous())
        return first.float()


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
    embeddings=UnplacedEmbeddings,
    part=_part,
    head=ClassTokenHead,
    prefix="",
    shared=PatchRotation,
    any_image_size=True,
    image_defaults=ImageDefaults(bicubic=False, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
)
