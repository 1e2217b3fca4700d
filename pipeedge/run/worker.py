"""The threads of one rank, and what each waits for.

    stage            link in ──> [compute] ──> link out ──> [watch]
    data rank        source  ──> [compute], if it has stage 0, else [feed] ──> link to stage 0 ──> [watch]
                     link from the last stage ──> [collect] ──> results

Each [ ] is one thread. A link carries at most two microbatches, which is all that can wait before a
stage, so a slow stage slows down its predecessors instead of filling its own memory. The watching thread
does not delay the data: it measures how long each microbatch occupies the link.

A thread ends when its input ends, or when something fails: the first exception of any thread is kept, and
raised where ``Crew.wait`` is called. Nothing polls.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeedge.base.backpressure import PACKETS_WITH_RECEIPTS, SAMPLED_PACKETS
from pipeedge.base.channel import Channel
from pipeedge.base.errors import PipeEdgeError
from pipeedge.base.payload import TensorSpec
from pipeedge.base.quota import Quota
from pipeedge.observe.lanes import AS_THEY_ARE_BITS, STAGE, Lane, LinkLane
from pipeedge.observe.metrics import StageWork, Tally
from pipeedge.observe.timeline import LaneId, ThreadState
from pipeedge.run.activity import Activity
from pipeedge.transport.base import Packet, PacketSource, Reserved, Sender, Shipment

__all__ = ["Incoming", "Outgoing", "SendingEnd", "StageLoop", "StageSteps"]

_WATCH_S = 0.02
_MEASURED = 1000
"""Number of receipts whose median is the time on the link."""


@dataclass(frozen=True)
class Incoming:
    """The receiving side of a stage or of the data rank."""

    receiver: PacketSource
    peer: int | None
    """Rank at the other end of the link, or None if that is this rank."""
    activity: Activity

    def receive(self) -> Packet | None:
        """Return the next packet, or None after the last; meanwhile ``activity`` shows who is awaited.

        Raises:
            PeerError: The other end is gone, or sent a malformed frame.
        """
        if self.peer is None:
            return self.receiver.receive()
        with self.activity.awaiting(self.peer):
            packet = self.receiver.receive()
        self.activity.received(self.peer)
        return packet


@dataclass(frozen=True)
class SendingEnd:
    """The sending end of a link, and where it leads."""

    sender: Sender
    peer: int | None = None
    """Rank at the other end of the link, or None if that is this rank."""
    receipts: bool = False
    """Whether the other end sends a receipt for each packet."""


class Outgoing:
    """The sending side of a stage or of the data rank.

    ``send`` puts a packet on the link from the caller's thread, so that nothing stands between a
    result and the wire; ``run`` waits, in a thread of its own, for packets to arrive, so that the time
    they occupy the link is known. Two packets in a row are watched at least every ``_WATCH_S``: all of
    them where packets are long, a sample where they are short and watching would slow them.

    Args:
        end: Sending end of the link.
        activity: Activity of this rank.
        clock: Clock in seconds.
        lane: Record of the transfers, or None.
        arrived: On a link with receipts: called by the watching thread with each microbatch, its bytes, and
            the seconds that it occupied the link without waiting for the next stage; or None.
    """

    def __init__(
        self,
        end: SendingEnd,
        activity: Activity,
        clock: Callable[[], float] = time.perf_counter,
        *,
        lane: LinkLane | None = None,
        arrived: Callable[[int, int, float], None] | None = None,
    ) -> None:
        self.seconds = Tally()
        """Seconds that watched packets occupied the link."""
        self._link_seconds: deque[float] = deque(maxlen=_MEASURED)
        self.best_bytes_per_s = 0.0
        """Throughput of the fastest packet. Others may have waited until the other end took earlier ones."""
        self.bytes = Tally()
        """Bytes of all packets."""
        self.crossed = Tally()
        """Items that receipts say have crossed the link, and the seconds that they occupied it; replaced as a
        whole, so that any thread may read it."""
        self._sender = end.sender
        self._peer = end.peer
        self._receipts = end.receipts
        self._activity = activity
        self._clock = clock
        self._lane = lane
        self._arrived = arrived
        self._watched: Channel[_SentPacket] = Channel(
            PACKETS_WITH_RECEIPTS if end.receipts else SAMPLED_PACKETS
        )
        self._watch_next = 0
        self._watch_at = 0.0
        self._sent = 0

    def reserve(self, specs: Sequence[TensorSpec]) -> Reserved:
        """Reserve memory of the link for the payload of the next packet; blocks while the link is full."""
        return self._sender.reserve(specs)

    def send(self, packet: Packet, *, counts: bool = True) -> int:
        """Put ``packet`` on the link and return its bytes there; blocks while the link is full.

        Args:
            packet: The packet.
            counts: Whether ``crossed`` is to count it.
        """
        started = self._clock()
        if self._peer is not None:
            # Before it is posted: a dead link that lost the notice of room blocks here, and must be noticed.
            self._activity.sent(self._peer)
        shipment = self._sender.post(packet)
        self._sent += 1
        if self._peer is None:
            return 0
        self.bytes.add(shipment.bytes)
        if self._receipts:
            items = packet.items if counts else None
            self._watched.put(_SentPacket(self._sent, packet.number, items, self._clock(), shipment))
            return shipment.bytes
        if started >= self._watch_at or (self._lane is not None and self._lane.wants_all):
            self._watch_next, self._watch_at = 2, started + _WATCH_S
        if self._watch_next:
            self._watch_next -= 1
            self._watched.put(_SentPacket(self._sent, packet.number, packet.items, started, shipment))
        return shipment.bytes

    def finish(self) -> None:
        """Tell the other end that nothing follows, and wait until everything has arrived."""
        if self._peer is not None:
            self._activity.sent(self._peer)
        self._sender.finish()
        self._watched.finish()

    def run(self) -> None:
        """Watch packets until the last one has arrived."""
        if self._receipts:
            self._hear_of_arrivals()
            return
        free_at, previous = 0.0, 0
        while (watched := self._watched.get()) is not None:
            watched.shipment.wait()
            now = self._clock()
            # Without the previous packet, it is unknown since when this one had the link for itself.
            if watched.number == previous + 1:
                since = max(watched.started, free_at)
                seconds = now - since
                self.seconds.add(seconds)
                if self._lane is not None:
                    self._lane.add(watched.microbatch, watched.shipment.bytes, since, now)
                # If the previous packet was still in flight, its arrival may have been noticed late.
                if seconds > 0 and free_at <= watched.started:
                    self.best_bytes_per_s = max(self.best_bytes_per_s, watched.shipment.bytes / seconds)
            free_at, previous = now, watched.number

    def _hear_of_arrivals(self) -> None:
        while (watched := self._watched.get()) is not None:
            receipt, size = watched.shipment.receipt(), watched.shipment.bytes
            now = self._clock()
            seconds = receipt.link_seconds(now - watched.started)
            self.seconds.add(seconds)
            if watched.items is not None:
                self.crossed = Tally(self.crossed.count + watched.items, self.crossed.total + seconds)
            self._link_seconds.append(seconds)
            if seconds > 0:
                self.best_bytes_per_s = max(self.best_bytes_per_s, size / seconds)
            if self._lane is not None:
                self._lane.add(watched.microbatch, size, now - seconds, now)
            if self._arrived is not None:
                self._arrived(watched.microbatch, size, seconds)

    @property
    def link_s(self) -> float | None:
        """Median seconds of a packet on the link, or None without receipts."""
        return statistics.median(self._link_seconds) if self._link_seconds else None

    @property
    def send_s_best(self) -> float:
        """Seconds that a packet of mean size takes at the highest rate seen."""
        return self.bytes.mean / self.best_bytes_per_s if self.best_bytes_per_s else 0.0

    def close(self) -> None:
        """Wake all waiting threads."""
        self._watched.close()


@dataclass(frozen=True)
class _SentPacket:
    number: int
    """Number among the packets sent, from 1."""
    microbatch: int
    items: int | None
    """Number of items, or None if it is not to be counted."""
    started: float
    """Time when posting began; on a link with receipts, when it ended."""
    shipment: Shipment


@dataclass(frozen=True)
class StageSteps:
    """Operations of a stage on each microbatch, in order."""

    compute: Callable[[Packet], Packet]
    decode: Callable[[Packet], Packet] | None = None
    """Decodes what a compressed link brings, or None."""
    encode: Callable[[Packet], Packet] | None = None
    """Encodes what a compressed link takes away, or None."""
    bits: Callable[[], float] = lambda: AS_THEY_ARE_BITS
    """Returns the bits per value on the outgoing link."""
    counts: Callable[[], bool] = lambda: True
    """Returns whether the latest microbatch is of the kind by which plans are compared."""


def _unchanged(packet: Packet) -> Packet:
    return packet


class StageLoop:
    """Receives microbatches, computes and sends them, one after the other.

    A loop that follows another on the same rank begins when that has ended: what was fed first is computed
    first, and the two do not slow each other down.
    """

    def __init__(
        self,
        steps: StageSteps,
        incoming: Incoming,
        outgoing: Outgoing,
        activity: Activity,
        lane: Lane | None = None,
        cpu_clock: Callable[[], float] = time.thread_time,
        quota: Callable[[], Quota] = Quota.of_this_process,
    ) -> None:
        self.lane = lane or Lane(LaneId.stage(0), STAGE, time.perf_counter)
        self.compute_cpu_seconds = Tally()
        """Processor seconds of this thread while it computed."""
        self._latest_cpu_s = self._counted_cpu_s = 0.0
        self._steps = steps
        self._incoming = incoming
        self._outgoing = outgoing
        self._activity = activity
        self._cpu_clock = cpu_clock
        self._quota = quota
        self.ended = threading.Event()
        """Set once the last microbatch is computed, and when nobody is to wait for that any longer."""

    def run(self, after: threading.Event | None = None) -> None:
        """Compute until the link ends, or something fails. What computes is let go then, with its weights.

        Args:
            after: Set when the loop before it has ended; None without one.
        """
        try:
            self._run(after)
        finally:
            # The loop itself is kept for its figures: in a run with several plans, beside the next stage.
            self._steps = replace(self._steps, compute=_unchanged)

    def _run(self, after: threading.Event | None) -> None:
        if after is not None:
            after.wait()
        self.lane.begin()
        first = ThreadState.COMPUTE if self._steps.decode is None else ThreadState.DECODE
        while (packet := self._incoming.receive()) is not None:
            started = self.lane.enter(first)
            came = self._bytes(packet)
            try:
                with self._activity.busy(f"computing microbatch {packet.number}"):
                    packet = self._step(packet)  # the input is released while the link is full
            except PipeEdgeError as error:
                error.microbatch = packet.number
                raise
            except Exception as error:
                failure = PipeEdgeError(
                    f"microbatch {packet.number} could not be computed: {type(error).__name__}: {error}"
                )
                failure.microbatch = packet.number
                raise failure from error
            self._activity.computed(self.lane.enter(ThreadState.WAIT_LINK) - started)
            counts = self._steps.counts()
            self._counted_cpu_s += self._latest_cpu_s if counts else 0.0
            size = self._outgoing.send(packet, counts=counts)
            self.lane.finish(packet.number, packet.items, size, self._steps.bits(), came, counts=counts)
        self.ended.set()
        self._outgoing.finish()

    def _bytes(self, packet: Packet) -> int:
        """Return the bytes that arrived over the network, or 0 if the lane is not observed."""
        if self._incoming.peer is None or not self.lane.observed:
            return 0
        return sum(tensor.nbytes for tensor in packet.payload)

    def work(self) -> StageWork:
        """Return how the stage has spent its time so far."""
        totals = self.lane.totals()
        items, seconds = self.lane.finished()
        crossed = self._outgoing.crossed
        return StageWork(
            busy_s=sum(
                totals[doing] for doing in (ThreadState.DECODE, ThreadState.COMPUTE, ThreadState.ENCODE)
            ),
            wait_input_s=totals[ThreadState.WAIT_INPUT],
            wait_link_s=totals[ThreadState.WAIT_LINK],
            bits=round(self._steps.bits()),
            items=items,
            compute_s=seconds[ThreadState.COMPUTE],
            link_items=crossed.count,
            link_s=crossed.total,
            finished_s=sum(seconds.values()),
            cpu_s=self._counted_cpu_s,
            stretch=self._quota().stretch,
        )

    def _step(self, packet: Packet) -> Packet:
        if self._steps.decode is not None:
            packet = self._steps.decode(packet)
            self.lane.enter(ThreadState.COMPUTE)
        cpu_started = self._cpu_clock()
        packet = self._steps.compute(packet)
        self._latest_cpu_s = self._cpu_clock() - cpu_started
        self.compute_cpu_seconds.add(self._latest_cpu_s)
        if self._steps.encode is not None:
            self.lane.enter(ThreadState.ENCODE)
            packet = self._steps.encode(packet)
        return packet

    @property
    def busy_fraction(self) -> float:
        """Fraction of the time from the start to the last microbatch that was spent computing."""
        spent = sum(
            self.lane.tally(doing).total
            for doing in (ThreadState.DECODE, ThreadState.COMPUTE, ThreadState.ENCODE)
        )
        return min(1.0, spent / self.lane.run_s) if self.lane.run_s else 0.0
