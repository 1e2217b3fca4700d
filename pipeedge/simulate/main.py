"""The console script ``pipeedge-simulate``."""

from __future__ import annotations

import sys
from typing import NoReturn

from pipeedge.base.guard import guard
from pipeedge.base.program import is_verbose, program_name
from pipeedge.base.streams import end, say
from pipeedge.simulate.options import parse_simulate

__all__ = ["PROGRAM", "main"]

PROGRAM = "pipeedge-simulate"


def main() -> NoReturn:
    """Simulate what the command line asks for, and end the process."""
    program = program_name(PROGRAM)
    end(program, guard(program, _simulate, verbose=is_verbose(sys.argv)))


def _simulate() -> None:
    request = parse_simulate(sys.argv[1:])
    # Printing needs imports that take long, so they wait until the command line has proved valid.
    from pipeedge.base.console import StandardOutput
    from pipeedge.simulate.session import run

    def warn(line: str) -> None:
        say(program_name(PROGRAM), line)

    run(request, [*program_name(PROGRAM).split(), *sys.argv[1:]], StandardOutput(result=True), warn)
