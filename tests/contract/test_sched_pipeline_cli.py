"""Test sched-pipeline as a program: exit status, messages and schedules for files and arguments."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from pipeedge.base.errors import SpecError
from pipeedge.base.schedule import LayerRange, StagePlan
from pipeedge.models.dtypes import find_dtype, stream_dtype
from pipeedge.plan import spec_files
from pipeedge.plan.problem import ELEMENT_BYTES
from pipeedge.plan.sched_pipeline import find_executable
from pipeedge.simulate.cluster import Workload

VIT_BASE = "google/vit-base-patch16-224"
VIT_LARGE = "google/vit-large-patch16-224"
MIB = 2**20


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Last line on standard error; an error must be one line after the warnings."""
        lines = self.err.splitlines()
        assert lines, "nothing on standard error"
        assert all(line.startswith("sched-pipeline: warning: ") for line in lines[:-1]), self.err
        assert lines[-1].startswith("sched-pipeline: error: "), self.err
        assert self.out == ""
        return lines[-1].removeprefix("sched-pipeline: error: ")


def run(*arguments: str, cwd: Path = ROOT, text: str = "") -> Run:
    done = subprocess.run(
        [find_executable(), *arguments],
        cwd=cwd,
        input=text,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr)


MODELS = {"m": {"layers": 4, "mem_MB": [1, 2, 1, 2], "parameters_in": 1000, "parameters_out": [1000, 2000]}}
TYPES = {
    "fast": {
        "bw_Mbps": 80,
        "mem_MB": 100,
        "model_profiles": {"m": [{"batch_size": 8, "dtype": "torch.float32", "time_s": [1, 2, 1, 2]}]},
    },
    "slow": {
        "bw_Mbps": 8,
        "mem_MB": 50,
        "model_profiles": {"m": [{"batch_size": 8, "dtype": "torch.float32", "time_s": [2, 4, 2, 4]}]},
    },
    "unprofiled": {"bw_Mbps": 8, "mem_MB": 50, "model_profiles": None},
}
DEVICES = {"fast": ["f0", "f1"], "slow": ["s0"], "unprofiled": []}


@dataclass(frozen=True)
class Cluster:
    """A folder with the three files under their default names."""

    folder: Path

    def write(self, name: str, content: object) -> None:
        text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        (self.folder / name).write_text(text, encoding="utf-8")

    def run(self, *arguments: str) -> Run:
        return run("-m", "m", *arguments, cwd=self.folder)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    made = Cluster(tmp_path)
    made.write("models.yml", MODELS)
    made.write("device_types.yml", TYPES)
    made.write("devices.yml", DEVICES)
    return made


def with_types(cluster: Cluster, **changes: object) -> None:
    cluster.write("device_types.yml", {"fast": {**TYPES["fast"], **changes}})
    cluster.write("devices.yml", {"fast": ["f0", "f1"]})


# --- answers ----------------------------------------------------------------------------------------


def recomputed_bottleneck(
    schedule: Sequence[Mapping[str, Sequence[int]]], model: str, data_host: str | None = None
) -> float:
    """Compute the period of a schedule from the repository's files."""
    models, types, devices = (
        yaml.safe_load((ROOT / name).read_text())
        for name in ("models.yml", "device_types.yml", "devices.yml")
    )
    type_of = {host: types[name] for name, hosts in devices.items() for host in hosts}
    sizes = [models[model]["parameters_in"], *models[model]["parameters_out"]]
    stages = [next(iter(stage.items())) for stage in schedule]

    def link(one: str, other: str, cut: int) -> float:
        if one == other:
            return 0.0
        return sizes[cut] * 8 * 4 / (min(type_of[one]["bw_Mbps"], type_of[other]["bw_Mbps"]) * MIB / 8)

    costs = []
    for host, (first, last) in stages:
        (profile,) = type_of[host]["model_profiles"][model]
        costs.append(sum(profile["time_s"][first - 1 : last]))
        if "receive_s" in profile and (first > 1 or data_host not in (None, host)):
            costs[-1] += profile["receive_s"][first - 1]
        if "send_s" in profile and (last < len(sizes) - 1 or data_host not in (None, host)):
            costs[-1] += profile["send_s"][last - 1]
    costs += [link(a[0], b[0], a[1][1]) for a, b in itertools.pairwise(stages)]
    if data_host is not None:
        costs += [link(data_host, stages[0][0], 0), link(stages[-1][0], data_host, len(sizes) - 1)]
    return max(costs)


@pytest.mark.parametrize(("model", "layers", "best"), [(VIT_BASE, 48, 1.548760), (VIT_LARGE, 96, 5.042833)])
def test_the_examples_are_scheduled_at_their_optimum(model: str, layers: int, best: float) -> None:
    done = run("-m", model)
    assert (done.code, done.err) == (0, "")
    schedule = yaml.safe_load(done.out)
    bounds = [bound for stage in schedule for bound in next(iter(stage.values()))]
    assert bounds[0] == 1
    assert bounds[-1] == layers
    assert all(next_first == last + 1 for last, next_first in zip(bounds[1:-1:2], bounds[2::2], strict=True))
    assert recomputed_bottleneck(schedule, model) == pytest.approx(best, abs=5e-7)


def test_the_output_has_the_form_of_the_seed() -> None:
    lines = run().out.splitlines()
    assert lines[0] == "- mb-0: [1, 5]"
    assert len(lines) == 8


@pytest.mark.parametrize(
    "arguments",
    [
        ["-sm", "models.yml", "-sdt", "device_types.yml", "-sd", "devices.yml"],
        ["-M", "models.yml", "-T", "device_types.yml", "-D", "devices.yml"],
        ["--models-file=models.yml", "--dev-types-file", "device_types.yml", "--dev-file=devices.yml"],
        ["-m", VIT_BASE, "-b", "8", "-d", "torch.float32", "-i", "2", "-o", "2"],
        [f"-m{VIT_BASE}", "-b8", "-dfloat32", "-i2", "-o2"],
        [
            "--model-name",
            VIT_BASE,
            "--batch-size",
            "8",
            "--dtype",
            "float32",
            "--buffers-in=2",
            "--buffers-o=2",
        ],
        ["--objective", "throughput", "--time-limit", "5", "--format", "yaml"],
    ],
)
def test_every_spelling_of_an_option_is_understood(arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.code, done.err, done.out) == (0, "", run().out)


