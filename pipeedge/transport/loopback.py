"""Links in memory: for neighbours on one rank, and for whole pipelines in one process (tests).

Both ends of a link are the same bounded channel; tensors are handed over as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from pipeedge.base.payload import TensorSpec
from pipeedge.transport.base import Link, Packet, Receipt, Reserved, unbound
from pipeedge.transport.channel import Channel

__all__ = ["LocalLink", "LoopbackTransport"]

CAPACITY = 2
"""Microbatches that wait in front of a stage, as over a network."""


class Handover:
    """A packet that has arrived already. Nothing goes over a wire."""

    bytes = 0

    def wait(self) -> None:
        """It is there."""

    def receipt(self) -> Receipt:
        """It took no time."""
        return Receipt(0.0)


class LocalLink:
    """Both ends of a link within one process."""

    def __init__(self) -> None:
        self._channel: Channel[Packet] = Channel(CAPACITY)

    def reserve(self, specs: Sequence[TensorSpec]) -> Reserved:
        """Memory of its own: it is handed over as it is."""
        return unbound(specs)

    def post(self, packet: Packet) -> Handover:
        """Hand over one packet; waits while two are waiting."""
        self._channel.put(packet)
        return Handover()

    def run(self) -> None:
        """There is nothing to tell."""

    def finish(self) -> None:
        """Nothing follows."""
        self._channel.finish()

    def receive(self) -> Packet | None:
        """The next packet; None when the other end has finished."""
        return self._channel.get()

    def close(self) -> None:
        """Wake both ends, for good."""
        self._channel.close()


class LoopbackTransport:
    """Any number of ranks in one process: whoever asks for the same link gets the same channel."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, int], LocalLink] = {}
        self._lock = Lock()

    def sender(self, link: Link) -> LocalLink:
        """The sending end of ``link``."""
        return self._open(link)

    def receiver(self, link: Link) -> LocalLink:
        """The receiving end of ``link``."""
        return self._open(link)

    def close(self) -> None:
        """Wake whoever waits."""
        with self._lock:
            for link in self._links.values():
                link.close()

    def _open(self, link: Link) -> LocalLink:
        with self._lock:
            return self._links.setdefault((link.source, link.destination), LocalLink())
