"""Disturb the ranks of a real run: kill, suspend, cut off, or raise an exception in a layer, and start again.

    fork server (torch imported) ──> rank 0   rank 1   rank 2   rank 3      one process each, own session
                                        └────────┴── switch ───┴──> with root: a network namespace each
    FILE.part of rank 0 grows by a record a result ──> Progress: when the results came

A rank that was disturbed is ended if it is still there, and started again with the same command.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from pipeedge.base.errors import PipeEdgeError
from pipeedge.data.unfinished import unfinished_path
from pipeedge.models.layers.decoder import DecoderStage
from pipeedge.models.shard import Shard
from pipeedge.testbed import network

__all__ = ["KINDS", "Cables", "Disturbance", "Progress", "Ranks", "cables", "free_port"]

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("kill", "suspend", "exception", "cut")
"""Kinds of disturbance; a cable can only be cut between network namespaces."""
_PRELOADED = ("pipeedge.run.main", "pipeedge.run.pipeline", "pipeedge.run.reporting", "pipeedge.base.console")
_CLONE_NEWNET = 0x40000000
_LOOK_S = 0.002
_RAISES_WITHIN_S = 3.0
"""Seconds within which a rank that computes meets its exception; a spare never does."""


class Cables:
    """Hosts in network namespaces, one for each rank, with cables to a switch."""

    def __init__(self, hosts: int) -> None:
        name = f"fo{os.getpid()}"
        self._switch = f"{name}-switch"
        self._ports = [
            network.Port(f"{name}-{host}", f"host{host}", f"10.213.9.{host + 1}/24", None)
            for host in range(hosts)
        ]
        network.make_network(self._switch, self._ports)

    def close(self) -> None:
        """Remove all hosts and the switch."""
        network.remove_namespaces([self._switch, *(port.namespace for port in self._ports)])

    def enter(self, host: int) -> None:
        """Move this process into the namespace of a host."""
        with Path("/run/netns", self._ports[host].namespace).open("rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "cannot enter the network namespace")

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return self._ports[host].address.partition("/")[0]

    def plug(self, host: int, state: str) -> None:
        """Cut the cable of a host (``down``), or plug it in again (``up``)."""
        words = ["link", "set", "dev", self._ports[host].interface, state]
        subprocess.run(["ip", "-n", self._switch, *words], check=True, capture_output=True, timeout=60)


@contextlib.contextmanager
def cables(hosts: int) -> Iterator[Cables | None]:
    """Yield hosts with networks of their own, or None where this machine allows none."""
    made = None
    if os.geteuid() == 0:
        with contextlib.suppress(PipeEdgeError):
            made = Cables(hosts)
    try:
        yield made
    finally:
        if made is not None:
            made.close()


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Disturbance:
    """What was done to a rank, and when."""

    kind: str
    rank: int
    at_s: float
    """Time on the monotonic clock."""
    alone: bool = True
    """Whether no other one came within two seconds."""
    repaired: bool = False
    """Whether the rank was started again."""
    recovered: bool = False
    """Whether a new epoch has been found that followed from it."""

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.rank}"


@dataclass
class Progress:
    """Results of a run, from the growth of its unfinished output."""

    path: Path
    grew_s: list[float] = field(default_factory=list)
    """Times on the monotonic clock at which results came."""
    size: int = 0

    def look(self) -> int:
        """Return the bytes that are written; the last ones that were seen once the file is complete."""
        with contextlib.suppress(FileNotFoundError):
            size = unfinished_path(self.path).stat().st_size
            if size > self.size:
                self.size = size
                self.grew_s.append(time.monotonic())
        return self.size


class Ranks:
    """The ranks of one run. A context manager, which ends those that are left.

    Args:
        count: Number of ranks.
        options: Options of ``runtime.py`` that all ranks get.
        own: Further options of rank 0.
        directory: Where they run; their output goes to files there.
        net: Network namespaces, or None for the loopback.
        pinned: Whether each rank stays on a processor of its own, as on a host of its own.
    """

    def __init__(
        self,
        count: int,
        options: Sequence[str],
        own: Sequence[str],
        directory: Path,
        net: Cables | None,
        *,
        pinned: bool = False,
    ) -> None:
        self.count = count
        self.directory = directory
        self._options, self._own, self._net = tuple(options), tuple(own), net
        self._pinned = pinned
        self._processes: dict[int, ForkServerProcess] = {}
        self._started = [0] * count
        self._cut: set[int] = set()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_PRELOADED, __name__])
        self._address = ("127.0.0.1" if net is None else net.address(0), free_port())

    def __enter__(self) -> Ranks:
        for rank in range(self.count):
            self.start(rank)
        return self

    def __exit__(self, *exc: object) -> None:
        for rank in self._processes:
            self.end(rank)
        for rank in tuple(self._cut):
            self._plug_in(rank)

    def start(self, rank: int) -> None:
        """Start a rank, for the first time or again."""
        self._started[rank] += 1
        address, port = self._address
        where = ["--addr", address, "--port", str(port)]
        words = [str(rank), str(self.count), *where, *self._options, *(self._own if rank == 0 else ())]
        name = f"rank{rank}-{self._started[rank]}"
        arguments = words, self.directory, name, self._net, rank, self._pinned
        process = self._context.Process(target=_become, args=arguments)
        process.start()
        self._processes[rank] = process

    def pid(self, rank: int) -> int:
        """Return the process of a rank."""
        return self._processes[rank].pid or 0

    def status(self, rank: int, within_s: float = 0.0) -> int | None:
        """Return the exit status of a rank, or None if it still runs after ``within_s`` seconds."""
        process = self._processes[rank]
        multiprocessing.connection.wait([process.sentinel], within_s)
        return process.exitcode

    def disturb(self, kind: str, rank: int) -> Disturbance:
        """Disturb a rank."""
        done = Disturbance(kind, rank, time.monotonic())
        if kind == "cut" and self._net is not None:
            self._net.plug(rank, "down")
            self._cut.add(rank)
        elif self.status(rank) is None:
            number = {"kill": signal.SIGKILL, "suspend": signal.SIGSTOP, "exception": signal.SIGUSR1}[kind]
            os.kill(self.pid(rank), number)
        return done

    def end(self, rank: int) -> None:
        """End the process of a rank, and wait for it."""
        process = self._processes[rank]
        if process.exitcode is None:
            process.kill()
        process.join()

    def repair(self, done: Disturbance) -> None:
        """Start a rank again that was disturbed, on a cable that is whole."""
        if done.kind == "exception":
            self.status(done.rank, max(0.0, done.at_s + _RAISES_WITHIN_S - time.monotonic()))
        self.end(done.rank)
        if done.rank in self._cut:
            self._plug_in(done.rank)
        self.start(done.rank)
        done.repaired = True

    def _plug_in(self, rank: int) -> None:
        if self._net is not None:
            self._net.plug(rank, "up")
        self._cut.discard(rank)

    def watch(self, progress: Progress, size: int, limit_s: float) -> bool:
        """Wait until ``size`` bytes are written, or rank 0 has ended; return whether it still runs.

        Raises:
            TimeoutError: Neither happens within ``limit_s`` seconds.
        """
        deadline = time.monotonic() + limit_s
        while progress.look() < size:
            if self.status(0) is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"{progress.size} of {size} bytes are written after {limit_s:.0f} s")
            time.sleep(_LOOK_S)
        return True

    def watch_words(self, progress: Progress, words: str, times: int, limit_s: float) -> bool:
        """Wait until rank 0 has written ``words`` so often, or has ended; return whether it still runs.

        Raises:
            TimeoutError: Neither happens within ``limit_s`` seconds.
        """
        deadline = time.monotonic() + limit_s
        while (self.directory / "rank0-1.err").read_text(errors="replace").count(words) < times:
            if not self.watch(progress, progress.look() + 1, limit_s):
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 has not said {words!r} {times} times after {limit_s:.0f} s")
        return True

    def said(self, rank: int = 0) -> str:
        """Return the end of what all processes of a rank wrote to standard error."""
        files = sorted(self.directory.glob(f"rank{rank}-*.err"), key=lambda file: file.stat().st_mtime)
        return "".join(file.read_text(errors="replace") for file in files)[-4000:]


class _Raising:
    """A layer that raises an exception once after a signal."""

    def __init__(self) -> None:
        self._pending = False
        signal.signal(signal.SIGUSR1, self._ask)
        Shard.forward = self._failing(Shard.forward)  # type: ignore[method-assign]
        DecoderStage.step = self._failing(DecoderStage.step)  # type: ignore[method-assign]

    def _ask(self, number: int, frame: object) -> None:
        self._pending = True

    def _failing(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return what computes as ``compute`` does, unless it is to fail."""

        def failing(shard: object, *payload: object, **options: object) -> object:
            if self._pending:
                self._pending = False
                raise RuntimeError("planted: a layer fails")
            return compute(shard, *payload, **options)

        return failing


def _become(
    words: Sequence[str], directory: Path, name: str, net: Cables | None, rank: int, pinned: bool
) -> None:
    """Make this process a rank."""
    os.setsid()
    if pinned:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    os.chdir(directory)
    if net is not None:
        net.enter(rank)
    for stream, suffix in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream.flush()
        os.dup2(os.open(f"{name}.{suffix}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), stream.fileno())
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    _Raising()
    sys.argv = ["runtime.py", *words]
    runpy.run_path(str(ROOT / "runtime.py"), run_name="__main__")
