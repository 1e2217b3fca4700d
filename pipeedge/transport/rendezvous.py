"""Where the ranks of a gloo group find one another: a key-value store on rank 0.

torch's store would listen at every address of the machine; it is handed a socket that listens at one. It
keeps whatever anybody sends, so it is closed as soon as the group has met: ``join_group`` ends with a
barrier, after which no member needs it. RPC asks it for addresses until the end.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed

from pipeedge.base.errors import PeerFailedError
from pipeedge.transport.interfaces import listen

__all__ = ["agent_store", "connect_store", "join_group", "serve_store"]

_FOREVER = datetime.timedelta(days=365)
"""One wait of gloo that takes too long closes all connections of the group, so the hub watches instead."""

# torch.distributed exports its stores at run time only, where a type checker does not see them.
_dist: Any = torch.distributed


def serve_store(addr: str) -> tuple[Any, int]:
    """Serve a store at ``addr``, as long as it is referred to. Returns it and its port.

    Raises:
        RequestError: ``addr`` is not this machine's.
    """
    listener = listen(addr, 0)
    port = int(listener.getsockname()[1])
    store = _dist.TCPStore(
        addr, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def connect_store(addr: str, port: int, *, timeout_s: float) -> Any:
    """The store that another rank serves.

    Raises:
        PeerFailedError: it is not there.
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
    """Join the gloo group of ``store`` and wait until all members have; nobody needs the store any more then.

    Args:
        store: where they meet.
        index: number of this member.
        size: how many there are.

    Raises:
        RuntimeError, ValueError: the links could not be opened.
    """
    _dist.init_process_group("gloo", store=store, rank=index, world_size=size, timeout=_FOREVER)
    _dist.barrier()
    return _dist.group.WORLD


def agent_store(addr: str, port: int, run: str, *, timeout_s: float) -> Any:
    """The store of ``torchrun``'s agent, for the keys of this ``run`` of ours alone."""
    return _dist.PrefixStore(f"pipeedge/{run}", connect_store(addr, port, timeout_s=timeout_s))
