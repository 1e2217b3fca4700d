"""Links over plain sockets, or TLS with a membership (``-c tcp``).

    sending rank                                            receiving rank
    TcpSender ──frames──> kernel ──TCP or TLS──> kernel ──> TcpReceiver      dialed by the sending rank,
              <────────── credits, receipts ──────────────                   two connections for each link

Members learn at the rendezvous where each of them listens. A connection introduces itself before anything
else (``tcp_hello``), and ``reception`` bounds what strangers can cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeedge.base.crew import Closed
from pipeedge.transport.base import Link, Rendezvous
from pipeedge.transport.lifecycle import Lifecycle
from pipeedge.transport.membership import Membership
from pipeedge.transport.tcp_group import TcpGroup
from pipeedge.transport.tcp_receiving import TcpReceiver
from pipeedge.transport.tcp_sending import TcpSender

__all__ = ["TcpTransport"]


class TcpTransport:
    """Links among the ranks of a group, each over two connections of its own. A process can have several.

    Args:
        rank: This rank.
        membership: Certificates of the members, or None for links without TLS.
    """

    keeps_rendezvous = False
    closes_together = False

    def __init__(self, rank: int, membership: Membership | None = None) -> None:
        self._rank = rank
        self._membership = membership
        self._lifecycle = Lifecycle()
        self._group: TcpGroup | None = None

    def exposure(self, addresses: Sequence[str]) -> None:
        """Return None: frames are numbers, and nothing that a peer sends is run."""

    def open(self, rendezvous: Rendezvous) -> None:
        """Listen for links, and wait until the other members do."""
        with self._lifecycle.opening():
            group = TcpGroup(self._rank, rendezvous, self._membership)
            self._group = group  # before the state is read, as ``abort`` changes that first
            try:
                if self._lifecycle.aborted:
                    raise Closed
                group.open()
            except BaseException:
                self._group = None
                group.cut()
                group.close()
                raise

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
            group.cut()

    def close(self) -> None:
        """Close all connections."""
        self._lifecycle.close()
        group, self._group = self._group, None
        if group is not None:
            group.cut()
            group.close()

    def _opened(self) -> TcpGroup:
        self._lifecycle.check_open()
        if self._group is None:
            raise Closed
        return self._group
