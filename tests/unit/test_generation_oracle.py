"""Test answers of the shipped model against those of transformers, alone and in a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from effort import cases
from places import ROOT
from transformers import AutoModelForCausalLM

from pipeedge.data.prompts import open_vocabulary, read_generation_defaults
from pipeedge.decoding.generation import Generation, WrittenAnswer
from pipeedge.decoding.loop import LocalDecoder
from pipeedge.decoding.prompt import Prompt, PromptMaker
from pipeedge.models.decoder import find_decoder

MODEL = find_decoder(ROOT / "pipeedge" / "assets" / "llama-puzzles")
VOCABULARY = open_vocabulary(MODEL, (ROOT / "pipeedge" / "assets" / "llama-puzzles",))
DEFAULTS = read_generation_defaults(MODEL)
TOKENS = 30
QUESTIONS = [f"What is {number * 37 % 90} + {number * 53 % 80}?" for number in range(40)]
QUESTIONS += [f"Sort {number % 7} 5 {number % 9} 1." for number in range(40)]


def prompt(number: int, **options: Any) -> Prompt:
    maker = PromptMaker(VOCABULARY, DEFAULTS.sampling, 256)
    messages = [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]
    document = {"messages": messages, "max_tokens": TOKENS, **options}
    return maker.from_document(document, number, "questions")


def answers(prompts: Sequence[Prompt], seed: int = 0) -> list[WrittenAnswer]:
    """Return the answers to prompts that are computed as one group."""
    decoder = LocalDecoder(MODEL, context=256, sequences=len(prompts))
    going = [
        (Generation(one, VOCABULARY, 256, DEFAULTS.end_tokens, seed=seed), decoder.begin()) for one in prompts
    ]
    done: dict[int, WrittenAnswer] = {}
    while going:
        rows = []
        for answer, lists in going:
            tokens = answer.prompt.tokens if not answer.tokens else answer.tokens[-1:]
            place = len(answer.prompt.tokens) + len(answer.tokens) - 1 if answer.tokens else 0
            rows.append((lists, place, tokens))
        hidden, last, left = decoder.step(rows), -1, []
        for (answer, lists), (_, _, tokens) in zip(going, rows, strict=True):
            last += len(tokens)
            piece = answer.take(decoder.score(hidden[last : last + 1])[0].numpy())
            if piece.finish_reason is None:
                left.append((answer, lists))
            else:
                done[answer.prompt.item] = answer.answer()
                lists.give_back()
        going = left
    return [done[one.item] for one in prompts]


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"bad_words": [[53], [54, 55]]}, {"bad_words_ids": [[53], [54, 55]]}),
        ({"min_tokens": 12}, {"min_new_tokens": 12}),
        ({"logit_bias": {"60": 9, "3": -4}}, {"sequence_bias": [[[60], 9.0], [[3], -4.0]]}),
    ],
)
def test_greedy_answers_are_those_of_transformers(options: dict[str, Any], theirs: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL.directory, dtype=torch.float32)
    numbers = range(cases(80, 10))
    for number, found in zip(numbers, answers([prompt(one, **options) for one in numbers]), strict=True):
        tokens = torch.tensor([prompt(number).tokens])
        with torch.inference_mode():
            expected = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=TOKENS,
                do_sample=False,
                **theirs,
            )[0, tokens.shape[1] :].tolist()
        assert [one.token for one in found.drawn] == expected
        assert found.text == VOCABULARY.decode(expected)


def test_a_drawn_answer_does_not_depend_on_who_else_asks() -> None:
    options = {"temperature": 8.0, "top_p": 0.95, "presence_penalty": 0.5}
    prompts = [prompt(number, **options) for number in range(8)]
    together = answers(prompts, seed=3)
    assert [answers([one], seed=3)[0] for one in prompts] == together
    assert answers(prompts[3:], seed=3) == together[3:]
    assert answers(prompts, seed=4) != together
    # A seed of its own makes the answer independent of the place in the file and of the seed of the run.
    seeded = [answers([prompt(number, seed=11, **options)], seed=number)[0].text for number in (1, 81)]
    assert seeded[0] == seeded[1]
