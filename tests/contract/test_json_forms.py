"""Test that sched-pipeline and Python read and write the JSON that docs/file-formats.md describes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from sched_program import Cluster, run, written

from pipeedge.plan import scheduler
from pipeedge.plan.problem import HostKind, HostLink, LayerSizes, Problem

Form = Mapping[str, tuple[str, bool]]
"""Kind of each key, and whether it may be missing."""

KINDS = {"text": str, "number": (int, float), "numbers": list, "list": list, "object": dict, "flag": bool}


@cache
def form(title: str) -> Form:
    """Return the keys of a table in docs/file-formats.md."""
    page = (ROOT / "docs" / "file-formats.md").read_text()
    chapter = page.partition(f"\n### {title}\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+)(, optional)? \|", chapter, re.MULTILINE)
    assert rows, title
    return {key: (kind, bool(optional)) for key, kind, optional in rows}


def check(body: Mapping[str, Any], *titles: str) -> None:
    """Check that an object has the keys of one or several tables, and no others."""
    known = {key: row for title in titles for key, row in form(title).items()}
    for key, value in body.items():
        assert key in known, (titles, key)
        kind, optional = known[key]
        if value is None:
            assert optional or kind == "number", (titles, key)
        else:
            assert isinstance(value, KINDS[kind]), (titles, key, value)
    for key, (_, optional) in known.items():
        assert optional or key in body, (titles, key)


def check_problem(body: Mapping[str, Any]) -> None:
    """Check a problem with everything in it."""
    settings = body.get("settings") or [body]
    check(body, *(["A problem"] if "settings" in body else ["A problem", "A setting"]))
    for setting in settings:
        if "settings" in body:
            check(setting, "A setting")
        for kind in setting["types"]:
            check(kind, "A device type")
    for link in body.get("links", ()):
        check(link, "A link")
    for width in body.get("widths", ()):
        check(width, "A width")


def check_answer(body: Mapping[str, Any]) -> None:
    """Check an answer with its stages."""
    check(body, "An answer")
    for stage in body["schedule"]:
        check(stage, "A stage of an answer")


def least(body: Mapping[str, Any], *titles: str, keep: Iterable[str] = ()) -> dict[str, Any]:
    """Return an object without the keys that may be missing."""
    known = {key: row for title in titles for key, row in form(title).items()}
    return {key: value for key, value in body.items() if not known[key][1] or key in keep}


PROFILE = {
    "batch_size": 8,
    "dtype": "float32",
    "time_s": [1, 2, 1, 2],
    "receive_s": [0.1] * 4,
    "send_s": [0.1] * 4,
    "activations_MB": [1] * 4,
    "weights_MB": [1, 2, 1, 2],
    "feed_s": 0.1,
    "collect_s": 0.1,
    "overhead_s": 0.05,
    "busy_W": 20,
    "threads": 2,
    "kernels": "torch",
    "handling": {"p2p": {"receive_s": 0.1, "receive_s_per_MB": 0, "send_s": 0.1, "send_s_per_MB": 0}},
}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    made = written(tmp_path)
    int8 = {**PROFILE, "dtype": "int8", "agreement": 0.99}
    fast = {"bw_Mbps": 80, "mem_MB": 100, "idle_W": 5, "model_profiles": {"m": [PROFILE, int8]}}
    made.write("device_types.yml", {"fast": fast})
    made.write("devices.yml", {"fast": ["f0", "f1"], "ghost": ["g0"]})
    made.write("n.yml", {"f0": {"f1": {"bw_Mbps": 4, "latency_s": 0.25}}})
    model = {"layers": 4, "mem_MB": [1, 2, 1, 2], "parameters_in": 1000, "parameters_out": [1000, 2000]}
    bits = {"shared_with": [0, 0, 1, 2], "agreement_at_bits": {8: [1, 0.99, 1]}}
    made.write("models.yml", {"m": {**model, **bits}})
    return made


ALL = ("--data-host=f0", "--dev-neighbors-file=n.yml", "--input-bytes=7")
PLAIN, JOINT = (), ("--plan=auto", "--min-agreement=0.9")


@pytest.mark.parametrize("how", [PLAIN, JOINT], ids=["plain", "joint"])
def test_program_prints_the_keys_of_the_tables(cluster: Cluster, how: tuple[str, ...]) -> None:
    problem = json.loads(cluster.run("--format=problem", *ALL, *how).out)
    check_problem(problem)
    asked = ("--explain", "--losses", "--add-host=fast=1", "--objective=latency")
    check_answer(json.loads(cluster.run("--format=json", *ALL, *how, *asked).out))


def test_energy_is_in_the_tables(cluster: Cluster) -> None:
    check_answer(json.loads(cluster.run("--format=json", *ALL, *JOINT, "--objective=energy").out))


def test_program_does_without_optional_keys(cluster: Cluster) -> None:
    whole = json.loads(cluster.run("--format=problem", *ALL).out)
    some = least(whole, "A problem", "A setting")
    some["types"] = [least(kind, "A device type") for kind in some["types"]]
    check_answer(json.loads(run("--problem=-", "--format=json", text=json.dumps(some)).out))
    jointly = json.loads(cluster.run("--format=problem", *ALL, *JOINT).out)
    some = least(jointly, "A problem", keep=("settings", "widths"))
    some["settings"] = [least(one, "A setting", keep=("dtype",)) for one in some["settings"]]
    check_answer(json.loads(run("--problem=-", "--plan=auto", "--format=json", text=json.dumps(some)).out))


@pytest.mark.parametrize("title", ["A problem", "A device type"])
def test_program_names_a_required_key_that_is_missing(cluster: Cluster, title: str) -> None:
    whole = json.loads(cluster.run("--format=problem", *ALL).out)
    for key, (_, optional) in form(title).items():
        if optional:
            continue
        whole_part = whole if title == "A problem" else whole["types"][0]
        part = {name: value for name, value in whole_part.items() if name != key}
        body = part if title == "A problem" else {**whole, "types": [part]}
        done = run("--problem=-", text=json.dumps(body))
        assert (done.code, f"the key {key} is missing" in done.error) == (2, True)


def test_python_writes_the_keys_of_the_tables() -> None:
    ones = (1.0, 1.0)
    kind = HostKind("k", 1e9, 1e6, ones, ones, ones, ones, ones, dtype="float32")
    bids = HostKind("b", 0.0, 1e6, stage_s=((1.0, float("inf")), (2.0,)))
    problem = Problem(
        layers=LayerSizes((1.0, 1.0), 1.0, (1.0, 1.0), 4.0, 3.0, 4.0, (0, 1)),
        kinds=(kind, bids),
        hosts={"a": "k", "c": "b"},
        links=(HostLink("a", "c", 1e6, 0.1),),
        data_host="a",
    )
    check_problem(json.loads(json.dumps(problem.to_body())))


def test_python_reads_what_the_tables_promise(cluster: Cluster) -> None:
    problem = cluster.run("--format=problem", *ALL).out
    answer = json.loads(run("--problem=-", "--format=json", text=problem).out)
    some = least(answer, "An answer", keep=("gap",))
    some["schedule"] = [least(stage, "A stage of an answer") for stage in some["schedule"]]
    assert scheduler.read_answer(some, ["f0", "f1"]).schedule.stages


def test_program_prints_bids_as_described(cluster: Cluster) -> None:
    bids = json.loads(cluster.run("--format=bids", "-b", "8").out)
    check(bids, "Bids")
    assert [one["type"] for one in bids["bids"]] == ["fast"]
    assert [len(row) for row in bids["bids"][0]["stage_s"]] == [4, 3, 2, 1]
    assert bids["cut_bytes"] == [8 * 4 * elements for elements in (1000, 1000, 2000, 1000, 2000)]


# --- given plans ------------------------------------------------------------------------------------


def test_given_plan_costs_what_the_search_says(cluster: Cluster) -> None:
    for how in (PLAIN, JOINT):
        best = json.loads(cluster.run("--format=json", *ALL, *how).out)
        cluster.write("best.yml", cluster.run(*ALL, *how).out)
        size = (f"--batch-sizes={int(best['batch_size'])}",) if how else ()
        given = json.loads(cluster.run("--format=json", "--evaluate=best.yml", *ALL, *how, *size).out)
        check_answer(given)
        assert (given["status"], given["fits"]) == ("given", True)
        for key in ("schedule", "bottleneck", "bottleneck_s", "latency_s", "loss", "feed_s"):
            assert given[key] == best[key], key


def test_plans_of_a_problem_are_evaluated_under_its_conditions(cluster: Cluster) -> None:
    problem = json.loads(cluster.run("--format=problem", *ALL).out)
    stages = [{"host": "f0", "layers": [1, 2], "quant_bits": 8}, {"host": "f1", "layers": [3, 4]}]
    alone = [{"host": "f1", "layers": [1, 4]}]
    for one in (*stages, *alone):
        check(one, "A stage of a given plan")

    def answers(**conditions: Any) -> list[dict[str, Any]]:
        check(conditions, "Conditions")
        body = {**problem, "conditions": {**conditions, "plans": [stages, alone]}}
        found: list[dict[str, Any]] = json.loads(run("--problem=-", text=json.dumps(body)).out)["plans"]
        return found

    (before, single), (after, slower) = (
        answers(),
        answers(
            hosts=[{"host": "f1", "slowness": 3, "occupied_bytes": 98 * 2**20}],
            links=[{"from": "f0", "to": "f1", "slowness": 2}],
            data_work={"feed_s": 0.5, "collect_s": 0.25},
        ),
    )
    for answer in (before, single, after, slower):
        check_answer(answer)
    assert after["schedule"][0]["compute_s"] == before["schedule"][0]["compute_s"]
    assert after["schedule"][1]["compute_s"] == pytest.approx(3 * before["schedule"][1]["compute_s"])
    assert after["schedule"][0]["link_out_s"] == pytest.approx(2 * before["schedule"][0]["link_out_s"])
    assert after["schedule"][0]["data_s"] == 0.75
    assert single["fits"]
    assert not slower["fits"]
    assert slower["schedule"][0]["compute_s"] == pytest.approx(3 * single["schedule"][0]["compute_s"])


def test_conditions_of_a_file_count_in_a_search(cluster: Cluster) -> None:
    cluster.write("slow.yml", {"hosts": [{"host": "f1", "slowness": 10}]})
    found = json.loads(cluster.run("--format=json", "--conditions=slow.yml").out)
    assert [stage["host"] for stage in found["schedule"]] == ["f0"]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("p.yml", [{"f0": [1, 3]}], ["--evaluate=p.yml"], "the plan: layer 4 is in no stage"),
        ("p.yml", [{"f0": [1, 2]}, {"f0": [3, 4]}], ["--evaluate=p.yml"], "serves more than one stage"),
        ("p.yml", [{"f9": [1, 4]}], ["--evaluate=p.yml"], "the plan names the host f9; there are: f0, f1"),
        ("p.yml", [{"f0": [4, 1]}], ["--evaluate=p.yml"], "are not the first and the last layer of a stage"),
        ("p.yml", [], ["--evaluate=p.yml"], "p.yml:1: lists no stage"),
        ("p.yml", [{"f0": [1, 4]}], ["--evaluate=p.yml", "--losses"], "--losses and --evaluate: "),
        ("c.yml", {"hosts": [{"host": "f9"}]}, ["--conditions=c.yml"], "there is no f9 in the problem"),
        (
            "c.yml",
            {"hosts": [{"host": "f0", "slowness": 0}]},
            ["--conditions=c.yml"],
            "c.yml: the slowness of the host f0 must be above 0",
        ),
    ],
)
def test_wrong_plans_and_conditions_are_refused(
    cluster: Cluster, name: str, content: object, options: list[str], message: str
) -> None:
    cluster.write("devices.yml", {"fast": ["f0", "f1"]})
    cluster.write(name, content)
    done = cluster.run(*options)
    assert done.code == 2
    assert message in done.error


# --- decoders ---------------------------------------------------------------------------------------


def write_decoder(cluster: Cluster, many: Sequence[str] = ("many_start_s", "many_row_s")) -> None:
    ends = dict.fromkeys(("fixed_s", "start_s", "row_s", "feed_s", "feed_row_s", "mem_MB"), 0.1)
    lists = ("fixed_s", "start_s", "row_s", "position_s", "chunk_position_s", "cache_bytes")
    steps = {**{name: [0.01] * 4 for name in (*lists, *many)}, "ends": ends}
    profile = {**PROFILE, "batch_size": 1, "steps": steps}
    kind = {"bw_Mbps": 80, "mem_MB": 100, "model_profiles": {"m": [profile]}}
    cluster.write("device_types.yml", {"fast": kind})
    cluster.write("devices.yml", {"fast": ["f0", "f1"]})
    model = {"layers": 4, "mem_MB": [1] * 4, "parameters_in": 10, "parameters_out": [10], "context": 64}
    cluster.write("models.yml", {"m": model})


@pytest.mark.parametrize(("given", "other"), [("many_start_s", "many_row_s"), ("many_row_s", "many_start_s")])
def test_a_line_for_many_rows_has_two_numbers(cluster: Cluster, given: str, other: str) -> None:
    write_decoder(cluster, many=(given,))
    done = cluster.run()
    assert done.code == 2
    assert f"has {given} and needs {other}" in done.error


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_the_texts_of_decoders_are_in_the_tables(cluster: Cluster, objective: str) -> None:
    write_decoder(cluster)
    asked = (f"--objective={objective}", "--max-first-token=100", "--streams=3")
    problem = json.loads(cluster.run("--format=problem", *asked).out)
    check(problem, "A problem")
    check(problem["texts"], "Texts")
    for one in (*problem["asides"], *problem.get("either", ())):
        check(one, "An aside")
        for setting in one["settings"]:
            check(setting, "A setting")
            for kind in setting["types"]:
                check(kind, "A device type")
    answer = json.loads(cluster.run("--format=json", *asked).out)
    check_answer(answer)
    again = json.loads(
        run("--problem=-", f"--objective={objective}", "--format=json", text=json.dumps(problem)).out
    )
    for key in ("text", "schedule", "bottleneck_s"):
        assert again[key] == answer[key], key
    costs = scheduler.read_answer(answer, ["f0", "f1"]).costs
    assert costs.text is not None
    assert costs.prediction(None).text is not None
