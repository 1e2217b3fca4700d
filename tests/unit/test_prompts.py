"""Test prompts that come from files, and the answers that are written for them."""

from __future__ import annotations

import json
import random
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from pipeedge.base.errors import InputError, ModelError, PipeEdgeError, RequestError
from pipeedge.data.answers import AnswerWriter
from pipeedge.data.prompts import (
    PromptRows,
    open_vocabulary,
    prompts_fingerprint,
    read_generation_defaults,
    read_prompts,
)
from pipeedge.data.results import check_output_path
from pipeedge.data.unfinished import find_unfinished
from pipeedge.decoding.generation import FinishReason, WrittenAnswer
from pipeedge.decoding.prompt import Prompt, PromptMaker
from pipeedge.decoding.sampler import DrawnToken
from pipeedge.decoding.sampling import Sampling, read_generation_config
from pipeedge.models.decoder import find_decoder
from pipeedge.request.files import STANDARD_OUTPUT

MODEL = find_decoder(ROOT / "pipeedge" / "assets" / "llama-puzzles")
VOCABULARY = open_vocabulary(MODEL, [MODEL.directory] if MODEL.directory else [])
DEFAULTS = read_generation_defaults(MODEL)
MAKER = PromptMaker(VOCABULARY, DEFAULTS.sampling, 64)


def read(directory: Path, name: str, text: str, **options: Any) -> PromptRows:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return read_prompts([path], MAKER, **options)


def test_a_line_is_a_prompt(tmp_path: Path) -> None:
    rows = read(tmp_path, "a.txt", "\ufeffWhat is 1 + 2?\r\n\n  \nSay\u2028it\n")
    assert [(one.item, one.source) for one in rows.prompts] == [
        (0, f"{tmp_path}/a.txt:1"),
        (1, f"{tmp_path}/a.txt:4"),
    ]
    assert VOCABULARY.decode(rows.prompts[0].tokens) == "What is 1 + 2?"
    assert rows.prompts[0].sampling == DEFAULTS.sampling
    assert read(tmp_path, "b.txt", "a\nb\nc\n", limit=2).total == 2
    with pytest.raises(InputError, match="no prompt in this file"):
        read(tmp_path, "c.txt", " \n\n")
    with pytest.raises(InputError, match=r"known are \.txt and \.jsonl"):
        read(tmp_path, "c.csv", "a")


def test_an_object_is_a_prompt_with_options_of_its_own(tmp_path: Path) -> None:
    lines = [
        {"prompt": "1 + 1", "temperature": 0.5, "stop": "x", "max_completion_tokens": 3},
        {"prompt_token_ids": [7, 8], "logprobs": True, "top_logprobs": 2},
        {"messages": [{"role": "user", "content": "hi"}], "n": 2, "seed": None},
    ]
    rows = read(tmp_path, "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    first, second, third = rows.prompts
    assert first.sampling == Sampling(temperature=0.5, stop=("x",), max_tokens=3)
    assert (second.tokens, second.sampling.logprobs) == ((7, 8), 2)
    assert VOCABULARY.backend.decode(third.tokens) == "<|user|>hi<|end|><|assistant|>"
    assert third.sampling.n == 2


def test_bad_rows_are_one_line_or_are_left_out_and_keep_their_numbers(tmp_path: Path) -> None:
    text = '{"prompt": "a"}\n{"prompt": ""}\nno json\n{"promt": "a"}\n{"prompt": "b"}\n'
    with pytest.raises(InputError, match=r"a\.jsonl:2: the prompt is empty; --skip-bad-input leaves"):
        read(tmp_path, "a.jsonl", text)
    rows = read(tmp_path, "a.jsonl", text, skip_bad=True)
    assert [one.item for one in rows.prompts] == [0, 4]
    assert rows.total == 5
    reasons = [one.reason.partition(": ")[2] for one in rows.skipped]
    assert reasons[0] == "the prompt is empty"
    assert reasons[1].startswith("is not JSON")
    assert reasons[2] == "unknown field promt; did you mean prompt?"
    with pytest.raises(InputError, match=r"none of the 1 item can be read; the first: .*the prompt is empty"):
        read(tmp_path, "b.jsonl", '{"prompt": ""}', skip_bad=True)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, Sampling(temperature=0)),
        ({"do_sample": True}, Sampling(top_k=50)),
        ({"do_sample": True, "top_k": None, "temperature": 0.6}, Sampling(temperature=0.6)),
        ({"do_sample": True, "top_k": 20, "top_p": 0.8}, Sampling(top_k=20, top_p=0.8)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, Sampling(temperature=0, top_p=0.9)),
        ({"repetition_penalty": 1.1}, Sampling(temperature=0, repetition_penalty=1.1)),
    ],
)
def test_a_generation_config_gives_the_options(document: dict[str, Any], expected: Sampling) -> None:
    assert read_generation_config(document, {"eos_token_id": 3}, "g.json", 10).sampling == expected


def test_the_end_of_an_answer_is_that_of_the_generation_config_or_of_the_config() -> None:
    assert DEFAULTS.end_tokens == {3}
    config = {"eos_token_id": 3}
    assert read_generation_config({}, config, "g.json", 10).end_tokens == {3}
    assert read_generation_config({"eos_token_id": [4, 5]}, config, "g.json", 10).end_tokens == {4, 5}
    assert not read_generation_config({}, {}, "g.json", 10).end_tokens


