"""Rank 0 watches a decoder that is scheduled from files: what it says, with simulated heartbeats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from runtime_request import request
from text_ranks import PUZZLES
from watched_run import WatchedRun

from pipeedge.base.text_lengths import InputSizes, TextLengths
from pipeedge.control.liveness import RankStatus
from pipeedge.models.decoder import find_decoder
from pipeedge.models.step_rows import StepBounds
from pipeedge.observe.metrics import StageWork, TextWork
from pipeedge.plan.planning import Plan
from pipeedge.plan.schedule_choice import PlannedSchedule, plan_schedule

MODEL = find_decoder(PUZZLES)
LAYERS = MODEL.n_layers
ROW_S = 0.0005
"""Seconds of a layer for each row."""
POSITIONS = 30
STREAMS = 8


@pytest.fixture
def fixed_s() -> float:
    """Seconds of a layer at least."""
    return ROW_S


@pytest.fixture
def files(tmp_path: Path, fixed_s: float) -> str:
    """Four hosts that are alike."""
    costs = {"fixed_s": fixed_s, "start_s": 0.0, "row_s": ROW_S, "position_s": 0.0, "chunk_position_s": 0.0}
    steps: dict[str, object] = {name: [value] * LAYERS for name, value in costs.items()}
    ends = {**dict.fromkeys(("fixed_s", "start_s", "row_s", "feed_s", "feed_row_s"), 1e-6), "mem_MB": 1}
    steps |= {"cache_bytes": [512, 0, 0, 0] * (LAYERS // 4), "ends": ends}
    profile = {"batch_size": 1, "dtype": "float32", "time_s": [fixed_s] * LAYERS, "steps": steps}
    board = {"mem_MB": 500, "bw_Mbps": 10_000, "model_profiles": {str(PUZZLES): [profile]}}
    entry = {
        "layers": LAYERS,
        "mem_MB": [1] * LAYERS,
        "parameters_in": 96,
        "parameters_out": [192, 96, 384, 96],
        "context": 256,
    }
    contents = {"models": {str(PUZZLES): entry}, "types": {"board": board}, "hosts": {"board": list("abcd")}}
    for name, content in contents.items():
        (tmp_path / f"{name}.yml").write_text(json.dumps(content))
    return f"-sm {tmp_path}/models.yml -sdt {tmp_path}/types.yml -sd {tmp_path}/hosts.yml -H a,b,c,d"


class SimulatedText(WatchedRun):
    """A run of a decoder on four ranks, whose stages are as fast as the profiles say, but for their slowness.

    Args:
        line: Command line.
        seconds: Length of the run.
        slowness: How slow a rank is at a time.
        texts: How many texts grow at a time.
        fixed_s: Seconds of a layer at least.
    """

    def __init__(
        self,
        line: str,
        seconds: float,
        slowness: Callable[[float, int], float],
        texts: Callable[[float], int] = lambda now_s: STREAMS,
        fixed_s: float = ROW_S,
    ) -> None:
        self._fixed_s, self._slowness, self._texts = fixed_s, slowness, texts
        self._text = [0.0] * 5
        asked = request(f"0 4 -m {PUZZLES} -c tcp -u {STREAMS} {line}")
        lengths = TextLengths(prompt=POSITIONS, answer=100, longest=200, texts=10_000)
        planned = plan_schedule(asked, MODEL, InputSizes(texts=lengths))
        plan = Plan(
            planned.schedule,
            0,
            10_000,
            STREAMS,
            None,
            prediction=planned.prediction,
            goes_on=True,
            steps=StepBounds(200, 64, STREAMS, 64, 0),
            texts=lengths,
        )
        super().__init__(asked, MODEL, planned, plan, seconds)
        self.watch()

    def rate(self, stages: PlannedSchedule | Any, texts: int) -> tuple[float, float, dict[int, float]]:
        """Return the steps a second of a schedule, the rows of each, and the seconds of each rank for it."""
        groups = min(texts, len(stages.stages) + 1)
        rows = texts / groups
        took = {
            stage.rank: len(stage.layers)
            * max(self._fixed_s, ROW_S * rows)
            * self._slowness(self.clock.now, stage.rank)
            for stage in stages.stages
        }
        return 1 / max(*took.values(), sum(took.values()) / groups), rows, took

    def _pass(self, seconds: float) -> None:
        texts = self._texts(self.clock.now)
        per_s, rows, took = self.rate(self.plan.schedule, texts)
        steps = per_s * seconds
        added = (steps, steps * rows, steps * rows * POSITIONS, seconds, seconds * texts)
        self._text = [before + more for before, more in zip(self._text, added, strict=True)]
        self._rows += steps * rows
        for rank, spent in took.items():
            self._spent[rank] += steps * spent
        self._work_s += seconds
        self.clock.now += seconds

    def _begin(self) -> None:
        self._spent = dict.fromkeys(self.plan.schedule.ranks, 0.0)
        self._rows = self._work_s = 0.0

    def _statuses(self) -> Mapping[int, RankStatus]:
        steps, rows, positions, seconds, text_s = self._text
        text = TextWork(int(steps), int(rows), int(positions), seconds, text_s)
        statuses = {
            rank: RankStatus(
                work=StageWork(items=int(self._rows), compute_s=spent, finished_s=self._work_s),
                text=text if rank == 0 else None,
            )
            for rank, spent in self._spent.items()
        }
        statuses.setdefault(0, RankStatus(text=text))
        return statuses


def half_speed(now_s: float, rank: int) -> float:
    return 2.0 if rank == 2 and now_s > 60 else 1.0


def test_a_decoder_changes_its_schedule_and_says_what_that_has_brought(files: str) -> None:
    run = SimulatedText(f"--input x.txt --replan auto {files}", 150, half_speed)
    (record,) = run.replans
    assert record.outcome == "switched"
    assert record.at_s <= 60 + 5 * 5
    assert run.lines[0].startswith("c takes 2 times as long as planned; with layers ")
    assert " tokens/s of 8 streams instead of " in run.lines[0]
    best = plan_schedule(run.request, MODEL, run.plan.input_sizes).schedule
    before, after = (run.rate(schedule, STREAMS) for schedule in (best, run.plan.schedule))
    gain = after[0] * after[1] / (before[0] * before[1]) - 1
    assert record.gain == pytest.approx(gain, abs=0.05)
    assert record.measured_gain == pytest.approx(gain, abs=0.05)
    slow = sum(len(stage.layers) for stage in run.plan.schedule.stages if stage.rank == 2)
    assert slow <= LAYERS / 7 + 1


@pytest.mark.parametrize("fixed_s", [4 * ROW_S])
def test_few_texts_for_many_stages_are_planned_for_too(files: str, fixed_s: float) -> None:
    """Up to four rows take as long as one, so that stages wait for each other."""
    run = SimulatedText(f"--replan auto {files}", 200, half_speed, fixed_s=fixed_s)
    assert [record.outcome for record in run.replans] == ["switched"]
    measured = run.replans[0].measured_gain
    assert measured is not None
    assert measured > 0.1


def test_fewer_texts_are_no_reason_for_a_change(files: str) -> None:
    """Neither a window nor the gain of a change may depend on how many texts there are."""
    run = SimulatedText(
        files, 300, lambda now_s, rank: 1.0, lambda now_s: STREAMS - int(now_s / 10) % STREAMS
    )
    assert run.lines == []
    run = SimulatedText(
        f"--replan auto {files}",
        300,
        half_speed,
        lambda now_s: STREAMS if now_s < 100 else 2,
    )
    assert [record.outcome for record in run.replans] == ["switched"]


def test_one_text_is_enough_to_see_that_a_host_is_slow(files: str) -> None:
    run = SimulatedText(
        f"--serve 8000 --on-failure continue --replan auto {files}", 200, half_speed, lambda now_s: 1
    )
    assert [record.outcome for record in run.replans] == ["switched"]
    assert run.lines[0].startswith("c takes 2 times as long as planned; with layers ")


def test_the_latency_of_a_lone_text_is_an_objective(files: str) -> None:
    """The host that has all layers becomes slow."""
    run = SimulatedText(
        f"--objective latency --replan auto {files}",
        200,
        lambda now_s, rank: 3.0 if rank == 0 and now_s > 60 else 1.0,
    )
    assert run.first.ranks == (0,)
    assert 0 not in run.plan.schedule.ranks
    assert " s a token of a lone stream instead of " in run.lines[0]
