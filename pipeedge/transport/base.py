"""The interface of transports: the two ends of a link, and the packets that cross it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from pipeedge.base.errors import PeerFailedError
from pipeedge.base.payload import Payload, TensorSpec
from pipeedge.transport.place import TOKEN_BYTES, Place

__all__ = [
    "OWNED",
    "STORE_RANK",
    "Endpoint",
    "Link",
    "Packet",
    "PacketMemory",
    "Receipt",
    "Receiver",
    "Rendezvous",
    "Reserved",
    "Sender",
    "Shipment",
    "Transport",
    "unbound",
]


STORE_RANK = 0
"""Rank that serves the store through which gloo and RPC form their groups."""


class PacketMemory(Protocol):
    """The memory behind a packet, which the receiving stage must give back."""

    def release(self) -> None:
        """Give the memory back. Call this once, when the values will not be read any more.

        A missing call costs memory, not correctness.
        """


class Owned:
    """Memory that need not be given back."""

    def release(self) -> None:
        """Do nothing: nobody reuses the memory."""


OWNED = Owned()


class Packet(Struct, frozen=True, eq=False):
    """One microbatch in flight. Its number, from 0, stays the same to the end."""

    number: int
    items: int
    payload: Payload
    lease: PacketMemory = OWNED


class Reserved(Struct, frozen=True, eq=False):
    """Memory reserved for a payload that is still to be computed.

    A packet of exactly these tensors and this lease, posted on the link that reserved them, is not copied.
    """

    payload: Payload
    lease: PacketMemory = OWNED


def unbound(specs: Sequence[TensorSpec]) -> Reserved:
    """Return memory that belongs to no link."""
    return Reserved(tuple(spec.empty() for spec in specs))


@dataclass(frozen=True)
class Link:
    """A directed link of a schedule, known to both of its ends before anything is sent."""

    source: int
    """Rank that sends."""
    destination: int
    """Rank that receives."""
    specs: tuple[TensorSpec, ...]
    """Specification of the largest payload that will cross the link."""
    receipts: bool = False
    """Whether the receiving end sends a receipt for each packet. Its ``run`` must then be called."""
    starts_anywhere: bool = False
    """Whether the first packet may have another number than 0, as in a plan that follows a failed one."""
    is_read_ahead: bool = True
    """Whether frames are read while the receiving thread is busy, which pays if it computes. Over TCP, the
    kernel keeps a little all the same."""


@dataclass(frozen=True)
class Receipt:
    """A receiver's timing of one packet, in durations, because the ranks share no clock.

        sender     posted ├───────────────────── way ──────────────────────┤ receipt
        receiver             ├──── apart ────┤ arrived ├── held ──┤ receipt

    The packet crossed the link within ``apart_s``, and within ``way - held_s``. If the network was the
    bottleneck, it took at least the smaller of the two: ``link_seconds``.
    """

    apart_s: float
    """Seconds since the previous packet had arrived and this one had room; infinite if not known."""
    held_s: float = 0.0
    """Seconds from its arrival until the receipt was sent."""

    def link_seconds(self, way_s: float) -> float:
        """Return the seconds that the packet occupied the link, without waiting for the next stage.

        Args:
            way_s: Seconds from posting the packet to having the receipt, by the sender's clock.
        """
        return max(0.0, min(self.apart_s, way_s - self.held_s))


class Shipment(Protocol):
    """A packet in flight."""

    @property
    def bytes(self) -> int:
        """Size on the wire in bytes; 0 if the packet crosses no wire."""

    def wait(self) -> None:
        """Wait until the packet has left this rank, and its memory is free again.

        With gloo and RPC the other end has received it by then. Over TCP the kernel has all of it, and the
        network may still carry some: a receipt tells how long that takes.

        Raises:
            PeerError: The other end is gone.
        """

    def receipt(self) -> Receipt:
        """Wait for the receipt of the packet. Call this once, and only on a link with receipts.

        Raises:
            PeerError: The other end is gone.
        """


class Sender(Protocol):
    """The sending end of a link."""

    def reserve(self, specs: Sequence[TensorSpec]) -> Reserved:
        """Reserve memory for the payload of the next packet; blocks while two are in flight.

        Raises:
            PeerError: The other end is gone.
        """

    def post(self, packet: Packet) -> Shipment:
        """Send one packet, in order; blocks while two are in flight.

        Raises:
            PeerError: The other end is gone.
        """

    def finish(self) -> None:
        """Tell the other end that no more packets follow, and wait until it has received all of them."""


class PacketSource(Protocol):
    """Gives packets to the thread that asks: the receiving end of a link, or the input itself."""

    def receive(self) -> Packet | None:
        """Return the next packet, in order, or None after the last.

        Raises:
            PeerError: The other end is gone, or sent a malformed frame.
        """


class Receiver(PacketSource, Protocol):
    """The receiving end of a link."""

    def run(self) -> None:
        """Send receipts until the last packet, in a thread of its own. Only for links with receipts."""

    def close(self) -> None:
        """Wake any thread that waits here for another thread."""


@dataclass(frozen=True)
class Rendezvous:
    """How the members of a group find one another; the same on all, but for ``addr``."""

    addr: str
    """Address of rank 0, as this rank knows it."""
    members: tuple[int, ...]
    """Ranks of the group, in the same order on every member."""
    places: Mapping[int, Place]
    """Place at which each rank listens: over TCP all members; otherwise rank 0, with a store."""
    timeout_s: float
    """Seconds to wait for another rank to answer."""
    epoch: int = 0
    """Number of the plan that the links belong to. Over TCP, links of another one are refused."""
    token: bytes = bytes(TOKEN_BYTES)
    """Random bytes that only the members know, without which a link over TCP is refused."""

    @property
    def store_port(self) -> int:
        """Port of the store on rank 0.

        Raises:
            PeerFailedError: Rank 0 serves none.
        """
        if STORE_RANK not in self.places:
            raise PeerFailedError(
                f"rank {STORE_RANK} serves no store for this kind of links", peer=STORE_RANK
            )
        return self.places[STORE_RANK].port


class Endpoint(Protocol):
    """One rank of a session: it listens for the others, and makes the transports of each plan.

    listen ──> place ──stated with the facts──> hub ──with each plan──> places of all ──> Transport.open
    """

    def listen(self, address: str) -> Place | None:
        """Listen for other ranks; return where, or None if they need not find this rank.

        Args:
            address: Address of this machine for links.

        Raises:
            RequestError: The address does not belong to this machine.
        """

    def transport(self) -> Transport:
        """Return a transport, still closed."""

    def close(self) -> None:
        """Listen no longer; do nothing if it does not listen."""


class Transport(Protocol):
    """Links among the ranks of a group. It can be closed and opened again, for another group.

        closed ──open──> open ──sender, receiver──> ends of links ──all finished──> close ──> closed
                           └───────────────abort, from any thread───────────────> close ──> closed

    ``open``, ``sender``, ``receiver`` and ``close`` are called by one thread at a time, ``abort`` by any
    thread at any time. A run, or an epoch of one, is one such cycle. Ends of links belong to the group they
    were made for: they end with it, and a transport that is opened again needs new ones.

                             loopback       tcp             p2p (gloo)            rpc (TensorPipe)
        in one process       any number     any number      any number            one at a time
        ``open`` waits for   nobody         nobody          all members           all members
        what listens does    never          for the whole   until all are open    until all are closed
        so                                  session
        abort wakes          every wait     every wait      every wait on a       every wait on a link;
                                                            link; not ``open``    ``open`` and ``close``
                                                            before all are there  cannot be woken
        peers of an          are not told   lose their      lose their links      have frames refused
        aborted transport                   links to it     to it
        close waits for      nobody         nobody          nobody                all members; nobody after
                                                                                  ``abort``
        open again           anything       any members     any members           same place among as many
                                                                                  members, as often on each
                                                                                  (torch numbers groups)

    Who cannot be woken is left behind in a daemon thread (``base.crew``), which is why ``open`` and ``close``
    are called in one.
    """

    @property
    def closes_together(self) -> bool:
        """Whether ``close`` waits until all members have called it."""

    def exposure(self, addresses: Sequence[str]) -> str | None:
        """Return a warning if links at ``addresses`` endanger this machine, or None."""

    def open(self, rendezvous: Rendezvous) -> None:
        """Form a group of this rank and the other members.

        Raises:
            PeerFailedError: The group could not be formed.
            PipeEdgeError: The transport is open already.
            Closed: It was aborted meanwhile.
        """

    def sender(self, link: Link) -> Sender:
        """Open the sending end of ``link``, which starts on this rank."""

    def receiver(self, link: Link) -> Receiver:
        """Open the receiving end of ``link``, which ends on this rank."""

    def abort(self) -> None:
        """Wake the threads that wait on links: they raise ``Closed`` or ``PeerError``.

        Peers may take this for the loss of this rank, so report the reason first. On a transport that is not
        open this does nothing.
        """

    def close(self) -> None:
        """Leave the group, after all links have finished or after ``abort``.

        Raises:
            PeerError: The other members did not close theirs.
        """
