"""Models to train: a list of layers, what crosses the cut after each, and the modules of some of them.

    vgg19        44 entries: 16 convolutions, their ReLUs and 5 poolings (1-37), 3 linear layers with ReLU
                 and dropout between them (38-44), for 128x128 images (arXiv:1409.1556, configuration E)
    ViT, DeiT    four layers a block, as at inference: docs/models.md

Parameters go by the same names whatever the cut (``layers.37.weight`` for entry 38), and begin with the same
values: each has a generator of its own, seeded by its name.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
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
        """Where in the run it is, for dropout."""

    def forward(self, *payload: torch.Tensor) -> Payload | torch.Tensor:
        """What crosses the cut before these layers to what crosses the cut after them."""
        raise NotImplementedError


class Network(Protocol):
    """A model that can be trained in stages."""

    @property
    def name(self) -> str:
        """As the user gave it."""

    @property
    def n_layers(self) -> int:
        """How many there are to share out."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""

    @property
    def classes(self) -> int:
        """That it tells apart."""

    def crossing(self, after_layer: int, items: int) -> tuple[TensorSpec, ...]:
        """What crosses the cut after ``after_layer`` layers; 0: the input."""

    def build(self, layers: LayerRange) -> StageModule:
        """These layers in training mode, with the values that training begins with."""


@dataclass(frozen=True)
class Vgg:
    """VGG-19 without batch normalisation, as a list of 44 layers.

    Args:
        seed: of initial values and dropout.
        widths: channels of each convolution, ``None`` for a pooling.
        side: of the square images, in pixels; a multiple of 2 to the number of poolings.
        hidden: width of the two hidden linear layers.
        dropout: probability.
        linear_deviation: of the initial weights of linear layers.
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
        """Convolution and ReLU are two, a pooling is one, and 7 follow."""
        return sum(1 if width is None else 2 for width in self.widths) + 7

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """RGB."""
        return 3, self.side, self.side

    def crossing(self, after_layer: int, items: int) -> tuple[TensorSpec, ...]:
        """One tensor: a map of features, then a row of values."""
        values = torch.empty(items, *self.image_shape, device="meta")
        for entry in list(self._entries(Position()))[:after_layer]:
            values = entry(values)
        return (TensorSpec(tuple(values.shape), torch.float32),)

    def build(self, layers: LayerRange) -> StageModule:
        """These layers."""
        position = Position()
        entries = list(self._entries(position))[layers.start : layers.stop]
        stage = _Entries(entries, layers, position)
        _fill(stage, self.seed, linear_deviation=self.linear_deviation)
        return stage.train()

    def _entries(self, position: Position) -> Iterator[nn.Module]:
        """All layers, on ``meta``."""
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
    """[N, C, height, width] -> [N, outputs]"""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values.flatten(1))


class _Entries(StageModule):
    def __init__(self, entries: list[nn.Module], layers: LayerRange, position: Position) -> None:
        super().__init__(position)
        if isinstance(entries[0], nn.ReLU):
            entries[0] = nn.ReLU()  # what came from another stage is not ours to change
        self.layers = nn.ModuleDict(
            {str(number): entry for number, entry in enumerate(entries, start=layers.start)}
        )

    def forward(self, *payload: torch.Tensor) -> torch.Tensor:
        """[N, ...] -> [N, ...]"""
        (values,) = payload
        given = values
        for entry in self.layers.values():
            values = entry(values)
        return values if values is not given else values.clone()


@dataclass(frozen=True)
class Transformer:
    """An image classifier that is also known for inference.

    Args:
        model: ViT or DeiT, with a classifier.
        seed: of initial values.
        pretrained: begin with the model's weights.
    """

    model: Model
    seed: int = 0
    pretrained: bool = False

    def __post_init__(self) -> None:
        if self.model.family == "bert" or self.model.output_kind != "logits":
            raise ModelError(
                f"{self.model.name}: {program_name('train.py')} trains classifiers of images "
                "(ViT, DeiT, vgg19)"
            )

    @property
    def name(self) -> str:
        """As the user gave it."""
        return self.model.name

    @property
    def n_layers(self) -> int:
        """Four a block."""
        return self.model.n_layers

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return (self.model.config.channels, *self.model.config.image_size)

    @property
    def classes(self) -> int:
        """Labels of the head."""
        return self.model.config.num_labels

    def crossing(self, after_layer: int, items: int) -> tuple[TensorSpec, ...]:
        """Hidden states, within a block with what goes around."""
        return self.model.payload_specs(after_layer, items)

    def build(self, layers: LayerRange) -> StageModule:
        """These layers."""
        shard = self.model.load(layers) if self.pretrained else self.model.build(layers)
        stage = _ShardStage(shard.requires_grad_(True))
        if not self.pretrained:
            _fill(stage, self.seed)
        return stage.train()


class _ShardStage(StageModule):
    def __init__(self, shard: Shard) -> None:
        super().__init__(Position())
        self.shard = shard

    def forward(self, *payload: torch.Tensor) -> Payload | torch.Tensor:
        """As the shard. What goes around all its layers becomes a value of its own, and views do: torch
        detaches a stage's outputs in place, which neither leaves nor views allow."""
        given = {id(tensor) for tensor in payload}
        result = tuple(
            tensor.clone() if id(tensor) in given or tensor._is_view() else tensor
            for tensor in self.shard(payload)
        )
        return result if len(result) > 1 else result[0]


def find_network(name: str, *, seed: int, pretrained: bool) -> Network:
    """The network that ``--model`` means.

    Raises:
        ModelError: an unknown name, or a model of another kind.
    """
    if name == VGG19:
        if pretrained:
            raise ModelError("there are no weights of vgg19 to begin with: leave out --pretrained")
        return Vgg(seed=seed)
    network = Transformer(find_model(name), seed, pretrained)
    if pretrained:
        network.model.check_weights()
    return network


def _fill(stage: nn.Module, seed: int, linear_deviation: float | None = None) -> None:
    """Initial values: He's for convolutions (arXiv:1502.01852), norms 1 and 0; linear layers normal with
    ``linear_deviation``, or Glorot's."""
    stage.to_empty(device="cpu")
    for prefix, module in stage.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}"
            generator = torch.Generator().manual_seed(seed ^ zlib.crc32(full.encode()) << 16)
            if name == "bias":
                nn.init.zeros_(parameter)
            elif isinstance(module, nn.LayerNorm):
                nn.init.ones_(parameter)
            elif isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(parameter, nonlinearity="relu", generator=generator)
            elif isinstance(module, nn.Linear) and linear_deviation is not None:
                nn.init.normal_(parameter, std=linear_deviation, generator=generator)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(parameter, generator=generator)
            else:
                nn.init.normal_(parameter, std=0.02, generator=generator)
