"""Test the metrics of a running rank: samples of each key, files, Prometheus."""

from __future__ import annotations

import csv
import itertools
import socket
import stat
import urllib.request
from pathlib import Path

import pytest
from saved_reports import recovered_epochs

from pipeedge.base.errors import RequestError
from pipeedge.base.fields import decode, encode
from pipeedge.observe.energy import EnergyMeter, Source
from pipeedge.observe.lanes import STAGE
from pipeedge.observe.metrics import CSV_COLUMNS, EnergyUse, MeasuredSample, energy_body
from pipeedge.observe.monitoring import (
    CsvFiles,
    Exporter,
    Monitor,
    check_metrics_dir,
    output_samples,
    send_samples,
    stage_samples,
)
from pipeedge.observe.records import Row


def row(seconds: tuple[float, ...] = (1.0, 0.25, 2.0, 0.5, 0.0), bits: float = 8) -> Row:
    return Row(3, 1, 4, 1000, bits, 10.0, seconds)


def test_a_stage_row_gives_a_sample_of_each_key() -> None:
    samples = dict(stage_samples(row(), STAGE, 250_000, 12, 6))
    assert {key: (sample.start_s, sample.end_s) for key, sample in samples.items()} == {
        "recv": (10.0, 11.0),
        "quant_decode": (11.0, 11.25),
        "shard": (11.25, 13.25),
        "quant_encode": (13.25, 13.75),
    }
    assert {key: (sample.work, sample.accuracy) for key, sample in samples.items()} == {
        "recv": (2.0, 0.0),
        "quant_decode": (4, 6),
        "shard": (4, 12),
        "quant_encode": (4, 8),
    }


def test_a_phase_that_did_not_happen_gives_no_sample() -> None:
    assert [key for key, _ in stage_samples(row((0.0, 0.0, 2.0, 0.0, 0.1)), STAGE, 0, 12, 0)] == ["shard"]


class Ramp(Source):
    """5 watts."""

    name = "ramp"

    def joules(self, now_s: float) -> float:
        return 5 * now_s


class Kept:
    def __init__(self) -> None:
        self.taken: list[tuple[str, MeasuredSample]] = []
        self.closed = False

    def take(self, key: str, measured: MeasuredSample) -> None:
        self.taken.append((key, measured))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class Full(Kept):
    def take(self, key: str, measured: MeasuredSample) -> None:
        raise OSError(28, "No space left on device")


def test_the_monitor_measures_samples_and_survives_a_failing_sink() -> None:
    clock, kept, full, warned = itertools.count(), Kept(), Full(), []
    sinks = [full, kept]
    meter = EnergyMeter(Ramp())
    with Monitor(meter, sinks, 2, lambda: 100.0 * next(clock), warned.append) as monitor:
        for number in range(3):
            monitor.add_samples(send_samples(125_000, 10.0 * number, 10.0 * number + 4))
        monitor.add_samples(output_samples(0.0, 8.0, 16, 15))
    assert kept.closed
    assert [(key, measured.tag) for key, measured in kept.taken] == [
        ("send", 0),
        ("send", 1),
        ("send", 2),
        ("output", 0),
    ]
    last = kept.taken[2][1]
    assert (last.run.work, last.window.work, last.instant.work) == (3.0, 2.0, 1.0)
    assert last.window.time_s == 8
    assert last.instant.energy_j == pytest.approx(20)
    assert last.window.power_w == pytest.approx(5)
    assert warned == ["metrics are no longer written (No space left on device); the run continues"]
    assert meter.use().mean_watts == pytest.approx(5)


