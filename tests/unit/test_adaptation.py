"""Test adaptive links: decisions on a simulated link, receipts, and real ranks."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clock import Clock
from hypothesis import given
from hypothesis import strategies as st
from waiting import LIMIT_S

from pipeedge.base.fields import decode, encode
from pipeedge.base.payload import TensorSpec
from pipeedge.compress.adaptation import AdaptiveBits, FixedBits, LinkContext
from pipeedge.compress.policies import Auto, Decided, Decision, Policy, Sizes, State, Window
from pipeedge.run.activity import Activity
from pipeedge.run.worker import Outgoing, SendingEnd
from pipeedge.transport.base import Link, Packet, Receipt
from pipeedge.transport.frame import FrameBuffer, FrameError, Kind
from pipeedge.transport.p2p_links import P2PSender, ReceiptingReceiver
from pipeedge.transport.rpc_links import RpcReceiver

SIZES = Sizes({2: 100.0, 4: 200.0, 8: 400.0, 0: 1600.0})


# --- what a receipt tells -------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32 - 1), bandwidth=st.floats(1.0, 1e4), slow=st.sampled_from(["way", "next", "no"])
)
def test_receipts_distinguish_slow_link_from_slow_stage(seed: int, bandwidth: float, slow: str) -> None:
    """A link of known bandwidth, simulated packet by packet with two receives posted at the far end: what
    the receipts say is what each packet took on the wire, whoever else is slow, on clocks that disagree."""
    chance = random.Random(seed)
    offset, size = chance.uniform(-1e6, 1e6), 1000.0
    wire_s = size / bandwidth
    period_s = {"way": 0.0, "next": 0.0, "no": 3 * wire_s}[slow]
    stage_s = {"way": 0.1 * wire_s, "next": 4 * wire_s, "no": 0.5 * wire_s}[slow]
    posted_at = room_at = arrived_at = before = 0.0
    taken: deque[float] = deque([0.0, 0.0])  # when each of the two receives was posted
    stage_free = 0.0
    for number in range(20):
        posted_at = max(posted_at + period_s * chance.uniform(0.9, 1.1), room_at)
        credit = taken.popleft()
        begin = max(posted_at, credit, arrived_at)
        before, arrived_at = arrived_at, begin + wire_s
        stage_free = max(stage_free, arrived_at) + stage_s
        taken.append(stage_free - stage_s)  # posted again when the stage takes it
        room_at = begin  # one more may be posted while this one is on its way
        receipt = Receipt((arrived_at + offset) - max(before + offset if number else -1e9, credit + offset))
        way_s = arrived_at - posted_at
        assert receipt.link_seconds(way_s) == pytest.approx(wire_s, rel=1e-3, abs=1e-8)


def test_link_seconds_are_never_negative() -> None:
    assert Receipt(1.0, held_s=3.0).link_seconds(2.9) == 0.0
    assert Receipt(float("inf")).link_seconds(2.0) == 2.0
    assert Receipt(1.0, held_s=0.5).link_seconds(2.0) == 1.0


class Group:
    """A gloo group of two ranks in memory: messages by tag; a send completes at once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sent: dict[int, deque[torch.Tensor]] = {0: deque(), 1: deque()}

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        with self._changed:
            self._sent[tag].append(tensors[0].clone())
            self._changed.notify_all()
        return Done(lambda: None)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        def wait() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: self._sent[tag], LIMIT_S)
                message = self._sent[tag].popleft()
            tensors[0][: message.numel()] = message

        return Done(wait)


class Done:
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


LINK = Link(0, 1, (TensorSpec((4,), torch.float32),), receipts=True)


def packet(number: int) -> Packet:
    return Packet(number, 2, (torch.full((4,), float(number)),))


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_packets_arrive_in_order_and_each_is_receipted(count: int) -> None:
    group = Group()
    receiver = ReceiptingReceiver(group, 0, LINK)
    arrived: list[tuple[int, int, float]] = []
    sender = P2PSender(group, 1, LINK)
    end = SendingEnd(sender, 1, receipts=True)
    outgoing = Outgoing(end, Activity(), arrived=lambda *what: arrived.append(what))

    def send() -> None:
        for number in range(count):
            outgoing.send(packet(number))
        outgoing.finish()

    threads = [threading.Thread(target=work, daemon=True) for work in (receiver.run, outgoing.run, send)]
    for thread in threads:
        thread.start()
    for number in range(count):
        got = receiver.receive()
        assert got is not None
        assert (got.number, got.payload[0].tolist()) == (number, [number] * 4)
        got.lease.release()
    assert receiver.receive() is None
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert (outgoing.link_s is None) == (count == 0)
    assert 0 <= (outgoing.link_s or 0.0) < LIMIT_S
    assert [(number, size > 0, 0 <= seconds < LIMIT_S) for number, size, seconds in arrived] == [
        (number, True, True) for number in range(count)
    ]
    assert outgoing.seconds.count == count


def test_invalid_receipt_is_refused() -> None:
    group = Group()
    shipment = P2PSender(group, 1, LINK).post(packet(0))
    group.send([torch.tensor([float("nan")], dtype=torch.float64)], 0, 1)
    with pytest.raises(FrameError, match="from rank 1: a packet took nan s"):
        shipment.receipt()


def test_rpc_reply_reports_transfer_and_hold_times() -> None:
    clock = Clock()
    receiver = RpcReceiver(LINK, clock)
    replies = []
    for number in range(4):
        clock.now = float(10 * number * number)
        buffer = FrameBuffer(4096)
        replies.append(
            receiver.deliver(
                buffer.write(kind=Kind.MICROBATCH, number=number, items=2, payload=packet(number).payload)
            )
        )
    assert [reply.value() for reply in replies[:2]] == [(float("inf"), 0.0), (10.0, 0.0)]
    assert not replies[2].done()
    clock.now = 47.0
    receiver.receive()
    assert replies[2].value() == (30.0, 7.0)


