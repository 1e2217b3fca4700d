"""The parser that all programs share, and the types of its values. Imports nothing heavy."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from pipeedge.base.errors import RequestError
from pipeedge.base.streams import print_result
from pipeedge.base.wording import hint, printable
from pipeedge.request.configured import CONFIG_OPTION, configured_words, read_configured

__all__ = [
    "OneLineParser",
    "add_common",
    "dtype_name",
    "dtype_names",
    "integers",
    "names",
    "nonempty",
    "path",
]


_OPTION = re.compile(r"--?[A-Za-z][\w-]*")


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose mistakes are ``RequestError``, one line each."""

    common: tuple[str, ...] = ()
    """Long names of the options that ``--help`` shows; all, if empty."""
    examples: tuple[str, ...] = ()
    """Command lines that ``--help`` shows."""
    shares_options = False
    """Whether its section of a file may have options of another program, which it does not have itself."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise RequestError(f"{printable(message)} (see --help)")

    def format_help(self) -> str:
        """Return the text of ``--help``: the options that most people use, if there are many; examples."""
        lines = "".join(f"  {line}\n" for line in self.examples)
        examples = f"\nexamples:\n{lines}" if lines else ""
        if not self.common:
            return f"{super().format_help()}{examples}"
        formatter = self._get_formatter()
        positional = [action for action in self._actions if not action.option_strings]
        formatter.add_usage(f"{self.prog} {' '.join(action.dest for action in positional)} [options]", [], [])
        formatter.add_text(self.description)
        formatter.start_section("options that most people use")
        by_name = {name: action for action in self._actions for name in action.option_strings}
        formatter.add_arguments([by_name[name] for name in self.common])
        formatter.end_section()
        return (
            f"{formatter.format_help()}{examples}\n"
            f"'{self.prog} {_HELP_ALL}' shows all options, by section, and what the exit status means.\n"
        )

    def _print_message(self, message: str, file: object = None) -> None:
        # argparse would pass over a message that cannot be printed.
        if message:
            print_result(message, end="")

    # argparse declares overloads for the type of the namespace, of which no program here has its own.
    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Parse the command line, and what a file adds to it.

        An unknown option is named with the known one that is closest to it.
        """
        words = list(sys.argv[1:] if args is None else args)
        configured = read_configured(words, self.prog)
        added = configured_words(self._option_actions(), words, configured, lenient=self.shares_options)
        if not added:
            return self._parse_words(words, namespace)
        try:
            return self._parse_words([*words, *added], namespace)
        except RequestError as error:
            self._parse_words(words, namespace)  # raises if the command line alone is wrong
            raise RequestError(f"{printable(configured.path)}: {error}") from error

    def _parse_words(self, args: Sequence[str], namespace: None) -> argparse.Namespace:
        try:
            parsed, unknown = self.parse_known_args(args, namespace)
        except RequestError:
            # argparse took the value of an unknown option for an argument.
            option = self._unknown_option(args)
            if option is None:
                raise
            self.error(f"unknown option {option}{self.explain_unknown(option)}")
        option = next((one.partition("=")[0] for one in unknown if one.startswith("-") and one != "--"), None)
        if option is not None:
            self.error(f"unknown option {option}{self.explain_unknown(option)}")
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return parsed

    def leading_words(self, args: Sequence[str]) -> int:
        """Return the number of words before the first that is no option of this parser, or its value."""
        takes_value = {
            name: action.nargs != 0 for action in self._option_actions() for name in action.option_strings
        }
        place = 0
        while place < len(args):
            name, is_assigned, _ = args[place].partition("=")
            if name not in takes_value:
                break
            place += 2 if takes_value[name] and not is_assigned else 1
        return place

    def _unknown_option(self, args: Sequence[str]) -> str | None:
        """Return the first of ``args`` that has the form of an option and is none, or None."""
        known = {name for action in self._option_actions() for name in action.option_strings}
        for word in args:
            name = word.partition("=")[0]
            if word == "--":
                return None
            if _OPTION.fullmatch(name) and name not in known and (name[:2] == "--" or name[:2] not in known):
                return name
        return None

    def explain_unknown(self, option: str) -> str:
        """Return what to say of an unknown option, as the end of a sentence."""
        known = [name for action in self._option_actions() for name in action.option_strings]
        return hint(option, known)

    def _option_actions(self) -> Iterator[argparse.Action]:
        for action in self._actions:
            yield action
            if isinstance(action.choices, Mapping):
                for parser in action.choices.values():
                    yield from parser._actions


_HELP_ALL = "--help-all"


class _HelpAll(argparse.Action):
    """Prints the help of all options."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print it and end the program."""
        print_result(argparse.ArgumentParser.format_help(parser), end="")
        parser.exit()


class _Formatter(argparse.HelpFormatter):
    """Help in which options have their present names only, and one placeholder for all of them."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = [name for name in action.option_strings if name not in getattr(action, "older", ())]
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper())}"
        return f"{', '.join(names)}{value}"


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options of every program: ``--version``, ``--config`` and ``--verbose``."""
    parser.formatter_class = _Formatter
    parser.add_argument(_HELP_ALL, action=_HelpAll, nargs=0, help="show all options, by section, and exit")
    parser.add_argument("--version", action="version", version=_version())
    parser.add_argument(
        CONFIG_OPTION,
        type=path,
        metavar="FILE",
        help="file with options (pipeedge.toml, if the working directory has one)",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print the traceback of a failure")


def _version() -> str:
    import pipeedge

    return f"pipeedge {pipeedge.__version__}"


def nonempty(text: str) -> str:
    """Parse an option that is not empty. An empty one usually comes from an unset shell variable."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return text


def path(text: str) -> Path:
    """Parse an option that is a path. An empty one would mean the current directory."""
    return Path(nonempty(text))


def integers(text: str) -> tuple[int, ...]:
    """Parse an option that is a list of integers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers like 1,24,25,48") from None


def names(text: str) -> tuple[str, ...]:
    """Parse an option that is a list of names."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found) or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names like pi1,pi2")
    return found


def dtype_name(text: str) -> str:
    """Parse a number type, with or without the ``torch.`` prefix."""
    return text.removeprefix("torch.")


def dtype_names(text: str) -> tuple[str, ...]:
    """Parse a list of number types."""
    return tuple(map(dtype_name, names(text)))
