"""Runs of decoders in the test's process: the text is that of one process, whatever the cuts."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from places import ROOT
from ports import free_port
from rich.console import Console
from waiting import LIMIT_S

from pipeedge.base.errors import PipeEdgeError
from pipeedge.data.tokenizer_files import read_backend
from pipeedge.decoding.loop import LocalDecoder
from pipeedge.decoding.vocabulary import Vocabulary
from pipeedge.models.decoder import find_decoder
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.run import pipeline

PUZZLES = ROOT / "pipeedge" / "assets" / "llama-puzzles"
END = 3


@dataclass
class Rank:
    printed: io.StringIO = field(default_factory=io.StringIO)
    warnings: list[str] = field(default_factory=list)
    error: BaseException | None = None


def run_ranks(world: int, *options: object, model: Path = PUZZLES) -> list[Rank]:
    """Run all ranks over tcp, each in a thread of this process."""
    port = free_port()
    ranks = [Rank() for _ in range(world)]

    def one(number: int) -> None:
        rank = ranks[number]
        words = [number, world, "-m", model, "-c", "tcp", "--port", port, *options]
        command = parse_runtime([str(word) for word in words], Environment())
        try:
            pipeline.run(command.request, lambda: Console(file=rank.printed, width=120), rank.warnings.append)
        except PipeEdgeError as error:
            rank.error = error

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    return ranks


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    path = PUZZLES / "tokenizer.json"
    return Vocabulary(read_backend(path), path, "puzzles", find_decoder(PUZZLES).config.vocab)


def answer_of_one_process(vocabulary: Vocabulary, text: str, dtype: torch.dtype) -> str:
    tokens = vocabulary.encode_rendered(vocabulary.render([{"role": "user", "content": text}]))
    decoder = LocalDecoder(find_decoder(PUZZLES), dtype, context=256)
    answer = decoder.generate(tokens, 40)
    return vocabulary.decode(answer[: answer.index(END)])


@pytest.mark.parametrize(
    ("world", "options", "dtype"),
    [
        (1, (), torch.float32),
        (2, ("-pt", "1,7,8,16", "--dtype", "bfloat16"), torch.bfloat16),
        (3, ("-pt", "1,1,2,6,7,16", "-r", "1,2,0"), torch.float32),
        (2, ("-pt", "1,16", "-r", "1"), torch.float32),
    ],
)
def test_text_is_that_of_one_process(
    capsys: pytest.CaptureFixture[str],
    vocabulary: Vocabulary,
    world: int,
    options: Sequence[str],
    dtype: torch.dtype,
) -> None:
    ranks = run_ranks(world, *options, "--prompt", "Sort 5 2 9 1.", "--quiet")
    assert [rank.error for rank in ranks] == [None] * world
    assert capsys.readouterr().out == answer_of_one_process(vocabulary, "Sort 5 2 9 1.", dtype) + "\n"
