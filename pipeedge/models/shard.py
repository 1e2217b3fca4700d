"""Shards: the modules that a range of layers needs, and the payload that crosses the cut after each layer.

A block is cut at four points. Each family defines its own four parts (see ``vit`` and ``bert``), but their
inputs and outputs are the same for all (D: hidden size, I: inner size of the MLP):

    part of block          0                1             2              3
                    hidden │ attention      │ projection  │ MLP up       │ MLP down
    crosses the cut        └> context, skip └> hidden     └> inner, skip └> hidden
    values a token             2D               D             I + D          D

Embeddings belong to the shard with the first layer; final norm, pooler and classifier to the shard with the
last. A family that masks its attention carries the mask at the end of the payload up to the last layer that
attends.

Shapes in docstrings: N items, T tokens, D hidden, I inner, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge.base.payload import Payload, TensorSpec
from pipeedge.base.schedule import LayerRange
from pipeedge.models.architecture import LAYERS_PER_BLOCK, Architecture
from pipeedge.models.dtypes import stream_dtype
from pipeedge.models.int8 import Int8Linear
from pipeedge.models.linear import Linear, OnednnLinear, PackedLinear

__all__ = [
    "MASK_DTYPE",
    "Family",
    "Shard",
    "attend",
    "attends",
    "carries_mask",
    "norm",
    "payload_specs",
]

MASK_DTYPE = torch.bool
"""Number type of the mask on the wire: one byte a token, true for tokens and false for padding."""

LayerFactory: TypeAlias = Callable[[Architecture], nn.Module]


@dataclass(frozen=True)
class Family:
    """The parts of one family of models that fit into the common structure."""

    inputs: tuple[str, ...]
    """Names of the arrays that the first layer takes, in payload order."""
    masked: bool
    """Whether attention takes a mask, which then travels with the payload."""
    embeddings: LayerFactory
    """Factory of the embeddings, ``forward(*inputs) -> [N, T, D]``."""
    parts: tuple[LayerFactory, LayerFactory, LayerFactory, LayerFactory]
    """Factories of the four parts of a block, ``forward(*state, [bias]) -> state``."""
    head: LayerFactory
    """Factory of the head, ``forward([N, T, D]) -> [N, output]``."""


class Shard(nn.Module):
    """The modules of a range of layers of one model.

    Every tensor that leaves a layer is contiguous and newly allocated, whether a cut follows or not. Kernels
    therefore see the same strides, and every cut gives the same bits. Inputs are never modified.

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
        first, last = layers.start == 0, layers.stop == architecture.n_layers
        self._mask_in = family.masked and (first or carries_mask(architecture, layers.start))
        self._mask_out = family.masked and carries_mask(architecture, layers.stop)
        self.embeddings = family.embeddings(architecture) if first else None
        self.parts = nn.ModuleDict(
            {
                str(layer): family.parts[layer % LAYERS_PER_BLOCK](architecture)
                for layer in range(layers.start, layers.stop)
            }
        )
        self.head = family.head(architecture) if last else None
        self.to(self.stream_dtype)
        for part in self.parts.values():
            _choose_layers(part, dtype, kernels)
        self.eval().requires_grad_(False)

    def stored_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors to read from a file by name: parameters and packed weights, not yet filled."""
        packed = {f"{name}.weight": layer.weight for name, layer in self.packed_layers()}
        return {**dict(self.named_parameters()), **packed}

    def packed_layers(self) -> list[tuple[str, PackedLinear]]:
        """Return the linear layers that pack their weights, by name."""
        return [(name, module) for name, module in self.named_modules() if isinstance(module, PackedLinear)]

    @property
    def parameter_count(self) -> int:
        """Number of weights."""
        packed = sum(layer.inputs * layer.outputs for _, layer in self.packed_layers())
        return packed + sum(parameter.numel() for parameter in self.parameters())

    def forward(self, payload: Payload) -> Payload:
        """Compute the payload of the cut after this shard from the payload of the cut before it.

        Args:
            payload: Tensors as ``payload_specs(layers.start, ...)`` lists them. Hidden states may have
                another number type, as after a stage that computes in another one.

        Returns:
            Tensors as ``payload_specs(layers.stop, ...)`` lists them, contiguous.
        """
        state = tuple(self._in_stream_dtype(tensor) for tensor in payload)
        del payload
        mask: torch.Tensor | None = None
        if self.embeddings is not None:
            if self._mask_in:
                input_ids, attention_mask, token_type_ids = state
                mask = attention_mask != 0
                state = (self.embeddings(input_ids, token_type_ids),)
            else:
                state = (self.embeddings(*state),)
        elif self._mask_in:
            *rest, mask = state
            state = tuple(rest)
        bias = None if mask is None else _additive(mask, state[0].dtype)
        for layer, part in self.parts.items():
            state = part(*state, bias) if attends(int(layer)) else part(*state)
        if self.head is not None:
            return (self.head(*state),)
        return (*state, mask) if self._mask_out and mask is not None else state

    def _in_stream_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` contiguous, and converted to the stream type if it is floating point."""
        return (tensor.to(self.stream_dtype) if tensor.is_floating_point() else tensor).contiguous()