def test_files_have_a_header_and_a_line_for_each_sample(tmp_path: Path) -> None:
    check_metrics_dir(tmp_path / "new", "x", 3, ("send", "shard"))
    for _ in range(2):
        files = CsvFiles(tmp_path / "new", "a", 3, ("send", "shard"))
        with Monitor(EnergyMeter(None), [files], 10, float, lambda line: None) as monitor:
            monitor.add_samples(send_samples(125_000, 1.0, 2.0))
            monitor.add_samples(output_samples(0.0, 1.0, 1, 1))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["send-rank3.csv", "shard-rank3.csv"]
    lines = list(csv.DictReader((tmp_path / "new" / "send-rank3.csv").open()))
    assert [line["Tag"] for line in lines] == ["0", "0"]
    assert tuple(lines[0]) == CSV_COLUMNS
    assert float(lines[0]["Instant Performance (/s)"]) == 1
    assert lines[0]["End Time (ns)"] == "2000000000"


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    path = tmp_path / "shard-rank0.csv"
    path.write_text("precious")
    with pytest.raises(RequestError, match="exists already"):
        check_metrics_dir(tmp_path, "x", 0, ("shard",))
    with pytest.raises(RequestError):
        CsvFiles(tmp_path, "x", 0, ("shard",))
    check_metrics_dir(tmp_path, "x", 1, ("shard",))
    assert path.read_text() == "precious"
    check_metrics_dir(tmp_path, "w", 0, ("shard",))
    CsvFiles(tmp_path, "w", 0, ("shard",)).close()
    assert path.read_text().startswith("Heartbeat,Tag,")


def test_an_unwritable_metrics_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "missing" / "deep"):
        with pytest.raises(RequestError, match="--metrics-dir"):
            check_metrics_dir(directory, "w", 0, ("shard",))
    (tmp_path / "shard-rank0.csv").mkdir()
    with pytest.raises(RequestError, match="cannot be written"):
        check_metrics_dir(tmp_path, "w", 0, ("shard",))
    assert stat.S_ISDIR((tmp_path / "shard-rank0.csv").stat().st_mode)


def test_prometheus_is_served_at_one_address_alone() -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RequestError, match=f"--prometheus-port {port}: cannot listen at 127.0.0.1"):
            Exporter("127.0.0.1", port, 0)
    exporter = Exporter("127.0.0.1", port, 2)
    kept = Kept()
    try:
        with Monitor(EnergyMeter(None), [kept], 10, float, lambda line: None) as monitor:
            monitor.add_samples(send_samples(250_000, 0.0, 4.0))
        for key, measured in kept.taken:
            exporter.take(key, measured)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert 'pipeedge_performance{key="send",rank="2",scope="window"} 0.5' in text
        assert 'pipeedge_work{key="send",rank="2",scope="global"} 2.0' in text
        assert "epochs" not in text
        for epoch in recovered_epochs():
            exporter.add_epoch(epoch)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert 'pipeedge_epochs_total{rank="2"} 3.0' in text
        assert 'pipeedge_repeated_microbatches_total{rank="2"} 7.0' in text
        assert 'pipeedge_lost_ranks_total{rank="2"} 2.0' in text
        with socket.socket() as elsewhere, pytest.raises(ConnectionRefusedError):
            elsewhere.connect(("127.0.0.2", port))
    finally:
        exporter.close()


def test_ranks_on_one_host_measure_one_machine() -> None:
    uses = {
        0: ("pi1", EnergyUse("RAPL", 100.0, 10.0)),
        1: ("pi1", EnergyUse("RAPL", 101.0, 10.1)),
        2: ("pi2", EnergyUse("hwmon", 30.0, 10.0)),
        3: ("pi3", EnergyUse(None, None, None, ("RAPL: no counters here",))),
    }
    body = energy_body(uses, 50)
    assert body["joules"] == pytest.approx(131)
    assert body["mean_watts"] == pytest.approx(10 + 3)
    assert body["joules_per_item"] == pytest.approx(131 / 50)
    assert body["unmeasured_hosts"] == ["pi3"]
    assert body["ranks"][2]["mean_watts"] == pytest.approx(3)
    assert energy_body({3: uses[3]}, 50)["joules"] is None
    for _, use in uses.values():
        assert decode(encode(use), EnergyUse) == use
