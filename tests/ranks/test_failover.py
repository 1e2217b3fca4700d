"""Runs of real processes that go on when ranks are lost, with the results of an undisturbed run."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from ports import free_port
from processes import HANGS_LOADING, SIGNALS_ITSELF, Programs, World, run_world
from waiting import until

ITEMS = 300
OPTIONS = ("-m", "vit-digits", "-u", 2, "-pt", "1,8,9,12,13,16", "--timeout", 10)
GOES_ON = ("-c", "tcp", "--on-failure", "continue")


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("input") / "in.npz"
    images = np.random.default_rng(3).normal(size=(ITEMS, 1, 8, 8)).astype(np.float32)
    np.savez(path, pixel_values=images)
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, pixels: Path) -> bytes:
    """The results over gloo, of a run that ends on failure."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = run_world(folder, 3, *OPTIONS, own={0: ("--input", pixels, "--output", "out.npz")})
    assert [end.status for end in ended.values()] == [0, 0, 0], ended
    return (folder / "out.npz").read_bytes()


def world(
    folder: Path,
    size: int,
    pixels: Path,
    *options: object,
    signals: str,
    metrics: tuple[object, ...] = (),
) -> World:
    own = {0: ("--input", pixels, "--output", "out.npz", "--report", "report.json", *metrics)}
    return World(folder, size, *OPTIONS, *GOES_ON, *options, own=own, env={SIGNALS_ITSELF: signals})


