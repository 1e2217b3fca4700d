"""Cases of test_troubleshooting.py: runs that are slow, the scheduler and its files, profiling."""

from __future__ import annotations

import dataclasses
import errno
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from trouble import KIND, MBPS, MODEL, PROFILE, Cases, Patch, raising, refused
from waiting import LIMIT_S

from pipeedge.base.errors import PipeEdgeError, one_line
from pipeedge.doctor.link_checks import check_links
from pipeedge.models.dtypes import slow_here
from pipeedge.observe.metrics import StageStats
from pipeedge.plan.choice import Trial, choose
from pipeedge.plan.link_speed import Estimate
from pipeedge.plan.listed_model import ListedModel
from pipeedge.plan.prediction import Prediction, StagePrediction, compare
from pipeedge.plan.sched_pipeline import find_executable
from pipeedge.plan.schedule_choice import plan_schedule
from pipeedge.plan.scheduler import Choice, SchedulerRequest
from pipeedge.plan.spec_files import load_models
from pipeedge.plan.specs import NeighborLink as LinkSpec
from pipeedge.profile import session as profiling
from pipeedge.profile.network import measure_link
from pipeedge.profile.options import parse_profiler
from pipeedge.profile.result_files import load_results
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.simulate.options import parse_simulate
from pipeedge.simulate.session import simulate_request
from pipeedge.transport.rpc import RpcTransport

CASES = Cases()
says = CASES.says


# --- it is slow -----------------------------------------------------------------------------------


@says(
    "this processor has no instructions for bfloat16 …, so bfloat16 will be slow here; pipeedge profile "
    "--dtype measures how slow"
)
def a_type_is_slow(patch: Patch) -> str:
    return slow_here(torch.bfloat16, torch.device("cpu"), {"avx2": True}) or ""


def remark(
    *,
    measured_s: float,
    tokens: int | None = None,
    profiled: tuple[int, ...] = (),
    profiled_kernels: str | None = None,
    **more: Any,
) -> str:
    """Return the remarks on a stage with a predicted time of 1 s."""
    values = {
        **dict.fromkeys((field.name for field in dataclasses.fields(StageStats)), 1),
        "stage": 0,
        "rank": 0,
        "compute_s_mean": measured_s,
        "compute_cpu_s_mean": measured_s,
        "link_s": 1.0,
        "threads": 1,
        **more,
    }
    stage = StagePrediction(busy_s=1.0, link_s=1.0, threads=1, tokens=profiled, kernels=profiled_kernels)
    promise = Prediction((stage,), 8, 1.0, 2.0, "stage 0", tokens)
    measured = StageStats(**values)
    found = compare(promise, [measured], items=80, run_items_per_s=7.0, steady_items_per_s=7.5)
    return "\n".join(found.remarks)


@says(
    "stage 0 (rank 0) is off by +80%: it computes with 4 threads and was profiled with 1; set "
    "OMP_NUM_THREADS=1, or profile as it runs"
)
def threads_differ(patch: Patch) -> str:
    return remark(measured_s=1.8, threads=4)


@says(
    "stage 0 (rank 0) computes with the kernels torch and was profiled with onednn; use --kernels onednn, or "
    "profile as it runs"
)
def kernels_differ(patch: Patch) -> str:
    return remark(measured_s=1.0, profiled_kernels="onednn", kernels="torch")


@says("it was kept from its processor for 40% of the time; is other load there")
def other_load(patch: Patch) -> str:
    return remark(measured_s=2.0, compute_cpu_s_mean=1.2)


@says(
    "the link from stage 0 (rank 0) is off by +50%: is other traffic on it, or is bw_Mbps of its devices too "
    "high?"
)
def other_traffic(patch: Patch) -> str:
    return remark(measured_s=1.0, link_s=1.5)


@says(
    "stage 0 (rank 0) is off by -75%: it was profiled with 512 tokens and the longest sentence here has 128: "
    "profile several lengths (pipeedge profile --tokens)"
)
def lengths_differ(patch: Patch) -> str:
    return remark(measured_s=0.25, tokens=128, profiled=(512,))


@says(
    "stage 0 (rank 0) is off by -60%: its times are those of the longest sentence, 128 tokens, and a "
    "microbatch is only as long as its own longest; are most sentences shorter?"
)
def sentences_are_shorter(patch: Patch) -> str:
    return remark(measured_s=0.4, tokens=128, profiled=(128, 512))


@says(
    "rank 0 -> rank 1: 105 to 338 Mbps in 15 rounds, too unsteady to plan with, so --neighbors-file gets no "
    "figure: measure again when the machines and the network are idle"
)
def rounds_differ(patch: Patch) -> str:
    estimate = Estimate(LinkSpec(200 * MBPS, 0.001), 105 * MBPS, 338 * MBPS, 15)
    return "\n".join(finding.what for finding in check_links([(0, 1)], {0: estimate}, None))


