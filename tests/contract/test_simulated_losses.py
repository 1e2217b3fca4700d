"""Test simulated runs that lose ranks: their epochs, what each recovery costs, and the plan that follows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from runtime_request import request as run_request

from pipeedge.base.errors import InfeasibleError, RequestError
from pipeedge.plan.listed_model import ListedModel
from pipeedge.plan.schedule_choice import Following, plan_schedule
from pipeedge.plan.spec_files import load_models
from pipeedge.report import read_run, render_run
from pipeedge.report.run_report import print_report
from pipeedge.simulate.options import parse_simulate
from pipeedge.simulate.session import FinishedSimulation, simulate_request

MB = 1 << 20
FILES = "-sm models.yml -sdt types.yml -sd devices.yml"


@pytest.fixture(autouse=True)
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the files of four boards with one second a layer, and next to no traffic."""
    monkeypatch.chdir(tmp_path)
    model = {"layers": 6, "mem_MB": [10] * 6, "parameters_in": 1, "parameters_out": [1] * 6}
    profile = {"batch_size": 8, "dtype": "torch.float32", "time_s": [1.0] * 6}
    kind = {"bw_Mbps": 1e6, "mem_MB": 500, "model_profiles": {"m": [profile]}}
    for name, body in (
        ("models.yml", {"m": model}),
        ("types.yml", {"board": kind}),
        ("devices.yml", {"board": ["a", "b", "c", "d"]}),
    ):
        Path(name).write_text(yaml.safe_dump(body))


def simulated(line: str, *, items: int = 320) -> FinishedSimulation:
    return simulate_request(parse_simulate(f"-m m {FILES} --transport tcp -b {items} {line}".split()))


def test_a_loss_costs_the_time_to_notice_plan_load_and_fill() -> None:
    """Three stages of two layers, a microbatch every two seconds; the spare takes the shard of rank 1."""
    line = "-pt 1,2,3,4,5,6 -r 0,1,2 --lose 1@21 --detect-s 0.5 --plan-s 0.25 --load-MBps 10"
    found = simulated(line)
    first, second = (one.record for one in found.epochs)
    # Results come after 6, 8, ... s. Rank 1 has passed on what was fed until 17 s: the microbatches 0 to 8.
    # That of 8 is due after 22 s, when all have stopped.
    assert found.epochs[0].results == 8
    assert (first.items, first.steady_items_per_s) == (64, pytest.approx(4.0))
    assert second.schedule.ranks == (0, 3, 2)
    loading_s = 20 * MB / 10e6
    assert second.waiting_s == pytest.approx(0.25)
    assert second.preparing_s == pytest.approx(loading_s)
    assert second.started_s == pytest.approx(21 + 0.5 + 0.25 + loading_s)
    assert second.filling_s == pytest.approx(6.0, rel=1e-3)
    assert second.items == 320 - 64
    assert second.repeated == 6  # one in each stage, and what was fed ahead of the first
    assert found.undisturbed_s == pytest.approx(2 * 40 + 4, rel=1e-3)
    assert found.length_s == pytest.approx(second.started_s + 2 * 32 + 4, rel=1e-3)


def test_the_plan_after_a_loss_is_that_of_a_run() -> None:
    found = simulated("--lose 2@30")
    model = ListedModel("m", load_models("models.yml")["m"])
    line = f"0 4 -m m -c tcp {FILES} -H a,b,c,d"
    expected = plan_schedule(run_request(line), model, following=Following({0, 1, 3}))
    assert found.planned.prediction == expected.prediction
    assert [stage.layers for stage in found.schedule.stages] == [
        stage.layers for stage in expected.schedule.stages
    ]
    assert set(found.schedule.ranks) == {0, 1, 3}


def test_a_second_loss_during_the_recovery_delays_it() -> None:
    found = simulated("--lose 1@20 --lose 2@20.5 --plan-s 1 --load-MBps 10")
    (_, after) = (one.record for one in found.epochs)
    assert after.lost == (1, 2)
    assert after.waiting_s == pytest.approx(1.5)
    assert "rank 1 " in after.cause
    assert "rank 2 " in after.cause
    assert set(found.schedule.ranks) == {0, 3}
    assert sum(one.record.items for one in found.epochs) == 320


@pytest.mark.parametrize("line", ["--lose 3@20", "--lose 1@999", "--lose 1@83.9 --detect-s 5"])
def test_a_loss_that_nobody_needs_costs_nothing(line: str) -> None:
    """A spare, a rank of a run that is over, and one whose loss is noticed after the last result."""
    cut = "-pt 1,2,3,4,5,6 -r 0,1,2"
    found = simulated(f"{cut} {line}")
    assert (len(found.epochs), found.length_s) == (1, simulated(cut).length_s)
    assert found.report().undisturbed_s is None


def test_table_and_page_show_the_recovery() -> None:
    found = simulated("--lose 1@20 --lose 2@40")
    shown = io.StringIO()
    print_report(found.report(), Console(file=shown, width=200), results=None, saved=None)
    text = shown.getvalue()
    for expected in ("losses      cost ", "% throughput; without them ", "rank 1 (stage ", "to prepare it"):
        assert expected in text, expected
    body = json.loads(json.dumps(found.to_body(["pipeedge-simulate"])))
    run = read_run(body, "lost.json")
    assert run.simulated
    assert len(run.latencies_s) == 40
    assert [one.number for one in run.epochs] == [1, 2, 3]
    page = render_run(run)
    for expected in ("cost of the losses", "bubble: recovery", "all epochs", "epoch 2"):
        assert expected in page, expected
    timeline = run.timeline
    assert timeline is not None
    assert max(span.end_s for span in timeline.spans if span.rank == 1) == pytest.approx(20)
    accounted = sum(
        sum(seconds.values())
        for one in run.epochs
        for stage in one.stages
        if stage.rank == 0 and (seconds := stage.seconds)
    )
    assert accounted == pytest.approx(found.length_s, rel=1e-4)


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("--lose 4@9", RequestError, "--lose 4@9: the ranks are 0 to 3"),
        ("--lose 1", RequestError, "'1' is not a loss: use RANK@SECONDS, for example 1@20"),
        ("--lose 1@-2", RequestError, "'1@-2' is not a loss"),
        ("--lose 1@nan", RequestError, "'1@nan' is not a loss"),
        (
            "--plan-s 1",
            RequestError,
            "--keep-outputs and --replicate have an effect only with --lose",
        ),
        ("--lose 1@9 --replicate", RequestError, "--replicate are for decoders, .* is an encoder"),
        ("--lose 1@9 --keep-outputs", RequestError, "--replicate are for decoders, .* is an encoder"),
        ("--lose 1@9 --load-MBps 0", RequestError, "--load-MBps 0: must be above 0"),
        ("--lose 1@9 --transport p2p", RequestError, "--lose needs --transport tcp or tcp-tls: over p2p, "),
        ("--lose 0@9", InfeasibleError, "--lose 0@9: the run ends there, because rank 0 makes the plans"),
        ("--lose 2@9 --data-host c", InfeasibleError, "the run ends there, because it has the data"),
        ("--lose 1@9 -H a,b -sdt small.yml", InfeasibleError, "nothing fits without it: .* memory"),
    ],
)
def test_a_loss_that_cannot_be_gets_one_line(line: str, error: type[Exception], message: str) -> None:
    Path("small.yml").write_text(Path("types.yml").read_text().replace("mem_MB: 500", "mem_MB: 40"))
    with pytest.raises(error, match=message):
        simulated(line)
