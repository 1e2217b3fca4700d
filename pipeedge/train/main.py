"""Run ``train.py`` as a program: arguments, one call, an exit status.

Started by itself, it starts its workers, which are the same program with torchrun's variables in their
environment. It forwards their output, and shows a line that several of them print only once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from msgspec import Struct

from pipeedge.base.errors import EXIT_PEER, PeerFailedError, RequestError, one_line
from pipeedge.base.fields import MALFORMED, Line, decode, encode
from pipeedge.base.guard import end_with, guard
from pipeedge.base.heap import keep_freed_memory, share_one_heap
from pipeedge.base.interrupt import INTERRUPTED, ending_at_once, interrupt
from pipeedge.base.machine import processors
from pipeedge.base.ports import free_port
from pipeedge.base.program import is_verbose, module_words, program_name
from pipeedge.base.streams import end, log_warnings, pass_on, print_notice, say
from pipeedge.launch.commands import RankCommand
from pipeedge.launch.supervisor import Output, Supervisor
from pipeedge.request.environment import LAUNCHER, Environment, inherited_environment, log_level
from pipeedge.request.files import STANDARD_INPUT
from pipeedge.run.main import quiet_links
from pipeedge.train.options import PROGRAM, TrainCommand, parse_train

__all__ = ["main"]

_ADDRESS = "127.0.0.1"
_SIGNALLED = 128
_RECORD = "\x1e"
"""Begins a line of standard error that holds JSON for the launcher, as in RFC 7464."""


def main() -> NoReturn:
    """Train, and end the process."""
    signal.signal(signal.SIGINT, interrupt)  # even if whoever started it in the background ignores it
    program = program_name(PROGRAM)
    code = 0

    def run() -> None:
        nonlocal code
        log_warnings(program, log_level())
        command = parse_train(sys.argv[1:], Environment.read(), cores=processors())
        if command.export is not None:
            _export(command.request.checkpoint_dir, command.export)
        elif command.is_worker or command.dry_run:
            _work(command)
        else:
            code = _launch(command)

    end(program, guard(program, run, verbose=is_verbose(sys.argv)) or code)


def _export(checkpoints: Path | None, target: Path) -> None:
    """Write the last checkpoint's model."""
    with ending_at_once():
        from pipeedge.train.exporting import export

    if checkpoints is not None:
        print_notice(export(checkpoints, target))


def _work(command: TrainCommand) -> None:
    """Run as one of the workers."""
    if command.launcher is not None:
        end_with(command.launcher)
    if command.is_worker:
        _bind(command.place, command.request.pipeline.threads)
    share_one_heap()
    keep_freed_memory()
    quiet_links()
    with ending_at_once():
        from pipeedge.base.console import StandardOutput
        from pipeedge.train.session import show, train

    # This must follow the import of torch, which resets the levels of its loggers.
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)

    def warn(line: str) -> None:
        say(program_name(PROGRAM), f"worker {command.request.world.rank}: {line}")

    if command.dry_run:
        show(command.request, StandardOutput(result=True))
    else:
        try:
            train(command.request, StandardOutput(), warn)
        except PeerFailedError as error:
            if command.launcher is None or error.account is None:
                raise
            if is_verbose(sys.argv):
                traceback.print_exc()
            # The worker that failed reports it itself; this report counts only if that one cannot.
            _report(RelayedFailure(error.account.cause, one_line(error)))
            raise SystemExit(EXIT_PEER) from None


class RelayedFailure(Struct, frozen=True):
    """A worker's report of the failure of another one."""

    cause: Line
    """Report of the other worker itself."""
    line: Line
    """The line for the user, which names the other worker."""

    def to_text(self) -> str:
        """Write the report as one line for the launcher."""
        return f"{_RECORD}{encode(self).decode()}\n"

    @classmethod
    def from_text(cls, line: str) -> RelayedFailure | None:
        """Parse a line that a worker printed; None if it is an ordinary one."""
        if not line.startswith(_RECORD):
            return None
        try:
            report: RelayedFailure = decode(line.removeprefix(_RECORD), cls)
        except MALFORMED:
            return None
        return report


def _report(report: RelayedFailure) -> None:
    """Hand a report to the launcher, if it still listens."""
    with suppress(OSError, ValueError):
        print(report.to_text(), end="", file=sys.stderr, flush=True)


def _launch(command: TrainCommand) -> int:
    """Start the workers on this machine, and wait for them."""
    if command.request.world.keys.key == STANDARD_INPUT:
        raise RequestError("--key -: workers on one machine have no standard input; give a file")
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
                LAUNCHER: str(os.getpid()),
                "OMP_NUM_THREADS": str(command.request.pipeline.threads),
            },
        )
        for rank in range(workers)
    ]
    own = commands[0].environment
    environment = {name: value for name, value in inherited_environment().items() if name not in own}
    shown = Output(output.line, output.say, mark=lambda rank: "")
    status = Supervisor(commands, environment, shown).run()
    if status != INTERRUPTED:
        output.release()
    return EXIT_PEER if status > _SIGNALLED and status != INTERRUPTED else status


class _Output:
    """Passes on what the workers print, each failure once.

    Each worker reports why it ends. The one that failed prints the cause; a report of the others is kept
    until the end, in case the first never gets to speak.
    """

    def __init__(self) -> None:
        self._said: dict[str, None] = {}
        self._second_hand: list[RelayedFailure] = []

    def line(self, text: str, *, error: bool) -> None:
        """Take a line that a worker printed."""
        report = RelayedFailure.from_text(text) if error else None
        if report is not None:
            self._second_hand.append(report)
        elif not error or text not in self._said:
            self._write(text, error=error)

    def say(self, line: str) -> None:
        """Report how a worker ended, unless a worker has explained it better."""
        self.release()
        if not self._said:
            self._write(f"{program_name(PROGRAM)}: {line}\n", error=True)

    def release(self) -> None:
        """Print, when the workers have ended, the failures that none of them reported itself."""
        for report in self._second_hand:
            if not any(report.cause in line for line in self._said):
                self._write(f"{PROGRAM}: {report.line}\n", error=True)
        self._second_hand.clear()

    def _write(self, text: str, *, error: bool) -> None:
        if error:
            self._said[text] = None
        pass_on(text, error=error)


def _bind(place: int, threads: int) -> None:
    """Bind this process to ``threads`` cores, before it starts threads, which inherit the binding."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if threads < len(cores):
        os.sched_setaffinity(0, {cores[(place * threads + thread) % len(cores)] for thread in range(threads)})


if __name__ == "__main__":
    main()
