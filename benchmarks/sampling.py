#!/usr/bin/env python3
"""Measure what choosing a token costs, beside the processors of transformers.

Both get the same scores of a large vocabulary, drawn from a normal distribution, and a prompt of 1,000
tokens. Figures are medians in microseconds a token; both sides of a row are measured in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeedge.decoding.sampler import Sampler, Scores
from pipeedge.decoding.sampling import Sampling

ROWS = 8
PROMPT = tuple(range(1000, 2000))
PENALTY = 1.1


def cases() -> dict[str, tuple[dict[str, Any], Sequence[LogitsProcessor]]]:
    """Return our options and their processors by name."""
    warm = TemperatureLogitsWarper(0.7)
    penalty = RepetitionPenaltyLogitsProcessor(PENALTY)
    return {
        "greedy": ({"temperature": 0}, []),
        "greedy, repetition penalty": ({"temperature": 0, "repetition_penalty": PENALTY}, [penalty]),
        "temperature": ({"temperature": 0.7}, [warm]),
        "top-k 50": ({"temperature": 0.7, "top_k": 50}, [warm, TopKLogitsWarper(50)]),
        "top-p 0.9": ({"temperature": 0.7, "top_p": 0.9}, [warm, TopPLogitsWarper(0.9)]),
        "min-p 0.05": ({"temperature": 0.7, "min_p": 0.05}, [warm, MinPLogitsWarper(0.05)]),
        "top-k 20, top-p 0.8, repetition penalty": (
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": PENALTY},
            [penalty, warm, TopKLogitsWarper(20), TopPLogitsWarper(0.8)],
        ),
        "greedy, 5 log probabilities": ({"temperature": 0, "logprobs": 5}, []),
    }


def transformers_choice(processors: LogitsProcessorList, *, greedy: bool) -> Callable[[Scores], int]:
    """Return a function that chooses a token as transformers does."""
    tokens = torch.tensor([PROMPT])

    def choose(scores: Scores) -> int:
        processed = torch.from_numpy(scores)[None]
        if processors:
            processed = processors(tokens, processed.clone())
        if greedy:
            return int(processed.argmax(-1))
        return int(torch.multinomial(processed.softmax(-1), 1))

    return choose


def main() -> None:
    """Print a line for each way of choosing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=150_000, help="tokens (%(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="tokens to choose in each way (%(default)s)")
    options = parser.parse_args()
    source = np.random.default_rng(0)
    rows = [source.normal(0, 3, options.vocabulary).astype(np.float32) for _ in range(ROWS)]
    for name, (given, processors) in cases().items():
        sampler = Sampler(Sampling(**given), PROMPT)
        sides: list[Callable[[Scores], object]] = [sampler.choose]
        if not given.get("logprobs"):
            greedy = not given["temperature"]
            sides.append(transformers_choice(LogitsProcessorList(processors), greedy=greedy))
        times: list[list[float]] = [[] for _ in sides]
        for number in range(options.rounds):
            for choose, taken in zip(sides, times, strict=True):
                began = time.perf_counter()
                choose(rows[number % ROWS])
                taken.append(time.perf_counter() - began)
        figures = [f"{statistics.median(taken) * 1e6:10,.0f}" for taken in times]
        print(f"{name:42}{figures[0]} us{f'   transformers{figures[1]} us' if len(figures) > 1 else ''}")


if __name__ == "__main__":
    main()
