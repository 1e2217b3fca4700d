"""Test ``pipeedge-simulate``: its files, its report, and one-line messages for mistakes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeedge.base.console import StandardOutput
from pipeedge.base.errors import InfeasibleError, RequestError
from pipeedge.report import read_run
from pipeedge.simulate.options import SimulationRequest, parse_simulate
from pipeedge.simulate.session import run, simulate_request

MB = 1 << 20
LAYERS = 4
ELEMENTS = (1000, 500, 2000, 10)


def write(path: Path, body: Any) -> None:
    path.write_text(yaml.safe_dump(body, sort_keys=False))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files of two device types, one twice as fast as the other; 8 Mbps are 1 MB a second."""
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path / "models.yml",
        {
            "m": {
                "layers": LAYERS,
                "mem_MB": [10, 20, 30, 40],
                "parameters_in": 100,
                "parameters_out": list(ELEMENTS),
            }
        },
    )

    def kind(factor: float, **extra: Any) -> dict[str, Any]:
        times = [factor * seconds for seconds in (0.1, 0.2, 0.3, 0.4)]
        profile = {"batch_size": 8, "dtype": "torch.float32", "time_s": times, **extra}
        return {"bw_Mbps": 8, "mem_MB": 500, "model_profiles": {"m": [profile]}}

    extra = {"receive_s": [0.01] * 4, "send_s": [0.02] * 4, "activations_MB": [1, 7, 3, 2], "process_MB": 200}
    write(tmp_path / "device_types.yml", {"fast": kind(1, **extra), "slow": kind(2)})
    write(tmp_path / "devices.yml", {"fast": ["a"], "slow": ["b"]})
    write(tmp_path / "cut.yml", [{"b": [1, 2]}, {"a": [3, 4]}])
    return tmp_path


def request(*arguments: str) -> SimulationRequest:
    return parse_simulate(["-m", "m", *arguments])


def test_stages_and_links_take_their_costs_from_the_files(cluster: Path) -> None:
    found = simulate_request(request("--schedule-file", "cut.yml", "-b", "20", "--data-host", "b"))
    model = found.outcome.model
    slow, fast = model.stages
    assert (slow.compute_s, slow.decode_s, slow.send_s) == (pytest.approx(0.6), 0, 0)
    assert (fast.compute_s, fast.decode_s, fast.send_s) == (pytest.approx(0.7), 0.01, 0.02)
    first, cut, last = model.links
    assert first.in_memory  # the data rank is the rank of stage 0
    assert cut.wire_s == pytest.approx(500 * 8 * 4 / MB)
    assert last.wire_s == pytest.approx(10 * 8 * 4 / MB)
    assert (model.microbatches, model.last_fraction) == (3, 0.5)
    assert [stage.rank for stage in found.schedule.stages] == [1, 0]  # in the order of the devices file
    memory = found.memory[1]
    assert memory.weights == 70 * MB
    assert memory.buffers == 2 * (500 + 10) * 8 * 4
    assert memory.working == (3 + 200) * MB


def test_bits_neighbours_and_data_host_change_link_costs(cluster: Path) -> None:
    write(cluster / "near.yml", {"a": {"b": {"bw_Mbps": 80, "latency_s": 0.25}}})
    found = simulate_request(
        request(
            *("--schedule-file", "cut.yml", "-q", "8,0", "-sdn", "near.yml", "--data-host", "a"),
            *("--codec-MBps", "0.016", "--read-s", "0.5"),
        )
    )
    first, cut, last = found.outcome.model.links
    assert first.wire_s == pytest.approx(100 * 8 * 4 / (10 * MB))
    assert (cut.wire_s, cut.latency_s) == (pytest.approx(500 * 8 / (10 * MB)), 0.25)
    assert last.in_memory
    assert found.outcome.model.stages[0].encode_s == pytest.approx(1.0)
    assert found.outcome.model.stages[1].decode_s == pytest.approx(1.01)
    assert found.outcome.model.feed_s == 0.5
    assert found.data_rank == 0


