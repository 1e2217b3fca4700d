"""Test the schedules that sched-pipeline prints for files and options."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from sched_program import DEVICES, MIB, MODELS, TYPES, Cluster, run, with_types, written
from waiting import LIMIT_S

from pipeedge.base.errors import SpecError
from pipeedge.models.dtypes import find_dtype, stream_dtype
from pipeedge.plan import spec_files
from pipeedge.plan.problem import ELEMENT_BYTES
from pipeedge.plan.sched_pipeline import find_executable

VIT_BASE = "google/vit-base-patch16-224"
VIT_LARGE = "google/vit-large-patch16-224"


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return written(tmp_path)


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
    assert done.code == 0
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


HANDLING = {
    "tcp": {"receive_s": 0.25, "receive_s_per_MB": 2, "send_s": 0.5, "send_s_per_MB": 4, "note": "kept"},
    "tcp-tls": {"receive_s": 0, "receive_s_per_MB": 32, "send_s": 0, "send_s_per_MB": 64},
}


@pytest.mark.parametrize("transport", [None, "rpc", "tcp", "tcp-tls"])
@pytest.mark.parametrize(
    "profile", [{}, {"receive_s": [4, 3, 2, 1], "send_s": [1, 2, 3, 4], "feed_s": 6, "collect_s": 5}]
)
def test_handling_costs_what_the_profile_says_of_the_transport(
    cluster: Cluster, transport: str | None, profile: dict[str, object]
) -> None:
    options = ["--format=problem", *([f"--transport={transport}"] if transport else [])]
    with_profile(cluster, **profile)
    before = json.loads(cluster.run(*options).out)["types"][0]
    with_profile(cluster, **profile, handling=HANDLING)
    after = json.loads(cluster.run(*options).out)["types"][0]
    costs = HANDLING.get(transport or "p2p")
    if costs is None:
        assert after == before
        return
    sizes = [elements * 8 * 4 / MIB for elements in (1000, 1000, 2000, 1000, 2000)]
    nothing = [0] * 4
    receive = zip(before.get("receive_s", nothing), sizes[:-1], strict=True)
    send = zip(before.get("send_s", nothing), sizes[1:], strict=True)

    def more(key: str, size: float) -> float:
        return costs[key] + costs[f"{key}_per_MB"] * size

    assert after["receive_s"] == pytest.approx([old + more("receive_s", size) for old, size in receive])
    assert after["send_s"] == pytest.approx([old + more("send_s", size) for old, size in send])
    # What the data rank spends on its links is known where its own work is.
    assert [after[key] for key in ("feed_s", "collect_s")] == [before[key] for key in ("feed_s", "collect_s")]
    data = (more("send_s", sizes[0]), more("receive_s", sizes[-1])) if profile else (0, 0)
    assert (after.get("input_send_s", 0), after.get("output_receive_s", 0)) == pytest.approx(data)


@pytest.mark.parametrize(
    ("handling", "reason"),
    [
        ([], "handling: is a list; a map is expected"),
        ({"tcp": {"receive_s": 1}}, "tcp: the key receive_s_per_MB is missing"),
        ({"tcp": HANDLING["tcp"] | {"send_s": -1}}, "send_s: is -1"),
    ],
)
def test_handling_that_is_not_valid_is_refused(cluster: Cluster, handling: object, reason: str) -> None:
    with_profile(cluster, handling=handling)
    assert reason in cluster.run().error


def test_an_unknown_transport_is_refused(cluster: Cluster) -> None:
    error = "--transport: 'udp' is neither p2p, rpc, tcp nor tcp-tls"
    assert cluster.run("--transport", "udp").error == error


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


def test_the_data_rank_spends_time_on_links_to_stages_on_other_hosts(cluster: Cluster) -> None:
    handling = {"p2p": {"receive_s": 0.25, "receive_s_per_MB": 0, "send_s": 0.5, "send_s_per_MB": 0}}

    def planned(hosts: str, **profile: object) -> dict[str, Any]:
        with_profile(cluster, **profile, handling=handling)
        return json.loads(cluster.run("--format=json", "--data-host=f0", f"--hosts={hosts}").out)

    alone = planned("f0", feed_s=1, collect_s=2)
    assert (alone["feed_s"], alone["collect_s"], alone["schedule"][0]["data_s"]) == (1, 2, 3)
    two = planned("f0,f1", feed_s=1, collect_s=2)
    assert [(stage["host"], stage["data_s"]) for stage in two["schedule"]] == [("f1", 0), ("f0", 3.5)]
    assert (two["feed_s"], two["collect_s"]) == (1.5, 2)
    assert two["bottleneck_s"] == pytest.approx(2 + 0.25 + 3.5)
    # Without a stage, it feeds and collects at the same time.
    none = planned("f0,f1", feed_s=100, collect_s=2)
    assert [stage["host"] for stage in none["schedule"]] == ["f1"]
    assert (none["feed_s"], none["collect_s"]) == (100.5, 2.25)
    assert none["bottleneck"]["words"] == "the data host f0 reads the input in 100.500 s"


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


def test_the_plan_of_a_run_is_named_if_it_is_another(cluster: Cluster) -> None:
    """Without a data host, the input costs nothing; a run has it on the host of rank 0."""
    cluster.write("models.yml", {"m": MODELS["m"] | {"parameters_in": 2_000_000}})
    line = (
        "a run with its data on f1 takes another plan (2.667 items/s): f1: [1, 2], f0: [3, 4]; see "
        "--data-host f1"
    )
    done = cluster.run("--hosts", "f1,f0", "-i0", "-o0")
    assert yaml.safe_load(done.out) == [{"f0": [1, 2]}, {"f1": [3, 4]}]
    assert done.err == f"sched-pipeline: {line}\n"
    there = cluster.run("--hosts", "f1,f0", "-i0", "-o0", "--data-host", "f1")
    assert (yaml.safe_load(there.out), there.err) == ([{"f1": [1, 2]}, {"f0": [3, 4]}], "")
    # In the order of the file, the data are on f0, and the plan is the same.
    assert cluster.run("-i0", "-o0").err == ""
    # Programs have asked for what they want.
    assert cluster.run("--hosts", "f1,f0", "-i0", "-o0", "--format", "json").err == ""
    joint = cluster.run("--hosts", "f1,f0", "-i0", "-o0", "--plan", "auto", "--min-agreement", "0")
    assert line in joint.err


def test_what_if_answers_in_one_line_each_beside_today(cluster: Cluster) -> None:
    done = cluster.run("--add-host", "fast=2", "--remove-host", "f1", "--scale-bandwidth", "0.5")
    assert done.code == 0
    assert yaml.safe_load(done.out) == [{"f0": [1, 2]}, {"f1": [3, 4]}]
    lines = [line for line in done.err.splitlines() if "what if" in line]
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


def test_of_several_lengths_the_average_counts_and_the_longest_fits(cluster: Cluster) -> None:
    """Of 8 sentences that are drawn, the longest decides; all combinations are counted up."""
    _text(cluster)
    sentences = {4: 5, 16: 2, 32: 1}
    longest = {0: 1.0}
    for _ in range(8):
        drawn: dict[int, float] = defaultdict(float)
        for (before, part), (tokens, number) in itertools.product(longest.items(), sentences.items()):
            drawn[max(before, tokens)] += part * number / 8
        longest = dict(drawn)
    given = ",".join(f"{tokens}:{number}" for tokens, number in sentences.items())
    (stage,) = json.loads(cluster.run("--lengths", given, "--format", "json", "--data-host=f0").out)[
        "schedule"
    ]
    alone = {
        tokens: json.loads(cluster.run(f"--tokens={tokens}", "--format", "json").out)["schedule"][0]
        for tokens in sentences
    }
    assert stage["compute_s"] == pytest.approx(sum(longest[n] * alone[n]["compute_s"] for n in sentences))
    assert stage["mem_bytes"] == pytest.approx(alone[32]["mem_bytes"])
    problem = json.loads(cluster.run("--lengths", given, "--format", "problem").out)
    mean = sum(part * tokens for tokens, part in longest.items())
    elements = [330 + 20 * (tokens - 16) for tokens in (mean, 32)]
    assert problem["carried"] == pytest.approx([mean / 32, *[elements[0] / elements[1]] * 3, 1])
    again = json.loads(run("--problem=-", "--format", "json", text=json.dumps(problem)).out)
    assert again["schedule"][0]["compute_s"] == stage["compute_s"]


@pytest.mark.parametrize("given", ["4", "4:", ":4", "4:0", "a:b", "4:1,", "4:1:2", ""])
def test_malformed_lengths_are_refused(cluster: Cluster, given: str) -> None:
    _text(cluster)
    done = cluster.run(f"--lengths={given}")
    assert done.code == 2
    assert done.err.startswith("sched-pipeline: error: --lengths: ")
    assert done.err.count("\n") == 1


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
    assert (first["sent_bytes"], last["sent_bytes"]) == (2000 * 8 * size, 2000 * 8 * 4)
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


# --- the program itself -----------------------------------------------------------------------------


def test_help_fits_a_terminal_and_names_every_option() -> None:
    done = run("--help-all")
    assert (done.code, done.err) == (0, "")
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
    short = run("--help")
    assert (short.code, short.err, short.out) == (0, "", run("-h").out)
    assert "'sched-pipeline --help-all' shows all options" in short.out
    options = re.findall(r"^  -.*", short.out, re.MULTILINE)
    assert len(options) < 20
    assert set(options) < set(done.out.splitlines())


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
        [called, "--formt"], executable=program, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert refused.stderr == f"{name}: error: unknown option --formt; did you mean --format?\n"
    shown = subprocess.run(
        [called, "--help"], executable=program, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert shown.stdout.startswith(f"Usage: {name} [OPTION]...\n")
    assert f"  {name} -m google/vit-large-patch16-224 --explain\n" in shown.stdout


def test_a_full_disk_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([find_executable()], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr == b"sched-pipeline: error: cannot write to standard output\n"


@pytest.mark.parametrize(
    ("columns", "titles", "left_out"),
    [
        (200, ["type", "slack, s"], ""),
        (90, ["host", "type", "memory, MB"], "no room for: slack, s, link in, s, bits out"),
        (
            45,
            ["stage", "host", "layers", "compute, s"],
            "no room for: slack, s, link in, s, bits out, type, ",
        ),
    ],
)
def test_the_explanation_fits_the_terminal(columns: int, titles: list[str], left_out: str) -> None:
    ours, theirs = os.openpty()
    done = subprocess.Popen(
        [find_executable(), "-m", "google/vit-base-patch16-224", "--explain"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**os.environ, "COLUMNS": str(columns)},
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # as Linux reports that the other end is closed
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    assert done.wait(60) == 0
    lines = shown.decode().splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("stage "))
    assert all(title in lines[head] for title in titles)
    assert all(len(line) <= columns for line in lines[head : head + 9])
    assert lines[head + 9].startswith(left_out or "bottleneck")
