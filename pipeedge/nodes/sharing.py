"""Share the blocks of a decoder among nodes, by the bytes of its weights. Pure.

Each token reads all weights once, so a stage takes as long as its node needs to read its part of them:

    seconds of a stage  =  bytes of its blocks  /  bytes per second that the node reads
                           (with the head's in the stage of the asked node, which holds both ends)

Nodes do not profile decoders, and this stands in for the scheduler (``Deployment``): consecutive blocks, in
the order of the nodes, so that the slowest stage is as fast as can be, or the sum of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeedge.base.errors import InfeasibleError
from pipeedge.base.wording import figure
from pipeedge.models.architecture import LAYERS_PER_BLOCK, Architecture
from pipeedge.models.families.catalogue import family_of

__all__ = ["TextNode", "TextWeights", "share_blocks", "share_words"]

_BYTES: Mapping[str, float] = {"float32": 4, "bfloat16": 2, "int8": 1 + 2 / 32, "int4": 0.5 + 3 / 32}
"""Bytes of a weight, with the scale of its group."""
_HEAD: Mapping[str, str] = {"int4": "int8"}
"""Number type of the head, where it is another one."""
_HOP_S = 1e-3
"""Seconds that a further stage costs each token, about: a stage is not worth less than that."""


@dataclass(frozen=True)
class TextNode:
    """A node that can hold blocks."""

    name: str
    bytes_per_s: float
    """Bytes that it reads from memory per second."""
    room_bytes: int
    """Memory for weights in bytes."""


@dataclass(frozen=True)
class TextWeights:
    """Sizes of the weights of a decoder."""

    blocks: tuple[int, ...]
    """Bytes of each block."""
    ends: int
    """Bytes of embedding, last norm and head."""

    @classmethod
    def of(cls, architecture: Architecture, dtype: str) -> TextWeights:
        """Return the sizes of a model in a number type."""
        width, head = _BYTES.get(dtype, 4), _BYTES.get(_HEAD.get(dtype, dtype), 4)
        blocks, ends = [], 0
        for block in range(architecture.blocks):
            sizes = family_of(architecture).shapes(architecture, block)
            own = sum(math.prod(shape) for name, shape in sizes.items() if name.startswith("block."))
            ends = sum(math.prod(shape) for name, shape in sizes.items() if not name.startswith("block."))
            blocks.append(round(own * width))
        return cls(tuple(blocks), round(ends * head))


def share_blocks(
    weights: TextWeights, nodes: Sequence[TextNode], objective: str = "throughput"
) -> tuple[int, ...]:
    """Return how many blocks each node takes, some perhaps none.

    Args:
        weights: Sizes of the weights.
        nodes: The nodes in the order of their stages; the first holds both ends besides.
        objective: ``throughput`` makes the slowest stage as fast as can be, ``latency`` their sum.

    Raises:
        InfeasibleError: The weights do not fit the memory of all nodes.
    """
    count = len(weights.blocks)
    before = [0]
    for size in weights.blocks:
        before.append(before[-1] + size)
    # best[b]: smallest cost of the nodes until now if they take the first b blocks; chosen[n][b]: how many of
    # them node n takes then.
    best = [0.0, *[math.inf] * count]
    chosen: list[list[int]] = []
    for number, node in enumerate(nodes):
        ends = weights.ends if number == 0 else 0
        costs, takes = [math.inf] * (count + 1), [0] * (count + 1)
        for stop in range(count + 1):
            for start in range(stop, -1, -1):
                size = before[stop] - before[start] + ends
                if size > node.room_bytes and size:
                    break  # more blocks need even more memory
                cost = size / node.bytes_per_s + (_HOP_S if number and stop > start else 0.0)
                whole = max(best[start], cost) if objective == "throughput" else best[start] + cost
                if whole < costs[stop]:
                    costs[stop], takes[stop] = whole, stop - start
        best = costs
        chosen.append(takes)
    if math.isinf(best[count]):
        raise InfeasibleError(_too_large(weights, nodes))
    shares, stop = [], count
    for takes in reversed(chosen):
        shares.append(takes[stop])
        stop -= takes[stop]
    return tuple(reversed(shares))


def share_words(shares: Sequence[int]) -> tuple[str, ...]:
    """Return the options of a run whose ranks take so many blocks each; one without any has no stage.

    Args:
        shares: Number of blocks of each rank.
    """
    ends, order, first = [], [], 1
    for rank, share in enumerate(shares):
        if share:
            last = first + share * LAYERS_PER_BLOCK - 1
            ends += [str(first), str(last)]
            order.append(str(rank))
            first = last + 1
    return ("--partition", ",".join(ends), "--rank-order", ",".join(order))


def _too_large(weights: TextWeights, nodes: Sequence[TextNode]) -> str:
    needed = sum(weights.blocks) + weights.ends
    room = ", ".join(f"{node.name} {figure(node.room_bytes / 2**30, 3)} GB" for node in nodes)
    return (
        f"the weights need {figure(needed / 2**30, 3)} GB, of which {figure(weights.ends / 2**30, 3)} GB on "
        f"{nodes[0].name}, and there is room for {room}: add nodes, or choose a smaller --dtype"
    )
