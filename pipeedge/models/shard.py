"""Shards: the modules that a range of layers needs, and the payload that crosses the cut after each layer.

A block is cut at four points. Each family defines its own four parts (see ``vit`` and ``bert``), but their
inputs and outputs are the same for all (D: hidden size, I: inner size of the MLP):

    part of block          0                1             2              3
                    hidden │ attention      │ projection  │ MLP up       │ MLP down
    crosses the cut        └> context, skip └> hidden     └> inner, skip └> hidden
    values a token             2D               D             I + D          D

Embeddings belong to the shard with the first layer; final norm, pooler and classifier to the shard with the
last. What else a later layer needs follows the hidden state in the payload, such as the mask up to the last
layer that attends (``Family.carried``), or is recomputed by every shard that attends
(``FamilyLayers.shared``).

Blocks that share their weights are one set of modules in a shard.

Items do not see each other, so a large microbatch is computed some items at a time, through all layers of the
shard. Only they have activations, which then stay in the processor's cache.

Shapes in docstrings: N items, T tokens, D hidden, I inner, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from pipeedge.base.payload import Payload
from pipeedge.base.schedule import LayerRange
from pipeedge.models.architecture import LAYERS_PER_BLOCK, Architecture
from pipeedge.models.dtypes import INT4, stream_dtype
from pipeedge.models.family import Family, attends
from pipeedge.models.int4 import Int4Linear
from pipeedge.models.int8 import Int8Linear
from pipeedge.models.layers.catalogue import layers_of
from pipeedge.models.layers.parts import FamilyLayers
from pipeedge.models.linear import Linear, OnednnLinear, PackedLinear
from pipeedge.models.sentence import SentenceHead
from pipeedge.models.words import WORD_TABLE

__all__ = ["Shard"]

_LARGEST_INNER_BYTES = 8 << 20
"""Size in bytes up to which the inner states of MLPs are computed together. It is small beside the weights of
a shard, and large enough for products to be as fast as with more rows.
"""


class Shard(nn.Module):
    """The modules of a range of layers of one model.

    Every tensor that leaves a layer is contiguous and newly allocated, whether a cut follows or not. Kernels
    therefore see the same strides, and every cut gives the same bits. For the same reason, how many items are
    computed together depends on the sizes of the microbatch alone. Inputs are never modified.

    Args:
        family: Parts of the model's family.
        architecture: Dimensions of the model.
        layers: Layers to compute.
        dtype: Number type of the weights.
        kernels: Kernels of the linear layers of blocks, one of ``models.kernels.available``.
    """

    def __init__(
        self,
        family: Family,
        architecture: Architecture,
        layers: LayerRange,
        dtype: torch.dtype = torch.float32,
        kernels: str = "torch",
    ) -> None:
        super().__init__()
        self.layers = layers
        """Layers that this shard computes."""
        self.stream_dtype = stream_dtype(dtype)
        """Number type of payloads in and out, except tokens, masks and final outputs."""
        self.kernels = kernels
        """Kernels of the linear layers of blocks."""
        # Products in 8 bits divide rows among threads and panels, and take longer with fewer rows at a time.
        self._in_parts = dtype is not torch.int8 and dtype is not INT4
        self._inner = architecture.intermediate
        self._image_tokens = None if architecture.takes_text else architecture.image.tokens
        first, last = layers.start == 0, layers.stop == architecture.n_layers
        carried = family.carried if first else family.crossing(architecture, layers.start)
        self._carried_in = tuple(each.name for each in carried)
        self._carried_out = tuple(each.name for each in family.crossing(architecture, layers.stop))
        self._for_attention = tuple(each.name for each in carried if each.attention)
        self._for_head = tuple(each.name for each in carried if each.head(architecture))
        attending = any(attends(layer) for layer in range(layers.start, layers.stop))
        modules = layers_of(architecture)
        self.embeddings = modules.embeddings(architecture) if first else None
        self.shared = modules.shared(architecture) if modules.shared is not None and attending else None
        self.parts = nn.ModuleDict(_parts(family, modules, architecture, layers))
        self.head = _head(modules, architecture) if last else None
        self.to(self.stream_dtype)
        for part in self.parts.values():
            _choose_layers(part, dtype, kernels)
        self.eval().requires_grad_(False)

    def stored_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors to read from a file by name: parameters and packed weights, not yet filled."""
        packed = {f"{name}.weight": layer.stored for name, layer in self.packed_layers()}
        return {**dict(self.named_parameters()), **packed}

    def adopt(self, other: Shard) -> tuple[str, ...]:
        """Take the modules of the layers that another shard of the same model and type has, too.

        Returns:
            The prefixes of the names of their tensors, which need not be loaded.
        """
        if not self._is_plain or not other._is_plain:
            return ()
        taken = []
        for name in ("embeddings", "head"):
            if getattr(self, name) is not None and getattr(other, name) is not None:
                setattr(self, name, getattr(other, name))
                taken.append(f"{name}.")
        for layer in self.parts.keys() & other.parts.keys():
            self.parts[layer] = other.parts[layer]
            taken.append(f"parts.{layer}.")
        return tuple(taken)

    @property
    def _is_plain(self) -> bool:
        """Whether each layer has weights of its own."""
        return len({id(part) for part in self.parts.values()}) == len(self.parts)

    def packed_layers(self) -> list[tuple[str, PackedLinear]]:
        """Return the linear layers that pack their weights, by name."""
        return [(name, module) for name, module in self.named_modules() if isinstance(module, PackedLinear)]

    @property
    def word_table(self) -> torch.Tensor | None:
        """Table of words, [vocabulary, E], or None if the shard has none."""
        return dict(self.named_parameters()).get(WORD_TABLE)

    @property
    def parameter_count(self) -> int:
        """Number of weights."""
        packed = sum(layer.inputs * layer.outputs for _, layer in self.packed_layers())
        return packed + sum(parameter.numel() for parameter in self.parameters())

    def forward(self, payload: Payload, after_layer: Callable[[], None] | None = None) -> Payload:
        """Compute the payload of the cut after this shard from the payload of the cut before it.

        Args:
            payload: Tensors as ``payload_specs(layers.start, ...)`` lists them. Hidden states may have
                another number type, as after a stage that computes in another one.
            after_layer: Called after each layer, which is more than once for each in a microbatch that is not
                computed all at once. Embeddings are part of the first layer, and the head is of the last.

        Returns:
            Tensors as ``payload_specs(layers.stop, ...)`` lists them, contiguous.
        """
        mark = after_layer or _do_nothing
        items, together = len(payload[0]), self._items_together(payload[0])
        if together >= items:
            outputs = self._compute(payload, mark)
            mark()
            return outputs
        outputs = ()
        for first in range(0, items, together):
            part = slice(first, first + together)
            found = self._compute(tuple(tensor[part] for tensor in payload), mark)
            outputs = outputs or tuple(each.new_empty((items, *each.shape[1:])) for each in found)
            for whole, each in zip(outputs, found, strict=True):
                whole[part] = each
            mark()
        return outputs

    def _items_together(self, hidden: torch.Tensor) -> int:
        """Return the number of items to compute at a time, in parts of like size, for the first tensor."""
        if self.training or not self._in_parts or hidden.device.type != "cpu" or not hidden.numel():
            return len(hidden)
        tokens = hidden.shape[1] if self._image_tokens is None else self._image_tokens
        most = max(1, _LARGEST_INNER_BYTES // (tokens * self._inner * self.stream_dtype.itemsize))
        parts = -(-len(hidden) // most)
        return -(-len(hidden) // parts)

    def _compute(self, payload: Payload, between_layers: Callable[[], None]) -> Payload:
        """Compute some items; ``between_layers`` is called after each layer but the last."""
        state = tuple(self._in_stream_dtype(tensor) for tensor in payload)
        del payload
        if self.embeddings is not None:
            state = self.embeddings(*state)
        width = len(state) - len(self._carried_in)
        carried = dict(zip(self._carried_in, state[width:], strict=True))
        state = state[:width]
        shared = None
        if self.shared is not None:
            shared = self.shared(state[0], *(carried[name] for name in self._for_attention))
        for layer, part in self.parts.items():
            state = part(*state, shared) if attends(int(layer)) else part(*state)
            if int(layer) < self.layers.stop - 1:
                between_layers()
        if self.head is not None:
            return (self.head(*state, *(carried[name] for name in self._for_head)),)
        return (*state, *(carried[name] for name in self._carried_out))

    def _in_stream_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` contiguous, and converted to the stream type if it is floating point."""
        return (tensor.to(self.stream_dtype) if tensor.is_floating_point() else tensor).contiguous()


def _do_nothing() -> None:
    """Do nothing after a layer."""


def _head(modules: FamilyLayers, architecture: Architecture) -> nn.Module:
    if architecture.pooling is not None:
        return SentenceHead(modules, architecture, architecture.pooling)
    return modules.head(architecture)


def _parts(
    family: Family, modules: FamilyLayers, architecture: Architecture, layers: LayerRange
) -> Mapping[str, nn.Module]:
    """Return the modules of ``layers`` by number, one for all layers that have the same weights."""
    made: dict[tuple[int, int], nn.Module] = {}
    parts = {}
    for layer in range(layers.start, layers.stop):
        block, part = divmod(layer, LAYERS_PER_BLOCK)
        weights = (family.stored_block(architecture, block), part)
        if weights not in made:
            made[weights] = modules.part(architecture, layer)
        parts[str(layer)] = made[weights]
    return parts


def _choose_layers(part: nn.Module, dtype: torch.dtype, kernels: str) -> None:
    """Replace the linear layers of ``part``, which is on ``meta``, with those that ``kernels`` compute."""
    for name, child in list(part.named_children()):
        if not isinstance(child, Linear):
            continue
        if dtype is INT4:
            setattr(part, name, Int4Linear(child, stream_dtype(dtype)))
        elif dtype is torch.int8:
            setattr(part, name, Int8Linear(child, stream_dtype(dtype), kernels))
        elif kernels == "onednn":
            setattr(part, name, OnednnLinear(child, dtype))
