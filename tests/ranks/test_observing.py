"""Test trace, metrics and report of real ranks, and the early refusal of unwritable files."""

from __future__ import annotations

import csv
import json
import socket
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from processes import IS_SLOW, run_world

from pipeedge.observe.timeline import Span, ThreadState, Timeline

DIGITS = ("-m", "vit-digits", "-b", 200, "-u", 8)
MICROBATCHES = 25
BUSY = (ThreadState.DECODE, ThreadState.COMPUTE, ThreadState.ENCODE)


def stage_lanes(timeline: Timeline) -> dict[int, tuple[int, list[Span]]]:
    """Return, for each stage, its rank and its spans."""
    found: dict[int, tuple[int, list[Span]]] = {}
    for rank, lane in timeline.lanes:
        if lane.startswith("stage") and not lane.endswith("link"):
            spans = [span for span in timeline.spans if (span.rank, span.lane) == (rank, lane)]
            found[int(lane.split()[1])] = rank, spans
    return dict(sorted(found.items()))


def check_timeline(body: dict[str, Any], ranks: list[int]) -> None:
    """Check that every stage has spans without gaps, and computes nothing before its predecessor has."""
    timeline = Timeline.from_body(body["timeline"])
    assert timeline.length_s == pytest.approx(body["elapsed_s"])
    lanes = stage_lanes(timeline)
    assert [rank for rank, _ in lanes.values()] == ranks
    done: dict[int, float] = {}
    for _, spans in lanes.values():
        assert spans[0].start_s == 0
        assert spans[-1].end_s == pytest.approx(timeline.length_s, abs=1e-5)
        assert all(one.end_s == other.start_s for one, other in pairwise(spans))
        assert sum(span.seconds for span in spans) == pytest.approx(timeline.length_s, rel=0.01)
        computed = {span.microbatch: span for span in spans if span.doing is ThreadState.COMPUTE}
        # One clock for all ranks is right to half a round trip, which takes long if a rank gets no processor:
        # what a stage did last may come after the end by its clock, where the timeline is cut.
        assert sorted(computed, key=str) == sorted(range(len(computed)), key=str)
        assert len(computed) == MICROBATCHES or spans[-1].doing is not ThreadState.DRAIN
        for number, span in computed.items():
            assert span.start_s >= done.get(number or 0, 0.0) - 0.5
        done = {number or 0: span.end_s for number, span in computed.items()}


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        pytest.param(("-pt", "1,6,7,16", "-q", "8,0"), [0, 1], id="data rank with a stage"),
        pytest.param(("-pt", "1,6,7,16", "-r", "1,0", "-D", 2), [1, 0], id="data rank without"),
        pytest.param(("-pt", "1,6,7,16", "-D", 1, "-c", "rpc"), [0, 1], id="rpc"),
    ],
)
def test_trace_metrics_and_report_are_of_the_same_run(
    tmp_path: Path, options: tuple[object, ...], ranks: list[int]
) -> None:
    size = 3 if 2 in options else 2
    data_rank = options[options.index("-D") + 1] if "-D" in options else 0
    watched = ("--report", "r.json", "--trace", "t.json", "--metrics-dir", "m", "--quiet")
    ended = run_world(tmp_path, size, *DIGITS, *options, *watched)
    for rank, end in ended.items():
        assert (end.status, end.out, end.err) == (0, "", ""), f"rank {rank}: {end.err}"
    body = json.loads((tmp_path / "r.json").read_text())
    check_timeline(body, ranks)
    assert len(body["latencies_s"]) == MICROBATCHES
    assert body["command"][:3] == ["runtime.py", str(data_rank), str(size)]
    assert [one["rank"] for one in body["energy"]["ranks"]] == sorted({*ranks, data_rank})
    assert [one["stage"] for one in body["series"]] == [0, 1]
    assert body["series"][0]["bits"][0] == (8 if "-q" in options else 32)

    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    counts = Counter(event["name"].split()[0] for event in events if event["ph"] == "X")
    assert counts["compute"] == 2 * MICROBATCHES
    assert counts["read"] == MICROBATCHES
    assert counts["send"] == counts["receive"] > 0
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") <= (
        body["elapsed_s"] * 1e6 + 1
    )

    output = list(csv.DictReader((tmp_path / "m" / f"output-rank{data_rank}.csv").open()))
    assert [row["Tag"] for row in output] == [str(number) for number in range(MICROBATCHES)]
    assert float(output[-1]["Global Work"]) == 200
    assert float(output[-1]["Global Accuracy"]) == body["accuracy"]["correct"]
    assert int(output[-1]["Global Time (ns)"]) * 1e-9 == pytest.approx(body["elapsed_s"], rel=0.01)
    for stage, rank in enumerate(ranks):
        shard = list(csv.DictReader((tmp_path / "m" / f"shard-rank{rank}.csv").open()))
        assert float(shard[-1]["Global Work"]) == 200
        assert float(shard[-1]["Instant Accuracy"]) == (6, 10)[stage]
        mean = int(shard[-1]["Global Time (ns)"]) * 1e-9 / MICROBATCHES
        assert mean == pytest.approx(body["stages"][stage]["compute_s_mean"], rel=0.01)
    send = list(csv.DictReader((tmp_path / "m" / f"send-rank{ranks[0]}.csv").open()))
    assert len(send) == MICROBATCHES
    assert float(send[-1]["Instant Work"]) > 0
    encoded = list(csv.DictReader((tmp_path / "m" / f"quant_encode-rank{ranks[0]}.csv").open()))
    assert {float(row["Instant Accuracy"]) for row in encoded} == ({8.0} if "-q" in options else set())


