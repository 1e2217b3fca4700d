"""The command ``pipeedge``: its first word chooses the program, which reads the others."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pipeedge import __version__
from pipeedge.base.errors import RequestError
from pipeedge.base.guard import guard
from pipeedge.base.interrupt import start
from pipeedge.base.program import COMMAND
from pipeedge.base.streams import end, print_result
from pipeedge.base.wording import hint, printable
from pipeedge.cli.commands import COMMANDS

__all__ = ["main"]


def main() -> None:
    """Start the program that the first word names; it ends the process."""
    words = sys.argv[1:]
    command = next((command for command in COMMANDS if words[:1] == [command.name]), None)
    if command is None:
        end(COMMAND, guard(COMMAND, lambda: _answer(words), verbose=False))
    sys.argv = [command.full_name, *words[1:]]
    start(command.module, command.function)


def _answer(words: Sequence[str]) -> None:
    """Answer ``--help`` and ``--version``; refuse everything else."""
    if words and words[0] in ("-h", "--help"):
        print_result(_help())
    elif words and words[0] == "--version":
        print_result(f"{COMMAND} {__version__}")
    elif not words:
        raise RequestError(f"no command given: use one of {_names()} (see --help)")
    elif words[0].startswith("-"):
        known = ["--help", "--version"]
        raise RequestError(f"unknown option {printable(words[0])}{hint(words[0], known)} (see --help)")
    elif words[0] == "serve":
        raise RequestError(f"unknown command serve: use '{COMMAND} run RANK WORLD --serve PORT'")
    else:
        known = [command.name for command in COMMANDS]
        raise RequestError(f"unknown command {printable(words[0])}{hint(words[0], known)} (see --help)")


def _names() -> str:
    return ", ".join(command.name for command in COMMANDS)


def _help() -> str:
    width = max(len(command.name) for command in COMMANDS)
    return "\n".join(
        [
            f"usage: {COMMAND} COMMAND [arguments]",
            "",
            "Pipeline-parallel transformer inference on a handful of unequal machines.",
            "",
            "commands:",
            *(f"  {command.name:{width}}  {command.summary}" for command in COMMANDS),
            "",
            f"'{COMMAND} COMMAND --help' explains the options of a command.",
            "Exit status: 0 done, 2 the request is wrong, 3 no feasible schedule, 4 another rank failed,",
            "1 a fault of this program.",
        ]
    )


if __name__ == "__main__":
    main()