def test_json_agrees_with_yaml_and_with_the_files() -> None:
    data = json.loads(run("--format", "json", "--data-host", "mb-2").out)
    schedule = [{stage["host"]: stage["layers"]} for stage in data["schedule"]]
    assert schedule == yaml.safe_load(run("--data-host", "mb-2").out)
    assert data["bottleneck_s"] == pytest.approx(recomputed_bottleneck(schedule, VIT_BASE, "mb-2"), rel=1e-12)
    assert data["throughput_items_per_s"] == pytest.approx(8 / data["bottleneck_s"])
    assert data["lower_bound_s"] <= data["bottleneck_s"] * (1 + 1e-9)
    assert (data["status"], data["gap"]) == ("optimal", 0)
    worst = max(max(s["compute_s"], s["link_in_s"], s["link_out_s"]) for s in data["schedule"])
    assert worst == data["bottleneck_s"] == data["bottleneck"]["seconds"]
    links = data["schedule"][0]["link_in_s"] + sum(s["link_out_s"] for s in data["schedule"])
    assert data["latency_s"] == pytest.approx(sum(s["compute_s"] for s in data["schedule"]) + links)


def test_explain_shows_the_stages_and_the_bottleneck(cluster: Cluster) -> None:
    cluster.write("devices.yml", DEVICES | {"unprofiled": ["u0"]})
    done = cluster.run("--explain")
    assert done.code == 0
    assert yaml.safe_load(done.out) == [{"f0": [1, 2]}, {"f1": [3, 4]}]
    text = done.err
    assert "stage 0 on f0 computes 3.000 s" in text
    assert "2.667 items/s" in text
    assert "proven optimal" in text
    assert "s0 (slow): not needed" in text
    assert "u0 (unprofiled): its type unprofiled has no profile for m, batch size 8, dtype float32" in text
    assert "3.2 of 100.0" in text  # 3 MB of weights and 2 x 1000 + 2 x 2000 elements of 4 bytes, 8 times
    assert "sched-pipeline: warning: device_types.yml: unprofiled has no profile for m" in text


def test_the_bottleneck_can_be_a_link(cluster: Cluster) -> None:
    cluster.write("models.yml", {"m": MODELS["m"] | {"parameters_out": [200_000]}})
    with_types(cluster, mem_MB=4, bw_Mbps=1)  # too small for all four layers
    data = json.loads(cluster.run("--format=json", "-i0", "-o0").out)
    assert data["bottleneck"]["kind"] == "link"
    seconds = 200_000 * 8 * 4 / (MIB / 8)
    assert data["bottleneck"]["words"] == (
        f"the link from stage 0 on f0 to stage 1 on f1 takes {seconds:.3f} s"
    )


def test_weights_that_layers_share_are_held_once(cluster: Cluster) -> None:
    """The second half of the layers has the weights of the first, 3 MB, for which 4 MB are enough."""
    with_types(cluster, mem_MB=4, bw_Mbps=0)
    assert "no links with bandwidth join the hosts" in cluster.run("-i0", "-o0").error
    cluster.write("models.yml", {"m": MODELS["m"] | {"shared_with": [0, 0, 1, 2]}})
    assert yaml.safe_load(cluster.run("-i0", "-o0").out) == [{"f0": [1, 4]}]
    problem = cluster.run("-i0", "-o0", "--format=problem").out
    assert json.loads(problem)["shared_with"] == [0, 0, 1, 2]
    again = run("--problem", "-", text=problem)
    assert yaml.safe_load(again.out) == [{"f0": [1, 4]}]


@pytest.mark.parametrize(
    ("shared", "reason"),
    [
        ([0, 0, 1], "has 3 values for 4 layers"),
        ([0, 2, 0, 0], "layer 2 shares the weights of layer 2; name the nearest layer before it"),
        ([0, 1, 1, 0], "layer 3 shares the weights of layer 1; name the nearest layer before it"),
        ([0, 0, 0.5, 0], "whole number"),
    ],
)
def test_sharing_names_the_nearest_earlier_layer(cluster: Cluster, shared: list[float], reason: str) -> None:
    cluster.write("models.yml", {"m": MODELS["m"] | {"shared_with": shared}})
    assert reason in cluster.run().error
    with pytest.raises(SpecError, match=reason):
        spec_files.load_models(cluster.folder / "models.yml")


def with_profile(cluster: Cluster, **changes: object) -> None:
    (profile,) = TYPES["fast"]["model_profiles"]["m"]
    with_types(cluster, model_profiles={"m": [{**profile, **changes}]})


def test_costs_besides_the_layers_are_counted(cluster: Cluster) -> None:
    with_profile(
        cluster,
        receive_s=[0.5, 0.25, 0.125, 0.0625],
        send_s=[0.01, 0.02, 0.04, 0.08],
        activations_MB=[3, 5, 1, 2],
    )
    stages = json.loads(cluster.run("--format=json", "-i0", "-o0").out)["schedule"]
    assert [stage["layers"] for stage in stages] == [[1, 2], [3, 4]]
    assert [stage["compute_s"] for stage in stages] == pytest.approx([3.02, 3.125])
    assert [stage["mem_bytes"] for stage in stages] == [(3 + 5) * MIB, (3 + 2) * MIB]
    # With a data host, an end on another host needs the network too.
    stages = json.loads(cluster.run("--format=json", "--data-host", "f0").out)["schedule"]
    assert [stage["host"] for stage in stages] == ["f0", "f1"]
    assert [stage["compute_s"] for stage in stages] == pytest.approx([3.02, 3.205])


