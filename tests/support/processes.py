"""Run real programs on this machine, and make sure that none is left at the end.

``Programs``, and ``World`` for the ranks of ``runtime.py``, are context managers. Each program is the leader
of a process group of its own, its output goes to files (a pipe that nobody reads would stop it), every wait
has a limit, and what is left at the end is killed, children too.

Importing torch takes longer than all else that these tests ask of a program, so it is by default forked from
a server that has imported torch already. Where the start itself matters, ``fresh`` starts its script in a new
interpreter.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import psutil
import pytest
import torch
from networks import enter
from places import ROOT
from ports import free_port
from waiting import LIMIT_S

from pipeedge.control.hub_client import HubClient
from pipeedge.control.messages import Complete
from pipeedge.models.weights.files import StreamedFile
from pipeedge.run.stage import Stage, StepStage
from pipeedge.transport.base import Packet

_NOTICES_OF_PATIENCE = re.compile(
    r"^.*(waiting for ranks? .* to start|all [\d,]+ ranks are here|rank 0 is here|; still alive)\n", re.M
)
"""Lines that ranks say while they wait for each other. Whether they do so depends on the machine's speed."""
NO_KEY = "links and control are open"
"""Part of what rank 0 says, where a run has no key, on any network but the loopback."""
DIES_WHEN_COMPLETE = "TEST_RANK_THAT_DIES_WHEN_COMPLETE"
"""Environment variable: a forked rank that is killed after the results are complete, before it says so."""
SIGNALS_ITSELF = "TEST_RANKS_THAT_SIGNAL_THEMSELVES"
"""Environment variable: ``RANK:MICROBATCH:SIGNAL,...``, for forked ranks that get a signal in a run that
would end too soon to be sent one from outside: each sends it to itself before it computes the microbatch
or the step.
Instead of signal 0, it raises an exception there."""
HANGS_LOADING = "TEST_RANKS_THAT_HANG_LOADING"
"""Environment variable: ``RANK,...``, for forked ranks that read weights from a disk that does not answer:
the thread that reads is blocked, while the others of the process go on."""
IS_SLOW = "TEST_RANK_THAT_IS_SLOW"
"""Environment variable: ``RANK:SECONDS``, for a forked rank that computes that much longer."""


@dataclass(frozen=True)
class Ended:
    """Result of a program that has ended."""

    status: int
    out: str
    err: str
    """Standard error, without the lines that only a slow start causes."""

    @property
    def line(self) -> str:
        """Return the single line on standard error that a failure may print, besides the lack of a key."""
        lines = [line for line in self.err.splitlines() if line.strip() and NO_KEY not in line]
        assert len(lines) == 1, f"{len(lines)} lines on standard error:\n{self.err}"
        return lines[0]


class _Fresh:
    """A program in an interpreter of its own."""

    def __init__(self, command: Sequence[str], directory: Path, env: Mapping[str, str], name: str) -> None:
        with (directory / f"{name}.out").open("wb") as out, (directory / f"{name}.err").open("wb") as err:
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**environment(), **env},
                start_new_session=True,
            )
        self.pid = self._process.pid

    def status(self, within: float) -> int | None:
        """Its exit status, once it has one; None if it still runs after ``within`` seconds."""
        try:
            return self._process.wait(within)
        except subprocess.TimeoutExpired:
            return None


class _Forked:
    """A program forked from the server."""

    # Starting one looks at all of them, and their states must not be read by two threads at once.
    _lock = threading.Lock()

    def __init__(
        self,
        words: Sequence[str],
        directory: Path,
        env: Mapping[str, str],
        name: str,
        *,
        space: str | None,
        group: int | None,
    ) -> None:
        work = words, directory, env, name, space, group
        with self._lock:
            self._process = fork_server().Process(target=_become, args=work)
            self._process.start()
        self.pid = self._process.pid

    def status(self, within: float) -> int | None:
        """Its exit status, once it has one; None if it still runs after ``within`` seconds."""
        if not multiprocessing.connection.wait([self._process.sentinel], within):
            return None
        with self._lock:
            return self._process.exitcode


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Return the context of processes that are forked with the modules of ``preloaded.py`` imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    with _starting, pytest.MonkeyPatch.context() as patch:
        # The server of Python 3.11 is not told where its parent looks for modules.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        multiprocessing.forkserver.ensure_running()
    return context


_starting = threading.Lock()


def _become(
    words: Sequence[str],
    directory: Path,
    env: Mapping[str, str],
    name: str,
    space: str | None,
    group: int | None,
) -> None:
    if group is None:
        os.setsid()
    else:
        os.setpgid(0, group)
    os.chdir(directory)
    if space is not None:
        enter(space)
    for stream, target in ((sys.stdout, f"{name}.out"), (sys.stderr, f"{name}.err")):
        stream.flush()
        os.dup2(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), stream.fileno())
    os.environ.clear()
    os.environ.update({**environment(), **env})
    torch.set_num_threads(1)
    if env.get(DIES_WHEN_COMPLETE) in words[1:2]:
        HubClient.done = _die_when_complete  # type: ignore[method-assign]
    if {SIGNALS_ITSELF, IS_SLOW} & env.keys():
        _disturb_stage(words[1], env)
    if words[1:2] and words[1] in env.get(HANGS_LOADING, "").split(","):
        StreamedFile.read_into = _never_read  # type: ignore[method-assign]
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")


