"""Test the description of the routes, and the rows that people read of it."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from starlette.routing import Route

from pipeedge.serve import description
from pipeedge.serve.application import all_routes, text_routes
from pipeedge.serve.description import OPEN_PATHS, openapi_document
from pipeedge.serve.reference import ReferenceEntry, chapters

OPEN, LOCKED = (openapi_document("m<b>", needs_key=key) for key in (False, True))
TEXT = openapi_document("m<b>", needs_key=True, generates=True)


def entries(document: dict[str, Any], url: str = "http://pi1:8000") -> list[ReferenceEntry]:
    return [entry for chapter in chapters(document, url) for entry in chapter.entries]


def references(value: object) -> set[str]:
    return set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(value)))


@pytest.mark.parametrize(
    ("routes", "document"),
    [(all_routes(Mock(), Mock(), Mock()), OPEN), (text_routes(Mock(), Mock()), TEXT)],
    ids=["encoder", "decoder"],
)
def test_every_route_is_described(routes: list[Route], document: dict[str, Any]) -> None:
    found = {
        (method.lower(), route.path.replace(":path", ""))
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert found == {(method, path) for path, methods in document["paths"].items() for method in methods}


@pytest.mark.parametrize("document", [OPEN, LOCKED, TEXT], ids=["open", "with keys", "decoder"])
def test_the_document_is_whole(document: dict[str, Any]) -> None:
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    names = [each["operationId"] for each in operations]
    assert len(set(names)) == len(names)
    assert references(document) <= set(document["components"]["schemas"])
    for path, methods in document["paths"].items():
        for each in methods.values():
            given = {one["name"] for one in each.get("parameters", ()) if one["in"] == "path"}
            assert given == set(re.findall(r"\{(\w+)\}", path))
            assert "200" in each["responses"]


@pytest.mark.parametrize("document", [OPEN, LOCKED], ids=["open", "with keys"])
def test_a_validator_accepts_the_document(document: dict[str, Any]) -> None:
    validator = pytest.importorskip(
        "openapi_spec_validator", reason="openapi-spec-validator is not installed (extra dev)"
    )
    validator.validate(json.loads(json.dumps(document)))


def test_only_locked_routes_ask_for_a_key() -> None:
    assert not any(entry.needs_key for entry in entries(OPEN))
    free = {(entry.method, entry.path) for entry in entries(LOCKED) if not entry.needs_key}
    assert free == {("GET", path) for path in OPEN_PATHS}


def test_examples_are_what_the_routes_take() -> None:
    for (method, _), each in description._OPERATIONS.items():
        assert bool(each.bodies) == (method == "post")
        if each.bodies:
            msgspec.convert(each.example, each.bodies[0])


def test_rows_say_what_a_field_is() -> None:
    (embeddings,) = (entry for entry in entries(OPEN) if entry.path == "/v1/embeddings")
    rows = {row.name: row for row in embeddings.fields}
    assert rows["input"].required
    assert rows["input"].kind == "string or list of (string or integer or list of integer)"
    assert rows["encoding_format"].text == 'float or base64; "float" by default'
    assert embeddings.reply == "Embeddings"
    assert [row.name for row in embeddings.failures][:2] == ["400", "401"]


def test_commands_survive_the_shell() -> None:
    for entry in entries(LOCKED, "http://pi'1:8000"):
        words = shlex.split(entry.command)
        assert words[-1] == f"http://pi'1:8000{entry.path}"
        assert ("Authorization: Bearer KEY" in words) == entry.needs_key
        if entry.method == "POST":
            assert isinstance(json.loads(words[words.index("-d") + 1]), dict)
