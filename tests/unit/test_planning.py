"""Test the plan of rank 0: the schedule, disagreements, and what each link carries."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_request import request
from shipped_model import DIGITS

from pipeedge.base.errors import RequestError, ScheduleError, SpecError
from pipeedge.base.fields import MALFORMED, decode, encode
from pipeedge.base.payload import PixelTable, specs_bytes
from pipeedge.base.schedule import BIT_WIDTHS, LayerRange, Schedule, StagePlan
from pipeedge.compress import wire_specs
from pipeedge.models import MODEL_NAMES, Model
from pipeedge.models.registry import find_any
from pipeedge.plan.facts import disagreement, rank_facts, unlikeness
from pipeedge.plan.planning import MEASURED_LINK_S, Plan
from pipeedge.plan.prediction import Prediction, StagePrediction
from pipeedge.plan.schedule_choice import plan_schedule
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.request.scheduling import CLAMPS, LINK_TRANSFORMS, CompressionRequest
from pipeedge.transport.frame import frame_capacity


def planned(line: str, model: Model = DIGITS) -> list[tuple[int, str]]:
    schedule = plan_schedule(request(line), model).schedule
    return [(plan.rank, str(plan.layers)) for plan in schedule.stages]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("0 1", [(0, "1-16")]),
        ("0 2", [(0, "1-8"), (1, "9-16")]),
        ("0 3", [(0, "1-4"), (1, "5-12"), (2, "13-16")]),
        ("0 4", [(0, "1-4"), (1, "5-8"), (2, "9-12"), (3, "13-16")]),
        ("0 2 -r 1,0", [(1, "1-8"), (0, "9-16")]),
        ("0 4 -r 3,1", [(3, "1-8"), (1, "9-16")]),
        ("0 2 -pt 1,3,4,16", [(0, "1-3"), (1, "4-16")]),
        ("0 5 -pt 1,3,4,16 -r 4,2", [(4, "1-3"), (2, "4-16")]),
        ("0 3 -pt 1,16", [(0, "1-16")]),
    ],
)
def test_the_requested_schedule_is_used(line: str, expected: list[tuple[int, str]]) -> None:
    assert planned(line) == expected


@given(st.integers(1, 60), st.sampled_from(MODEL_NAMES))
def test_an_even_split_covers_every_layer_and_uses_every_rank_it_can(world: int, name: str) -> None:
    model = find_any(name)
    schedule = plan_schedule(request(f"0 {world}"), model).schedule
    assert schedule.check(n_layers=model.n_layers, world_size=world) is schedule
    assert len(schedule.stages) == min(world, model.n_layers)
    lengths = [len(plan.layers) for plan in schedule.stages]
    assert max(lengths) - min(lengths) <= 4


def test_hosts_are_named_whatever_made_the_schedule() -> None:
    for line in ("0 2 -H a,b -pt 1,8,9,16 -r 1,0", "0 2 -H a,b -r 1,0"):
        stages = plan_schedule(request(line), DIGITS).schedule.stages
        assert [(plan.rank, plan.host) for plan in stages] == [(1, "b"), (0, "a")]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("0 2 -pt 1,8,9,17", "9-17 goes beyond the model: its layers are 1 to 16"),
        ("0 2 -pt 1,8,9,15", "layer 16 is covered by no stage: the model's layers are 1 to 16"),
        ("0 1 -pt 1,8,9,16", "2 stages need as many ranks, the world has 1"),
        ("0 2 -pt 1,8,9,16 -r 0,2", "^-r/--rank-order 0,2: rank 2 is outside the world: ranks are 0 to 1"),
        ("0 2 -pt 1,8,9,16 -r 0,-1", "rank -1 is outside the world"),
        ("0 2 -H a,b -pt 1,8,9,16 -r 0,2", "rank 2 is outside the world"),
        ("0 2 -r 0,2", "^-r/--rank-order 0,2: rank 2 is outside the world"),
        ("0 2 -r 0,0", "^-r/--rank-order 0,0: rank 0 is given 2 stages; a rank runs one$"),
        ("0 2 -r 0,1,2", "^-r/--rank-order 0,1,2: rank 2 is outside the world: ranks are 0 to 1"),
        ("0 2 -H a,b -pt 1,5,6,10,11,16", "outside the world|3 stages"),
        ("0 2 -pt 1,8,9", "pairs of first and last layer; 3 numbers"),
        ("0 2 -pt 1,8,10,16", "layer 9 is covered by no stage"),
        ("0 2 -pt 1,8,8,16", "overlaps"),
        ("0 2 -pt 2,16", "layer 1 is covered by no stage"),
        ("0 2 -pt 0,16", r"\[0, 16\] is not a range"),
        ("0 2 -pt 9,16,1,8", "out of order: 1-8 comes after 9-16"),
        ("0 2 -pt 8,1", r"\[8, 1\] is not a range"),
        ("0 2 -pt 1,8,9,16 -r 0", "^-r/--rank-order 0: 1 rank for 2 stages"),
        ("0 2 -pt 1,8,9,16 -r 1,1", "^-r/--rank-order 1,1: rank 1 is given 2 stages"),
        ("0 2 -pt 1,8,9,16 -q 8", r"1 bit width \(-q\) for 2 stages; give one for each"),
        ("0 2 -pt 1,8,9,16 -q 8,0,0", r"3 bit widths \(-q\) for 2 stages"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(line: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        planned(line)


@pytest.mark.parametrize("partition", ["1,8,10,16", "1,8,8,16", "2,16", "0,16", "9,16,1,8", "1,8", "1,20"])
def test_invalid_partition_error_lists_the_layers(partition: str) -> None:
    with pytest.raises(ScheduleError, match=r"layers (of vit-digits )?are 1 to 16"):
        planned(f"0 2 -pt {partition}")


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s.yml"
    path.write_text("- b: [1, 5]\n- a: [6, 16]\n")
    assert planned(f"0 2 --schedule-file {path} -H a,b") == [(1, "1-5"), (0, "6-16")]
    with pytest.raises(ScheduleError, match="no rank"):
        planned(f"0 2 --schedule-file {path}")
    with pytest.raises(ScheduleError, match="has no rank"):
        planned(f"0 2 --schedule-file {path} -H a,c")
    path.write_text("- 0: [1, 5]\n- 3: [6, 16]\n")
    with pytest.raises(ScheduleError, match="rank 3 is outside the world"):
        planned(f"0 2 --schedule-file {path}")
    path.write_text("- 0: [1, 5\n")
    with pytest.raises(SpecError):
        planned(f"0 2 --schedule-file {path}")
    with pytest.raises(SpecError, match=r"missing\.yml"):
        planned("0 2 --schedule-file missing.yml")


# --- agreement --------------------------------------------------------------------------------------


def facts(**changed: Any) -> dict[str, Any]:
    told = rank_facts(request("0 3 -m vit-digits"), DIGITS, weights="abc", items=None)
    assert set(changed) <= set(told)
    return {**told, **changed}


def test_facts_are_plain_enough_for_the_hub() -> None:
    for value in facts().values():
        assert value is None or isinstance(value, str | int)


def test_ranks_that_agree_report_nothing() -> None:
    assert disagreement({rank: facts() for rank in range(3)}) is None
    # The data rank alone knows the input; a rank without weights may not need any.
    assert disagreement({0: facts(items=5, weights=None), 1: facts(), 2: facts()}) is None


@pytest.mark.parametrize(
    ("key", "other", "what"),
    [
        ("version", "9.9", "the version of PipeEdge"),
        ("common option the model (-m)", "bert-base-uncased", "the model"),
        ("architecture", "vit of 1 blocks", "the configuration of the model"),
        ("weights", "def", "the weights"),
        ("common option the microbatch size (-u)", 3, "the microbatch size"),
        ("common option the data rank (-D)", 2, "the data rank"),
        ("common option the transport (-c)", "rpc", "the transport"),
    ],
)
def test_the_first_disagreement_names_both_ranks_and_values(key: str, other: object, what: str) -> None:
    same = {key: "bert-large-uncased"} if "model (" in key else {}
    line = disagreement({0: facts(**same), 1: facts(**same), 2: facts(**{key: other})})
    assert line is not None
    assert line.startswith(f"ranks 0 and 2 disagree on {what}")
    assert str(other) in line
    assert "; " in line  # and what to do


def test_unlike_versions_of_torch_work_together_with_a_notice() -> None:
    told = {0: facts(), 1: facts(torch="2.10.0", processor="aarch64"), 2: facts()}
    assert disagreement(told) is None
    line = unlikeness(told)
    assert line is not None
    assert re.search(
        r"^the ranks are not alike \(torch \S+ on \w+: ranks 0, 2; torch 2\.10\.0 on aarch64: rank 1\): ",
        line,
    )
    assert unlikeness({0: facts(), 1: facts()}) is None
    assert unlikeness({0: facts(), 1: facts(torch="2.9.1")}) is not None


@pytest.mark.parametrize(
    ("version", "works"), [("2.8.1", False), ("1.13.1", False), ("2.9.0", True), ("2.10.0", True)]
)
def test_torch_older_than_the_oldest_supported_is_refused(version: str, works: bool) -> None:
    said = disagreement({0: facts(), 1: facts(torch=version)})
    assert said == (None if works else f"rank 1 has torch {version}: install 2.9 or newer")


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("left", "what"),
    [
        (set(), "the version of PipeEdge"),
        ({"version", "torch", "memory_bytes"}, "the microbatch size (-u)"),
        (facts().keys() - {"weights"}, "the weights (-M)"),
    ],
    ids=["nothing", "little", "no weights"],
)
def test_rank_that_does_not_state_what_is_compared_does_not_agree(
    rank: int, left: set[str], what: str
) -> None:
    told = {each: facts() for each in range(3)}
    told[rank] = {key: value for key, value in facts().items() if key in left}
    assert (
        disagreement(told)
        == f"rank {rank} does not state {what}: install the same version of PipeEdge on all"
    )


def test_options_may_be_given_to_every_rank_or_to_the_one_that_obeys_them() -> None:
    plan = "-pt 1,8,9,16 -r 0,1 -q 8,0 --dtype float32 --clamp laplace --link-transform off -H a,b,c"
    data = "-D 2 -b 9 --seed 3 --output o.csv --report r.json --trace t.json --check 4 --skip-bad-input"
    own = {0: plan, 1: "-d cpu --timeout 9 --metrics-dir m --window-size 3 --quiet", 2: data}
    assert disagreement({rank: stated(rank, f"-D 2 {line}") for rank, line in own.items()}) is None
    assert disagreement({rank: stated(rank, f"{plan} {data}") for rank in range(3)}) is None
    # The same in other words is the same.
    words = {0: "-q 8,0 --dtype torch.float32", 1: "--quant=8,0 --dtype float32", 2: ""}
    assert disagreement({rank: stated(rank, line) for rank, line in words.items()}) is None


def stated(rank: int, line: str, environment: Environment = Environment()) -> dict[str, Any]:  # noqa: B008
    asked = parse_runtime(f"{rank} 3 -m vit-digits {line}".split(), environment).request
    return rank_facts(asked, DIGITS, weights="abc", items=None)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("-c rpc", "the transport (-c): p2p and rpc"),
        ("-u 3", "the microbatch size (-u): 8 and 3"),
        ("-D 1", "the data rank (-D): 0 and 1"),
        ("-m bert-base-uncased", None),  # what rank_facts says of the model is its own name
    ],
)
def test_options_that_must_be_the_same_are_compared_as_given(option: str, says: str | None) -> None:
    own = {rank: stated(rank, option if rank == 2 else "") for rank in range(3)}
    line = f"ranks 0 and 2 disagree on {says}; start all with the same"
    assert disagreement(own) == (None if says is None else line)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({1: "--output o.csv"}, "rank 1 was given --output o.csv, rank 0 was not; rank 0 is the data rank"),
        ({0: "-D 2 --report r.json"}, "rank 0 was given --report r.json, rank 2 was not; rank 2 is the data"),
        ({1: "--trace t.json"}, "rank 1 was given --trace t.json, rank 0 was not"),
        ({2: "--input a.png b.png"}, "rank 2 was given --input a.png b.png, rank 0 was not"),
        (
            {0: "--input a.png", 1: "--input b.png"},
            "disagree on --input: a.png and b.png; rank 0 is the data",
        ),
        ({1: "--dataset-name CoLA"}, "rank 1 was given --dataset-name CoLA, rank 0 was not"),
        ({1: "--skip-bad-input"}, "rank 1 was given --skip-bad-input, rank 0 was not"),
        ({1: "--seed 0"}, "rank 1 was given --seed 0, rank 0 was not"),
        ({1: "-b 64"}, "rank 1 was given -b/--batch-size 64, rank 0 was not"),
        ({0: "-b 5", 2: "-b 6"}, "ranks 0 and 2 disagree on -b/--batch-size: 5 and 6"),
        ({0: "-D 1 -b 5", 1: "-b 6"}, "0 and 1 disagree on -b/--batch-size: 5 and 6; rank 1 is the data"),
        (
            {0: "-pt 1,8,9,16", 1: "-pt 1,4,5,16"},
            "ranks 0 and 1 disagree on -pt/--partition: 1,8,9,16 and 1,4,5,16; rank 0 decides the schedule: "
            "give rank 1 the same, or leave it out there",
        ),
        (
            {1: "-pt 1,8,9,16"},
            "rank 1 was given -pt/--partition 1,8,9,16, rank 0 was not; rank 0 decides the schedule: "
            "give it to rank 0",
        ),
        ({0: "-D 2", 2: "-q 8,0,0"}, "rank 2 was given -q/--quant 8,0,0, rank 0 was not"),
        ({0: "--dtype int8", 1: "--dtype bfloat16"}, "disagree on --dtype: int8 and bfloat16"),
        ({0: "--clamp none", 1: "--clamp mse"}, "disagree on --clamp: none and mse"),
        (
            {0: "--link-transform off", 1: "--link-transform auto"},
            "disagree on --link-transform: off and auto",
        ),
        ({1: "--window-size 5"}, r"rank 1 was given --window-size \(WINDOW_SIZE\) 5, rank 0 was not"),
    ],
)
def test_no_option_is_lost_on_a_rank_that_does_not_obey_it(own: dict[int, str], says: str) -> None:
    data = "-D 2 " if "-D 2" in own.get(0, "") else "-D 1 " if "-D 1" in own.get(0, "") else ""
    line = disagreement({rank: stated(rank, data + own.get(rank, "")) for rank in range(3)})
    assert line is not None
    assert re.search(says, line), line


def test_the_environment_of_one_rank_is_not_lost_either() -> None:
    own = Environment(variables={"ADAPTIVE_QUANT": "auto"})
    line = disagreement({0: stated(0, ""), 1: stated(1, "", own), 2: stated(2, "")})
    assert line is not None
    assert line.startswith("rank 1 was given --adaptive (ADAPTIVE_QUANT) auto, rank 0 was not")
    assert disagreement({rank: stated(rank, "", own) for rank in range(3)}) is None


def test_thousands_of_input_files_fit_into_a_message() -> None:
    many = " ".join(f"photos/{number}.jpg" for number in range(5000))
    told = {rank: stated(rank, f"--input {many}") for rank in range(2)}
    assert len(json.dumps(told[0])) < 2000
    assert disagreement(told) is None
    assert disagreement({**told, 1: stated(1, f"--input {many} last.jpg")}) is not None


# --- the plan ---------------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    world = draw(st.integers(1, 6))
    ranks = draw(st.permutations(range(world)))[: draw(st.integers(1, world))]
    cuts = sorted(draw(st.sets(st.integers(1, 15), min_size=len(ranks) - 1, max_size=len(ranks) - 1)))
    bounds = [0, *cuts, 16]
    stages = tuple(
        StagePlan(
            LayerRange(bounds[index], bounds[index + 1]),
            rank,
            draw(st.none() | st.just("pi")),
            draw(st.sampled_from([0, 0, 4, 16])),
        )
        for index, rank in enumerate(ranks)
    )
    promise = StagePrediction(1.6, draw(st.sampled_from([0.0, 0.0005, 0.2])), None)
    return Plan(
        schedule=Schedule(stages),
        data_rank=draw(st.integers(0, world - 1)),
        items=draw(st.none() | st.integers(1, 100)),
        microbatch_size=draw(st.integers(1, 20)),
        max_tokens=None,
        prediction=draw(
            st.none() | st.just(Prediction((promise,) * len(stages), 8, 1.6, 1.6 * len(stages), "stage 0"))
        ),
        compression=CompressionRequest(
            clamp=draw(st.sampled_from(CLAMPS)),
            link_transform=draw(st.sampled_from(LINK_TRANSFORMS)),
            adaptive=draw(st.sampled_from([None, "auto"])),
        ),
        pixel_table=draw(st.sampled_from([None, PixelTable(torch.zeros(3, 256)).to_text()])),
    )


@settings(max_examples=80)
@given(plans())
def test_a_plan_survives_the_wire_and_joins_its_ends(plan: Plan) -> None:
    assert decode(encode(plan), Plan) == plan
    links = plan.links(DIGITS)
    assert len(links) == len(plan.schedule.stages) + 1
    assert links[0].source == links[-1].destination == plan.data_rank
    assert [link.destination for link in links[:-1]] == [link.source for link in links[1:]]
    assert tuple(link.destination for link in links[:-1]) == plan.schedule.ranks
    items = plan.microbatch_size if plan.items is None else min(plan.items, plan.microbatch_size)
    assert specs_bytes(links[0].specs) == items * 64 * (4 if plan.pixel_table is None else 1)
    for number, (link, stage) in enumerate(zip(links[1:], plan.schedule.stages, strict=True)):
        specs = DIGITS.payload_specs(stage.layers.stop, items)
        adapts = plan.compression.adaptive is not None and number < len(plan.schedule.stages) - 1
        promised = plan.prediction is not None and plan.prediction.stages[number].link_s >= MEASURED_LINK_S
        assert link.receipts == (adapts or promised)
        if not adapts:
            assert link.specs == (wire_specs(specs, stage.quant_bits) if stage.quant_bits else specs)
            continue
        sizes = plan.sizes(DIGITS, number).bytes_at
        assert 2 in sizes
        for bits in (0, *BIT_WIDTHS):  # whatever is decided later must fit, and be worth it
            size = frame_capacity(wire_specs(specs, bits))
            assert sizes.get(bits) == (size if bits == 0 or size < sizes[0] else None)
            assert sizes.get(bits, 0) <= frame_capacity(link.specs)
    assert set(plan.participants) == {plan.data_rank, *plan.schedule.ranks}
    # Between two ranks there is at most one link each way: that is what counts per peer rely on.
    pairs = [(link.source, link.destination) for link in links if link.source != link.destination]
    assert len(set(pairs)) == len(pairs)
    for rank in range(8):
        assert (plan.name(rank) is None) == (rank not in plan.participants)


def test_a_plan_of_another_program_is_refused() -> None:
    plan = Plan(Schedule((StagePlan(LayerRange(0, 16), 0),)), 0, 1, 1, None, None)
    sent = json.loads(encode(plan))
    for body in ({}, {"schedule": None}, {**sent, "schedule": []}, {**sent, "pixel_table": "x"}):
        with pytest.raises((RequestError, *MALFORMED)):
            decode(json.dumps(body), Plan)
    assert dataclasses.replace(plan, items=5).participants == (0,)


def test_a_single_layer_is_no_range_in_a_sentence() -> None:
    schedule = Schedule.from_partition([1, 47, 48, 48]).with_quant_bits([8, 0])
    assert list(schedule.lines()) == [
        "stage 0: layers 1-47 on rank 0, 8 bits out",
        "stage 1: layer 48 on rank 1",
    ]