def served(port: int) -> dict[str, float]:
    """Return what rank 0 counts on its page of metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"pipeedge_(\w+)_total\{rank=.0.\} (\S+)", text)}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda one: one.name)
def test_neighbours_take_the_layers_of_a_lost_rank(
    tmp_path: Path, pixels: Path, undisturbed: bytes, number: signal.Signals
) -> None:
    with world(tmp_path, 3, pixels, signals=f"1:60:{number:d}") as ranks:
        ended = ranks.start().wait(0, 2)
        if number is signal.SIGSTOP:  # it ends as soon as it is woken
            ranks.signal(1, signal.SIGTERM)
            ranks.signal(1, signal.SIGCONT)
            assert ranks.wait(1)[1].status != 0
    assert [end.status for end in ended.values()] == [0, 0], ended
    assert (tmp_path / "out.npz").read_bytes() == undisturbed
    why = {
        signal.SIGKILL: "is gone: it was killed or lost its network",
        signal.SIGTERM: "failed: it was interrupted",
        signal.SIGSTOP: r"has been silent for \S+ s: its process is suspended or its network is disconnected",
    }[number]
    lines = ended[0].err.splitlines()
    lost = re.escape("rank 0: rank 1 (stage 1, layers 9-12, on ") + rf"\S+\) {why}; the run goes on with "
    assert [bool(re.search(lost, line)) for line in lines] == [True, False], lines
    went_on = r"rank 0: the run goes on after \S+ s without a result; \d+ microbatch(es)? computed again$"
    assert re.search(went_on, lines[1])
    report = json.loads((tmp_path / "report.json").read_text())
    # What rank 1 did is lost with it.
    lanes = {(lane["rank"], lane["lane"]): lane for lane in report["timeline"]["lanes"]}
    assert {(0, "feed"), (0, "stage 0"), (2, "stage 1")} <= lanes.keys()
    early = {lane for lane in lanes if lane[1].startswith("epoch 1, ")}
    assert {(0, "epoch 1, feed"), (0, "epoch 1, stage 0"), (2, "epoch 1, stage 2")} <= early
    second_us = 1e6 * report["epochs"][1]["started_s"]
    assert all(max(lanes[lane]["end_us"]) <= second_us for lane in early if lane[0] == 0)


def test_a_spare_and_a_rank_that_comes_back_take_the_places_of_those_that_are_lost(
    tmp_path: Path, pixels: Path, undisturbed: bytes
) -> None:
    """Rank 1 is lost by an exception; the metrics count it."""
    # Rank 2 stops after rank 1 was lost, so that the run does not end before rank 1 is back.
    signals = f"1:60:0,2:100:{signal.SIGSTOP:d}"
    port = free_port()
    metrics = ("--prometheus-port", port) if find_spec("prometheus_client") is not None else ()
    with world(tmp_path, 4, pixels, "--timeout", 60, signals=signals, metrics=metrics) as ranks:
        assert ranks.start().wait(1)[1].status == 1
        until(lambda: "without a result" in ranks.text(0, "err"), "the run goes on")
        ranks.start(1)
        ranks.until(lambda: "rank 1 (on " in ranks.text(0, "err"), "rank 1 joins")
        counted = served(port) if metrics else {"epochs": 2.0, "lost_ranks": 1.0}
        ranks.signal(2, signal.SIGKILL)
        ended = ranks.wait(0, 1, 3)
    assert [end.status for end in ended.values()] == [0, 0, 0], ended
    assert (tmp_path / "out.npz").read_bytes() == undisturbed
    first, joined, second = (line for line in ended[0].err.splitlines() if "without a result" not in line)
    assert " failed: " in first
    assert "a layer that cannot be computed; the run goes on" in first
    assert counted["epochs"] == 2
    assert counted["lost_ranks"] == 1
    assert first.endswith("with layers 1-8 on rank 0, layers 9-12 on rank 3, layers 13-16 on rank 2")
    assert joined.endswith("has joined, and is there to take the place of another")
    assert second.endswith("with layers 1-8 on rank 0, layers 9-12 on rank 3, layers 13-16 on rank 1")


def test_ranks_whose_disk_is_dead_are_dismissed_at_the_start_and_in_a_recovery(
    tmp_path: Path, pixels: Path, undisturbed: bytes
) -> None:
    """Rank 1 hangs while it loads for the first time; so does the spare that takes its place, rank 3."""
    own = {0: ("--input", pixels, "--output", "out.npz")}
    env = {HANGS_LOADING: "1,3"}
    with World(tmp_path, 4, *OPTIONS, *GOES_ON, "--timeout", 5, own=own, env=env) as ranks:
        ended = ranks.start().wait()
        lines = ranks.text(0, "err").splitlines()
    assert [ended[rank].status for rank in range(4)] == [0, 4, 0, 4], ended
    assert (tmp_path / "out.npz").read_bytes() == undisturbed
    hangs = r"has been loading layers 9-12 for \S+ s \(0 of \S+ MB\)"
    for rank, layers in ((1, "layers 9-12 on rank 3"), (3, "layers 9-16 on rank 2")):
        name = rf"rank 0: rank {rank} \(stage 1, layers 9-12, on \S+\) {hangs}"
        assert any(re.search(rf"{name}; still alive$", line) for line in lines), lines
        lost = rf"{name}, the last \S+ s without a byte: check its disk, .*; the run goes on with .*{layers}"
        assert any(re.search(lost, line) for line in lines), lines
        assert re.search(hangs, ended[rank].err)


def test_run_begins_without_a_rank_that_is_killed_while_others_are_awaited(
    tmp_path: Path, pixels: Path, undisturbed: bytes
) -> None:
    own = {0: ("--input", pixels, "--output", "out.npz")}
    with World(tmp_path, 4, *OPTIONS, "-c", "tcp", "--timeout", 60, own=own) as ranks:
        ranks.start(0, 1, 3)
        # So its hello has been heard; nobody is at a terminal.
        ranks.until(lambda: " of 4 to start\n" in ranks.text(1, "err"), "rank 1 hears for whom it waits")
        ranks.until(lambda: " of 4 to start\n" in ranks.text(3, "err"), "rank 3 hears it, too")
        ranks.signal(1, signal.SIGKILL)
        assert ranks.wait(1)[1].status == -signal.SIGKILL
        ended = ranks.start(2).wait(0, 2, 3)
        said = ranks.text(0, "err")
    assert [end.status for end in ended.values()] == [0, 0, 0], ended
    assert (tmp_path / "out.npz").read_bytes() == undisturbed
    assert re.search(r"rank 0: waiting for ranks? \S.* of 4 to start\n", said)
    lost = r"rank 0: rank 1 \(on \S+\) is gone: it was killed or lost its network; the run [a-z ,]+with "
    assert re.search(lost + "layers 1-8 on rank 0, layers 9-12 on rank 3, layers 13-16 on rank 2", said)


def test_rank_whose_disk_is_dead_ends_a_run_that_is_to_stop(tmp_path: Path, pixels: Path) -> None:
    own = {0: ("--input", pixels)}
    ended = run_world(tmp_path, 3, *OPTIONS, "--timeout", 5, own=own, env={HANGS_LOADING: "1"})
    assert [end.status for end in ended.values()] == [4, 4, 4], ended
    assert all("s without a byte: check its disk, or use a longer" in end.err for end in ended.values())


def test_plan_may_change_number_types_and_bits_in_mid_run(
    tmp_path: Path, pixels: Path, undisturbed: bytes
) -> None:
    """Rank 0 keeps layers 1-4, which it has to load anew in the other type."""
    common = ("--port", free_port(), *OPTIONS, *GOES_ON, "--timeout", 60)
    with Programs(tmp_path) as ranks:
        own = ("--input", pixels, "--output", "out.npz", "--report", "report.json")
        changed = {"ANOTHER_TYPE": "bfloat16"}
        ranks.launch(0, "tests/support/changing_run.py", 0, 3, *common, *own, env=changed)
        for rank in (1, 2):
            ranks.launch(rank, "runtime.py", rank, 3, *common)
        ended = ranks.wait(0, 1, 2)
    assert [end.status for end in ended.values()] == [0, 0, 0], ended
    found = re.search(r"the plan has changed at microbatch (\d+)", ended[0].err)
    assert found is not None, ended[0].err
    (tmp_path / "before.npz").write_bytes(undisturbed)
    now, before = (np.load(tmp_path / name) for name in ("out.npz", "before.npz"))
    (name,) = {name for name in now.files if now[name].ndim == 2}
    first = 2 * int(found[1])
    assert np.array_equal(now[name][:first], before[name][:first])
    differs = np.abs(now[name][first:] - before[name][first:])
    assert 0 < differs.max() < 0.2 * np.abs(before[name]).max()
    assert np.all(differs.max(axis=1) > 0)
    last = json.loads((tmp_path / "report.json").read_text())["schedule"]
    assert [(stage["dtype"], stage["quant_bits"]) for stage in last] == [("bfloat16", 8), ("bfloat16", 0)]


def test_plan_changes_in_mid_run_and_a_loss_during_the_next_change_is_survived(
    tmp_path: Path, pixels: Path, undisturbed: bytes
) -> None:
    common = ("--port", free_port(), *OPTIONS, *GOES_ON, "--timeout", 60)
    with Programs(tmp_path) as ranks:
        own = ("--input", pixels, "--output", "out.npz", "--report", "report.json")
        ranks.launch(0, "tests/support/changing_run.py", 0, 3, *common, *own)
        for rank in (1, 2):
            ranks.launch(rank, "runtime.py", rank, 3, *common)
        ranks.until(lambda: "first outcome" in ranks.text(0, "err"), "the plan changes")
        ranks.until(lambda: "the plan has changed" in ranks.text(0, "err"), "a result of the new plan")
        ranks.until(lambda: "plan are gone" in ranks.text(0, "err"), "its weights are freed")
        ranks.signal(2, signal.SIGSTOP)  # it cannot prepare what comes, nor compute what it has
        (tmp_path / "change").touch()
        ranks.until(lambda: "second change" in ranks.text(0, "err"), "another change begins")
        ranks.signal(2, signal.SIGKILL)
        ended = ranks.wait(0, 1)
    assert [end.status for end in ended.values()] == [0, 0], ended
    assert (tmp_path / "out.npz").read_bytes() == undisturbed
    first, second = re.findall(r" outcome: (\w+)\(", ended[0].err)
    assert (first, second) == ("Switched", "Dropped")
    assert re.search(r"the plan has changed at microbatch \d+, whose result came \S+ s after", ended[0].err)
    assert "is gone: it was killed or lost its network; the run goes on with " in ended[0].err
