#!/usr/bin/env python3
"""Compare runs over two transports: ``benchmarks/transports.py [throughput] [memory] [threads]``.

throughput  ViT-Base, cut in the middle, over two ranks of one thread; both transports in the same two
            processes, in turn; reports the median of the pairs, and peak memory from a run over each.
memory      a model of DeiT-Tiny's width over two ranks that send to each other, thousands of microbatches
            over the second transport; resident memory (VmRSS), threads and open files (also sockets) after
            the warm-up, and the largest numbers since then.
threads     over RPC, the same traffic with 4, 16 and 64 worker threads: once with this package, and once
            with shards that run on the worker threads and all microbatches sent at once, the usual design.

The transports are p2p and rpc, or those of ``--transports``. Needs Linux, for ``/proc``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc
from links import ADDR, open_transport
from rich.console import Console
from rich.table import Table

from pipeedge.base.crew import Crew
from pipeedge.base.schedule import LayerRange
from pipeedge.models import find_model
from pipeedge.models.weights.locating import hub_tensors
from pipeedge.models.weights.random_weights import RandomWeights
from pipeedge.models.weights.writing import write_npz
from pipeedge.run.activity import Activity
from pipeedge.run.stage import Stage
from pipeedge.run.worker import Incoming, Outgoing, SendingEnd, StageLoop, StageSteps
from pipeedge.transport.base import Link, Packet, Transport
from pipeedge.transport.interfaces import listen
from pipeedge.transport.loopback import LocalLink
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import make_key
from pipeedge.transport.rendezvous import connect_store, join_group, serve_store

VIT_BASE = "google/vit-base-patch16-224"
UBATCH = 8
TRANSPORTS = ("p2p", "rpc", "tcp", "tcp, TLS")
THROUGHPUT_TARGETS = {("p2p", "rpc"): 0.92, ("tcp", "tcp, TLS"): 0.98}
"""Targets for the throughput over the second transport, relative to that over the first."""
PEAK_TARGETS = {("p2p", "rpc"): 1.3, ("p2p", "tcp"): 1.0, ("p2p", "tcp, TLS"): 1.0}
"""Largest peak memory over the second transport, relative to that over the first."""
GROWTH_TARGETS = (0.02, 20.0)
"""Targets for growth: as a fraction, or in MB; meeting either is enough."""
PARTS = ("throughput", "memory", "threads")
LIMIT_S = 420.0

_rpc: Any = torch.distributed.rpc


@dataclass(frozen=True)
class Sample:
    """What a process keeps at one moment."""

    when: float
    """Time by ``time.time()``."""
    megabytes: float
    """Resident memory in MB of 2^20 bytes."""
    threads: int
    files: int
    """Open files, sockets among them."""


@dataclass(frozen=True)
class Ran:
    """Result of a run."""

    report: dict[str, Any]
    samples: list[list[Sample]]
    """Samples of each rank."""

    def windows(self, warm_up: int) -> list[tuple[Sample, Sample]]:
        """Return what each rank keeps after ``warm_up`` microbatches, and the most of each since then."""
        began = self.report["began"]
        warm = began + self.report["elapsed_s"] * warm_up / self.report["microbatches"]
        end = began + self.report["elapsed_s"]
        found = []
        for series in self.samples:
            after = [sample for sample in series if warm <= sample.when <= end]
            most = Sample(
                end,
                max(sample.megabytes for sample in after),
                max(sample.threads for sample in after),
                max(sample.files for sample in after),
            )
            found.append((after[0], most))
        return found


def look_at(pid: int) -> Sample | None:
    """Return what a process keeps, or None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None
    status = dict(line.split(":", 1) for line in lines)
    if "VmRSS" not in status:
        return None
    return Sample(time.time(), int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), files)


def own_mb() -> float:
    """Return the resident memory of this process in MB."""
    sample = look_at(os.getpid())
    return 0.0 if sample is None else sample.megabytes


def free_port() -> int:
    """Return a free port."""
    with listen("127.0.0.1", 0) as listener:
        return int(listener.getsockname()[1])


def watch(processes: Sequence[subprocess.Popen[bytes]]) -> list[list[Sample]]:
    """Record what the processes keep until all have ended; kill them if one fails or time is up."""
    samples: list[list[Sample]] = [[] for _ in processes]
    deadline = time.monotonic() + LIMIT_S
    try:
        while any(process.poll() is None for process in processes):
            for series, process in zip(samples, processes, strict=True):
                if (sample := look_at(process.pid)) is not None:
                    series.append(sample)
            if time.monotonic() > deadline:
                raise SystemExit(f"a run did not finish within {LIMIT_S:g} s")
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        raise SystemExit(f"rank {failed[0]} ended with {processes[failed[0]].returncode}")
    return samples


