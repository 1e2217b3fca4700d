"""The console script ``pipeedge-doctor``."""

from __future__ import annotations

import sys
from typing import NoReturn

from pipeedge.base.guard import end_with, guard
from pipeedge.base.program import is_verbose, program_name
from pipeedge.base.streams import end, print_result
from pipeedge.base.wording import printable
from pipeedge.doctor.examine import examine
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_doctor

__all__ = ["PROGRAM", "main"]

PROGRAM = "pipeedge-doctor"


def main() -> NoReturn:
    """Examine this rank, and end the process with the status of the worst finding."""
    found = 0

    def run() -> None:
        nonlocal found
        environment = Environment.read()
        if environment.launcher is not None:
            end_with(environment.launcher)
        found = examine(parse_doctor(sys.argv[1:], environment), lambda line: print_result(printable(line)))

    program = program_name(PROGRAM)
    status = guard(program, run, verbose=is_verbose(sys.argv)) or found
    end(program, status)
