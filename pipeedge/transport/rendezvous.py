"""The rendezvous of a gloo group: a key-value store on rank 0.

torch's own store would listen at every address of the machine. It is therefore given a socket that listens at
one. The store keeps whatever anybody sends, so it is closed as soon as the group has formed: ``join_group``
ends with a barrier, after which no member needs it. RPC, however, asks it for addresses until the end.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed

from pipeedge.base.errors import PeerFailedError
from pipeedge.transport.interfaces import listen

__all__ = ["agent_store", "connect_store", "join_group", "serve_store"]

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


def join_group(store: Any, *, index: int, size: int) -> Any:
    """Join the gloo group of ``store``; wait until all members have joined and need the store no longer.

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