def test_feeding_and_collecting_slow_the_data_ranks_stage(cluster: Path) -> None:
    types = yaml.safe_load((cluster / "device_types.yml").read_text())
    types["fast"]["model_profiles"]["m"][0] |= {"feed_s": 0.3, "collect_s": 0.1}
    write(cluster / "device_types.yml", types)
    model = simulate_request(request("--schedule-file", "cut.yml", "--data-host", "a")).outcome.model
    assert (model.feed_s, model.collect_s) == (0.3, 0.1)
    assert [stage.compute_s for stage in model.stages] == pytest.approx([0.6, 1.1])
    model = simulate_request(request("--schedule-file", "cut.yml", "--data-host", "b")).outcome.model
    assert [stage.compute_s for stage in model.stages] == pytest.approx([0.6, 0.7])
    # Its links add to both where a stage at an end is on another host.
    handling = {"receive_s": 0.02, "receive_s_per_MB": 0, "send_s": 0.04, "send_s_per_MB": 0}
    types["fast"]["model_profiles"]["m"][0] |= {"handling": {"p2p": handling}}
    write(cluster / "device_types.yml", types)
    model = simulate_request(request("--schedule-file", "cut.yml", "--data-host", "a")).outcome.model
    assert (model.feed_s, model.collect_s) == pytest.approx((0.34, 0.1))
    assert [stage.compute_s for stage in model.stages] == pytest.approx([0.6, 1.14])
    # A schedule made for a data host takes the time that the scheduler predicted.
    found = simulate_request(request("-b", "8000", "--data-host", "a"))
    promised = [stage.busy_s for stage in found.outcome.model.stages]
    assert found.report().steady_items_per_s == pytest.approx(8 / max(promised), rel=1e-3)


def test_the_data_are_on_the_host_of_rank_0(cluster: Path) -> None:
    for arguments, rank, in_memory in (
        ([], 0, (False, True)),
        (["-H", "b,a"], 0, (True, False)),
        (["--data-host", "b"], 1, (True, False)),
    ):
        found = simulate_request(request("-pt", "1,2,3,4", "-r", "1,0", *arguments))
        if arguments[:1] == ["-H"]:
            found = simulate_request(request("-pt", "1,2,3,4", *arguments))
        links = found.outcome.model.links
        assert (found.data_rank, (links[0].in_memory, links[-1].in_memory)) == (rank, in_memory)
        assert [stage.host for stage in found.schedule.stages] == ["b", "a"]


def test_a_simulation_chooses_what_a_run_would_choose(cluster: Path) -> None:
    types = yaml.safe_load((cluster / "device_types.yml").read_text())
    for kind in types.values():
        (known,) = kind["model_profiles"]["m"]
        fast = {"dtype": "torch.bfloat16", "time_s": [each / 2 for each in known["time_s"]], "agreement": 1.0}
        half = {"batch_size": 4, "time_s": [each / 5 for each in known["time_s"]]}
        kind["model_profiles"]["m"] += [{**known, **fast}, {**known, **fast, **half}]
    write(cluster / "device_types.yml", types)
    found = simulate_request(request("--dtype", "auto"))
    assert {stage.dtype for stage in found.schedule.stages} == {"bfloat16"}
    found = simulate_request(request("--plan", "auto", "-b", "640"))
    assert (found.load.microbatch_size, found.load.microbatches) == (4, 160)
    assert any("--plan auto takes microbatches of 4" in note for note in found.notes)
    prediction = found.planned.prediction
    assert prediction is not None
    report = found.report()
    assert report.steady_items_per_s == pytest.approx(prediction.throughput_items_per_s)
    body = report.to_body()["predicted"]
    assert body["throughput_items_per_s_error_percent"] == pytest.approx(0, abs=1e-6)
    assert body["stages"] == body["remarks"] == []  # its figures are those of the profiles anyway


@pytest.mark.parametrize(("transport", "cost"), [("p2p", 0.25), ("tcp", 0.5), ("tcp-tls", 1.0), ("rpc", 0.0)])
def test_each_transport_has_its_own_costs(cluster: Path, transport: str, cost: float) -> None:
    types = yaml.safe_load((cluster / "device_types.yml").read_text())
    known = {
        name: {"receive_s": each, "receive_s_per_MB": 0, "send_s": 2 * each, "send_s_per_MB": 0}
        for name, each in (("p2p", 0.25), ("tcp", 0.5), ("tcp-tls", 1.0))
    }
    types["slow"]["model_profiles"]["m"][0] |= {"handling": known}
    write(cluster / "device_types.yml", types)
    slow, _ = simulate_request(
        request("-pt", "1,2,3,4", "-r", "1,0", "--transport", transport)
    ).outcome.model.stages
    assert (slow.decode_s, slow.send_s) == (cost, 2 * cost)


