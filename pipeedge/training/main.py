"""``train.py`` as a program: arguments, one call, an exit status.

By itself it starts its workers, which are the same program with torchrun's variables in their environment;
what they print is passed on, and a line that several of them have to say is said once.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from typing import NoReturn

from pipeedge.config import Environment, inherited_environment
from pipeedge.errors import EXIT_PEER
from pipeedge.launching.commands import RankCommand
from pipeedge.launching.main import free_port
from pipeedge.launching.supervisor import INTERRUPTED, Supervisor
from pipeedge.options import guard
from pipeedge.profiling.machine import processors
from pipeedge.runtime import share_one_heap, signals_end_at_once, terminated
from pipeedge.training.options import PROGRAM, TrainCommand, parse_train

__all__ = ["main"]

_ADDRESS = "127.0.0.1"
_SIGNALLED = 128

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""As in glibc's malloc.h."""


def main() -> NoReturn:
    """Train, and end the process."""
    signal.signal(signal.SIGTERM, terminated)
    logging.basicConfig(format=f"{PROGRAM}: %(message)s", level=logging.WARNING)
    code = 0

    def run() -> None:
        nonlocal code
        command = parse_train(sys.argv[1:], Environment.read(), cores=processors())
        if command.is_worker or command.dry_run:
            _work(command)
        else:
            code = _launch(command)

    status = guard(PROGRAM, run, verbose="--verbose" in sys.argv) or code
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        # A thread may be blocked inside gloo, where nothing can wake it.
        os._exit(status)
    sys.exit(0)


def _work(command: TrainCommand) -> None:
    """Be one of the workers."""
    if command.is_worker:
        _bind(command.place, command.request.pipeline.threads)
    share_one_heap()
    _keep_memory()
    # What torch logs of a broken connection precedes the one line that tells why.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with signals_end_at_once():
        from pipeedge.console import StandardOutput
        from pipeedge.training.session import show, train

    # Only now: importing torch sets the levels of its loggers anew.
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)

    def warn(line: str) -> None:
        print(f"{PROGRAM}: worker {command.request.world.rank}: {line}", file=sys.stderr, flush=True)

    if command.dry_run:
        show(command.request, StandardOutput())
    else:
        train(command.request, StandardOutput(), warn)


def _launch(command: TrainCommand) -> int:
    """Start the workers on this machine, and wait for them."""
    workers = command.request.pipeline.workers
    port = free_port(_ADDRESS)
    said: set[str] = set()

    def lines(text: str, *, error: bool) -> None:
        if error and text in said:
            return
        said.update([text] if error else [])
        stream = sys.stderr if error else sys.stdout
        stream.write(text)
        stream.flush()

    def say(line: str) -> None:
        if not said:  # a worker that could still speak has said it better
            print(f"{PROGRAM}: {line}", file=sys.stderr, flush=True)

    commands = [
        RankCommand(
            rank,
            (sys.executable, "-u", "-m", "pipeedge.training", *sys.argv[1:]),
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(workers),
                "MASTER_ADDR": _ADDRESS,
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(command.request.pipeline.threads),
            },
        )
        for rank in range(workers)
    ]
    own = commands[0].environment
    environment = {name: value for name, value in inherited_environment().items() if name not in own}
    status = Supervisor(commands, environment=environment, lines=lines, say=say, mark=lambda rank: "").run()
    return EXIT_PEER if status > _SIGNALLED and status != INTERRUPTED else status


def _bind(place: int, threads: int) -> None:
    """To ``threads`` cores of this machine; before anything makes threads, which inherit it."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if threads < len(cores):
        os.sched_setaffinity(0, {cores[(place * threads + thread) % len(cores)] for thread in range(threads)})


def _keep_memory() -> None:
    """Let glibc keep what is freed: a training frees and takes the same tensors over and over, and to get
    fresh pages from the system for each costs more than a tenth of the time (docs/training.md)."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, 64 << 20)


if __name__ == "__main__":
    main()
