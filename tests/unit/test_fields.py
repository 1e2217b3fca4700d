"""Values that other processes send: each check, then everything that is read from a message, damaged."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from mutations import mutate_message, rounds

from pipeedge.base import fields
from pipeedge.base.errors import PeerFailedError, RequestError
from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.compress.policies import Decided
from pipeedge.doctor.checks import check_facts
from pipeedge.doctor.findings import Finding, exit_status, problem
from pipeedge.observe.assembly import assemble, series
from pipeedge.observe.lanes import STAGE
from pipeedge.observe.metrics import EnergyUse, StageStats
from pipeedge.observe.records import LaneRecord, LinkRecord, Recording, Row, Transfer, Work, WorkRecord
from pipeedge.observe.timeline import Doing, LaneId
from pipeedge.plan.planning import Plan
from pipeedge.plan.prediction import Prediction, StagePrediction
from pipeedge.request.config import CompressionRequest
from pipeedge.train.recording import BatchResult, WorkerRecord, to_timeline


@pytest.mark.parametrize("value", [None, True, "1", -1, 2**63, 10**400, 1.0, [1], {}])
def test_values_other_than_whole_numbers_are_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        fields.whole_number(value)


@pytest.mark.parametrize("value", [None, True, "1", math.nan, math.inf, 1e19, 10**400, -(10**400), [1], {}])
def test_values_other_than_finite_numbers_are_refused(value: object) -> None:
    for read in (fields.number, fields.nonnegative):
        with pytest.raises((TypeError, ValueError)):
            read(value)


def test_values_within_their_range_are_kept() -> None:
    assert [fields.whole_number(value) for value in (0, 2**63 - 1)] == [0, 2**63 - 1]
    assert [fields.number(value) for value in (-1, 1e18, 0.5)] == [-1.0, 1e18, 0.5]
    assert fields.plain({"a": 1, "b": None, "c": "x", "d": True, "e": -1.5}) == {
        "a": 1,
        "b": None,
        "c": "x",
        "d": True,
        "e": -1.5,
    }
    with pytest.raises(ValueError, match="negative"):
        fields.nonnegative(-1)


def test_peer_text_is_truncated_and_escaped() -> None:
    assert fields.text("a\x1b[2J\n\u202eb") == r"a\x1b[2J\n\u202eb"
    assert len(fields.text("\x00" * 5000)) == 2000
    assert fields.text("Gerät in Köln") == "Gerät in Köln"


@pytest.mark.parametrize(
    "text", ["NaN", "1e999", "9" * 400, "-" + "9" * 400, "[" * 50000, "9223372036854775808"]
)
def test_hostile_json_is_refused(text: str) -> None:
    with pytest.raises(fields.MALFORMED):
        fields.parse(text)


@dataclass(frozen=True)
class Sample:
    count: int
    seconds: float
    name: str = ""
    known: bool = False
    rank: int | None = None


def test_record_fields_are_checked_by_type() -> None:
    sample = Sample(1, 2.0, "x", True, 3)
    assert fields.record(Sample, asdict(sample)) == sample
    assert fields.record(Sample, {"count": 1, "seconds": 2, "rank": None}) == Sample(1, 2.0)
    for change in ({"count": None}, {"count": 1.0}, {"seconds": "1"}, {"name": 1}, {"known": 1}, {"more": 1}):
        with pytest.raises(fields.MALFORMED):
            fields.record(Sample, {**asdict(sample), **change})
    with pytest.raises(fields.MALFORMED):
        fields.record(Sample, {"count": 1})


def test_malformed_value_becomes_one_line_that_names_it() -> None:
    said = r"the plan of rank 0 is malformed \(TypeError: .*\); do all run the same"
    with pytest.raises(PeerFailedError, match=said), fields.decoding("the plan of rank 0", peer=0):
        fields.whole_number("x")


STATS = StageStats(0, 1, 5, 0.1, 0.1, 0.1, 0.1, 1000.0, 0.5, 300.0, 1000)
PLAN = Plan(
    schedule=Schedule((StagePlan(LayerRange(0, 8), 0, "pi"), StagePlan(LayerRange(8, 16), 1, None, 8))),
    data_rank=0,
    items=10,
    ubatch_size=2,
    max_tokens=None,
    store_port=29501,
    prediction=Prediction((StagePrediction(0.1, 0.2, 1), StagePrediction(0.1, 0.2, None)), 2),
    compression=CompressionRequest(),
)
RECORDING = Recording(
    rank=1,
    host="pi",
    lanes=(LaneRecord(LaneId.stage(1), STAGE, 0.5, (Row(0, 1, 2, 100, 32.0, 1.0, (0.1,) * 5),)),),
    links=(LinkRecord(LaneId.link(1), 0, (Transfer(0, 100, 1.0, 2.0),)),),
    clock_error_s=0.001,
    decided=(Decided(0, 1.0, 8, None, "x"),),
    energy=EnergyUse("rapl", 1.0, 2.0, ("no energymon",)),
)
WORK = WorkRecord(
    LaneId.stage(0, 1),
    0.0,
    5.0,
    works=(Work(Doing.FORWARD, 0.0, 1.0, 0),),
    seconds=((0, Doing.FORWARD, 1.0),),
)
WORKER = WorkerRecord(
    Recording(0, "pi", works=(WORK,)), batches=(BatchResult(0, 2.3, 1.0),), extra={"peak_rss_mb": 300.0}
)
FACTS = {
    "free_bytes": 1,
    "process_bytes": 1,
    "limit_free_bytes": None,
    "items": 3,
    "machine": "a",
    "host": "b",
}


def show(recording: Recording) -> None:
    assemble([recording], 0.0, 5.0)
    json.dumps(series([recording], 0.0), allow_nan=False)


READERS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], object]]] = {
    "stats": (STATS.to_body(), StageStats.from_body),
    "plan": (PLAN.to_body(), lambda body: Plan.from_body(body).name(1)),
    "recording": (
        json.loads(RECORDING.to_text()),
        lambda body: show(Recording.from_text(1, json.dumps(body))),
    ),
    "worker": (
        json.loads(WORKER.to_text()),
        lambda body: to_timeline({0: WorkerRecord.from_text(0, json.dumps(body))}),
    ),
    "finding": (
        json.loads(problem("memory", "too little").of(1).to_text()),
        lambda body: exit_status([Finding.from_text(json.dumps(body))]),
    ),
    "facts": (FACTS, check_facts),
}


@pytest.mark.parametrize("name", READERS)
def test_damaged_message_is_refused_or_parsed(name: str) -> None:
    body, read = READERS[name]
    read(json.loads(json.dumps(body)))
    chance = random.Random(name)
    for _ in range(rounds(400)):
        with contextlib.suppress(RequestError, *fields.MALFORMED):
            read(mutate_message(body, chance))


def test_plan_survives_the_wire() -> None:
    assert Plan.from_body(json.loads(json.dumps(PLAN.to_body()))) == PLAN
    assert StageStats.from_body(json.loads(json.dumps(STATS.to_body()))) == STATS
