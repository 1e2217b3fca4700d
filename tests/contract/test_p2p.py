"""Test links over gloo with a replaced group: failures of gloo, and the ownership of buffers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from waiting import LIMIT_S

from pipeedge.base.errors import PeerFailedError
from pipeedge.base.payload import TensorSpec
from pipeedge.transport.base import Link, Packet
from pipeedge.transport.frame import FrameError
from pipeedge.transport.p2p_links import P2PReceiver, P2PSender, P2PShipment, brief

LINK = Link(3, 5, (TensorSpec((2, 3), torch.float32),))
CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.1]:4"


class Work:
    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.wait = wait


class Wire:
    """A group of two that returns what is sent, and can be made to fail."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.posted = 0
        self.broken = False

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        self._check()
        self.sent.append(bytes(tensors[0].tolist()))
        return Work(self._check)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        self._check()
        place = self.posted
        self.posted += 1

        def wait() -> None:
            self._check()
            data = self.sent[place]
            tensors[0][: len(data)] = torch.tensor(list(data), dtype=torch.uint8)

        return Work(wait)

    def _check(self) -> None:
        if self.broken:
            raise RuntimeError(CLOSED)


def packet(number: int, value: float = 0.0) -> Packet:
    return Packet(number, 2, (torch.full((2, 3), value),))


def test_packets_arrive_in_order_and_end() -> None:
    wire = Wire()
    sender, receiver = P2PSender(wire, 1, LINK), P2PReceiver(wire, 0, LINK)
    for number in range(5):
        assert sender.post(packet(number, number)).bytes == len(wire.sent[number])
    sender.finish()
    for number in range(5):
        got = receiver.receive()
        assert got is not None
        assert (got.number, got.items, got.payload[0].tolist()) == (number, 2, [[number] * 3] * 2)
        got.lease.release()
    assert receiver.receive() is None
    assert wire.posted == len(wire.sent)  # no receive is left behind


def test_two_receives_stay_posted_while_a_packet_is_processed() -> None:
    wire = Wire()
    sender, receiver = P2PSender(wire, 1, LINK), P2PReceiver(wire, 0, LINK)
    for number in range(3):
        sender.post(packet(number, number))
        got = receiver.receive()
        assert got is not None
        assert wire.posted - len(wire.sent) == 2


def test_buffer_is_reused_only_after_release() -> None:
    wire = Wire()
    sender, receiver = P2PSender(wire, 1, LINK), P2PReceiver(wire, 0, LINK)
    for number in range(6):
        sender.post(packet(number, number))
    kept = [receiver.receive() for _ in range(4)]
    assert [got.payload[0][0, 0].item() for got in kept if got is not None] == [0, 1, 2, 3]


def test_reserved_memory_is_sent_without_copying() -> None:
    wire = Wire()
    sender, receiver = P2PSender(wire, 1, LINK), P2PReceiver(wire, 0, LINK)
    places = set()
    for number in range(6):
        reserved = sender.reserve(LINK.specs)
        (tensor,) = reserved.payload
        assert (tensor.shape, tensor.dtype) == (LINK.specs[0].shape, LINK.specs[0].dtype)
        tensor.fill_(number)
        places.add(tensor.data_ptr())
        sender.post(Packet(number, 2, reserved.payload, reserved.lease))
        got = receiver.receive()
        assert got is not None
        assert got.payload[0].tolist() == [[number] * 3] * 2
        got.lease.release()
    assert len(places) == 2  # two frames serve for all of them
    sender.finish()


def test_unused_reservation_is_returned_or_copied() -> None:
    wire, other = Wire(), Wire()
    sender = P2PSender(wire, 1, LINK)
    for _ in range(5):
        sender.reserve(LINK.specs).lease.release()
    reserved = sender.reserve(LINK.specs)
    reserved.payload[0].fill_(7.0)
    P2PSender(other, 1, LINK).post(Packet(0, 2, reserved.payload, reserved.lease))  # of another link
    received = P2PReceiver(other, 0, LINK).receive()
    assert received is not None
    assert received.payload[0].tolist() == [[7.0] * 3] * 2
    for number in range(4):  # both frames of the first are free again
        sender.post(packet(number, number))


def test_payload_beyond_the_capacity_is_not_reserved() -> None:
    with pytest.raises(ValueError, match="does not fit the agreed"):
        P2PSender(Wire(), 1, LINK).reserve((TensorSpec((200, 3), torch.float32),))


def test_out_of_order_packet_is_refused() -> None:
    wire = Wire()
    sender, receiver = P2PSender(wire, 1, LINK), P2PReceiver(wire, 0, LINK)
    sender.post(packet(1))
    with pytest.raises(FrameError, match="from rank 3: received microbatch 1, expected 0") as caught:
        receiver.receive()
    assert caught.value.peer == 3


def test_gloo_failure_is_reported_as_loss_of_the_peer() -> None:
    for step in ("send", "arrive", "receive", "post"):
        wire = Wire()
        sender, receiver = P2PSender(wire, 1, LINK), P2PReceiver(wire, 0, LINK)
        steps: dict[str, Callable[[], Any]] = {
            "send": lambda sender=sender: sender.post(packet(0)),
            "arrive": sender.post(packet(0)).wait,
            "receive": receiver.receive,
            "post": lambda wire=wire: P2PReceiver(wire, 0, LINK),
        }
        wire.broken = True
        with pytest.raises(PeerFailedError) as caught:
            steps[step]()
        assert caught.value.peer == (5 if step in ("send", "arrive") else 3)
        assert str(caught.value).endswith("ing: Connection closed by peer [10.0.0.1]:4")


def test_second_waiter_sees_released_buffer() -> None:
    """One thread measures, another needs the buffer: both wait until it is released."""
    given_back: list[int] = []
    arrived, giving = threading.Event(), threading.Event()

    def give_back() -> None:
        giving.set()
        threading.Event().wait(0.1)  # the other thread is tried hard
        given_back.append(1)

    shipment = P2PShipment(Work(lambda: arrived.wait(LIMIT_S)), LINK, 10, give_back)
    first = threading.Thread(target=shipment.wait, daemon=True)
    first.start()
    arrived.set()
    assert giving.wait(LIMIT_S)
    shipment.wait()
    assert given_back == [1]
    first.join(LIMIT_S)
    assert given_back == [1]


def test_gloo_messages_are_shortened() -> None:
    assert brief(RuntimeError(CLOSED)) == "Connection closed by peer [10.0.0.1]:4"
    noisy = "[a/b.cc:1] Gloo connectFullMesh failed with [c/d.cc:31] no error. GLHF!\nmore"
    assert brief(RuntimeError(noisy)) == "Gloo connectFullMesh failed with no error"
