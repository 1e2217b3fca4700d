"""From items to microbatches: the one loop behind every kind of input.

    Items (decode one by its index)  ->  InputSource (order, skip, pad, stack)  ->  Microbatch

Items are decoded when their microbatch is asked for, so the memory in use is that of one microbatch,
however long the input is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch

from pipeedge.errors import InputError
from pipeedge.payload import Payload

__all__ = [
    "InputSource",
    "Item",
    "Items",
    "JoinedItems",
    "MemoryItems",
    "Microbatch",
    "RepeatedItems",
    "SkippedItem",
]


@dataclass(frozen=True)
class Item:
    """One decoded item."""

    tensors: Payload
    """One tensor for each of the model's inputs, in order, without the dimension of the microbatch."""
    label: int | None
    """The index of its true class, if known."""
    source: str
    """Where it came from, for the results: a file, a line of a file, an entry of a data set."""


class Items(Protocol):
    """A sequence of items that decodes one when it is asked for."""

    @property
    def has_labels(self) -> bool:
        """Whether some item may have a label."""

    @property
    def max_tokens(self) -> int | None:
        """Tokens of the longest item; None where items are not sequences of tokens."""

    def __len__(self) -> int:
        """How many items there are."""

    def source(self, index: int) -> str:
        """Where item ``index`` comes from."""

    def read(self, index: int) -> Item:
        """Decode item ``index``; ``InputError`` if it cannot be read."""


@dataclass(frozen=True)
class MemoryItems:
    """Items that are decoded already."""

    items: tuple[Item, ...]
    max_tokens: int | None = None

    @property
    def has_labels(self) -> bool:
        """Whether some item has a label."""
        return any(item.label is not None for item in self.items)

    def __len__(self) -> int:
        return len(self.items)

    def source(self, index: int) -> str:
        """Where item ``index`` comes from."""
        return self.items[index].source

    def read(self, index: int) -> Item:
        """Item ``index``."""
        return self.items[index]


@dataclass(frozen=True)
class RepeatedItems:
    """The same items over and over, ``count`` in all."""

    items: Items
    count: int

    @property
    def has_labels(self) -> bool:
        """Whether some item may have a label."""
        return self.items.has_labels

    @property
    def max_tokens(self) -> int | None:
        """Tokens of the longest item."""
        return self.items.max_tokens

    def __len__(self) -> int:
        return self.count

    def source(self, index: int) -> str:
        """Where item ``index`` comes from."""
        return self.items.source(index % len(self.items))

    def read(self, index: int) -> Item:
        """Item ``index`` modulo the number of different items."""
        return self.items.read(index % len(self.items))


@dataclass(frozen=True)
class JoinedItems:
    """The items of several parts, one after the other."""

    parts: tuple[Items, ...]

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """The index of the first item of each part, and the number of all items."""
        return tuple(accumulate((len(part) for part in self.parts), initial=0))

    @property
    def has_labels(self) -> bool:
        """Whether some item may have a label."""
        return any(part.has_labels for part in self.parts)

    @property
    def max_tokens(self) -> int | None:
        """Tokens of the longest item."""
        lengths = [part.max_tokens for part in self.parts]
        return max((length for length in lengths if length is not None), default=None)

    def __len__(self) -> int:
        return self._starts[-1]

    def source(self, index: int) -> str:
        """Where item ``index`` comes from."""
        part, inner = self._locate(index)
        return part.source(inner)

    def read(self, index: int) -> Item:
        """Decode item ``index``."""
        part, inner = self._locate(index)
        return part.read(inner)

    def _locate(self, index: int) -> tuple[Items, int]:
        number = bisect_right(self._starts, index) - 1
        return self.parts[number], index - self._starts[number]


@dataclass(frozen=True)
class SkippedItem:
    """An item that could not be read and was left out."""

    source: str
    reason: str


@dataclass(frozen=True)
class Microbatch:
    """Items that travel together."""

    payload: Payload
    """One tensor for each of the model's inputs, [items, ...]."""
    labels: tuple[int | None, ...]
    """The true class of each item, where known."""
    sources: tuple[str, ...]
    """Where each item came from."""
    numbers: tuple[int, ...]
    """The place of each item in the input, from 0; items that are skipped leave gaps."""

    @property
    def items(self) -> int:
        """How many items travel together."""
        return len(self.sources)


class InputSource:
    """The input of a run, as microbatches.

    ``order`` lists the items to run, by index; None runs all of them, first to last.
    """

    def __init__(self, items: Items, *, order: Sequence[int] | None = None, skip_bad: bool = False) -> None:
        self._items = items
        self._order: Sequence[int] = range(len(items)) if order is None else order
        self._skip_bad = skip_bad
        self._skipped: list[SkippedItem] = []
        if not self._order:
            raise InputError("the input is empty: there is no item to run")

    def __len__(self) -> int:
        """How many items there are, counting those that will turn out to be unreadable."""
        return len(self._order)

    @property
    def has_labels(self) -> bool:
        """Whether the true class of some items is known."""
        return self._items.has_labels

    @property
    def max_tokens(self) -> int | None:
        """Tokens of the longest item, so of the longest microbatch; None for images."""
        return self._items.max_tokens

    @property
    def skipped(self) -> tuple[SkippedItem, ...]:
        """Items left out by the last pass over ``microbatches``, so far."""
        return tuple(self._skipped)

    def microbatches(self, ubatch_size: int) -> Iterator[Microbatch]:
        """Microbatches of ``ubatch_size`` items in input order; only the last may be smaller.

        Sequences are padded to the longest of their microbatch. ``InputError``: an item cannot be read
        (unless bad items are skipped), or no item could.
        """
        if ubatch_size < 1:
            raise InputError(f"microbatch size {ubatch_size}: must be at least 1")
        return self._microbatches(ubatch_size)

    def _microbatches(self, ubatch_size: int) -> Iterator[Microbatch]:
        self._skipped.clear()
        waiting: list[tuple[int, Item]] = []
        for numbered in self._readable_items():
            waiting.append(numbered)
            if len(waiting) == ubatch_size:
                yield collate(waiting)
                waiting = []
        if waiting:
            yield collate(waiting)
        elif len(self._skipped) == len(self):
            first = self._skipped[0]
            raise InputError(f"none of the {len(self)} items can be read; the first: {first.reason}")

    def _readable_items(self) -> Iterator[tuple[int, Item]]:
        for number, index in enumerate(self._order):
            try:
                item = self._items.read(index)
            except InputError as error:
                if not self._skip_bad:
                    raise
                self._skipped.append(SkippedItem(self._items.source(index), str(error)))
            else:
                yield number, item


def collate(numbered: Sequence[tuple[int, Item]]) -> Microbatch:
    """Stack items; tensors of one dimension are padded with zeros to the longest.

    Zero is BERT's ``[PAD]``, its first token type, and a masked position, so one rule serves all three.
    """
    numbers, items = zip(*numbered, strict=True)
    payload = tuple(stack(tensors) for tensors in zip(*(item.tensors for item in items), strict=True))
    return Microbatch(
        payload, tuple(item.label for item in items), tuple(item.source for item in items), numbers
    )


def stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[items, ...] from tensors of one shape, or of different lengths in one dimension."""
    if len({tensor.shape for tensor in tensors}) == 1:
        return torch.stack(list(tensors))
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_value=0)
