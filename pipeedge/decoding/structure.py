"""What an answer has to look like: a JSON schema, a regular expression or a grammar.

    {"type": "json_schema", "json_schema": {"schema": {...}}}    response_format, as OpenAI has it
    {"type": "json_object"}                                      any object
    {"type": "grammar", "syntax": "regex", "definition": "..."}  or "lark"
    {"regex": "..."}, {"choice": ["a", "b"]}, {"json": {...}}    structured_outputs, as vLLM has it

``structure_matching`` makes an answer follow it. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeedge.base.errors import RequestError
from pipeedge.base.wording import excerpt

__all__ = ["Mask", "Structure", "read_structure"]

Mask: TypeAlias = npt.NDArray[np.bool_]
"""Which tokens may come next, [V]."""
_LONGEST = 1 << 20


@dataclass(frozen=True)
class Structure:
    """What an answer has to look like."""

    kind: str
    """``json_schema``, ``regex`` or ``lark``."""
    text: str
    """The schema as JSON, the regular expression, or the grammar."""

    def __post_init__(self) -> None:
        if len(self.text) > _LONGEST:
            raise RequestError(f"a {self.kind} of {len(self.text):,} characters; {_LONGEST:,} are possible")


def read_structure(document: Mapping[str, Any]) -> Structure | None:
    """Return what ``response_format`` or ``structured_outputs`` of an object of JSON asks for.

    Raises:
        RequestError: It is malformed, or there are both.
    """
    found = [
        read(document[name])
        for name, read in (("response_format", _response_format), ("structured_outputs", _structured_outputs))
        if document.get(name) is not None
    ]
    wanted = [one for one in found if one is not None]
    if len(wanted) > 1:
        raise RequestError("give response_format or structured_outputs, not both")
    return wanted[0] if wanted else None


def _response_format(value: object) -> Structure | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema", "grammar"):
        raise RequestError(
            f"response_format is {excerpt(repr(value))}; an object with type text, json_object, json_schema "
            "or grammar is needed"
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure("json_schema", '{"type": "object"}')
    if kind == "grammar":
        syntax = value.get("syntax")
        if syntax not in ("regex", "lark"):
            raise RequestError(f"response_format.syntax is {excerpt(repr(syntax))}; regex or lark is needed")
        return Structure(syntax, _text("response_format.definition", value.get("definition")))
    schema = value.get("json_schema")
    schema = schema.get("schema") if isinstance(schema, dict) else None
    return _json_schema("response_format.json_schema.schema", schema)


def _structured_outputs(value: object) -> Structure:
    kinds: Mapping[str, Callable[[str, object], Structure]] = {
        "json": _json_schema,
        "regex": lambda name, text: Structure("regex", _text(name, text)),
        "grammar": lambda name, text: Structure("lark", _text(name, text)),
        "choice": _choice,
    }
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in kinds:
        raise RequestError(
            f"structured_outputs is {excerpt(repr(value))}; an object with one of {', '.join(kinds)} is "
            "needed"
        )
    ((kind, inner),) = value.items()
    return kinds[kind](f"structured_outputs.{kind}", inner)


def _json_schema(name: str, schema: object) -> Structure:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name} is not JSON ({error})") from None
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{name} is {excerpt(repr(schema))}; a JSON schema is needed")
    return Structure("json_schema", json.dumps(schema))


def _choice(name: str, choices: object) -> Structure:
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(one, str) and one for one in choices)
    ):
        raise RequestError(f"{name} is {excerpt(repr(choices))}; a list of texts is needed")
    return Structure("regex", "|".join(map(re.escape, choices)))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} is {excerpt(repr(value))}; a text is needed")
    return value