@pytest.mark.parametrize(
    "document",
    [
        {"temperature": "hot"},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"do_sample": "yes"},
        {"top_k": 1.5},
        {"top_p": 7},
        {"eos_token_id": 99},
        {"eos_token_id": "end"},
        {"eos_token_id": [[1]]},
        {"repetition_penalty": 0},
    ],
)
def test_nonsense_in_a_generation_config_is_one_line(document: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"^g\.json: .*correct it, or remove the file$"):
        read_generation_config(document, {}, "g.json", 10)


def answers(items: list[int], choices: int) -> list[WrittenAnswer]:
    return [
        WrittenAnswer(
            item,
            choice,
            f"text {item} {choice} é",
            (DrawnToken(70 + item % 9), DrawnToken(3)),
            FinishReason.STOP,
            5,
            choices,
        )
        for item in items
        for choice in range(choices)
    ]


def prompts(items: list[int], choices: int) -> list[Prompt]:
    return [Prompt((1,), Sampling(n=choices), item, f"a.txt:{item + 1}") for item in items]


def write(path: Path, items: list[int], choices: int, order: random.Random, most: int | None = None) -> None:
    """Go on from what is there, with answers in any order; the process ends after ``most`` of them."""
    found = find_unfinished(path)
    done = frozenset() if found is None else found.numbers
    left = [item for item in items if item not in done]
    given = answers(left, choices)
    order.shuffle(given)
    writer = AnswerWriter(path, prompts(left, choices), VOCABULARY, {"the input": "a"}, found)
    with suppress(KeyboardInterrupt), writer:
        for answer in given[:most]:
            writer.write(answer)
        if most is not None:
            raise KeyboardInterrupt


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True).map(sorted),
    st.integers(1, 3),
    st.lists(st.integers(0, 20), max_size=3),
    st.integers(0, 1 << 20),
    st.randoms(use_true_random=False),
)
def test_answers_are_in_input_order_and_the_same_after_a_kill(
    items: list[int], choices: int, kills: list[int], cut: int, order: random.Random
) -> None:
    with tempfile.TemporaryDirectory() as name:
        whole, path = Path(name) / "whole.jsonl", Path(name) / "rows.jsonl"
        write(whole, items, choices, order)
        for kill in kills:
            write(path, items, choices, order, kill)
            part = path.with_name("rows.jsonl.part")
            if part.exists():
                content = part.read_bytes()
                part.write_bytes(content[: len(content) - cut % 30])
        write(path, items, choices, order)
        assert path.read_bytes() == whole.read_bytes()
        lines = list(map(json.loads, whole.read_text("utf-8").splitlines()))
        assert [(line["item"], line.get("choice", 0)) for line in lines] == [
            (item, choice) for item in items for choice in range(choices)
        ]


def test_a_line_has_what_became_of_a_prompt(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    drawn = (DrawnToken(69, -0.25, ((69, -0.25), (70, -1.5))), DrawnToken(0xC3 + 4, float("-inf")))
    answer = WrittenAnswer(2, 0, "A", drawn, FinishReason.LENGTH, 7)
    writer = AnswerWriter(STANDARD_OUTPUT, prompts([0, 2], 1), VOCABULARY)
    with writer:
        writer.write(answer)
        assert not capfdbinary.readouterr().out
        writer.write(answers([0], 1)[0])
        with pytest.raises(PipeEdgeError, match="not expected"):
            writer.write(answer)
    first, second = map(json.loads, capfdbinary.readouterr().out.splitlines())
    assert first["item"] == 0
    assert second == {
        "item": 2,
        "source": "a.txt:3",
        "text": "A",
        "token_ids": [69, 199],
        "finish_reason": "length",
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "logprobs": {
            "content": [
                {
                    "token": "A",
                    "logprob": -0.25,
                    "bytes": [65],
                    "top_logprobs": [
                        {"token": "A", "logprob": -0.25, "bytes": [65]},
                        {"token": "B", "logprob": -1.5, "bytes": [66]},
                    ],
                },
                {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xC3], "top_logprobs": []},
            ]
        },
    }
    with (
        pytest.raises(PipeEdgeError, match="1 prompt without an answer"),
        AnswerWriter(tmp_path / "a.jsonl", prompts([0], 1), VOCABULARY),
    ):
        pass


def test_answers_are_written_as_jsonl_only(tmp_path: Path) -> None:
    check_output_path(tmp_path / "a.jsonl", MODEL)
    with pytest.raises(RequestError, match=r"generates text; such results are written to \.jsonl only"):
        check_output_path(tmp_path / "a.csv", MODEL)


def test_answers_depend_on_tokens_options_and_seed() -> None:
    first = prompts([0, 1], 1)
    digests = {
        prompts_fingerprint(first, 0),
        prompts_fingerprint(first, 1),
        prompts_fingerprint(prompts([0, 1], 2), 0),
        prompts_fingerprint(first[:1], 0),
    }
    assert len(digests) == 4
    assert prompts_fingerprint(prompts([0, 1], 1), 0) in digests
