"""DINOv2, https://arxiv.org/abs/2304.07193, also with registers, https://arxiv.org/abs/2309.16588.

The blocks are ViT's, with a learnt factor for each channel before each residual, and a gated MLP in the
largest model. Positions are interpolated if images are of another size than their table was trained for.
Registers are additional tokens behind the class token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge.base.errors import ModelError
from pipeedge.models.activations import ACTIVATIONS
from pipeedge.models.architecture import (
    LAYERS_PER_BLOCK,
    Architecture,
    FamilyOptions,
    ImageInput,
    check_range,
)
from pipeedge.models.attention import norm
from pipeedge.models.families.vit import ViTAttention, ViTExpansion
from pipeedge.models.family import Family, Head, ImageDefaults, ModelClass, classes_of
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.linear import Linear
from pipeedge.models.weights.names import Dialect, modules, tensors

__all__ = ["DINOV2", "DINOV2_REGISTERS", "GatedExpansion", "ScaledContraction", "ScaledProjection"]

_MOST_REGISTERS = 1 << 10
_MOST_HIDDEN = 1 << 16
_MOST_RATIO = 1 << 10


@dataclass(frozen=True)
class DinoOptions(FamilyOptions):
    """Options of DINOv2."""

    registers: int
    """Number of registers."""
    table: int
    """Number of rows, and of columns, of patches in the table of positions."""
    gated: bool
    """Whether the MLP is gated."""
    antialias: bool
    """Whether positions are smoothed before they are interpolated to fewer."""

    def __post_init__(self) -> None:
        check_range("num_register_tokens", self.registers, _MOST_REGISTERS, least=0)


class InterpolatedEmbeddings(nn.Module):
    """Class token, registers and patches, with positions that are interpolated to the size of the images."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, image, options = architecture.hidden, architecture.image, architecture.own(DinoOptions)
        patch = image.patch_size
        self.table, self.antialias = options.table, options.antialias
        self.patch = nn.Conv2d(image.channels, hidden, patch, stride=patch, device="meta")
        self.cls_token = nn.Parameter(torch.empty(1, 1, hidden, device="meta"))
        self.position = nn.Parameter(torch.empty(1, 1 + self.table**2, hidden, device="meta"))
        tokens = torch.empty(1, options.registers, hidden, device="meta")
        self.registers = nn.Parameter(tokens) if options.registers else None

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor]:
        """Embed [N, C, height, width] -> [N, T, D]."""
        grid = self.patch(pixel_values.to(self.position.dtype))
        square = pixel_values.shape[2] == pixel_values.shape[3]
        of_first, of_patches = self._positions(grid.shape[2], grid.shape[3], square=square)
        items = len(grid)
        first = (self.cls_token + of_first).expand(items, -1, -1)
        patches = grid.flatten(2).transpose(1, 2) + of_patches
        registers = () if self.registers is None else (self.registers.expand(items, -1, -1),)
        return (torch.cat([first, *registers, patches], dim=1),)

    def _positions(self, rows: int, columns: int, *, square: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions of the class token [1, 1, D] and of the patches [1, rows * columns, D]."""
        first, table = self.position[:, :1], self.position[:, 1:]
        # The reference compares numbers of patches alone, and takes images that are not square for resized.
        if square and rows * columns == self.table**2:
            return first, table
        as_image = table.float().reshape(1, self.table, self.table, -1).permute(0, 3, 1, 2)
        resized = F.interpolate(
            as_image, size=(rows, columns), mode="bicubic", align_corners=False, antialias=self.antialias
        )
        return first, resized.permute(0, 2, 3, 1).reshape(1, rows * columns, -1).to(table.dtype)


class ScaledProjection(nn.Module):
    """Part 1: projection of the heads' outputs, times a factor for each channel, and the residual."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.proj = Linear(architecture.hidden, architecture.hidden)
        self.scale1 = nn.Parameter(torch.empty(architecture.hidden, device="meta"))

    def forward(self, context: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor]:
        """Compute context [N, T, D], skip [N, T, D] -> [N, T, D]."""
        return (torch.addcmul(skip, self.proj(context), self.scale1),)


class GatedExpansion(nn.Module):
    """Part 2: norm, then the upper half of a gated MLP, https://arxiv.org/abs/2002.05202."""

    def __init__(self, architecture: Architecture, *, bias: bool = True) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[architecture.activation]
        self.norm2 = norm(architecture)
        self.up = Linear(architecture.hidden, 2 * architecture.intermediate, bias=bias)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute [N, T, D] -> inner [N, T, I], skip [N, T, D]."""
        inner, gate = self.up(hidden, norm=self.norm2).chunk(2, -1)
        return self.activation(inner.clone(memory_format=torch.contiguous_format)).mul_(gate), hidden


class ScaledContraction(nn.Module):
    """Part 3: the lower half of the MLP, times a factor for each channel, and the residual."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.down = Linear(architecture.intermediate, architecture.hidden)
        self.scale2 = nn.Parameter(torch.empty(architecture.hidden, device="meta"))

    def forward(self, inner: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor]:
        """Compute inner [N, T, I], skip [N, T, D] -> [N, T, D]."""
        return (torch.addcmul(skip, self.down(inner), self.scale2),)


def _part(architecture: Architecture, layer: int) -> nn.Module:
    expansion = GatedExpansion if architecture.own(DinoOptions).gated else ViTExpansion
    parts = (ViTAttention, ScaledProjection, expansion, ScaledContraction)
    return parts[layer % LAYERS_PER_BLOCK](architecture)


class TokenAndMeanHead(nn.Module):
    """Final norm, then the first token itself, or the classes of it and of the mean of the patches."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.first_patch = architecture.image.prefix_tokens
        self.norm = norm(architecture)
        vector = architecture.head == "vector"
        self.classifier = None if vector else Linear(2 * architecture.hidden, architecture.num_labels)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [N, T, D] -> [N, classes], or [N, D] without a classifier."""
        if self.classifier is None:
            first: torch.Tensor = self.norm(hidden[:, 0].contiguous())
            return first.float()
        normed = self.norm(hidden)
        both = torch.cat([normed[:, 0], normed[:, self.first_patch :].mean(1)], dim=1)
        logits: torch.Tensor = self.classifier(both)
        return logits.float()


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
    rows, columns = (side // each for side, each in zip(image.image_size, image.patch_size, strict=True))
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
        options=DinoOptions(registers, rows, gated, antialias=bool(default_registers)),
    )


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
        embeddings=InterpolatedEmbeddings,
        part=_part,
        head=TokenAndMeanHead,
        prefix=f"{name}.",
        any_image_size=True,
        image_defaults=ImageDefaults(
            resize=256 / 224, bicubic=True, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
        ),
    )


DINOV2 = _family("dinov2", "Dinov2", 14, 0)
DINOV2_REGISTERS = _family("dinov2_with_registers", "Dinov2WithRegisters", 16, 4)
