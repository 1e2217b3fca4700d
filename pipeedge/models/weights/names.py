"""Names of parameters in weights files. Each family has one table for each naming dialect.

    block.3.qkv.weight      ours
    encoder.layer.3.attention.attention.{query,key,value}.weight       Hugging Face, on disk
    layers.3.attention.{q,k,v}_proj.weight                             Hugging Face, in memory
    Transformer/encoderblock_3/MultiHeadDotProductAttention_1/
        {query,key,value}/kernel                                       Google's .npz
    blocks.3.attn.qkv.weight                                           timm

A parameter consists of one or more file tensors, which are equal parts along its first dimension. Google's
arrays are laid out for ``x @ kernel``. A layout turns a parameter of ours into a *view* in the shape of the
file, so that reading is always a plain copy into a view, whose shape is the expected one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pipeedge.models.architecture import LAYERS_PER_BLOCK

if TYPE_CHECKING:
    import torch

__all__ = [
    "Dialect",
    "FileTensor",
    "Layout",
    "canonical_name",
    "modules",
    "same",
    "tensors",
]

Layout: TypeAlias = "Callable[[torch.Tensor, int], torch.Tensor]"
"""Function from a parameter, or a part of it, and the number of heads to a view in the shape of the file."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: its name, with ``{n}`` for the number of the block, and its layout."""

    name: str
    layout: Layout

    def numbered(self, block: int) -> FileTensor:
        """Return the file tensor with ``{n}`` replaced by ``block``."""
        return FileTensor(self.name.replace("{n}", str(block)), self.layout)

    def prefixed(self, prefix: str) -> FileTensor:
        """Return the file tensor with ``prefix`` before its name."""
        return FileTensor(prefix + self.name, self.layout)


Dialect: TypeAlias = Mapping[str, tuple[FileTensor, ...]]
"""Map from a parameter of ours, with ``{n}`` for the block, to the file tensors that make it up."""


def same(tensor: torch.Tensor, _heads: int) -> torch.Tensor:
    """Return the parameter itself: the file has PyTorch's layout."""
    return tensor


def modules(names: Mapping[str, Sequence[str]], weight: str = "weight", bias: str = "bias") -> Dialect:
    """Return the table of modules with a weight and a bias in PyTorch's layout."""
    table = {}
    for ours, theirs in names.items():
        table[f"{ours}.weight"] = tuple(FileTensor(f"{name}.{weight}", same) for name in theirs)
        table[f"{ours}.bias"] = tuple(FileTensor(f"{name}.{bias}", same) for name in theirs)
    return table


def tensors(names: Mapping[str, str]) -> Dialect:
    """Return the table of single tensors in PyTorch's layout."""
    return {ours: (FileTensor(theirs, same),) for ours, theirs in names.items()}


def canonical_name(parameter: str) -> tuple[str, int | None]:
    """Return the table key and block number of a shard's parameter, such as ``parts.5.proj.weight``.

    Returns:
        ``("block.{n}.proj.weight", 1)``, or the name itself and None outside blocks.
    """
    if not parameter.startswith("parts."):
        return parameter, None
    _, layer, rest = parameter.split(".", 2)
    return f"block.{{n}}.{rest}", int(layer) // LAYERS_PER_BLOCK
