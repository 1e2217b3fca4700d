"""Links over ``torch.distributed.rpc`` with TensorPipe (``-c rpc``).

    sending rank                                        receiving rank
    packet ──copy──> [frame 0] ──rpc _deliver──┐   ┌──> inbox [ · · · · ], by number ──> packet (views)
                     [frame 1] ──rpc _deliver──┴───┘         │
                       ^ free again <── reply: there is room ┘

RPC neither orders nor bounds what it carries, so this does both. A frame carries its number and the
inbox hands frames out by it. A reply is a credit: a sender keeps at most ``WINDOW`` frames without a
reply, and the inbox withholds replies while more than ``QUEUE - WINDOW`` frames wait in it; so no more
than ``QUEUE`` ever do, and what is under way has an upper limit in both memories. Replies are futures
that the stage's own thread completes: no RPC worker thread ever blocks, one is enough, and nothing is
computed on them (``docs/rpc.md`` says why that matters for memory).

The data rank has the stages created: it calls ``_create_stage`` on each rank of the schedule and learns
from the reply that the shard is loaded, or why not.

Calls have no deadline of their own, because a stage may compute for long: the hub of
``pipeedge.control`` watches over all ranks, and ``abort`` wakes whoever waits here.

On a link with receipts a reply is more than a credit: it says how long the frame took.
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

__all__ = ["QUEUE", "WINDOW", "Order", "PoliteStore", "RpcReceiver", "RpcSender", "RpcTransport", "exposure"]

WINDOW = 2
"""Frames under way without a reply, per link: the wire is never idle while a reply travels."""
QUEUE = 4
"""Frames that wait in front of a stage at most: as over gloo, where two wait here and two at the sender."""

_SCHEME = "pipeedge"
_NO_DEADLINE = 0.0
_ENDED = "the run has ended"
_TRANSPORTS = ("uv",)
_CHANNELS = ("basic",)
"""TCP alone, one connection for each pair of ranks, at the chosen interface. Left to itself TensorPipe
prefers shared memory between processes of one machine, where its thread polls without end and takes
time from the stages; its other channels open further ports, or pass the network by."""

# torch.distributed gives its types at run time only, where a type checker does not see them.
_rpc: Any = torch.distributed.rpc
_dist: Any = torch.distributed
_Future: Any = torch.futures.Future

# A remote call names a function, and that function must find this process's transport somewhere. There
# is one RPC agent in a process, which torch too keeps in its module; so there is one transport.
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

    The group's members are the ranks that take part in the schedule; ``members[i]`` is its worker i.
    Creating it waits until all of them have come. There can be one at a time in a process.

    Args:
        addr: where the rendezvous of ``pipeedge.transport.rendezvous`` is served.
        port: its port.
        rank: this rank.
        members: all ranks of the group, in the same order everywhere.
        worker_threads: threads that serve calls.
        timeout_s: how long to wait for the rendezvous.

    Raises:
        PeerFailedError: the group did not come together.
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
                raise PipeEdgeError("an RPC transport is open in this process already")
            _serving.append(self)  # before the group stands, because others may call as soon as it does
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
                # torch's own start of RPC uses what torch calls deprecated
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
        """The sending end of ``link``."""
        sender = RpcSender(link)
        with self._lock:
            self._senders.append(sender)
        return sender

    def receiver(self, link: Link) -> RpcReceiver:
        """The receiving end of ``link``; from now on frames may come."""
        receiver = RpcReceiver(link)
        with self._lock:
            self._inboxes[link.source] = receiver
        return receiver

    # -- stages -----------------------------------------------------------------------------------

    def create_stages(self, ranks: Sequence[int]) -> None:
        """On the data rank: have ``ranks[n]`` build and load stage n, all at once."""
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
        """On the data rank: wait until all stages are there.

        Raises:
            PeerFailedError: one could not be created; the message says why.
        """
        for creation in self._creations:
            creation.wait()

    def wait_for_order(self) -> Order:
        """On a rank of the schedule: wait until the data rank wants a stage here."""
        order = self._orders.get()
        if order is None:
            raise Closed
        return order

    # -- the end ----------------------------------------------------------------------------------

    def abort(self) -> None:
        """Wake whoever waits here: the run has failed."""
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
        """Wait until all members have come here too, and take the group down."""
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
        """A frame came from rank ``source``; the future of the reply."""
        with self._lock:
            inbox = self._inboxes.get(source)
        if inbox is None:
            return _answered(f"no link leads from rank {source} to rank {self._rank}")
        return inbox.deliver(buffer)

    def ordered(self, stage: int) -> Any:
        """The data rank wants ``stage`` here; the future of the reply."""
        with self._lock:
            if self._was_ordered:
                return _answered("it has one already")
            self._was_ordered = True
        order = Order(stage)
        try:
            self._orders.put(order)
        except Closed:
            return _answered(_ENDED)
        return order.reply


class Order:
    """The data rank wants a stage here, and waits to hear how that went."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.reply = _Future()

    def done(self) -> None:
        """It is loaded."""
        self.reply.set_result("")

    def failed(self, line: str) -> None:
        """It could not be loaded, for the reason in ``line``."""
        self.reply.set_result(line)


