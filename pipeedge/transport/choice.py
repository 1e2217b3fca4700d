"""The one place that knows which transports there are. Each is imported only when it is used."""

from __future__ import annotations

from pipeedge.request.config import DEFAULT_WORKER_THREADS, TransportRequest
from pipeedge.transport.base import Endpoint
from pipeedge.transport.membership import Membership

__all__ = ["make_endpoint"]


def make_endpoint(
    request: TransportRequest, rank: int, addr: str, membership: Membership | None = None
) -> Endpoint:
    """Return this rank among those that are linked by the transport that ``request`` asks for.

    Args:
        request: Transport of the links.
        rank: This rank.
        addr: Address of rank 0.
        membership: Certificates of the members, with which ``tcp`` secures its links; None for clear links.
    """
    if request.comm == "tcp":
        from pipeedge.transport.tcp import TcpEndpoint

        return TcpEndpoint(rank, membership)
    from pipeedge.transport.rendezvous import StoreEndpoint

    if request.comm == "rpc":
        from pipeedge.transport.rpc import RpcTransport

        threads = request.worker_threads or DEFAULT_WORKER_THREADS
        return StoreEndpoint(rank, addr, lambda _: RpcTransport(rank, threads))
    from pipeedge.transport.p2p import P2PTransport

    return StoreEndpoint(rank, addr, lambda end_store: P2PTransport(rank, end_store))
