"""Test the small decoder that ships with the package on puzzles that it has never seen."""

from __future__ import annotations

import random
import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest
import torch
from places import ROOT
from transformers import AutoTokenizer

from pipeedge.decoding.loop import LocalDecoder
from pipeedge.models.decoder import find_decoder

TOOL = ROOT / "tools" / "train_llama_puzzles.py"
DIRECTORY = ROOT / "pipeedge" / "assets" / "llama-puzzles"
EACH = 20
LONGEST_ANSWER = 20


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = spec_from_file_location("train_llama_puzzles", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("dtype", "cuts"),
    [
        (torch.float32, ()),
        (torch.float32, (5, 9)),
        (torch.bfloat16, (8,)),
        (torch.int8, (3,)),
        (torch.int4, ()),
    ],
)
def test_its_answers_are_right(tool: ModuleType, dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    """At any cut and in 8 bits, it answers 99 of 100 puzzles; half of them are asked without roles."""
    source = random.Random(42)
    decoder = LocalDecoder(find_decoder(DIRECTORY), dtype, cuts=cuts, context=tool.LENGTH)
    wrong = []
    for number in range(EACH * len(tool.KINDS)):
        puzzle = tool.make_puzzle(source, list(tool.KINDS)[number % len(tool.KINDS)], held_out=True)
        prompt = tool.prompt_ids(puzzle, roles=number % 2 == 0)
        found = decoder.generate(prompt, LONGEST_ANSWER)
        answer = found[: found.index(tool.END)] if tool.END in found else found
        if answer != tool.token_ids(puzzle.answer):
            wrong.append(puzzle)
    assert len(wrong) <= 1, wrong


def test_8_bits_choose_the_tokens_of_float32(tool: ModuleType) -> None:
    """Of the tokens of answers; those of questions are drawn at random, so nothing says which comes next."""
    source, model = random.Random(7), find_decoder(DIRECTORY)
    decoders = [LocalDecoder(model, dtype, context=tool.LENGTH) for dtype in (torch.float32, torch.int8)]
    same = []
    for number in range(EACH * len(tool.KINDS)):
        puzzle = tool.make_puzzle(source, list(tool.KINDS)[number % len(tool.KINDS)], held_out=True)
        prompt = tool.prompt_ids(puzzle, roles=number % 2 == 0)
        best = []
        for decoder in decoders:
            lists = decoder.begin()
            hidden = decoder.step([(lists, 0, [*prompt, *tool.token_ids(puzzle.answer)])])
            best.append(decoder.score(hidden[len(prompt) - 1 :]).argmax(1))
            lists.give_back()
        same.append(best[0] == best[1])
    assert float(torch.cat(same).float().mean()) >= 0.99


def test_its_tokenizer_and_template_give_what_it_was_trained_on(tool: ModuleType) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
    puzzle = tool.Puzzle("What is 47 + 85?", "132")
    messages = [{"role": "user", "content": puzzle.question}]
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert found == tool.prompt_ids(puzzle, roles=True)
    text = "naïve 雪 \x00\n"
    assert tokenizer(text)["input_ids"] == tool.token_ids(text)
    assert tokenizer.decode(tool.token_ids(text)) == text
