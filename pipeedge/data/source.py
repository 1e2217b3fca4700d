"""Turn items into microbatches, for every kind of input.

    Items (decode one by its index) -> InputSource (order, skip) -> Group (pad, stack) -> Microbatch

The stream of a run reads its items slightly ahead, in threads, so only a few microbatches are in memory,
however long the input is:

    items, in order ──┬─> [read 0] ─┐
                      ├─> [read 1] ─┼─> at most one microbatch, read or being read ──> next, in order
                      └─> [read 2] ─┘

Decoding an image takes longer than many stages and needs no result of the pipeline, so it proceeds while
microbatches are computed. An item that cannot be read is passed on as a value and judged in its turn, so the
same item fails first for any number of threads.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

import torch

from pipeedge.base.backpressure import READING_THREADS
from pipeedge.base.crew import Closed, Crew, Threads
from pipeedge.base.errors import InputError
from pipeedge.base.payload import Payload, PixelTable, TensorSpec
from pipeedge.base.text_lengths import lengths_text
from pipeedge.base.wording import count
from pipeedge.data.items import Item, Items, Reading
from pipeedge.observe.lanes import DEFAULT_ROWS, READ_AHEAD, Lane
from pipeedge.observe.timeline import LaneId, LaneKind, ThreadState

__all__ = [
    "Group",
    "InputSource",
    "InputStream",
    "Microbatch",
    "SkippedItem",
    "none_readable",
    "read_threads",
]


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
    origin: Group | None = None
    """The items, if the run keeps them until their results are written; else None."""

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

    def without_padding(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return outputs [items, tokens, ...] with zeros for padding; those of whole items as they are."""
        if self.tokens is None or outputs.dim() < 3:
            return outputs
        padding = ~self.token_mask(outputs.shape[1])
        return outputs.masked_fill(padding[:, :, None], 0.0)


@dataclass(frozen=True)
class Group:
    """Decoded items of one microbatch, not stacked yet."""

    numbered: Sequence[tuple[int, Item]]
    """Position of each item in the input, and the item; at least one."""

    is_kept: ClassVar[bool] = False
    """Whether the run keeps the items until their results are written, as the source returns them once."""
    is_made_anew: ClassVar[bool] = False
    """Whether the source makes others in place of those whose results were lost, perhaps fewer."""

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
            self if self.is_kept else None,
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
    def lengths(self) -> str | None:
        """Histogram of the numbers of tokens of all items, or None if they do not differ."""
        return lengths_text(self._items.token_counts)

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

    @property
    def total(self) -> int:
        """Number of items, including those that will turn out to be unreadable."""
        return len(self)

    def stream(self, *, position: int | None = None, rows: int = DEFAULT_ROWS) -> InputStream:
        """Return the stream of the items from ``position`` in the whole input on; None: of all of them.

        Args:
            position: Position of the first item.
            rows: Number of activities that each reading thread keeps on record.
        """
        rest = self if position is None else self.rest(position)
        return InputStream(rest, threads=0 if self.in_memory else read_threads(), rows=rows)

    def attempt(self, number: int) -> Reading:
        """Read item ``number`` of this source, from 0; return an error for ``numbered`` to judge."""
        try:
            return self._items.read(self._order[number])
        except InputError as error:
            return error

    def groups(self, microbatch_size: int) -> Iterator[Group]:
        """Yield groups of ``microbatch_size`` items in input order; only the last may be smaller.

        Each item is read when it is needed.

        Raises:
            InputError: An item cannot be read (unless bad items are skipped), or no item could be read.
        """
        if microbatch_size < 1:
            raise InputError(f"microbatch size {microbatch_size}: must be at least 1")
        numbered = self.numbered(map(self.attempt, range(len(self))))
        return map(Group, iter(lambda: list(islice(numbered, microbatch_size)), []))

    def numbered(self, readings: Iterable[Item | BaseException]) -> Iterator[tuple[int, Item]]:
        """Yield each item that can be read, with its position in the whole input.

        Args:
            readings: All items in order, or why one cannot be read.

        Raises:
            InputError: An item cannot be read (unless bad items are skipped), or no item could be read.
        """
        for number, (index, reading) in enumerate(
            zip(self._order, readings, strict=True), start=self._position
        ):
            if isinstance(reading, Item):
                self._skipped.pop(number, None)
                yield number, reading
            elif self._skip_bad and isinstance(reading, InputError):
                self._skipped[number] = SkippedItem(self._items.source(index), str(reading))
            else:
                raise reading
        if not self._position and len(self._skipped) == len(self):
            raise none_readable(len(self), self._skipped[0].reason)


