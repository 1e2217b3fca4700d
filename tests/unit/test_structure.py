"""Test answers that follow a structure."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from transformers import AutoTokenizer

from pipeedge.base.errors import InputError, RequestError
from pipeedge.decoding.generation import FinishReason, Generation
from pipeedge.decoding.loop import LocalDecoder
from pipeedge.decoding.prompt import Prompt, PromptMaker
from pipeedge.decoding.sampling import Sampling, read_sampling
from pipeedge.decoding.structure import Structure, read_structure
from pipeedge.decoding.vocabulary import Vocabulary
from pipeedge.models.decoder import find_decoder

pytest.importorskip("llguidance", reason="it is in the extra serve")

DIRECTORY = ROOT / "pipeedge" / "assets" / "llama-puzzles"
VOCABULARY = Vocabulary(
    AutoTokenizer.from_pretrained(DIRECTORY), DIRECTORY / "tokenizer.json", "puzzles", 260
)
END = 3
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": -5, "maximum": 40},
        "kind": {"enum": ["small", "large", None]},
        "parts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "count", "kind", "parts"],
    "additionalProperties": False,
}


def response_format(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@settings(max_examples=cases(300), deadline=None)
@given(st.lists(st.text("ab雪é", min_size=1, max_size=4), min_size=1, max_size=4, unique=True), st.data())
def test_allowed_tokens_are_those_that_lead_to_an_answer(choices: list[str], data: st.DataObject) -> None:
    structure = read_structure({"structured_outputs": {"choice": choices}})
    assert structure is not None
    matcher = VOCABULARY.matcher(structure, [END])
    words, done = [choice.encode() for choice in choices], b""
    while True:
        expected = {
            token
            for token in range(4, 260)
            if any(word.startswith(done + VOCABULARY.token_bytes(token)) for word in words)
        }
        if not matcher.is_complete:
            found = set(np.flatnonzero(matcher.allowed()).tolist())
            assert found == expected | ({END} if done in words else set())
        if not expected:
            assert matcher.is_complete
            assert done in words
            return
        token = data.draw(st.sampled_from(sorted(expected)))
        done += VOCABULARY.token_bytes(token)
        matcher.take(token)


@settings(max_examples=cases(200), deadline=None)
@given(st.integers(0, 1 << 30))
def test_any_scores_make_an_answer_that_fits(seed: int) -> None:
    options = read_sampling({**response_format(SCHEMA), "temperature": 1, "seed": seed}, Sampling())
    answer = Generation(Prompt((5,), options), VOCABULARY, 400, {END})
    source = np.random.default_rng(seed)
    while answer.finish_reason is None:
        answer.take(source.normal(0, 4, 260).astype(np.float32))
    done = answer.answer()
    assert done.finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(done.text), SCHEMA)
    assert "\n" not in done.text


def test_answers_of_the_shipped_model_fit() -> None:
    model = find_decoder(DIRECTORY)
    decoder = LocalDecoder(model, context=256)
    maker = PromptMaker(VOCABULARY, Sampling(temperature=1.0), 256)
    for number in range(cases(1000, 50)):
        document = {
            "messages": [{"role": "user", "content": f"What is {number} + {number * 7 % 100}?"}],
            "seed": number,
            **response_format(SCHEMA),
        }
        prompt = maker.from_document(document, number, "a")
        answer = Generation(prompt, VOCABULARY, 256, {END})
        lists = decoder.begin()
        hidden = decoder.step([(lists, 0, prompt.tokens)])
        while True:
            piece = answer.take(decoder.score(hidden[-1:])[0].numpy())
            if piece.finish_reason is not None:
                break
            place = len(prompt.tokens) + len(answer.tokens) - 1
            hidden = decoder.step([(lists, place, answer.tokens[-1:])])
        lists.give_back()
        assert answer.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(answer.answer().text), SCHEMA)


@pytest.mark.parametrize(
    ("document", "pattern"),
    [
        ({"response_format": {"type": "grammar", "syntax": "regex", "definition": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"regex": "a+b"}}, "a+b"),
        ({"structured_outputs": {"grammar": 'start: ("x" "y")~2'}}, "xyxy"),
        ({"response_format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a" | "b"'}}, "a|b"),
        ({"structured_outputs": {"json": {"const": 5}}}, "5"),
        ({"response_format": {"type": "json_object"}, "max_tokens": 40}, None),
        ({"response_format": {"type": "text"}, "max_tokens": 4}, None),
    ],
)
def test_structures_have_the_names_that_clients_use(document: dict[str, Any], pattern: str | None) -> None:
    prompt = PromptMaker(VOCABULARY, Sampling(), 100).from_document({"prompt": "x", **document}, 0, "a")
    answer = Generation(prompt, VOCABULARY, 100, {END})
    source = np.random.default_rng(1)
    while answer.finish_reason is None:
        answer.take(source.normal(0, 1, 260).astype(np.float32))
    text = answer.answer().text
    if pattern is not None:
        assert re.fullmatch(pattern, text)
    elif document["response_format"]["type"] == "json_object":
        assert text.startswith("{")


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ({"response_format": "json"}, "response_format is 'json'; an object with type"),
        ({"response_format": {"type": "json_schema"}}, r"json_schema\.schema is None; a JSON schema"),
        (response_format({"type": "objekt"}), "the json_schema cannot be used: Invalid type: objekt"),
        (response_format({"type": "string", "format": "zzz"}), "cannot be used: Unknown format: zzz"),
        ({"structured_outputs": {"regex": "("}}, "the regex cannot be used: .*invalid regex"),
        ({"structured_outputs": {"grammar": "start: x"}}, "the lark cannot be used: .*unknown name"),
        ({"structured_outputs": {"json": "{"}}, "is not JSON"),
        ({"structured_outputs": {"choice": []}}, "a list of texts is needed"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "an object with one of json, regex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "not both"),
        ({"response_format": {"type": "grammar", "syntax": "bnf", "definition": "a"}}, "regex or lark"),
        ({"structured_outputs": {"regex": "a" * 2_000_000}}, "2,000,000 characters"),
    ],
)
def test_a_structure_that_cannot_be_used_is_one_line(document: dict[str, Any], line: str) -> None:
    maker = PromptMaker(VOCABULARY, Sampling(), 100)
    with pytest.raises(InputError, match=f"^a.jsonl:3: .*{line}") as caught:
        maker.from_document({"prompt": "x", **document}, 0, "a.jsonl:3")
    assert "\n" not in str(caught.value)


def test_a_token_that_leads_nowhere_is_refused() -> None:
    matcher = VOCABULARY.matcher(Structure("regex", "[ab]c"), [END])
    with pytest.raises(RequestError, match="the structure of the answer cannot be followed: ") as caught:
        matcher.take(VOCABULARY.encode("x")[0])
    assert "\n" not in str(caught.value)


def test_a_structure_that_forbids_what_the_options_force_is_one_line() -> None:
    options = Sampling(structure=Structure("regex", "a"), bad_words=(tuple(VOCABULARY.encode("a")),))
    with pytest.raises(RequestError, match="no token is left"):
        Generation(Prompt((5,), options), VOCABULARY, 100, {END}).take(np.zeros(260, np.float32))