def test_each_stage_may_have_its_own_number_type(cluster: Path) -> None:
    types = yaml.safe_load((cluster / "device_types.yml").read_text())
    known = types["slow"]["model_profiles"]["m"]
    known.append({**known[0], "dtype": "torch.bfloat16", "time_s": [0.01, 0.02, 0.03, 0.04]})
    write(cluster / "device_types.yml", types)
    for arguments in (["--dtype", "bfloat16,float32"], ["--schedule-file", "typed.yml"]):
        write(cluster / "typed.yml", [{"b": [1, 2], "dtype": "bfloat16"}, {"a": [3, 4]}])
        found = simulate_request(request("--schedule-file", "cut.yml", *arguments))
        assert found.outcome.model.stages[0].compute_s == pytest.approx(0.03)
        assert found.outcome.model.stages[1].compute_s == pytest.approx(0.7)
        assert found.outcome.model.links[1].wire_s == pytest.approx(500 * 8 * 2 / MB)
        assert found.to_body([])["schedule"][0]["dtype"] == "bfloat16"


def test_without_a_schedule_the_best_one_performs_as_predicted(cluster: Path) -> None:
    found = simulate_request(request("-b", "800"))
    assert len(found.schedule.stages) == 2
    report = found.report()
    periods = [stage.busy_s for stage in found.outcome.model.stages]
    assert report.steady_items_per_s == pytest.approx(8 / max(periods), rel=1e-6)
    # No other cut over the two hosts is faster.
    for layers, order in itertools.product(range(1, LAYERS), ("ab", "ba")):
        write(cluster / "other.yml", [{order[0]: [1, layers]}, {order[1]: [layers + 1, LAYERS]}])
        other = simulate_request(request("-b", "800", "--schedule-file", "other.yml")).report()
        assert other.throughput_items_per_s <= report.throughput_items_per_s * 1.05


def test_the_report_is_like_a_runs_but_marked_as_simulated(cluster: Path) -> None:
    body = simulate_request(request("--schedule-file", "cut.yml")).to_body(["pipeedge-simulate", "-m", "m"])
    run = read_run(json.loads(json.dumps(body)), "s.json")
    assert run.simulated
    assert run.command == "pipeedge-simulate -m m"
    for stage in run.stages:
        assert stage.seconds is not None
        assert sum(stage.seconds.values()) == pytest.approx(run.figures["elapsed_s"])
    assert len(run.latencies_s) == 8
    assert run.timeline is not None
    assert run.series


def test_missing_memory_and_unknown_codec_speed_are_reported(cluster: Path) -> None:
    types = yaml.safe_load((cluster / "device_types.yml").read_text())
    types["fast"]["mem_MB"] = 50
    write(cluster / "device_types.yml", types)
    notes = simulate_request(request("--schedule-file", "cut.yml", "-q", "4,0")).notes
    wanted = "stage 1 needs 73 MB for weights, activations and buffers, but a has only 50 MB"
    assert any(wanted in note for note in notes), notes
    assert any("assumed to take no time" in note for note in notes)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["-m", "n"], "models.yml does not list the model n; it lists m"),
        (["-u", "4"], r"no profile of m with microbatches of 4 and dtype float32; it has 8 of float32"),
        (["-b", "0"], "-b/--batch-size 0: must be at least 1"),
        (["-b", "99999999"], "microbatches, and at most 1000000"),
        (["-q", "8"], "1 bit width .* for 2 stages"),
        (["-q", "9,0"], "-q/--quant 9,0: a link carries 2 to 8 or 16"),
        (["-H", "a,c"], "the host b has no rank; the hosts that have one are a, c"),
        (["-H", "a,a"], "names a twice"),
        (["--data-host", "z"], "host z is not in the devices file"),
        (["-H", "b", "--data-host", "a"], "--data-host a has no rank; choose one of b"),
        (
            ["-sd", "many.yml"],
            "the hosts of many.yml make 1,025 ranks, and a run has at most 1024; choose some",
        ),
        (["-pt", "1,2,3,4"], "give either -pt/--partition or --schedule-file"),
        (["--plan", "auto"], "--plan auto needs automatic scheduling"),
        (["--dtype", "int3"], "--dtype: 'int3' is not a number type"),
        (["--dtype", "int8,int8,int8"], "3 number types"),
        (["--dtype", "int8"], "no profile of m with microbatches of 8 and dtype int8"),
        (["--codec-MBps", "0"], "--codec-MBps 0: must be above 0"),
        (["--read-s", "-1"], "must not be negative"),
        (["--report", "r.txt"], "a report is FILE.json, for programs, or FILE.html, for people"),
        (["--schedule-file", "no.yml"], "no.yml"),
        (["--schedule-file", "far.yml"], "layers are 1 to 4|goes beyond the model"),
        (["--schedule-file", "short.yml"], "layer 4 is covered by no stage"),
        (["-sd", "typo.yml"], "host a has the device type fats, which the device types file does not"),
        (["-sdt", "apart.yml"], "a cannot reach b, because the bandwidth between them is 0"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], line: str, cluster: Path) -> None:
    write(cluster / "far.yml", [{"a": [1, 9]}])
    write(cluster / "many.yml", {"fast": [f"h{number}" for number in range(1025)]})
    write(cluster / "short.yml", [{"a": [1, 3]}])
    write(cluster / "typo.yml", {"fats": ["a"], "slow": ["b"]})
    types = yaml.safe_load((cluster / "device_types.yml").read_text())
    types["slow"]["bw_Mbps"] = 0
    write(cluster / "apart.yml", types)
    with pytest.raises(RequestError, match=line):
        simulate_request(request("--schedule-file", "cut.yml", *arguments))


