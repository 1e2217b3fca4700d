"""Test that outputs never replace inputs or each other, for every program, also through links."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from places import ROOT
from rich.console import Console

from pipeedge.auction.main import _take_part
from pipeedge.auction.options import parse_auction
from pipeedge.base.errors import RequestError
from pipeedge.base.files import (
    InputPath,
    OutputFile,
    check_outputs,
    named_output,
    temporary_beside,
    write_whole,
)
from pipeedge.base.yamlfile import write_text
from pipeedge.data.defaults import asset
from pipeedge.profile import session
from pipeedge.profile.converting import convert_to_device_type, convert_to_model
from pipeedge.profile.options import parse_device_types, parse_models, parse_profiler
from pipeedge.report.main import make_report, parse_report
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.run import pipeline
from pipeedge.simulate.options import parse_simulate
from pipeedge.simulate.session import run as simulate
from pipeedge.train.options import parse_train
from pipeedge.train.session import train


def file(path: Path, text: str = "precious") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def output(path: Path) -> OutputFile:
    return OutputFile("--output", path)


class TestCheck:
    def test_unread_outputs_are_allowed_and_existing_ones_returned(self, tmp_path: Path) -> None:
        old, read = file(tmp_path / "old.csv"), file(tmp_path / "a.npz")
        outputs = [output(old), OutputFile("--report", tmp_path / "new.json")]
        assert check_outputs(outputs, [InputPath("--input", read)]) == {old}
        assert named_output(old, {old}) == f"{old} (replaced)"
        assert named_output(tmp_path / "new.json", {old}) == str(tmp_path / "new.json")

    @pytest.mark.parametrize(
        "link",
        [
            lambda path, link: link.symlink_to(path),
            lambda path, link: os.link(path, link),
            lambda path, link: (link.parent / "x").symlink_to(path) or link.symlink_to(link.parent / "x"),
        ],
        ids=["symbolic", "hard", "chain"],
    )
    def test_links_are_resolved(self, tmp_path: Path, link: Callable[[Path, Path], object]) -> None:
        read, other = file(tmp_path / "a.npz"), tmp_path / "b.npz"
        link(read, other)
        for written, source in ((read, other), (other, read)):
            with pytest.raises(RequestError, match=r"--output .*: would replace what -M reads; name another"):
                check_outputs([output(written)], [InputPath("-M", source)])
            with pytest.raises(RequestError, match=r"would replace a\.npz|would replace b\.npz"):
                check_outputs([output(written)], [InputPath("-m", tmp_path, source.name.__eq__)])

    def test_new_outputs_are_compared_by_real_path(self, tmp_path: Path) -> None:
        (tmp_path / "here").symlink_to(tmp_path)
        with pytest.raises(RequestError, match=r"--trace .*: is the same file as --output .*; name another"):
            check_outputs(
                [output(tmp_path / "x.json"), OutputFile("--trace", tmp_path / "here" / "x.json")], []
            )

    def test_only_files_the_reader_uses_are_protected(self, tmp_path: Path) -> None:
        deep, report = file(tmp_path / "in" / "deep" / "a.png"), file(tmp_path / "in" / "r.json")
        photos = InputPath("--input", tmp_path / "in", lambda name: name.endswith(".png"), nested=True)
        assert check_outputs([output(report)], [photos]) == {report}
        assert check_outputs([output(deep)], [InputPath("-m", tmp_path / "in")]) == {deep}
        with pytest.raises(RequestError, match=r"would replace a\.png, which --input .*in reads"):
            check_outputs([output(deep)], [photos])


def test_temporary_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    target = tmp_path / "a.csv"
    mine = temporary_beside(target)
    dead = 1 << 30  # beyond every pid that Linux gives
    gone = file(mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{dead}-")))
    kept = [
        file(mine),
        file(mine.with_name(mine.name.replace(f"-{os.getpid()}-", "-1-"))),
        file(gone.with_name(gone.name.replace("a.csv", "b.csv"))),
        file(gone.with_name(gone.name.replace(f".csv.{gone.name.split('.')[3][:8]}", ".csv.00000000"))),
        file(target),
    ]
    assert temporary_beside(target) != mine
    assert not gone.exists()
    for write in (lambda: write_whole(target, "x", "--report"), lambda: write_text(target, "x")):
        write_text(gone, "half")
        write()
        assert target.read_text() == "x"
        assert not gone.exists()
    assert all(path.exists() for path in kept)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("place")
    shutil.copytree(asset("vit-digits"), here / "model")
    shutil.copy(here / "model" / "model.safetensors", here / "w.safetensors")
    os.link(here / "w.safetensors", here / "w.npz")
    (here / "photos" / "0").mkdir(parents=True)
    Image.new("L", (8, 8)).save(here / "photos" / "0" / "a.png")
    np.savez(here / "a.npz", pixel_values=np.zeros((1, 1, 8, 8), np.float32))
    for path in ROOT.glob("*.yml"):
        shutil.copy(path, here)
    file(here / "results.yml")
    file(here / "old.json")
    os.link(here / "old.json", here / "old.html")
    os.link(here / "devices.yml", here / "devices.json")
    os.link(here / "photos" / "0" / "a.png", here / "a.png")
    return here


def _runtime(argv: Sequence[str]) -> None:
    pipeline.run(parse_runtime(["0", "1", *argv], Environment()).request, Console, print)


def _profiler(argv: Sequence[str]) -> None:
    command = parse_profiler(argv)
    (session.use_results if command.measure is None else session.profile)(command, print, print)


def _train(argv: Sequence[str]) -> None:
    environment = Environment(rank=0, world_size=1, master_addr="127.0.0.1", master_port=20731)
    train(parse_train(argv, environment, cores=1).request, Console(), print)


PROGRAMS: dict[str, Callable[[Sequence[str]], object]] = {
    "runtime.py": _runtime,
    "profiler.py": _profiler,
    "to_models": lambda argv: convert_to_model(parse_models(argv), print),
    "to_types": lambda argv: convert_to_device_type(parse_device_types(argv), print),
    "simulate": lambda argv: simulate(parse_simulate(argv), argv, Console(), print),
    "report": lambda argv: make_report(parse_report(argv)),
    "revauct.py": lambda argv: _take_part(parse_auction(argv, Environment())),
    "train.py": _train,
}


@pytest.mark.parametrize(
    "line",
    [
        "runtime.py -m vit-digits -M w.safetensors --output w.npz",
        "runtime.py -m vit-digits --input a.npz --output a.npz",
        "runtime.py -m model --report model/config.json",
        "runtime.py -m vit-digits --report x.json --trace x.json",
        "runtime.py -m google/vit-base-patch16-224 -sm models.yml -sdt device_types.yml -sd devices.yml "
        "-H mb-0 --trace devices.json",
        "runtime.py -m vit-digits --metrics-dir . --output shard-rank0.csv",
        "profiler.py -m model -o model/config.json",
        "profiler.py -m vit-digits -dt t --bw-Mbps 1 -sm new.yml -sdt new.yml",
        "profiler.py -m vit-digits --dtype bfloat16 --agreement 1 --input photos --plot a.png",
        "profiler.py --from-results -o results.yml -dt t --bw-Mbps 1 -sm results.yml",
        "to_models -i results.yml -o results.yml",
        "to_types board -i results.yml -o results.yml",
        "simulate -b 8 --report devices.json",
        "report old.json",
        "revauct.py 0 1 -H mb-0 -dt a -sm models.yml -sdt device_types.yml --output device_types.yml",
        "train.py --model model --data digits --report model/config.json",
        "train.py --data random --report x.json --trace ./x.json",
    ],
)
def test_output_never_replaces_an_input(line: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    program, *argv = line.split()
    with pytest.raises(RequestError, match=r"(would replace .* reads|is the same file as .*); name another"):
        PROGRAMS[program](argv)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_testbed_does_not_replace_its_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeedge.testbed import main
    from pipeedge.testbed.bed import TestBeds
    from pipeedge.testbed.journal import JournalFiles

    journal = file(tmp_path / "pipeedge" / "journal.json")
    monkeypatch.setattr(main, "TestBeds", lambda: TestBeds(shelf=JournalFiles(tmp_path)))
    with pytest.raises(RequestError, match=r"would replace what testbed\.py up reads"):
        main._run(["up", str(journal), "--name", "pipeedge"])
