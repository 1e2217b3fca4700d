"""Measure the time that the data rank spends on a microbatch: reading, feeding and collecting it.

    shipped photo ──decode──> group ──stack──> frame ──> |     the runtime's own input and Feeder
                                            | ──> frame ──read──> judge, write      its own Collector

Both ends run against frames in memory; what moves them to and from the network is in ``transport_costs``.
The photo is decoded again for each item, like a file; sentences are tokenised before a run.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from pipeedge.base.crew import Crew
from pipeedge.base.payload import TensorSpec
from pipeedge.data import InputSource, ItemStream
from pipeedge.data.companions import companion_directories
from pipeedge.data.defaults import PHOTO_FILE, asset, default_digits, digits_fit
from pipeedge.data.images import ImageFiles, image_transform
from pipeedge.data.items import Items, RepeatedItems
from pipeedge.data.results import ResultWriter
from pipeedge.data.text import TokenItems
from pipeedge.models import Model
from pipeedge.models.dtypes import stream_dtype
from pipeedge.request.files import InputRequest
from pipeedge.run.activity import Activity
from pipeedge.run.feed_collect import Collection, Collector, Feed, Feeder
from pipeedge.run.worker import Incoming, Outgoing, SendingEnd
from pipeedge.transport.base import Packet, PacketSource, Receipt, Reserved, unbound
from pipeedge.transport.frame import FrameBuffer, Kind, frame_capacity

__all__ = ["DataRank", "DataRankRequest", "DataWork", "measure_data_work", "usual_items"]

_MICROBATCHES = 8
"""Number of microbatches measured after a first one, which warms up the caches."""


@dataclass(frozen=True)
class DataWork:
    """Time that the data rank spends on one microbatch."""

    feed_s: float
    """Seconds to read the items and send them to the first stage."""
    collect_s: float
    """Seconds to receive the outputs of the last stage and write them."""


def usual_items(model: Model, tokens: int | None) -> Items:
    """Return items of the kind that ``model`` takes, which are decoded like those of a user's files.

    Raises:
        InputError: The shipped photo does not fit the model.
    """
    if model.takes_text:
        names = model.input_names
        return TokenItems(((1,) * (tokens or model.max_tokens),), ("made up",), (None,), names, ("made up",))
    if digits_fit(model):
        return default_digits()
    transform = image_transform(model, companion_directories(InputRequest(), model))
    return ImageFiles((asset(PHOTO_FILE),), (None,), transform)


@dataclass(frozen=True)
class DataRank:
    """A data rank that is to work."""

    stream: ItemStream
    feeder: Feeder
    collector: Collector


@dataclass(frozen=True)
class DataRankRequest:
    """Input and outputs of a data rank."""

    model: Model
    microbatch_size: int
    """Number of items in a microbatch."""
    tokens: int | None = None
    """Sentence length (text only), or None for the longest."""
    dtype: torch.dtype = torch.float32
    """Number type of the first stage."""

    @functools.cached_property
    def items(self) -> Items:
        """Items of the input, to be repeated.

        Raises:
            InputError: There is no input to measure with.
        """
        return usual_items(self.model, self.tokens)

    @property
    def input_specs(self) -> tuple[TensorSpec, ...]:
        """Specification of a microbatch that is fed."""
        eight_bit = self.items.pixels is not None
        return self.model.input_specs(self.microbatch_size, self.tokens, self.dtype, eight_bit=eight_bit)

    @property
    def output_specs(self) -> tuple[TensorSpec, ...]:
        """Specification of a microbatch that is collected."""
        return self.model.payload_specs(self.model.n_layers, self.microbatch_size, self.tokens, self.dtype)

    @contextmanager
    def open(
        self,
        microbatches: int,
        results: PacketSource,
        reserve: Callable[[Sequence[TensorSpec]], Reserved] = unbound,
    ) -> Iterator[DataRank]:
        """Open a data rank that feeds and collects ``microbatches``.

        Args:
            microbatches: Number of microbatches.
            results: Source of the results.
            reserve: Reserves memory for a microbatch that is fed.
        """
        activity, is_logits = Activity(), self.model.output_kind == "logits"
        source = InputSource(RepeatedItems(self.items, self.microbatch_size * microbatches))
        stream = source.stream()
        feed = Feed(stream, self.microbatch_size, stream_dtype(self.dtype))
        feeder = Feeder(feed, activity, reserve=reserve)
        with (
            tempfile.TemporaryDirectory(prefix="pipeedge-") as directory,
            ResultWriter(
                Path(directory) / f"results{'.csv' if is_logits else '.npz'}", self.model, None
            ) as writer,
        ):
            collection = Collection(writer, counts_accuracy=is_logits)
            yield DataRank(stream, feeder, Collector(feeder, Incoming(results, None, activity), collection))


def measure_data_work(
    rank: DataRankRequest, clock: Callable[[], float] = time.perf_counter, stretch: float = 1.0
) -> DataWork:
    """Measure the data rank's work for a microbatch.

    Args:
        rank: The data rank.
        clock: Returns the time of all threads of the process in seconds.
        stretch: Elapsed seconds per second of ``clock``.

    Raises:
        InputError: There is no input to measure with.
    """
    sender = _FrameSender(frame_capacity(rank.input_specs), clock)
    receiver = _FrameReceiver(rank.output_specs, rank.microbatch_size, clock)
    outgoing = Outgoing(SendingEnd(sender), Activity())
    with rank.open(1 + _MICROBATCHES, receiver, outgoing.reserve) as parts:
        crew = Crew()
        parts.stream.start(crew)
        crew.start("feed", lambda: parts.feeder.run(outgoing))
        try:
            crew.wait()
        finally:
            crew.stop()
        parts.collector.run()
    return DataWork(
        stretch * _usual_step(sender.posted_at),
        stretch * _usual_step(receiver.taken_at),
    )


def _usual_step(moments: Sequence[float]) -> float:
    """Return the median time from one microbatch to the next."""
    return statistics.median(after - before for before, after in pairwise(moments))


@dataclass
class _ArrivedFrame:
    """A frame in memory, which needs no waiting."""

    bytes: int

    def wait(self) -> None:
        """Do nothing: the frame has arrived already."""

    def receipt(self) -> Receipt:
        """Return the receipt of a link that takes no time."""
        return Receipt(0.0)


@dataclass
class _FrameSender:
    """A link into memory that records when each microbatch was posted."""

    capacity: int
    clock: Callable[[], float]
    posted_at: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._buffer = FrameBuffer(self.capacity)

    def reserve(self, specs: Sequence[TensorSpec]) -> Reserved:
        """Return the memory of a payload in the frame."""
        return Reserved(self._buffer.place(specs))

    def post(self, packet: Packet) -> _ArrivedFrame:
        """Complete the frame."""
        message = self._buffer.write(
            kind=Kind.MICROBATCH, number=packet.number, items=packet.items, payload=packet.payload
        )
        self.posted_at.append(self.clock())
        return _ArrivedFrame(message.nbytes)

    def finish(self) -> None:
        """Do nothing: there is no receiver."""


class _FrameReceiver:
    """A link out of memory that returns the same outputs repeatedly and records when each was requested."""

    def __init__(self, specs: tuple[TensorSpec, ...], items: int, clock: Callable[[], float]) -> None:
        self._buffer = FrameBuffer(frame_capacity(specs))
        made = tuple(torch.rand(spec.shape).to(spec.dtype) for spec in specs)
        self._buffer.write(kind=Kind.MICROBATCH, number=0, items=items, payload=made)
        self._clock = clock
        self.taken_at: list[float] = []

    def receive(self) -> Packet | None:
        """Return the next outputs, or None after the last."""
        number = len(self.taken_at)
        self.taken_at.append(self._clock())
        if number > _MICROBATCHES:
            return None
        frame = self._buffer.read()
        return Packet(number, frame.items, frame.payload)

    def run(self) -> None:
        """Do nothing: this link sends no receipts."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
