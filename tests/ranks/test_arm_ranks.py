"""Ranks on ARM and on x86 in one pipeline.

x86 rank 0 ──frames──> ARM rank 1 ──frames──> x86 rank 0
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from emulated_arm import LIMIT_S, command, needs_arm, variables
from places import ROOT
from ports import free_port
from waiting import until

from pipeedge.models.decoder import find_decoder

pytestmark = needs_arm


class Mixed:
    """Ranks of both kinds in one run.

    Args:
        folder: Where they run.
        kinds: Kind of each rank: x86, or arm.
        options: Options of all ranks.
        own: Options of the data rank.
        stack: Ends those that are left.
    """

    def __init__(
        self,
        folder: Path,
        kinds: str,
        options: tuple[object, ...],
        own: tuple[object, ...],
        stack: ExitStack,
    ) -> None:
        self.folder = folder
        size, port = len(kinds.split()), free_port()
        self.processes = []
        for rank, kind in enumerate(kinds.split()):
            words = (ROOT / "runtime.py", rank, size, "--port", port, *options, *(own if rank == 0 else ()))
            with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
                process = subprocess.Popen(
                    [*command(kind == "arm"), *map(str, words)],
                    cwd=folder,
                    env=variables(kind == "arm"),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                )
            stack.callback(process.wait)
            stack.callback(process.kill)
            self.processes.append(process)

    def said(self, rank: int) -> str:
        return (self.folder / f"{rank}.err").read_text()

    def ended(self, *ranks: int) -> list[int]:
        return [self.processes[rank].wait(LIMIT_S) for rank in ranks]

    def results(self) -> np.ndarray:
        found: np.ndarray = np.load(self.folder / "out.npz")["outputs"]
        return found


@contextmanager
def mixed(folder: Path, kinds: str, *options: object, items: int) -> Iterator[Mixed]:
    """Start ranks of both kinds, and end those that are left."""
    pixels = np.random.default_rng(3).integers(-64, 64, (items, 1, 8, 8)) / 64
    np.savez(folder / "in.npz", pixel_values=pixels.astype(np.float32))
    own = ("--output", "out.npz", "--input", folder / "in.npz")
    with ExitStack() as stack:
        yield Mixed(folder, kinds, ("-m", "vit-digits", "--timeout", 300, *options), own, stack)


def alone(folder: Path) -> np.ndarray:
    """Return what one rank of this machine computes from the same input."""
    words = (ROOT / "runtime.py", 0, 1, "-m", "vit-digits", "--input", "in.npz", "--output", "alone.npz")
    subprocess.run([*command(False), *map(str, words)], cwd=folder, env=variables(False), check=True)
    found: np.ndarray = np.load(folder / "alone.npz")["outputs"]
    return found


@pytest.mark.parametrize("links", [("-c", "tcp"), ("-c", "p2p"), ("-c", "tcp", "-q", "8,8,0")], ids=" ".join)
def test_a_pipeline_of_both_kinds_gives_the_results_of_one_machine(
    tmp_path: Path, links: tuple[object, ...]
) -> None:
    """The frames of the compressed links are written on one kind and read on the other, both ways."""
    cuts = ("-pt", "1,5,6,11,12,16", "-r", "0,1,2") if "-q" in links else ("-pt", "1,8,9,16")
    kinds = "x86 arm x86" if "-q" in links else "x86 arm"
    with mixed(tmp_path, kinds, *links, *cuts, items=40) as ranks:
        assert ranks.ended(*range(len(kinds.split()))) == [0] * len(kinds.split()), ranks.said(0)
        assert re.search(r"the ranks are not alike \(torch \S+ on x86_64: .* on aarch64: ", ranks.said(0))
        tolerance = 0.3 if "-q" in links else 1e-4
        np.testing.assert_allclose(ranks.results(), alone(tmp_path), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kinds", ["x86 arm x86", "x86 x86 arm"], ids=["to x86", "to ARM"])
def test_a_rank_of_the_other_kind_takes_the_place_of_a_lost_one(tmp_path: Path, kinds: str) -> None:
    """Every item gives one result, as close to that of one machine as before."""
    cuts = ("-c", "tcp", "-u", 2, "-pt", "1,8,9,16")  # the third rank is a spare
    with mixed(tmp_path, kinds, *cuts, items=4000) as ranks:
        until(lambda: rows(tmp_path) > 0, "rows are written", LIMIT_S)
        ranks.processes[1].send_signal(signal.SIGKILL)
        assert ranks.ended(0, 2) == [0, 0], ranks.said(0)
        assert "; the run goes on with layers 1-8 on rank 0, layers 9-16 on rank 2" in ranks.said(0)
        np.testing.assert_allclose(ranks.results(), alone(tmp_path), rtol=0, atol=1e-4)


def rows(folder: Path) -> int:
    """Return the bytes of the unfinished output."""
    part = folder / "out.npz.part"
    return part.stat().st_size if part.exists() else 0


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_a_decoder_over_both_kinds_writes_the_text_of_one_machine(tmp_path: Path, dtype: str) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Sort 5 2 9 1.\nWhat is 1 + 2?\n")
    options = ("-m", "llama-puzzles", "-c", "tcp", "--dtype", dtype, "--timeout", 300)
    own = ("--input", prompts, "--greedy", "--max-tokens", 12, "--output")
    layers = find_decoder("llama-puzzles").n_layers
    with ExitStack() as stack:
        cuts = ("-pt", f"1,{layers // 2},{layers // 2 + 1},{layers}")
        ranks = Mixed(tmp_path, "x86 arm", (*options, *cuts), (*own, "out.jsonl"), stack)
        assert ranks.ended(0, 1) == [0, 0], ranks.said(0)
    words = (ROOT / "runtime.py", 0, 1, *options, *own, "alone.jsonl")
    subprocess.run([*command(False), *map(str, words)], cwd=tmp_path, env=variables(False), check=True)
    found, expected = (text_rows(tmp_path / name) for name in ("out.jsonl", "alone.jsonl"))
    assert len(found) == 2
    assert found == expected


def text_rows(path: Path) -> list[str]:
    """Return the texts of an output."""
    return [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]
