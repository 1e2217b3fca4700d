"""``pipeedge schedule``: this process becomes the native program ``sched-pipeline``.

What a run knows of its model beyond the scheduler's files, the program is told too, so that both plan alike.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pipeedge.base.errors import PipeEdgeError
from pipeedge.base.guard import guard
from pipeedge.base.program import program_name
from pipeedge.base.streams import end
from pipeedge.base.text_lengths import check_lengths, longest_of
from pipeedge.models.registry import find_outline
from pipeedge.plan.sched_pipeline import PROGRAM, find_executable
from pipeedge.request.config import ModelRequest
from pipeedge.request.configured import CONFIG_OPTION, read_configured
from pipeedge.request.declared import option_of, options_of
from pipeedge.request.parsing import OneLineParser
from pipeedge.request.scheduling import ScheduleRequest

__all__ = ["main", "schedule_parser", "with_configured", "with_input_bytes"]


def main() -> NoReturn:
    """Replace this process by ``sched-pipeline`` with the same arguments and the size of the input."""
    program = program_name(PROGRAM)
    end(program, guard(program, _become, verbose=False))


def _become() -> None:
    # It calls itself by its first argument, in usage and messages.
    words = with_configured(sys.argv[1:])
    os.execv(find_executable(), [program_name(PROGRAM), *with_input_bytes(words)])  # noqa: S606


def with_configured(arguments: Sequence[str]) -> list[str]:
    """Return a command line with what a file adds to it, and without the option that names the file.

    A file adds nothing to ``--questions``, each of which has a command line of its own.

    Raises:
        RequestError: The file is missing, or is not one of options.
    """
    configured = read_configured(arguments, PROGRAM)
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument(CONFIG_OPTION)
    words = own.parse_known_args(arguments)[1]
    given = {word.partition("=")[0] for word in words}
    if "--questions" in given:
        return words
    return [
        *words,
        *(
            f"--{name}" if value is True else f"--{name}={value}"
            for name, value in configured.values.items()
            if f"--{name}" not in given and value is not False
        ),
    ]


def with_input_bytes(arguments: Sequence[str]) -> list[str]:
    """Return a command line with ``--input-bytes`` as a run gives it, if the model is known here.

    The scheduler's files have only the number of values of the input, and runs send pictures as bytes.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("-m", "--model", "--model-name", dest="model_name")
    parser.set_defaults(model_name=option_of(ModelRequest, "name").default)
    parser.add_argument("--tokens", type=int)
    for name in ("--lengths", "--input-bytes", "--problem", "--format"):
        parser.add_argument(name)
    for name in ("-h", "--help", "--help-all", "--version", "--questions"):
        parser.add_argument(name, action="store_true")
    try:
        given, _ = parser.parse_known_args(arguments)
        asks = given.h or given.help or given.help_all or given.version or given.questions
        if given.input_bytes or given.problem or given.format == "files" or asks:
            return [*arguments]
        check_lengths(given.lengths)
        known = [given.tokens, None if given.lengths is None else longest_of(given.lengths)]
        tokens = max((length for length in known if length is not None), default=None)
        size = find_outline(given.model_name, fetch=False).input_bytes(tokens)
    except (
        argparse.ArgumentError,
        PipeEdgeError,
        ValueError,
    ):  # the program says what is wrong, if anything is
        return [*arguments]
    return [*arguments, f"--input-bytes={size}"]


def schedule_parser() -> argparse.ArgumentParser:
    """Return a parser for shell completion, with the options that name files; the program has its own."""
    parser = OneLineParser(prog=program_name(PROGRAM), allow_abbrev=False)
    for one in options_of(ScheduleRequest, "models_file", "dev_types_file", "dev_file"):
        one.add_to(parser)
    return parser
