"""Test the trial of plans on held-out items: against stages that run one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shipped_model import CPU, DIGITS
from stages_in_memory import run

from pipeedge.base.errors import InputError, WeightsError
from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.data import InputSource, open_input
from pipeedge.request.config import ModelRequest, RunRequest, WorldRequest
from pipeedge.request.files import InputRequest
from pipeedge.request.scheduling import ScheduleRequest
from pipeedge.run.held_out import held_out_trial, open_held_out

ITEMS, HELD_OUT = 60, 40


def asked(items: int = HELD_OUT, weights: Path | None = None) -> RunRequest:
    files = [Path(f"{name}.yml") for name in ("models", "types", "devices")]
    schedule = ScheduleRequest(
        plan="auto",
        held_out=items,
        models_file=files[0],
        dev_types_file=files[1],
        dev_file=files[2],
    )
    return RunRequest(WorldRequest(0, 1), ModelRequest("vit-digits", weights=weights), schedule=schedule)


@pytest.fixture(name="source", scope="module")
def _source() -> InputSource:
    return open_input(InputRequest(max_items=ITEMS), DIGITS)


def schedule_of(bits: int, dtypes: tuple[str, str]) -> Schedule:
    ranges = (LayerRange(0, 3), LayerRange(3, DIGITS.n_layers))
    stages = zip(ranges, dtypes, (bits, 0), strict=True)
    return Schedule(
        tuple(
            StagePlan(layers, rank, quant_bits=width, dtype=dtype)
            for rank, (layers, dtype, width) in enumerate(stages)
        )
    )


def test_trial_has_the_answers_of_the_last_items_in_a_run(source: InputSource) -> None:
    items = open_held_out(asked(), DIGITS, source)
    trial = held_out_trial(asked(), DIGITS, items, CPU)
    assert trial.items == HELD_OUT
    images = torch.cat([batch.payload[0] for batch in source.microbatches(8)])[-HELD_OUT:]
    answers = {}
    for bits, dtypes in ((0, ("float32", "float32")), (2, ("float32", "int8")), (3, ("int8", "float32"))):
        schedule = schedule_of(bits, dtypes)
        answers[bits] = run(DIGITS, schedule, (images,), size=4).argmax(1)
        same = int((answers[bits] == answers[0]).sum())
        assert trial.agreement(schedule, 4) == same / HELD_OUT
    assert (answers[2] != answers[0]).any()  # two bits change some of the classes


def test_held_out_items_are_different_and_enough(source: InputSource) -> None:
    with pytest.raises(InputError, match=f"--held-out {ITEMS + 1}: the input has {ITEMS} distinct items"):
        open_held_out(asked(ITEMS + 1), DIGITS, source)


def test_rank_without_the_model_is_told(source: InputSource) -> None:
    request = asked(weights=Path("none.npz"))
    with pytest.raises(WeightsError, match="--held-out computes the whole model here: "):
        open_held_out(request, DIGITS, source)
