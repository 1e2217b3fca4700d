"""Render chat templates in a process of their own, which anybody may stop: a template is a program.

    a line in    {"template": "...", "variables": {"messages": [...], "tools": null, "bos_token": "<s>", ...}}
    a line out   {"text": "..."} or {"error": "..."}

The language is that of transformers: Jinja in its sandbox, without blanks around blocks, with ``break`` and
``continue``, ``{% generation %}``, ``tojson`` without escapes for HTML, ``raise_exception`` and
``strftime_now``. The process can write no file and start no other one, and has little memory.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["MEMORY_MB", "main", "render"]

MEMORY_MB = 512
"""Address space of the process in MB."""
_LONGEST_TEXT = 1 << 25
_LONGEST_LINE = 500


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``, which marks what a model learns; plain text here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names that lead to what is inside Python."""

    def __init__(*args: Any, **names: Any) -> None:
        self, *rest = args
        jinja2.utils.Namespace.__init__(self, {})
        for name, value in dict(*rest, **names).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace takes no name that begins with an underline, such as {name!r}")
        super().__setitem__(name, value)


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which reading what is inside Python is an error rather than an empty text."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuse an attribute."""
        raise SecurityError(
            f"it reads the attribute {attribute!r} of {type(obj).__name__}, which is not safe"
        )


def _dictionary(*args: Any, **names: Any) -> dict[Any, Any]:
    return dict(*args, **names)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@cache
def _compiled(template: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise, strftime_now=_now, dict=_dictionary, namespace=_Namespace
    )
    return environment.from_string(template)


def render(template: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the text that a template makes of its variables, or why it makes none."""
    try:
        text = _compiled(template).render(**variables)
        if len(text) > _LONGEST_TEXT:
            return {"error": f"it makes a text of {len(text):,} characters"}
        return {"text": text}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_MB} MB"}
    except RecursionError:
        return {"error": "it calls itself without an end"}
    except Exception as error:  # a template is a program, and may raise anything
        text = " ".join(str(error).split())[:_LONGEST_LINE]
        line = getattr(error, "lineno", None)
        where = "" if line is None else f" (line {line})"
        return {"error": f"{text or type(error).__name__}{where}"}


def _give_up_rights() -> None:
    sys.dont_write_bytecode = True
    memory = MEMORY_MB << 20
    limits: tuple[tuple[int, int], ...] = (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
    )
    for limit, value in limits:
        with suppress(OSError, ValueError):  # not every system has each of them
            resource.setrlimit(limit, (value, value))


def main() -> None:
    """Answer the lines of standard input until it ends."""
    render("{{ raise_exception('x') }}", {})  # imports what messages need, while memory is plentiful
    _give_up_rights()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer = json.dumps(render(request["template"], request["variables"])) + "\n"
        sys.stdout.buffer.write(answer.encode())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