@says(
    "-c rpc listens at 10.0.0.1: whoever can connect there can run programs on this machine, or end the run; "
    "use it in a network that you trust, or leave it out"
)
def rpc_is_exposed(patch: Patch) -> str:
    return RpcTransport(0, 1).exposure(["10.0.0.1"]) or ""


# --- the scheduler and its files ------------------------------------------------------------------


def schedule(
    *options: str,
    model: Mapping[str, Any] = MODEL,
    kind: Mapping[str, Any] = KIND,
    kinds: Mapping[str, Any] | None = None,
    devices: Any = None,
) -> str:
    """Return the output of ``pipeedge schedule`` on standard error."""
    files = {
        "m.yml": {"m": model},
        "t.yml": kinds or {"board": kind},
        "d.yml": devices or {"board": ["a", "b"]},
    }
    for name, content in files.items():
        Path(name).write_text(
            content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        )
    done = subprocess.run(
        [find_executable(), "-m", "m", "-sm", "m.yml", "-sdt", "t.yml", "-sd", "d.yml", *options],
        capture_output=True,
        encoding="utf-8",
        timeout=LIMIT_S,
        check=False,
    )
    return done.stderr


@says(
    "no feasible schedule: 1075.0 MB of memory are missing: the layers need 1175.0 MB without buffers, 1 "
    "host together have 100.0 MB"
)
def too_little_memory(patch: Patch) -> str:
    many = {**MODEL, "layers": 47, "mem_MB": [25] * 47, "parameters_out": [1000]}
    kind = {**KIND, "model_profiles": {"m": [{**PROFILE, "time_s": [1] * 47}]}}
    return schedule(model=many, kind=kind, devices={"board": ["a"]})


@says(
    "--objective energy: the power of a, b is unknown; write busy_W (and idle_W) into the device type, in "
    "watts as a meter shows them, …"
)
def a_power_is_unknown(patch: Patch) -> str:
    return schedule("--plan", "auto", "--objective", "energy")


@says("no feasible plan: none has a throughput of 100 items/s; the fastest has …: lower --min-throughput")
def no_plan_is_that_fast(patch: Patch) -> str:
    options = ["--plan", "auto", "--objective", "energy", "--min-throughput", "100"]
    return schedule(*options, kind={**KIND, "busy_W": 8, "idle_W": 3})


@says(
    "--held-out refuses microbatches of 8, …, an agreement of 1 expected: 0.5 on 200 held-out items, 0.99 "
    "wanted",
    "no plan keeps the agreement on held-out items: …",
)
def a_plan_fails_on_held_out_items(patch: Patch) -> str:
    schedule()
    asked = SchedulerRequest(
        Path("m.yml"), Path("t.yml"), Path("d.yml"), "m", choice=Choice((8,), 0.99, ("float32",))
    )
    return refused(lambda: choose(asked, ("a", "b"), trial=Trial(200, lambda *_: 0.5)))


@says("-q: an agreement of 0.9 is expected, 0.99 wanted; give more bits, or lower --min-agreement")
def given_bits_lose_too_much(patch: Patch) -> str:
    schedule(model={**MODEL, "agreement_at_bits": {4: [0.9] * 3}})
    files = "-sm m.yml -sdt t.yml -sd d.yml -H a,b --plan auto -q 4,0"
    asked = parse_runtime(["0", "2", "-m", "m", *files.split()], Environment()).request
    model = ListedModel("m", load_models(Path("m.yml"))["m"])
    return refused(lambda: plan_schedule(asked, model))


@says("no feasible schedule: layer 1 fits on no host: it needs …")
def a_layer_is_too_large(patch: Patch) -> str:
    return schedule(model={**MODEL, "mem_MB": [900, 2, 1, 2]})


@says("no schedule survives the loss of any one host: without …, …")
def a_loss_ends_the_run(patch: Patch) -> str:
    return schedule("--survive-loss", kind={**KIND, "mem_MB": 4})


@says("the plan: layer 4 is in no stage")
def an_evaluated_schedule_lacks_a_layer(patch: Patch) -> str:
    Path("s.yml").write_text("- a: [1, 3]\n")
    return schedule("--evaluate", "s.yml")


@says("the plan names the host f9; there are: …")
def an_evaluated_schedule_names_another_host(patch: Patch) -> str:
    Path("s.yml").write_text("- f9: [1, 4]\n")
    return schedule("--evaluate", "s.yml")


@says("…: the slowness of the host f0 must be above 0")
def a_host_is_infinitely_fast(patch: Patch) -> str:
    Path("c.yml").write_text("hosts: [{host: f0, slowness: 0}]\n")
    return schedule("--conditions", "c.yml", devices={"board": ["f0", "b"]})


