"""Run one rank of a pipeline from the command line.

The script ``runtime.py`` in a checkout and ``python -m pipeedge.run.main`` both run this module.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from pipeedge.base.guard import guard
from pipeedge.base.program import program_name
from pipeedge.base.streams import end, say
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime

__all__ = ["PROGRAM", "main", "share_one_heap", "signals_end_at_once", "terminated"]

PROGRAM = "runtime.py"

_M_ARENA_MAX = -8
"""Value of ``M_ARENA_MAX`` in glibc's malloc.h."""


def main() -> NoReturn:
    """Run the rank that the command line asks for, and end the process."""
    signal.signal(signal.SIGTERM, terminated)
    program = program_name(PROGRAM)
    logging.basicConfig(format=f"{program}: %(message)s", level=logging.WARNING)
    end(program, guard(program, _run, verbose="--verbose" in sys.argv))


def _run() -> None:
    command = parse_runtime(sys.argv[1:], Environment.read())
    share_one_heap()
    # Otherwise torch logs broken connections before the line with the reason. It reads this when imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Imported late, because torch takes seconds to import, and mistakes should be reported at once. Its
    # native part aborts with a long message on KeyboardInterrupt; there is nothing to clean up yet.
    with signals_end_at_once():
        from pipeedge.base.console import StandardOutput
        from pipeedge.run.pipeline import run, show_schedule

    def warn(line: str) -> None:
        say(program_name(PROGRAM), f"rank {command.request.world.rank}: {line}")

    if command.dry_run:
        show_schedule(command.request, StandardOutput(result=True))
    else:
        run(command.request, StandardOutput(), warn)


@contextmanager
def signals_end_at_once() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process silently, unless they are ignored."""
    ours = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in ours.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


def share_one_heap() -> None:
    """Let all threads of this process allocate from one heap, if the C library is glibc.

    By default each thread gets its own heap, and cannot use memory that another thread has freed: the
    activations of the computing thread would come on top of what loading left behind (46 MB for a quarter
    of ViT-Large). Only one thread computes, so there is no contention for the heap's lock.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def terminated(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal by ending as after Ctrl-C."""
    del number, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
