"""Links over ``torch.distributed.rpc`` with TensorPipe (``-c rpc``).

    sending rank                                        receiving rank
    packet ──copy──> [frame 0] ──rpc _deliver──┐   ┌──> inbox [ · · · · ], by number ──> packet (views)
                     [frame 1] ──rpc _deliver──┴───┘         │
                       ^ free again <── reply: there is room ┘

RPC neither orders nor limits what it carries, so this module does both. A frame carries its number, and the
inbox delivers frames in that order. A reply is a credit: a sender keeps at most ``WINDOW`` frames without a
reply, and the inbox withholds replies while more than ``QUEUE - WINDOW`` frames wait in it. So at most
``QUEUE`` frames ever wait, and the memory for frames in flight is limited on both ranks. Replies are futures
that the stage's own thread completes: no RPC worker thread ever blocks, one is enough, and none computes
anything (``docs/rpc.md`` explains why that matters for memory).

The data rank requests the stages: it calls ``_create_stage`` on each rank of the schedule and learns from the
reply that the shard is loaded, or why it is not.

Calls have no timeout, because a stage may compute for long. Instead, the hub of ``pipeedge.control`` monitors
all ranks, and ``abort`` wakes threads that wait here.

On a link with receipts a reply is more than a credit: it also reports how long the frame took.
"""

from __future__ import annotations

import datetime
import ipaddress
import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed.rpc

from pipeedge.base.errors import PeerFailedError, PipeEdgeError
from pipeedge.base.payload import TensorSpec
from pipeedge.transport.base import Link, Packet, Receipt, Reserved, unbound
from pipeedge.transport.channel import Channel, Closed
from pipeedge.transport.frame import Frame, FrameError, Kind, frame_capacity, read_frame, write_frame
from pipeedge.transport.rendezvous import connect_store

__all__ = [
    "QUEUE",
    "WINDOW",
    "Order",
    "UnlockingStore",
    "RpcReceiver",
    "RpcSender",
    "RpcTransport",
    "exposure",
]

WINDOW = 2
"""Number of frames per link without a reply: the wire is never idle while a reply travels."""
QUEUE = 4
"""Largest number of frames that wait in front of a stage; over gloo, two wait here and two at the sender."""

_SCHEME = "pipeedge"
_NO_DEADLINE = 0.0
_ENDED = "the run has ended"
_TRANSPORTS = ("uv",)
_CHANNELS = ("basic",)
"""Plain TCP, one connection for each pair of ranks, at the chosen interface. By default TensorPipe prefers
shared memory between processes of one machine, for which its thread polls continuously and takes time from
the stages. Its other channels open more ports or bypass the network.
"""

# torch.distributed provides its types at run time only, so type checkers do not see them.
_rpc: Any = torch.distributed.rpc
_dist: Any = torch.distributed
_Future: Any = torch.futures.Future

# A remote call names a function, which must find the transport of this process. There is one RPC agent
# per process, which torch also keeps in a module variable, and thus one transport.
_serving: list[RpcTransport] = []
_serving_lock = threading.Lock()


def exposure(addresses: Sequence[str]) -> str | None:
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