def key_of(directory: Path) -> Path:
    """Return a key file in ``directory``."""
    path = directory / "key.pem"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(make_key())
    return path


def run(directory: Path, transport: str, *options: object) -> Ran:
    """Run two ranks of the runtime over a transport on this machine, with one thread each."""
    report = directory / "report.json"
    comm, _, secured = transport.partition(", ")
    key = ("--key", key_of(directory)) if secured else ()
    common = ["--port", free_port(), "--report", report, "-c", comm, *key, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "pipeedge.run.main", str(rank), "2", *map(str, common)],
            stdout=subprocess.DEVNULL,
            env=environment,
        )
        for rank in range(2)
    ]
    created = time.time()
    samples = watch(processes)
    body = json.loads(report.read_text())
    return Ran({**body, "began": created + body["startup_s"]}, samples)


def tiny_model(directory: Path, blocks: int) -> Path:
    """Create a directory with a randomly initialised ViT of DeiT-tiny's width and ``blocks`` blocks."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, num_hidden_layers=blocks, num_attention_heads=3, intermediate_size=768, num_labels=10
    )
    path = directory / "tiny"
    ViTForImageClassification(config).save_pretrained(path)
    return path


def throughput(
    console: Console, directory: Path, pair: tuple[str, str], microbatches: int, repetitions: int
) -> bool:
    """Compare the second transport with the first, and return whether it meets its targets."""
    model = find_model(VIT_BASE)
    weights = directory / "weights.npz"
    source = RandomWeights(hub_tensors(model.build(), model.config), seed=0)
    write_npz(weights, source.names, source)
    rates = alternating_rates(directory, pair, weights, microbatches, repetitions)
    ratio = statistics.median(second / first for first, second in rates)
    options = ("-m", VIT_BASE, "-M", weights, "-pt", "1,24,25,48", "-u", UBATCH, "-b", 4 * UBATCH)
    peaks = {
        name: [stage["rss_peak_mb"] for stage in run(directory, name, *options).report["stages"]]
        for name in pair
    }
    growth = max(second / first for first, second in zip(*peaks.values(), strict=True))
    table = Table(
        title=f"ViT-Base, 24/24, {len(rates)} times {microbatches} microbatches of {UBATCH} over each"
    )
    for name in ("links", "items/s, median", "items/s, range", "peak rank 0", "peak rank 1"):
        table.add_column(name, justify="right")
    for name, found in zip(pair, zip(*rates, strict=True), strict=True):
        table.add_row(
            name,
            f"{statistics.median(found):.2f}",
            f"{min(found):.2f} to {max(found):.2f}",
            *(f"{peak:.0f} MB" for peak in peaks[name]),
        )
    console.print(table)
    asked, allowed = THROUGHPUT_TARGETS.get(pair, 0.0), PEAK_TARGETS.get(pair, math.inf)
    against = "/".join(reversed(pair))
    console.print(f"throughput {against}, median of pairs {ratio:.3f} (target {asked or 'none'})")
    console.print(f"peak memory {against} {growth:.2f} at most (target {allowed})")
    return ratio >= asked and growth <= allowed


@dataclass(frozen=True)
class Alternation:
    """What both ranks of a comparison are told."""

    port: int
    """Port of the store through which they meet for barriers."""
    pair: tuple[str, str]
    """Names of the transports, in the order in which they are compared."""
    key: str
    weights: str
    microbatches: int
    repetitions: int


def alternating_rates(
    directory: Path, pair: tuple[str, str], weights: Path, microbatches: int, repetitions: int
) -> list[tuple[float, float]]:
    """Return the items per second over both transports, of each repetition."""
    key = key_of(directory)
    store, port = serve_store(ADDR)
    told = Alternation(port, pair, str(key), str(weights), microbatches, repetitions)
    command = [sys.executable, __file__, "--alternate", json.dumps(asdict(told))]
    with (directory / "rates.txt").open("w+") as rates:
        watch(
            [
                subprocess.Popen(
                    [*command, str(rank)], stdout=rates, env={**os.environ, "OMP_NUM_THREADS": "1"}
                )
                for rank in range(2)
            ]
        )
        del store
        rates.seek(0)
        return [tuple(json.loads(line)) for line in rates]


def alternate(rank: int, told: Alternation) -> None:
    """Run both transports in turn in the same two processes; rank 0 prints the items per second of each.

    The speed of a shared machine changes from minute to minute; the compared runs are only seconds
    apart, and in either order.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"
    model = find_model(VIT_BASE)
    half = model.n_layers // 2
    layers = LayerRange(0, half) if rank == 0 else LayerRange(half, model.n_layers)
    stage = Stage(model.load(layers, Path(told.weights)), torch.device("cpu"))
    there = Link(0, 1, model.payload_specs(half, UBATCH, None))
    back = Link(1, 0, model.payload_specs(model.n_layers, UBATCH, None))
    store = connect_store(ADDR, told.port, timeout_s=60)
    join_group(store, index=rank, size=2)  # for barriers
    membership = Membership.from_file(Path(told.key))
    opened = {name: open_transport(name, rank, membership, store) for name in told.pair}
    transports = {name: transport for name, (_, transport) in opened.items()}
    names = list(transports)
    for repetition in range(-1, told.repetitions):
        rates = {
            name: once(rank, transports[name], stage, there, back, told.microbatches)
            for name in (names if repetition % 2 else reversed(names))
        }
        if rank == 0 and repetition >= 0:
            print(json.dumps([rates[name] for name in names]), flush=True)
    for endpoint, transport in opened.values():
        transport.close()
        endpoint.close()


