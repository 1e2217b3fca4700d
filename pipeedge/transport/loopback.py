"""Links in memory, for neighbours on one rank and for whole pipelines in one process (tests).

Both ends of a link share one bounded channel; tensors are handed over without copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from pipeedge.base.backpressure import FRAMES_IN_FLIGHT
from pipeedge.base.channel import Channel
from pipeedge.base.payload import TensorSpec
from pipeedge.transport.base import Link, Packet, Receipt, Rendezvous, Reserved, unbound
from pipeedge.transport.lifecycle import Lifecycle

__all__ = ["LocalLink", "LoopbackTransport"]


class Handover:
    """A packet that has already arrived, without crossing a wire."""

    bytes = 0

    def wait(self) -> None:
        """Return at once: the packet has arrived."""

    def receipt(self) -> Receipt:
        """Return a receipt of zero seconds."""
        return Receipt(0.0)


class LocalLink:
    """Both ends of a link within one process."""

    def __init__(self) -> None:
        self._channel: Channel[Packet] = Channel(FRAMES_IN_FLIGHT)

    def reserve(self, specs: Sequence[TensorSpec]) -> Reserved:
        """Reserve memory that is handed over to the receiver without copying."""
        return unbound(specs)

    def post(self, packet: Packet) -> Handover:
        """Hand over one packet; blocks while two are waiting."""
        self._channel.put(packet)
        return Handover()

    def run(self) -> None:
        """Do nothing: this link sends no receipts."""

    def finish(self) -> None:
        """Tell the receiver that no more packets follow."""
        self._channel.finish()

    def receive(self) -> Packet | None:
        """Return the next packet, or None when the other end has finished."""
        return self._channel.get()

    def close(self) -> None:
        """Wake both ends for good."""
        self._channel.close()


class LoopbackTransport:
    """Transport for any number of ranks in one process: the same link always gets the same channel.

    One object serves all ranks, so it is opened once for all of them.
    """

    closes_together = False

    def __init__(self) -> None:
        self._lifecycle = Lifecycle()
        self._links: dict[tuple[int, int], LocalLink] = {}
        self._lock = Lock()

    def exposure(self, addresses: Sequence[str]) -> None:
        """Return None: nothing leaves the process."""

    def open(self, rendezvous: Rendezvous) -> None:
        """Allow links; there is nobody to wait for."""
        with self._lifecycle.opening(), self._lock:
            self._links = {}

    def sender(self, link: Link) -> LocalLink:
        """Open the sending end of ``link``."""
        return self._open(link)

    def receiver(self, link: Link) -> LocalLink:
        """Open the receiving end of ``link``."""
        return self._open(link)

    def abort(self) -> None:
        """Wake all waiting threads."""
        if self._lifecycle.abort():
            self._close_links()

    def close(self) -> None:
        """Wake all waiting threads; the links do not outlive it."""
        self._lifecycle.close()
        self._close_links()

    def _open(self, link: Link) -> LocalLink:
        self._lifecycle.check_open()
        with self._lock:
            return self._links.setdefault((link.source, link.destination), LocalLink())

    def _close_links(self) -> None:
        with self._lock:
            for link in self._links.values():
                link.close()