def test_a_cluster_with_too_little_memory_is_infeasible(cluster: Path) -> None:
    write(cluster / "devices.yml", {"fast": ["a"]})
    types = yaml.safe_load((cluster / "device_types.yml").read_text())
    types["fast"]["mem_MB"] = 15
    write(cluster / "device_types.yml", types)
    with pytest.raises(InfeasibleError):
        simulate_request(request())


@pytest.mark.parametrize("suffix", ["json", "html"])
def test_the_program_prints_a_table_and_writes_the_report(
    suffix: str, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = cluster / f"report.{suffix}"
    run(
        request("--report", str(report)),
        ["pipeedge-simulate"],
        StandardOutput(result=True),
        lambda _line: None,
    )
    printed = capsys.readouterr().out
    assert printed.startswith("simulated, not run:")
    assert "throughput" in printed
    assert ("<!doctype html>" in report.read_text()) == (suffix == "html")


def test_tokens_scale_the_times_of_a_text_model(cluster: Path) -> None:
    types = yaml.safe_load((cluster / "device_types.yml").read_text())
    for kind in types.values():
        (profile,) = kind["model_profiles"]["m"]
        profile |= {"tokens": 10, "lengths": [{"tokens": 20, "time_s": [0.6, 0.3, 0.5, 0.7]}]}
    write(cluster / "device_types.yml", types)
    models = yaml.safe_load((cluster / "models.yml").read_text())
    models["m"] |= {"tokens": 10, "parameters_in_per_token": 10, "parameters_out_per_token": [50, 25, 100, 0]}
    write(cluster / "models.yml", models)
    found = simulate_request(request("--schedule-file", "cut.yml", "--tokens", "30"))
    _, fast = found.outcome.model.stages
    assert fast.compute_s == pytest.approx((0.5 + 0.2) + (0.7 + 0.3))  # both layers are products
    assert found.outcome.model.links[1].wire_s == pytest.approx(1000 * 8 * 4 / MB)
    assert found.notes == ()
    best = simulate_request(request("--tokens", "30"))
    assert best.schedule.stages
    alone = {
        tokens: simulate_request(request("--schedule-file", "cut.yml", "--tokens", str(tokens), "-u", "8"))
        for tokens in (12, 30)
    }
    mixed = simulate_request(request("--schedule-file", "cut.yml", "--lengths", "12:3,30:1", "-u", "8"))
    short = 0.75**8
    for stage, both in enumerate(mixed.outcome.model.stages):
        one, other = (found.outcome.model.stages[stage].compute_s for found in alone.values())
        assert both.compute_s == pytest.approx(short * one + (1 - short) * other)
    with pytest.raises(RequestError, match="--lengths"):
        request("--lengths", "12:0")
    with pytest.raises(RequestError, match="--tokens 0"):
        request("--tokens", "0")


def test_a_profile_of_another_length_is_reported(cluster: Path) -> None:
    found = simulate_request(request("--schedule-file", "cut.yml", "--tokens", "30"))
    assert "b was profiled only with an unknown number of tokens" in found.notes[0]
