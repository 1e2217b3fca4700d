"""``pipeedge config PROGRAM [OPTIONS]``: the value of each option, and where it comes from."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from pipeedge.base.console import Column, StandardOutput, print_table
from pipeedge.base.errors import RequestError
from pipeedge.base.guard import guard
from pipeedge.base.program import COMMAND, is_verbose
from pipeedge.base.streams import end, print_notice
from pipeedge.base.wording import hint, printable
from pipeedge.cli.commands import COMMANDS
from pipeedge.request.configured import CONFIG_FILE, Configured, configured_words, given_in, read_configured
from pipeedge.request.environment import Environment
from pipeedge.request.parsing import OneLineParser, add_common

__all__ = ["config_parser", "main", "sources"]

PROGRAM = f"{COMMAND} config"


def config_parser() -> OneLineParser:
    """Return the parser of ``pipeedge config``."""
    parser = OneLineParser(
        prog=PROGRAM,
        description="Print the options of a program, and where the value of each comes from: the command "
        f"line, the environment, a file, or the default. The file is {CONFIG_FILE} in the working directory, "
        "or that of --config.",
        allow_abbrev=False,
    )
    parser.add_argument("COMMAND", help="a command, such as run")
    parser.add_argument("OPTIONS", nargs=argparse.REMAINDER, help="its command line")
    add_common(parser)
    parser.examples = (
        f"{PROGRAM} run",
        f"{PROGRAM} run -u 4                 # for the command line '{COMMAND} run -u 4'",
        f"{PROGRAM} profile --dtype int8",
    )
    return parser


def sources(
    parser: argparse.ArgumentParser, words: Sequence[str], configured: Configured, environment: Environment
) -> Iterator[tuple[str, str, str]]:
    """Yield each option of a program with its value as text, and where that comes from.

    Args:
        parser: Parser of the program.
        words: Its command line.
        configured: What the file says.
        environment: Variables of the environment.
    """
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        if not names or names[0] in ("--help", "--help-all", "--version", "--config", "--verbose"):
            continue
        variable = getattr(action, "variable", None)
        named = next((name[2:] for name in names if name[2:] in configured.values), None)
        default = getattr(action, "declared", action.default)
        if given_in(words, action):
            yield names[0], _given_text(words, action), "command line"
        elif variable is not None and environment.variables.get(variable):
            yield names[0], environment.variables[variable], f"environment: {variable}"
        elif named is not None:
            yield names[0], _text(configured.values[named]), f"file: {configured.path}"
        else:
            yield names[0], "" if default in (None, argparse.SUPPRESS) else _text(default), "default"


def _given_text(words: Sequence[str], action: argparse.Action) -> str:
    for place, word in enumerate(words):
        name, is_assigned, value = word.partition("=")
        if name in action.option_strings:
            if action.nargs == 0:
                return "true"
            return value if is_assigned else " ".join(words[place + 1 : place + 2])
        short = next(
            (each for each in action.option_strings if each[:2] != "--" and word.startswith(each)), None
        )
        if short is not None:
            return word[len(short) :]
    return ""


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Print the table that the command line asks for, and end the process."""
    words = sys.argv[1:] if argv is None else argv
    end(PROGRAM, guard(PROGRAM, lambda: _show(words), verbose=is_verbose(words)))


def _show(argv: Sequence[str]) -> None:
    parsed = config_parser().parse_args(argv)
    known = {command.name: command for command in COMMANDS}
    if parsed.COMMAND not in known:
        raise RequestError(
            f"unknown command {printable(parsed.COMMAND)}{hint(parsed.COMMAND, sorted(known))}"
        )
    parser = known[parsed.COMMAND].build_parser()
    words = [*(("--config", str(parsed.config)) if parsed.config is not None else ()), *parsed.OPTIONS]
    configured = read_configured(words, parser.prog)
    configured_words(
        parser._actions, words, configured, lenient=parsed.COMMAND == "doctor"
    )  # refuses what is wrong
    if configured.path is not None:
        print_notice(f"options from {configured.path}")
    rows = list(sources(parser, words, configured, Environment.read()))
    titles = ("option", "value", "from")
    columns = [Column(title, [row[place] for row in rows], left=True) for place, title in enumerate(titles)]
    print_table(StandardOutput(result=True), columns)
