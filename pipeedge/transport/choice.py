"""The one place that knows which transports there are. Each is imported only when it is used."""

from __future__ import annotations

from pipeedge.request.config import DEFAULT_WORKER_THREADS, TransportRequest
from pipeedge.transport.base import RendezvousService, Transport
from pipeedge.transport.membership import Membership

__all__ = ["make_rendezvous", "make_transport"]


def make_transport(request: TransportRequest, rank: int, membership: Membership | None = None) -> Transport:
    """Return the transport that ``request`` asks for, still closed, for ``rank``.

    Args:
        request: Transport of the links.
        rank: This rank.
        membership: Certificates of the members, with which ``tcp`` secures its links; None for clear links.
    """
    if request.comm == "tcp":
        from pipeedge.transport.tcp import TcpTransport

        return TcpTransport(rank, membership)
    if request.comm == "rpc":
        from pipeedge.transport.rpc import RpcTransport

        return RpcTransport(rank, request.worker_threads or DEFAULT_WORKER_THREADS)
    from pipeedge.transport.p2p import P2PTransport

    return P2PTransport(rank)


def make_rendezvous(
    request: TransportRequest, addr: str, membership: Membership | None = None
) -> RendezvousService:
    """Return the rendezvous for the transport that ``request`` asks for, not served yet, at ``addr``."""
    if request.comm == "tcp":
        from pipeedge.transport.tcp_rendezvous import TcpRendezvousServer

        return TcpRendezvousServer(addr, membership)
    from pipeedge.transport.rendezvous import RendezvousServer

    return RendezvousServer(addr)