class RpcTransport:
    """Links among the ranks of one RPC group.

    The members of the group are the ranks that take part in the schedule; ``members[i]`` is worker i. The
    constructor waits until all of them have joined. A process can have one at a time.

    Args:
        addr: Address where the rendezvous of ``pipeedge.transport.rendezvous`` is served.
        port: Port of the rendezvous.
        rank: This rank.
        members: All ranks of the group, in the same order everywhere.
        worker_threads: Number of threads that serve calls.
        timeout_s: Seconds to wait for the rendezvous.

    Raises:
        PeerFailedError: The group could not be formed.
    """

    def __init__(
        self,
        *,
        addr: str,
        port: int,
        rank: int,
        members: tuple[int, ...],
        worker_threads: int,
        timeout_s: float,
    ) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._inboxes: dict[int, RpcReceiver] = {}
        self._senders: list[RpcSender] = []
        self._creations: list[_Answer] = []
        self._orders: Channel[Order] = Channel(1)
        self._was_ordered = False
        with _serving_lock:
            if _serving:
                raise PipeEdgeError("this process already has an open RPC transport")
            _serving.append(self)  # before the group is formed, because others may call as soon as it is
        host = f"[{addr}]" if ":" in addr else addr
        try:
            options = _rpc.TensorPipeRpcBackendOptions(
                num_worker_threads=worker_threads,
                rpc_timeout=timeout_s,
                init_method=f"{_SCHEME}://{host}:{port}?timeout_s={timeout_s!r}",
                _transports=list(_TRANSPORTS),
                _channels=list(_CHANNELS),
            )
            with warnings.catch_warnings():
                # torch's own start of RPC uses a feature that torch deprecates.
                warnings.filterwarnings("ignore", message=".*as a ProcessGroup", category=UserWarning)
                _rpc.init_rpc(
                    _worker(rank),
                    backend=_rpc.BackendType.TENSORPIPE,
                    rank=members.index(rank),
                    world_size=len(members),
                    rpc_backend_options=options,
                )
        except (RuntimeError, ValueError) as error:
            self._stop_serving()
            raise PeerFailedError(f"rank {rank} could not connect to its peers: {error}") from error

    # -- links ------------------------------------------------------------------------------------

    def sender(self, link: Link) -> RpcSender:
        """Open the sending end of ``link``."""
        sender = RpcSender(link)
        with self._lock:
            self._senders.append(sender)
        return sender

    def receiver(self, link: Link) -> RpcReceiver:
        """Open the receiving end of ``link``; frames may arrive from now on."""
        receiver = RpcReceiver(link)
        with self._lock:
            self._inboxes[link.source] = receiver
        return receiver

    # -- stages -----------------------------------------------------------------------------------

    def create_stages(self, ranks: Sequence[int]) -> None:
        """Start to have ``ranks[n]`` build and load stage n, all at once. Called on the data rank."""
        for stage, rank in enumerate(ranks):
            creation = _Answer(
                rank,
                lost=f"the connection to rank {rank} was lost while it created stage {stage}",
                refused=f"rank {rank} could not create stage {stage}",
            )
            with self._lock:
                self._creations.append(creation)
            creation.call(_create_stage, stage)

    def wait_created(self) -> None:
        """Wait until all stages are loaded. Called on the data rank.

        Raises:
            PeerFailedError: A stage could not be created. The message says why.
        """
        for creation in self._creations:
            creation.wait()

    def wait_for_order(self) -> Order:
        """Wait until the data rank requests a stage here. Called on each rank of the schedule."""
        order = self._orders.get()
        if order is None:
            raise Closed
        return order

    # -- the end ----------------------------------------------------------------------------------

    def abort(self) -> None:
        """Wake all waiting threads, because the run has failed."""
        with self._lock:
            ends: list[RpcReceiver | RpcSender | _Answer] = [
                *self._inboxes.values(),
                *self._senders,
                *self._creations,
            ]
        self._orders.close()
        for end in ends:
            end.close()

    def close(self) -> None:
        """Wait until all members have called this too, and shut the group down."""
        try:
            _rpc.shutdown(graceful=True)
        except RuntimeError as error:
            raise PeerFailedError(f"the links could not be closed: {error}") from error
        finally:
            self._stop_serving()

    def _stop_serving(self) -> None:
        with _serving_lock:
            _serving.remove(self)

    # -- what others call here --------------------------------------------------------------------

    def delivered(self, source: int, buffer: torch.Tensor) -> Any:
        """Accept a frame from rank ``source``; return the future of the reply."""
        with self._lock:
            inbox = self._inboxes.get(source)
        if inbox is None:
            return _answered(f"no link leads from rank {source} to rank {self._rank}")
        return inbox.deliver(buffer)

    def ordered(self, stage: int) -> Any:
        """Accept the data rank's request for ``stage``; return the future of the reply."""
        with self._lock:
            if self._was_ordered:
                return _answered("it already has a stage")
            self._was_ordered = True
        order = Order(stage)
        try:
            self._orders.put(order)
        except Closed:
            return _answered(_ENDED)
        return order.reply


