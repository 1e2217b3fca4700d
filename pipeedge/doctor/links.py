"""Measuring a link as a run would use it: framed messages of several sizes, each answered.

    sender     frame of n bytes ──────────────────> receiver
               <────────────── an answer, small ───                t(n) = 2 * latency + n / bandwidth

The round trip is what one rank's clock can see. The line through t(n) is fitted by least squares of
*relative* errors, so that the small frames, which say the latency, count as much as the large ones, which
say the bandwidth. A link of a plan begins where the one before it ends, so ranks that take their links in
the plan's order measure one at a time, and wait for one another in the links themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pipeedge.payload import TensorSpec
from pipeedge.specs import Link as LinkSpec
from pipeedge.transport.base import Link, Packet, Transport

__all__ = ["LEAST_SIZES", "SIZES", "Sample", "answer_link", "fit_link", "measure_link"]

SIZES = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
"""Bytes of values in a frame."""
LEAST_SIZES = 5
"""Sizes that are measured however slow the link is."""
_REPEATS = 9
_ANSWER_BYTES = 1


@dataclass(frozen=True)
class Sample:
    """A frame's round trip."""

    bytes: int
    """On the wire, header included."""
    seconds: float
    """Lower quartile of the repetitions: what else the machines do only adds, and the best alone is luck."""


def fit_link(samples: Sequence[Sample]) -> LinkSpec:
    """Bandwidth and latency of the link that explains ``samples`` best.

    Minimises the sum of ((a + b n - t) / t)^2 over a and b, both at least 0: bandwidth 1/b, latency a/2.
    """
    if len({sample.bytes for sample in samples}) < 2:
        raise ValueError("a line takes at least two sizes")
    weights = [1 / sample.seconds**2 for sample in samples]
    sizes = [sample.bytes for sample in samples]
    times = [sample.seconds for sample in samples]

    def total(*factors: Sequence[float]) -> float:
        return sum(
            weight * _product(values)
            for weight, values in zip(weights, zip(*factors, strict=True), strict=True)
        )

    ones = [1.0] * len(samples)
    s, sn, snn = total(ones), total(sizes), total(sizes, sizes)
    st, snt = total(times), total(sizes, times)
    slope = (s * snt - sn * st) / (s * snn - sn * sn)
    intercept = (st - slope * sn) / s
    if intercept < 0:
        intercept, slope = 0.0, snt / snn
    if slope <= 0:  # noise larger than the time that the bytes take; the largest frame bounds it
        largest = max(samples, key=lambda sample: sample.bytes)
        slope = largest.seconds / largest.bytes
    return LinkSpec(bw_bytes_per_s=1 / slope, latency_s=intercept / 2)


def _product(values: Sequence[float]) -> float:
    product = 1.0
    for value in values:
        product *= value
    return product


def measure_link(
    transport: Transport,
    source: int,
    destination: int,
    *,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Sample]:
    """The sending end: round trips of frames of each size.

    After ``LEAST_SIZES`` sizes no further one is begun once ``budget_s`` is over.
    """
    forward, back = _links(source, destination)
    sender, answers = transport.sender(forward), transport.receiver(back)
    values = torch.zeros(SIZES[-1], dtype=torch.uint8)
    number = 0

    def round_trip(size: int) -> tuple[int, float]:
        nonlocal number
        started = clock()
        shipment = sender.post(Packet(number, 1, (values[:size],)))
        answer = answers.receive()
        seconds = clock() - started
        if answer is not None:
            answer.lease.release()
        number += 1
        return shipment.bytes, seconds

    began = clock()
    round_trip(SIZES[0])  # the first one opens the connection
    samples: list[Sample] = []
    for size in SIZES:
        if len(samples) >= LEAST_SIZES and clock() - began > budget_s:
            break
        trips = [round_trip(size)]
        while len(trips) < _REPEATS and clock() - began <= budget_s:
            trips.append(round_trip(size))
        seconds = sorted(taken for _, taken in trips)
        samples.append(Sample(trips[0][0], seconds[len(seconds) // 4]))
    sender.finish()
    answers.receive()
    return samples


def answer_link(transport: Transport, source: int, destination: int) -> None:
    """The receiving end: answers until the sending end has finished."""
    forward, back = _links(source, destination)
    receiver, answers = transport.receiver(forward), transport.sender(back)
    answer = torch.zeros(_ANSWER_BYTES, dtype=torch.uint8)
    while (packet := receiver.receive()) is not None:
        answers.post(Packet(packet.number, 1, (answer,)))
        packet.lease.release()
    answers.finish()


def _links(source: int, destination: int) -> tuple[Link, Link]:
    forward = Link(source, destination, (TensorSpec((SIZES[-1],), torch.uint8),))
    return forward, Link(destination, source, (TensorSpec((_ANSWER_BYTES,), torch.uint8),))
