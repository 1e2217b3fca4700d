"""Real ranks of ``runtime.py`` on this machine: started, watched, and gone afterwards, whatever happens.

A world is a context manager. Each rank is the leader of a process group of its own, its output goes to
files (a pipe that nobody reads would stop it), every wait has a limit, and what is left at the end is
killed, children too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

RUNTIME = Path(__file__).resolve().parent.parent / "runtime.py"
DEADLINE_S = 60.0

_ports = itertools.count(20000 + os.getpid() % 500 * 16)
_ports_lock = threading.Lock()


def free_port() -> int:
    """A port that nobody uses, below those that the system hands out by itself."""
    with _ports_lock:
        for port in _ports:
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return port
    raise RuntimeError("no port is free")


@dataclass(frozen=True)
class Ended:
    """What a rank left behind."""

    status: int
    out: str
    err: str
    at: float
    """When it was seen to have ended, ``time.monotonic()``."""

    @property
    def line(self) -> str:
        """The one line on standard error that a failure is allowed."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert len(lines) == 1, f"{len(lines)} lines on standard error:\n{self.err}"
        return lines[0]


class World:
    """Ranks that belong together.

    Args:
        directory: where they run, and where their output goes.
        size: WORLD on their command lines.
        options: for every rank.
        own: further options of single ranks.
        env: further environment variables.
        prefix: what stands before each rank's command (``ip netns exec ...``).
    """

    def __init__(
        self,
        directory: Path,
        size: int,
        *options: object,
        own: Mapping[int, Sequence[object]] | None = None,
        env: Mapping[str, str] | None = None,
        prefix: Callable[[int], Sequence[str]] = lambda rank: (),
        port: int | None = None,
    ) -> None:
        self.directory = directory
        self.size = size
        self.port = free_port() if port is None else port
        self._options = options
        self._own = own or {}
        self._env = env or {}
        self._prefix = prefix
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended_at: dict[int, float] = {}

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)

    def start(self, *ranks: int) -> World:
        """Start ``ranks``; all of them without any."""
        for rank in ranks or range(self.size):
            options = [*self._options, *self._own.get(rank, ())]
            command = [str(RUNTIME), str(rank), str(self.size), "--port", str(self.port), *map(str, options)]
            with (
                (self.directory / f"{rank}.out").open("wb") as out,
                (self.directory / f"{rank}.err").open("wb") as err,
            ):
                self._processes[rank] = subprocess.Popen(
                    [*self._prefix(rank), sys.executable, *command],
                    cwd=self.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env={**environment(), **self._env},
                    start_new_session=True,
                )
        return self

    def signal(self, rank: int, number: int) -> float:
        """Send a signal to a rank; the time of that."""
        os.killpg(self._processes[rank].pid, number)
        return time.monotonic()

    def wait(self, *ranks: int, within: float = DEADLINE_S) -> dict[int, Ended]:
        """How ``ranks`` (all that were started without any) ended; fails if they do not in time."""
        deadline = time.monotonic() + within
        ended = {}
        for rank in ranks or self._processes:
            process = self._processes[rank]
            try:
                process.wait(max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                said = self._text(rank, "err")
                raise AssertionError(f"rank {rank} still runs after {within:g} s; it said: {said}") from None
            ended[rank] = Ended(
                process.returncode, self._text(rank, "out"), self._text(rank, "err"), time.monotonic()
            )
        return ended

    def until(self, happened: Callable[[], bool], what: str, within: float = DEADLINE_S) -> None:
        """Look, every few milliseconds, until ``happened``; fails if it does not, or a rank ends before."""
        deadline = time.monotonic() + within
        while not happened():
            gone = [rank for rank, process in self._processes.items() if process.poll() is not None]
            if gone:
                raise AssertionError(f"rank {gone[0]} ended before {what}: {self._text(gone[0], 'err')}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {within:g} s")
            time.sleep(0.01)

    def until_connected(self, count: int) -> None:
        """Wait until ``count`` connections to the hub stand: those ranks have begun to say hello."""
        self.until(lambda: hub_connections(self.port) >= count, f"{count} ranks connect")

    def until_rows(self) -> None:
        """Wait until the data rank has written results: the pipeline is in full swing."""
        self.until(
            lambda: any(path.stat().st_size > 4096 for path in self.directory.glob(".*.part")), "results come"
        )

    def leftovers(self) -> list[str]:
        """Temporary files that should not be there any more."""
        return sorted(path.name for path in self.directory.iterdir() if path.name.startswith("."))

    def _text(self, rank: int, kind: str) -> str:
        return (self.directory / f"{rank}.{kind}").read_text(errors="replace")


def environment() -> dict[str, str]:
    """The environment of a rank: one thread, no network, and nothing of a surrounding torchrun."""
    dropped = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "ADAPTIVE_QUANT")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def hub_connections(port: int) -> int:
    """Established connections to ``port`` on the loopback, as ``/proc`` has them."""
    table = Path("/proc/net/tcp").read_text().splitlines()[1:]
    remote = f":{port:04X}"
    return sum(1 for line in table if line.split()[2].endswith(remote) and line.split()[3] == "01")


def run_world(
    directory: Path, size: int, *options: object, within: float = DEADLINE_S, **more: object
) -> dict[int, Ended]:
    """Start a whole world and wait for its end."""
    with World(directory, size, *options, **more) as world:  # type: ignore[arg-type]
        return world.start().wait(within=within)
