"""Options from a file: ``pipeedge.toml`` in the working directory, or that of ``--config``.

    [run]                        pipeedge run 0 2          runs with  -u 4 --quiet --input a.png b.png
    ubatch-size = 4              pipeedge run 0 2 -u 8     runs with  -u 8 --quiet --input a.png b.png
    quiet = true
    input = ["a.png", "b.png"]

The command line wins over the environment, the environment over the file, and the file over the default. So
what the file says becomes words of the command line, but for options that are given there or by a variable.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeedge.base.errors import RequestError
from pipeedge.base.program import COMMAND, COMMANDS
from pipeedge.base.wording import hint, printable
from pipeedge.request.environment import is_set

__all__ = [
    "CONFIG_FILE",
    "CONFIG_OPTION",
    "Configured",
    "command_of",
    "configured_words",
    "find_file",
    "given_in",
    "read_configured",
]

CONFIG_FILE = Path("pipeedge.toml")
CONFIG_OPTION = "--config"
_ALSO = {"doctor": ("run", "doctor")}
"""Sections of a program that has the options of another one, too, in the order in which they win."""


@dataclass(frozen=True)
class Configured:
    """What a file says about the options of one program."""

    path: Path | None = None
    """The file, or None if there is none."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values by the long name of the option, without hyphens before it."""


def command_of(program: str) -> str:
    """Return the command of ``pipeedge`` for the name of a program, which is its section in the file."""
    return COMMANDS.get(program, program.removeprefix(f"{COMMAND} "))


def find_file(words: Sequence[str]) -> Path | None:
    """Return the file that a command line names, or the one in the working directory, or None."""
    for place, word in enumerate(words):
        name, is_assigned, value = word.partition("=")
        if word == "--":
            break
        if name == CONFIG_OPTION:
            following = words[place + 1 : place + 2]
            return Path(value if is_assigned else following[0]) if is_assigned or following else None
    return CONFIG_FILE if CONFIG_FILE.is_file() else None


def read_configured(words: Sequence[str], program: str) -> Configured:
    """Return what the file says about a program.

    Raises:
        RequestError: The file is missing, or is not one of options.
    """
    path = find_file(words)
    if path is None:
        return Configured()
    try:
        with path.open("rb") as stream:
            document = tomllib.load(stream)
    except FileNotFoundError as error:
        raise RequestError(f"{CONFIG_OPTION} {printable(path)}: no such file") from error
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{printable(path)}: cannot be read as TOML ({error})") from error
    known = {*COMMANDS.values(), *_NODES}
    for section, values in document.items():
        if section not in known or not isinstance(values, Mapping):
            raise RequestError(
                f"{printable(path)}: no program has the section {printable(section)}"
                f"{hint(section, sorted(known))}; options stand below [run], [node] and so on"
            )
    command = command_of(program)
    found: dict[str, Any] = {}
    for section in _ALSO.get(command, (command,)):
        found |= document.get(section, {})
    return Configured(path, found)


_NODES = ("ask", "down", "join", "node", "nodes", "status", "up")
"""Commands without a script of their own."""


def configured_words(
    actions: Iterable[argparse.Action], words: Sequence[str], configured: Configured, *, lenient: bool = False
) -> list[str]:
    """Return the words that the file adds to a command line.

    Args:
        actions: Options of the program.
        words: The command line.
        configured: What the file says.
        lenient: Whether to pass over options that the program does not have.

    Raises:
        RequestError: The file names an option that does not exist, or gives it a value that cannot be one.
    """
    actions = list(actions)
    by_name = {
        name.removeprefix("--"): each for each in actions for name in each.option_strings if name[:2] == "--"
    }
    added: list[str] = []
    for name, value in configured.values.items():
        action = by_name.get(name)
        if action is None or name in ("help", "help-all", "version", "config"):
            if lenient:
                continue
            raise RequestError(
                f"{printable(configured.path)}: there is no option --{printable(name)}"
                f"{hint(name, sorted(by_name))} (long names, without the hyphens before them)"
            )
        variable = getattr(action, "variable", None)
        if given_in(words, action) or (variable is not None and is_set(variable)):
            continue
        added += _words(name, action, value, configured.path)
    return added


def given_in(words: Sequence[str], action: argparse.Action) -> bool:
    """Return whether a command line gives an option."""
    before = words[: words.index("--")] if "--" in words else words
    return any(
        word.partition("=")[0] == name or (name[:2] != "--" and len(name) == 2 and word.startswith(name))
        for word in before
        for name in action.option_strings
    )


def _words(name: str, action: argparse.Action, value: Any, path: Path | None) -> list[str]:
    is_flag = action.nargs == 0
    if is_flag != isinstance(value, bool):
        what = "true or false" if is_flag else "a value, as it is written on the command line"
        raise RequestError(f"{printable(path)}: --{name} takes {what}")
    if is_flag:
        return [f"--{name}"] if value else []
    parts = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    if action.nargs in ("+", "*"):
        return [f"--{name}", *parts]
    if isinstance(action, argparse._AppendAction):
        return [f"--{name}={part}" for part in parts]
    return [f"--{name}={','.join(parts)}"]
