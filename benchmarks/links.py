"""Compare relays over PipeEdge's links with raw gloo: ``python benchmarks/links.py``.

    rank 0 ──frames──> rank 1 (computes nothing) ──frames──> rank 0

The relay runs the real loops of a stage, over each transport in turn. Raw gloo moves the same bytes in both
directions, with two ``isend`` and two ``irecv`` in flight on both ranks. Repetitions of all alternate within
one run; medians are reported, and the medians of the ratios within a repetition. Timing starts after ``WARM``
frames, when all memory has been touched. The processor time is that of both ranks, with these frames; its
ratio depends less than that of the throughput on what else the machine does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import ssl
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from pipeedge.base.crew import Crew
from pipeedge.base.payload import TensorSpec
from pipeedge.request.config import TransportRequest
from pipeedge.run.activity import Activity
from pipeedge.run.worker import Incoming, Outgoing, SendingEnd, StageLoop, StageSteps
from pipeedge.transport.base import Endpoint, Link, Packet, Receiver, Rendezvous, Transport
from pipeedge.transport.choice import make_endpoint
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import make_key
from pipeedge.transport.place import Place
from pipeedge.transport.rendezvous import connect_store, join_group, serve_store

SHAPES = ((8, 197, 768), (1, 197, 768), (1, 197, 192))
"""Shapes of float32 payloads."""
GOALS = {"p2p": (0.85, 0.70, 0.55), "rpc": None, "tcp": (1.2, 1.2, 1.2), "tcp, TLS": (0.5, 0.5, 0.5)}
"""Throughput of each transport relative to raw gloo that is asked for, by shape."""
ROUND_TRIP = (1, 197, 768)
ROUND_TRIP_GOALS = {"p2p": 1.5, "tcp": 1.0}
"""Time of each transport relative to raw gloo that is asked for."""
ADDR = "127.0.0.1"
LIMIT_S = 600
WARM = 8
Rows: TypeAlias = list[tuple[float, dict[str, float]]]
"""Figures of raw gloo and of each transport, by repetition."""
Costs: TypeAlias = list[dict[str, float]]
"""Seconds of processor time of raw gloo and of each transport, by repetition."""
RAW = "raw gloo"
Row: TypeAlias = tuple[str, str, str, str, str, str]


def raw_throughput(rank: int, size: int, count: int) -> float:
    """Measure the bytes per second in each direction."""
    peer = 1 - rank
    outgoing = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    incoming = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    receives = [dist.irecv(buffer, peer) for buffer in incoming]
    sends = [dist.isend(buffer, peer) for buffer in outgoing]
    for number in range(2, WARM + count):
        slot = number % 2
        receives[slot].wait()
        if number == WARM + 1:
            began = time.perf_counter()  # frame number WARM - 1, from 0, has come
        receives[slot] = dist.irecv(incoming[slot], peer)
        sends[slot].wait()
        sends[slot] = dist.isend(outgoing[slot], peer)
    for work in receives:
        work.wait()
    elapsed = time.perf_counter() - began
    for work in sends:
        work.wait()
    return size * count / elapsed


def raw_round_trip(rank: int, size: int, count: int) -> float:
    """Measure the median round trip in seconds."""
    peer = 1 - rank
    outgoing, incoming = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    times = []
    for _ in range(count):
        began = time.perf_counter()
        arriving = dist.irecv(incoming, peer)
        if rank == 1:
            arriving.wait()
        leaving = dist.isend(outgoing, peer)
        if rank == 0:
            arriving.wait()
        leaving.wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def take(receiver: Receiver) -> None:
    """Receive a frame and release its memory."""
    packet = receiver.receive()
    if packet is None:
        raise RuntimeError("the link ended too early")
    packet.lease.release()


def relay(rank: int, transport: Transport, specs: tuple[TensorSpec, ...], count: int, *, one: bool) -> float:
    """Measure a relay in bytes per second in each direction or, with ``one``, its round trip in seconds."""
    there, back = Link(0, 1, specs), Link(1, 0, specs)
    if rank == 1:
        crew, activity = Crew(), Activity()
        sending = Outgoing(SendingEnd(transport.sender(back), 0), activity)
        incoming = Incoming(transport.receiver(there), 0, activity)
        stage = StageLoop(StageSteps(lambda packet: packet), incoming, sending, activity)
        dist.barrier()
        crew.start("compute", stage.run)
        crew.start("watch", sending.run)
        crew.wait()
        return 0.0
    sender, receiver = transport.sender(there), transport.receiver(back)
    payload = tuple(torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs)
    dist.barrier()
    if one:
        times = []
        for number in range(count):
            began = time.perf_counter()
            sender.post(Packet(number, 1, payload))
            take(receiver)
            times.append(time.perf_counter() - began)
        sender.finish()
        receiver.receive()
        return statistics.median(times)

    def feed() -> None:
        for number in range(WARM + count):
            reserved = sender.reserve(specs)  # raw gloo's buffers are not written either
            sender.post(Packet(number, 1, reserved.payload, reserved.lease))
        sender.finish()

    feeding = threading.Thread(target=feed)
    feeding.start()
    for _ in range(WARM):
        take(receiver)
    began = time.perf_counter()
    for _ in range(count):
        take(receiver)
    elapsed = time.perf_counter() - began
    receiver.receive()
    feeding.join()
    return sum(spec.bytes for spec in specs) * count / elapsed


def open_transport(name: str, rank: int, membership: Membership, store: Any) -> tuple[Endpoint, Transport]:
    """Open a transport between two ranks, which tell each other through ``store`` where they listen."""
    comm, _, secured = name.partition(", ")
    endpoint = make_endpoint(TransportRequest(comm), rank, ADDR, membership if secured else None)
    place = endpoint.listen(ADDR)
    store.set(f"{name}, rank {rank}", str(place.port if place is not None else 0))
    ports = [int(store.get(f"{name}, rank {each}")) for each in (0, 1)]
    places = {each: Place(ADDR, port) for each, port in enumerate(ports) if port}
    transport = endpoint.transport()
    transport.open(Rendezvous(ADDR, (0, 1), places, 60.0))
    return endpoint, transport


def time_processor(run: Callable[[], float], spent: dict[str, float], name: str) -> float:
    """Return the result of ``run``, and note under ``name`` the processor time that it takes here."""
    before = time.process_time()
    result = run()
    spent[name] = time.process_time() - before
    return result


def measure(
    rank: int, port: int, names: Sequence[str], membership: Membership, options: Options, results: Any
) -> None:
    """Run one rank of the benchmark.

    Args:
        rank: This rank.
        port: Port of the store through which raw gloo connects.
        names: Transports to compare.
        membership: Certificate for TLS.
        options: What to measure.
        results: Queue of the results: shape, figures, those of round trips, processor time of this rank.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = connect_store(ADDR, port, timeout_s=60)
    join_group(store, index=rank, size=2)  # for raw gloo
    opened = {name: open_transport(name, rank, membership, store) for name in names}
    transports = {name: transport for name, (_, transport) in opened.items()}
    for shape in SHAPES:
        specs = (TensorSpec(shape, torch.float32),)
        size = specs[0].bytes
        count = max(20, options.megabytes * 1_000_000 // size)
        raw_throughput(rank, size, 10)
        for transport in transports.values():
            relay(rank, transport, specs, 10, one=False)
        rows, trips, costs = [], [], []
        for _ in range(options.repetitions):
            spent: dict[str, float] = {}
            raw = time_processor(partial(raw_throughput, rank, size, count), spent, RAW)
            ours = {
                name: time_processor(partial(relay, rank, one, specs, count, one=False), spent, name)
                for name, one in transports.items()
            }
            rows.append((raw, ours))
            costs.append(spent)
        for _ in range(options.repetitions if shape == ROUND_TRIP else 0):
            raw = raw_round_trip(rank, size, 200)
            ours = {n: relay(rank, one, specs, 200, one=True) for n, one in transports.items()}
            trips.append((raw, ours))
        results.put((shape, rows, trips, costs))
    for endpoint, transport in opened.values():
        transport.close()
        endpoint.close()


def free_of_contention() -> str:
    """Describe how busy the machine was before the benchmark, for the record."""
    return f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores, host {socket.gethostname()}"


@dataclass(frozen=True)
class Options:
    """What to measure."""

    repetitions: int
    megabytes: int
    """Megabytes to move in a repetition."""


def report(
    name: str, rows: Rows, show: Callable[[float], str], asked: Mapping[str, str], costs: Costs
) -> Iterator[Row]:
    """Yield rows of the table: raw gloo, and each transport with its ratios."""
    raw = statistics.median(theirs for theirs, _ in rows)
    yield name, RAW, show(raw), "", "", ""
    for transport in rows[0][1]:
        ours = statistics.median(mine[transport] for _, mine in rows)
        ratio = statistics.median(mine[transport] / theirs for theirs, mine in rows)
        cost = f"{statistics.median(one[transport] / one[RAW] for one in costs):.2f}" if costs else ""
        yield "", transport, show(ours), f"{ratio:.2f}", asked.get(transport, ""), cost


def of_both(costs: Costs, others: Costs) -> Costs:
    """Return the sums of the processor time of two ranks."""
    return [{name: one[name] + other[name] for name in one} for one, other in zip(costs, others, strict=True)]


def main() -> None:
    """Run both ranks and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repetitions", type=int, default=7, metavar="N", help="repetitions of each side (7)"
    )
    parser.add_argument(
        "--megabytes", type=int, default=300, metavar="MB", help="megabytes to move in a repetition (300)"
    )
    parser.add_argument(
        "--transports", nargs="+", choices=GOALS, default=[*GOALS], help="transports to compare (all)"
    )
    arguments = parser.parse_args()
    console = Console()
    console.print(f"{free_of_contention()}; {ssl.OPENSSL_VERSION}", highlight=False)
    store, port = serve_store(ADDR)
    membership = Membership.from_text(make_key(), "benchmark")
    names: list[str] = arguments.transports
    options = Options(arguments.repetitions, arguments.megabytes)
    context = multiprocessing.get_context("spawn")
    results = [context.Queue() for _ in range(2)]
    ranks = [
        context.Process(target=measure, args=(rank, port, names, membership, options, results[rank]))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    table = Table("frame", "transport", "", "of raw gloo", "asked", "processor time, of raw gloo's")
    for place in range(len(SHAPES)):
        (shape, rows, trips, costs), (*_, others) = [one.get(timeout=LIMIT_S) for one in results]
        name = "x".join(map(str, shape))
        asked = {transport: f">= {goals[place]}" for transport, goals in GOALS.items() if goals}
        spent = of_both(costs, others)
        for row in report(name, rows, lambda rate: f"{rate / 1e6:.0f} MB/s", asked, spent):
            table.add_row(*row)
        asked = {transport: f"<= {goal}" for transport, goal in ROUND_TRIP_GOALS.items()}
        if trips:
            for row in report(f"{name} round trip", trips, lambda time: f"{time * 1e3:.2f} ms", asked, []):
                table.add_row(*row)
    for process in ranks:
        process.join()
    console.print(table)
    del store


if __name__ == "__main__":
    main()