def once(rank: int, transport: Transport, stage: Stage, there: Link, back: Link, count: int) -> float:
    """Run ``count`` microbatches and return the items per second, on rank 0."""
    crew, activity = Crew(), Activity()
    sending = Outgoing(SendingEnd(transport.sender(there if rank == 0 else back), 1 - rank), activity)
    receiver = transport.receiver(back if rank == 0 else there)
    source = LocalLink()
    incoming = Incoming(source, None, activity) if rank == 0 else Incoming(receiver, 0, activity)
    loop = StageLoop(StageSteps(stage), incoming, sending, activity)

    def feed() -> None:
        pixels = torch.zeros(UBATCH, 3, 224, 224)
        for number in range(count):
            source.post(Packet(number, UBATCH, (pixels,)))
        source.finish()

    def collect() -> None:
        while receiver.receive() is not None:
            pass

    torch.distributed.barrier()
    began = time.perf_counter()
    if rank == 0:
        crew.start("feed", feed)
        crew.start("collect", collect)
    crew.start("compute", loop.run)
    crew.start("watch", sending.run)
    crew.wait()
    return count * UBATCH / (time.perf_counter() - began)


@dataclass(frozen=True)
class Traffic:
    """What crosses the links while memory is measured."""

    blocks: int
    ubatch: int
    warm_up: int
    """Microbatches before measuring."""
    count: int
    """Microbatches while measuring."""


def memory(console: Console, directory: Path, transport: str, traffic: Traffic) -> bool:
    """Measure how much more the ranks keep with time; return whether all are within the target."""
    model = tiny_model(directory, traffic.blocks)
    middle, warm_up = 2 * traffic.blocks, traffic.warm_up
    ran = run(
        directory,
        transport,
        *("-m", model, "-r", "1,0", "-pt", f"1,{middle},{middle + 1},{4 * traffic.blocks}"),
        *("-u", traffic.ubatch, "-b", traffic.ubatch * (warm_up + traffic.count)),
    )
    table = Table(
        title=f"{traffic.count} microbatches of {traffic.ubatch}x197x192 after {warm_up}, over {transport}"
    )
    for name in ("rank", f"MB after {warm_up}", "MB at most since", "growth", "target", "threads", "files"):
        table.add_column(name, justify="right")
    good = True
    for rank, (before, most) in enumerate(ran.windows(warm_up)):
        grown = most.megabytes - before.megabytes
        good &= grown <= max(GROWTH_TARGETS[0] * before.megabytes, GROWTH_TARGETS[1])
        good &= (most.threads, most.files) == (before.threads, before.files)
        table.add_row(
            str(rank),
            f"{before.megabytes:.1f}",
            f"{most.megabytes:.1f}",
            f"{grown:.1f} MB ({grown / before.megabytes:.1%})",
            f"{GROWTH_TARGETS[0]:.0%} or {GROWTH_TARGETS[1]:g} MB",
            f"{before.threads}, then {most.threads}",
            f"{before.files}, then {most.files}",
        )
    console.print(table)
    return good


# -- the usual design, for comparison -------------------------------------------------------------


class Worker:
    """A shard that runs on the worker threads of RPC."""

    shard: torch.nn.Module

    @classmethod
    def call(cls, values: torch.Tensor) -> torch.Tensor:
        """Run the shard of this rank on ``values``."""
        with torch.no_grad():
            return cls.shard((values,))[0]  # type: ignore[no-any-return]


