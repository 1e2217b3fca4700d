"""Rows for the page ``/docs``, from the description of the routes. Pure.

The page shows what ``/openapi.json`` says, so both always agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Chapter", "ReferenceEntry", "ReferenceRow", "chapters"]


@dataclass(frozen=True)
class ReferenceRow:
    """A field of a body, a parameter, or a status."""

    name: str
    kind: str
    """Its type in words."""
    text: str
    """Purpose in a sentence."""
    required: bool = False


@dataclass(frozen=True)
class ReferenceEntry:
    """One route with one method."""

    method: str
    path: str
    anchor: str
    summary: str
    text: str
    needs_key: bool
    bodies: tuple[str, ...]
    """Content types of the body."""
    parameters: tuple[ReferenceRow, ...]
    fields: tuple[ReferenceRow, ...]
    """Fields of the body as JSON."""
    reply: str
    """Form of the reply in words."""
    failures: tuple[ReferenceRow, ...]
    command: str
    """Example for a shell."""


@dataclass(frozen=True)
class Chapter:
    """Routes that belong together."""

    title: str
    entries: tuple[ReferenceEntry, ...]


def chapters(document: Mapping[str, Any], url: str) -> list[Chapter]:
    """Return all routes of an OpenAPI document by their tags.

    Args:
        document: The description.
        url: Address of the server, for the examples.
    """
    schemas = document["components"]["schemas"]
    found: dict[str, list[ReferenceEntry]] = {tag["name"]: [] for tag in document["tags"]}
    for path, methods in document["paths"].items():
        for method, each in methods.items():
            found[each["tags"][0]].append(_entry(path, method, each, schemas, url))
    return [Chapter(title, tuple(entries)) for title, entries in found.items()]


def _entry(
    path: str, method: str, each: Mapping[str, Any], schemas: Mapping[str, Any], url: str
) -> ReferenceEntry:
    content = each.get("requestBody", {}).get("content", {})
    body = content.get("application/json", {})
    (media, answer), *_ = each["responses"]["200"]["content"].items()
    is_open = media == "application/json" and answer["schema"] == {"type": "object"}
    return ReferenceEntry(
        method=method.upper(),
        path=path,
        anchor=each["operationId"],
        summary=each["summary"],
        text=each.get("description", ""),
        needs_key="security" in each,
        bodies=tuple(content),
        parameters=tuple(_parameter(one) for one in each.get("parameters", ())),
        fields=tuple(_fields(body.get("schema", {}), schemas)),
        reply="JSON" if is_open else media if media != "application/json" else _kind(answer["schema"]),
        failures=tuple(
            ReferenceRow(code, "", reply["description"])
            for code, reply in each["responses"].items()
            if code != "200"
        ),
        command=_command(path, method, body.get("example"), url, needs_key="security" in each),
    )


def _parameter(one: Mapping[str, Any]) -> ReferenceRow:
    return ReferenceRow(
        one["name"],
        f"{_kind(one['schema'])} in the {one['in']}",
        one.get("description", ""),
        one.get("required", False),
    )


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[ReferenceRow]:
    """Yield the fields of an object; those of all kinds, if it is one of several."""
    if "anyOf" in schema:
        found: dict[str, ReferenceRow] = {}
        for row in (row for one in schema["anyOf"] for row in _fields(one, schemas)):
            found.setdefault(row.name, row)
        yield from found.values()
        return
    target = schemas[_name(schema)] if "$ref" in schema else schema
    required = target.get("required", ())
    for name, field in target.get("properties", {}).items():
        text = field.get("description", "")
        if name not in required and field.get("default") not in (None, "", [], {}):
            text += f"{'; ' if text else ''}{json.dumps(field['default'])} by default"
        yield ReferenceRow(name, _kind(field), text, name in required)


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a type in words."""
    if "$ref" in schema:
        return _name(schema)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_kind, schema["anyOf"])))
    kind = schema.get("type", "anything")
    if kind == "array":
        inner = _kind(schema.get("items", {}))
        return f"list of ({inner})" if " or " in inner else f"list of {inner}"
    return str(kind)


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _command(path: str, method: str, example: object, url: str, *, needs_key: bool) -> str:
    """Return a line for a shell that asks this route; quotes of the shell hold the whole example."""
    parts = ["curl"]
    if needs_key:
        parts.append("-H 'Authorization: Bearer KEY'")
    if method == "post":
        parts.append("-H 'Content-Type: application/json'")
        quoted = json.dumps(example).replace("'", "'\\''")
        parts.append(f"-d '{quoted}'")
    quoted_url = f"{url}{path}".replace("'", "'\\''")
    return " ".join([*parts, f"'{quoted_url}'"])