@says("layers are loaded that the model does not have")
def layers_of_another_model_are_loaded(patch: Patch) -> str:
    Path("c.yml").write_text("loaded: [{host: a, layers: [4, 5]}]\n")
    return schedule("--conditions", "c.yml")


@says("--format bids: bids are of device types in one number type; …")
def bids_for_a_joint_plan(patch: Patch) -> str:
    return schedule("--format", "bids", "--plan", "auto")


@says("--problem, --conditions and --evaluate: only one of them can be standard input")
def standard_input_is_given_twice(patch: Patch) -> str:
    return schedule("--conditions", "-", "--evaluate", "-")


@says("--link-bits auto: fewer bits are always better for latency, and never worse for energy; …")
def bits_without_a_limit(patch: Patch) -> str:
    return schedule("--link-bits", "auto", "--objective", "latency")


@says("the memory is enough, but no links with bandwidth join the hosts it takes")
def links_without_bandwidth(patch: Patch) -> str:
    return schedule(kind={**KIND, "bw_Mbps": 0, "mem_MB": 4})


@says("… has no profile for … batch size 4, dtype …; left out: 2 hosts")
def no_profile_of_this_size(patch: Patch) -> str:
    return schedule("-b", "4")


@says("no schedule was found within the time limit of …, and none could be ruled out; raise --time-limit")
def too_little_time(patch: Patch) -> str:
    # Each host has room for one of these groups of layers, and the hosts come in another order.
    groups = [
        [7, 22],
        [13, 3, 25],
        [30, 4],
        [11, 16],
        [2, 19, 5],
        [28, 9],
        [14, 1, 8],
        [21, 17],
        [6, 27],
        [12, 10],
    ]
    memory = [sum(group) for group in sorted(groups, key=lambda group: group[0])]
    layers = [size for group in groups for size in group]
    model = {**MODEL, "layers": len(layers), "mem_MB": layers, "parameters_in": 0, "parameters_out": [0]}
    profile = {"m": [{**PROFILE, "time_s": [1] * len(layers)}]}
    kinds = {f"t{n}": {**KIND, "mem_MB": size, "model_profiles": profile} for n, size in enumerate(memory)}
    devices = {f"t{n}": [f"h{n}"] for n in range(len(memory))}
    return schedule("-i", "0", "-o", "0", "--time-limit", "1e-9", model=model, kinds=kinds, devices=devices)


@says("… the type raspi is not in …; left out: 3 hosts", "no host is left to schedule on; …")
def an_unknown_type(patch: Patch) -> str:
    warnings = schedule(devices={"board": ["a", "b"], "raspi": ["r0", "r1", "r2"]})
    return warnings + schedule(devices={"raspi": ["r0", "r1", "r2"]})


@says("… the host rcc-1 is listed twice")
def a_host_is_listed_twice(patch: Patch) -> str:
    return schedule(devices={"board": ["rcc-1", "rcc-1"]})


@says(
    "… was profiled with 512 tokens only; its times are not scaled to 128: profile it with --tokens 128,512"
)
def a_profile_of_one_length(patch: Patch) -> str:
    model = {**MODEL, "tokens": 512, "parameters_in_per_token": 1, "parameters_out_per_token": [1] * 4}
    kind = {**KIND, "model_profiles": {"m": [{**PROFILE, "tokens": 512}]}}
    return schedule("--tokens", "128", model=model, kind=kind)


@says("…: is not valid YAML: …")
def a_file_is_no_yaml(patch: Patch) -> str:
    Path("odd.yml").write_text("m:\n\t- 1\n")
    return refused(lambda: load_models(Path("odd.yml")))


@says("…: is empty")
def a_file_is_empty(patch: Patch) -> str:
    Path("empty.yml").write_text("# nothing\n")
    return refused(lambda: load_models(Path("empty.yml")))


@says("… nor on the PATH; install the package (pip install -e .)")
def the_scheduler_is_not_installed(patch: Patch) -> str:
    patch.setattr(sys, "executable", str(Path("empty/python").absolute()))
    patch.setenv("PATH", str(Path("empty").absolute()))
    return refused(find_executable)


@says("a run with its data on b takes another plan (…): …; see --data-host b")
def a_run_plans_for_its_data(patch: Patch) -> str:
    return schedule(
        "--hosts", "b,a", model=MODEL | {"parameters_in": 10_000_000}, kind=KIND | {"mem_MB": 2000}
    )


@says("the hosts of d.yml make 1,025 ranks, and a run has at most 1024; choose some with -H/--hosts")
def a_cluster_has_too_many_ranks(patch: Patch) -> str:
    schedule(devices={"board": [f"h{number}" for number in range(1025)]})
    line = "-m m -sm m.yml -sdt t.yml -sd d.yml"
    return refused(lambda: simulate_request(parse_simulate(line.split())))


