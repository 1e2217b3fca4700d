"""Unfinished outputs: what survives a kill, a power failure or a full disk, and how a run goes on from it."""

from __future__ import annotations

import errno
import fcntl
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_results import NAMED, SUFFIXES, pictures

from pipeedge.base.errors import RequestError
from pipeedge.data.results import ResultWriter
from pipeedge.data.source import Microbatch
from pipeedge.data.unfinished import Found, UnfinishedOutput, find_unfinished

DEPENDS_ON = {"the model": "a", "the input": "b"}
FORMATS = st.sampled_from(SUFFIXES)
SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=5)


def parts(sizes: list[int], skipped: set[int]) -> list[tuple[torch.Tensor, Microbatch]]:
    """Return microbatches of these sizes; some items are missing."""
    chance = torch.Generator().manual_seed(3)
    numbers = (number for number in itertools.count() if number not in skipped)
    found = []
    for size in sizes:
        taken = list(itertools.islice(numbers, size))
        outputs = torch.randn(size, 6, generator=chance)
        found.append((outputs, pictures(*taken, labels=[number % 4 or None for number in taken])))
    return found


def write(path: Path, microbatches: list[tuple[torch.Tensor, Microbatch]], most: int | None = None) -> None:
    """Go on from what is there; the process ends after ``most`` microbatches, if it is given."""
    found = find_unfinished(path)
    position = 0 if found is None else found.position
    left = [one for one in microbatches if one[1].numbers[0] >= position]
    with suppress(KeyboardInterrupt), ResultWriter(path, NAMED, None, DEPENDS_ON, found) as writer:
        for number, (outputs, items) in enumerate(left[:most]):
            writer.write(number, outputs, items)
        if most is not None:
            raise KeyboardInterrupt


def left_behind(path: Path, microbatches: list[tuple[torch.Tensor, Microbatch]]) -> Path:
    """Return the unfinished output of a run that ends after these microbatches."""
    write(path, microbatches, most=len(microbatches))
    return path.with_name(f"{path.name}.part")


def survey(path: Path) -> Found:
    found = find_unfinished(path)
    assert found is not None
    found.close()
    return found


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


class TestGoingOn:
    @given(FORMATS, SIZES, st.sets(st.integers(0, 12), max_size=4), st.data())
    @settings(max_examples=60, deadline=None)
    def test_output_cut_anywhere_becomes_that_of_an_undisturbed_run(
        self, suffix: str, sizes: list[int], skipped: set[int], data: st.DataObject
    ) -> None:
        with folder() as directory:
            whole, path = directory / f"whole{suffix}", directory / f"rows{suffix}"
            microbatches = parts(sizes, skipped)
            write(whole, microbatches)
            part = left_behind(path, microbatches[: data.draw(st.integers(0, len(sizes)))])
            if part.exists():
                content = part.read_bytes()
                part.write_bytes(content[: data.draw(st.integers(0, len(content)))])
            write(path, microbatches)
            assert path.read_bytes() == whole.read_bytes()
            assert not part.exists()

    @given(FORMATS, SIZES, st.data())
    @settings(max_examples=60, deadline=None)
    def test_damaged_record_ends_the_rows(self, suffix: str, sizes: list[int], data: st.DataObject) -> None:
        with folder() as directory:
            whole, path = directory / f"whole{suffix}", directory / f"rows{suffix}"
            microbatches = parts(sizes, set())
            write(whole, microbatches)
            part = left_behind(path, microbatches)
            content = bytearray(part.read_bytes())
            place = data.draw(st.integers(survey(path).start, len(content) - 1))
            content[place] ^= data.draw(st.integers(1, 255))
            part.write_bytes(content)
            write(path, microbatches)
            assert path.read_bytes() == whole.read_bytes()

    @pytest.mark.parametrize("suffix", SUFFIXES)
    def test_it_may_take_several_attempts(self, tmp_path: Path, suffix: str) -> None:
        microbatches = parts([2, 2, 2, 2, 1], set())
        write(tmp_path / f"whole{suffix}", microbatches)
        path = tmp_path / f"rows{suffix}"
        left_behind(path, microbatches[:2])
        for count in (2, 3):
            write(path, microbatches, most=count)
        write(path, microbatches)
        assert path.read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()

    def test_last_rows_are_computed_again(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.csv"
        left_behind(path, parts([2, 3, 2], {1}))
        found = survey(path)
        assert (found.items, found.kept_items, found.position) == (7, 5, 6)


class TestRefusals:
    @pytest.mark.parametrize("early", [True, False])
    def test_other_values_are_refused_in_one_line(self, tmp_path: Path, early: bool) -> None:
        path = tmp_path / "rows.csv"
        part = left_behind(path, parts([2, 2], set()))
        before = part.read_bytes()
        found = find_unfinished(path)
        message = (
            r"rows.csv.part was written with another value of the input \(b, now c\); leave out --resume"
        )
        if early:
            with pytest.raises(RequestError, match=message):
                ResultWriter(path, NAMED, None, {"the input": "c"}, found)
        else:
            writer = ResultWriter(path, NAMED, None, {"the model": "a"}, found)
            with pytest.raises(RequestError, match=message):
                writer.add_dependencies({"the input": "c"})
        assert part.read_bytes() == before

    def test_output_of_another_run_that_still_writes(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.csv"
        writing = UnfinishedOutput.begin(path, DEPENDS_ON)
        for use in (lambda: find_unfinished(path), lambda: UnfinishedOutput.begin(path, DEPENDS_ON)):
            with pytest.raises(RequestError, match=r"rows.csv.part: another run is writing it"):
                use()
        writing.close()
        assert find_unfinished(path) is None

    def test_file_system_without_locks_takes_the_rows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", refuse)
        left_behind(tmp_path / "rows.csv", parts([2, 2], set()))
        assert survey(tmp_path / "rows.csv").items == 4

    def test_file_of_another_kind_is_left_alone(self, tmp_path: Path) -> None:
        part = tmp_path / "rows.csv.part"
        part.write_text("mine")
        with pytest.raises(RequestError, match=r"rows.csv.part: is not an unfinished output"):
            find_unfinished(tmp_path / "rows.csv")
        assert part.read_text() == "mine"

    def test_full_disk_leaves_whole_rows(self, tmp_path: Path) -> None:
        path, microbatches = tmp_path / "rows.npz", parts([2, 2, 2], set())
        write(tmp_path / "whole.npz", microbatches)
        writer = ResultWriter(path, NAMED, None, DEPENDS_ON)
        with suppress(KeyboardInterrupt), writer:
            for number, (outputs, items) in enumerate(microbatches[:2]):
                writer.write(number, outputs, items)
            unfinished = writer._unfinished
            assert unfinished is not None
            unfinished._stream = FullDisk(unfinished._stream)  # type: ignore[assignment]
            with pytest.raises(RequestError, match=r"rows.npz: cannot be written \(No space left"):
                writer.write(2, *microbatches[2])
            raise KeyboardInterrupt
        assert survey(path).items == 4
        write(path, microbatches)
        assert path.read_bytes() == (tmp_path / "whole.npz").read_bytes()


class FullDisk:
    """A stream that takes a part of what is written, and then nothing more."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._takes = iter([7, 20])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, data: memoryview) -> int:
        most = next(self._takes, None)
        if most is None:
            raise OSError(28, "No space left on device")
        return int(self._stream.write(data[:most]))
