"""The rendezvous of a group: a key-value store on rank 0.

torch's own store would listen at every address of the machine. It is therefore given a socket that listens at
one. The store keeps whatever anybody sends, so it is closed as soon as no member needs it: a gloo group is
formed with a barrier at its end, after which nobody does. RPC, however, asks it for addresses until the end.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

import torch.distributed

from pipeedge.base.errors import PeerFailedError
from pipeedge.transport.interfaces import listen

__all__ = ["RendezvousServer", "agent_store", "connect_store", "gloo_group", "join_group", "serve_store"]

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


class RendezvousServer:
    """The store at ``addr`` while it is served; torch stops serving when nothing refers to it any more."""

    def __init__(self, addr: str) -> None:
        self._addr = addr
        self._store: Any = None

    def serve(self, members: Iterable[int]) -> int:
        """Serve the store, in which any members find one another, and return its port.

        Raises:
            RequestError: ``addr`` does not belong to this machine.
        """
        self._store, port = serve_store(self._addr)
        return port

    def close(self) -> None:
        """Stop serving, so that no stranger can fill this process's memory; do nothing if not served."""
        self._store = None


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