def usual(rank: int, port: int, threads: int, model_dir: str, warm_up: int, count: int) -> None:
    """Run a pipeline of two ranks as in the tutorials.

    Each rank prints its memory in MB after the warm-up, and its peak.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"
    model = find_model(model_dir)
    half = model.n_layers // 2
    layers = LayerRange(half, model.n_layers) if rank == 0 else LayerRange(0, half)
    Worker.shard = model.load(layers)
    options = _rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=threads, rpc_timeout=LIMIT_S, init_method=f"tcp://127.0.0.1:{port}"
    )
    _rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    series: list[float] = []
    if rank == 0:
        batch = 100
        for _ in range(0, warm_up + count, batch):
            # The reply of the first stage is handled, and the second stage computed, on a worker thread of
            # this rank. (Nested calls, as in the tutorials, would hang here as soon as there are
            # more microbatches in flight than worker threads, because replies need a worker thread too.)
            futures = [
                _rpc.rpc_async("rank1", Worker.call, args=(torch.randn(1, 3, 224, 224),)).then(
                    lambda done: Worker.call(done.value())
                )
                for _ in range(batch)
            ]
            for future in futures:
                future.wait()
            del futures, future
            pair = (own_mb(), _rpc.rpc_sync("rank1", own_mb))
            series.append(pair)  # type: ignore[arg-type]
        warm = warm_up // batch - 1
        for each in range(2):
            values = [pair[each] for pair in series[warm:]]  # type: ignore[index]
            print(json.dumps([each, values[0], max(values)]), flush=True)
    _rpc.shutdown()


def threads(console: Console, directory: Path, warm_up: int, count: int) -> bool:
    """Print the table of memory by number of worker threads, which has no target."""
    model = tiny_model(directory, 1)
    table = Table(title=f"worker threads: {count} microbatches of 1x197x192 after {warm_up}; MB")
    for name in ("-w", "design", "rank 0", "rank 1"):
        table.add_column(name, justify="right")
    for number in (4, 16, 64):
        ran = run(
            directory,
            "rpc",
            *("-m", model, "-w", number, "-r", "1,0", "-pt", "1,2,3,4"),
            *("-u", 1, "-b", warm_up + count),
        )
        kept = [(before.megabytes, most.megabytes) for before, most in ran.windows(warm_up)]
        cells = [f"{before:.0f} -> {most:.0f}" for before, most in kept]
        table.add_row(str(number), "this package", *cells)
        port = free_port()
        arguments = [str(port), str(number), str(model), str(warm_up), str(count)]
        output = directory / "usual.txt"
        with output.open("wb") as stream:
            watch(
                [
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore", __file__, "--usual", str(rank), *arguments],
                        stdout=stream,
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                    )
                    for rank in range(2)
                ]
            )
        found = sorted(json.loads(line) for line in output.read_text().splitlines())
        table.add_row("", "computing on them", *(f"{before:.0f} -> {most:.0f}" for _, before, most in found))
    console.print(table)
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (the first two)")
    parser.add_argument(
        "--transports",
        nargs=2,
        choices=TRANSPORTS,
        default=TRANSPORTS[:2],
        metavar=("FIRST", "SECOND"),
        help=f"transports to compare, of {'; '.join(TRANSPORTS)} (p2p rpc); memory is that over the second",
    )
    parser.add_argument(
        "-b", "--batch-size", type=int, default=48, metavar="N", help="throughput: items in a run (48)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=5, metavar="N", help="throughput: runs of each transport (5)"
    )
    parser.add_argument(
        "--warm-up", type=int, default=300, metavar="N", help="memory: microbatches before measuring (300)"
    )
    parser.add_argument(
        "--count", type=int, default=3000, metavar="N", help="memory: microbatches while measuring (3000)"
    )
    parser.add_argument("--blocks", type=int, default=1, metavar="N", help="memory: blocks of the model (1)")
    parser.add_argument(
        "-u", "--ubatch-size", type=int, default=1, metavar="N", help="memory: items in a microbatch (1)"
    )
    return parser


def main() -> int:
    """Print the tables; return 1 if a target is missed."""
    if sys.argv[1:2] == ["--alternate"]:
        told, rank = sys.argv[2:]
        alternate(int(rank), Alternation(**json.loads(told)))
        return 0
    if sys.argv[1:2] == ["--usual"]:
        # Import this file as a module, because RPC finds functions by the name of their module.
        import transports as this

        rank, port, number, model, warm_up, count = sys.argv[2:]
        this.usual(int(rank), int(port), int(number), model, int(warm_up), int(count))
        return 0
    parser = _parser()
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    console = Console()
    good = True
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for part in args.parts or PARTS[:2]:
            if part == "throughput":
                count = args.batch_size // UBATCH
                good &= throughput(console, directory, tuple(args.transports), count, args.repetitions)
            elif part == "memory":
                traffic = Traffic(args.blocks, args.ubatch_size, args.warm_up, args.count)
                good &= memory(console, directory, args.transports[1], traffic)
            else:
                good &= threads(console, directory, args.warm_up, args.count)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