def read_threads() -> int:
    """Return the number of threads that read the input: as many as this rank computes with, up to a few."""
    return min(READING_THREADS, torch.get_num_threads())


class InputStream:
    """The items of a source, once and in order, in microbatches.

    It lasts from one plan to the next that replaces it without a failure, which may ask for microbatches of
    another size. Only the thread that feeds the pipeline takes them.

    Args:
        source: The input.
        threads: Number of threads that read ahead; 0 to read each item when it is needed.
        clock: Clock in seconds.
        rows: Number of activities that each thread keeps on record.
    """

    def __init__(
        self,
        source: InputSource,
        *,
        threads: int,
        clock: Callable[[], float] = time.perf_counter,
        rows: int = DEFAULT_ROWS,
    ) -> None:
        self._source = source
        self._changed = threading.Condition()
        self._size = 0  # no thread reads before the first microbatch is asked for
        self._next_read = 0
        self._next_taken = 0
        self._read: dict[int, Item | BaseException] = {}
        self._started = self._closed = False
        self.lanes = tuple(
            Lane(LaneId(LaneKind.READ, thread=number), READ_AHEAD, clock, rows)
            for number in range(min(threads, len(source)))
        )
        """Record of each thread's activities. Items are counted to microbatches as if none were skipped."""
        self.fetching = ThreadState.WAIT_INPUT if self.lanes else ThreadState.READ
        """Activity of the feeding thread without a microbatch."""
        readings = self._readings() if self.lanes else map(source.attempt, range(len(source)))
        self._items = source.numbered(readings)

    def start(self, crew: Crew) -> None:
        """Start the threads, unless that was done for another plan; close when ``crew`` is stopped.

        The threads do not belong to the crew of a plan, as the next one goes on with what is read already.
        """
        crew.on_stop(self.close)
        if not self._started:
            self._started = True
            threads = Threads()
            for lane in self.lanes:
                threads.start(lane.lane.label, functools.partial(self._read_ahead, lane))

    def following(self) -> InputStream:
        """Return this stream: another plan goes on with what is read already."""
        return self

    def next(self, microbatch_size: int) -> Group | None:
        """Return the next microbatch of at most that many items; None after the last.

        Raises:
            InputError: An item cannot be read.
            Closed: The stream was closed.
        """
        with self._changed:
            self._size = microbatch_size
            self._changed.notify_all()
        items = list(islice(self._items, microbatch_size))
        return Group(items) if items else None

    def close(self) -> None:
        """Stop reading, and wake waiting threads."""
        with self._changed:
            self._closed = True
            self._read.clear()
            self._changed.notify_all()

    def _readings(self) -> Iterator[Item | BaseException]:
        """Yield every item that the threads read, in order; wait for each."""
        for number in range(len(self._source)):
            with self._changed:
                self._changed.wait_for(lambda number=number: self._closed or number in self._read)  # type: ignore[misc]
                if self._closed:
                    raise Closed
                reading = self._read.pop(number)
                self._next_taken = number + 1
                self._changed.notify_all()
            yield reading

    def _read_ahead(self, lane: Lane) -> None:
        """Read items in the calling thread until none are left, or the stream is closed."""
        lane.begin()
        while (number := self._claim()) is not None:
            lane.enter(ThreadState.READ)
            try:
                reading: Item | BaseException = self._source.attempt(number)
            except BaseException as error:  # raised where the item is taken, in its turn
                reading = error
            with self._changed:
                self._read[number] = reading
                self._changed.notify_all()
            lane.finish(number // self._size, 1)

    def _claim(self) -> int | None:
        """Return the next item to read, once there is room for it; None after the last and when closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._next_read == len(self._source) or self._has_room
            )
            if self._closed or self._next_read == len(self._source):
                return None
            self._next_read += 1
            return self._next_read - 1

    @property
    def _has_room(self) -> bool:
        """Whether fewer items than a microbatch has, or than there are threads, are read but not taken."""
        return self._size > 0 and self._next_read < self._next_taken + max(self._size, len(self.lanes))


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
