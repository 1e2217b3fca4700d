"""``pipeedge completion SHELL``: a script that lets the shell complete commands, options and files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pipeedge.base.errors import RequestError
from pipeedge.base.guard import guard
from pipeedge.base.program import COMMAND, is_verbose
from pipeedge.base.streams import end, print_result
from pipeedge.cli.commands import COMMANDS
from pipeedge.request.parsing import OneLineParser, add_common, path

__all__ = ["completion_parser", "completion_script", "main"]

PROGRAM = f"{COMMAND} completion"
SHELLS = ("bash", "zsh")


def completion_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge completion``."""
    parser = OneLineParser(
        prog=PROGRAM,
        description="Print a script that lets a shell complete commands, options and file names.",
        epilog="Needs shtab, which comes with the extra 'completion'.",
        allow_abbrev=False,
    )
    add_common(parser)
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    parser.examples = (
        f'eval "$({PROGRAM} bash)"     # in this shell',
        f"{PROGRAM} bash > ~/.local/share/bash-completion/completions/{COMMAND}",
        f"{PROGRAM} zsh > ~/.zfunc/_{COMMAND}     # a directory of $fpath",
    )
    return parser


def completion_script(shell: str) -> str:
    """Return the completion script for ``shell``.

    Raises:
        RequestError: Shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise RequestError("completion needs shtab: pip install 'pipeedge[completion]'") from error
    script: str = shtab.complete(_whole_parser(shtab.FILE), shell)
    return script


def _whole_parser(files: dict[str, str]) -> argparse.ArgumentParser:
    """Return one parser with every command below it; arguments that are paths complete to ``files``."""
    parser = argparse.ArgumentParser(prog=COMMAND, allow_abbrev=False)
    choose = parser.add_subparsers(dest="command")
    for command in COMMANDS:
        own = command.build_parser()
        for action in own._actions:
            if action.type in (path, Path):
                completing: Any = action
                completing.complete = files
        choose.add_parser(command.name, parents=[own], add_help=False, help=command.summary)
    return parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Print the script that the command line asks for, and end the process."""
    words = sys.argv[1:] if argv is None else argv

    def show() -> None:
        print_result(completion_script(completion_parser().parse_args(words).shell))

    end(PROGRAM, guard(PROGRAM, show, verbose=is_verbose(words)))