def lossy(line: str) -> str:
    """Return the refusal of a simulated run of two boards, each with memory for a part of the model."""
    schedule(kind=KIND | {"mem_MB": 5})
    line = f"-m m -sm m.yml -sdt t.yml -sd d.yml -u 8 --lose {line}"
    return refused(lambda: simulate_request(parse_simulate(line.split())))


@says("--lose needs --transport tcp or tcp-tls: over p2p, a run ends with the first rank that it loses")
def a_simulated_run_cannot_lose_a_rank(patch: Patch) -> str:
    return lossy("1@40")


@says("--lose 0@40: the run ends there, because rank 0 makes the plans; name another rank")
def a_simulated_run_loses_rank_0(patch: Patch) -> str:
    return lossy("0@40 --transport tcp -b 640")


@says("--lose 1@40: the run ends there, because nothing fits without it: …")
def a_simulated_run_loses_too_much(patch: Patch) -> str:
    return lossy("1@40 --transport tcp -b 640")


# --- profiling ------------------------------------------------------------------------------------


def profile(line: str) -> str:
    """Return the output of ``pipeedge profile`` until its measurements end or it fails."""
    told: list[str] = []
    command = parse_profiler(line.split())
    try:
        if command.measure is None:
            profiling.use_results(command, told.append, told.append)
        else:
            with Patch.context() as patch:
                patch.setattr(profiling, "measure_links", lambda job: {})
                profiling.profile(command, told.append, told.append)
    except PipeEdgeError as error:
        told.append(one_line(error))
    return "\n".join(told)


def profiled(path: str = "profiler_results.yml", **changes: Any) -> None:
    """Write the results of two layers."""
    shapes = {"shape_in": [[17, 64]], "shape_out": [[17, 64]]}
    layers = [{"layer": layer, "memory": 0.1, "time": 1.0, **shapes} for layer in range(1, 17)]
    document = {
        "model_name": "vit-digits",
        "dtype": "torch.float32",
        "batch_size": 8,
        "layers": 16,
        "profile_data": layers,
        **changes,
    }
    Path(path).write_text(yaml.safe_dump(document))


MEASURE = "-m vit-digits -i 1 --no-warmup"


@says(
    "profiler_results.yml has layers 1-16 already, and results are never replaced; choose other layers (-l, "
    "-L) or another file (-o), or use them as they are (--from-results)"
)
def layers_are_measured_already(patch: Patch) -> str:
    profiled()
    return profile(f"{MEASURE} -b 8 -o profiler_results.yml")


@says("profiler_results-1-float32.yml is kept from an earlier run; delete it to measure it again")
def a_profile_is_kept(patch: Patch) -> str:
    profiled("profiler_results-1-float32.yml", batch_size=1)
    return profile(f"{MEASURE} -b 1,2 --dtype float32 -L 1 -o profiler_results.yml")


@says(
    "profiler_results.yml has results of another batch size: 8, but now it is 4; choose another file with -o"
)
def results_of_another_size(patch: Patch) -> str:
    profiled()
    return profile(f"{MEASURE} -b 4 -o profiler_results.yml")


@says(
    "layer times vary by 24% between repetitions (the medians are kept); measure again while nothing else "
    "runs"
)
def times_vary(patch: Patch) -> str:
    profiled()
    results = load_results(Path("profiler_results.yml"))
    layers = tuple(
        dataclasses.replace(layer, measured=dataclasses.replace(layer.measured, time_spread_s=0.24))
        for layer in results.profile_data
    )
    measured = dataclasses.replace(results, profile_data=layers)
    patch.setattr(profiling, "measure_model", lambda *_: measured)
    return profile(f"{MEASURE} -b 8 -o others.yml")


@says("… exists already and differs: …; replace it with --overwrite")
def a_model_is_there_already(patch: Patch) -> str:
    profiled()
    Path("own.yml").write_text(yaml.safe_dump({"vit-digits": MODEL}))
    return profile(
        "--from-results -o profiler_results.yml -dt board -sm own.yml -sdt own_types.yml --bw-Mbps 9"
    )


@says("device type board is new; give its bandwidth (--bw-Mbps) or have it measured (--measure-link)")
def a_type_is_new(patch: Patch) -> str:
    profiled()
    return profile("--from-results -o profiler_results.yml -dt board -sm new.yml -sdt new_types.yml")


@says("no measurement server at pi2:29600 (Connection refused); start 'pipeedge profile --serve-link' there")
def nobody_measures(patch: Patch) -> str:
    error = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    patch.setattr(socket, "create_connection", raising(error))
    return refused(lambda: measure_link("pi2", 29600))


@says("times do not depend on real weights: use --random-weights")
def weights_to_profile_are_missing(patch: Patch) -> str:
    return profile("-m google/vit-base-patch16-224 -b 1 -l 1 -L 1 -o missing.yml")
