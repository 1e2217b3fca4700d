"""Measure what each transport costs a stage, besides reading and writing its frames.

    frame in memory ──> [send: the loop of a stage] ──link──> [receive] ──> memory released

Both ends are in this process and use the runtime's own transports and threads, over the loopback interface,
which costs a processor about as much as a real one. Frames of two sizes show what a frame costs and what a
byte does. Only processor time counts, so waiting for the other end does not.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from pipeedge.base.crew import Crew
from pipeedge.base.errors import PipeEdgeError
from pipeedge.base.payload import TensorSpec
from pipeedge.plan.specs import TransportHandling
from pipeedge.profile.handling import measure_handling
from pipeedge.request.config import TransportRequest
from pipeedge.run.activity import Activity
from pipeedge.run.worker import Incoming, Outgoing, SendingEnd, StageLoop, StageSteps
from pipeedge.transport.base import Link, Packet, Rendezvous, Transport
from pipeedge.transport.choice import make_endpoint
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import make_key

__all__ = ["measure_transports", "open_ends"]

_ADDR = "127.0.0.1"
_TIMEOUT_S = 20.0
_SIZES = {4 << 10: 150, 1 << 20: 40}
"""Number of frames to send of each size in bytes."""
_ROUNDS = 3


@dataclass(frozen=True)
class _Costs:
    """Seconds of a processor for one frame."""

    send_s: float
    receive_s: float


def measure_transports(
    names: Sequence[str], *, whole_process: bool, stretch: float = 1.0
) -> dict[str, TransportHandling]:
    """Return the costs of transports for a stage on this machine, without those that it does not have.

    Args:
        names: Transports, as in ``request.config.TRANSPORTS``.
        whole_process: Whether the threads that move bytes to and from the network also take time from a
            stage, because no processor is left for them.
        stretch: Elapsed seconds per second of processor time.
    """
    found = {}
    for name in names:
        with contextlib.suppress(PipeEdgeError):  # torch was built without it, or the machine forbids it
            found[name] = _measure(name, whole_process=whole_process, stretch=stretch)
    return found


def _measure(name: str, *, whole_process: bool, stretch: float) -> TransportHandling:
    with open_ends(name) as (sending, receiving, link):
        costs = {}
        for size, count in _SIZES.items():
            one = Link(*link, (TensorSpec((1, size), torch.uint8),))
            _relay(sending, receiving, one, 1, whole_process=whole_process)  # warms up
            rounds = [
                _relay(sending, receiving, one, count, whole_process=whole_process) for _ in range(_ROUNDS)
            ]
            costs[size] = _Costs(
                statistics.median(each.send_s for each in rounds),
                statistics.median(each.receive_s for each in rounds),
            )
    (small, few), (large, many) = costs.items()
    # A profile has the costs of frames themselves already.
    frame = measure_handling((TensorSpec((1, small), torch.uint8),), torch.device("cpu"))
    send_s, send_s_per_byte = _line(small, few.send_s - frame.send_s, large, many.send_s - frame.send_s)
    receive_s, receive_s_per_byte = _line(
        small, few.receive_s - frame.receive_s, large, many.receive_s - frame.receive_s
    )
    return TransportHandling(
        receive_s=stretch * receive_s,
        receive_s_per_byte=stretch * receive_s_per_byte,
        send_s=stretch * send_s,
        send_s_per_byte=stretch * send_s_per_byte,
    )


def _line(small: int, small_s: float, large: int, large_s: float) -> tuple[float, float]:
    """Return the seconds of an empty frame, and of each byte, neither of them negative."""
    per_byte = max(0.0, (large_s - small_s) / (large - small))
    return max(0.0, small_s - small * per_byte), per_byte


@contextlib.contextmanager
def open_ends(name: str) -> Iterator[tuple[Transport, Transport, tuple[int, int]]]:
    """Open a transport twice, for the ranks 0 and 1; RPC, which a process has only once, for rank 0 alone."""
    comm, _, secured = name.partition("-")
    request = TransportRequest(comm)
    membership = Membership.from_text(make_key(), "profile") if secured else None
    ranks = (0,) if comm == "rpc" else (0, 1)
    with contextlib.ExitStack() as stack:
        endpoints = [
            stack.enter_context(contextlib.closing(make_endpoint(request, rank, _ADDR, membership)))
            for rank in ranks
        ]
        places = {rank: one.listen(_ADDR) for rank, one in zip(ranks, endpoints, strict=True)}
        listening = {rank: place for rank, place in places.items() if place is not None}
        rendezvous = Rendezvous(_ADDR, ranks, listening, _TIMEOUT_S)
        transports = [one.transport() for one in endpoints]
        _together([lambda one=one: one.open(rendezvous) for one in transports])  # type: ignore[misc]
        try:
            yield transports[0], transports[-1], (ranks[0], ranks[-1])
        except BaseException:
            for one in transports:
                one.abort()
            raise
        finally:
            _together([one.close for one in transports])


def _together(calls: Sequence[Callable[[], None]]) -> None:
    """Make several calls at once, and raise what one of them raises."""
    crew = Crew()
    for call in calls:
        crew.start("transport", call)
    crew.wait()


def _relay(
    sending: Transport, receiving: Transport, link: Link, count: int, *, whole_process: bool
) -> _Costs:
    """Send ``count`` frames as a stage does, and return the mean costs of one."""
    activity = Activity()
    outgoing = Outgoing(SendingEnd(sending.sender(link), link.destination), activity)
    incoming = Incoming(receiving.receiver(link), link.source, activity)
    spent = {}

    def reserved(packet: Packet) -> Packet:
        memory = outgoing.reserve(link.specs)
        return Packet(packet.number, packet.items, memory.payload, memory.lease)

    stage = StageLoop(StageSteps(reserved), Incoming(_Source(count), None, activity), outgoing, activity)

    def send() -> None:
        began = time.thread_time()
        stage.run()
        spent["send"] = time.thread_time() - began

    def receive() -> None:
        began = time.thread_time()
        while (packet := incoming.receive()) is not None:
            packet.lease.release()
        spent["receive"] = time.thread_time() - began

    crew = Crew()
    for end in (sending, receiving):
        crew.on_stop(end.abort)
    began = time.process_time()
    for name, work in (("send", send), ("receive", receive), ("watch", outgoing.run)):
        crew.start(name, work)
    crew.wait()
    others = max(0.0, time.process_time() - began - sum(spent.values())) / 2 if whole_process else 0.0
    return _Costs((spent["send"] + others) / count, (spent["receive"] + others) / count)


class _Source:
    """A link out of memory with packets that hold nothing."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._next = 0

    def receive(self) -> Packet | None:
        """Return the next packet, or None after the last."""
        if self._next == self._count:
            return None
        self._next += 1
        return Packet(self._next - 1, 1, ())
