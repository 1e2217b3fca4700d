"""Feed the pipeline and collect its results, on the data rank."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pipeedge.base.payload import TensorSpec
from pipeedge.data import Group, ItemStream, Microbatch, ResultSink
from pipeedge.observe.lanes import COLLECT, FEED, Lane
from pipeedge.observe.timeline import LaneId, LaneKind, ThreadState
from pipeedge.run.activity import Activity
from pipeedge.run.ledger import Ledger
from pipeedge.run.progress import Collected
from pipeedge.run.worker import Incoming, Outgoing
from pipeedge.transport.base import Packet, Reserved, unbound

__all__ = ["Collection", "Collector", "Feed", "Feeder"]


@dataclass(frozen=True)
class Feed:
    """The input, and how it is cut into microbatches for the first stage."""

    stream: ItemStream
    microbatch_size: int
    """Largest number of items in a microbatch."""
    dtype: torch.dtype = torch.float32
    """Number type in which the first stage computes."""
    ledger: Ledger = field(default_factory=Ledger)
    """Microbatches that are fed and not written; feeding begins with the lowest that is not written."""
    takes_over: bool = False
    """Whether feeding begins where the feeder of another plan hands over, which still runs."""


class Feeder:
    """Feeds the input to the first stage, one microbatch after the other.

        stage 0 is here        [compute] ──receive──> the next microbatch, when it can compute one
        it is on another rank  [feed] run ──receive──> the next microbatch ──> link 0, when that has room

    Args:
        feed: Input to feed.
        activity: Activity of this rank.
        lane: Record of what is read, and of the time in which nothing is.
        reserve: Reserves memory for a microbatch: that of the link, if there is one.
    """

    def __init__(
        self,
        feed: Feed,
        activity: Activity,
        lane: Lane | None = None,
        reserve: Callable[[Sequence[TensorSpec]], Reserved] = unbound,
    ) -> None:
        self.lane = lane or Lane(LaneId(LaneKind.FEED), FEED, time.perf_counter)
        self._feed = feed
        self._reserve = reserve
        self._is_waiting = False
        self._activity = activity
        self._fed: tuple[int, int] | None = None  # number and items of the last microbatch
        self._fed_bytes = 0
        self.ledger = feed.ledger
        self.started_at: float | None = None
        """Time when this feeder began to read."""

    def run(self, outgoing: Outgoing) -> None:
        """Put microbatches on the link until none follows."""
        while (packet := self.receive()) is not None:
            self._fed_bytes = outgoing.send(packet)
        outgoing.finish()

    def receive(self) -> Packet | None:
        """Return the next microbatch; None when the input has ended, or another feeder is to go on.

        Raises:
            Closed: The epoch was stopped.
        """
        lane, ledger = self.lane, self.ledger
        if self.started_at is None:
            lane.begin()
            self.started_at = lane.enter(self._feed.stream.fetching)
            ledger.begin(self.started_at)
            if self._feed.takes_over:
                ledger.take_over()
        elif self._fed is not None:
            lane.finish(*self._fed, self._fed_bytes)
        lane.enter(ThreadState.WAIT_LINK)
        number = ledger.wait_for_room()
        if number is None:
            ledger.hand_over()
            return None
        group = ledger.next_group(lambda: self._read(number))
        if group is None:
            ledger.input_ended()
            return None
        lane.enter(ThreadState.WAIT_LINK)
        reserved = self._reserve(self._converted(group.specs))
        lane.enter(ThreadState.READ)
        batch = group.collate(reserved.payload)
        now = lane.enter(ThreadState.WAIT_LINK)
        # Labels and sources are kept until the result arrives; the values are not needed.
        ledger.feed(number, dataclasses.replace(batch, payload=()), now)
        self._fed = number, batch.items
        return Packet(number, batch.items, batch.payload, reserved.lease)

    def _converted(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return ``specs`` with values in the first stage's type, which may halve the bytes; not tokens."""
        return tuple(
            dataclasses.replace(spec, dtype=self._feed.dtype) if spec.dtype.is_floating_point else spec
            for spec in specs
        )

    def waited_for_input_s(self) -> float:
        """Return the seconds so far in which nothing was sent because input was read. Any thread may ask."""
        totals = self.lane.totals()
        return totals[ThreadState.READ] + totals[ThreadState.WAIT_INPUT]

    @property
    def is_idle(self) -> bool:
        """Whether everything so far has a result, and there is nothing to read. Any thread may ask."""
        return self._is_waiting and not self.ledger.under_way

    def _read(self, number: int) -> Group | None:
        stream, size = self._feed.stream, self._feed.microbatch_size
        self.lane.enter(stream.fetching)
        if stream.fetching is not ThreadState.IDLE:
            with self._activity.busy(f"reading microbatch {number}"):
                return stream.next(size)
        self._is_waiting = True
        group = stream.next(size)
        self._activity.finished()  # counts as progress, or the time without input would be a stall
        self._is_waiting = False
        return group


