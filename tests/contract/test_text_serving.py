"""Test a decoder that answers over HTTP, with real requests to a server in the test's process."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from failing_layers import fail_layers
from http_client import ServedModel
from places import ROOT
from waiting import LIMIT_S, until

PUZZLES = ROOT / "pipeedge" / "assets" / "llama-puzzles"
# fmt: off
RESPONSE_FIELDS = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model",
    "previous_response_id", "instructions", "output", "error", "tools", "tool_choice", "truncation",
    "parallel_tool_calls", "text", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs",
    "temperature", "reasoning", "usage", "max_output_tokens", "max_tool_calls", "store", "background",
    "service_tier", "metadata", "safety_identifier", "prompt_cache_key",
}
# fmt: on
"""What the schema of Open Responses requires of each response, if only as null."""
SUM = [{"role": "user", "content": "What is 47 + 85?"}]
CHAT: dict[str, Any] = {"model": "llama-puzzles", "messages": SUM}
LONG = {**CHAT, "ignore_eos": True, "max_tokens": 220}


@pytest.fixture(scope="module")
def served() -> Iterator[ServedModel]:
    with ServedModel("-m", PUZZLES, "-u", 8) as model:
        yield model


def events(content: bytes) -> list[tuple[dict[str, str], Any]]:
    """Return the events of a stream, each with its fields and its data as JSON."""
    found = []
    for each in content.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in each.splitlines())
        if fields:
            data = fields.pop("data")
            found.append((fields, data if data == "[DONE]" else json.loads(data)))
    return found


def figures(served: ServedModel) -> dict[str, float]:
    lines = served.get("/metrics").body.decode().splitlines()
    pairs = [line.split(" ") for line in lines if not line.startswith("#") and "{" not in line]
    return {name.removeprefix("pipeedge_"): float(value) for name, value in pairs}


def is_quiet(served: ServedModel) -> bool:
    now = figures(served)
    return not now["sequences_running"] and not now["sequences_waiting"] and not now["steps_in_flight"]


def test_a_chat_is_answered_at_once_and_as_a_stream(served: ServedModel) -> None:
    whole = served.post("/v1/chat/completions", CHAT)
    assert whole.status == 200
    (choice,) = whole.json["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "132",
        "refusal": None,
        "annotations": [],
    }
    assert "system_fingerprint" not in whole.json  # null is none of its values
    assert choice["finish_reason"] == "stop"
    usage = whole.json["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    stream = served.post(
        "/v1/chat/completions",
        {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True},
    )
    assert stream.headers["content-type"].startswith("text/event-stream")
    *sent, (_, done) = events(stream.body)
    assert done == "[DONE]"
    assert [fields["id"].split("-")[1] for fields, _ in sent] == [str(number) for number in range(len(sent))]
    chunks = [chunk for _, chunk in sent]
    assert chunks[-1]["usage"] == usage
    assert not chunks[-1]["choices"]
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(one["delta"].get("content", "") for one in choices) == "132"
    assert choices[-1]["finish_reason"] == "stop"
    tokens = [token for one in choices for token in (one["logprobs"] or {"content": []})["content"]]
    assert len(tokens) == usage["completion_tokens"]


def test_completions_continue_several_texts_with_several_answers(served: ServedModel) -> None:
    body = {
        "model": "",
        "prompt": ["3 1 2", "abc"],
        "n": 2,
        "seed": 5,
        "temperature": 1,
        "logprobs": 2,
        "max_tokens": 6,
    }
    whole = served.post("/v1/completions", body).json["choices"]
    assert [one["index"] for one in whole] == [0, 1, 2, 3]
    for one in whole:
        assert len(one["logprobs"]["tokens"]) == len(one["logprobs"]["token_logprobs"]) <= 6
        assert all(len(top) == 2 for top in one["logprobs"]["top_logprobs"])
        for piece, begin in zip(one["logprobs"]["tokens"], one["logprobs"]["text_offset"], strict=True):
            assert one["text"][begin:].startswith(piece) or piece == "<|end|>"
    again = served.post("/v1/completions", {**body, "stream": True})
    texts, offsets = ["", "", "", ""], [[], [], [], []]
    for _, chunk in events(again.body)[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        offsets[choice["index"]] += (choice["logprobs"] or {"text_offset": []})["text_offset"]
    assert texts == [one["text"] for one in whole]
    assert offsets == [one["logprobs"]["text_offset"] for one in whole]


def test_usage_says_how_much_of_the_prompt_was_not_computed(served: ServedModel) -> None:
    body = {"model": "", "messages": [{"role": "user", "content": f"Spell {'garden ' * 9}"}], "max_tokens": 1}
    first, second = (served.post("/v1/chat/completions", body).json["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    kept = second["prompt_tokens_details"]["cached_tokens"]
    assert kept == 32 * ((second["prompt_tokens"] - 1) // 32) > 0
    response = served.post(
        "/v1/responses", {"model": "", "input": body["messages"], "max_output_tokens": 1}
    ).json
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": kept}


def test_a_response_is_answered_at_once_and_as_a_stream(served: ServedModel) -> None:
    parts = [{"type": "input_text", "text": SUM[0]["content"]}]
    body = {
        "model": "",
        "input": [{"type": "message", "role": "user", "content": parts}],
        "max_output_tokens": 9,
    }
    whole = served.post("/v1/responses", body).json
    assert whole["status"] == "completed"
    assert whole["output"][0]["content"][0]["text"] == "132"
    sent = events(served.post("/v1/responses", {**body, "stream": True}).body)
    assert all(fields["event"] == one["type"] for fields, one in sent)
    assert [one["sequence_number"] for _, one in sent] == list(range(len(sent)))
    deltas = [one["delta"] for _, one in sent if one["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "132"
    last = sent[-1][1]["response"]
    assert last["usage"] == whole["usage"]
    for document in (whole, sent[0][1]["response"], last):
        assert document.keys() == RESPONSE_FIELDS
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs"):
            assert isinstance(document[name], int | float)
    assert sent[0][1]["response"]["completed_at"] is None
    assert whole["created_at"] <= whole["completed_at"]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_a_stream_counts_its_tokens_as_it_grows(served: ServedModel, route: str) -> None:
    asked = CHAT if route.startswith("chat") else {"model": "", "prompt": ["What", [5, 6, 7]]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**asked, "stream": True, "stream_options": options, "max_tokens": 12, "ignore_eos": True}
    sent = [chunk for _, chunk in events(served.post(f"/v1/{route}", body).body)[:-1]]
    usages = [chunk["usage"] for chunk in sent]
    whole = usages[-1]
    assert whole["completion_tokens"] == 12 * len(asked.get("prompt", [0]))
    assert {one["prompt_tokens"] for one in usages} == {whole["prompt_tokens"]}
    assert all(one["total_tokens"] == one["prompt_tokens"] + one["completion_tokens"] for one in usages)
    counts = [one["completion_tokens"] for one in usages]
    assert counts == sorted(counts)
    assert len(set(counts)) > 1


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 11}], ids=str)
def test_a_text_alone_is_that_beside_seven_others(served: ServedModel, options: dict[str, Any]) -> None:
    bodies = [
        {**LONG, "messages": [{"role": "user", "content": f"What is {4 * number} + {number}?"}], **options}
        for number in range(8)
    ]

    def text(body: dict[str, Any]) -> str:
        return str(served.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"])

    alone = text(bodies[3])
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(text, bodies))
    assert together[3] == alone
    assert len(set(together)) > 1


def test_streams_go_on_when_ranks_fail(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every event comes once, in order, with the token of a server that loses nothing."""
    texts = [f"What is {4 * number} + {number}?" for number in range(6)]
    bodies = [
        {**LONG, "messages": [{"role": "user", "content": text}], "temperature": 1, "seed": 5, "n": n}
        for text, n in zip(texts, [1, 2] * 3, strict=True)
    ]

    def streamed(server: ServedModel, body: dict[str, Any]) -> list[Any]:
        whole = server.post("/v1/chat/completions", {**body, "stream": True, "logprobs": True})
        found = []
        for number, (fields, chunk) in enumerate(events(whole.body)[:-1]):
            assert body["n"] > 1 or fields["id"].split("-")[1] == str(number)
            found.append(chunk["choices"])
        return found

    wanted = [sorted(streamed(served, body), key=str) for body in bodies]
    fail_layers(monkeypatch, {5: 20, 13: 50})
    options = ("-m", PUZZLES, "-u", 8, "-c", "tcp", "--on-failure", "continue", "-pt", "1,5,6,13,14,16")
    with ServedModel(*options, world=4) as server, ThreadPoolExecutor(len(bodies)) as pool:
        found = list(pool.map(lambda body: streamed(server, body), bodies))
        assert figures(server)["repeated_tokens_total"] > 0
    assert [sorted(one, key=str) for one in found] == wanted
    assert sum("the run goes on after" in line for line in server.lines) == 2


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("chat/completions", {**CHAT, "functions": []}, "functions"),
        ("chat/completions", {**CHAT, "audio": {}}, "audio"),
        ("chat/completions", {**CHAT, "temperature": -1}, "temperature"),
        ("chat/completions", {**CHAT, "n": 1000}, "n is 1000"),
        ("chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {**CHAT, "stream_options": {}}, "stream_options"),
        ("chat/completions", {**CHAT, "model": "other"}, "other"),
        ("chat/completions", {"messages": SUM}, "model"),
        ("completions", {"prompt": "a"}, "model"),
        ("responses", {"input": "a"}, "model"),
        (
            "chat/completions",
            {"model": "", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
        ),
        ("chat/completions", {"model": "", "messages": [{"role": "user", "content": "x" * 900}]}, "context"),
        ("chat/completions", {**CHAT, "store": True}, "store"),
        ("completions", {"model": "", "prompt": [], "max_tokens": 3}, "prompt"),
        ("completions", {"model": "", "prompt": ["a", ""]}, r"prompt[1]"),
        ("completions", {"model": "", "prompt": [[5, 999]]}, "999"),
        ("completions", {"model": "", "prompt": "a", "echo": True}, "echo"),
        ("completions", {"model": "", "prompt": "a", "suffix": "b"}, "suffix"),
        ("responses", {"model": "", "input": "a", "previous_response_id": "r"}, "previous_response_id"),
        ("responses", {"model": "", "input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(
    served: ServedModel, path: str, body: object, named: str
) -> None:
    reply = served.post(f"/v1/{path}", body)
    assert reply.status == 400
    assert named in reply.line


def test_a_broken_stream_goes_on_behind_the_last_event(served: ServedModel) -> None:
    body = {**LONG, "stream": True, "temperature": 1}  # without a seed
    whole = served.post("/v1/chat/completions", body).body
    sent = events(whole)
    place = len(sent) // 2
    last = sent[place][0]["id"]
    rest = served.post("/v1/chat/completions", body, last_event_id=last)
    assert events(rest.body) == sent[place + 1 :]
    unknown = served.post("/v1/chat/completions", body, last_event_id=f"{'0' * 32}-3")
    assert unknown.status == 404


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_a_schema(served: ServedModel, stream: bool) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed (extra serve)")
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "maximum": 999}},
        "required": ["sum"],
    }
    schema |= {"additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    body = {**CHAT, "response_format": wanted, "stream": stream, "temperature": 1, "seed": 1}
    reply = served.post("/v1/chat/completions", body)
    assert reply.status == 200
    if stream:
        chunks = [chunk["choices"][0]["delta"] for _, chunk in events(reply.body)[:-1]]
        text = "".join(delta.get("content", "") for delta in chunks)
    else:
        text = reply.json["choices"][0]["message"]["content"]
    assert isinstance(json.loads(text)["sum"], int)


def test_clients_that_leave_free_rows_and_pages(served: ServedModel) -> None:
    until(lambda: is_quiet(served), "a quiet server")
    threads = threading.active_count()
    for _ in range(5):
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=LIMIT_S)
        body = json.dumps({**LONG, "stream": True, "n": 3}).encode()
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        assert connection.getresponse().read(50)
        connection.sock.close() if connection.sock else None
        connection.close()
        assert served.post("/v1/chat/completions", {**CHAT, "n": 0}).status == 400
    until(lambda: is_quiet(served), "sequences of clients that have left")
    now = figures(served)
    assert now["cache_pages_free"] == now["cache_pages"]
    assert now["answers_total"] < now["completion_tokens_total"]
    assert threading.active_count() <= threads + 1


