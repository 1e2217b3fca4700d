"""Measure the time that a stage spends on a microbatch besides its layers: receiving and sending it.

    frame ──read──> (to the GPU) ──> layers ──> (from the GPU) ──write──> frame
    `------- receive ----------'               `------------- send ----------'

The thread that computes also reads and writes frames and copies to a GPU, which is measured here. What moves
the frames to and from the network depends on the transport (``transport_costs``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pipeedge.base.payload import Payload, TensorSpec
from pipeedge.transport.frame import FrameBuffer, Kind, frame_capacity

__all__ = ["Handling", "distinct", "measure_handling"]

_REPEATS = 7


@dataclass(frozen=True)
class Handling:
    """Processor time to receive and send one microbatch."""

    receive_s: float
    """Seconds to receive it."""
    send_s: float
    """Seconds to send it."""


def measure_handling(
    specs: tuple[TensorSpec, ...],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    stretch: float = 1.0,
) -> Handling:
    """Measure the processor time to receive and to send a payload of ``specs``.

    Args:
        specs: Tensors of the payload.
        device: Device on which the stage computes.
        clock: Returns the time in seconds.
        stretch: Elapsed seconds per second of ``clock``.
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

    with torch.inference_mode():
        send_s = stretch * _median(send, clock)
        receive_s = stretch * _median(receive, clock)
    return Handling(receive_s=receive_s, send_s=send_s)


def _median(work: Callable[[], None], clock: Callable[[], float]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        began = clock()
        work()
        times.append(clock() - began)
    return statistics.median(times)


def distinct(specs: Sequence[tuple[TensorSpec, ...]]) -> list[tuple[TensorSpec, ...]]:
    """Return ``specs`` without repetitions, in order; most cuts of a model have the same."""
    return list(dict.fromkeys(specs))
