"""The group of a TCP transport: the connections of its links.

sender(link) ──dial, LinkHello──> endpoint of the other rank ──answer──> arrivals ──> receiver(link)
"""

from __future__ import annotations

import errno
import ssl
import threading
import time
from collections import Counter

from pipeedge.base.crew import Closed
from pipeedge.base.errors import PeerFailedError
from pipeedge.transport.base import Link, Rendezvous
from pipeedge.transport.dialling import NotAMemberError, dial, refusals
from pipeedge.transport.frame import FrameError, frame_capacity
from pipeedge.transport.place import Place
from pipeedge.transport.sealed import Stream, socket_of
from pipeedge.transport.tcp_hello import (
    ANSWER_BYTES,
    Answer,
    HelloError,
    LinkHello,
    Purpose,
    pack_answer,
    read_answer,
)
from pipeedge.transport.tcp_receiving import TcpReceiver
from pipeedge.transport.tcp_sending import TcpSender
from pipeedge.transport.wires import Connections, TcpWire, tune

__all__ = ["TcpGroup"]

_RETRY_S = 0.1
_AHEAD = 2
"""Number of links between two ranks that may be dialed before the receiving rank asks for them."""
_REFUSALS = {
    Answer.OTHER_GROUP: "it takes no part in this plan, or no longer",
    Answer.OTHER_RANK: "it is another rank",
    Answer.OTHER_LINK: "it has this link already, or does not expect it yet",
}
"""Meaning of each answer by which a link is refused."""


