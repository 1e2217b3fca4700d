"""Rank 0's schedules for the ranks that are left: with files for the scheduler, and with given stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw
from rich.console import Console
from runtime_request import request

from pipeedge.base.errors import InfeasibleError
from pipeedge.base.fields import encode
from pipeedge.base.schedule import Schedule
from pipeedge.base.text_lengths import InputSizes
from pipeedge.control.announcement import Announcement
from pipeedge.control.session import Refusal
from pipeedge.models import find_model
from pipeedge.plan.after_loss import Held, Survivor
from pipeedge.plan.facts import rank_facts
from pipeedge.plan.planning import Plan
from pipeedge.plan.schedule_choice import Following, PlannedSchedule, plan_schedule
from pipeedge.run.context import Program, RankContext, Transports
from pipeedge.run.decision import FORMS, Decider
from pipeedge.run.replanning import PlanAsMeasured, describe, plan_schedule_again
from pipeedge.transport.choice import make_endpoint

MODEL = find_model("vit-digits")
LAYERS = MODEL.n_layers


def facts(memory_bytes: int | None = 1 << 40, weights: str | None = "w") -> dict[str, Any]:
    return {"memory_bytes": memory_bytes, "weights": weights}


def stages(planned: PlannedSchedule | str) -> list[tuple[int, str]]:
    assert isinstance(planned, PlannedSchedule), planned
    return [(stage.rank, str(stage.layers)) for stage in planned.schedule.stages]


class Again:
    """A run whose options are ``line``, and what is planned when ranks are lost."""

    def __init__(self, line: str) -> None:
        self.request = request(line)
        self.planned = plan_schedule(self.request, MODEL)
        self.plan = Plan(
            self.planned.schedule, 0, 40, 8, None, self.planned.prediction, goes_on=True, cause="why"
        )
        self.held = Held()
        self.held.loads(self.planned.schedule, 1)

    def __call__(
        self, left: dict[int, dict[str, Any]], as_measured: PlanAsMeasured | None = None
    ) -> PlannedSchedule | str:
        return plan_schedule_again(self.request, MODEL, self.plan, left, self.held, as_measured)

    def describe(self, planned: PlannedSchedule | str) -> str:
        assert isinstance(planned, PlannedSchedule)
        now = Plan(planned.schedule, 0, 40, 8, None, planned.prediction, cause="rank 1 is gone")
        return describe(self.plan, now)


def test_spare_takes_the_given_stage_and_neighbours_where_there_is_none() -> None:
    again = Again("0 4 -c tcp --on-failure continue -pt 1,4,5,8,9,16")
    taken = again({0: facts(), 2: facts(), 3: facts()})
    assert stages(taken) == [(0, "1-4"), (3, "5-8"), (2, "9-16")]
    assert again.describe(taken) == (
        "rank 1 is gone; the run goes on with layers 1-4 on rank 0, layers 5-8 on rank 3, "
        "layers 9-16 on rank 2"
    )
    left = stages(again({0: facts(), 2: facts()}))
    assert [rank for rank, _ in left] == [0, 2]
    same = again({rank: facts() for rank in range(4)})
    assert again.describe(same) == "rank 1 is gone; the run tries again with the same ranks"


def test_rank_without_weights_or_memory_takes_nothing_and_the_missing_layer_is_named() -> None:
    again = Again("0 4 -c tcp --on-failure continue -pt 1,4,5,8,9,16")
    assert 3 not in dict(stages(again({0: facts(), 2: facts(), 3: facts(weights=None)})))
    assert 3 not in dict(stages(again({0: facts(), 2: facts(None), 3: facts(10)})))
    reason = again({0: facts(1000), 2: facts(1000)})
    assert isinstance(reason, str)
    assert reason.startswith("layer 1 needs")
    assert "rank 0" in reason


@pytest.mark.parametrize(
    ("line", "here", "found"),
    [
        ("0 3 -c tcp -pt 1,8,9,16", (0, 1), "layers 1-8 on rank 0, layers 9-16 on rank 1"),
        ("0 3 -c tcp -pt 1,8,9,16 -r 0,2", (0, 1), "layers 1-8 on rank 0, layers 9-16 on rank 1"),
        ("0 2 -c tcp -pt 1,8,9,16", (0,), "layers 1-16 on rank 0"),
        ("0 3 -c p2p -pt 1,8,9,16", (0, 1), None),
    ],
)
def test_run_begins_without_ranks_that_never_came_if_it_could_go_on_without_them(
    line: str, here: tuple[int, ...], found: str | None
) -> None:
    said: list[str] = []
    told = {}
    for rank in here:
        asked = request(f"{rank}{line[1:]}")
        known = rank_facts(asked, MODEL, weights="w", items=None if rank else 40)
        told[rank] = FORMS.facts(Raw(encode(known)))
    asked = request(line)
    transports = Transports(make_endpoint(asked.transport, 0, asked.world.addr))
    context = RankContext(asked, MODEL, Program(Console, said.append), transports)
    decision = Decider(context).decide(told)
    missing = f"rank {len(here)} of {asked.world.size} never appeared within {asked.world.timeout_s:.0f} s"
    if found is None:
        assert isinstance(decision, Refusal)
        assert decision.line == f"{missing}: start each rank, with the same --addr and --port"
        return
    assert isinstance(decision, Announcement)
    assert set(decision.participants) <= set(here)
    assert said == [f"{missing}; the run begins without it, with {found}"]


@pytest.fixture
def files(tmp_path: Path) -> str:
    """Four hosts of two types: rank 0's own, slow one, and three alike that can hold half of the model."""
    sizes = [1] * LAYERS
    write = {
        "models.yml": f"vit-digits:\n  layers: {LAYERS}\n  mem_MB: {sizes}\n  parameters_in: 64\n"
        f"  parameters_out: {[64] * LAYERS}\n",
        "types.yml": "".join(
            f"{kind}:\n  bw_Mbps: 1000\n  mem_MB: {memory}\n  model_profiles:\n    vit-digits:\n"
            f"    - batch_size: 8\n      dtype: torch.float32\n      time_s: {[time] * LAYERS}\n"
            for kind, memory, time in (("slow", 5, 4.0), ("quick", 9, 1.0))
        ),
        "devices.yml": "slow: [a]\nquick: [b, c, d]\n",
    }
    for name, text in write.items():
        (tmp_path / name).write_text(text)
    return f"-sm {tmp_path}/models.yml -sdt {tmp_path}/types.yml -sd {tmp_path}/devices.yml -H a,b,c,d"


