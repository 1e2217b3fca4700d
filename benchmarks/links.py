"""Compare a relay over PipeEdge's links with raw gloo: ``python benchmarks/links.py``.

    rank 0 ──frames──> rank 1 (computes nothing) ──frames──> rank 0

The relay runs the real loops of a stage. Raw gloo moves the same bytes in both directions, with two
``isend`` and two ``irecv`` in flight on both ranks. Repetitions of the two alternate within one run, and
medians are reported. Timing starts after ``WARM`` frames, when all memory has been touched.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from pipeedge.base.crew import Crew
from pipeedge.base.payload import TensorSpec
from pipeedge.run.worker import Activity, Incoming, Outgoing, SendingEnd, StageLoop, StageSteps
from pipeedge.transport.base import Link, Packet, Receiver, Rendezvous
from pipeedge.transport.p2p import P2PTransport
from pipeedge.transport.rendezvous import connect_store, join_group, serve_store

SHAPES = {(8, 197, 768): 0.85, (1, 197, 768): 0.70, (1, 197, 192): 0.55}
"""Shapes of float32 payloads, with the target relative to raw gloo."""
ROUND_TRIP = ((1, 197, 768), 1.5)
ADDR = "127.0.0.1"
LIMIT_S = 300
WARM = 8


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


def relay(
    rank: int, transport: P2PTransport, specs: tuple[TensorSpec, ...], count: int, *, one: bool
) -> float:
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


def measure(rank: int, port: int, repetitions: int, megabytes: int, results: Any) -> None:
    """Run one rank of the benchmark."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    join_group(connect_store(ADDR, port, timeout_s=60), index=rank, size=2)  # for raw gloo
    transport = P2PTransport(rank)
    transport.open(Rendezvous(ADDR, port, (0, 1), 60.0))
    for shape in SHAPES:
        specs = (TensorSpec(shape, torch.float32),)
        size = specs[0].bytes
        count = max(20, megabytes * 1_000_000 // size)
        raw_throughput(rank, size, 10)
        relay(rank, transport, specs, 10, one=False)
        rows = []
        for _ in range(repetitions):
            rows.append((raw_throughput(rank, size, count), relay(rank, transport, specs, count, one=False)))
        trips = []
        if shape == ROUND_TRIP[0]:
            for _ in range(repetitions):
                trips.append((raw_round_trip(rank, size, 200), relay(rank, transport, specs, 200, one=True)))
        if rank == 0:
            results.put((shape, rows, trips))
    transport.close()


def free_of_contention() -> str:
    """Describe how busy the machine was before the benchmark, for the record."""
    return f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores, host {socket.gethostname()}"


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
    arguments = parser.parse_args()
    console = Console()
    console.print(free_of_contention(), highlight=False)
    store, port = serve_store(ADDR)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(
            target=measure, args=(rank, port, arguments.repetitions, arguments.megabytes, results)
        )
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    table = Table("frame", "raw", "ours", "ratio", "asked")
    for _ in SHAPES:
        shape, rows, trips = results.get(timeout=LIMIT_S)
        name = "x".join(map(str, shape))
        raw, ours = (statistics.median(column) for column in zip(*rows, strict=True))
        ratio = statistics.median(mine / theirs for theirs, mine in rows)
        table.add_row(
            name, f"{raw / 1e6:.0f} MB/s", f"{ours / 1e6:.0f} MB/s", f"{ratio:.2f}", f">= {SHAPES[shape]}"
        )
        if trips:
            raw, ours = (statistics.median(column) for column in zip(*trips, strict=True))
            ratio = statistics.median(mine / theirs for theirs, mine in trips)
            table.add_row(
                f"{name} round trip",
                f"{raw * 1e3:.2f} ms",
                f"{ours * 1e3:.2f} ms",
                f"{ratio:.2f}",
                f"<= {ROUND_TRIP[1]}",
            )
    for process in ranks:
        process.join()
    console.print(table)
    del store


if __name__ == "__main__":
    main()
