"""``pipeedge chat``: a conversation with a decoder in the terminal.

> Spell house.          Ctrl-C ends an answer, or clears the line
h-o-u-s-e               Ctrl-D ends the conversation
> /new                  begins another one
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from pipeedge.base.errors import InputError, RequestError
from pipeedge.base.guard import guard
from pipeedge.base.interrupt import INTERRUPTED, ending_at_once
from pipeedge.base.program import COMMAND
from pipeedge.base.streams import end, print_result, say
from pipeedge.request.config import MAX_WORLD
from pipeedge.request.declared import Section, add_sections
from pipeedge.request.options import SECTIONS
from pipeedge.request.parsing import OneLineParser, add_common, nonempty

if TYPE_CHECKING:
    from pipeedge.api.pipeline import Pipeline

__all__ = ["ChatCommand", "chat_parser", "converse", "main", "parse_chat"]

_PROGRAM = f"{COMMAND} chat"
_NEW = "/new"
_CHAPTERS = ("running.md", "security.md", "models.md", "decoders.md", "concepts.md", "dtypes.md")
"""Chapters of the sections of options that a conversation has."""
_LEFT_OUT = frozenset({"name", "prompt", "raw", "logprobs", "data_rank"})
"""Fields of their options that it does not have."""


@dataclass(frozen=True)
class ChatCommand:
    """Parsed command line of ``pipeedge chat``."""

    model: str
    ranks: int
    system: str | None
    """First message, which tells the model how to answer."""
    options: tuple[str, ...]
    """Options of ``runtime.py``."""


def _sections() -> list[Section]:
    chosen = [
        section for section in SECTIONS if section.chapter.startswith(tuple(f"[{c}]" for c in _CHAPTERS))
    ]
    return [
        replace(section, options=tuple(one for one in section.options if one.field not in _LEFT_OUT))
        for section in chosen
    ]


def _own_parser(**texts: Any) -> OneLineParser:
    parser = OneLineParser(**texts, allow_abbrev=False)
    parser.add_argument(
        "-m",
        "--model",
        "--model-name",
        dest="model_name",
        type=nonempty,
        required=True,
        metavar="NAME|DIR",
        help="a model that generates text and has a chat template",
    )
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="number of processes here that share the layers (1)"
    )
    parser.add_argument(
        "--system", type=nonempty, metavar="TEXT", help="message that tells the model how to answer"
    )
    add_common(parser)
    return parser


def chat_parser() -> argparse.ArgumentParser:
    """Return the parser of ``pipeedge chat``."""
    parser = _own_parser(
        prog=_PROGRAM,
        description="Have a conversation with a model. Ctrl-C ends an answer, Ctrl-D the conversation, and "
        f"{_NEW} begins another one.",
    )
    add_sections(parser, _sections())
    parser.common = (
        *(
            "--model",
            "--ranks",
            "--system",
            "--max-tokens",
            "--greedy",
            "--temperature",
            "--top-k",
            "--top-p",
        ),
        *("--context", "--cache-mb", "--partition", "--dtype"),
    )
    parser.examples = (
        f"{_PROGRAM} -m llama-puzzles",
        f"{_PROGRAM} -m llama-puzzles --ranks 2 --greedy",
        f"{_PROGRAM} -m model.Q4_0.gguf --context 4096 --system 'Answer in one sentence.'",
    )
    return parser


def parse_chat(argv: Sequence[str]) -> ChatCommand:
    """Read the command line.

    Raises:
        RequestError: An option or a value is wrong.
        SystemExit: After ``--help`` or ``--version``.
    """
    chat_parser().parse_args(argv)
    own, options = _own_parser().parse_known_args(argv)
    if not 1 <= own.ranks <= MAX_WORLD:
        raise RequestError(f"--ranks {own.ranks}: 1 to {MAX_WORLD} are possible")
    return ChatCommand(own.model_name, own.ranks, own.system, tuple(options))


def main() -> NoReturn:
    """Have the conversation, and end the process."""
    end(_PROGRAM, guard(_PROGRAM, _chat, verbose="--verbose" in sys.argv))


def _chat() -> None:
    command = parse_chat(sys.argv[1:])
    with ending_at_once():
        from pipeedge.api.pipeline import Pipeline  # imports torch, which takes seconds

    signal.signal(signal.SIGTERM, _terminate)
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() the keys of a line editor
    with Pipeline(command.model, ranks=command.ranks, microbatch_size=1, options=command.options) as pipeline:
        converse(pipeline, command.system)


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(INTERRUPTED)


def converse(pipeline: Pipeline, system: str | None) -> None:
    """Answer line after line until there are no more."""
    is_person = sys.stdin.isatty() and sys.stdout.isatty()
    context = pipeline.context
    if is_person:
        print_result(
            f"{pipeline.model.name}, {context} tokens of context. Ctrl-C ends an answer, Ctrl-D the "
            f"conversation; {_NEW} begins another one."
        )
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = list(first)
    while True:
        try:
            line = input("> " if is_person else "").strip()
        except EOFError:
            if is_person:
                print_result("")
            return
        except KeyboardInterrupt:
            if not is_person:
                raise
            print_result("")
            continue
        if line == _NEW:
            messages = list(first)
        elif line:
            messages = _answered(pipeline, [*messages, {"role": "user", "content": line}])


def _answered(pipeline: Pipeline, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Print the answer to the last message as it grows; return the conversation with it.

    A message that cannot be answered is left out.
    """
    from pipeedge.run.text_ends import for_terminals

    pieces: list[str] = []
    try:
        answer = pipeline.chat(messages)
        try:
            for piece in answer:
                pieces.append(piece)
                print_result(for_terminals(piece), end="")
        except KeyboardInterrupt:
            answer.close()
    except InputError as error:
        is_long = any(message["role"] == "assistant" for message in messages)
        say(_PROGRAM, f"{error}; {_NEW} begins another conversation" if is_long else str(error))
        return messages[:-1]
    except KeyboardInterrupt:  # before the answer has begun
        pass
    print_result("")
    return [*messages, {"role": "assistant", "content": "".join(pieces)}]
