"""Links over plain sockets, or TLS with a membership (``-c tcp``).

    sending rank                                            receiving rank
    TcpSender ──frames──> kernel ──TCP or TLS──> kernel ──> TcpReceiver      dialed by the sending rank,
              <────────── credits, receipts ──────────────                   two connections for each link

A rank has one listening socket, its ``TcpEndpoint``, for the links of all plans of a session. It states where
that is with its facts, and the hub tells all participants of a plan, so nobody meets anywhere else:

    a connection ──LinkHello──> endpoint ──token, epoch──> the transport of that plan
                                   ├── of a plan that this rank has not heard of yet: waits, some seconds
                                   └── of an older plan, or with another token: refused

A connection introduces itself before anything else (``tcp_hello``), and ``reception`` bounds what strangers
can cost.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from pipeedge.base.crew import Closed
from pipeedge.base.errors import PeerFailedError
from pipeedge.transport.base import Link, Rendezvous
from pipeedge.transport.interfaces import listen
from pipeedge.transport.lifecycle import Lifecycle
from pipeedge.transport.membership import Membership
from pipeedge.transport.place import TOKEN_BYTES, Place
from pipeedge.transport.reception import Reception
from pipeedge.transport.sealed import Stream
from pipeedge.transport.tcp_group import TcpGroup
from pipeedge.transport.tcp_hello import LINK_HELLO_BYTES, Answer, HelloError, LinkHello, pack_answer
from pipeedge.transport.tcp_receiving import TcpReceiver
from pipeedge.transport.tcp_sending import TcpSender

__all__ = ["TcpEndpoint", "TcpTransport"]


class TcpEndpoint:
    """The listening socket of a rank for its links, and the transports that it leads to.

    Args:
        rank: This rank.
        membership: Certificates of the members, or None for links without TLS.
    """

    def __init__(self, rank: int, membership: Membership | None = None) -> None:
        self._rank = rank
        self._client = None if membership is None else membership.client_context()
        self._server = None if membership is None else membership.server_context()
        self._lock = threading.Lock()
        self._reception: Reception | None = None
        self._groups: dict[tuple[int, bytes], TcpGroup] = {}  # by epoch and token
        self._latest = -1  # the latest epoch in which this rank has had a part

    def listen(self, address: str) -> Place:
        """Listen for links, in a thread of its own."""
        listener = listen(address, 0)
        place = Place(address, int(listener.getsockname()[1]))
        self._reception = Reception(
            listener, context=self._server, hello_bytes=LINK_HELLO_BYTES, admit=self._admit
        )
        return place

    def transport(self) -> TcpTransport:
        """Return a transport, still closed."""
        return TcpTransport(self, self._rank)

    def close(self) -> None:
        """Listen no longer. The links that are open stay so."""
        reception, self._reception = self._reception, None
        if reception is not None:
            reception.close()

    def enter(self, rendezvous: Rendezvous) -> TcpGroup:
        """Accept links of a plan from here on, those too that have come already.

        Raises:
            PeerFailedError: Rank 0 has sent a token of another length.
        """
        if len(rendezvous.token) != TOKEN_BYTES:
            raise PeerFailedError(f"the token of a plan has {len(rendezvous.token)} bytes", peer=0)
        group = TcpGroup(self._rank, rendezvous, self._client)
        with self._lock:
            self._groups[rendezvous.epoch, rendezvous.token] = group
            self._latest = max(self._latest, rendezvous.epoch)
        reception = self._reception
        if reception is not None:
            with suppress(OSError):  # another thread closes it
                reception.reconsider()
        return group

    def leave(self, group: TcpGroup) -> None:
        """Accept no more links of a plan."""
        with self._lock:
            self._groups = {key: one for key, one in self._groups.items() if one is not group}

    def _admit(self, sock: Stream, message: bytes) -> bool:
        """Pass a connection that has introduced itself on to its plan; called by the thread that accepts."""
        try:
            hello = LinkHello.unpack(message)
        except HelloError:
            sock.close()
            return True
        with self._lock:
            group = self._groups.get((hello.epoch, hello.token))
            if group is None and hello.epoch > self._latest:
                return False  # the plan may be on its way to this rank
        if group is not None:
            group.admit(sock, hello)
            return True
        with suppress(OSError):
            sock.sendall(pack_answer(Answer.OTHER_GROUP))
        sock.close()
        return True


class TcpTransport:
    """Links among the ranks of a group, each over two connections of its own. A process can have several.

    Args:
        endpoint: Endpoint of this rank, which passes its connections on.
        rank: This rank.
    """

    closes_together = False

    def __init__(self, endpoint: TcpEndpoint, rank: int) -> None:
        self._endpoint = endpoint
        self._rank = rank
        self._lifecycle = Lifecycle()
        self._group: TcpGroup | None = None

    def exposure(self, addresses: Sequence[str]) -> None:
        """Return None: frames are numbers, and nothing that a peer sends is run."""

    def open(self, rendezvous: Rendezvous) -> None:
        """Take connections of the other members from here on; wait for nobody."""
        with self._lifecycle.opening():
            # Before the state is read, as ``abort`` changes that first.
            self._group = self._endpoint.enter(rendezvous)
            if self._lifecycle.aborted:
                self._end()
                raise Closed

    def sender(self, link: Link) -> TcpSender:
        """Connect the sending end of ``link``; the other rank need not have asked for its end yet.

        Raises:
            PeerFailedError: The other rank does not accept the connection.
            Closed: The transport was aborted.
        """
        return self._opened().sender(link)

    def receiver(self, link: Link) -> TcpReceiver:
        """Open the receiving end of ``link``, which waits for the sending rank to connect."""
        return self._opened().receiver(link)

    def abort(self) -> None:
        """Cut all connections, which fails the waits on them."""
        if self._lifecycle.abort() and (group := self._group) is not None:
            self._endpoint.leave(group)
            group.cut()

    def close(self) -> None:
        """Close all connections."""
        self._lifecycle.close()
        self._end()

    def _end(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._endpoint.leave(group)
            group.cut()
            group.close()

    def _opened(self) -> TcpGroup:
        self._lifecycle.check_open()
        if self._group is None:
            raise Closed
        return self._group
