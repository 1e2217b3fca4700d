"""Measure a link as a run would use it, with framed messages that are each answered.

    sender     frame of n bytes ──────────────────> receiver
               <────────────── an answer, small ───                t(n) = 2 * latency + n / bandwidth

Only the round trip can be measured with a single rank's clock. The size of the frames depends on the link:
they grow until one takes long enough to be measured well. A link of a plan begins where the previous one
ends, so ranks that take their links in the plan's order measure one at a time, and wait for each other in
the links themselves. The links are measured in several passes, so that a short disturbance does not spoil
all measurements of one link.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pipeedge.base.payload import TensorSpec
from pipeedge.plan.link_speed import SMALL, Round, Trip, large_enough, measure_rounds
from pipeedge.transport.base import Link, Packet, Transport

__all__ = ["PASSES", "LinkMeter", "answer_link"]

PASSES = 3
"""Number of times that all links of a plan are measured."""
LEAST, MOST = 64 << 10, 4 << 20
"""Range of the whole frame's size in bytes. A quarter of the least is as long as the burst of a slow link."""
_LONG_ENOUGH_S = 0.06
"""Seconds that a frame must take to be measured well."""
_ROUNDS = 5
"""Maximum number of rounds in a pass."""
_ANSWER_BYTES = 1


class LinkMeter:
    """Measures a link from its sending end, pass by pass.

    Args:
        source: Rank that sends.
        destination: Rank that answers.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, source: int, destination: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.rounds: list[Round] = []
        """All measurements so far."""
        self._ends = _links(source, destination)
        self._clock = clock
        self._size = 0

    def measure(self, transport: Transport, budget_s: float) -> None:
        """Measure the link for about ``budget_s``, but at least once."""
        forward, back = self._ends
        sender, answers = transport.sender(forward), transport.receiver(back)
        values = torch.zeros(MOST, dtype=torch.uint8)
        number = 0

        def round_trip(size: int) -> Trip:
            nonlocal number
            started = self._clock()
            shipment = sender.post(Packet(number, 1, (values[:size],)))
            answer = answers.receive()
            seconds = self._clock() - started
            if answer is not None:
                answer.lease.release()
            number += 1
            return Trip(shipment.bytes, seconds)

        began = self._clock()
        round_trip(SMALL)  # the first one opens the connection
        if not self._size:
            self._size = large_enough(round_trip, LEAST, MOST, _LONG_ENOUGH_S)
        self.rounds += measure_rounds(
            round_trip, self._size, _ROUNDS, lambda: self._clock() - began > budget_s
        )
        sender.finish()
        answers.receive()


def answer_link(transport: Transport, source: int, destination: int) -> None:
    """Answer frames at the receiving end until the sending end has finished a pass."""
    forward, back = _links(source, destination)
    receiver, answers = transport.receiver(forward), transport.sender(back)
    answer = torch.zeros(_ANSWER_BYTES, dtype=torch.uint8)
    while (packet := receiver.receive()) is not None:
        answers.post(Packet(packet.number, 1, (answer,)))
        packet.lease.release()
    answers.finish()


def _links(source: int, destination: int) -> tuple[Link, Link]:
    forward = Link(source, destination, (TensorSpec((MOST,), torch.uint8),))
    return forward, Link(destination, source, (TensorSpec((_ANSWER_BYTES,), torch.uint8),))