# --- decisions --------------------------------------------------------------------------------------------


class ToyLink:
    """A stage that computes for ``compute_s`` and a link of ``pace``, one microbatch after the other."""

    def __init__(self, bits: AdaptiveBits, clock: Clock, fill: float = 1.0) -> None:
        self.bits, self.clock, self.fill = bits, clock, fill
        self.number = 0

    def run(self, count: int, pace: float) -> list[int]:
        used = []
        for _ in range(count):
            bits = self.bits(self.number, 8)
            size = int(SIZES.bytes_at[bits] * self.fill)
            self.clock.now += size / pace
            self.bits.arrived(self.number, size, size / pace)
            self.number += 1
            used.append(bits)
        return used


def adaptive(
    policy: Callable[[Sizes], Policy] = Auto, window: int = 6, slowest_s: float = 1.0, first: int = 0
) -> tuple[AdaptiveBits, Clock, list[str]]:
    clock, told = Clock(), []
    bits = AdaptiveBits(
        policy,
        SIZES,
        window=window,
        first_bits=first,
        context=LinkContext(lambda: slowest_s, clock, told.append),
    )
    return bits, clock, told


def test_bits_follow_the_bandwidth_at_the_ends_of_windows_and_back() -> None:
    bits, clock, told = adaptive()
    link = ToyLink(bits, clock)
    assert link.run(3, 1e6) == [0] * 3  # a short window, because nothing is known
    assert link.run(6, 1e6) == [0] * 6
    # Twice in a row far slower than counted on: not the whole window goes with codes that are too wide.
    assert link.run(6, 500.0) == [0, 0, 8, 8, 8, 8]
    assert link.run(8, 300.0) == [8, 8, 4, 4, 4, 4, 4, 4]
    assert link.run(7, 1e6) == [4] * 6 + [0]  # bits come back when a window ends
    assert [line.split(":")[0] for line in told[:2]] == [
        "8 bits from microbatch 11 on, uncompressed values before",
        "4 bits from microbatch 17 on, 8 bits before",
    ]
    changes = [one.bits for one in bits.decided]
    assert changes[0] == 0
    assert changes[-1] == 0
    assert {0, 8, 4} == set(changes)
    assert [one.time_s for one in bits.decided] == sorted(one.time_s for one in bits.decided)
    assert all(decode(encode(one), Decided) == one for one in bits.decided)


@given(
    trace=st.lists(st.floats(110.0, 1e7), min_size=1, max_size=6),
    window=st.integers(1, 12),
    fill=st.sampled_from([1.0, 0.5, 0.25]),
)
def test_auto_is_never_the_bottleneck_for_longer_than_a_window(
    trace: list[float], window: int, fill: float
) -> None:
    """It also uses no fewer bits than necessary, even if microbatches are smaller than the largest."""
    bits, clock, _ = adaptive(window=window)
    link = ToyLink(bits, clock, fill)
    for pace in trace:
        link.run(2 * window + 3, pace)  # what began under the last pace, and a whole window
        used = link.run(1, pace)[0]
        seconds = {width: fill * SIZES.bytes_at[width] / pace for width in SIZES.widths}
        fits = [width for width in SIZES.widths if seconds[width] <= 0.97] or [2]
        assert seconds[used] <= 0.97 or used == 2
        comfortable = [width for width in SIZES.widths if seconds[width] <= 0.80]
        if comfortable:
            assert SIZES.widths.index(comfortable[-1]) <= SIZES.widths.index(used)
        assert SIZES.widths.index(used) <= SIZES.widths.index(fits[-1])


def test_first_decision_follows_the_first_measurement() -> None:
    known = [0.0]
    clock, told = Clock(), []
    bits = AdaptiveBits(
        Auto,
        SIZES,
        window=50,
        first_bits=0,
        context=LinkContext(lambda: known[0], clock, told.append),
    )
    link = ToyLink(bits, clock)
    assert link.run(9, 500.0) == [0] * 9
    known[0] = 1.0
    assert link.run(2, 500.0) == [8, 8]
    assert len(told) == 1


def test_window_without_arrivals_keeps_the_bits() -> None:
    bits, _, _ = adaptive(first=4)
    assert [bits(number, 8) for number in range(20)] == [4] * 20
    assert {one.bytes_per_s for one in bits.decided} == {None}


class Turns:
    """A policy that splits every window, and remembers what it was given."""

    def __init__(self, windows: list[Window]) -> None:
        self._windows = windows

    def start(self) -> State:
        return State(Decision.all(0, "start"))

    def decide(self, state: State, window: Window) -> State:
        self._windows.append(window)
        return State(Decision(8, 2, 4, "turns"))


def test_split_window_is_logged_once() -> None:
    windows: list[Window] = []
    bits, clock, told = adaptive(lambda sizes: Turns(windows), window=5)
    link = ToyLink(bits, clock)
    assert link.run(13, 800.0) == [0, 0, 0] + [8, 8, 4, 4, 4] * 2
    assert [(one.number, one.microbatches, one.next_microbatches, one.items) for one in windows] == [
        (0, 3, 5, 8.0),
        (1, 5, 5, 8.0),
    ]
    assert told == ["8 bits and 4 bits in turns from microbatch 3 on, uncompressed values before: turns"]


def test_first_bits_must_be_an_allowed_width() -> None:
    with pytest.raises(ValueError, match="3 bits"):
        adaptive(first=3)
    assert FixedBits(5)(17, 8) == 5
