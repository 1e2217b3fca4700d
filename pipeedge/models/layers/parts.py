"""Parts of the layers of a family; each module of ``layers`` defines the layers of one or two families.

layer 1             embeddings  ──> hidden, carried      tensors that travel beside the hidden state
every stage         shared      ──> for each attention   recomputed from shapes and carried tensors
layers              part(architecture, layer)            four parts to a block, see ``shard``
last layer          head
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from pipeedge.models.architecture import LAYERS_PER_BLOCK, Architecture

__all__ = ["FamilyLayers", "LayerFactory", "cycle"]

LayerFactory: TypeAlias = Callable[[Architecture], nn.Module]


@dataclass(frozen=True)
class FamilyLayers:
    """Factories of the modules of one family."""

    embeddings: LayerFactory
    """Factory of the embeddings, ``forward(*inputs) -> hidden [N, T, D], *carried``."""
    part: Callable[[Architecture, int], nn.Module]
    """Factory of a layer by its number from 0, ``forward(*state) -> state``. One that attends takes the
    result of ``shared``, or None, as last argument. ``cycle`` makes one from the four parts of equal blocks.
    """
    head: LayerFactory
    """Factory of the head, ``forward(hidden [N, T, D], *carried for the head) -> output``, float32."""
    shared: LayerFactory | None = None
    """Factory of what each stage recomputes once a microbatch for all its attentions,
    ``forward(state[0] [N, T, ...], *carried for attention) -> result``; None if there is nothing.
    """
    final_norm: LayerFactory | None = None
    """Factory of the norm after the last block, for heads that are not the family's own, with the same name
    as in its own, ``head.norm``; None without such a norm.
    """


def cycle(*parts: LayerFactory) -> Callable[[Architecture, int], nn.Module]:
    """Return ``FamilyLayers.part`` for blocks that all consist of the same four ``parts``."""

    def part(architecture: Architecture, layer: int) -> nn.Module:
        return parts[layer % LAYERS_PER_BLOCK](architecture)

    return part
