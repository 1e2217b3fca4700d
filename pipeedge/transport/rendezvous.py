"""How the members of a gloo or RPC group meet: in a key-value store on rank 0.

torch's own store would listen at every address of the machine. It is therefore given a socket that listens at
one. The store keeps whatever anybody sends, so it is closed as soon as no member needs it: a gloo group is
formed with a barrier at its end, after which nobody does. RPC, however, asks it for addresses until the end.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch.distributed

from pipeedge.base.errors import PeerFailedError
from pipeedge.transport.base import STORE_RANK, Transport
from pipeedge.transport.interfaces import listen
from pipeedge.transport.place import Place

__all__ = [
    "StoreEndpoint",
    "StoreServer",
    "agent_store",
    "connect_store",
    "gloo_group",
    "join_group",
    "serve_store",
]

_FOREVER = datetime.timedelta(days=365)
"""Timeout of gloo's waits: never, because one timeout closes all connections. The hub watches instead."""

# torch.distributed exports its stores at run time only, so type checkers do not see them.
_dist: Any = torch.distributed


def serve_store(addr: str) -> tuple[Any, int]:
    """Serve a store at ``addr`` for as long as it is referenced. Return the store and its port.

    Raises:
        RequestError: ``addr`` does not belong to this machine.
    """
    listener = listen(addr, 0)
    port = int(listener.getsockname()[1])
    store = _dist.TCPStore(
        addr, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def connect_store(addr: str, port: int, *, timeout_s: float) -> Any:
    """Connect to the store that another rank serves.

    Raises:
        PeerFailedError: The store cannot be reached.
    """
    try:
        return _dist.TCPStore(
            addr,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise PeerFailedError(f"no rendezvous at {addr}:{port}: {error}") from error


class StoreServer:
    """The store at ``addr`` while it is served; torch stops serving when nothing refers to it any more."""

    def __init__(self, addr: str) -> None:
        self._addr = addr
        self._store: Any = None

    def listen(self) -> Place:
        """Serve the store, in which any members find one another, and return where.

        Raises:
            RequestError: ``addr`` does not belong to this machine.
        """
        self._store, port = serve_store(self._addr)
        return Place(self._addr, port)

    def close(self) -> None:
        """Stop serving, so that no stranger can fill this process's memory; do nothing if not served."""
        self._store = None


class StoreEndpoint:
    """A rank whose links are opened by torch, for which rank 0 serves a store.

    Args:
        rank: This rank.
        addr: Address of rank 0.
        make: Makes a transport, which calls its argument when no member needs the store any longer. RPC asks
            it for addresses until the end, when the endpoint is closed.
    """

    def __init__(self, rank: int, addr: str, make: Callable[[Callable[[], None]], Transport]) -> None:
        self._rank = rank
        self._server = StoreServer(addr)
        self._make = make

    def listen(self, address: str) -> Place | None:
        """Serve the store, on rank 0."""
        return self._server.listen() if self._rank == STORE_RANK else None

    def transport(self) -> Transport:
        """Return a transport, still closed."""
        return self._make(self._server.close)

    def close(self) -> None:
        """Serve the store no longer."""
        self._server.close()


def gloo_group(store: Any, *, index: int, size: int) -> Any:
    """Create a gloo group apart from torch's default group, so that a process can have several.

    Returns when this member is connected to all others. The store is needed until all of them are.

    Args:
        store: Store through which the members find one another.
        index: Number of this member.
        size: Number of members.

    Raises:
        RuntimeError, ValueError: The connections could not be opened.
    """
    return _dist.ProcessGroupGloo(store, index, size, _FOREVER)


def join_group(store: Any, *, index: int, size: int) -> Any:
    """Join torch's default group over gloo; wait until all members have and need the store no longer.

    Args:
        store: Store through which the members find one another.
        index: Number of this member.
        size: Number of members.

    Raises:
        RuntimeError, ValueError: The links could not be opened.
    """
    _dist.init_process_group("gloo", store=store, rank=index, world_size=size, timeout=_FOREVER)
    _dist.barrier()
    return _dist.group.WORLD


def agent_store(addr: str, port: int, run: str, *, timeout_s: float) -> Any:
    """Connect to the store of ``torchrun``'s agent, restricted to the keys of this ``run``."""
    return _dist.PrefixStore(f"pipeedge/{run}", connect_store(addr, port, timeout_s=timeout_s))
