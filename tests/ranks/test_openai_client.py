"""OpenAI's own client against the server. It is not among the project's packages, so it may be missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from http_client import ServedModel
from places import ROOT

openai = pytest.importorskip("openai", reason="pip install openai")

PUZZLES = ROOT / "pipeedge" / "assets" / "llama-puzzles"
SUM = [{"role": "user", "content": "What is 47 + 85?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": [1, 2]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of llama-puzzles with a chat template that knows functions."""
    directory = tmp_path_factory.mktemp("models") / "llama-tools"
    shutil.copytree(PUZZLES, directory)
    template = (PUZZLES / "chat_template.jinja").read_text()
    shown = "{% if tools %}{# a call is <tool_call> #}{{ tools | length }}{% endif %}"
    (directory / "chat_template.jinja").write_text(shown + template)
    with ServedModel("-m", directory) as served:
        address = f"http://127.0.0.1:{served.port}/v1"
        with openai.OpenAI(base_url=address, api_key="none") as found:
            yield found


def streamed(chunks: Any) -> tuple[str, list[dict[str, str]], str, Any]:
    """Return text, calls, reason and usage of a stream, joined as its clients do it."""
    text, calls, reason, usage = "", list[dict[str, str]](), "", None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                if call.index == len(calls):
                    calls.append({"name": "", "arguments": ""})
                calls[call.index]["name"] += call.function.name or ""
                calls[call.index]["arguments"] += call.function.arguments or ""
    return text, calls, reason, usage


def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["llama-tools"]


def test_a_chat_at_once_and_as_a_stream(client: Any) -> None:
    asked = {"model": "llama-tools", "messages": SUM, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == "132"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    text, calls, reason, usage = streamed(client.chat.completions.create(**asked, **options))
    assert (text, calls, reason) == ("132", [], "stop")
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_log_probabilities_and_several_answers(client: Any) -> None:
    found = client.chat.completions.create(
        model="llama-tools", messages=SUM, n=2, seed=3, temperature=1, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in found.choices] == [0, 1]
    for choice in found.choices:
        assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    old = client.completions.create(model="llama-tools", prompt="3 1 2", max_tokens=4, logprobs=1)
    assert old.choices[0].logprobs.text_offset[0] == 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=str)
def test_a_function_is_called(client: Any, choice: Any) -> None:
    asked = {"model": "llama-tools", "messages": SUM, "tools": [ADD], "tool_choice": choice, "seed": 1}
    whole = client.chat.completions.create(**asked, temperature=1, max_tokens=200)
    (call,) = whole.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "add"
    assert isinstance(arguments["a"], int)
    assert arguments["b"] in (1, 2)
    assert whole.choices[0].finish_reason == "tool_calls"
    text, calls, reason, _ = streamed(
        client.chat.completions.create(**asked, temperature=1, max_tokens=200, stream=True)
    )
    assert (text, reason) == ("", "tool_calls")
    assert calls == [{"name": "add", "arguments": call.function.arguments}]
    answered = [
        *SUM,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "132"},
    ]
    after = client.chat.completions.create(model="llama-tools", messages=answered, tools=[ADD], max_tokens=3)
    assert after.usage.prompt_tokens > whole.usage.prompt_tokens


def test_an_answer_follows_a_schema(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    asked = {"model": "llama-tools", "messages": SUM, "response_format": form, "temperature": 1, "seed": 5}
    whole = client.chat.completions.create(**asked, max_tokens=150).choices[0].message.content
    person = json.loads(whole)
    assert set(person) == {"name", "age"}
    assert person["age"] <= 99
    assert streamed(client.chat.completions.create(**asked, max_tokens=150, stream=True))[0] == whole


def test_a_response_at_once_and_as_a_stream(client: Any) -> None:
    whole = client.responses.create(model="llama-tools", input="What is 47 + 85?", temperature=0, store=False)
    assert whole.output_text == "132"
    assert whole.usage.input_tokens_details.cached_tokens in range(whole.usage.input_tokens)
    with client.responses.stream(model="llama-tools", input="What is 47 + 85?", temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "132"
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


def test_what_is_wrong_has_a_class_of_the_client(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="llama-tools", messages=SUM, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="other"):
        client.chat.completions.create(model="other", messages=SUM)
    with pytest.raises(openai.BadRequestError, match="audio"):
        client.chat.completions.create(model="llama-tools", messages=SUM, extra_body={"audio": {}})
