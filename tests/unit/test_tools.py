"""Test functions that a model may call."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from transformers import AutoTokenizer

from pipeedge.base.errors import InputError
from pipeedge.data.answers import AnswerWriter
from pipeedge.decoding.generation import FinishReason, Generation
from pipeedge.decoding.prompt import PromptMaker
from pipeedge.decoding.sampling import Sampling
from pipeedge.decoding.tools import CallForm, ToolCall, ToolCallReader, call_form, read_tools
from pipeedge.decoding.vocabulary import Vocabulary

DIRECTORY = ROOT / "pipeedge" / "assets" / "llama-puzzles"
TEMPLATES = {
    CallForm.TAGS: "{{ tools }} answer in <tool_call></tool_call>{{ messages[0].content }}",
    CallForm.LIST: "{{ tools }}[TOOL_CALLS]{{ messages[0].content }}",
    CallForm.OBJECT: "Environment: ipython {{ tools }} with parameters {{ messages[0].content }}",
}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("add", a={"type": "integer", "maximum": 99, "minimum": 0}), tool("stop")]
NAMES = frozenset({"add", "stop"})
ADD, STOP = ToolCall("add", '{"a": 1, "s": "}é</"}'), ToolCall("stop", "{}")
WITH_ARGUMENTS = '{"name": "add", "arguments": {"a": 1, "s": "}\\u00e9</"}}'
WITH_PARAMETERS = WITH_ARGUMENTS.replace("arguments", "parameters")
TAGGED = f"<tool_call>\n{WITH_ARGUMENTS}\n</tool_call>"
STOPPED = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
STRANGE = '{"name": "rm", "parameters": {}}'


@pytest.mark.parametrize(
    ("form", "answer", "text", "calls"),
    [
        (CallForm.TAGS, "plain <b> text\n", "plain <b> text\n", []),
        (CallForm.TAGS, TAGGED, "", [ADD]),
        (CallForm.TAGS, f"I see.\n\n{TAGGED}\n{STOPPED}\n", "I see.", [ADD, STOP]),
        (CallForm.TAGS, f"{STOPPED} then", " then", [STOP]),
        (CallForm.TAGS, "a <tool_call>{no}</tool_call> b", "a <tool_call>{no}</tool_call> b", []),
        (CallForm.TAGS, f"a <tool_call>{STRANGE}</tool_call>", f"a <tool_call>{STRANGE}</tool_call>", []),
        (CallForm.TAGS, 'a <tool_call>{"name": "add"', 'a <tool_call>{"name": "add"', []),
        (CallForm.TAGS, "a <tool_", "a <tool_", []),
        (CallForm.LIST, f"[TOOL_CALLS] [{WITH_ARGUMENTS}]", "", [ADD]),
        (CallForm.LIST, f'[{WITH_ARGUMENTS}, {{"name": "stop"}}]', "", [ADD, STOP]),
        (CallForm.LIST, "[1] is a list", "[1] is a list", []),
        (CallForm.LIST, "no [list]", "no [list]", []),
        (CallForm.OBJECT, WITH_PARAMETERS, "", [ADD]),
        (CallForm.OBJECT, f'{WITH_PARAMETERS}; {{"name": "stop", "parameters": {{}}}}', "", [ADD, STOP]),
        (CallForm.OBJECT, STRANGE, STRANGE, []),
        (CallForm.OBJECT, '{"name": "add", "parameters": 3}', '{"name": "add", "parameters": 3}', []),
        (CallForm.OBJECT, "Well {", "Well {", []),
        (CallForm.OBJECT, "", "", []),
    ],
)
@settings(max_examples=cases(100), deadline=None)
@given(source=st.randoms(use_true_random=False))
def test_calls_are_found_whatever_the_pieces(
    form: CallForm, answer: str, text: str, calls: list[ToolCall], source: random.Random
) -> None:
    reader = ToolCallReader(form, NAMES)
    shown, place = "", 0
    while place < len(answer):
        end = place + source.randint(1, 9)
        shown += reader.push(answer[place:end])
        assert text.startswith(shown)
        place = end
    assert shown + reader.finish() == text
    assert reader.calls == calls


def test_the_form_of_calls_is_that_of_the_template() -> None:
    assert [call_form(template) for template in TEMPLATES.values()] == list(TEMPLATES)
    assert call_form("{{ tools }}") is None
    assert call_form("<tool_call><function=x>") is None
    assert read_tools(TOOLS, "none", TEMPLATES[CallForm.TAGS]).shown == ()
    assert read_tools(TOOLS, None, "{{ tools }}").form is None


def maker(template: str) -> PromptMaker:
    backend = AutoTokenizer.from_pretrained(DIRECTORY)
    backend.chat_template = template
    return PromptMaker(Vocabulary(backend, DIRECTORY / "tokenizer.json", "puzzles", 260), Sampling(), 4000)


def document(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **more}


@pytest.mark.parametrize("form", CallForm)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_is_required_comes(form: CallForm, choice: Any, tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="it is in the extra serve")
    prompts = maker(TEMPLATES[form])
    prompt = prompts.from_document(document(tool_choice=choice), 0, "a.jsonl:1")
    for seed in range(5):
        source = np.random.default_rng(seed)
        answer = Generation(prompt, prompts.vocabulary, 4000, {3}, seed=seed)
        shown = ""
        while answer.finish_reason is None:
            shown += answer.take(source.normal(0, 3, 260).astype(np.float32)).text
        done = answer.answer()
        assert (shown, done.text, done.finish_reason) == ("", "", FinishReason.STOP)
        (call,) = done.tool_calls
        assert call.name in ("add", *(["stop"] if choice == "required" else []))
        arguments = json.loads(call.arguments)
        assert not arguments if call.name == "stop" else 0 <= arguments["a"] <= 99
    with AnswerWriter(tmp_path / "a.jsonl", [prompt], prompts.vocabulary) as writer:
        writer.write(done)
    (line,) = map(json.loads, (tmp_path / "a.jsonl").read_text("utf-8").splitlines())
    function = {"name": call.name, "arguments": call.arguments}
    assert line["tool_calls"] == [{"id": "call-0-0-0", "type": "function", "function": function}]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"tools": "add"}, "tools is 'add'; a list of functions"),
        ({"tools": [{"name": "add"}]}, r"tools\[0\] is not an object of type function"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "not a JSON schema"),
        ({"tool_choice": "any"}, "tool_choice is 'any'; none, auto, required or one of"),
        ({"tool_choice": {"type": "function", "function": {"name": "ad"}}}, "did you mean add"),
        ({"tools": None, "tool_choice": "required"}, "there are no tools"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "no response_format"),
    ],
)
def test_functions_that_cannot_be_used_are_one_line(more: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=f"^a.jsonl:2: .*{line}"):
        maker(TEMPLATES[CallForm.TAGS]).from_document(document(**more), 0, "a.jsonl:2")


def test_a_template_must_know_functions() -> None:
    with pytest.raises(InputError, match="takes no tools"):
        maker("{{ messages[0].content }}").from_document(document(), 0, "a")
    with pytest.raises(InputError, match="in a known form"):
        maker("{{ tools }}").from_document(document(tool_choice="required"), 0, "a")
    with pytest.raises(InputError, match="tool_choice needs messages"):
        maker("{{ tools }}").from_document({"prompt": "a", "tool_choice": "auto"}, 0, "a")
