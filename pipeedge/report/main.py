"""The console script ``pipeedge-report``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pipeedge.base.errors import RequestError
from pipeedge.base.files import (
    InputPath,
    OutputFile,
    check_outputs,
    check_writable,
    named_output,
    write_whole,
)
from pipeedge.base.guard import guard
from pipeedge.base.program import is_verbose, program_name
from pipeedge.base.streams import end
from pipeedge.request.parsing import OneLineParser, add_common

__all__ = ["PROGRAM", "ReportRequest", "main", "make_report", "parse_report", "report_parser"]

PROGRAM = "pipeedge-report"
MAX_BYTES = 512 << 20


@dataclass(frozen=True)
class ReportRequest:
    """One report to show, or two to compare; validated on creation.

    Raises:
        RequestError: The number of reports is wrong, or the page is not an HTML file.
    """

    reports: tuple[Path, ...]
    output: Path | None = None
    """Path of the page, or None for the name of the report, or of both reports, next to the first."""

    def __post_init__(self) -> None:
        if len(self.reports) not in (1, 2):
            raise RequestError(f"{len(self.reports)} reports: give one to show, or two to compare")
        for path in self.reports:
            if path.is_dir():
                raise RequestError(f"{path}: is a directory, not a report")
        if self.page.suffix != ".html":
            raise RequestError(f"-o/--output {self.page}: the page is HTML; name it FILE.html")

    @property
    def page(self) -> Path:
        """Path of the page."""
        if self.output is not None:
            return self.output
        return self.reports[0].with_name("-".join(path.stem for path in self.reports) + ".html")


def report_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge-report``."""
    program = program_name(PROGRAM)
    parser = OneLineParser(
        prog=program,
        description=f"Make a page of a report that {program_name('runtime.py')} or "
        f"{program_name('pipeedge-simulate')} has saved (--report "
        "FILE.json); of two reports, a page and a table that compare them. The page is one file and needs "
        "no network.",
        epilog="Exit status: 0 done, 2 the request is wrong, 1 a fault of this program.",
        allow_abbrev=False,
    )
    add_common(parser)
    parser.add_argument(
        "reports", type=Path, nargs="+", metavar="FILE.json", help="saved report, or two to compare"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE.html", help="page to write (next to the first report)"
    )
    parser.examples = (
        f"{program} run.json                             # writes run.html",
        f"{program} simulated.json run.json              # compares two",
        f"{program} simulated.json run.json -o both.html",
    )
    return parser


def parse_report(argv: Sequence[str]) -> ReportRequest:
    """Read the command line of ``pipeedge-report``.

    Raises:
        RequestError: An option or a value is wrong.
        SystemExit: After ``--help`` or ``--version``.
    """
    arguments = report_parser().parse_args(argv)
    return ReportRequest(tuple(arguments.reports), arguments.output)


def main() -> NoReturn:
    """Make the page that the command line asks for, and end the process."""

    def report() -> None:
        request = parse_report(sys.argv[1:])
        from pipeedge.base.console import StandardOutput

        console = StandardOutput()
        lines = make_report(request, console.width if console.is_terminal else None)
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    program = program_name(PROGRAM)
    end(program, guard(program, report, verbose=is_verbose(sys.argv)))


def make_report(request: ReportRequest, room: int | None = None) -> list[str]:
    """Write the page; return the lines to print about it.

    Args:
        request: What to read and to write.
        room: Width in characters for tables, or None for any.

    Raises:
        RequestError: A report is malformed or cannot be read, or the page cannot be written or would replace
            a report.
    """
    check_writable(request.page, "-o/--output")
    replaced = check_outputs(
        [OutputFile("-o/--output", request.page)], [InputPath("the page", path) for path in request.reports]
    )
    bodies = [_read(path) for path in request.reports]
    from pipeedge.report import compare_lines, read_run, render_comparison, render_run, summary_lines

    runs = [read_run(body, str(path)) for body, path in zip(bodies, request.reports, strict=True)]
    if len(runs) == 1:
        page, lines = render_run(runs[0]), summary_lines(runs[0])
    else:
        page, lines = render_comparison(*runs), compare_lines(runs[0], runs[1], room)
    write_whole(request.page, page, "-o/--output")
    return [*lines, f"page        {named_output(request.page, replaced)}"]


def _read(path: Path) -> object:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RequestError(f"{path}: larger than {MAX_BYTES >> 20} MB; is it a report of this program?")
        return json.loads(path.read_bytes(), parse_constant=_refuse)
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: is not valid JSON ({error})") from error


def _refuse(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python's JSON accepts beyond the standard."""
    raise ValueError(f"{name} is not a number")
