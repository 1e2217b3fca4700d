"""Turn items into microbatches, for every kind of input.

    Items (decode one by its index)  ->  InputSource (order, skip)  ->  Group (pad, stack)  ->  Microbatch

Items are decoded when their microbatch is requested, or slightly ahead (``reading.py``), so only a few
microbatches are in memory, however long the input is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from pipeedge.base.errors import InputError
from pipeedge.base.payload import Payload, PixelTable, TensorSpec
from pipeedge.base.wording import count
from pipeedge.data.items import Item, Items, Reading

__all__ = ["Group", "InputSource", "Microbatch", "SkippedItem", "none_readable"]


@dataclass(frozen=True)
class SkippedItem:
    """An item that was skipped because it could not be read."""

    source: str
    reason: str


@dataclass(frozen=True)
class Microbatch:
    """Items that travel together."""

    payload: Payload
    """One tensor for each of the model's inputs, [items, ...]."""
    labels: tuple[int | None, ...]
    """True class of each item, or None if not known."""
    sources: tuple[str, ...]
    """Source of each item."""
    numbers: tuple[int, ...]
    """Position of each item in the input, from 0; skipped items leave gaps."""
    tokens: tuple[int, ...] | None = None
    """Number of tokens of each item, without the padding to a common length, or None for images."""
    masks: tuple[torch.Tensor | None, ...] | None = None
    """Which of these are no padding that came with the item, bool [tokens], or None if all are none; None for
    items without such padding.
    """
    texts: tuple[str, ...] | None = None
    """Sentence of each item, or None if they are not text."""

    @property
    def items(self) -> int:
        """Number of items."""
        return len(self.sources)

    def token_mask(self, length: int) -> torch.Tensor:
        """Return which positions of padded sequences hold tokens, bool [items, length].

        Args:
            length: Length to which the sequences are padded.
        """
        mask = torch.zeros((self.items, length), dtype=torch.bool)
        for row, tokens in enumerate(self.tokens or [length] * self.items):
            own = None if self.masks is None else self.masks[row]
            mask[row, :tokens] = True if own is None else own
        return mask


