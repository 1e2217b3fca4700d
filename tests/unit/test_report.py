"""Test the report: JSON for programs, complete or absent, and a table for people."""

from __future__ import annotations

import io
import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from saved_reports import recovered_epochs

from pipeedge.base.errors import RequestError
from pipeedge.base.files import check_writable
from pipeedge.base.schedule import Schedule
from pipeedge.data.results import Accuracy
from pipeedge.observe.metrics import Latency, StageStats
from pipeedge.observe.records import HostsAsRun, ReplanRecord
from pipeedge.plan.prediction import Prediction, StagePrediction
from pipeedge.report.render import render_run
from pipeedge.report.run_report import RunReport, print_report, save_report
from pipeedge.report.saved import read_run

STATS = {
    "microbatches": 3,
    "compute_s_mean": 0.5,
    "send_s_mean": 0.002,
    "send_s_best": 0.001,
    "recv_wait_s_mean": 0.03,
    "bytes_out_mean": 4.8e6,
    "busy_fraction": 0.75,
    "rss_peak_mb": 250.5,
    "parameters": 101_440,
}


def report(**changed: Any) -> RunReport:
    values: dict[str, Any] = {
        "model": "vit-digits",
        "schedule": Schedule.from_partition([1, 6, 7, 16]).with_rank_order([1, 0], world_size=2),
        "items": 20,
        "microbatches": 3,
        "microbatch_size": 8,
        "startup_s": 2.5,
        "elapsed_s": 4.0,
        "latency": Latency(0.1, 0.2, 0.3),
        "accuracy": Accuracy(9, 10),
        "stages": [StageStats(stage=0, rank=1, **STATS), StageStats(stage=1, rank=0, **STATS)],
        "skipped": [],
        "prediction": None,
        "steady_items_per_s": None,
    }
    return RunReport(**{**values, **changed})


def promise(items_per_s: float) -> Prediction:
    """Two equal stages."""
    stage = StagePrediction(busy_s=8 / items_per_s, link_s=0.002, threads=None)
    return Prediction((stage, stage), 8, stage.busy_s, 2 * (stage.busy_s + stage.link_s), "stage 0")