def test_a_stage_on_the_data_host_also_feeds_and_collects(cluster: Cluster) -> None:
    with_profile(cluster, feed_s=0.5, collect_s=0.25)
    assert json.loads(cluster.run("--format=json").out)["bottleneck_s"] == pytest.approx(3)
    data = json.loads(cluster.run("--format=json", "--data-host", "f0").out)
    assert [(stage["host"], stage["compute_s"], stage["data_s"]) for stage in data["schedule"]] == [
        ("f1", 3, 0),
        ("f0", 3, 0.75),
    ]
    assert (data["feed_s"], data["collect_s"], data["bottleneck_s"]) == (0.5, 0.25, 3.75)
    text = cluster.run("--explain", "--data-host", "f0").err
    assert "data host    f0: feeding takes 0.500 s, collecting 0.250 s; it runs stage 1" in text
    assert "stage 1 on f0 computes 3.750 s, of which reading and collecting take 0.750 s" in text
    # Collecting 100 s a microbatch bounds every schedule: a host without stages waits for nothing else.
    with_profile(cluster, collect_s=100)
    data = json.loads(cluster.run("--format=json", "--data-host", "f0", "--objective", "latency").out)
    assert data["bottleneck_s"] >= 100
    assert data["latency_s"] < 100  # what the data rank does delays no microbatch in an idle pipeline
    cluster.write("devices.yml", {"fast": ["f0", "f1", "f2"]})
    data = json.loads(cluster.run("--format=json", "--data-host", "f0", "-i0", "-o0").out)
    assert data["bottleneck"] == {
        "kind": "data",
        "stage": "data host",
        "seconds": 100,
        "words": "the data host f0 collects the results in 100.000 s",
    }


def test_the_links_of_the_data_host_can_be_the_bottleneck(cluster: Cluster) -> None:
    """A data host without a profile has no stage, but inputs and outputs cross its link."""
    cluster.write("models.yml", {"m": MODELS["m"] | {"parameters_in": 200_000}})
    cluster.write("devices.yml", DEVICES | {"unprofiled": ["u0"]})
    data = json.loads(cluster.run("--format=json", "--data-host", "u0").out)
    seconds = 200_000 * 8 * 4 / MIB
    assert data["bottleneck_s"] == pytest.approx(seconds)
    assert data["bottleneck"]["words"] == (
        f"the link from the data host u0 to stage 0 on f0 takes {seconds:.3f} s"
    )
    assert [host["host"] for host in data["unused_hosts"]].count("u0") == 1
    # The runtime knows better than models.yml what an item takes on the way.
    data = json.loads(cluster.run("--format=json", "--data-host", "u0", "--input-bytes", "200000").out)
    assert data["schedule"][0]["link_in_s"] == pytest.approx(seconds / 4)


def test_only_the_hosts_that_are_named_are_scheduled(cluster: Cluster) -> None:
    done = cluster.run("--hosts", "s0,f1,zz")
    assert [next(iter(stage)) for stage in yaml.safe_load(done.out)] == ["f1", "s0"]
    assert "devices.yml: does not list zz; no stage is scheduled there" in done.err
    done = cluster.run("--hosts", "zz")
    assert (done.code, done.error) == (2, "devices.yml: lists none of the hosts zz")
    assert cluster.run("--hosts", "f0,,f1").error == "--hosts: the value is empty"


def test_a_model_directory_is_found_under_any_spelling(cluster: Cluster) -> None:
    (cluster.folder / "my" / "model").mkdir(parents=True)
    (cluster.folder / "link").symlink_to("my/model")
    (profile,) = TYPES["fast"]["model_profiles"]["m"]
    cluster.write("models.yml", {"my/model": MODELS["m"]})
    with_types(cluster, model_profiles={"my//model/": [profile]})
    expected = [{"f0": [1, 2]}, {"f1": [3, 4]}]
    for name in ("my/model", "my/model/", "./my/model", str(cluster.folder / "my/model"), "link"):
        assert yaml.safe_load(cluster.run("-m", name).out) == expected, name
    assert "no model my" in cluster.run("-m", "my").error


def test_links_may_carry_fewer_bits_and_the_schedule_says_so(cluster: Cluster) -> None:
    cluster.write("models.yml", {"m": MODELS["m"] | {"parameters_out": [200_000]}})
    with_types(cluster, mem_MB=4, bw_Mbps=8)
    whole = 200_000 * 8 * 4 / MIB
    data = json.loads(cluster.run("--format=json", "-i0", "-o0").out)
    assert data["bottleneck_s"] == pytest.approx(whole)
    data = json.loads(cluster.run("--format=json", "-i0", "-o0", "--link-bits", "16").out)
    assert data["bottleneck_s"] == pytest.approx(whole / 2)
    assert [stage["quant_bits"] for stage in data["schedule"]] == [16, 0]
    done = cluster.run("-i0", "-o0", "--link-bits", "auto", "--explain")
    assert yaml.safe_load(done.out) == [{"f0": [1, 2], "quant_bits": 8}, {"f1": [3, 4]}]
    assert "stage 0 on f0 computes 3.000 s" in done.err
    data = json.loads(cluster.run("--format=json", "-i0", "-o0", "--link-bits=auto").out)
    assert (data["status"], data["bottleneck"]["kind"]) == ("optimal", "compute")
    done = cluster.run("-i0", "-o0", "--link-bits", "auto", "--scale-bandwidth", "0.1")
    assert "2.667 items/s" in done.err


def test_what_if_answers_in_one_line_each_beside_today(cluster: Cluster) -> None:
    done = cluster.run("--add-host", "fast=2", "--remove-host", "f1", "--scale-bandwidth", "0.5")
    assert done.code == 0
    assert yaml.safe_load(done.out) == [{"f0": [1, 2]}, {"f1": [3, 4]}]
    lines = done.err.splitlines()
    assert [line.split(":")[1] for line in lines] == [
        " what if --add-host fast=2",
        " what if --remove-host f1",
        " what if --scale-bandwidth 0.5",
        " what if --add-host fast=2 --remove-host f1 --scale-bandwidth 0.5",
    ]
    assert lines[0].endswith("4 items/s, today 2.667 items/s (+50.00 %)")
    assert lines[1].endswith("2 items/s, today 2.667 items/s (-25.00 %)")
    assert lines[2].endswith("2.667 items/s, today 2.667 items/s (+0.00 %)")


