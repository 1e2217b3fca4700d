"""Links over ``torch.distributed.rpc`` with TensorPipe (``-c rpc``).

    sending rank                                          receiving rank
    RpcSender ──frame──> rpc _deliver ──(worker thread)──> RpcReceiver of the link
              <───────────────── reply: there is room ──────────┘

What crosses is one call for each frame; ``rpc_links`` orders and bounds them. One worker thread is enough,
and none computes anything (``docs/rpc.md`` explains why that matters for memory).

Calls have no timeout, because a stage may compute for long. Instead, the hub of ``pipeedge.control`` monitors
all ranks, and ``abort`` wakes threads that wait here.
"""

from __future__ import annotations

import ipaddress
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed.rpc

from pipeedge.base.errors import PeerFailedError, PipeEdgeError
from pipeedge.transport.base import Link, Rendezvous
from pipeedge.transport.lifecycle import Lifecycle, TransportState
from pipeedge.transport.rendezvous import connect_store
from pipeedge.transport.rpc_links import RpcReceiver, RpcSender, answered
from pipeedge.transport.unlocking_store import UnlockingStore

__all__ = ["RpcTransport"]

_SCHEME = "pipeedge"
_NO_DEADLINE = 0.0
_TRANSPORTS = ("uv",)
_CHANNELS = ("basic",)
"""Plain TCP, one connection for each pair of ranks, at the chosen interface. By default TensorPipe prefers
shared memory between processes of one machine, for which its thread polls continuously and takes time from
the stages. Its other channels open more ports or bypass the network.
"""

# torch.distributed provides its types at run time only, so type checkers do not see them.
_rpc: Any = torch.distributed.rpc
_dist: Any = torch.distributed

# A remote call names a function, which must find the transport of this process. There is one RPC agent
# per process, which torch also keeps in a module variable, and thus one transport.
_serving: list[RpcTransport] = []
_serving_lock = threading.Lock()


class RpcTransport:
    """Links among the ranks of one RPC group: ``members[i]`` is worker i. One can be open in a process.

    Args:
        rank: This rank.
        worker_threads: Number of threads that serve calls.
    """

    closes_together = True

    def __init__(self, rank: int, worker_threads: int) -> None:
        self._rank = rank
        self._worker_threads = worker_threads
        self._lifecycle = Lifecycle()
        self._lock = threading.Lock()
        self._inboxes: dict[int, RpcReceiver] = {}
        self._senders: list[RpcSender] = []

    def exposure(self, addresses: Sequence[str]) -> str | None:
        """Return a warning if RPC listens where other machines may reach it, or None.

        Args:
            addresses: IP addresses of the interface of the links.
        """
        reachable = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
        if not reachable:
            return None
        return (
            f"-c rpc listens at {reachable[0]}: whoever can connect there can run programs on this machine, "
            "or end the run; use it in a network that you trust, or leave it out"
        )

    def open(self, rendezvous: Rendezvous) -> None:
        """Start this process's RPC agent, and wait until those of all members have started."""
        with self._lifecycle.opening():
            with self._lock:
                self._inboxes, self._senders = {}, []
            with _serving_lock:
                if _serving:
                    raise PipeEdgeError("this process already has an open RPC transport")
                _serving.append(self)  # before the group is formed, because others may call as soon as it is
            try:
                self._start_agent(rendezvous)
            except (RuntimeError, ValueError) as error:
                self._stop_serving()
                raise PeerFailedError(f"rank {self._rank} could not connect to its peers: {error}") from error

    def sender(self, link: Link) -> RpcSender:
        """Open the sending end of ``link``."""
        self._lifecycle.check_open()
        sender = RpcSender(link, _call(link))
        with self._lock:
            self._senders.append(sender)
        return sender

    def receiver(self, link: Link) -> RpcReceiver:
        """Open the receiving end of ``link``; frames may arrive from now on."""
        self._lifecycle.check_open()
        receiver = RpcReceiver(link)
        with self._lock:
            self._inboxes[link.source] = receiver
        return receiver

    def abort(self) -> None:
        """Wake all threads that wait on links, and refuse frames that still arrive."""
        if not self._lifecycle.abort():
            return
        with self._lock:
            ends: list[RpcReceiver | RpcSender] = [*self._inboxes.values(), *self._senders]
        for end in ends:
            end.close()

    def close(self) -> None:
        """Wait until all members have called this too, unless aborted, and stop this process's RPC agent."""
        state = self._lifecycle.close()
        if state is TransportState.CLOSED:
            return
        try:
            _rpc.shutdown(graceful=state is TransportState.OPEN)
        except RuntimeError as error:
            raise PeerFailedError(f"the links could not be closed: {error}") from error
        finally:
            self._stop_serving()

    def delivered(self, source: int, buffer: torch.Tensor) -> Any:
        """Accept a frame from rank ``source``; return the future of the reply."""
        with self._lock:
            inbox = self._inboxes.get(source)
        if inbox is None:
            return answered(f"no link leads from rank {source} to rank {self._rank}")
        return inbox.deliver(buffer)

    def _start_agent(self, rendezvous: Rendezvous) -> None:
        host = f"[{rendezvous.addr}]" if ":" in rendezvous.addr else rendezvous.addr
        options = _rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=self._worker_threads,
            rpc_timeout=rendezvous.timeout_s,
            init_method=f"{_SCHEME}://{host}:{rendezvous.store_port}?timeout_s={rendezvous.timeout_s!r}",
            _transports=list(_TRANSPORTS),
            _channels=list(_CHANNELS),
        )
        with warnings.catch_warnings():
            # torch's own start of RPC uses a feature that torch deprecates.
            warnings.filterwarnings("ignore", message=".*as a ProcessGroup", category=UserWarning)
            _rpc.init_rpc(
                _worker(self._rank),
                backend=_rpc.BackendType.TENSORPIPE,
                rank=rendezvous.members.index(self._rank),
                world_size=len(rendezvous.members),
                rpc_backend_options=options,
            )

    def _stop_serving(self) -> None:
        with _serving_lock:
            _serving.remove(self)


def _worker(rank: int) -> str:
    return f"rank{rank}"


def _call(link: Link) -> Callable[[torch.Tensor], Any]:
    """Return a function that takes a frame to the other end of ``link``."""
    worker = _worker(link.destination)

    def deliver(buffer: torch.Tensor) -> Any:
        return _rpc.rpc_async(worker, _deliver, args=(link.source, buffer), timeout=_NO_DEADLINE)

    return deliver


@_rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _deliver(source: int, buffer: torch.Tensor) -> Any:
    """Accept a frame from another rank. The reply is empty once there is room for more, else an error."""
    with _serving_lock:
        transport = _serving[0]
    return transport.delivered(source, buffer)


def _served_store(url: str, **_: object) -> Iterator[tuple[Any, int, int]]:
    """Yield the store served at ``pipeedge://addr:port``, instead of one that torch would serve."""
    parts = urlsplit(url)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    store = connect_store(str(parts.hostname), int(parts.port or 0), timeout_s=float(query["timeout_s"]))
    # torch keeps this generator, and thereby a reference to the store; its agent only holds the native part.
    unlocking = UnlockingStore(store)
    yield unlocking, int(query["rank"]), int(query["world_size"])


_dist.register_rendezvous_handler(_SCHEME, _served_store)
