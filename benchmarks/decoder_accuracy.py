#!/usr/bin/env python3
"""Measure what number types cost the included decoder in accuracy: ``benchmarks/decoder_accuracy.py``.

The perplexity of held-out conversations, in which every kind of puzzle occurs, and of the answers in them:
int8 at most 0.1 % above float32, int4 as it is. The distribution of each next token is compared with that in
float32: its divergence (KL) in thousandths, and how often the most probable token is the same. The model was
trained on answers alone, so it cannot know the questions. ``decoding.py --part outliers`` measures a wide
model with outliers.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F

from pipeedge.decoding.loop import LocalDecoder
from pipeedge.models.decoder import DECODER_DTYPES, DecoderModel, find_decoder
from pipeedge.models.dtypes import dtype_name
from pipeedge.models.registry import PUZZLES

TOOL = Path(__file__).resolve().parents[1] / "tools" / "train_llama_puzzles.py"
MOST_RISE = 0.001
"""Largest rise of perplexity in int8."""


@dataclass(frozen=True)
class Text:
    """Tokens, and which of them, from the second on, belong to answers."""

    tokens: list[int]
    answers: list[bool]


def scores_of(model: DecoderModel, dtype: torch.dtype, texts: list[Text]) -> list[torch.Tensor]:
    """Return the log probabilities of each next token of texts."""
    longest = max(len(text.tokens) for text in texts)
    decoder = LocalDecoder(model, dtype, context=longest)
    found = []
    for text in texts:
        lists = decoder.begin()
        found.append(decoder.score(decoder.step([(lists, 0, text.tokens[:-1])])).log_softmax(1))
        lists.give_back()
    return found


def perplexity(scores: list[torch.Tensor], texts: list[Text], *, answers: bool) -> float:
    """Return the perplexity of texts, or of the answers in them."""
    losses = []
    for found, text in zip(scores, texts, strict=True):
        loss = F.nll_loss(found, torch.tensor(text.tokens[1:]), reduction="none")
        losses.append(loss[torch.tensor(text.answers)] if answers else loss)
    return math.exp(float(torch.cat(losses).double().mean()))


def compared(exact: list[torch.Tensor], found: list[torch.Tensor]) -> tuple[float, float]:
    """Return the mean divergence in thousandths, and the percentage of equal most probable tokens."""
    one, other = torch.cat(exact), torch.cat(found)
    divergence = F.kl_div(other, one, log_target=True, reduction="batchmean")
    return 1e3 * float(divergence), 100 * float((one.argmax(1) == other.argmax(1)).float().mean())


def puzzle_tool() -> ModuleType:
    """Return the module that makes puzzles."""
    spec = spec_from_file_location("train_llama_puzzles", TOOL)
    if spec is None or spec.loader is None:
        sys.exit(f"decoder_accuracy: {TOOL} is missing")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def conversations(count: int) -> list[Text]:
    """Return held-out conversations of one puzzle of each kind."""
    tool, source, found = puzzle_tool(), random.Random(7), []
    for _ in range(count):
        tokens: list[int] = []
        answers: list[bool] = []
        for kind in source.sample(list(tool.KINDS), len(tool.KINDS)):
            puzzle = tool.make_puzzle(source, kind, held_out=True)
            prompt = tool.prompt_ids(puzzle, roles=True)
            answer = [*tool.token_ids(puzzle.answer), tool.END]
            tokens += [*prompt, *answer]
            answers += [False] * len(prompt) + [True] * len(answer)
        found.append(Text(tokens[: tool.LENGTH], answers[1 : tool.LENGTH]))
    return found


def print_puzzles(count: int) -> bool:
    """Print the table of the included decoder; return whether int8 is within its target."""
    model, texts = find_decoder(PUZZLES), conversations(count)
    total = sum(len(text.tokens) - 1 for text in texts)
    print(f"{PUZZLES}, {total} tokens of held-out conversations")
    print("type       perplexity    rise   of answers    rise       KL   same token")
    exact = scores_of(model, torch.float32, texts)
    base = [perplexity(exact, texts, answers=answers) for answers in (False, True)]
    good = True
    for dtype in DECODER_DTYPES:
        found = scores_of(model, dtype, texts)
        values = [perplexity(found, texts, answers=answers) for answers in (False, True)]
        rises = [value / least - 1 for value, least in zip(values, base, strict=True)]
        divergence, same = compared(exact, found)
        print(
            f"{dtype_name(dtype):9} {values[0]:11.5f} {100 * rises[0]:6.2f} % {values[1]:11.5f} "
            f"{100 * rises[1]:6.2f} % {divergence:8.3f} {same:9.2f} %"
        )
        good = good and (dtype is not torch.int8 or max(rises) <= MOST_RISE)
    return good


def main() -> int:
    """Print the table; return 1 if int8 misses its target."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=200, metavar="N")
    args = parser.parse_args()
    good = print_puzzles(args.conversations)
    if not good:
        print("missed: the perplexity of int8", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
