"""Greedy tokens of whole runs are those of transformers: every family, drawn cuts, worlds of 1 to 3 ranks.

By default a few prompts of some families; with ``PIPEEDGE_ALL_CASES=1`` 200 prompts of each.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from decoder_cases import CASES, greedy
from effort import all_cases, cases
from text_ranks import run_ranks
from tokenizers import Tokenizer, models

from pipeedge.decoding.generation import Generation, Piece
from pipeedge.models.decoder import find_decoder
from pipeedge.plan import cache_size

PROMPTS, OF_A_RUN = 200, 20
"""Prompts of a family, and of a run, which has cuts, ranks, chunks and groups of its own."""
SOME = ("llama3", "gemma3", "gpt2")
LONGEST, MOST_TOKENS = 150, 8
"""Longest prompt, which is longer than any window, and most tokens of an answer."""

Scores = npt.NDArray[np.float32]


def with_tokenizer(directory: Path, words: int) -> None:
    """Add a tokenizer whose tokens are numbers."""
    inner = Tokenizer(models.WordLevel({str(number): number for number in range(words)}, "0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(directory)


def drawn_run(draw: random.Random, layers: int) -> list[object]:
    """Return the world and the options of a run."""
    world = draw.randint(1, 3)
    stages = draw.randint(1, world)
    edges = [0, *sorted(draw.sample(range(1, layers), stages - 1)), layers]
    ranges = [str(number) for start, end in itertools.pairwise(edges) for number in (start + 1, end)]
    ranks = [str(rank) for rank in draw.sample(range(world), stages)]
    return [world, "-pt", ",".join(ranges), "-r", ",".join(ranks), "-u", draw.choice([1, 3, 8])]


@pytest.fixture
def scores_of(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Scores]]:
    """The scores from which each token was chosen, by the number of the prompt."""
    found: dict[int, list[Scores]] = {}
    take = Generation.take

    def remembered(self: Generation, scores: Scores) -> Piece:
        found.setdefault(self.prompt.item, []).append(scores.copy())
        return take(self, scores)

    monkeypatch.setattr(Generation, "take", remembered)
    return found


@pytest.mark.parametrize("name", CASES if all_cases() else SOME)
def test_tokens_and_scores_of_runs_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores_of: dict[int, list[Scores]]
) -> None:
    reference = CASES[name].save(tmp_path, parts=True)
    with_tokenizer(tmp_path, reference.config.vocab_size)
    model = find_decoder(tmp_path)
    draw = random.Random(name)
    file, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    for number in range(cases(PROMPTS // OF_A_RUN)):
        prompts = [
            [draw.randrange(1, 83) for _ in range(draw.randint(1, LONGEST))]
            for _ in range(cases(OF_A_RUN, part=4))
        ]
        lengths = [draw.randint(1, MOST_TOKENS) for _ in prompts]
        rows = [
            {"prompt_token_ids": prompt, "max_tokens": length, "ignore_eos": True}
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        # Fewer rows in a step make prompts longer than a chunk for one rank, too.
        monkeypatch.setattr(cache_size, "_CHUNK", draw.choice([24, 64, 256]))
        scores_of.clear()
        options = drawn_run(draw, model.n_layers)
        ranks = run_ranks(
            *options,
            "--input",
            file,
            "--output",
            output,
            "--greedy",
            "--context",
            200,
            "--quiet",
            model=tmp_path,
        )
        told = (name, number, options)
        assert [rank.error for rank in ranks] == [None] * len(ranks), told
        answers = [json.loads(line)["token_ids"] for line in output.read_text("utf-8").splitlines()]
        for item, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            with torch.inference_mode():
                wanted = reference(torch.tensor([prompt + answers[item][:-1]])).logits[0, len(prompt) - 1 :]
            found = torch.from_numpy(np.stack(scores_of[item]))
            assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max()), (told, item)
            assert answers[item] == greedy(reference, prompt, length), (told, item)
        output.unlink()
