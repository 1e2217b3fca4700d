"""Test checks of values from other processes, and damaged messages of every kind."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from msgspec import Struct
from mutations import mutate_message, rounds

from pipeedge.base import fields
from pipeedge.base.errors import PeerFailedError, RequestError
from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.compress.policies import Decided
from pipeedge.doctor.findings import Finding, exit_status, problem
from pipeedge.doctor.rank_checks import check_facts
from pipeedge.observe.assembly import assemble, series
from pipeedge.observe.lanes import STAGE
from pipeedge.observe.metrics import EnergyUse, StageStats
from pipeedge.observe.records import LaneRecord, LinkRecord, Recording, Row, Transfer, Work, WorkRecord
from pipeedge.observe.timeline import LaneId, ThreadState
from pipeedge.plan.planning import Plan
from pipeedge.plan.prediction import Prediction, StagePrediction
from pipeedge.request.scheduling import CompressionRequest
from pipeedge.train.recording import BatchResult, WorkerFigures, WorkerRecord, to_timeline


class Sample(Struct, frozen=True):
    count: fields.Count = 0
    first: fields.Positive = 1
    port: fields.Port = 0
    code: fields.ExitCode = 0
    seconds: fields.Number = 0.0
    amount: fields.Amount = 0.0
    name: fields.Name = ""
    line: fields.Line = ""
    long: fields.LongLine = ""
    text: fields.Text = ""
    rank: fields.Count | None = None
    counts: Mapping[fields.Count, fields.Count] = {}


WHOLE_NUMBERS = ("count", "first", "port", "code", "rank")
HUGE = str(10**400)


@pytest.mark.parametrize(
    "text", ["true", '"1"', "-1", str(2**63), str(2**64), HUGE, f"-{HUGE}", "1.0", "1e2", "[1]", "{}", "NaN"]
)
@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_values_other_than_whole_numbers_are_refused(name: str, text: str) -> None:
    with pytest.raises(fields.MALFORMED):
        fields.decode(f'{{"{name}": {text}}}', Sample)


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "true",
        '"1"',
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "1e19",
        "-1e19",
        HUGE,
        f"-{HUGE}",
        "[1]",
    ],
)
@pytest.mark.parametrize("name", ["seconds", "amount"])
def test_values_other_than_finite_numbers_are_refused(name: str, text: str) -> None:
    with pytest.raises(fields.MALFORMED):
        fields.decode(f'{{"{name}": {text}}}', Sample)


@pytest.mark.parametrize(
    ("name", "text"),
    [("first", "0"), ("port", "65536"), ("code", "256"), ("amount", "-1e-9"), ("counts", '{"-1": 1}')]
    + [("counts", text) for text in ('{"01": 1}', '{"x": 1}', f'{{"{HUGE}": 1}}', "[]", "null")]
    + [
        (name, text)
        for name in ("name", "line", "long", "text")
        for text in ("1", "null", '["a"]', r'"\ud800"')
    ]
    + [("text", f'"{"x" * 8001}"')],
)
def test_values_beyond_their_limits_are_refused(name: str, text: str) -> None:
    with pytest.raises(fields.MALFORMED):
        fields.decode(f'{{"{name}": {text}}}', Sample)


def test_values_within_their_limits_are_kept() -> None:
    edges = Sample(2**63 - 1, 1, 65535, 255, -1e18, 1e18, "pi", "Gerät in Köln", "", "x" * 8000, 0, {0: 7})
    for sample in (Sample(), edges, Sample(seconds=-1.0)):
        assert fields.decode(fields.encode(sample), Sample) == sample
    assert fields.decode('{"seconds": -1, "rank": null}', Sample) == Sample(seconds=-1.0)


def test_peer_text_is_truncated_and_escaped() -> None:
    sent = "a\x1b[2J\n\u202eb"
    sample = fields.decode(fields.encode({"name": sent, "line": sent}), Sample)
    assert sample.name == sample.line == r"a\x1b[2J\n\u202eb"
    sample = fields.decode(fields.encode(dict.fromkeys(("name", "line", "long"), "\x00" * 9000)), Sample)
    assert (len(sample.name), len(sample.line), len(sample.long)) == (255, 2000, 8000)
    assert fields.decode(fields.encode(sample), Sample) == sample  # can be sent on


def test_options_are_flat_and_can_be_shown() -> None:
    sent = {"a": 1, "b": None, "c": "x\n", "d": True, "e": -1.5, "f\x1b": 1 - 2**63}
    shown = {**sent, "c": r"x\n", r"f\x1b": sent["f\x1b"]}
    del shown["f\x1b"]
    assert fields.decode(fields.encode(sent), fields.Options) == shown
    for text in (
        "[]",
        "null",
        '{"a": []}',
        '{"a": {}}',
        '{"a": 1e19}',
        f'{{"a": {HUGE}}}',
        f'{{"a": {2**63}}}',
    ):
        with pytest.raises(fields.MALFORMED):
            fields.decode(text, fields.Options)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "null", "[]", "7", "{} x", '{"a": NaN}', '{"count": 1,}', "[" * 50000, '{"a":' * 50000),
        '{"a": ' + "[" * 50000 + "]" * 50000 + "}",
        b'{"name": "\xff"}',
        b'{"name": "a\x1bb"}',
        b"\xff\xfe{\x00}\x00",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_hostile_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(fields.MALFORMED):
        fields.decode(text, Sample)


def test_names_of_files_that_are_not_unicode_can_be_sent() -> None:
    options = {"path": 'a\udc80"\\', "count": 1}
    assert fields.decode(fields.encode(options), fields.Options) == {"path": r"a\udc80" + '"\\', "count": 1}


def test_numbers_of_other_libraries_are_sent_as_plain_ones() -> None:
    assert fields.decode(fields.encode({"a": np.float64(0.5)}), fields.Options) == {"a": 0.5}
    with pytest.raises(TypeError, match="cannot be sent"):
        fields.encode({"a": object()})


def test_no_number_accepts_what_stands_for_nan() -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(fields.MALFORMED):
            fields.decode(fields.encode(Sample(seconds=value)), Sample)


def test_malformed_value_becomes_one_line_that_names_it() -> None:
    said = r"the plan of rank 0 is malformed \(.*Expected `int`.*count.*\); do all run the same version\?$"
    with pytest.raises(PeerFailedError, match=said) as caught, fields.decoding("the plan of rank 0", peer=0):
        fields.convert({"count": "\x1b\n"}, Sample)
    assert str(caught.value).isprintable()


STATS = StageStats(0, 1, 5, 0.1, 0.1, 0.1, 0.1, 1000.0, 0.5, 300.0, 1000)
PLAN = Plan(
    schedule=Schedule((StagePlan(LayerRange(0, 8), 0, "pi"), StagePlan(LayerRange(8, 16), 1, None, 8))),
    data_rank=0,
    items=10,
    microbatch_size=2,
    max_tokens=None,
    prediction=Prediction(
        (StagePrediction(0.1, 0.2, 1), StagePrediction(0.1, 0.2, None)), 2, 0.2, 0.6, "stage 0"
    ),
    compression=CompressionRequest(),
)
RECORDING = Recording(
    rank=1,
    host="pi",
    lanes=(LaneRecord(LaneId.stage(1), STAGE, 0.5, (Row(0, 1, 2, 100, 32.0, 1.0, (0.1,) * 5),)),),
    links=(LinkRecord(LaneId.link(1), 0, (Transfer(0, 100, 1.0, 2.0),)),),
    decided=(Decided(0, 1.0, 8, None, "x"),),
    energy=EnergyUse("rapl", 1.0, 2.0, ("no energymon",)),
)
WORK = WorkRecord(
    LaneId.stage(0, 1),
    0.0,
    5.0,
    works=(Work(ThreadState.FORWARD, 0.0, 1.0, 0),),
    seconds=((0, ThreadState.FORWARD, 1.0),),
)
WORKER = WorkerRecord(
    Recording(0, "pi", works=(WORK,)),
    batches=(BatchResult(0, 2.3, 1.0),),
    figures=WorkerFigures(peak_rss_mb=300.0, accuracy=(1, 2)),
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


def sent(value: object) -> Any:
    """Return ``value`` as it is sent."""
    return json.loads(fields.encode(value))


FINDING = problem("memory", "too little").of(1)
READERS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "stats": (sent(STATS), fields.reader(StageStats)),
    "plan": (sent(PLAN), lambda text: fields.decode(text, Plan).name(1)),
    "recording": (sent(RECORDING), lambda text: show(Recording.from_text(1, text))),
    "worker": (sent(WORKER), lambda text: to_timeline({0: WorkerRecord.from_text(0, text)})),
    "finding": (sent(FINDING), lambda text: exit_status([fields.decode(text, Finding)])),
    "facts": (FACTS, lambda text: check_facts(fields.decode(text, fields.Options))),
}


@pytest.mark.parametrize("name", READERS)
def test_damaged_message_is_refused_or_parsed(name: str) -> None:
    body, read = READERS[name]
    read(json.dumps(body))
    chance = random.Random(name)
    for _ in range(rounds(400)):
        with contextlib.suppress(RequestError, *fields.MALFORMED):
            read(json.dumps(mutate_message(body, chance)))


def test_plan_survives_the_wire() -> None:
    assert fields.decode(fields.encode(PLAN), Plan) == PLAN
    assert fields.decode(fields.encode(STATS), StageStats) == STATS
