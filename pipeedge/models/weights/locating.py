"""Where the parameters of a shard are in a weights file, by the tables of the model's family."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pipeedge.models.architecture import Architecture
from pipeedge.models.families.catalogue import family_of
from pipeedge.models.pooling import DenseModule
from pipeedge.models.weights.names import Dialect, FileTensor, canonical_name, same

if TYPE_CHECKING:
    import torch

__all__ = [
    "Filling",
    "find_pooler",
    "hub_filling",
    "hub_tensors",
    "qkv_bias",
    "resolve",
    "stored_name",
    "stray_block",
]


_SENTENCE_LAYERS = "head.layers."
"""Beginning of the names of the dense layers of ``sentence.SentenceHead``."""


@dataclass(frozen=True)
class Filling:
    """A parameter of a shard and the file tensors that make it up, in order along its first dimension."""

    parameter: str
    sources: tuple[FileTensor, ...]

    def views(self, tensor: torch.Tensor, heads: int) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield each source's name with the part of ``tensor`` it fills, viewed in the source's shape."""
        for source, part in zip(self.sources, tensor.chunk(len(self.sources)), strict=True):
            yield source.name, source.layout(part, heads)


class Stored(Protocol):
    """Layers with tensors that are read from a file."""

    def stored_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors by name."""


def hub_tensors(shard: Stored, architecture: Architecture) -> dict[str, torch.Size]:
    """Return the prefixed names and shapes of the tensors of ``shard`` on the Hugging Face hub."""
    return {
        name: view.shape
        for parameter, tensor in shard.stored_tensors().items()
        for name, view in hub_filling(parameter, architecture).views(tensor, architecture.heads)
    }


def hub_filling(parameter: str, architecture: Architecture) -> Filling:
    """Return the Hugging Face hub's tensors, with prefixed names, that make up ``parameter``."""
    family = family_of(architecture)
    templates = _templates(parameter, family.dialects(architecture)[0], architecture)
    unprefixed = (*family.unprefixed, *(f"{one.path}." for one in _dense_modules(architecture)))
    prefixed = (
        template if template.name.startswith(unprefixed) else template.prefixed(family.prefix)
        for template in templates
    )
    return Filling(parameter, tuple(prefixed))


def stored_name(parameter: str, architecture: Architecture) -> str:
    """Return the name of a decoder's parameter in a file of codes: that of GGUF files."""
    (template,) = _templates(parameter, family_of(architecture).dialects(architecture)[-1], architecture)
    return template.name


def resolve(
    parameter: str, table: Dialect, architecture: Architecture, names: Collection[str]
) -> tuple[tuple[FileTensor, ...], int]:
    """Return the sources of a parameter in one dialect, under the best prefix, and how many are found."""
    templates = _templates(parameter, table, architecture)
    best: tuple[tuple[FileTensor, ...], int] = ((), 0)
    for prefix in _prefixes(architecture):
        sources = tuple(template.prefixed(prefix) for template in templates)
        found = sum(source.name in names for source in sources)
        if not best[0] or found > best[1]:
            best = sources, found
    return best


def find_pooler(architecture: Architecture, names: Collection[str]) -> str | None:
    """Return the name of the pooler's bias in a file, or None if it has none that this head uses."""
    wanted = family_of(architecture).optional_pooler(architecture)
    found = (prefix + name for name in wanted for prefix in _prefixes(architecture))
    return next((name for name in found if name in names), None)


def stray_block(architecture: Architecture, names: Collection[str]) -> str | None:
    """Return a tensor of a block beyond the last, as in a file of a deeper model, or None."""
    beyond = 1 + family_of(architecture).stored_block(architecture, architecture.blocks - 1)
    return _first_of(architecture, names, beyond, lambda key: "{n}" in key)


def qkv_bias(architecture: Architecture, names: Collection[str]) -> str | None:
    """Return the name of a bias of queries, keys or values of the first block in a file, or None."""
    return _first_of(architecture, names, 0, lambda key: key == "block.{n}.qkv.bias")


def _first_of(
    architecture: Architecture, names: Collection[str], block: int, wanted: Callable[[str], bool]
) -> str | None:
    """Return the first tensor of ``block`` in a file whose parameter is ``wanted``, or None."""
    for dialect in family_of(architecture).dialects(architecture):
        for key, tensors in dialect.items():
            if wanted(key):
                for tensor in tensors:
                    for prefix in _prefixes(architecture):
                        name = prefix + tensor.numbered(block).name
                        if name in names:
                            return name
    return None


def _dense_modules(architecture: Architecture) -> tuple[DenseModule, ...]:
    return () if architecture.pooling is None else architecture.pooling.dense


def _prefixes(architecture: Architecture) -> tuple[str, ...]:
    return "", family_of(architecture).prefix


def _templates(parameter: str, table: Dialect, architecture: Architecture) -> tuple[FileTensor, ...]:
    """Return the file tensors of a parameter in one dialect, with the number of the block filled in."""
    key, block = canonical_name(parameter)
    templates = table.get(key, ())
    if key.startswith(_SENTENCE_LAYERS):
        number, _, kind = key.removeprefix(_SENTENCE_LAYERS).partition(".")
        return (FileTensor(f"{_dense_modules(architecture)[int(number)].path}.linear.{kind}", same),)
    if block is None:
        return templates
    stored = family_of(architecture).stored_block(architecture, block)
    return tuple(template.numbered(stored) for template in templates)