def test_a_slow_stage_stands_out(tmp_path: Path) -> None:
    """A stage that takes long hardly waits, and the other waits for the link to it."""
    slow = {IS_SLOW: "1:0.04"}
    ended = run_world(tmp_path, 2, *DIGITS, "-pt", "1,8,9,16", "--report", "r.json", env=slow)
    assert ended[0].status == 0, ended[0].err
    lanes = stage_lanes(Timeline.from_body(json.loads((tmp_path / "r.json").read_text())["timeline"]))
    parts = {}
    for stage, (_, spans) in lanes.items():
        whole = sum(span.seconds for span in spans)
        parts[stage] = sum(span.seconds for span in spans if span.doing in BUSY) / whole
    assert parts[1] > parts[0]
    (_, quick) = lanes[0]
    waits = Counter[ThreadState]()
    for span in quick:
        waits[span.doing] += round(1e6 * span.seconds)
    assert (
        waits[ThreadState.WAIT_LINK] + waits[ThreadState.DRAIN]
        > waits[ThreadState.WAIT_INPUT] + waits[ThreadState.FILL]
    )


def refused(directory: Path, *options: object, own: dict[int, tuple[object, ...]]) -> str:
    """Return the message of the rank with its own options; it ends with 2, the other with 4."""
    before = set(directory.iterdir())
    ended = run_world(directory, 2, *DIGITS, "-pt", "1,6,7,16", *options, own=own)
    (rank,) = own
    assert ended[rank].status == 2, ended[rank].err
    assert ended[1 - rank].status == 4
    assert f"rank {rank}" in ended[1 - rank].line
    left = {path for path in set(directory.iterdir()) - before if path.suffix not in (".out", ".err")}
    assert not left
    return ended[rank].line


def test_a_trace_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    line = refused(tmp_path, "-D", 1, own={1: ("--trace", "missing/t.json")})
    assert "--trace missing/t.json: the directory missing does not exist" in line


def test_existing_metrics_are_refused_on_their_rank(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "recv-rank1.csv").write_text("precious")
    line = refused(tmp_path, own={1: ("--metrics-dir", "m")})
    assert "--metrics-dir m: recv-rank1.csv exists already" in line
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["recv-rank1.csv"]


def test_a_port_in_use_is_refused_on_its_rank(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(tmp_path, own={1: ("--prometheus-port", port)})
    assert f"--prometheus-port {port}: cannot listen at 127.0.0.1 (Address already in use)" in line
