#!/usr/bin/env python3
"""Run one rank of a pipeline: ``python runtime.py RANK WORLD -pt ...`` on each device."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from pipeedge.config import Environment
from pipeedge.options import guard, parse_runtime


def main() -> None:
    """Parse, run, report."""
    command = parse_runtime(sys.argv[1:], Environment.read())
    # Only now: torch takes seconds to import, and a mistake is to be answered at once.
    from rich.console import Console

    from pipeedge.pipeline import run, show_schedule

    def warn(line: str) -> None:
        print(f"runtime.py: rank {command.request.world.rank}: {line}", file=sys.stderr, flush=True)

    console = Console()
    if command.dry_run:
        show_schedule(command.request, console)
    else:
        run(command.request, console, warn)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    logging.basicConfig(format="runtime.py: %(message)s", level=logging.WARNING)
    status = guard("runtime.py", main, verbose="--verbose" in sys.argv)
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        # A thread may be blocked inside gloo, where nothing can wake it; what must be removed is removed.
        os._exit(status)