class _Answer:
    """What another rank will say to one call. Text that is not empty says why not."""

    def __init__(self, peer: int, *, lost: str, refused: str) -> None:
        self._peer = peer
        self._lost = lost
        self._refused = refused
        self._settled = threading.Event()
        self._error: Exception | None = None
        self._reply: object = None

    def call(self, function: Any, *arguments: object) -> None:
        """Make the call; returns at once."""
        try:
            future = _rpc.rpc_async(_worker(self._peer), function, args=arguments, timeout=_NO_DEADLINE)
        except RuntimeError as error:
            self._settle(self._failure(self._lost, error))
        else:
            future.add_done_callback(self._hear)

    def wait(self) -> None:
        """Wait for the reply, from any number of threads.

        Raises:
            PeerFailedError: the call was refused, or the other rank is gone.
            Closed: the run has ended.
        """
        self._settled.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wake whoever waits, unless the reply is here."""
        if not self._settled.is_set():
            self._settle(Closed())

    def _hear(self, future: Any) -> None:
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
    """One frame under way."""

    def __init__(self, link: Link, number: int, length: int) -> None:
        super().__init__(
            link.destination,
            lost=f"the connection to rank {link.destination} was lost while sending",
            refused=f"rank {link.destination} refused microbatch {number}",
        )
        self._link = link
        self.bytes = length

    def receipt(self) -> Receipt:
        """What the other end says of it; only on a link with receipts."""
        self.wait()
        reply = self._reply
        if not isinstance(reply, tuple) or len(reply) != 2 or not all(_is_duration(part) for part in reply):
            raise FrameError(
                f"from rank {self._link.destination}: a reply that is no receipt", peer=self._link.destination
            )
        return Receipt(*reply)


def _is_duration(value: object) -> bool:
    return isinstance(value, float) and value >= 0


class RpcSender:
    """Copies packets into frames and keeps up to ``WINDOW`` of them under way."""

    def __init__(self, link: Link) -> None:
        self._link = link
        capacity = frame_capacity(link.specs)
        self._frames = deque(torch.empty(capacity, dtype=torch.uint8) for _ in range(WINDOW))
        self._lock = threading.Lock()
        self._under_way: deque[RpcShipment] = deque()
        self._sent = 0
        self._closed = False

    def reserve(self, specs: Sequence[TensorSpec]) -> Reserved:
        """Memory of its own, which is copied into a frame: RPC serialises what it sends anyway."""
        return unbound(specs)

    def post(self, packet: Packet) -> RpcShipment:
        """Send ``packet``; waits while ``WINDOW`` frames are without a reply."""
        return self._post(Kind.MICROBATCH, packet)

    def finish(self) -> None:
        """Send the end mark, and wait until everything has arrived."""
        self._post(Kind.END, Packet(self._sent, 0, ()))
        for shipment in list(self._under_way):
            shipment.wait()

    def close(self) -> None:
        """Wake whoever waits, for good."""
        with self._lock:
            self._closed = True
            shipments = list(self._under_way)
        for shipment in shipments:
            shipment.close()

    def _post(self, kind: Kind, packet: Packet) -> RpcShipment:
        if len(self._under_way) == WINDOW:
            self._under_way[0].wait()  # its reply frees the frame that is filled next
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
        shipment.call(_deliver, self._link.source, _alone(buffer, length))
        self._sent += 1
        return shipment


class RpcReceiver:
    """Puts the frames of one link into order, and says when there is room for more."""

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
        """The next packet by number; None after the other end has finished."""
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
            withheld.reply.set_result(self._yes(withheld.apart_s, withheld.since))
        if frame.kind is Kind.END:
            return None
        return Packet(frame.number, frame.items, frame.payload)

    def deliver(self, buffer: torch.Tensor) -> Any:
        """A frame has come, in whatever order; the future of the reply, which says there is room."""
        try:
            frame = self._read(buffer)
            with self._changed:
                now = self._clock()
                apart_s, self._before = now - self._before, now
                if self._closed:
                    return _answered(_ENDED)
                if not self._due <= frame.number < self._due + QUEUE or frame.number in self._waiting:
                    raise FrameError(f"microbatch {frame.number} came where {self._due} was due")
                self._waiting[frame.number] = frame
                self._changed.notify_all()
                if len(self._waiting) > QUEUE - WINDOW:
                    self._withheld.append(_Withheld(_Future(), apart_s, now))
                    return self._withheld[-1].reply
            return _answered(self._yes(apart_s, now))
        except FrameError as error:
            with self._changed:
                self._error = FrameError(f"from rank {self._link.source}: {error}", peer=self._link.source)
                self._changed.notify_all()
            return _answered(str(error))

    def run(self) -> None:
        """Receipts are replies, which need no thread."""

    def close(self) -> None:
        """Wake whoever waits, for good."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _yes(self, apart_s: float, arrived_at: float) -> str | tuple[float, float]:
        return (apart_s, self._clock() - arrived_at) if self._link.receipts else ""

    def _read(self, buffer: object) -> Frame:
        if not isinstance(buffer, torch.Tensor) or buffer.dtype != torch.uint8 or buffer.dim() != 1:
            raise FrameError("what came is no frame")
        if buffer.numel() > self._capacity:
            raise FrameError(f"{buffer.numel()} bytes came, the agreed capacity is {self._capacity}")
        return read_frame(buffer)