class _Arrivals:
    """Accepted connections until the receiving end of their link asks for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[tuple[int, int, Purpose], tuple[LinkHello, Stream]] = {}
        self._asked: Counter[int] = Counter()
        self._taken: set[tuple[int, int, Purpose]] = set()
        self._cut = False

    def expect(self, source: int) -> int:
        """Return the number of the next link from ``source``, which is asked for by this."""
        with self._changed:
            serial = self._asked[source]
            self._asked[source] += 1
            return serial

    def awaits(self, hello: LinkHello) -> bool:
        """Return whether a connection for ``hello`` may be put: its link has none, and comes soon."""
        with self._changed:
            key = hello.source, hello.serial, hello.purpose
            return key not in self._taken and hello.serial < self._asked[hello.source] + _AHEAD

    def put(self, hello: LinkHello, sock: Stream) -> None:
        """Keep ``sock`` for the link that ``hello`` introduces."""
        key = hello.source, hello.serial, hello.purpose
        with self._changed:
            if self._cut or key in self._taken:
                sock.close()
                return
            former = self._waiting.pop(key, None)  # the answer to it was lost, so its rank has dialed again
            if former is not None:
                former[1].close()
            self._waiting[key] = hello, sock
            self._changed.notify_all()

    def take(self, source: int, serial: int, purpose: Purpose) -> tuple[LinkHello, Stream]:
        """Wait for a connection, and return it with its introduction.

        Raises:
            Closed: ``cut`` was called.
        """
        key = source, serial, purpose
        with self._changed:
            self._changed.wait_for(lambda: self._cut or key in self._waiting)
            if self._cut:
                raise Closed
            self._taken.add(key)
            return self._waiting.pop(key)

    def cut(self) -> None:
        """Close the connections that nobody has asked for, and wake all waiting threads."""
        with self._changed:
            self._cut = True
            for _, sock in self._waiting.values():
                sock.close()
            self._waiting = {}
            self._changed.notify_all()


class TcpGroup:
    """A transport from ``open`` to ``close``.

    Args:
        rank: This rank.
        rendezvous: The members, and where they listen.
        context: Settings of TLS for connections to other ranks, or None to speak in clear.
    """

    def __init__(self, rank: int, rendezvous: Rendezvous, context: ssl.SSLContext | None) -> None:
        self._rank = rank
        self._rendezvous = rendezvous
        self._context = context
        self._connections = Connections()
        self._arrivals = _Arrivals()
        self._dialed: Counter[int] = Counter()
        self._senders: list[TcpSender] = []
        self._receivers: list[TcpReceiver] = []

    @property
    def epoch(self) -> int:
        """Number of the plan that the links belong to."""
        return self._rendezvous.epoch

    def sender(self, link: Link) -> TcpSender:
        """Dial the receiving rank, which may take a moment."""
        serial = self._dialed[link.destination]
        self._dialed[link.destination] += 1
        frames, replies = (self._dial(link, serial, purpose) for purpose in Purpose)
        sender = TcpSender(link, frames, replies, self._connections)
        self._senders = [*(one for one in self._senders if not one.finished), sender]
        return sender

    def receiver(self, link: Link) -> TcpReceiver:
        """Expect the connections of the sending rank."""
        serial = self._arrivals.expect(link.source)

        def accept() -> tuple[TcpWire, TcpWire]:
            frames, replies = (self._accepted(link, serial, purpose) for purpose in Purpose)
            return frames, replies

        receiver = TcpReceiver(link, accept, self._connections)
        self._receivers = [*(one for one in self._receivers if not one.finished), receiver]
        return receiver

    def admit(self, sock: Stream, hello: LinkHello) -> None:
        """Answer a connection that has introduced itself with the token and the epoch of this group.

        Called by the thread that accepts; from here on another thread may use the connection.
        """
        answer = Answer.ACCEPTED
        if hello.destination != self._rank or hello.source not in self._rendezvous.members:
            answer = Answer.OTHER_RANK
        elif not self._arrivals.awaits(hello):
            answer = Answer.OTHER_LINK
        try:
            tune(socket_of(sock), self._rendezvous.timeout_s)
            sock.sendall(pack_answer(answer))
        except OSError:
            sock.close()
            return
        if answer is Answer.ACCEPTED:
            self._arrivals.put(hello, sock)
        else:
            sock.close()

    def cut(self) -> None:
        """Wake all threads that wait for connections or on them."""
        self._connections.cut()
        self._arrivals.cut()
        for receiver in self._receivers:
            receiver.close()

    def close(self) -> None:
        """Close all connections, which must be cut, and end all threads."""
        self._arrivals.cut()
        for sender in self._senders:
            sender.close()
        for receiver in self._receivers:
            receiver.end()
        self._connections.close_all()

    def _dial(self, link: Link, serial: int, purpose: Purpose) -> TcpWire:
        """Connect to the receiving rank and introduce the link; dial again if strangers displaced it."""
        rendezvous, peer = self._rendezvous, link.destination
        if peer not in rendezvous.members or peer not in rendezvous.places:
            raise PeerFailedError(f"rank {peer} listens for no links of this plan", peer=peer)
        hello = LinkHello(
            rendezvous.token,
            rendezvous.epoch,
            purpose,
            link.source,
            peer,
            serial,
            frame_capacity(link.specs),
        )
        place, deadline = rendezvous.places[peer], time.monotonic() + rendezvous.timeout_s
        while True:
            try:
                return self._introduce(place, hello, deadline)
            except (NotAMemberError, HelloError) as error:
                why = f"what listens there {error}" if isinstance(error, NotAMemberError) else error
                raise PeerFailedError(
                    f"the link to rank {peer} at {place.address} does not open: {why}", peer=peer
                ) from error
            except OSError as error:
                if self._connections.are_cut:
                    raise Closed from error
                if not isinstance(error, ConnectionResetError | BrokenPipeError) or (
                    time.monotonic() + _RETRY_S > deadline
                ):
                    raise PeerFailedError(
                        f"the link to rank {peer} at {place.address} does not open "
                        f"({error.strerror or error}): is there a firewall, or another interface to choose "
                        "with -s?",
                        peer=peer,
                    ) from error
            self._connections.pause(_RETRY_S)

    def _introduce(self, place: Place, hello: LinkHello, deadline: float) -> TcpWire:
        """Dial once. Raises an OSError if the connection is lost before the answer."""
        sock = dial(
            (place.address, place.port),
            self._connections,
            context=self._context,
            deadline=deadline,
        )
        try:
            tune(socket_of(sock), self._rendezvous.timeout_s)
            answer = b""
            with refusals(sock):
                sock.sendall(hello.pack())
                while len(answer) < ANSWER_BYTES:
                    sock.settimeout(max(0.01, deadline - time.monotonic()))
                    part = sock.recv(ANSWER_BYTES - len(answer))
                    if not part:
                        raise ConnectionResetError(errno.ECONNRESET, "connection closed by the other end")
                    answer += part
            refusal = _REFUSALS.get(read_answer(answer))
            if refusal is not None:
                raise PeerFailedError(
                    f"rank {hello.destination} refused the link from rank {hello.source}: {refusal}",
                    peer=hello.destination,
                )
            return TcpWire(sock, self._connections)
        except BaseException:
            self._connections.close(sock)
            raise

    def _accepted(self, link: Link, serial: int, purpose: Purpose) -> TcpWire:
        """Wait until the sending rank has dialed.

        Raises:
            FrameError: It sends frames of another size.
            Closed: The connections were cut.
        """
        hello, sock = self._arrivals.take(link.source, serial, purpose)
        try:
            self._connections.add(socket_of(sock))
            if hello.capacity != frame_capacity(link.specs):
                raise FrameError(
                    f"its frames have up to {hello.capacity} bytes, not the agreed "
                    f"{frame_capacity(link.specs)}"
                )
        except BaseException:
            TcpWire(sock, self._connections).close()
            raise
        return TcpWire(sock, self._connections)