def test_too_many_wait_and_those_who_wait_too_long() -> None:
    with ServedModel("-m", PUZZLES, "-u", 1, "--max-waiting", 1) as served, ThreadPoolExecutor(2) as pool:
        running = pool.submit(served.post, "/v1/chat/completions", {**LONG, "n": 1})
        until(lambda: figures(served)["sequences_running"] == 1 or running.done(), "the first one")
        refused = served.post("/v1/chat/completions", {**CHAT, "n": 2})
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        late = served.post("/v1/chat/completions", LONG, x_request_timeout="0.000001")
        assert late.status == 504
        assert running.result(LIMIT_S).status == 200
        until(lambda: is_quiet(served), "a quiet server")


def test_the_server_ends_with_the_answers_that_it_has_begun() -> None:
    with ServedModel("-m", PUZZLES) as served, ThreadPoolExecutor(1) as pool:
        running = pool.submit(served.post, "/v1/chat/completions", LONG)
        until(lambda: figures(served)["sequences_running"] == 1 or running.done(), "an answer")
        served.drain()
        assert running.result(LIMIT_S).status == 200


def test_the_page_and_the_routes_are_those_of_a_decoder(served: ServedModel) -> None:
    page = served.get("/").body.decode()
    assert "Talk to it" in page
    assert "/v1/chat/completions" in served.get("/docs").body.decode()
    assert served.post("/v1/embeddings", {"input": "a"}).status == 404
    assert served.get("/health").status == 200
    assert served.get("/v1/models").json["data"][0]["id"] == "llama-puzzles"