@dataclass(frozen=True)
class _Withheld:
    reply: Any
    apart_s: float
    since: float


def _alone(buffer: torch.Tensor, length: int) -> torch.Tensor:
    """The first ``length`` bytes, as memory that ends there: torch sends all that is behind a tensor, unless
    that is more than twice as much."""
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
    """Called by another rank. The reply is empty once there is room for more, else says what is wrong."""
    return _transport().delivered(source, buffer)


@_rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _create_stage(stage: int) -> Any:
    """Called by the data rank. The reply is empty once the stage is loaded, else says why it is not."""
    return _transport().ordered(stage)


class PoliteStore(_dist.Store):  # type: ignore[misc]
    """A store that can be asked by native code that holds the interpreter's lock.

    TensorPipe's agent is created with the lock held, and asks the store for the names of all others. While
    one of them, or the rank that serves the store, is stopped, no thread of this process could run: no beat
    would be sent, no verdict be heard, and the process would never end. A method of Python lets the lock go
    while it waits.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str) -> None:
        """Set ``key``."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for ``key``."""
        return bytes(self._store.get(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set ``key`` if it has the value ``expected``. Returns its value."""
        return bytes(self._store.compare_set(key, expected, desired))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Return whether all ``keys`` are there."""
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
        """Return how many keys there are."""
        return int(self._store.num_keys())

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set how long ``get`` and ``wait`` wait."""
        super().set_timeout(timeout)
        self._store.set_timeout(timeout)


def _served_store(url: str, **_: object) -> Iterator[tuple[Any, int, int]]:
    """The store at ``pipeedge://addr:port``: one that is served already, where torch would serve its own."""
    parts = urlsplit(url)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    store = connect_store(str(parts.hostname), int(parts.port or 0), timeout_s=float(query["timeout_s"]))
    # Referred to as long as this generator is, which torch keeps: its agent holds the native part alone.
    polite = PoliteStore(store)
    yield polite, int(query["rank"]), int(query["world_size"])


_dist.register_rendezvous_handler(_SCHEME, _served_store)