def _die_when_complete(self: HubClient, stats: Mapping[str, object]) -> None:
    """Replace ``HubClient.done``: kill this process once the data rank has written the results."""
    self.wait(Complete)
    time.sleep(1)  # on rank 0 until the hub's thread, too, has told the others
    os.kill(os.getpid(), signal.SIGKILL)


def _never_read(*_: object, **__: object) -> None:
    """Replace ``StreamedFile.read_into``: wait for a disk that does not answer."""
    threading.Event().wait()


def _disturb_stage(rank: str, env: Mapping[str, str]) -> None:
    """Replace how stages of encoders and decoders compute, as the environment of ``rank`` says."""
    orders = [order.split(":") for order in env.get(SIGNALS_ITSELF, "").split(",") if order]
    signals = {int(microbatch): int(number) for who, microbatch, number in orders if who == rank}
    who, _, seconds = env.get(IS_SLOW, "").partition(":")

    def disturb(kind: type[Stage] | type[StepStage]) -> None:
        compute = kind.__call__

        def disturbed(self: Any, packet: Packet) -> Packet:
            number = signals.pop(packet.number, None)
            if number == 0:
                raise RuntimeError("a layer that cannot be computed")
            if number is not None:
                os.kill(os.getpid(), number)
            if who == rank:
                time.sleep(float(seconds))
            return compute(self, packet)

        kind.__call__ = disturbed  # type: ignore[method-assign]

    disturb(Stage)
    disturb(StepStage)


Started = TypeVar("Started", bound="Programs")


