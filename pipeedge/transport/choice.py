"""The one place that knows which transports there are."""

from __future__ import annotations

from pipeedge.request.config import DEFAULT_WORKER_THREADS, TransportRequest
from pipeedge.transport.base import Transport
from pipeedge.transport.p2p import P2PTransport
from pipeedge.transport.rpc import RpcTransport

__all__ = ["make_transport"]


def make_transport(request: TransportRequest, rank: int) -> Transport:
    """Return the transport that ``request`` asks for, still closed, for ``rank``."""
    if request.comm == "rpc":
        return RpcTransport(rank, request.worker_threads or DEFAULT_WORKER_THREADS)
    return P2PTransport(rank)
