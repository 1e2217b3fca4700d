"""Measure how much of a gigabit link each transport uses: ``python benchmarks/gigabit.py``. Needs root.

    host board0 ──frames of 4.8 MB, over an emulated gigabit link──> host board1

Each transport moves frames one way between two hosts of the test bed; the rate counts values, not headers.
Transports take turns; reports medians. Each rank runs this program with ``--rank``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from beds import Kind, raised
from links import take
from rich.console import Console
from rich.table import Table

from pipeedge.base.payload import TensorSpec
from pipeedge.plan.specs import BYTES_PER_SECOND_PER_MBPS
from pipeedge.request.config import TransportRequest
from pipeedge.transport.base import Link, Packet, Rendezvous
from pipeedge.transport.choice import make_endpoint
from pipeedge.transport.interfaces import link_address
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import make_key
from pipeedge.transport.place import Place

TRANSPORTS = {"p2p": None, "tcp": 0.95, "tcp, TLS": 0.93}
"""Fraction of the rate that is asked for."""
MBPS = 1000.0
LINK = Link(0, 1, (TensorSpec((8, 197, 768), torch.float32),))
WARM = 4
LIMIT_S = 120


def serve_rank(rank: int, name: str, addr: str, count: int) -> None:
    """Run one end of the link; rank 1 prints the bytes per second."""
    comm, _, secured = name.partition(", ")
    request = TransportRequest(comm)
    membership = Membership.from_text(Path("key.pem").read_text(), "benchmark") if secured else None
    endpoint = make_endpoint(request, rank, addr, membership)
    transport = endpoint.transport()
    place = endpoint.listen(link_address("", addr, 1))
    Path(f"place{rank}.new").write_text("" if place is None else f"{place.address} {place.port}")
    Path(f"place{rank}.new").rename(f"place{rank}")
    places = {}
    for each in (0, 1):
        while not (stated := Path(f"place{each}")).exists():
            time.sleep(0.01)
        if stated.read_text():
            address, port = stated.read_text().split()
            places[each] = Place(address, int(port))
    transport.open(Rendezvous(addr, (0, 1), places, 60.0))
    if rank == 0:
        sender = transport.sender(LINK)
        for number in range(WARM + count):
            reserved = sender.reserve(LINK.specs)
            sender.post(Packet(number, 1, reserved.payload, reserved.lease))
        sender.finish()
    else:
        receiver = transport.receiver(LINK)
        for _ in range(WARM):
            take(receiver)
        began = time.perf_counter()
        for _ in range(count):
            take(receiver)
        print(count * LINK.specs[0].bytes / (time.perf_counter() - began))
        receiver.receive()
    transport.close()
    endpoint.close()


def main() -> None:
    """Run both ranks over each transport and print the table, or run one rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="repetitions (3)")
    parser.add_argument("--count", type=int, default=120, metavar="N", help="frames in a repetition (120)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--transport", choices=TRANSPORTS, help=argparse.SUPPRESS)
    parser.add_argument("--addr", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        serve_rank(arguments.rank, arguments.transport, arguments.addr, arguments.count)
        return
    rates: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
    kind = Kind("board", 2, 1.0, MBPS)
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        (directory / "key.pem").write_text(make_key())
        with raised(f"gigabit{os.getpid()}", (kind,), directory / "bed") as bed:
            addr = bed.bed.journal.host(kind.names[0]).address
            for _ in range(arguments.repetitions):
                for name, found in rates.items():
                    for rank in (0, 1):
                        (directory / f"place{rank}").unlink(missing_ok=True)
                    own = [sys.executable, str(Path(__file__).resolve()), "--addr", addr]
                    own += ["--transport", name, "--count", str(arguments.count), "--rank"]
                    ranks = [
                        subprocess.Popen(
                            bed.bed.command(host, [*own, str(rank)]),
                            cwd=directory,
                            stdout=subprocess.PIPE,
                            text=True,
                        )
                        for rank, host in enumerate(kind.names)
                    ]
                    said = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
                    found.append(float(said[1]))
    console = Console()
    table = Table("transport", "MB/s", "of the rate", "asked")
    for name, asked in TRANSPORTS.items():
        rate = statistics.median(rates[name])
        part = rate / (MBPS * BYTES_PER_SECOND_PER_MBPS)
        table.add_row(name, f"{rate / 1e6:.1f}", f"{part:.3f}", "" if asked is None else f">= {asked}")
    console.print(table)


if __name__ == "__main__":
    main()