class Programs:
    """Programs that run beside each other.

    Args:
        directory: Where they run.
        env: Further environment variables.
        logs: Where their output goes; by default to ``directory`` too.
    """

    def __init__(
        self, directory: Path, env: Mapping[str, str] | None = None, logs: Path | None = None
    ) -> None:
        self.directory = directory
        self._env = env or {}
        self._logs = directory if logs is None else logs
        self._ranks: dict[int, _Fresh | _Forked] = {}

    def __enter__(self: Started) -> Started:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self._ranks.values():
            # On a busy machine, one that was forked just now does not lead its process group yet.
            kills = (os.killpg, os.kill) if rank.status(within=0) is None else (os.killpg,)
            for kill in kills:
                with contextlib.suppress(ProcessLookupError):
                    kill(rank.pid, signal.SIGKILL)
        for rank in self._ranks.values():
            rank.status(within=10)

    def launch(
        self,
        rank: int,
        script: str,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
        space: str | None = None,
        group: int | None = None,
    ) -> None:
        """Start a script of the checkout as number ``rank``.

        Args:
            rank: Its number, under which it is waited for.
            script: Its path below the root.
            arguments: Of its command line.
            env: Further environment variables of it alone.
            fresh: Start a new interpreter.
            space: The network namespace of a program that is forked.
            group: The process group of a program that is forked, 0 for a new one; by default it also leads a
                session.
        """
        words = [str(ROOT / script), *map(str, arguments)]
        env, log = {**self._env, **(env or {})}, str(self._logs / str(rank))
        if fresh:
            self._ranks[rank] = _Fresh([sys.executable, *words], self.directory, env, log)
        else:
            self._ranks[rank] = _Forked(words, self.directory, env, log, space=space, group=group)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank, once it leads its own process group."""
        pid = self._ranks[rank].pid
        self.until(lambda: os.getpgid(pid) == pid, f"rank {rank} leads a process group")
        os.killpg(pid, number)

    def wait(self, *ranks: int, within: float = LIMIT_S) -> dict[int, Ended]:
        """Return how ``ranks`` (all by default) ended; fail if they do not end in time."""
        deadline = time.monotonic() + within
        ended = {}
        waiting = list(ranks or self._ranks)
        while waiting:
            for rank in tuple(waiting):
                status = self._ranks[rank].status(within=0.02)
                if status is not None:
                    out = self.text(rank, "out")
                    err = _NOTICES_OF_PATIENCE.sub("", self.text(rank, "err"))
                    ended[rank] = Ended(status, out, err)
                    waiting.remove(rank)
            if waiting and time.monotonic() > deadline:
                said = self.text(waiting[0], "err")
                raise AssertionError(f"rank {waiting[0]} still runs after {within:g} s; it said: {said}")
        return dict(sorted(ended.items()))

    def until(self, happened: Callable[[], bool], what: str, within: float = LIMIT_S) -> None:
        """Poll every few milliseconds until ``happened``; fail if it does not, or if a rank ends before."""
        deadline = time.monotonic() + within
        while not happened():
            for rank, process in self._ranks.items():
                if process.status(within=0.01) is not None:
                    raise AssertionError(f"rank {rank} ended before {what}: {self.text(rank, 'err')}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {within:g} s")

    def pid(self, rank: int) -> int:
        """The process of a program."""
        return self._ranks[rank].pid

    def text(self, rank: int, kind: str) -> str:
        """What a program has written until now: ``out`` or ``err``."""
        log = self._logs / f"{rank}.{kind}"
        return log.read_text(errors="replace") if log.exists() else ""


class World(Programs):
    """Ranks of ``runtime.py`` that belong together.

    Args:
        directory: Where they run, and where their output goes.
        size: WORLD on their command lines.
        options: For every rank.
        own: Further options of single ranks.
        env: Further environment variables.
        space: The network namespace of each rank.
        port: Of the hub; by default a free one.
        fresh: Start a new interpreter for each rank.
    """

    def __init__(
        self,
        directory: Path,
        size: int,
        *options: object,
        own: Mapping[int, Sequence[object]] | None = None,
        env: Mapping[str, str] | None = None,
        space: Callable[[int], str] | None = None,
        port: int | None = None,
        fresh: bool = False,
    ) -> None:
        super().__init__(directory, env)
        self.size = size
        self.port = free_port() if port is None else port
        self._options = options
        self._own = own or {}
        self._space = space
        self._fresh = fresh

    def start(self, *ranks: int) -> World:
        """Start ``ranks``; all of them without any."""
        for rank in ranks or range(self.size):
            self._start(rank)
        return self

    def start_together(self) -> World:
        """Start all ranks in one process group, as a shell does."""
        for rank in range(self.size):
            self._start(rank, group=self.pid(0) if rank else 0)
            self.until(lambda: os.getpgid(self.pid(0)) == self.pid(0), "rank 0 leads a process group")
        return self

    def _start(self, rank: int, group: int | None = None) -> None:
        space = self._space(rank) if self._space is not None else None
        arguments = (rank, self.size, "--port", self.port, *self._options, *self._own.get(rank, ()))
        self.launch(rank, "runtime.py", *arguments, fresh=self._fresh, space=space, group=group)

    def signal_together(self, number: int) -> None:
        """Send a signal to all ranks at once, as a terminal does: before any of them can react to it."""
        os.killpg(self.pid(0), number)

    def until_connected(self, count: int) -> None:
        """Wait until ``count`` connections to the hub stand. Those ranks are about to say hello: whether
        they have, nothing outside tells."""
        self.until(lambda: hub_connections(self.port) >= count, f"{count} ranks connect")

    def listening(self, rank: int) -> list[int]:
        """Return the ports at which ``rank`` listens."""
        process = psutil.Process(self._ranks[rank].pid)
        return sorted(
            entry.laddr.port for entry in process.net_connections("tcp") if entry.status == psutil.CONN_LISTEN
        )

    def until_rows(self) -> None:
        """Wait until the data rank has written results: the pipeline is in full swing."""
        self.until(
            lambda: any(path.stat().st_size > 4096 for path in self.directory.glob("*.part")), "results come"
        )


def environment() -> dict[str, str]:
    """Return the environment of a rank: one thread, no network, no variables of torchrun or of the server."""
    launcher = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "PYTHONPATH")
    dropped = (*launcher, "ADAPTIVE_QUANT", "SEND_CONSTRAINT", "WINDOW_SIZE", "TORCH_CPP_LOG_LEVEL")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def hub_connections(port: int) -> int:
    """Return the established connections to ``port`` on the loopback, from ``/proc``."""
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # A set: a line that moves while the kernel writes the table comes twice.
    return len(
        {local for _, local, remote, state, *_ in table if remote.endswith(f":{port:04X}") and state == "01"}
    )


def run_world(
    directory: Path, size: int, *options: object, within: float = LIMIT_S, **more: object
) -> dict[int, Ended]:
    """Start a whole world and wait for its end."""
    with World(directory, size, *options, **more) as world:  # type: ignore[arg-type]
        return world.start().wait(within=within)


def run_program(directory: Path, logs: Path, script: str, *arguments: object) -> Ended:
    """Run a script of the checkout in ``directory``, and wait for its end."""
    with Programs(directory, logs=logs) as programs:
        programs.launch(0, script, *arguments)
        return programs.wait()[0]


def torchrun(
    directory: Path,
    python: Path,
    script: str,
    *arguments: object,
    launcher: Sequence[str] = ("--standalone",),
) -> str:
    """Run two ranks of a script under torchrun, which must succeed; return what they print."""
    command = [str(python), "-m", "torch.distributed.run", "--nproc-per-node", "2", *launcher]
    done = subprocess.run(
        [*command, str(ROOT / script), *map(str, arguments)],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout
