"""What a stage sees of the network: two ends of a link, and the packets that cross it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipeedge.base.payload import Payload, TensorSpec

__all__ = [
    "OWNED",
    "Lease",
    "Link",
    "Packet",
    "Receipt",
    "Receiver",
    "Reserved",
    "Sender",
    "Shipment",
    "Transport",
    "unbound",
]


class Lease(Protocol):
    """The memory behind a packet, which whoever received it wants back."""

    def release(self) -> None:
        """The memory is free again. Whoever has copied the values out says so, once, and nobody looks at
        them afterwards. Forgetting it costs memory, not correctness."""


class Owned:
    """Memory that nobody wants back."""

    def release(self) -> None:
        """Nothing to do."""


OWNED = Owned()


@dataclass(frozen=True)
class Packet:
    """One microbatch on its way. Its number, from 0, stays with it to the end."""

    number: int
    items: int
    payload: Payload
    lease: Lease = field(default=OWNED, repr=False, compare=False)


@dataclass(frozen=True)
class Reserved:
    """Memory for a payload that is yet to be made. A packet of exactly these tensors and this lease,
    posted on the link that reserved them, crosses it without being copied."""

    payload: Payload
    lease: Lease = field(default=OWNED, repr=False)


def unbound(specs: Sequence[TensorSpec]) -> Reserved:
    """Memory of no link."""
    return Reserved(tuple(spec.empty() for spec in specs))


@dataclass(frozen=True)
class Link:
    """A directed link that a schedule needs, known to both its ends before anything is sent."""

    source: int
    """Rank that sends."""
    destination: int
    """Rank that receives."""
    specs: tuple[TensorSpec, ...]
    """The largest payload that will cross it."""
    receipts: bool = False
    """The receiving end tells the sending one when each packet has arrived; its ``run`` is called."""


@dataclass(frozen=True)
class Receipt:
    """What the receiving end of a link says of a packet that has come. Durations, because no clock is shared.

        sender     posted ├───────────────────── way ──────────────────────┤ receipt
        receiver             ├──── apart ────┤ arrived ├── held ──┤ receipt

    The packet crossed the link within ``apart_s``, and within ``way - held_s``; where the network is what it
    waited for, in no less than the smaller of the two: ``link_seconds``.
    """

    apart_s: float
    """Since the packet before it had arrived and there was room for this one; infinite: not known."""
    held_s: float = 0.0
    """From its arrival until the receipt was sent."""

    def link_seconds(self, way_s: float) -> float:
        """That the packet occupied the link, waiting for the next stage not included.

        Args:
            way_s: from posting the packet to having the receipt, by the sender's clock.
        """
        return max(0.0, min(self.apart_s, way_s - self.held_s))


class Shipment(Protocol):
    """A packet under way."""

    @property
    def bytes(self) -> int:
        """What it puts on the wire; 0 where there is none."""

    def wait(self) -> None:
        """Wait until the other end has it.

        Raises:
            PeerError: the other end is gone.
        """

    def receipt(self) -> Receipt:
        """Wait for what the other end says of it; once, and only on a link with receipts.

        Raises:
            PeerError: the other end is gone.
        """


class Sender(Protocol):
    """The sending end."""

    def reserve(self, specs: Sequence[TensorSpec]) -> Reserved:
        """Memory for the payload of the next packet; blocks while two are under way.

        Raises:
            PeerError: the other end is gone.
        """

    def post(self, packet: Packet) -> Shipment:
        """Hand over one packet, in order; blocks while two are under way.

        Raises:
            PeerError: the other end is gone.
        """

    def finish(self) -> None:
        """Tell the other end that nothing follows, and wait until it has everything."""


class Receiver(Protocol):
    """The receiving end."""

    def run(self) -> None:
        """On a link with receipts: send them, in a thread of its own, until the last packet."""

    def close(self) -> None:
        """Wake whoever waits here for the other thread."""

    def receive(self) -> Packet | None:
        """The next packet, in order; None when the other end has finished.

        Raises:
            PeerError: the other end is gone, or sent what is no frame.
        """


class Transport(Protocol):
    """Opens the ends of links."""

    def sender(self, link: Link) -> Sender:
        """The sending end of ``link``, which starts on this rank."""

    def receiver(self, link: Link) -> Receiver:
        """The receiving end of ``link``, which ends on this rank."""

    def close(self) -> None:
        """Take the links down after all of them have finished."""