def attends(layer: int) -> bool:
    """Return whether ``layer``, counted from 0, contains the attention of a block."""
    return layer % LAYERS_PER_BLOCK == 0


def carries_mask(architecture: Architecture, after_layer: int) -> bool:
    """Return whether a later layer attends, so that the mask must cross the cut after ``after_layer``."""
    return any(attends(layer) for layer in range(after_layer, architecture.n_layers))


def payload_specs(
    family: Family,
    architecture: Architecture,
    after_layer: int,
    *,
    items: int,
    tokens: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[TensorSpec, ...]:
    """Return the payload that crosses the cut after ``after_layer`` layers (0: the model's input)."""
    shape = (items, tokens)
    if after_layer == 0:
        if family.masked:
            return tuple(TensorSpec(shape, torch.int64) for _ in family.inputs)
        return (TensorSpec((items, architecture.channels, *architecture.image_size), dtype),)
    if after_layer == architecture.n_layers:
        return (TensorSpec((items, architecture.output_size), torch.float32),)
    hidden = TensorSpec((*shape, architecture.hidden), dtype)
    inner = TensorSpec((*shape, architecture.intermediate), dtype)
    state = ((hidden,), (hidden, hidden), (hidden,), (inner, hidden))[after_layer % LAYERS_PER_BLOCK]
    mask = family.masked and carries_mask(architecture, after_layer)
    return (*state, TensorSpec(shape, MASK_DTYPE)) if mask else state


def _choose_layers(part: nn.Module, dtype: torch.dtype, kernels: str) -> None:
    """Replace the linear layers of ``part``, which is on ``meta``, with those that ``kernels`` compute."""
    for name, child in list(part.named_children()):
        if not isinstance(child, Linear):
            continue
        if dtype is torch.int8:
            setattr(part, name, Int8Linear(child, stream_dtype(dtype), kernels))
        elif kernels == "onednn":
            setattr(part, name, OnednnLinear(child, dtype))


def norm(architecture: Architecture) -> nn.LayerNorm:
    """Return a LayerNorm over the hidden size without storage, to be filled later."""
    return nn.LayerNorm(architecture.hidden, eps=architecture.eps, device="meta")


def attend(qkv: torch.Tensor, heads: int, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute multi-head scaled dot-product attention, https://arxiv.org/abs/1706.03762, eq. 1.

    Args:
        qkv: Queries, keys and values side by side, [N, T, 3D].
        heads: Number of heads H, which divides D.
        bias: Bias added to the scores, which broadcasts to [N, H, T, T].

    Returns:
        Context [N, T, D], contiguous.
    """
    items, tokens, width = qkv.shape
    by_head = qkv.view(items, tokens, 3, heads, width // (3 * heads))
    query, key, value = by_head.permute(2, 0, 3, 1, 4).unbind(0)
    context = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    return context.transpose(1, 2).reshape(items, tokens, width // 3)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return ``mask`` [N, T] as a bias on attention scores [N, 1, 1, T], or None if nothing is masked.

    The bias is the most negative finite number instead of minus infinity: a row without any token then
    attends evenly to everything, as in the reference, while infinities would give NaN.
    """
    if bool(mask.all()):
        return None
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    bias.masked_fill_(~mask, torch.finfo(dtype).min)
    return bias[:, None, None, :]