def _text(cluster: Cluster, **changes: object) -> None:
    """Write files for one host and 4 layers; times are 3n + n^2 for the attention, else 10 + 2n."""

    def at(tokens: int) -> dict[str, object]:
        other = 10 + 2 * tokens
        return {
            "tokens": tokens,
            "time_s": [3 * tokens + tokens**2, other, other, other],
            "activations_MB": [tokens, 1, 1, 1],
        }

    profile = {"batch_size": 8, "dtype": "float32", **at(16), "lengths": [at(4), at(32)], **changes}
    cluster.write("device_types.yml", {"fast": {**TYPES["fast"], "model_profiles": {"m": [profile]}}})
    cluster.write("devices.yml", {"fast": ["f0"]})
    tokens = {"tokens": 16, "parameters_in_per_token": 10, "parameters_out_per_token": [20, 20, 20, 0]}
    sizes = {"parameters_in": 160, "parameters_out": [330, 330, 330, 7]}
    cluster.write("models.yml", {"m": {**MODELS["m"], **sizes, **tokens}})


@pytest.mark.parametrize("tokens", [1, 4, 8, 16, 24, 32, 64])
def test_times_and_memory_are_scaled_to_the_length(cluster: Cluster, tokens: int) -> None:
    _text(cluster)
    done = cluster.run("--tokens", str(tokens), "--format", "json")
    assert done.err == ""
    (stage,) = json.loads(done.out)["schedule"]
    assert stage["compute_s"] == pytest.approx(3 * tokens + tokens**2 + 3 * (10 + 2 * tokens))
    buffers = 2 * 8 * 4 * (10 * tokens + 7)
    assert stage["mem_bytes"] == pytest.approx((6 + tokens) * MIB + buffers)


def test_without_a_length_it_is_as_profiled(cluster: Cluster) -> None:
    _text(cluster)
    one, other = (json.loads(cluster.run("--format", "json", *given).out) for given in (("--tokens=16",), ()))
    assert one | {"elapsed_s": 0} == other | {"elapsed_s": 0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lengths": []}, "fast was profiled with 16 tokens only; its times are not scaled to 8"),
        ({"lengths": None, "tokens": None}, "does not say with how many tokens it was profiled"),
    ],
)
def test_times_that_cannot_be_scaled_give_a_warning(
    cluster: Cluster, changes: dict[str, object], says: str
) -> None:
    _text(cluster, **changes)
    text = (cluster.folder / "device_types.yml").read_text().replace("tokens: null", "")
    cluster.write("device_types.yml", text.replace("lengths: null", ""))
    done = cluster.run("--tokens", "8")
    assert done.code == 0
    assert says in done.err
    assert cluster.run("--tokens", "16").code == 0


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_what_if_equals_the_changed_files(cluster: Cluster, objective: str) -> None:
    arguments = ["--format", "json", "--objective", objective]
    asked = json.loads(
        cluster.run(*arguments, "--add-host=slow=2", "--remove-host=f0", "--scale-bandwidth=0.1").out
    )["what_if"]
    slower = {name: one | {"bw_Mbps": one["bw_Mbps"] / 10} for name, one in TYPES.items()}
    more = DEVICES | {"slow": ["s0", "s1", "s2"]}
    less = {name: [host for host in hosts if host != "f0"] for name, hosts in more.items()}
    worlds = [(TYPES, more), (TYPES, {**DEVICES, "fast": ["f1"]}), (slower, DEVICES), (slower, less)]
    for answer, (types, devices) in zip(asked, worlds, strict=True):
        cluster.write("device_types.yml", types)
        cluster.write("devices.yml", devices)
        real = json.loads(cluster.run(*arguments).out)
        for figure in ("bottleneck_s", "latency_s", "throughput_items_per_s"):
            assert answer[figure] == pytest.approx(real[figure]), answer["change"]


def test_removing_the_last_host_is_answered_not_refused(cluster: Cluster) -> None:
    cluster.write("devices.yml", {"fast": ["f0"]})
    done = cluster.run("--remove-host", "f0")
    assert done.code == 0
    assert "no feasible schedule, today 1.333 items/s: no host is left" in done.err


def test_neighbours_decide_the_links(cluster: Cluster) -> None:
    cluster.write("devices.yml", {"slow": ["s0", "s1", "s2"]})
    free = json.loads(cluster.run("--format=json").out)
    assert {stage["host"] for stage in free["schedule"]} == {"s0", "s1"}
    neighbours = {
        "s0": {"s1": {"bw_Mbps": 0}, "s2": {"bw_Mbps": 1, "latency_s": 0.25}},
        "s1": {"s2": {"bw_Mbps": 0}},
    }
    cluster.write("n.yml", neighbours | {"zz": {"s0": {"bw_Mbps": 1}}})
    done = cluster.run("--format=json", "--dev-neighbors-file", "n.yml")
    data = json.loads(done.out)
    assert {stage["host"] for stage in data["schedule"]} == {"s0", "s2"}  # s1 is cut off
    assert data["schedule"][0]["link_out_s"] == pytest.approx(2000 * 8 * 4 / (MIB / 8) + 0.25)
    assert data["warnings"] == ["n.yml: not among the hosts to schedule, ignored: zz"]


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("torch.float16", 2), ("bfloat16", 2), ("int8", 2)]
)
def test_a_dtype_decides_the_size_of_an_element(cluster: Cluster, dtype: str, size: int) -> None:
    types = {name: dict(one) for name, one in TYPES.items()}
    for one in types.values():
        if one["model_profiles"]:
            one["model_profiles"] = {"m": [one["model_profiles"]["m"][0] | {"dtype": dtype}]}  # type: ignore[index]
    cluster.write("device_types.yml", types)
    data = json.loads(cluster.run("--format=json", "-d", dtype, "--data-host", "s0").out)
    first, last = data["schedule"][0], data["schedule"][-1]
    assert (first["host"], last["host"]) == ("f0", "f1")
    assert first["link_out_s"] == pytest.approx(2000 * 8 * size / (80 * MIB / 8))
    assert last["link_out_s"] == pytest.approx(2000 * 8 * 4 / (8 * MIB / 8))  # outputs are float32
    assert data["dtype"] == dtype.removeprefix("torch.")
    stage = StagePlan(LayerRange.inclusive(*first["layers"]), 0, dtype=data["dtype"])
    spec = spec_files.load_models(cluster.folder / "models.yml")["m"]
    load = Workload("m", spec, 8, 8)
    assert load.sent_bytes(stage) == 2000 * 8 * size
    assert load.cut_bytes(4, data["dtype"]) == 2000 * 8 * 4
    assert stream_dtype(find_dtype(dtype)).itemsize == ELEMENT_BYTES[data["dtype"]] == size