class Order:
    """The data rank's request for a stage, to be answered with the outcome."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.reply = _Future()

    def done(self) -> None:
        """Report that the stage is loaded."""
        self.reply.set_result("")

    def failed(self, line: str) -> None:
        """Report that the stage could not be loaded, with the reason in ``line``."""
        self.reply.set_result(line)


class _Answer:
    """The reply of another rank to one call; a non-empty text is a refusal with its reason."""

    def __init__(self, peer: int, *, lost: str, refused: str) -> None:
        self._peer = peer
        self._lost = lost
        self._refused = refused
        self._settled = threading.Event()
        self._error: Exception | None = None
        self._reply: object = None

    def call(self, function: Any, *arguments: object) -> None:
        """Make the call, without waiting for the reply."""
        try:
            future = _rpc.rpc_async(_worker(self._peer), function, args=arguments, timeout=_NO_DEADLINE)
        except RuntimeError as error:
            self._settle(self._failure(self._lost, error))
        else:
            future.add_done_callback(self._receive_reply)

    def wait(self) -> None:
        """Wait for the reply. Any number of threads may call this.

        Raises:
            PeerFailedError: The call was refused, or the other rank is gone.
            Closed: The run has ended.
        """
        self._settled.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wake all waiting threads, unless the reply has arrived."""
        if not self._settled.is_set():
            self._settle(Closed())

    def _receive_reply(self, future: Any) -> None:
        try:
            reply = future.value()
        except RuntimeError as error:
            self._settle(self._failure(self._lost, error))
        else:
            self._reply = reply
            self._settle(self._failure(self._refused, reply) if reply and isinstance(reply, str) else None)

    def _settle(self, error: Exception | None) -> None:
        self._error = error
        self._settled.set()

    def _failure(self, what: str, why: object) -> PeerFailedError:
        return PeerFailedError(f"{what}: {why}", peer=self._peer)


class RpcShipment(_Answer):
    """One frame in flight."""

    def __init__(self, link: Link, number: int, length: int) -> None:
        super().__init__(
            link.destination,
            lost=f"the connection to rank {link.destination} was lost while sending",
            refused=f"rank {link.destination} refused microbatch {number}",
        )
        self._link = link
        self.bytes = length

    def receipt(self) -> Receipt:
        """Wait for the receipt of the packet. Only for a link with receipts."""
        self.wait()
        reply = self._reply
        if not isinstance(reply, tuple) or len(reply) != 2 or not all(_is_duration(part) for part in reply):
            raise FrameError(
                f"from rank {self._link.destination}: the reply is not a receipt", peer=self._link.destination
            )
        return Receipt(*reply)


def _is_duration(value: object) -> bool:
    return isinstance(value, float) and value >= 0


class RpcSender:
    """Sender that copies packets into frames and keeps up to ``WINDOW`` of them in flight."""

    def __init__(self, link: Link) -> None:
        self._link = link
        capacity = frame_capacity(link.specs)
        self._frames = deque(torch.empty(capacity, dtype=torch.uint8) for _ in range(WINDOW))
        self._lock = threading.Lock()
        self._under_way: deque[RpcShipment] = deque()
        self._sent = 0
        self._closed = False

    def reserve(self, specs: Sequence[TensorSpec]) -> Reserved:
        """Reserve separate memory, which is copied into a frame: RPC serialises what it sends anyway."""
        return unbound(specs)

    def post(self, packet: Packet) -> RpcShipment:
        """Send ``packet``; blocks while ``WINDOW`` frames are without a reply."""
        return self._post(Kind.MICROBATCH, packet)

    def finish(self) -> None:
        """Send the end mark, and wait until everything has arrived."""
        self._post(Kind.END, Packet(self._sent, 0, ()))
        for shipment in list(self._under_way):
            shipment.wait()

    def close(self) -> None:
        """Wake all waiting threads for good."""
        with self._lock:
            self._closed = True
            shipments = list(self._under_way)
        for shipment in shipments:
            shipment.close()

    def _post(self, kind: Kind, packet: Packet) -> RpcShipment:
        if len(self._under_way) == WINDOW:
            self._under_way[0].wait()  # its reply frees the frame to fill next
        buffer = self._frames[0]
        self._frames.rotate(-1)
        length = write_frame(
            buffer, kind=kind, number=packet.number, items=packet.items, payload=packet.payload
        )
        packet.lease.release()
        shipment = RpcShipment(self._link, packet.number, length)
        with self._lock:
            if self._closed:
                raise Closed
            if len(self._under_way) == WINDOW:
                self._under_way.popleft()
            self._under_way.append(shipment)
        shipment.call(_deliver, self._link.source, _trimmed(buffer, length))
        self._sent += 1
        return shipment


