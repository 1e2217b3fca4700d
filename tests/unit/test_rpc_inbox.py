"""The ends of links over RPC, joined without RPC, and the options of that transport."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.backpressure import FRAMES_IN_FLIGHT as WINDOW
from pipeedge.base.backpressure import LINK_WINDOW as QUEUE
from pipeedge.base.crew import Closed
from pipeedge.base.errors import PeerFailedError, RequestError
from pipeedge.base.payload import TensorSpec
from pipeedge.request.config import TransportRequest
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.transport.base import Link, Packet
from pipeedge.transport.frame import FrameError, Kind, frame_capacity, write_frame
from pipeedge.transport.rpc_links import RpcReceiver, RpcSender

SHAPE = (2, 3)
LINK = Link(1, 0, (TensorSpec(SHAPE, torch.float32),))


def frame(number: int, kind: Kind = Kind.MICROBATCH) -> torch.Tensor:
    buffer = torch.zeros(frame_capacity(LINK.specs), dtype=torch.uint8)
    payload = () if kind is Kind.END else (torch.full(SHAPE, float(number)),)
    length = write_frame(buffer, kind=kind, number=number, items=2, payload=payload)
    return buffer[:length]


# -- options --------------------------------------------------------------------------------------


def parsed(*options: str) -> TransportRequest:
    return parse_runtime(["0", "2", *options], Environment()).request.transport


def test_p2p_is_default_and_rpc_can_be_chosen() -> None:
    assert parsed() == TransportRequest("p2p", None)
    assert parsed("-c", "rpc", "-w", "6") == TransportRequest("rpc", 6)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("-w", "4"), "-c rpc"),
        (("-c", "p2p", "-w", "4"), "-c rpc"),
        (("-c", "rpc", "-w", "0"), "-w/--worker-threads 0"),
        (("-c", "rpc", "-w", "-3"), "-w/--worker-threads -3"),
        (("-c", "rpc", "-w", "100000"), "-w/--worker-threads 100000"),
        (("-c", "carrier-pigeon"), "carrier-pigeon"),
    ],
)
def test_invalid_thread_counts_are_refused(options: tuple[str, ...], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        parsed(*options)


# -- the inbox ------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(count=st.integers(0, 30), seed=st.integers(0, 2**32 - 1))
def test_frames_are_ordered_and_the_queue_is_bounded(count: int, seed: int) -> None:
    """The sender respects its window, the network reorders, and the stage takes frames at any time."""
    chance = random.Random(seed)
    receiver = RpcReceiver(LINK)
    to_send = [frame(number) for number in range(count)] + [frame(count, Kind.END)]
    travelling: list[torch.Tensor] = []
    unanswered: list[Any] = []
    arrived: set[int] = set()
    taken: list[int] = []
    sent, ended = 0, False
    while not ended:
        unanswered = [reply for reply in unanswered if not reply.done()]
        choices = []
        if sent < len(to_send) and len(unanswered) + len(travelling) < WINDOW:
            choices.append("send")
        if travelling:
            choices.append("arrive")
        if len(taken) in arrived:
            choices.append("take")
        assert choices, "everything waits for something: a reply was lost"
        choice = chance.choice(choices)
        if choice == "send":
            travelling.append(to_send[sent])
            sent += 1
        elif choice == "arrive":
            buffer = travelling.pop(chance.randrange(len(travelling)))
            number = next(n for n, candidate in enumerate(to_send) if candidate is buffer)
            reply = receiver.deliver(buffer)
            arrived.add(number)
            unanswered.append(reply)
            assert not reply.done() or reply.value() == ""
            assert len(arrived) - len(taken) <= QUEUE
        else:
            packet = receiver.receive()
            ended = packet is None
            if packet is not None:
                assert torch.equal(packet.payload[0], torch.full(SHAPE, float(len(taken))))
                taken.append(packet.number)
    assert taken == list(range(count))
    assert all(reply.done() and reply.value() == "" for reply in unanswered)


def test_reply_is_withheld_while_the_inbox_is_full() -> None:
    receiver = RpcReceiver(LINK)
    replies = [receiver.deliver(frame(number)) for number in range(QUEUE)]
    assert [reply.done() for reply in replies] == [True] * (QUEUE - WINDOW) + [False] * WINDOW
    receiver.receive()
    assert [reply.done() for reply in replies] == [True] * (QUEUE - WINDOW + 1) + [False] * (WINDOW - 1)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (torch.zeros(10_000, dtype=torch.uint8), "agreed capacity"),
        (torch.zeros(600, dtype=torch.uint8), "not a frame"),
        (torch.zeros(600, dtype=torch.float32), "not a frame"),
        (torch.zeros(30, 20, dtype=torch.uint8), "not a frame"),
        ("a string", "not a frame"),
        (frame(QUEUE), "expected 0"),
        (frame(2**63), "expected 0"),
    ],
)
def test_malformed_or_early_frame_fails_at_both_ends(what: Any, told: str) -> None:
    receiver = RpcReceiver(LINK)
    assert told in receiver.deliver(what).value()
    with pytest.raises(FrameError, match=told) as caught:
        receiver.receive()
    assert caught.value.peer == LINK.source


def test_duplicate_frame_number_is_refused() -> None:
    receiver = RpcReceiver(LINK)
    assert receiver.deliver(frame(1)).value() == ""
    assert "expected" in receiver.deliver(frame(1)).value()


def test_close_wakes_waiters_and_answers_late_frames() -> None:
    receiver = RpcReceiver(LINK)
    woken: Future[BaseException] = Future()

    def wait() -> None:
        try:
            receiver.receive()
        except BaseException as error:
            woken.set_result(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    receiver.close()
    assert isinstance(woken.result(60), Closed)
    assert receiver.deliver(frame(0)).value() == "the run has ended"


# -- one after the other in one process -----------------------------------------------------------


def test_close_answers_withheld_replies() -> None:
    receiver = RpcReceiver(LINK)
    replies = [receiver.deliver(frame(number)) for number in range(QUEUE)]
    receiver.close()
    assert [reply.value() for reply in replies] == [""] * (QUEUE - WINDOW) + ["the run has ended"] * WINDOW


# --- both ends together ---------------------------------------------------------------------------------


def packet(number: int) -> Packet:
    return Packet(number, 2, (torch.full(SHAPE, float(number)),))


def test_sender_fills_the_receiver_and_no_more() -> None:
    receiver = RpcReceiver(LINK)
    sender = RpcSender(LINK, lambda buffer: receiver.deliver(buffer.clone()))  # as the network copies it
    shipments = [sender.post(packet(number)) for number in range(QUEUE)]
    for shipment in shipments[: QUEUE - WINDOW]:
        shipment.wait()
    for number in range(WINDOW):
        received = receiver.receive()
        assert received is not None
        assert torch.equal(received.payload[0], torch.full(SHAPE, float(number)))
    for shipment in shipments:
        shipment.wait()


def test_refused_frame_fails_its_sender() -> None:
    receiver = RpcReceiver(LINK)
    receiver.close()
    with pytest.raises(PeerFailedError, match="rank 0 refused microbatch 0: the run has ended") as caught:
        RpcSender(LINK, receiver.deliver).post(packet(0)).wait()
    assert caught.value.peer == LINK.destination


@pytest.mark.parametrize("fails_at_once", [True, False])
def test_lost_connection_fails_the_sender(fails_at_once: bool) -> None:
    def deliver(buffer: torch.Tensor) -> Any:
        if fails_at_once:
            raise RuntimeError("broken pipe")
        future: Any = torch.futures.Future()
        future.set_exception(RuntimeError("broken pipe"))
        return future

    with pytest.raises(PeerFailedError, match=r"connection to rank 0 was lost while sending: .*broken pipe"):
        RpcSender(LINK, deliver).post(packet(0)).wait()
