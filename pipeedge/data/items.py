"""Items of an input, each decoded on request: in memory, repeated, or of several parts."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol, TypeAlias

import torch
from msgspec import Struct

from pipeedge.base.errors import InputError
from pipeedge.base.payload import Payload, PixelTable

__all__ = ["Item", "Items", "JoinedItems", "MemoryItems", "OthersItems", "Reading", "RepeatedItems"]


class Item(Struct, frozen=True, eq=False):
    """A decoded item. A ``Struct``, as a server makes thousands a second."""

    tensors: Payload
    """One tensor for each input of the model, in order, without the dimension of items. Images may be bytes,
    whose values are in a table (``Items.pixels``).
    """
    label: int | None
    """Index of its true class, or None if not known."""
    source: str
    """Source for the results: a file, a line of a file, an entry of a data set."""
    text: str | None = None
    """Its sentence, for the results."""
    mask: torch.Tensor | None = None
    """Which positions hold tokens rather than padding that came with it, bool [tokens]; None if all do."""


NO_TOKENS: Mapping[int, int] = MappingProxyType({})
"""Numbers of tokens of items that are not sequences of tokens."""

Reading: TypeAlias = Item | InputError
"""An item, or the reason why it cannot be read."""


class Items(Protocol):
    """A sequence of items, each decoded on request."""

    @property
    def has_labels(self) -> bool:
        """Whether some item may have a label."""

    @property
    def max_tokens(self) -> int | None:
        """Number of tokens of the longest item, or None if items are not sequences of tokens."""

    @property
    def token_counts(self) -> Mapping[int, int]:
        """How many items there are of each number of tokens; empty if they are not sequences of tokens."""

    @property
    def in_memory(self) -> bool:
        """Whether the items are already decoded, so that reading one takes almost no time."""

    @property
    def pixels(self) -> PixelTable | None:
        """Values that the bytes of images stand for, or None if items hold what the model takes."""

    def __len__(self) -> int:
        """Return the number of items."""

    def source(self, index: int) -> str:
        """Return where item ``index`` comes from."""

    def read(self, index: int) -> Item:
        """Decode item ``index``. Raises ``InputError`` if it cannot be read."""


@dataclass(frozen=True)
class MemoryItems:
    """Items that are already decoded."""

    items: tuple[Item, ...]
    max_tokens: int | None = None
    pixels: PixelTable | None = None
    """Values that the bytes of images stand for, or None if items hold what the model takes."""

    in_memory = True

    @property
    def token_counts(self) -> Mapping[int, int]:
        """How many items there are of each number of tokens."""
        if self.max_tokens is None:
            return NO_TOKENS
        return Counter(len(item.tensors[0]) for item in self.items)

    @property
    def has_labels(self) -> bool:
        """Whether some item has a label."""
        return any(item.label is not None for item in self.items)

    def __len__(self) -> int:
        return len(self.items)

    def source(self, index: int) -> str:
        """Return where item ``index`` comes from."""
        return self.items[index].source

    def read(self, index: int) -> Item:
        """Return item ``index``."""
        return self.items[index]


@dataclass(frozen=True)
class OthersItems:
    """Items of another data set, chosen or repeated by a subclass."""

    items: Items

    @property
    def has_labels(self) -> bool:
        """Whether some item may have a label."""
        return self.items.has_labels

    @property
    def max_tokens(self) -> int | None:
        """Number of tokens of the longest item."""
        return self.items.max_tokens

    @property
    def token_counts(self) -> Mapping[int, int]:
        """How many of the different items there are of each number of tokens."""
        return self.items.token_counts

    @property
    def in_memory(self) -> bool:
        """Whether the items are already decoded."""
        return self.items.in_memory

    @property
    def pixels(self) -> PixelTable | None:
        """Values that the bytes of images stand for."""
        return self.items.pixels


@dataclass(frozen=True)
class RepeatedItems(OthersItems):
    """Items of another data set, repeated up to ``count``."""

    count: int

    def __len__(self) -> int:
        return self.count

    def source(self, index: int) -> str:
        """Return where item ``index`` comes from."""
        return self.items.source(index % len(self.items))

    def read(self, index: int) -> Item:
        """Return item ``index`` modulo the number of different items."""
        return self.items.read(index % len(self.items))


@dataclass(frozen=True)
class JoinedItems:
    """The items of several parts, one part after the other."""

    parts: tuple[Items, ...]

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Index of the first item of each part, and the total number of items."""
        return tuple(accumulate((len(part) for part in self.parts), initial=0))

    @property
    def has_labels(self) -> bool:
        """Whether some item may have a label."""
        return any(part.has_labels for part in self.parts)

    @property
    def max_tokens(self) -> int | None:
        """Number of tokens of the longest item."""
        lengths = [part.max_tokens for part in self.parts]
        return max((length for length in lengths if length is not None), default=None)

    @property
    def token_counts(self) -> Mapping[int, int]:
        """How many items there are of each number of tokens."""
        counts: Counter[int] = Counter()
        for part in self.parts:
            counts.update(part.token_counts)
        return counts

    @property
    def in_memory(self) -> bool:
        """Whether the items are already decoded."""
        return all(part.in_memory for part in self.parts)

    @property
    def pixels(self) -> PixelTable | None:
        """Values that the bytes of images stand for; all parts of an input share one transform."""
        return self.parts[0].pixels

    def __len__(self) -> int:
        return self._starts[-1]

    def source(self, index: int) -> str:
        """Return where item ``index`` comes from."""
        part, inner = self._locate(index)
        return part.source(inner)

    def read(self, index: int) -> Item:
        """Decode item ``index``."""
        part, inner = self._locate(index)
        return part.read(inner)

    def _locate(self, index: int) -> tuple[Items, int]:
        number = bisect_right(self._starts, index) - 1
        return self.parts[number], index - self._starts[number]