class RpcReceiver:
    """Receiver that orders the frames of one link and grants credits when there is room for more."""

    def __init__(self, link: Link, clock: Callable[[], float] = time.perf_counter) -> None:
        self._link = link
        self._clock = clock
        self._before = -math.inf
        self._capacity = frame_capacity(link.specs)
        self._changed = threading.Condition()
        self._waiting: dict[int, Frame] = {}
        self._withheld: deque[_Withheld] = deque()
        self._due = 0
        self._error: FrameError | None = None
        self._closed = False

    def receive(self) -> Packet | None:
        """Return the next packet by number, or None after the other end has finished."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._due in self._waiting or self._error is not None or self._closed
            )
            if self._error is not None:
                raise self._error
            if self._closed:
                raise Closed
            frame = self._waiting.pop(self._due)
            self._due += 1
            withheld = self._withheld.popleft() if self._withheld else None
        if withheld is not None:
            withheld.reply.set_result(self._grant(withheld.apart_s, withheld.since))
        if frame.kind is Kind.END:
            return None
        return Packet(frame.number, frame.items, frame.payload)

    def deliver(self, buffer: torch.Tensor) -> Any:
        """Accept a frame, in any order; return the future of the reply, which says that there is room."""
        try:
            frame = self._read(buffer)
            with self._changed:
                now = self._clock()
                apart_s, self._before = now - self._before, now
                if self._closed:
                    return _answered(_ENDED)
                if not self._due <= frame.number < self._due + QUEUE or frame.number in self._waiting:
                    raise FrameError(f"received microbatch {frame.number}, expected {self._due}")
                self._waiting[frame.number] = frame
                self._changed.notify_all()
                if len(self._waiting) > QUEUE - WINDOW:
                    self._withheld.append(_Withheld(_Future(), apart_s, now))
                    return self._withheld[-1].reply
            return _answered(self._grant(apart_s, now))
        except FrameError as error:
            with self._changed:
                self._error = FrameError(f"from rank {self._link.source}: {error}", peer=self._link.source)
                self._changed.notify_all()
            return _answered(str(error))

    def run(self) -> None:
        """Do nothing: receipts are replies, which need no thread."""

    def close(self) -> None:
        """Wake all waiting threads for good."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _grant(self, apart_s: float, arrived_at: float) -> str | tuple[float, float]:
        return (apart_s, self._clock() - arrived_at) if self._link.receipts else ""

    def _read(self, buffer: object) -> Frame:
        if not isinstance(buffer, torch.Tensor) or buffer.dtype != torch.uint8 or buffer.dim() != 1:
            raise FrameError("received data is not a frame")
        if buffer.numel() > self._capacity:
            raise FrameError(f"received {buffer.numel()} bytes, but the agreed capacity is {self._capacity}")
        return read_frame(buffer)


@dataclass(frozen=True)
class _Withheld:
    reply: Any
    apart_s: float
    since: float


def _trimmed(buffer: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first ``length`` bytes in memory that ends there.

    torch sends all memory behind a tensor, unless that is more than twice as much.
    """
    return torch.from_numpy(buffer.numpy()[:length])


def _worker(rank: int) -> str:
    return f"rank{rank}"


def _answered(reply: str | tuple[float, float]) -> Any:
    future = _Future()
    future.set_result(reply)
    return future


def _transport() -> RpcTransport:
    with _serving_lock:
        return _serving[0]


@_rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _deliver(source: int, buffer: torch.Tensor) -> Any:
    """Accept a frame from another rank. The reply is empty once there is room for more, else an error."""
    return _transport().delivered(source, buffer)


@_rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _create_stage(stage: int) -> Any:
    """Accept a request of the data rank. The reply is empty once the stage is loaded, else an error."""
    return _transport().ordered(stage)


class UnlockingStore(_dist.Store):  # type: ignore[misc]
    """A store that native code may call while it holds the interpreter lock.

    TensorPipe's agent is created with the lock held, and asks the store for the names of all other workers.
    If one of them, or the rank that serves the store, is stopped, no thread of this process could run: it
    would neither send heartbeats nor receive a verdict, and would never end. A Python method releases the
    lock while it waits.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str) -> None:
        """Set ``key``."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for ``key`` and return its value."""
        return bytes(self._store.get(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set ``key`` if it has the value ``expected``. Return its value."""
        return bytes(self._store.compare_set(key, expected, desired))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its value."""
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Return whether all ``keys`` exist."""
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait for ``keys``."""
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Remove ``key``."""
        return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._store.num_keys())

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the timeout of ``get`` and ``wait``."""
        super().set_timeout(timeout)
        self._store.set_timeout(timeout)


def _served_store(url: str, **_: object) -> Iterator[tuple[Any, int, int]]:
    """Yield the store served at ``pipeedge://addr:port``, instead of one that torch would serve."""
    parts = urlsplit(url)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    store = connect_store(str(parts.hostname), int(parts.port or 0), timeout_s=float(query["timeout_s"]))
    # torch keeps this generator, and thereby a reference to the store; its agent only holds the native part.
    unlocking = UnlockingStore(store)
    yield unlocking, int(query["rank"]), int(query["world_size"])


_dist.register_rendezvous_handler(_SCHEME, _served_store)