@dataclass(frozen=True)
class Collection:
    """Operations on the outputs."""

    sink: ResultSink
    counts_accuracy: bool
    """Whether the outputs are logits, whose classes are compared with the labels."""
    decode: Callable[[Packet], Packet] | None = None
    """Decodes what a compressed link brings, or None."""
    keep_items: int = 0
    """Number of the first items whose outputs are kept in memory."""
    collected: Collected = field(default_factory=Collected)
    """Statistics of the results."""
    epoch: int = 0
    """Number of the plan, in a run that has several."""


class Collector:
    """Receives the results from the last stage and writes them in the order in which they were fed."""

    def __init__(
        self, feeder: Feeder, incoming: Incoming, collection: Collection, lane: Lane | None = None
    ) -> None:
        self.lane = lane or Lane(LaneId(LaneKind.COLLECT), COLLECT, time.perf_counter)
        self._ledger = feeder.ledger
        self._incoming = incoming
        self._collection = collection
        self.collected = collection.collected

    def run(self) -> None:
        """Collect until the last stage has finished."""
        self.lane.begin()
        decode, sink, collected = self._collection.decode, self._collection.sink, self.collected
        epoch = self._collection.epoch
        while (packet := self._incoming.receive()) is not None:
            taken = self._ledger.take(packet.number, epoch)
            now = self.lane.enter(ThreadState.WRITE if decode is None else ThreadState.DECODE)
            if taken is None:
                packet.lease.release()
                continue
            batch, sent_at = taken
            collected.add_result(now, self._ledger.began_at, sent_at, packet.items, epoch=epoch)
            if decode is not None:
                packet = decode(packet)
                self.lane.enter(ThreadState.WRITE)
            (outputs,) = packet.payload
            with self._incoming.activity.busy(f"writing the results of microbatch {packet.number}"):
                sink.write(packet.number, outputs, batch)
                collected.not_finite += _count_not_finite(outputs)
                right = self._judge(outputs, batch)
                if batch.numbers[0] < self._collection.keep_items:
                    kept = batch.without_padding(outputs).clone()
                    collected.kept.append((batch.numbers, kept))
                self._ledger.wrote(packet.number)  # last, as another collector may go on from here
            packet.lease.release()
            self.lane.finish(packet.number, packet.items, note=right)

    def _judge(self, outputs: torch.Tensor, batch: Microbatch) -> float:
        """Count the right answers; return their number or, without labels, how sure the model is."""
        if not self._collection.counts_accuracy:
            return 0.0
        before = self.collected.accuracy
        now = self.collected.accuracy = before.with_outputs(outputs, batch.labels)
        if now.labelled > before.labelled or not self.lane.observed:
            return now.correct - before.correct
        return float(outputs.double().softmax(dim=1).max(dim=1).values.sum())


def _count_not_finite(outputs: torch.Tensor) -> int:
    """Return the number of items whose outputs contain NaN or infinity."""
    # By NumPy: torch gives up the lock of Python for every operation, and waits for it afterwards.
    values = (outputs.float() if outputs.dtype is torch.bfloat16 else outputs).numpy()
    finite = np.isfinite(values)
    if finite.all():
        return 0
    return len(values) - int(np.count_nonzero(finite.reshape(len(values), -1).all(axis=1)))