def test_memory_counts_weights_and_buffers(cluster: Cluster) -> None:
    stage = json.loads(cluster.run("--format=json", "-i", "3", "-o", "5").out)["schedule"][1]
    assert stage["mem_bytes"] == (1 + 2) * MIB + (3 * 2000 + 5 * 2000) * 8 * 4
    assert stage["mem_available_bytes"] == 100 * MIB


def test_aliases_merge_keys_and_unknown_keys_are_read(cluster: Cluster) -> None:
    cluster.write(
        "device_types.yml",
        "base: &base\n"
        "  bw_Mbps: 80\n"
        "  mem_MB: 7\n"
        "  owner: {name: me}\n"
        "  model_profiles:\n"
        "    m:\n"
        "    - {batch_size: 8, dtype: float32, time_s: &times [1, 2, 1, 2], rss_MB: 5}\n"
        "    - {batch_size: 4, dtype: float32, time_s: *times}\n"
        "fast:\n"
        "  <<: *base\n"
        "  mem_MB: 100\n",
    )
    cluster.write("devices.yml", {"fast": ["f0"]})
    (stage,) = json.loads(cluster.run("--format=json").out)["schedule"]
    assert stage["mem_available_bytes"] == 100 * MIB


@pytest.mark.parametrize("newline", ["\r\n", "\n"])
@pytest.mark.parametrize("bom", ["\ufeff", ""])
def test_line_ends_and_byte_order_marks_do_not_matter(cluster: Cluster, newline: str, bom: str) -> None:
    for name in ("models.yml", "device_types.yml", "devices.yml"):
        text = (cluster.folder / name).read_text()
        (cluster.folder / name).write_bytes((bom + text.replace("\n", newline)).encode())
    assert yaml.safe_load(cluster.run().out) == [{"f0": [1, 2]}, {"f1": [3, 4]}]


names = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12) | st.sampled_from(
    [
        "true",
        "No",
        "null",
        "~",
        "1.5",
        "1e5",
        "0x10",
        "010",
        "12:30",
        "2001-01-01",
        "=",
        "<<",
        "- a",
        "a: b",
        "#",
        "'",
    ]
)


@settings(max_examples=cases(40))
@given(host=names)
def test_any_host_name_reads_back_as_itself(tmp_path_factory: pytest.TempPathFactory, host: str) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("names"))
    cluster.write("models.yml", MODELS)
    cluster.write("device_types.yml", TYPES)
    cluster.write("devices.yml", f"fast: [{json.dumps(host, ensure_ascii=host.isascii())}]\n")
    done = cluster.run("--explain")
    if done.code == 2 and not host.isprintable():
        return
    assert yaml.safe_load(done.out) == (
        [{int(host): [1, 4]}]
        if host.isascii() and host.isdecimal() and host == str(int(host))
        else [{host: [1, 4]}]
    )
    (stage,) = json.loads(cluster.run("--format=json").out)["schedule"]
    assert stage["host"] == host


