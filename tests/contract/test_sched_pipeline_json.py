"""Test the forms of JSON that sched-pipeline reads and prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sched_program import DEVICES, MIB, TYPES, Cluster, run, with_types, written

from pipeedge.plan import spec_files
from pipeedge.plan.problem import ELEMENT_BYTES


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return written(tmp_path)


# --- problems as JSON -------------------------------------------------------------------------------


def test_a_problem_of_files_has_the_schedule_of_the_files(cluster: Cluster) -> None:
    cluster.write("n.yml", {"f0": {"s0": {"bw_Mbps": 4, "latency_s": 0.25}}})
    cluster.write("devices.yml", {**DEVICES, "ghost": ["g0"]})
    about = ("--data-host", "s0", "--dev-neighbors-file", "n.yml", "--input-bytes", "7")
    problem = cluster.run("--format=problem", *about)
    for options in ((), ("--objective=latency",), ("--link-bits=auto",), ("--remove-host=f1",)):
        asked = ("--format=json", *options)
        there = json.loads(cluster.run(*asked, *about).out)
        here = json.loads(run("--problem=-", *asked, cwd=cluster.folder, text=problem.out).out)
        for answer in (there, here):
            del answer["elapsed_s"]
        assert here == there
        assert here["unused_hosts"][-1]["host"] == "g0"
    again = run("--problem=-", "--format=problem", text=problem.out)
    assert (again.out, again.err) == (problem.out, problem.err)
    (cluster.folder / "problem.json").write_text(problem.out, encoding="utf-8")
    assert (
        cluster.run("--format=yaml", *about).out == run("--problem", str(cluster.folder / "problem.json")).out
    )


BIDS = {
    "batch_size": 1,
    "element_bytes": 1,
    "elements_in": 0,
    "elements_out": [1, 1],
    "weight_bytes": [0, 0],
    "buffers_in": 2,
    "buffers_out": 2,
    "types": [{"name": "t", "mem_bytes": 0, "bw_bytes_per_s": 1, "stage_s": [[3, None], [2]]}],
    "hosts": [{"name": "a", "type": "t"}, {"name": "b", "type": "t"}],
}


PLAIN = [{"name": "t", "mem_bytes": 1, "bw_bytes_per_s": 1}]


def test_a_problem_may_hold_bids_for_stages() -> None:
    done = run("--problem=-", "--format=json", text=json.dumps(BIDS))
    found = json.loads(done.out)
    assert [(stage["host"], stage["layers"]) for stage in found["schedule"]] == [("a", [1, 1]), ("b", [2, 2])]
    assert (found["bottleneck_s"], found["latency_s"]) == (3, 6)
    alone = run("--problem=-", "--format=json", text=json.dumps({**BIDS, "hosts": BIDS["hosts"][:1]}))  # type: ignore[index]
    assert alone.code == 3
    assert json.loads(alone.out) == {"status": "infeasible"}
    assert "no chain of stages that hosts bid for" in alone.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_bytes": None, "types": PLAIN}, "the model has no layers"),
        ({"weight_bytes": [0], "types": PLAIN}, "the model's elements_out: 2 values for 1 layers"),
        ({"batch_size": 0}, "the batch size must be positive"),
        ({"elements_in": -1}, "elements_in: is -1; it must not be negative"),
        ({"elements_in": 1e30}, "elements_in: is 1e+30; numbers may not exceed 1e21"),
        ({"hosts": [{"name": "a", "type": "u"}]}, "hosts: entry 1: type: there is no u in the problem"),
        ({"hosts": [{"name": "a", "type": "t"}] * 2}, "hosts: entry 2: the name a comes twice"),
        ({"hosts": []}, "hosts: lists no host"),
        ({"data_host": "z"}, "data_host: there is no z in the problem"),
        ({"links": [{"from": "a", "to": "a", "bw_bytes_per_s": 1}]}, "link number 0 joins a host to itself"),
        ({"types": [{"name": "t"}]}, "types: entry 1: the key mem_bytes is missing"),
    ],
)
def test_a_bad_problem_is_refused(changes: dict[str, object], message: str) -> None:
    done = run("--problem=-", text=json.dumps({**BIDS, **changes}))
    assert (done.code, done.error[: len("standard input:1: ")]) == (2, "standard input:1: ")
    assert message in done.error


def test_a_problem_takes_the_place_of_the_files() -> None:
    done = run("--problem=-", "-b", "4")
    assert (done.code, done.error) == (2, "-b and --problem: the problem specifies it already; leave out -b")
    done = run("--format=problem", "--explain")
    assert (done.code, done.error[:40]) == (2, "--explain: with --format problem nothing")


# --- the contents of files --------------------------------------------------------------------------


def test_files_are_printed_without_scheduling(cluster: Cluster) -> None:
    about = ("-sm", "models.yml", "-sdt", "device_types.yml", "-sd", "devices.yml")
    files = json.loads(run("--format=files", *about, cwd=cluster.folder).out)
    assert set(files) == {"models", "device_types", "devices"}
    assert files["devices"] == DEVICES
    assert files["models"]["m"]["mem_bytes"] == [MIB, 2 * MIB, MIB, 2 * MIB]
    assert files["device_types"]["unprofiled"] == {
        "mem_bytes": 50 * MIB,
        "bw_bytes_per_s": MIB,
        "profiles": {},
    }
    (profile,) = files["device_types"]["fast"]["profiles"]["m"]
    assert profile == {"batch_size": 8, "dtype": "torch.float32", "time_s": [1, 2, 1, 2]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--format files: give the files to print, such as -sd devices.yml"),
        (
            ["-sd", "devices.yml", "-b", "8"],
            "-b: --format files prints only the contents of files; leave out -b",
        ),
        (["--problem", "-"], "--problem: --format files prints only the contents of files"),
        (["-sm", "none.yml"], "none.yml: no such file"),
    ],
)
def test_options_that_printing_files_cannot_obey_are_refused(
    cluster: Cluster, arguments: list[str], message: str
) -> None:
    done = run("--format=files", *arguments, cwd=cluster.folder)
    assert (done.code, done.out) == (2, "")
    assert message in done.error


@pytest.mark.parametrize("inline", [True, False])
def test_cluster_file_takes_the_place_of_types_and_devices(cluster: Cluster, inline: bool) -> None:
    expected = cluster.run("--format=problem").out
    (cluster.folder / "bed").mkdir()
    cluster.write(
        "bed/CLUSTER.yml",
        {"device_types": TYPES, "devices": DEVICES, "process_MB": 5}
        if inline
        else {"device_types": "../types.yml", "devices": "../hosts.yml"},
    )
    (cluster.folder / "device_types.yml").rename(cluster.folder / "types.yml")
    (cluster.folder / "devices.yml").rename(cluster.folder / "hosts.yml")
    assert cluster.run("--format=problem", "--cluster-file=bed/CLUSTER.yml").out == expected


# --- weights in other number types ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "weights_mb", "expected"),
    [
        ("float32", None, [1, 2, 1, 2]),
        ("bfloat16", None, [0.5, 1, 0.5, 1]),
        ("int8", None, [0.5, 0.6, 0.3, 1]),
        ("int8", [4, 3, 2, 1], [4, 3, 2, 1]),
    ],
)
def test_weights_are_counted_in_their_number_type(
    cluster: Cluster, dtype: str, weights_mb: list[float] | None, expected: list[float]
) -> None:
    profile: dict[str, object] = {"batch_size": 8, "dtype": dtype, "time_s": [1, 2, 1, 2]}
    with_types(cluster, model_profiles={"m": [profile | ({"weights_MB": weights_mb} if weights_mb else {})]})
    problem = json.loads(cluster.run("--format=problem", "-d", dtype).out)
    known = problem["types"][0].get("weight_bytes", problem["weight_bytes"])
    assert [each / MIB for each in known] == pytest.approx(expected)
    (stage,) = json.loads(cluster.run("--format=json", "-d", dtype, "--objective=latency").out)["schedule"]
    buffers = 2 * (1000 * 8 * ELEMENT_BYTES[dtype] + 2000 * 8 * 4)
    assert stage["mem_bytes"] == pytest.approx(sum(known) + buffers)
    kind = spec_files.load_device_types(cluster.folder / "device_types.yml")["fast"].profiles["m"][0]
    model = spec_files.load_models(cluster.folder / "models.yml")["m"]
    assert kind.weights_of(model) == pytest.approx(known)


def test_each_device_type_may_have_its_number_type(cluster: Cluster) -> None:
    types = {
        name: {
            **TYPES[name],
            "model_profiles": {
                "m": [
                    {"batch_size": 8, "dtype": dtype, "time_s": [1, 1, 1, 1]} for dtype in ("float32", "int8")
                ]
            },
        }
        for name in ("fast", "slow")
    }
    cluster.write("device_types.yml", types)
    cluster.write("devices.yml", {"fast": ["f0"], "slow": ["s0"]})
    done = cluster.run(
        "--format=problem", "-d", "float32", "--dtype-of=fast=int8", "--dtype-of=slow=torch.float32"
    )
    problem = json.loads(done.out)
    assert {one["name"]: one["dtype"] for one in problem["types"]} == {"fast": "int8", "slow": "float32"}
    assert problem["element_bytes"] == 4
    only = json.loads(cluster.run("--format=problem", "--dtype-of=fast=float32").out)
    assert [host["name"] for host in only["hosts"]] == ["f0"]
    assert only["warnings"] == ["device_types.yml: no number type is allowed for slow; left out: 1 host"]
    for option, message in (
        ("fast", "'fast' is not of the form TYPE=DTYPE"),
        ("fast=int5", "unknown dtype int5"),
        ("quick=int8", "--dtype-of quick: no such device type in device_types.yml"),
    ):
        done = cluster.run(f"--dtype-of={option}")
        assert done.code == 2
        assert message in done.error
