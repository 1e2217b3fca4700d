"""The console script ``pipeedge-simulate``."""

from __future__ import annotations

import sys
from typing import NoReturn

from pipeedge.base.streams import end, say
from pipeedge.request.options import guard
from pipeedge.simulate.options import parse_simulate

__all__ = ["PROGRAM", "main"]

PROGRAM = "pipeedge-simulate"


def main() -> NoReturn:
    """Simulate what the command line asks for, and end the process."""
    end(PROGRAM, guard(PROGRAM, _simulate, verbose="--verbose" in sys.argv))


def _simulate() -> None:
    request = parse_simulate(sys.argv[1:])
    # Printing needs imports that take long, so they wait until the command line has proved valid.
    from pipeedge.base.console import StandardOutput
    from pipeedge.simulate.session import run

    def warn(line: str) -> None:
        say(PROGRAM, line)

    run(request, sys.argv, StandardOutput(result=True), warn)
