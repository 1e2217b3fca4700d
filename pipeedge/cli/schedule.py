"""``pipeedge schedule``: this process becomes the native program ``sched-pipeline``."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from pipeedge.base.program import guard, program_name
from pipeedge.base.streams import end
from pipeedge.plan.scheduler import find_executable
from pipeedge.request.options import OneLineParser, add_scheduler_files, path

__all__ = ["main", "schedule_parser"]


def main() -> NoReturn:
    """Replace this process by ``sched-pipeline`` with the same arguments."""
    program = program_name("sched-pipeline")
    end(program, guard(program, _become, verbose=False))


def _become() -> None:
    found = str(find_executable())
    os.execv(found, [found, *sys.argv[1:]])  # noqa: S606


def schedule_parser() -> argparse.ArgumentParser:
    """Return a parser for shell completion, with the options that name files; the program has its own."""
    parser = OneLineParser(prog=program_name("sched-pipeline"), allow_abbrev=False)
    add_scheduler_files(parser, models="models.yml", dev_types="device_types.yml")
    parser.add_argument("-sd", "--sched-dev-file", type=path, metavar="FILE", help="devices.yml")
    return parser
