"""Run all ranks of a decoder over TCP, each in a thread of the test's process."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from places import ROOT
from ports import free_port
from rich.console import Console
from waiting import LIMIT_S

from pipeedge.base.errors import PipeEdgeError
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.run import pipeline

PUZZLES = ROOT / "pipeedge" / "assets" / "llama-puzzles"


@dataclass
class Rank:
    printed: io.StringIO = field(default_factory=io.StringIO)
    warnings: list[str] = field(default_factory=list)
    error: BaseException | None = None


def run_ranks(world: int, *options: object, model: Path = PUZZLES, own: Sequence[object] = ()) -> list[Rank]:
    """Run all ranks over tcp, each in a thread of this process; rank 0 has options of its ``own``."""
    port = free_port()
    ranks = [Rank() for _ in range(world)]

    def one(number: int) -> None:
        rank = ranks[number]
        more = own if number == 0 else ()
        words = [number, world, "-m", model, "-c", "tcp", "--port", port, *options, *more]
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
