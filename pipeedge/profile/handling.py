"""Measure the time that a stage spends on a microbatch besides its layers: receiving and sending it.

    wire ──> frame ──read──> (to the GPU) ──> layers ──> (from the GPU) ──write──> frame ──> wire
    `------- receive -------------------'               `------------- send -------------------'

The thread that computes also reads and writes frames and copies to a GPU. Another thread moves bytes to and
from the network, which costs the stage time only if no processor is left for it. That part is measured
through this machine's own network stack, which does about the same work for a real interface.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pipeedge.base.payload import Payload, TensorSpec, specs_bytes
from pipeedge.transport.frame import FrameBuffer, Kind, frame_capacity

__all__ = ["Handling", "Wire", "measure_handling", "measure_wire"]

_REPEATS = 7
_WIRE_BYTES = 4 << 20
_WIRE_PIECE = 64 << 10
_WIRE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Handling:
    """Processor time to receive and send one microbatch."""

    receive_s: float
    """Seconds to receive it."""
    send_s: float
    """Seconds to send it."""


@dataclass(frozen=True)
class Wire:
    """Processor time to move a byte from and to the network."""

    receive_s_per_byte: float = 0.0
    """Seconds to receive a byte."""
    send_s_per_byte: float = 0.0
    """Seconds to send a byte."""


def measure_handling(
    specs: tuple[TensorSpec, ...],
    device: torch.device,
    wire: Wire,
    clock: Callable[[], float] = time.perf_counter,
    stretch: float = 1.0,
) -> Handling:
    """Measure the processor time to receive and to send a payload of ``specs``.

    Args:
        specs: tensors of the payload.
        device: device on which the stage computes.
        wire: additional cost of each byte.
        clock: returns the time in seconds.
        stretch: elapsed seconds per second of ``clock``.
    """
    buffer = FrameBuffer(frame_capacity(specs))
    made: Payload = tuple(torch.ones(spec.shape, dtype=spec.dtype, device=device) for spec in specs)

    def send() -> None:
        payload = tuple(tensor.to("cpu") for tensor in made)
        buffer.write(kind=Kind.MICROBATCH, number=0, items=1, payload=payload)

    def receive() -> None:
        for tensor in buffer.read().payload:
            tensor.to(device)
        if device.type == "cuda":
            torch.cuda.synchronize()

    size = specs_bytes(specs)
    with torch.inference_mode():
        send_s = stretch * _median(send, clock)
        receive_s = stretch * _median(receive, clock)
    return Handling(
        receive_s=receive_s + wire.receive_s_per_byte * size, send_s=send_s + wire.send_s_per_byte * size
    )


def _median(work: Callable[[], None], clock: Callable[[], float]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        began = clock()
        work()
        times.append(clock() - began)
    return statistics.median(times)


def measure_wire(stretch: float = 1.0) -> Wire:
    """Measure the processor time to send and receive the bytes of a frame, over the loopback interface.

    The frame is sent in pieces of the size in which a kernel delivers data, each after the previous one was
    received, because on a network each piece wakes the receiver. Sent at once they would cost a third.

    Args:
        stretch: elapsed seconds per second of processor time.
    """
    spent: list[float] = []
    failures: list[OSError] = []
    taken = threading.Semaphore(0)
    pieces = [slice(first, first + _WIRE_PIECE) for first in range(0, _WIRE_BYTES, _WIRE_PIECE)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_WIRE_TIMEOUT_S)
        with socket.create_connection(listener.getsockname(), timeout=_WIRE_TIMEOUT_S) as sender:
            receiver, _ = listener.accept()
            with receiver:
                receiver.settimeout(_WIRE_TIMEOUT_S)

                def receive() -> None:
                    memory = memoryview(bytearray(_WIRE_BYTES))
                    began = time.thread_time()
                    try:
                        for piece in pieces:
                            _receive_into(receiver, memory[piece])
                            taken.release()
                    except OSError as error:
                        failures.append(error)
                    spent.append(time.thread_time() - began)

                thread = threading.Thread(target=receive)
                thread.start()
                message = memoryview(bytes(_WIRE_BYTES))
                began = time.thread_time()
                for piece in pieces:
                    sender.sendall(message[piece])
                    if not taken.acquire(timeout=_WIRE_TIMEOUT_S):
                        break  # the other thread has failed, and reports it
                sending = time.thread_time() - began
                thread.join()
    if failures:
        raise failures[0]
    return Wire(
        receive_s_per_byte=stretch * spent[0] / _WIRE_BYTES, send_s_per_byte=stretch * sending / _WIRE_BYTES
    )


def _receive_into(connection: socket.socket, memory: memoryview) -> None:
    received = 0
    while received < len(memory):
        count = connection.recv_into(memory[received:])
        if not count:
            raise ConnectionResetError("the connection closed in the middle of a message")
        received += count


def distinct(specs: Sequence[tuple[TensorSpec, ...]]) -> list[tuple[TensorSpec, ...]]:
    """Return ``specs`` without repetitions, in order; most cuts of a model have the same."""
    return list(dict.fromkeys(specs))
