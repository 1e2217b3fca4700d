"""Define models to train: the layers, the tensors at the cut after each, and the modules of a stage.

    vgg19        44 entries: 16 convolutions, their ReLUs and 5 poolings (1-37), 3 linear layers with ReLU
                 and dropout between them (38-44), for 128x128 images (arXiv:1409.1556, configuration E)
    ViT, DeiT    four layers a block, as at inference: docs/models.md

Parameters have the same names for every cut (``layers.37.weight`` for entry 38) and the same initial values,
because each has a random generator of its own, seeded by its name.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from pipeedge.base.errors import ModelError
from pipeedge.base.payload import Payload, TensorSpec
from pipeedge.base.program import program_name
from pipeedge.base.schedule import LayerRange
from pipeedge.models import Model, find_model
from pipeedge.models.shard import Shard
from pipeedge.train.batchlinear import BatchLinear
from pipeedge.train.dropout import ItemDropout, Position
from pipeedge.train.request import VGG19

__all__ = ["Network", "StageModule", "Transformer", "Vgg", "find_network"]


class StageModule(nn.Module):
    """Consecutive layers of a network."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position
        """Position in the run, for dropout."""

    def forward(self, *payload: torch.Tensor) -> Payload | torch.Tensor:
        """Map the payload at the cut before these layers to the payload at the cut after them."""
        raise NotImplementedError


class Network(Protocol):
    """A model that can be trained in stages."""

    @property
    def name(self) -> str:
        """Name of the model, as the user gave it."""

    @property
    def n_layers(self) -> int:
        """Number of layers."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""

    @property
    def classes(self) -> int:
        """Number of classes."""

    def crossing(self, after_layer: int, items: int) -> tuple[TensorSpec, ...]:
        """Return the tensors at the cut after ``after_layer`` layers, where 0 stands for the input."""

    def build(self, layers: LayerRange) -> StageModule:
        """Build these layers in training mode, with their initial values."""


@dataclass(frozen=True)
class Vgg:
    """VGG-19 without batch normalisation, as a list of 44 layers.

    Args:
        seed: Seed of initial values and dropout.
        widths: Channels of each convolution, ``None`` for a pooling.
        side: Side of the square images in pixels, a multiple of 2 to the number of poolings.
        hidden: Width of the two hidden linear layers.
        dropout: Probability of dropout.
        linear_deviation: Standard deviation of the initial weights of linear layers.
    """

    seed: int = 0
    widths: tuple[int | None, ...] = (
        *(64, 64, None),
        *(128, 128, None),
        *(256, 256, 256, 256, None),
        *(512, 512, 512, 512, None),
        *(512, 512, 512, 512, None),
    )
    side: int = 128
    hidden: int = 4096
    classes: int = 1000
    dropout: float = 0.5
    linear_deviation: float = 0.01
    name: str = VGG19

    @property
    def n_layers(self) -> int:
        """Number of layers: two for a convolution with its ReLU, one for a pooling, and 7 at the end."""
        return sum(1 if width is None else 2 for width in self.widths) + 7

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return 3, self.side, self.side

    def crossing(self, after_layer: int, items: int) -> tuple[TensorSpec, ...]:
        """Return the tensor at a cut: a feature map, or a row of values in the linear layers."""
        values = torch.empty(items, *self.image_shape, device="meta")
        for entry in list(self._entries(Position()))[:after_layer]:
            values = entry(values)
        return (TensorSpec(tuple(values.shape), torch.float32),)

    def build(self, layers: LayerRange) -> StageModule:
        """Build these layers in training mode, with their initial values."""
        position = Position()
        entries = list(self._entries(position))[layers.start : layers.stop]
        stage = _Entries(entries, layers, position)
        _fill(stage, self.seed, linear_deviation=self.linear_deviation)
        return stage.train()

    def _entries(self, position: Position) -> Iterator[nn.Module]:
        """Yield all layers, on ``meta``."""
        channels, side, number = self.image_shape[0], self.side, 0
        for width in self.widths:
            if width is None:
                yield nn.MaxPool2d(2)
                side //= 2
                number += 1
                continue
            yield nn.Conv2d(channels, width, 3, padding=1, device="meta")
            yield nn.ReLU(inplace=True)
            channels = width
            number += 2
        widths = (channels * side * side, self.hidden, self.hidden, self.classes)
        for place, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            yield (_FlatLinear if place == 0 else BatchLinear)(inputs, outputs, device="meta")
            number += 1
            if place < 2:
                yield nn.ReLU(inplace=True)
                yield ItemDropout(self.dropout, number + 1, self.seed, position)
                number += 2


class _FlatLinear(BatchLinear):
    """A linear layer that maps [N, C, height, width] to [N, outputs]."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values.flatten(1))