@dataclass(frozen=True)
class Group:
    """Decoded items of one microbatch, not stacked yet."""

    numbered: Sequence[tuple[int, Item]]
    """Position of each item in the input, and the item; at least one."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specification of the payload, with sequences padded to the longest one."""
        columns = zip(*(item.tensors for _, item in self.numbered), strict=True)
        return tuple(_stacked(tensors) for tensors in columns)

    def collate(self, payload: Payload) -> Microbatch:
        """Stack the items into ``payload``, which has ``specs``, possibly with another number type.

        Shorter sequences are padded with zeros. Zero is BERT's ``[PAD]``, its first token type, and a masked
        position, so one rule serves all inputs.
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
            _token_counts(items),
            None if all(item.mask is None for item in items) else tuple(item.mask for item in items),
            texts if len(texts) == len(items) else None,
        )


class InputSource:
    """The input of a run, as microbatches.

    Args:
        items: The items.
        order: Indices of the items to run; None runs all of them in order.
        skip_bad: Whether items that cannot be read are skipped.
        position: Position in the whole input of the first item, if others come before it.
    """

    def __init__(
        self,
        items: Items,
        *,
        order: Sequence[int] | None = None,
        skip_bad: bool = False,
        position: int = 0,
    ) -> None:
        self._items = items
        self._position = position
        self._order: Sequence[int] = range(len(items)) if order is None else order
        self._skip_bad = skip_bad
        self._skipped: dict[int, SkippedItem] = {}  # by position in the whole input
        if not self._order and not position:
            raise InputError("the input is empty")

    def __len__(self) -> int:
        """Return the number of items, including those that will turn out to be unreadable."""
        return len(self._order)

    @property
    def has_labels(self) -> bool:
        """Whether the true class of some items is known."""
        return self._items.has_labels

    @property
    def max_tokens(self) -> int | None:
        """Number of tokens of the longest item, and thus of the longest microbatch; None for images."""
        return self._items.max_tokens

    @property
    def in_memory(self) -> bool:
        """Whether the items are already decoded, so that reading ahead gains nothing."""
        return self._items.in_memory

    @property
    def pixels(self) -> PixelTable | None:
        """Values that the bytes of images stand for, or None if groups hold what the model takes."""
        return self._items.pixels

    @property
    def skipped(self) -> tuple[SkippedItem, ...]:
        """Items skipped so far, in the order of the input; what is read again counts once."""
        return tuple(item for _, item in sorted(self._skipped.items()))

    def check_distinct(self, wanted: int, option: str) -> None:
        """Check that the first ``wanted`` items are distinct, before comparing results on them.

        Args:
            wanted: Number of items to compare.
            option: Option that asks for them, for the message.

        Raises:
            InputError: There are fewer items, or some of them are equal.
        """
        compared = self._order[:wanted]
        distinct = len({self._items.source(index) for index in compared})
        if distinct < wanted:
            raise InputError(
                f"{option} {wanted}: the input has {count(distinct, 'distinct item')} among its first "
                f"{len(compared)}, and comparing one twice proves nothing: give more with --input"
            )

    def first(self, count: int) -> InputSource:
        """Return a source of the first ``count`` items, which reads them again."""
        return InputSource(self._items, order=self._order[:count], skip_bad=self._skip_bad)

    def rest(self, position: int) -> InputSource:
        """Return a source of the items from ``position`` in the input on; they keep their positions.

        There may be none. What was skipped before ``position`` counts as skipped by both sources.
        """
        order = self._order[position - self._position :]
        rest = InputSource(self._items, order=order, skip_bad=self._skip_bad, position=position)
        rest._skipped = self._skipped
        return rest

    @property
    def items(self) -> Items:
        """Items among which ``order`` chooses."""
        return self._items

    @property
    def order(self) -> Sequence[int]:
        """Indices of the items to run."""
        return self._order

    def microbatches(self, microbatch_size: int) -> Iterator[Microbatch]:
        """Yield the ``groups`` as the model takes them, each in separate memory."""
        return map(self._in_own_memory, self.groups(microbatch_size))

    def _in_own_memory(self, group: Group) -> Microbatch:
        batch = group.collate(tuple(spec.empty() for spec in group.specs))
        if self.pixels is None:
            return batch
        return replace(batch, payload=tuple(self.pixels.look_up(tensor) for tensor in batch.payload))

    def attempt(self, number: int) -> Reading:
        """Read item ``number`` of this source, from 0; return an error for ``groups`` to judge."""
        try:
            return self._items.read(self._order[number])
        except InputError as error:
            return error

    def groups(self, microbatch_size: int, readings: Iterable[Reading] | None = None) -> Iterator[Group]:
        """Yield groups of ``microbatch_size`` items in input order; only the last may be smaller.

        Args:
            microbatch_size: Number of items in a group.
            readings: All items in order, if they are read elsewhere; None: each is read when it is needed.

        Raises:
            InputError: An item cannot be read (unless bad items are skipped), or no item could be read.
        """
        if microbatch_size < 1:
            raise InputError(f"microbatch size {microbatch_size}: must be at least 1")
        return self._groups(
            microbatch_size, map(self.attempt, range(len(self))) if readings is None else readings
        )

    def _groups(self, microbatch_size: int, readings: Iterable[Reading]) -> Iterator[Group]:
        waiting: list[tuple[int, Item]] = []
        for numbered in self._readable_items(readings):
            waiting.append(numbered)
            if len(waiting) == microbatch_size:
                yield Group(waiting)
                waiting = []
        if waiting:
            yield Group(waiting)
        elif not self._position and len(self._skipped) == len(self):
            first = self._skipped[0]
            raise none_readable(len(self), first.reason)

    def _readable_items(self, readings: Iterable[Reading]) -> Iterator[tuple[int, Item]]:
        numbered = enumerate(zip(self._order, readings, strict=True), start=self._position)
        for number, (index, reading) in numbered:
            if isinstance(reading, Item):
                self._skipped.pop(number, None)
                yield number, reading
            elif self._skip_bad:
                self._skipped[number] = SkippedItem(self._items.source(index), str(reading))
            else:
                raise reading


def none_readable(items: int, first: object) -> InputError:
    """Return the error for an input of which no item can be read.

    Args:
        items: Number of its items.
        first: Why the first cannot be read.
    """
    return InputError(f"none of the {count(items, 'item')} can be read; the first: {first}")


def _token_counts(items: Sequence[Item]) -> tuple[int, ...] | None:
    """Return the number of tokens of each item, or None for images."""
    first = [item.tensors[0] for item in items]
    return tuple(map(len, first)) if all(tensor.dim() == 1 for tensor in first) else None


def _stacked(tensors: Sequence[torch.Tensor]) -> TensorSpec:
    """Return the specification of the stacked tensors, which may differ in length in one dimension."""
    shapes = {tensor.shape for tensor in tensors}
    (shape,) = shapes if len(shapes) == 1 else {(max(length for (length,) in shapes),)}
    return TensorSpec((len(tensors), *shape), tensors[0].dtype)


def _stack(tensors: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    if {tensor.shape for tensor in tensors} == {target.shape[1:]}:
        torch.stack(list(tensors), out=target)
        return
    target.zero_()
    for row, tensor in zip(target, tensors, strict=True):
        row[: len(tensor)] = tensor
