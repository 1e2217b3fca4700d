"""``train.py`` as a program: arguments, one call, an exit status.

By itself it starts its workers, which are the same program with torchrun's variables in their environment;
what they print is passed on, and a line that several of them have to say is said once.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import NoReturn

from pipeedge.base.errors import EXIT_PEER
from pipeedge.base.machine import processors
from pipeedge.base.program import guard, module_words, program_name
from pipeedge.base.streams import end, pass_on, print_notice, say
from pipeedge.launch.commands import RankCommand
from pipeedge.launch.main import free_port
from pipeedge.launch.supervisor import INTERRUPTED, Supervisor
from pipeedge.request.config import TRAIN_LAUNCHER, Environment, inherited_environment
from pipeedge.run.main import share_one_heap, signals_end_at_once, terminated
from pipeedge.train.heap import keep_freed_memory
from pipeedge.train.options import PROGRAM, TrainCommand, parse_train

__all__ = ["main"]

_ADDRESS = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
"""As in Linux's prctl.h."""
_SIGNALLED = 128
_SECOND_HAND = re.compile(r"rank \d+ (?:\(.*?\) )?failed: (.*)")


def main() -> NoReturn:
    """Train, and end the process."""
    signal.signal(signal.SIGINT, terminated)
    signal.signal(signal.SIGTERM, terminated)
    program = program_name(PROGRAM)
    logging.basicConfig(format=f"{program}: %(message)s", level=logging.WARNING)
    code = 0

    def run() -> None:
        nonlocal code
        command = parse_train(sys.argv[1:], Environment.read(), cores=processors())
        if command.export is not None:
            _export(command.request.checkpoint_dir, command.export)
        elif command.is_worker or command.dry_run:
            _work(command)
        else:
            code = _launch(command)

    end(program, guard(program, run, verbose="--verbose" in sys.argv) or code)


def _export(checkpoints: Path | None, target: Path) -> None:
    """Write the last checkpoint's model."""
    with signals_end_at_once():
        from pipeedge.train.exporting import export

    if checkpoints is not None:
        print_notice(export(checkpoints, target))


def _work(command: TrainCommand) -> None:
    """Be one of the workers."""
    if command.launcher is not None:
        _end_with(command.launcher)
    if command.is_worker:
        _bind(command.place, command.request.pipeline.threads)
    share_one_heap()
    keep_freed_memory()
    # What torch logs of a broken connection precedes the one line that tells why.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with signals_end_at_once():
        from pipeedge.base.console import StandardOutput
        from pipeedge.train.session import show, train

    # Only now: importing torch sets the levels of its loggers anew.
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)

    def warn(line: str) -> None:
        say(program_name(PROGRAM), f"worker {command.request.world.rank}: {line}")

    if command.dry_run:
        show(command.request, StandardOutput(result=True))
    else:
        train(command.request, StandardOutput(), warn)


def _launch(command: TrainCommand) -> int:
    """Start the workers on this machine, and wait for them."""
    workers = command.request.pipeline.workers
    port = free_port(_ADDRESS)
    output = _Output()
    commands = [
        RankCommand(
            rank,
            (sys.executable, "-u", "-m", *module_words(PROGRAM, "pipeedge.train"), *sys.argv[1:]),
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(workers),
                "MASTER_ADDR": _ADDRESS,
                "MASTER_PORT": str(port),
                TRAIN_LAUNCHER: str(os.getpid()),
                "OMP_NUM_THREADS": str(command.request.pipeline.threads),
            },
        )
        for rank in range(workers)
    ]
    own = commands[0].environment
    environment = {name: value for name, value in inherited_environment().items() if name not in own}
    supervisor = Supervisor(
        commands, environment=environment, lines=output.line, say=output.say, mark=lambda rank: ""
    )
    status = supervisor.run()
    if status != INTERRUPTED:
        output.release()
    return EXIT_PEER if status > _SIGNALLED and status != INTERRUPTED else status


class _Output:
    """What the workers print, passed on; what went wrong is said once.

    Each worker says why it ends. The one that failed says ``reason``; the others ``rank 1 (stage 1) failed:
    reason``, and this waits until the end, in case the first never gets to speak.
    """

    def __init__(self) -> None:
        self._said: dict[str, None] = {}
        self._second_hand: list[tuple[str, str]] = []

    def line(self, text: str, *, error: bool) -> None:
        """A line of a worker."""
        heard = _SECOND_HAND.search(text) if error else None
        if heard is not None:
            self._second_hand.append((heard[1].strip(), text))
        elif not error or text not in self._said:
            self._write(text, error=error)

    def say(self, line: str) -> None:
        """How a worker ended, unless one that could still speak has said it better."""
        self.release()
        if not self._said:
            self._write(f"{program_name(PROGRAM)}: {line}\n", error=True)

    def release(self) -> None:
        """The workers have ended: what none of them said of itself."""
        for reason, text in self._second_hand:
            if not any(reason in line for line in self._said):
                self._write(text, error=True)
        self._second_hand.clear()

    def _write(self, text: str, *, error: bool) -> None:
        if error:
            self._said[text] = None
        pass_on(text, error=error)


def _end_with(launcher: int) -> None:
    """Have the kernel end this process when its parent ends, even by SIGKILL, where the system is Linux."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before it was watched
        os._exit(EXIT_PEER)


def _bind(place: int, threads: int) -> None:
    """To ``threads`` cores of this machine; before anything makes threads, which inherit it."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if threads < len(cores):
        os.sched_setaffinity(0, {cores[(place * threads + thread) % len(cores)] for thread in range(threads)})


if __name__ == "__main__":
    main()
