"""Run one rank of a pipeline from the command line.

The script ``runtime.py`` in a checkout and ``python -m pipeedge.run.main`` both run this module.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from pipeedge.base.deferred_imports import META_KERNELS, postponed
from pipeedge.base.guard import end_with, guard
from pipeedge.base.heap import lasting_imports, share_one_heap
from pipeedge.base.interrupt import ending_at_once, interrupt
from pipeedge.base.machine import quota_threads
from pipeedge.base.program import is_verbose, program_name
from pipeedge.base.streams import end, log_warnings, print_result, say
from pipeedge.base.wording import printable
from pipeedge.request.environment import BEGINS, Environment, log_level
from pipeedge.request.options import parse_runtime

if TYPE_CHECKING:
    from rich.console import Console

    from pipeedge.request.config import RunRequest
    from pipeedge.run.context import OpenEnds

__all__ = ["PROGRAM", "limit_threads", "main", "quiet_links"]

PROGRAM = "runtime.py"


def main() -> NoReturn:
    """Run the rank that the command line asks for, and end the process."""
    program = program_name(PROGRAM)
    end(program, guard(program, _run, verbose=is_verbose(sys.argv)))


def _run() -> None:
    log_warnings(program_name(PROGRAM), log_level())
    environment = Environment.read()
    if environment.launcher is not None:
        end_with(environment.launcher)
    command = parse_runtime(sys.argv[1:], environment)
    share_one_heap()
    limit_threads()
    quiet_links()
    # Imported late, because torch takes seconds to import, and mistakes should be reported at once. Its
    # native part aborts with a long message on KeyboardInterrupt; there is nothing to clean up yet.
    with ending_at_once(), lasting_imports(), postponed(META_KERNELS):
        if command.dry_run:
            from pipeedge.run.preview import show_schedule
        else:
            from pipeedge.run.pipeline import run

    def warn(line: str) -> None:
        say(program_name(PROGRAM), f"rank {command.request.world.rank}: {line}")

    def begins() -> None:
        if environment.launched:
            warn(BEGINS)

    if command.dry_run:
        show_schedule(command.request, lambda line: print_result(printable(line)))
    else:
        with _served(command.request, warn) as open_ends:
            open_console = partial(_open_console, beside_results=command.request.prints_results)
            run(command.request, open_console, warn, open_ends, begins)


@contextmanager
def _served(request: RunRequest, warn: Callable[[str], None]) -> Iterator[OpenEnds | None]:
    """Yield what opens the ends of a run that answers requests; meanwhile, signals drain it.

    The data rank answers what it has accepted, and ends; so do the others then. They leave after a while if
    it does not. A second signal ends a rank at once.
    """
    if request.serve.listen is None:
        yield None
        return
    from pipeedge.run.text_ends import open_served_text
    from pipeedge.serve.http_ends import HttpEnds

    serving = HttpEnds(warn, open_served_text)
    is_data_rank = request.world.rank == request.schedule.data_rank

    def leave_later() -> None:
        # Only a signal to the main thread wakes it: it waits for the other threads.
        main, wait_s = threading.main_thread().ident, request.serve.request_timeout_s
        timer = threading.Timer(wait_s, signal.pthread_kill, (main, signal.SIGTERM))
        timer.daemon = True
        timer.start()

    def drain(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, interrupt)
        if not is_data_rank:
            leave_later()
        elif not serving.drain():
            interrupt(number, frame)

    previous = {each: signal.signal(each, drain) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield serving.open
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


@cache
def _open_console(*, beside_results: bool) -> Console:
    """Return where tables go: not to standard output if the results go there."""
    from pipeedge.base.console import StandardError, StandardOutput

    return StandardError() if beside_results else StandardOutput()


def limit_threads() -> None:
    """Let torch, when it is imported, use no more threads than a quota allows, unless the user says how many.

    torch counts processors. Under a quota its threads would use up their time together, and then all pause.
    """
    threads = quota_threads()
    if threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def quiet_links() -> None:
    """Let torch, when it is imported, log no warnings of connections, unless the user says what it logs.

    A broken one would be logged before the line with the reason, and a host without a name for itself at each
    start.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


if __name__ == "__main__":
    main()