# --- any small cluster ------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Contents of the four files, and the options."""

    model: dict[str, Any]
    types: dict[str, dict[str, Any]]
    devices: dict[str, list[str]]
    neighbors: dict[str, dict[str, dict[str, float]]]
    batch: int
    buffers_in: int
    buffers_out: int
    data_host: str | None

    def best_period(self) -> float:
        """Try all schedules and return the shortest period, infinite if none is feasible."""
        layers = self.model["layers"]
        out = self.model["parameters_out"]
        sizes = [self.model["parameters_in"], *(out * (layers // len(out)))]
        size = [elements * self.batch * 4 for elements in sizes]
        type_of = {host: self.types[name] for name, hosts in self.devices.items() for host in hosts}
        best = float("inf")

        def link(one: str, other: str, cut: int) -> float:
            if one == other:
                return 0.0
            pair = self.neighbors.get(one, {}).get(other) or self.neighbors.get(other, {}).get(one)
            if pair is None:
                pair = {"bw_Mbps": min(type_of[one]["bw_Mbps"], type_of[other]["bw_Mbps"])}
            if size[cut] and not pair["bw_Mbps"]:
                return float("inf")
            seconds = size[cut] / (pair["bw_Mbps"] * MIB / 8) if size[cut] else 0.0
            return seconds + pair.get("latency_s", 0.0)

        def extend(first: int, used: tuple[str, ...], period: float) -> None:
            nonlocal best
            if first == layers:
                best = min(
                    best, max(period, link(used[-1], self.data_host, layers) if self.data_host else 0.0)
                )
                return
            for host in type_of.keys() - set(used):
                before = used[-1] if used else self.data_host
                arrive = link(before, host, first) if before else 0.0
                for last in range(first + 1, layers + 1):
                    (profile,) = type_of[host]["model_profiles"]["m"]
                    need = sum(self.model["mem_MB"][first:last]) * MIB
                    need += self.buffers_in * size[first] + self.buffers_out * size[last]
                    if need <= type_of[host]["mem_MB"] * MIB:
                        extend(last, (*used, host), max(period, arrive, sum(profile["time_s"][first:last])))

        extend(0, (), 0.0)
        return best


@st.composite
def worlds(draw: st.DrawFn) -> World:
    layers = draw(st.sampled_from([2, 4, 5]))
    block = draw(st.sampled_from([1, layers]))
    times = st.lists(st.integers(0, 9).map(float), min_size=layers, max_size=layers)
    batch = draw(st.sampled_from([1, 8]))
    types, devices = {}, {}
    hosts: list[str] = []
    for name in draw(st.sampled_from(["a", "ab", "abc"])):
        types[name] = {
            "bw_Mbps": draw(st.sampled_from([0, 0.5, 1, 100])),
            "mem_MB": draw(st.sampled_from([1, 2.5, 4, 40])),
            "model_profiles": {"m": [{"batch_size": batch, "dtype": "torch.float32", "time_s": draw(times)}]},
        }
        devices[name] = [f"{name}{i}" for i in range(draw(st.integers(0, 2)))]
        hosts += devices[name]
    if not hosts:
        devices["a"] = hosts = ["a0"]
    link = st.fixed_dictionaries(
        {"bw_Mbps": st.sampled_from([0, 0.25, 10])}, optional={"latency_s": st.just(2.0)}
    )
    pairs = draw(st.dictionaries(st.tuples(st.sampled_from(hosts), st.sampled_from(hosts)), link, max_size=3))
    neighbors: dict[str, dict[str, dict[str, float]]] = {}
    for (one, other), speed in pairs.items():
        neighbors.setdefault(one, {})[other] = speed
    sizes = st.sampled_from([0, 1000, 20_000, 150_000])
    return World(
        model={
            "layers": layers,
            "mem_MB": draw(st.lists(st.sampled_from([0.5, 1, 2]), min_size=layers, max_size=layers)),
            "parameters_in": draw(sizes),
            "parameters_out": draw(st.lists(sizes, min_size=block, max_size=block)),
        },
        types=types,
        devices=devices,
        neighbors=neighbors,
        batch=batch,
        buffers_in=draw(st.integers(0, 2)),
        buffers_out=draw(st.integers(0, 2)),
        data_host=draw(st.none() | st.sampled_from(hosts)),
    )


@settings(max_examples=cases(150))
@given(world=worlds())
def test_any_small_cluster_is_scheduled_at_its_optimum(
    tmp_path_factory: pytest.TempPathFactory, world: World
) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("world"))
    cluster.write("models.yml", {"m": world.model})
    cluster.write("device_types.yml", world.types)
    cluster.write("devices.yml", world.devices)
    cluster.write("n.yml", world.neighbors)
    arguments = [f"-b{world.batch}", f"-i{world.buffers_in}", f"-o{world.buffers_out}", "--format=json"]
    arguments += [
        "--dev-neighbors-file=n.yml",
        *([f"--data-host={world.data_host}"] if world.data_host else []),
    ]
    done = cluster.run(*arguments)
    best = world.best_period()
    if best == float("inf"):
        assert done.code == 3
        assert done.error.startswith("no feasible schedule: ")
        return
    data = json.loads(done.out)
    assert data["status"] == "optimal"
    assert data["bottleneck_s"] == pytest.approx(best, rel=1e-9)


# --- bad requests -----------------------------------------------------------------------------------


def edit(name: str, old: str, new: str) -> Callable[[Cluster], None]:
    def apply(cluster: Cluster) -> None:
        text = (cluster.folder / name).read_text()
        assert old in text, f"{old!r} is not in {name}"
        cluster.write(name, text.replace(old, new, 1))

    return apply


def content(name: str, text: str) -> Callable[[Cluster], None]:
    return lambda cluster: cluster.write(name, text)


BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(12))

BAD_FILES = {
    "missing file": (lambda c: (c.folder / "models.yml").unlink(), "models.yml: no such file"),
    "folder": (
        lambda c: ((c.folder / "devices.yml").unlink(), (c.folder / "devices.yml").mkdir()),
        "is a directory",
    ),
    "pipe": (
        lambda c: ((c.folder / "devices.yml").unlink(), os.mkfifo(c.folder / "devices.yml")),
        "devices.yml: is not a regular file",
    ),
    "gigabyte": (
        lambda c: os.truncate(c.folder / "models.yml", 1 << 30),
        "models.yml: is larger than 64 MiB",
    ),
    "empty": (content("models.yml", ""), "models.yml: is empty"),
    "not YAML": (content("devices.yml", "fast: [a\nslow: b\n"), "devices.yml:2: is not valid YAML"),
    "tab": (content("devices.yml", "fast:\n\t- a\n"), "devices.yml:2: is not valid YAML"),
    "two documents": (
        content("devices.yml", "fast: [a]\n---\nfast: [b]\n"),
        "devices.yml:3: holds a second document",
    ),
    "binary": (content("devices.yml", "fast: [\x00]\n"), "devices.yml:1: holds a control character"),
    "list for map": (content("devices.yml", "- fast\n"), "devices.yml:1: is a list; a map is expected"),
    "deep": (content("devices.yml", "[" * 100_000), "devices.yml:1: nested deeper than 32 levels"),
    "deep blocks": (content("devices.yml", "- " * 100_000), "devices.yml:1: nested deeper than 32 levels"),
    "alias bomb": (content("models.yml", BOMB), "holds more than 4000000 values"),
    "alias loop": (content("models.yml", "a: &a [*a]\n"), "models.yml:1: "),
    "unknown alias": (content("models.yml", "a: *b\n"), "models.yml:1: is not valid YAML"),
    "key twice": (
        content("devices.yml", "fast: [a]\nfast: [b]\n"),
        "devices.yml:2: the key fast comes twice",
    ),
    "host twice": (
        content("devices.yml", "fast: [a, b, a]\n"),
        "devices.yml:1: fast: entry 3: the host a is listed twice",
    ),
    "host under two types": (
        content("devices.yml", "fast: [a]\nslow:\n- a\n"),
        "devices.yml:3: slow: entry 1: the host a is listed twice; it stands under fast already",
    ),
    "empty host": (
        content("devices.yml", "fast: ['']\n"),
        "devices.yml:1: fast: entry 1: is an empty host name",
    ),
    "host map": (
        content("devices.yml", "fast: [{a: 1}]\n"),
        "devices.yml:1: fast: entry 1: is a map; a name is expected",
    ),
    "host scalar": (content("devices.yml", "fast: a\n"), "devices.yml:1: fast: is 'a'; a list is expected"),
    "no host": (content("devices.yml", "fast: []\n"), "devices.yml: lists no host"),
    "missing key": (edit("models.yml", "mem_MB", "mem_GB"), "models.yml:2: m: the key mem_MB is missing"),
    "missing layers": (edit("models.yml", "layers", "layer"), "models.yml:2: m: the key layers is missing"),
    "missing time": (edit("device_types.yml", "time_s", "time"), "the key time_s is missing"),
    "missing bandwidth": (edit("device_types.yml", "bw_Mbps", "bw"), "fast: the key bw_Mbps is missing"),
    "missing profiles": (
        edit("device_types.yml", "model_profiles", "p"),
        "fast: the key model_profiles is missing",
    ),
    "text for number": (
        edit("models.yml", "layers: 4", "layers: four"),
        "models.yml:2: m: layers: is 'four'; a whole number",
    ),
    "quoted number": (
        edit("models.yml", "layers: 4", "layers: '4'"),
        "is '4' in quotes; a whole number is expected",
    ),
    "half a layer": (edit("models.yml", "layers: 4", "layers: 4.5"), "is '4.5'; a whole number is expected"),
    "octal": (edit("models.yml", "layers: 4", "layers: 04"), "is '04'; a whole number is expected"),
    "list for number": (
        edit("models.yml", "layers: 4", "layers: [4]"),
        "m: layers: is a list; a whole number is expected",
    ),
    "null for number": (
        edit("models.yml", "layers: 4", "layers:"),
        "m: layers: has no value; a whole number is expected",
    ),
    "no layers": (
        content("models.yml", "m: {layers: 0, mem_MB: [], parameters_in: 0, parameters_out: []}"),
        "no layers",
    ),
    "fewer memories": (
        edit("models.yml", "layers: 4", "layers: 5"),
        "models.yml:4: m: mem_MB: has 4 values for 5 layers",
    ),
    "block that does not divide": (
        edit("models.yml", "- 2000\n", "- 2000\n  - 3000\n"),
        "m: parameters_out: has 3 values for 4 layers",
    ),
    "negative memory": (
        edit("models.yml", "- 2\n", "- -2\n"),
        "mem_MB: entry 2: is -2; it must not be negative",
    ),
    "negative size": (
        edit("models.yml", "parameters_in: 1000", "parameters_in: -1"),
        "parameters_in: is -1; it must",
    ),
    "half an element": (
        edit("models.yml", "- 2000", "- 0.5"),
        "parameters_out: entry 2: is '0.5'; a whole number",
    ),
    "negative time": (
        edit("device_types.yml", "- 1\n", "- -1\n"),
        "time_s: entry 1: is -1; it must not be negative",
    ),
    "not a number": (
        edit("device_types.yml", "- 1\n", "- .nan\n"),
        "time_s: entry 1: is '.nan'; a number is expected",
    ),
    "infinite": (
        edit("device_types.yml", "- 1\n", "- .inf\n"),
        "time_s: entry 1: is '.inf'; a number is expected",
    ),
    "overflow": (
        edit("device_types.yml", "- 1\n", "- 1e999\n"),
        "entry 1: is 1e999; numbers may not exceed 1,000,000,000,000,000",
    ),
    "long number": (
        edit("device_types.yml", "mem_MB: 100", "mem_MB: " + "9" * 400),
        "numbers may not exceed 1,000,000,000,000,000",
    ),
    "negative bandwidth": (
        edit("device_types.yml", "bw_Mbps: 80", "bw_Mbps: -80"),
        "device_types.yml:2: fast: bw_Mbps: is -80",
    ),
    "batch 0": (
        edit("device_types.yml", "batch_size: 8", "batch_size: 0"),
        "batch_size: is 0; it must be at least 1",
    ),
    "fewer times": (
        edit("device_types.yml", "      - 1\n", ""),
        "time_s: has 3 values for 4 layers (models.yml)",
    ),
    "same profile twice": (
        content(
            "device_types.yml",
            "fast:\n  bw_Mbps: 1\n  mem_MB: 1\n  model_profiles:\n    m:\n"
            "    - {batch_size: 8, dtype: float32, time_s: [1, 1, 1, 1]}\n"
            "    - {batch_size: 8, dtype: torch.float32, time_s: [1, 1, 1, 1]}\n",
        ),
        "device_types.yml:7: fast: model_profiles: m: entry 2: is a second profile for batch size 8",
    ),
    "type nobody knows": (
        content("devices.yml", "quick: [a]\n"),
        "no host is left to schedule on; devices.yml: the type quick",
    ),
    "type without profile": (
        content("devices.yml", "unprofiled: [a]\n"),
        "no host is left to schedule on; device_types.yml: unprofiled has no profile for m, batch size 8",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_gets_one_line_with_file_line_and_key(cluster: Cluster, case: str) -> None:
    spoil, message = BAD_FILES[case]
    spoil(cluster)
    done = cluster.run()
    assert done.code == 2
    assert message in done.error
    assert len(done.error) < 700


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-sm", "none.yml"], "none.yml: no such file; -sm FILE names another"),
        (["-sd", "/dev/zero"], "/dev/zero: is not a regular file"),
        (["-m", "mm"], "models.yml: no model mm; did you mean m? the file has: m"),
        (["-m", "google/bert"], "models.yml: no model google/bert; the file has: m"),
        (["-d", "float64"], "unknown dtype float64; known: float32, float16, bfloat16, int8"),
        (
            ["-d", "int8"],
            "fast has no profile for m, batch size 8, dtype int8; it has batch size 8 with dtype float32",
        ),
        (["-b", "4"], "fast has no profile for m, batch size 4, dtype float32; it has batch size 8"),
        (["-b", "0"], "-b: '0' is not a whole number from 1"),
        (["-b", "-8"], "-b: '-8' is not a whole number from 1"),
        (["-b", "8.5"], "-b: '8.5' is not a whole number from 1"),
        (["-b", "99999999999999999999"], "is not a whole number from 1"),
        (["-i", "x"], "-i: 'x' is not a whole number from 0"),
        (["--time-limit", "0"], "--time-limit: '0' is not a number above 0"),
        (["--time-limit", "nan"], "--time-limit: 'nan' is not a number above 0"),
        (["--objective", "cost"], "--objective: 'cost' is neither throughput nor latency"),
        (["--format", "xml"], "--format: 'xml' is neither yaml, json, problem nor files"),
        (["--cluster-file", "none.yml"], "none.yml: no such file"),
        (
            ["--cluster-file", "c.yml", "-sd", "devices.yml"],
            "-sd and --cluster-file name device types or hosts",
        ),
        (["--data-host", "zz"], "--data-host zz: no such host in devices.yml, which has: f0, f1, s0"),
        (["--link-bits", "9"], "--link-bits: '9' is neither 0, 2 to 8, 16 nor auto"),
        (["--link-bits", "-4"], "--link-bits: '-4' is neither"),
        (["--link-bits", "auto", "--objective", "latency"], "fewer bits are always better"),
        (["--add-host", "quick=1"], "--add-host quick=1: no such device type with a profile"),
        (["--add-host", "fast"], "--add-host: 'fast' is not of the form TYPE=N"),
        (["--add-host", "fast=0"], "--add-host: '0' is not a whole number from 1"),
        (["--remove-host", "zz"], "--remove-host zz: no such host to schedule on; there are: f0, f1, s0"),
        (["--remove-host", "f0", "--data-host", "f0"], "--remove-host f0: it is the data host"),
        (["--scale-bandwidth", "-1"], "--scale-bandwidth: '-1' is not a number above 0"),
        (["--modle-name", "m"], "unknown option --modle-name; did you mean --model-name?"),
        (["-z"], "unknown option -z; --help lists them"),
        (["--dev", "x"], "the option --dev is ambiguous: --dev-types-file, --dev-file, --dev-neighbors-file"),
        (["-b"], "the option -b needs a value: -b N"),
        (["-b", "-d", "float32"], "the option -b needs a value"),
        (["--explain=yes"], "the option --explain takes no value"),
        (["models.yml"], "unexpected argument 'models.yml'"),
        (["-m", ""], "-m: the value is empty"),
    ],
)
def test_a_bad_option_gets_one_line(cluster: Cluster, arguments: list[str], message: str) -> None:
    done = cluster.run(*arguments)
    assert done.code == 2
    assert message in done.error


def test_an_unusable_type_gives_a_warning_and_the_others_are_scheduled(cluster: Cluster) -> None:
    cluster.write("devices.yml", DEVICES | {"unprofiled": ["u0", "u1"], "quick": ["q"]})
    done = cluster.run()
    assert done.code == 0
    assert done.err.splitlines() == [
        "sched-pipeline: warning: device_types.yml: unprofiled has no profile for m, batch size 8, "
        "dtype float32; it has no profiles; left out: 2 hosts",
        "sched-pipeline: warning: devices.yml: the type quick is not in device_types.yml, which has: "
        "fast, slow, unprofiled; left out: 1 host",
    ]


# --- no feasible schedule ---------------------------------------------------------------------------


def test_a_layer_that_fits_nowhere_is_named(cluster: Cluster) -> None:
    with_types(cluster, mem_MB=2)
    done = cluster.run()
    assert done.code == 3
    assert done.error == (
        "no feasible schedule: layer 2 fits on no host: it needs 2.2 MB with its buffers, "
        "the largest host has 2.0 MB"
    )


def test_missing_memory_is_counted(cluster: Cluster) -> None:
    with_types(cluster, mem_MB=2.5)
    done = cluster.run()
    assert done.code == 3
    assert done.error == (
        "no feasible schedule: 1.0 MB of memory are missing: the layers need 6.0 MB without buffers, "
        "2 hosts together have 5.0 MB"
    )


def test_memory_that_buffers_and_cuts_take_is_counted(cluster: Cluster) -> None:
    with_types(cluster, mem_MB=3)  # the weights fit exactly, the buffers do not
    done = cluster.run()
    assert done.code == 3
    needed = 3 + (2 * 1000 + 2 * 2000) * 32 / MIB, 3 + (2 * 2000 + 2 * 2000) * 32 / MIB
    missing = float(done.error.split("about ")[1].split(" MB")[0])
    assert missing == pytest.approx(2 * (max(needed) - 3), abs=0.06)


def test_missing_links_are_reported(cluster: Cluster) -> None:
    with_types(cluster, mem_MB=4, bw_Mbps=0)
    done = cluster.run()
    assert done.code == 3
    assert done.error == (
        "no feasible schedule: the memory is enough, but no links with bandwidth join the hosts it takes"
    )


def test_what_if_can_make_an_infeasible_cluster_feasible(cluster: Cluster) -> None:
    with_types(cluster, mem_MB=2.5)
    done = cluster.run("--add-host", "fast=2")
    assert done.code == 3
    assert done.out == ""
    what_if, error = done.err.splitlines()
    assert what_if == "sched-pipeline: what if --add-host fast=2: 4 items/s, today none"
    assert "no feasible schedule" in error


# --- the rest ---------------------------------------------------------------------------------------


def test_help_fits_a_terminal_and_names_every_option() -> None:
    done = run("--help")
    assert (done.code, done.err) == (0, "")
    assert done.out == run("-h").out
    assert all(len(line) <= 80 for line in done.out.splitlines())
    for option in (
        *(
            "--problem",
            "--dtype-of",
            "-sm",
            "-M",
            "--models-file",
            "-sdt",
            "-T",
            "--dev-types-file",
            "-sd",
            "-D",
            "--dev-file",
            "-m",
        ),
        *("--model-name", "-b", "--batch-size", "-d", "--dtype", "-i", "--buffers-in", "-o", "--buffers-out"),
        *("--data-host", "--dev-neighbors-file", "--objective", "--time-limit", "--explain", "--format"),
        *("--add-host", "--remove-host", "--scale-bandwidth", "-h", "--help", "--version"),
    ):
        assert f" {option}" in done.out, option


def test_the_version_is_the_package_s() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    version = text.split('\nversion = "')[1].split('"')[0]
    assert run("--version").out == f"sched-pipeline (PipeEdge) {version}\n"


@pytest.mark.parametrize(
    ("called", "name"),
    [("pipeedge schedule", "pipeedge schedule"), ("/usr/bin/sched", "sched"), ("", "sched-pipeline")],
)
def test_it_calls_itself_by_the_name_it_was_started_with(called: str, name: str) -> None:
    program = find_executable()
    refused = subprocess.run(
        [called, "--formt"], executable=program, capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.stderr == f"{name}: error: unknown option --formt; did you mean --format?\n"
    shown = subprocess.run(
        [called, "--help"], executable=program, capture_output=True, text=True, timeout=60, check=False
    )
    assert shown.stdout.startswith(f"Usage: {name} [OPTION]...\n")
    assert f"  {name} -m google/vit-large-patch16-224 --explain\n" in shown.stdout


def test_a_full_disk_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([find_executable()], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr == b"sched-pipeline: error: cannot write to standard output\n"


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
        ("fast=int4", "unknown dtype int4"),
        ("quick=int8", "--dtype-of quick: no such device type in device_types.yml"),
    ):
        done = cluster.run(f"--dtype-of={option}")
        assert done.code == 2
        assert message in done.error
