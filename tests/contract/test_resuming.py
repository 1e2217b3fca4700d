"""Runs that end early, in the test's process, and runs that go on from what they left."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from ports import free_port
from rich.console import Console

from pipeedge.base.errors import PipeEdgeError, RequestError
from pipeedge.data import Microbatch
from pipeedge.data.results import ResultWriter
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.run import data_flow, pipeline, resuming

SUFFIXES = (".csv", ".jsonl", ".npz", ".parquet")
SCRIPT = ("-m", "vit-digits", "-u", 4)


class Runs:
    """Runs of one rank in one directory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(self, *options: object) -> tuple[str, ...]:
        """Run to the end; return the lines that the user sees beside the table."""
        warnings: list[str] = []
        words = [str(word) for word in (0, 1, "--port", free_port(), "--timeout", 20, *SCRIPT, *options)]
        request = parse_runtime(words, Environment()).request
        pipeline.run(request, lambda: Console(file=io.StringIO()), warnings.append)
        return tuple(warnings)

    def end_early(self, after: int, *options: object) -> None:
        """Let a run end after some microbatches, as Ctrl-C does."""
        write = ResultWriter.write

        def fail(writer: ResultWriter, number: int, outputs: torch.Tensor, batch: Microbatch) -> None:
            if number == after:
                raise KeyboardInterrupt
            write(writer, number, outputs, batch)

        with self._monkeypatch.context() as patch:
            patch.setattr(ResultWriter, "write", fail)
            with suppress(KeyboardInterrupt, PipeEdgeError):
                self(*options)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.chdir(tmp_path)
    chance = np.random.default_rng(7)
    np.savez("input.npz", pixel_values=chance.standard_normal((26, 1, 8, 8), dtype=np.float32))
    return Runs(monkeypatch)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_resumed_output_is_that_of_an_undisturbed_run(runs: Runs, suffix: str) -> None:
    options = ("--input", "input.npz", "--output", f"rows{suffix}")
    assert runs("--input", "input.npz", "--output", f"whole{suffix}") == ()
    runs.end_early(3, *options)
    assert not Path(f"rows{suffix}").exists()
    runs.end_early(2, *options, "--resume")
    assert runs(*options, "--resume") == (f"--resume: the rows of 12 items are taken from rows{suffix}.part",)
    assert Path(f"rows{suffix}").read_bytes() == Path(f"whole{suffix}").read_bytes()
    assert sorted(os.listdir()) == ["input.npz", f"rows{suffix}", f"whole{suffix}"]  # noqa: PTH208


def test_bad_pictures_are_skipped_where_they_were(runs: Runs) -> None:
    from PIL import Image

    Path("photos").mkdir()
    for number in range(14):
        path = Path(f"photos/{number:02}.png")
        if number in (0, 5, 6, 7, 13):
            path.write_bytes(b"no picture")
        else:
            Image.new("L", (8, 8), number * 9).save(path)
    options = ("-u", 2, "--input", "photos", "--skip-bad-input", "--output")
    runs(*options, "whole.npz")
    runs.end_early(3, *options, "rows.npz")
    runs(*options, "rows.npz", "--resume")
    assert Path("rows.npz").read_bytes() == Path("whole.npz").read_bytes()


def test_run_that_had_written_all_rows_needs_only_the_last(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--input", "input.npz", "--output", "rows.csv")
    runs(*options)
    whole = Path("rows.csv").read_bytes()
    Path("rows.csv").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(ResultWriter, "_complete", lambda writer: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runs(*options)
    assert runs(*options, "--resume") == ("--resume: the rows of 24 items are taken from rows.csv.part",)
    assert Path("rows.csv").read_bytes() == whole


def test_run_without_resume_says_what_it_replaces(runs: Runs) -> None:
    options = ("--input", "input.npz", "--output", "rows.csv")
    runs.end_early(3, *options)
    (line,) = runs(*options)
    assert line.startswith("rows.csv.part has the rows of 12 items from a run that did not end well")
    assert not Path("rows.csv.part").exists()
    (line,) = runs(*options, "--resume")
    assert line == "--resume: there are no rows in rows.csv.part, so the run begins with the first item"


CHANGES: dict[str, tuple[Callable[[], None] | None, tuple[object, ...], str]] = {
    "input": (lambda: os.utime("input.npz", (1, 1)), (), "the input"),
    "number": (None, ("-b", 20), "the input"),
    "microbatches": (None, ("-u", 2), r"the microbatch size \(-u\) \(4, now 2\)"),
    "kernels": (None, ("--kernels", "torch"), r"--kernels \(auto, now torch\)"),
    "dtype": (None, ("--dtype", "bfloat16"), r"--dtype\) \(float32, now bfloat16\)"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_request_is_refused_in_one_line(runs: Runs, change: str) -> None:
    act, further, says = CHANGES[change]
    options = ("--input", "input.npz", "--output", "rows.csv")
    runs.end_early(3, *options)
    before = Path("rows.csv.part").read_bytes()
    if act is not None:
        act()
    with pytest.raises(RequestError, match=rf"rows.csv.part was written with another value of .*{says}.*"):
        runs(*options, *further, "--resume")
    assert Path("rows.csv.part").read_bytes() == before
    assert not Path("rows.csv").exists()


def test_rows_of_another_version_of_torch_are_taken_with_a_notice(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--input", "input.npz", "--output", "rows.csv")
    with monkeypatch.context() as patch:
        patch.setattr(resuming, "made_with", lambda: {"the version of torch": "2.9.0"})
        patch.setattr(data_flow, "made_with", resuming.made_with)
        runs.end_early(3, *options)
    (line,) = runs(*options, "--resume")
    assert line == (
        "--resume: the rows of 8 items are taken from rows.csv.part, where torch 2.9.0 computed them; "
        f"this is {torch.__version__}, and last bits may differ"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--resume",), "--resume needs --output FILE"),
        (("--resume", "--output", "o.csv", "--check", 3), "--resume cannot be combined with --check"),
    ],
)
def test_resume_without_effect_is_refused(runs: Runs, options: tuple[object, ...], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        runs(*options)
