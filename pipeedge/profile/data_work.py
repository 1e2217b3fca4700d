"""Measure the time that the data rank spends on a microbatch: reading, feeding and collecting it.

    shipped photo ──decode──> group ──stack──> frame ──> |     the runtime's own input and Feeder
                                            | ──> frame ──read──> judge, write      its own Collector

Both ends run against frames in memory; what moves them to and from the network is in ``transport_costs``.
The photo is decoded again for each item, like a file; sentences are tokenised before a run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from pipeedge.base.crew import Crew
from pipeedge.base.payload import TensorSpec
from pipeedge.data import InputSource
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
from pipeedge.transport.base import Packet, Receipt, Reserved
from pipeedge.transport.frame import FrameBuffer, Kind, frame_capacity

__all__ = ["DataWork", "measure_data_work", "usual_items"]

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


def measure_data_work(
    model: Model,
    microbatch_size: int,
    *,
    tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    clock: Callable[[], float] = time.perf_counter,
    stretch: float = 1.0,
) -> DataWork:
    """Measure the data rank's work for a microbatch of ``model``.

    Args:
        model: The model.
        microbatch_size: Number of items in a microbatch.
        tokens: Sentence length (text only; by default the longest).
        dtype: Number type of the first stage.
        clock: Returns the time of all threads of the process in seconds.
        stretch: Elapsed seconds per second of ``clock``.

    Raises:
        InputError: There is no input to measure with.
    """
    items = RepeatedItems(usual_items(model, tokens), microbatch_size * (1 + _MICROBATCHES))
    source, activity = InputSource(items), Activity()
    sender = _FrameSender(
        frame_capacity(model.input_specs(microbatch_size, tokens, dtype, eight_bit=items.pixels is not None)),
        clock,
    )
    feeder = _feed(source, microbatch_size, sender, activity, dtype)
    outputs = model.payload_specs(model.n_layers, microbatch_size, tokens, dtype)
    receiver = _FrameReceiver(outputs, microbatch_size, clock)
    suffix = ".csv" if model.output_kind == "logits" else ".npz"
    with (
        tempfile.TemporaryDirectory(prefix="pipeedge-") as directory,
        ResultWriter(Path(directory) / f"results{suffix}", model, None) as writer,
    ):
        collection = Collection(writer, counts_accuracy=model.output_kind == "logits")
        Collector(feeder, Incoming(receiver, None, activity), collection).run()
    return DataWork(
        stretch * _usual_step(sender.posted_at),
        stretch * _usual_step(receiver.taken_at),
    )


def _feed(
    source: InputSource, microbatch_size: int, sender: _FrameSender, activity: Activity, dtype: torch.dtype
) -> Feeder:
    """Feed all of ``source`` like the data rank of a run."""
    crew = Crew()
    stream = source.stream()
    stream.start(crew)
    feed = Feed(stream, microbatch_size, stream_dtype(dtype))
    feeder = Feeder(feed, Outgoing(SendingEnd(sender), activity), activity)
    crew.start("feed", feeder.run)
    try:
        crew.wait()
    finally:
        crew.stop()
    return feeder


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
