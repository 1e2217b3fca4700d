"""Where the ranks of a gloo group find one another: a key-value store on rank 0.

torch's store would listen at every address of the machine; it is handed a socket that listens at one.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed

from pipeedge.errors import PeerFailedError
from pipeedge.transport.interfaces import listen

__all__ = ["agent_store", "connect_store", "serve_store"]

# torch.distributed exports its stores at run time only, where a type checker does not see them.
_dist: Any = torch.distributed


def serve_store(addr: str) -> tuple[Any, int]:
    """A store at ``addr``, and its port; it serves as long as it is referred to.

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


def agent_store(addr: str, port: int, run: str, *, timeout_s: float) -> Any:
    """The store of ``torchrun``'s agent, for the keys of this ``run`` of ours alone."""
    return _dist.PrefixStore(f"pipeedge/{run}", connect_store(addr, port, timeout_s=timeout_s))
