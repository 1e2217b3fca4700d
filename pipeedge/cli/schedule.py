"""``pipeedge schedule``: this process becomes the native program ``sched-pipeline``."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from pipeedge.base.guard import guard
from pipeedge.base.program import program_name
from pipeedge.base.streams import end
from pipeedge.plan.sched_pipeline import PROGRAM, find_executable
from pipeedge.request.declared import options_of
from pipeedge.request.parsing import OneLineParser
from pipeedge.request.scheduling import ScheduleRequest

__all__ = ["main", "schedule_parser"]


def main() -> NoReturn:
    """Replace this process by ``sched-pipeline`` with the same arguments."""
    program = program_name(PROGRAM)
    end(program, guard(program, _become, verbose=False))


def _become() -> None:
    # It calls itself by its first argument, in usage and messages.
    os.execv(find_executable(), [program_name(PROGRAM), *sys.argv[1:]])  # noqa: S606


def schedule_parser() -> argparse.ArgumentParser:
    """Return a parser for shell completion, with the options that name files; the program has its own."""
    parser = OneLineParser(prog=program_name(PROGRAM), allow_abbrev=False)
    for one in options_of(ScheduleRequest, "models_file", "dev_types_file", "dev_file"):
        one.add_to(parser)
    return parser
