"""One rank of a pipeline as a program: arguments, one call, an exit status.

The script ``runtime.py`` at the top of the repository and ``python -m pipeedge.run.main``, which needs no
checkout, are both this module.
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
"""As in glibc's malloc.h."""


def main() -> NoReturn:
    """Run the rank that the command line asks for, and end the process."""
    signal.signal(signal.SIGTERM, terminated)
    program = program_name(PROGRAM)
    logging.basicConfig(format=f"{program}: %(message)s", level=logging.WARNING)
    end(program, guard(program, _run, verbose="--verbose" in sys.argv))


def _run() -> None:
    command = parse_runtime(sys.argv[1:], Environment.read())
    share_one_heap()
    # What torch logs of a broken connection precedes the one line that tells why; it reads this on import.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Only now: torch takes seconds to import, and a mistake is to be answered at once. Its native part
    # aborts, at length, when it is to carry a KeyboardInterrupt; there is nothing to clean up yet anyway.
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
    """SIGINT and SIGTERM end the process without a word, unless they are ignored."""
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
    """Let all threads of this process allocate from one heap, where the C library is glibc.

    By default each thread gets a heap of its own, and what one has freed is of no use to another: the
    activations of the computing thread then come on top of what loading has left behind (46 MB for a
    quarter of ViT-Large). One thread computes, so nobody waits for the heap's lock.
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