def test_scheduler_plans_for_the_hosts_that_are_left_and_layers_that_are_loaded_stay(files: str) -> None:
    again = Again(f"0 4 -c tcp --on-failure continue {files}")
    before = stages(again.planned)
    lost = next(rank for rank, _ in before if rank != 0)
    left = {rank: facts() for rank in range(4) if rank != lost}
    planned = again(left)
    assert lost not in dict(stages(planned))
    assert isinstance(planned, PlannedSchedule)
    assert planned.prediction is not None
    best = plan_schedule(
        again.request, MODEL, InputSizes(eight_bit=False), following=Following(frozenset(left))
    ).prediction
    assert planned.prediction == best
    assert "predicted: " in again.describe(planned)
    # Of hosts that are alike, each keeps what it has loaded.
    one, other = sorted(set(left) - {0})
    exchanged = {one: other, other: one}
    swapped = Schedule(
        tuple(
            dataclasses.replace(stage, rank=exchanged.get(stage.rank, stage.rank))
            for stage in planned.schedule.stages
        )
    )
    assert {one, other} <= set(swapped.ranks)
    again.held.loads(swapped, 2)
    assert stages(again(left)) == [(stage.rank, str(stage.layers)) for stage in swapped.stages]
    # What is known of the hosts' speed comes first.
    heard = []

    def as_measured(survivors: Sequence[Survivor]) -> PlannedSchedule | None:
        heard.append({one.rank: (one.holds, one.dtype) for one in survivors})
        return None if len(heard) > 1 else PlannedSchedule(swapped)

    assert again(left, as_measured) == PlannedSchedule(swapped)
    held = [again.held.survivor(rank, 0.0, None) for rank in left]
    assert heard == [{one.rank: (one.holds, one.dtype) for one in held}]
    assert again(left, as_measured) == again(left)


def test_scheduler_says_what_is_missing_when_nothing_fits(files: str) -> None:
    again = Again(f"0 4 -c tcp --on-failure continue {files}")
    with pytest.raises(InfeasibleError, match=r"memory are missing"):
        again({0: facts(), 1: facts()})