class _Entries(StageModule):
    def __init__(self, entries: list[nn.Module], layers: LayerRange, position: Position) -> None:
        super().__init__(position)
        if isinstance(entries[0], nn.ReLU):
            entries[0] = nn.ReLU()  # not in place, because the input belongs to another stage
        self.layers = nn.ModuleDict(
            {str(number): entry for number, entry in enumerate(entries, start=layers.start)}
        )

    def forward(self, *payload: torch.Tensor) -> torch.Tensor:
        """Map [N, ...] to [N, ...]."""
        (values,) = payload
        given = values
        for entry in self.layers.values():
            values = entry(values)
        return values if values is not given else values.clone()


@dataclass(frozen=True)
class Transformer:
    """An image classifier that the runtime knows too.

    Args:
        model: ViT or DeiT, with a classifier.
        seed: Seed of initial values.
        pretrained: Whether to start from the model's weights.
    """

    model: Model
    seed: int = 0
    pretrained: bool = False

    def __post_init__(self) -> None:
        if self.model.takes_text or self.model.output_kind != "logits":
            raise ModelError(
                f"{self.model.name}: {program_name('train.py')} trains only image classifiers; choose a ViT "
                "or DeiT, or vgg19"
            )

    @property
    def name(self) -> str:
        """Name of the model, as the user gave it."""
        return self.model.name

    @property
    def n_layers(self) -> int:
        """Number of layers, four per block."""
        return self.model.n_layers

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return (self.model.config.channels, *self.model.config.image_size)

    @property
    def classes(self) -> int:
        """Number of classes of the head."""
        return self.model.config.num_labels

    def crossing(self, after_layer: int, items: int) -> tuple[TensorSpec, ...]:
        """Return the hidden states at a cut, within a block together with the skip connection."""
        return self.model.payload_specs(after_layer, items)

    def build(self, layers: LayerRange) -> StageModule:
        """Build these layers in training mode, with their initial or pretrained values."""
        shard = self.model.load(layers, kernels="torch") if self.pretrained else self.model.build(layers)
        stage = _ShardStage(shard.requires_grad_(True))
        if not self.pretrained:
            _fill(stage, self.seed)
        return stage.train()


class _ShardStage(StageModule):
    def __init__(self, shard: Shard) -> None:
        super().__init__(Position())
        self.shard = shard

    def forward(self, *payload: torch.Tensor) -> Payload | torch.Tensor:
        """Run the shard, and copy outputs that are inputs or views.

        torch detaches a stage's outputs in place, which neither leaves nor views allow.
        """
        given = {id(tensor) for tensor in payload}
        result = tuple(
            tensor.clone() if id(tensor) in given or tensor._is_view() else tensor
            for tensor in self.shard(payload)
        )
        return result if len(result) > 1 else result[0]


def find_network(name: str, *, seed: int, pretrained: bool) -> Network:
    """Return the network that ``--model`` names.

    Raises:
        ModelError: The name is unknown, or the model is not an image classifier.
    """
    if name == VGG19:
        if pretrained:
            raise ModelError("there are no pretrained weights of vgg19; leave out --pretrained")
        return Vgg(seed=seed)
    network = Transformer(find_model(name), seed, pretrained)
    if pretrained:
        network.model.check_weights()
    return network


_ANY_OTHER = partial(nn.init.normal_, std=0.02)
"""Initial values of class tokens, positions and the like."""


def _fill(stage: nn.Module, seed: int, linear_deviation: float | None = None) -> None:
    """Fill a stage with initial values.

    Convolutions get He's (arXiv:1502.01852), norms 1 and 0, and linear layers normal values with
    ``linear_deviation``, or Glorot's.
    """
    stage.to_empty(device="cpu")
    linear = (
        partial(nn.init.normal_, std=linear_deviation)
        if linear_deviation is not None
        else nn.init.xavier_uniform_
    )
    weights: dict[type[nn.Module], Callable[..., torch.Tensor]] = {
        nn.LayerNorm: lambda tensor, generator: nn.init.ones_(tensor),
        nn.Conv2d: partial(nn.init.kaiming_normal_, nonlinearity="relu"),
        nn.Linear: linear,
    }
    for prefix, module in stage.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias":
                nn.init.zeros_(parameter)
                continue
            generator = torch.Generator().manual_seed(seed ^ zlib.crc32(f"{prefix}.{name}".encode()) << 16)
            fill = next((way for kind, way in weights.items() if isinstance(module, kind)), _ANY_OTHER)
            fill(parameter, generator=generator)
