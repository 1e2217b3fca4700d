"""From items to microbatches: the one loop behind every kind of input.

    Items (decode one by its index)  ->  InputSource (order, skip)  ->  Group (pad, stack)  ->  Microbatch

Items are decoded when their microbatch is asked for, or a few ahead of it (``reading.py``), so the memory
in use is that of a few microbatches, however long the input is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Protocol, TypeAlias

import torch

from pipeedge.base.errors import InputError
from pipeedge.base.payload import Payload, PixelTable, TensorSpec
from pipeedge.base.wording import count

__all__ = [
    "Group",
    "InputSource",
    "Item",
    "Items",
    "JoinedItems",
    "MemoryItems",
    "Microbatch",
    "Reading",
    "RepeatedItems",
    "SkippedItem",
]


@dataclass(frozen=True)
class Item:
    """One decoded item."""

    tensors: Payload
    """One tensor for each of the model's inputs, in order, without the dimension of the microbatch. Pictures
    may be bytes, whose values a table has (``Items.pixels``)."""
    label: int | None
    """The index of its true class, if known."""
    source: str
    """Where it came from, for the results: a file, a line of a file, an entry of a data set."""
    text: str | None = None
    """Its sentence, for the results."""


Reading: TypeAlias = Item | InputError
"""An item, or why it cannot be read."""


class Items(Protocol):
    """A sequence of items that decodes one when it is asked for."""

    @property
    def has_labels(self) -> bool:
        """Whether some item may have a label."""

    @property
    def max_tokens(self) -> int | None:
        """Tokens of the longest item; None where items are not sequences of tokens."""

    @property
    def in_memory(self) -> bool:
        """Whether the items are decoded already, so that reading one takes next to no time."""

    @property
    def pixels(self) -> PixelTable | None:
        """What the bytes of pictures stand for; None where items hold what the model takes."""

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
    pixels: PixelTable | None = None
    """What the bytes of pictures stand for; None where items hold what the model takes."""

    in_memory = True

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

    @property
    def in_memory(self) -> bool:
        """Whether the items are decoded already."""
        return self.items.in_memory

    @property
    def pixels(self) -> PixelTable | None:
        """What the bytes of pictures stand for."""
        return self.items.pixels

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

    @property
    def in_memory(self) -> bool:
        """Whether the items are decoded already."""
        return all(part.in_memory for part in self.parts)

    @property
    def pixels(self) -> PixelTable | None:
        """What the bytes of pictures stand for; the parts of one input have one transform."""
        return self.parts[0].pixels

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
    texts: tuple[str, ...] | None = None
    """The sentence of each item; None if they are not text."""

    @property
    def items(self) -> int:
        """How many items travel together."""
        return len(self.sources)


@dataclass(frozen=True)
class Group:
    """Decoded items of one microbatch, which are yet to be stacked."""

    numbered: Sequence[tuple[int, Item]]
    """The place of each item in the input, and the item; at least one."""

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Of the payload. Sequences are as long as the longest of them."""
        columns = zip(*(item.tensors for _, item in self.numbered), strict=True)
        return tuple(_stacked(tensors) for tensors in columns)

    def collate(self, payload: Payload) -> Microbatch:
        """Stack the items into ``payload``, which has ``specs``, or another type of values to convert to;
        shorter sequences are padded with zeros.

        Zero is BERT's ``[PAD]``, its first token type, and a masked position, so one rule serves all.
        """
        numbers, items = zip(*self.numbered, strict=True)
        for target, tensors in zip(payload, zip(*(item.tensors for item in items), strict=True), strict=True):
            _stack(tensors, target)
        texts = tuple(item.text for item in items if item.text is not None)
        return Microbatch(
            payload,
            tuple(item.label for item in items),
            tuple(item.source for item in items),
            numbers,
            texts if len(texts) == len(items) else None,
        )


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
    def in_memory(self) -> bool:
        """Whether the items are decoded already, so that reading them ahead gains nothing."""
        return self._items.in_memory

    @property
    def pixels(self) -> PixelTable | None:
        """What the bytes of pictures stand for; None where groups hold what the model takes."""
        return self._items.pixels

    @property
    def skipped(self) -> tuple[SkippedItem, ...]:
        """Items left out by the last pass over ``microbatches``, so far."""
        return tuple(self._skipped)

    def check_distinct(self, wanted: int, option: str) -> None:
        """Refuse to compare the first ``wanted`` items where they are not as many different ones.

        Args:
            wanted: items to be compared.
            option: that asks for them, for the message.

        Raises:
            InputError: there are fewer, or some of them are the same.
        """
        compared = self._order[:wanted]
        distinct = len({self._items.source(index) for index in compared})
        if distinct < wanted:
            raise InputError(
                f"{option} {wanted}: the input has {count(distinct, 'distinct item')} among its first "
                f"{len(compared)}, and comparing one twice proves nothing: give more with --input"
            )

    def first(self, count: int) -> InputSource:
        """The first ``count`` of the items, to be read once more."""
        return InputSource(self._items, order=self._order[:count], skip_bad=self._skip_bad)

    def microbatches(self, ubatch_size: int) -> Iterator[Microbatch]:
        """The ``groups``, each in memory of its own, as the model takes them."""
        return map(self._in_own_memory, self.groups(ubatch_size))

    def _in_own_memory(self, group: Group) -> Microbatch:
        batch = group.collate(tuple(spec.empty() for spec in group.specs))
        if self.pixels is None:
            return batch
        return replace(batch, payload=tuple(self.pixels.look_up(tensor) for tensor in batch.payload))

    def attempt(self, number: int) -> Reading:
        """Read the item at place ``number`` of the input; ``groups`` says whether an error ends the run."""
        try:
            return self._items.read(self._order[number])
        except InputError as error:
            return error

    def groups(self, ubatch_size: int, readings: Iterable[Reading] | None = None) -> Iterator[Group]:
        """Groups of ``ubatch_size`` items in input order; only the last may be smaller.

        Args:
            ubatch_size: items of a group.
            readings: of all items, in order, where something else reads them; None: each is read when it
                is due.

        Raises:
            InputError: an item cannot be read (unless bad items are skipped), or no item could.
        """
        if ubatch_size < 1:
            raise InputError(f"microbatch size {ubatch_size}: must be at least 1")
        return self._groups(
            ubatch_size, map(self.attempt, range(len(self))) if readings is None else readings
        )

    def _groups(self, ubatch_size: int, readings: Iterable[Reading]) -> Iterator[Group]:
        self._skipped.clear()
        waiting: list[tuple[int, Item]] = []
        for numbered in self._readable_items(readings):
            waiting.append(numbered)
            if len(waiting) == ubatch_size:
                yield Group(waiting)
                waiting = []
        if waiting:
            yield Group(waiting)
        elif len(self._skipped) == len(self):
            first = self._skipped[0]
            raise InputError(f"none of the {count(len(self), 'item')} can be read; the first: {first.reason}")

    def _readable_items(self, readings: Iterable[Reading]) -> Iterator[tuple[int, Item]]:
        for number, (index, reading) in enumerate(zip(self._order, readings, strict=True)):
            if isinstance(reading, Item):
                yield number, reading
            elif self._skip_bad:
                self._skipped.append(SkippedItem(self._items.source(index), str(reading)))
            else:
                raise reading


def _stacked(tensors: Sequence[torch.Tensor]) -> TensorSpec:
    """[items, ...] of tensors of one shape, or of different lengths in one dimension."""
    shapes = {tuple(tensor.shape) for tensor in tensors}
    (shape,) = shapes if len(shapes) == 1 else {(max(length for (length,) in shapes),)}
    return TensorSpec((len(tensors), *shape), tensors[0].dtype)


def _stack(tensors: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    if all(tensor.shape == target.shape[1:] for tensor in tensors):
        torch.stack(list(tensors), out=target)
        return
    target.zero_()
    for row, tensor in zip(target, tensors, strict=True):
        row[: len(tensor)] = tensor
