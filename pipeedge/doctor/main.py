"""The console script ``pipeedge-doctor``."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from pipeedge.config import Environment
from pipeedge.doctor.examine import examine
from pipeedge.options import guard, parse_doctor
from pipeedge.wording import printable

__all__ = ["PROGRAM", "main"]

PROGRAM = "pipeedge-doctor"


def main() -> NoReturn:
    """Examine this rank, and end the process with the status of the worst finding."""
    signal.signal(signal.SIGTERM, _terminated)
    found = 0

    def run() -> None:
        nonlocal found
        found = examine(
            parse_doctor(sys.argv[1:], Environment.read()), lambda line: print(printable(line), flush=True)
        )

    status = guard(PROGRAM, run, verbose="--verbose" in sys.argv) or found
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread may be blocked inside gloo, where nothing can wake it.
    os._exit(status)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise KeyboardInterrupt