def test_json_has_all_documented_fields(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    save_report(report(prediction=promise(6.0), steady_items_per_s=5.4), path)
    body = json.loads(path.read_text())
    first = {"stage": 0, "rank": 1, "host": None, "layers": [1, 6], "dtype": "float32", "quant_bits": 0}
    assert body["schedule"][0] == first
    assert (body["model"], body["items"], body["microbatches"], body["ubatch_size"]) == (
        "vit-digits",
        20,
        3,
        8,
    )
    assert (body["startup_s"], body["elapsed_s"], body["throughput_items_per_s"]) == (2.5, 4.0, 5.0)
    assert body["latency_s"] == {"p50": 0.1, "p95": 0.2, "max": 0.3}
    assert body["accuracy"] == {"correct": 9, "labelled": 10, "top1": 0.9}
    assert body["predicted"]["throughput_items_per_s"] == pytest.approx(6.0)
    assert body["predicted"]["throughput_items_per_s_error_percent"] == pytest.approx(-10)
    assert [stage["stage"] for stage in body["predicted"]["stages"]] == [0, 1]
    promised = {"stage", "rank", "compute_s_mean", "send_s_mean", "recv_wait_s_mean", "bytes_out_mean"}
    promised |= {"busy_fraction", "rss_peak_mb"}
    assert all(promised <= stage.keys() for stage in body["stages"])
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert stat.S_IMODE(path.stat().st_mode) & stat.S_IRUSR


def test_unknown_values_are_null(tmp_path: Path) -> None:
    nothing = report(accuracy=Accuracy(), latency=None, elapsed_s=0.0)
    body = json.loads(json.dumps(nothing.to_body()))
    assert body["accuracy"] is None
    assert body["latency_s"] is None
    assert body["throughput_items_per_s"] == 0
    assert body["predicted"] == {"throughput_items_per_s": None}
    assert report(accuracy=None).to_body()["accuracy"] is None


def test_figures_of_a_rank_that_left_are_missing_from_table_and_page() -> None:
    gone = report(stages=[StageStats(stage=1, rank=0, **STATS)], prediction=promise(6.0))
    rows = [line.split() for line in printed(gone).splitlines()]
    assert ["0", "1", "1-6", *["-"] * 7] in rows
    assert ["1", "0", "7-16", "101.4k", "500.0ms"] in [row[:5] for row in rows]
    page = render_run(read_run(gone.to_body(), "r.json"))
    assert [line in page for line in ("stage 0, a microbatch", "stage 1, a microbatch")] == [False, True]


@pytest.mark.parametrize("unmeasured", [["pi1"], []])
def test_predicted_energy_stands_beside_what_all_hosts_measured(unmeasured: list[str]) -> None:
    promised = replace(promise(6.0), joules_per_item=4.0)
    source = [{"rank": 0, "source": "rapl"}]
    energy = {"ranks": source, "joules": 100.0, "mean_watts": 25.0, "joules_per_item": 5.0}
    run = report(prediction=promised, energy={**energy, "unmeasured_hosts": unmeasured})
    told = printed(run)
    assert "energy      100 J, 25 W (rapl), 5 J an item" in told
    assert "            4 J an item predicted, on the hosts that take part" in told
    body = run.to_body()["predicted"]
    assert body["joules_per_item"] == 4
    assert body.get("joules_per_item_error_percent") == (None if unmeasured else pytest.approx(25))
    alone = report(prediction=promised)
    assert "energy      4 J an item predicted" in printed(alone)
    page = render_run(read_run(alone.to_body(), "r.json"))
    assert "energy an item" in page
    assert "energy an item" not in render_run(read_run(report(prediction=promise(6.0)).to_body(), "r.json"))


def test_existing_report_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")
    save_report(report(), path)
    assert json.loads(path.read_text())["items"] == 20


@pytest.mark.parametrize("name", ["missing/r.json", "folder.json"])
def test_unwritable_report_path_is_refused_early(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(RequestError, match=r"--report .*(does not exist|is a directory)"):
        check_writable(tmp_path / name, "--report")
    with pytest.raises(RequestError, match="--report"):
        save_report(report(), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]


def test_full_disk_at_the_end_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(RequestError, match="No space left"):
        save_report(report(), tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


def printed(shown: RunReport, **options: Any) -> str:
    stream = io.StringIO()
    options = {"results": None, "saved": None, **options}
    print_report(shown, Console(file=stream, width=100), **options)
    return stream.getvalue()


def test_a_run_that_survived_failures_shows_its_epochs() -> None:
    epochs = recovered_epochs()
    text = printed(report(epochs=epochs))
    lines = [line.strip() for line in text[text.index("epochs") :].splitlines()[:5]]
    assert lines == [
        "epochs      3: 5.75 s without a new result, 7 microbatches computed again",
        f"2 began after 10.50 s, with layers 1-4 on rank 0, 5-8 on rank 3, 9-12 on rank 2: {epochs[1].cause}",
        "0.25 s until its plan, 0.50 s to prepare it, 1.00 s to fill the pipeline; 4 microbatches computed "
        "again",
        f"3 began after 20.00 s, with layers 1-4 on rank 0, 5-12 on rank 3: {epochs[2].cause}",
        "0.50 s until its plan, 1.50 s to prepare it, 2.00 s to fill the pipeline; 3 microbatches computed "
        "again",
    ]
    assert "epochs" not in printed(report(epochs=epochs[:1]))
    first, second, third = report(epochs=epochs).to_body()["epochs"]
    assert (first["epoch"], first["cause"], first["lost_s"]) == (1, "", 0)
    assert (second["started_s"], second["lost_s"], second["lost_ranks"], second["repeated"]) == (
        10.5,
        1.75,
        [1],
        4,
    )
    assert [(stage["rank"], stage["layers"]) for stage in third["schedule"]] == [(0, [1, 4]), (3, [5, 12])]


def better_plans() -> tuple[ReplanRecord, ...]:
    """Return a plan that the run changed to, and one that it did not."""
    schedule = recovered_epochs()[1].schedule
    switched = ReplanRecord(3.0, "b is slow", schedule, 0.25, "switched", 7, 1.5, 0.2)
    return (switched, ReplanRecord(9.0, "c is slow", schedule, 0.125))


def test_better_plans_are_shown_with_their_gains() -> None:
    text = printed(report(replans=better_plans()))
    layers = "layers 1-4 on rank 0, 5-8 on rank 3, 9-12 on rank 2"
    lines = [line.strip() for line in text[text.index("re-planned") :].splitlines()[:2]]
    assert lines == [
        f"re-planned  after 3.00 s: b is slow; {layers}: +25% predicted, +20% measured; "
        "switched at microbatch 7",
        f"after 9.00 s: c is slow; {layers}: +12% predicted; reported",
    ]
    assert "re-planned" not in printed(report())
    first, second = report(replans=better_plans()).to_body()["replans"]
    assert (first["predicted_gain_percent"], first["measured_gain_percent"]) == (25.0, 20.0)
    assert (first["outcome"], first["microbatch"], first["seconds"]) == ("switched", 7, 1.5)
    assert (second["outcome"], second["measured_gain_percent"]) == ("reported", None)
    assert [stage["rank"] for stage in second["schedule"]] == [0, 3, 2]


def test_a_prediction_for_hosts_as_they_were_is_told_if_some_were_unlike_their_profile() -> None:
    found = report(
        prediction=promise(6.0),
        steady_items_per_s=3.8,
        as_run=HostsAsRun({"pi-1": 1.5, "pi-2": 1.05, "pi-3": 0.8}, 4.0),
    )
    text = printed(found)
    lines = [line.strip() for line in text[text.index("as run") :].splitlines()[:3]]
    assert lines == [
        "as run      4 items/s with hosts as fast as they were, measured 3.8 (-5.0%)",
        "layers on pi-1 took 1.5 times as long as its profile says",
        "layers on pi-3 took 0.8 times as long as its profile says",
    ]
    body = json.loads(json.dumps(found.to_body()))["as_run"]
    assert body["slowness"] == {"pi-1": 1.5, "pi-2": 1.05, "pi-3": 0.8}
    assert (body["items_per_s"], body["items_per_s_measured"]) == (4.0, 3.8)
    assert body["items_per_s_error_percent"] == pytest.approx(-5)
    page = render_run(read_run(found.to_body(), "r.json"))
    assert "hosts as fast as they were" in page
    assert "layers on pi-1" in page
    alike = report(prediction=promise(6.0), as_run=HostsAsRun({"pi-1": 1.05}, 5.8))
    assert "as run" not in printed(alike)
    # Without a throughput, hosts are told all the same.
    unknown = printed(report(as_run=HostsAsRun({"pi-1": 1.5}, None)))
    assert "as run      layers on pi-1 took 1.5 times as long as its profile says" in unknown
    assert "as_run" not in report().to_body()


def test_table_shows_the_main_figures() -> None:
    text = printed(report(), results=Path("out.csv"), saved=Path("r.json"))
    for expected in (
        "vit-digits: 20 items in 3 microbatches",
        "5 items/s (4.00 s, after 2.5 s to start)",
        "100.0ms median, 200.0ms at 95 %, 300.0ms at most",
        "0.9000 (9/10)",
        "out.csv",
        "r.json",
        "101.4k",
        "4.8MB",
        "75%",
    ):
        assert expected in text, expected
    assert "predicted" not in text
    assert "skipped" not in text


@pytest.mark.parametrize("width", [80, 72, 50])
def test_a_narrow_table_keeps_hosts_apart_and_units_whole(width: int) -> None:
    hosts = [f"edge-board-number-{number}.lab.example.org" for number in (17, 18)]
    stream = io.StringIO()
    shown = report(schedule=Schedule.from_partition([1, 6, 7, 16]).with_hosts(hosts))
    print_report(shown, Console(file=stream, width=width), results=None, saved=None)
    text = stream.getvalue()
    assert "17" in text
    assert "18" in text
    if width >= 72:
        rows = [line for line in text.splitlines() if "101.4k" in line or "lab" in line or "edge" in line]
        assert len(set(rows)) == len(rows) >= 2
        assert "100.0ms" in text
        assert "MB" in text
    letters = "".join(text.split())
    assert letters.count("ms") >= 4  # folded where there is no room, never cut


def test_the_table_shows_hosts_predictions_and_what_was_skipped() -> None:
    named = Schedule.from_partition([1, 6, 7, 16]).with_hosts(["[red]pi", "mb-0"])
    text = printed(
        report(
            model="dir[bold]/m",
            schedule=named,
            prediction=promise(4.0),
            steady_items_per_s=5.0,
            skipped=["a[0].png: truncated"],
        )
    )
    assert "mb-0" in text
    assert "dir[bold]/m: 20 items" in text
    assert "4 items/s once the pipeline is full, measured 5 (+25.0%)" in text
    assert "skipped     1 input" in text
    assert "a[0].png: truncated" in text
    assert "[red]pi" in text
