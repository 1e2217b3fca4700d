"""Rank 0 watches a run that is scheduled from files: what it says and records, with simulated heartbeats."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from runtime_request import request
from watched_run import SWITCHED, WatchedRun

from pipeedge.base.errors import PipeEdgeError
from pipeedge.base.text_lengths import InputSizes
from pipeedge.control.changing import Dropped, Switched
from pipeedge.control.liveness import RankStatus
from pipeedge.models import find_model
from pipeedge.observe.metrics import StageWork
from pipeedge.plan.after_loss import Survivor
from pipeedge.plan.planning import Plan
from pipeedge.plan.schedule_choice import plan_schedule

MODEL = find_model("vit-digits")
LAYERS = MODEL.n_layers
UBATCH = 8
ITEM_S = 0.01
"""Seconds of a layer for an item."""


@pytest.fixture
def files(tmp_path: Path) -> str:
    """Three hosts that are alike."""
    sizes = [1] * LAYERS
    (tmp_path / "models.yml").write_text(
        f"vit-digits:\n  layers: {LAYERS}\n  mem_MB: {sizes}\n  parameters_in: 64\n"
        f"  parameters_out: {[64] * LAYERS}\n"
    )
    (tmp_path / "types.yml").write_text(
        "board:\n  bw_Mbps: 1000\n  mem_MB: 500\n  model_profiles:\n    vit-digits:\n"
        f"    - batch_size: 8\n      dtype: torch.float32\n      time_s: {[8 * ITEM_S] * LAYERS}\n"
    )
    (tmp_path / "devices.yml").write_text("board: [a, b, c]\n")
    return f"-sm {tmp_path}/models.yml -sdt {tmp_path}/types.yml -sd {tmp_path}/devices.yml -H a,b,c"


class SimulatedRun(WatchedRun):
    """A run of ``seconds`` in which the stages work as fast as the slowest one allows.

    Heartbeats come ``heard_s`` after each look. With ``lengths``, it answers requests: those have these
    lengths, and nobody knew when it was planned.
    """

    def __init__(
        self,
        line: str,
        seconds: float,
        slowness: Callable[[float, int], float],
        spoil: Callable[[], object] = lambda: None,
        outcome: Switched | Dropped = SWITCHED,
        heard_s: float = 1.0,
        lengths: str | None = None,
    ) -> None:
        self._slowness, self._heard_s, self._lengths = slowness, heard_s, lengths
        asked = request(line)
        tokens = None if lengths is None else 512
        planned = plan_schedule(asked, MODEL, InputSizes(tokens))
        items = 100_000 if lengths is None else None
        goes_on = asked.transport.goes_on
        plan = Plan(planned.schedule, 0, items, 8, tokens, prediction=planned.prediction, goes_on=goes_on)
        super().__init__(asked, MODEL, planned, plan, seconds, outcome)
        spoil()
        self.watch()

    def _pass(self, seconds: float) -> None:
        self._compute(self._heard_s * seconds)
        self._heard = self._work
        self._compute((1 - self._heard_s) * seconds)

    def _compute(self, seconds: float) -> None:
        took = {
            stage.rank: len(stage.layers)
            * ITEM_S
            * self._slowness(self.clock.now, stage.rank)
            * (0.5 if stage.dtype == "int8" else 1.0)
            for stage in self.plan.schedule.stages
        }
        slowest = max(took.values())
        self._items += seconds / slowest
        self._spent_s += seconds
        count = UBATCH * int(self._items / UBATCH)
        self._work = {
            rank: StageWork(
                items=count,
                compute_s=work.compute_s + (count - work.items) * took[rank],
                finished_s=max(work.finished_s, self._spent_s - (self._items - count) * slowest),
            )
            for rank, work in self._work.items()
        }
        self.clock.now += seconds

    def _begin(self) -> None:
        """Begin with the counters of a plan."""
        self._work = {rank: StageWork(items=16) for rank in self.plan.schedule.ranks}
        self._heard = self._work
        self._items, self._spent_s = 16.0, 0.0

    def _statuses(self) -> Mapping[int, RankStatus]:
        if self.decider.lengths is not None:  # as those of rank 0's decisions
            self.decider.present = dataclasses.replace(self.plan, lengths=self.decider.lengths)
        return {
            rank: RankStatus(work=work, lengths=self._lengths if rank == 0 else None)
            for rank, work in self._heard.items()
        }


@pytest.mark.parametrize("options", ["", "-c tcp --replan only-report", "-c tcp --on-failure stop"])
def test_a_better_schedule_is_reported_once_with_what_it_would_bring(files: str, options: str) -> None:
    run = SimulatedRun(f"0 3 {options} {files}", 300, half_speed)
    assert len(run.lines) == len(run.replans) == 1
    (line,), (record,) = run.lines, run.replans
    assert line.startswith("b takes 2 times as long as planned; with layers ")
    assert line.endswith("the run keeps its schedule")
    assert 60 < record.at_s <= 95
    layers = {stage.rank: len(stage.layers) for stage in record.schedule.stages}
    assert sum(layers.values()) == LAYERS
    before = max(len(stage.layers) * (2 if stage.rank == 1 else 1) for stage in run.plan.schedule.stages)
    after = max(count * (2 if rank == 1 else 1) for rank, count in layers.items())
    assert record.gain == pytest.approx(before / after - 1)
    assert f"({record.gain:+.0%})" in line
    assert record.outcome == "reported"


def with_int8(files: str, agreement: float = 0.98) -> str:
    """Add profiles of another number type, and watts. Half of the layers keep an agreement of 0.99."""
    path = Path(files.split("-sdt ")[1].split()[0])
    other = f"dtype: int8\n      agreement: {agreement}\n      time_s: {[4 * ITEM_S] * LAYERS}\n"
    watts = path.read_text().replace("board:\n", "board:\n  busy_W: 10\n  idle_W: 4\n")
    path.write_text(f"{watts}    - batch_size: 8\n      {other}")
    return f"{files} --plan auto"


def test_a_joint_plan_changes_number_types_within_its_agreement(files: str) -> None:
    run = SimulatedRun(f"0 3 -c tcp {with_int8(files)}", 150, half_speed)
    (record,) = run.replans
    assert (record.outcome, record.microbatch) == ("switched", 77)
    plans = run.first, run.plan.schedule
    assert plans[0] != plans[1]
    for plan in plans:
        assert 0 < sum(len(stage.layers) for stage in plan.stages if stage.dtype == "int8") <= 8
    assert record.measured_gain == pytest.approx(record.gain, abs=0.03)


@pytest.mark.parametrize(("objective", "unit"), [("latency", "s through the idle"), ("energy", "J an item")])
def test_a_change_is_for_the_objective_of_the_plan(files: str, objective: str, unit: str) -> None:
    """The host that has all layers becomes slow."""
    run = SimulatedRun(
        f"0 3 -c tcp {with_int8(files, 0.999)} --objective {objective}",
        200,
        lambda now_s, rank: 3.0 if rank == 0 and now_s > 60 else 1.0,
    )
    assert run.first.ranks == (0,)
    assert 0 not in run.plan.schedule.ranks
    assert f" {unit}" in run.lines[0]
    assert [record.outcome for record in run.replans] == ["switched"]
    assert run.replans[0].measured_gain is None
    assert len(run.lines) == 1


def half_speed(now_s: float, rank: int) -> float:
    return 2.0 if rank == 1 and now_s > 60 else 1.0


@pytest.mark.parametrize(("slow_from_s", "heard_s"), [(60, 1.0), (61.3, 0.1), (63.6, 0.5), (64.9, 0.9)])
def test_a_run_changes_its_schedule_and_says_what_that_has_brought(
    files: str, slow_from_s: float, heard_s: float
) -> None:
    run = SimulatedRun(
        f"0 3 -c tcp {files}",
        150,
        lambda now_s, rank: 2.0 if rank == 1 and now_s > slow_from_s else 1.0,
        heard_s=heard_s,
    )
    (record,) = run.replans
    assert run.lines[0].endswith("; the run changes to it")
    assert run.lines[1].startswith("the change has brought +")
    assert len(run.lines) == 2
    assert (record.outcome, record.microbatch, record.seconds) == ("switched", 77, 1.5)
    assert record.measured_gain == pytest.approx(record.gain, abs=0.03)


def test_a_change_that_is_dropped_is_said_and_tried_again_later(files: str) -> None:
    dropped = Dropped("rank 2 is gone")
    run = SimulatedRun(f"0 3 -c tcp --replan auto {files}", 600, half_speed, outcome=dropped)
    assert run.lines[1] == "the run keeps its schedule: rank 2 is gone"
    assert 2 <= len(run.replans) <= 6
    assert {record.outcome for record in run.replans} == {"rank 2 is gone"}
    times = [record.at_s for record in run.replans]
    assert all(later - sooner >= 10 for sooner, later in itertools.pairwise(times))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("", "--replan auto needs -c tcp without --on-failure stop"),
        ("-c tcp --on-failure stop", "--replan auto needs -c tcp without --on-failure stop"),
        ("-c tcp -pt 1,8,9,16", "--replan auto needs automatic scheduling"),
        ("-c tcp --serve 8000", "--serve with --replan auto needs --on-failure continue"),
    ],
)
def test_changes_are_refused_where_a_run_cannot_go_on(options: str, why: str, files: str) -> None:
    with pytest.raises(PipeEdgeError, match=re.escape(why)):
        request(f"0 3 --replan auto {options} {files}")


def test_a_run_that_is_as_planned_is_left_alone(files: str) -> None:
    run = SimulatedRun(f"0 3 {files}", 200, lambda now_s, rank: 1.0)
    assert run.lines == []
    assert run.decider.as_measured is None
    assert run.shown.slowness == pytest.approx({"a": 1.0, "b": 1.0, "c": 1.0})


def test_a_host_that_is_too_little_slower_for_another_plan_is_shown(files: str) -> None:
    run = SimulatedRun(f"0 3 {files}", 60, lambda now_s, rank: 1.2 if rank == 1 else 1.0)
    assert run.lines == []
    assert run.shown.slowness == pytest.approx({"a": 1.0, "b": 1.2, "c": 1.0})


def test_the_plan_after_a_loss_is_for_the_speed_that_hosts_have_had(files: str) -> None:
    run = SimulatedRun(f"0 3 {files}", 120, half_speed)
    held = {stage.rank: stage.layers for stage in run.plan.schedule.stages}
    survivors = [Survivor(rank, 1e9, "abc"[rank], held.get(rank)) for rank in (0, 1)]
    planned = run.decider.as_measured(survivors)
    layers = {stage.rank: len(stage.layers) for stage in planned.schedule.stages}
    assert layers[0] > 1.5 * layers[1]
    slowest_s = max(layers[0], 2 * layers[1]) * 8 * ITEM_S
    assert planned.prediction.throughput_items_per_s == pytest.approx(8 / slowest_s, rel=0.05)


def test_a_served_text_model_is_planned_for_the_sentences_that_come(files: str) -> None:
    """Of long sentences, the first layers take most of the time; of short ones, all take the same."""
    models, types = (Path(files.split(f"{name} ")[1].split()[0]) for name in ("-sm", "-sdt"))
    models.write_text(
        models.read_text() + f"  tokens: 512\n  parameters_in_per_token: 0\n"
        f"  parameters_out_per_token: {[0] * LAYERS}\n"
    )
    long = [80 * ITEM_S] * (LAYERS // 2) + [8 * ITEM_S] * (LAYERS - LAYERS // 2)
    types.write_text(
        types.read_text().replace(str([8 * ITEM_S] * LAYERS), str(long)) + "      tokens: 512\n"
        f"      lengths:\n      - tokens: 32\n        time_s: {[8 * ITEM_S] * LAYERS}\n"
    )
    line = f"0 3 -c tcp --serve 8000 --on-failure continue --replan auto {files}"
    run = SimulatedRun(line, 60, lambda now_s, rank: 1.0, lengths="20:60,40:90")
    before, after = ([len(stage.layers) for stage in plan.stages] for plan in (run.first, run.plan.schedule))
    assert max(before) > 1.5 * LAYERS / 3
    assert max(after) <= LAYERS / 3 + 1
    assert run.lines[0].startswith("sentences have 32 tokens on average; with layers ")
    assert [record.outcome for record in run.replans] == ["switched"]
    assert run.replans[0].measured_gain == pytest.approx(run.replans[0].gain, abs=0.1)


def test_what_cannot_be_read_is_said_and_the_run_goes_on(files: str, tmp_path: Path) -> None:
    run = SimulatedRun(f"0 3 {files}", 10, lambda now_s, rank: 1.0, spoil=(tmp_path / "types.yml").unlink)
    assert len(run.lines) == 1
    assert run.lines[0].startswith("the run is not watched for a better schedule: ")
    assert "types.yml" in run.lines[0]


def test_only_schedules_of_the_scheduler_are_watched(files: str) -> None:
    assert request(f"0 3 {files}").schedule.watched
    assert not request(f"0 3 {files} --replan off").schedule.watched
    assert request(f"0 3 {files} --plan auto").schedule.watched
    assert not request("0 3 -pt 1,16").schedule.watched
