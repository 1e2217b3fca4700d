"""Test that a run, its simulation and the scheduler's program make one plan of the same files."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from effort import cases
from runtime_request import request as run_request

from pipeedge.base.errors import InfeasibleError
from pipeedge.base.text_lengths import InputSizes
from pipeedge.cli.schedule import with_input_bytes
from pipeedge.models.registry import find_outline
from pipeedge.plan.sched_pipeline import run_program
from pipeedge.plan.schedule_choice import PlannedSchedule, plan_schedule
from pipeedge.request.config import TRANSPORTS
from pipeedge.simulate.options import parse_simulate
from pipeedge.simulate.session import FinishedSimulation, simulate_request

MODELS = ("vit-digits", "facebook/deit-small-distilled-patch16-224", "bert-base-uncased")
MICROBATCHES = 40
SIZE = 8
ENDED = "no feasible schedule"


@dataclass(frozen=True)
class Case:
    """Random files, and what is asked of them."""

    files: dict[str, Any]
    model: str
    hosts: tuple[str, ...]
    """Host of each rank."""
    in_file_order: bool
    """Whether the ranks are in the order of the devices file, so that ``-H`` can be left out."""
    data_rank: int
    tokens: int | None
    transport: str
    link_bits: str
    latency: bool
    """Whether links have a latency, which the simulation overlaps with the next microbatch."""


def random_case(seed: int) -> Case:
    """Return a cluster of up to seven hosts, with whatever a profile may have."""
    draw = random.Random(seed)
    model = draw.choice(MODELS)
    outline = find_outline(model)
    layers = outline.n_layers
    elements = [draw.choice((500, 2_000, 20_000, 150_000)) for _ in range(layers - 1)] + [100]

    def some(low: float, high: float) -> float:
        return low * (high / low) ** draw.random()

    def profile() -> dict[str, Any]:
        found: dict[str, Any] = {"batch_size": SIZE, "dtype": "torch.float32"}
        base = some(1e-4, 1e-2)
        found["time_s"] = [base * some(0.5, 2) for _ in range(layers)]
        if draw.random() < 0.5:
            found |= {"feed_s": base * some(0.1, 10), "collect_s": base * some(0.01, 1)}
        if draw.random() < 0.4:
            found |= {key: [base * some(0.01, 0.5) for _ in range(layers)] for key in ("receive_s", "send_s")}
        if draw.random() < 0.5:
            keys = ("receive_s", "receive_s_per_MB", "send_s", "send_s_per_MB")
            found["handling"] = {each: {key: base * some(0.01, 1) for key in keys} for each in TRANSPORTS}
        return found

    kinds, devices, number = {}, {}, 0
    for kind in range(draw.randint(1, 3)):
        name = f"kind{kind}"
        kinds[name] = {
            "bw_Mbps": some(5, 2000),
            "mem_MB": some(layers / 3, 4 * layers),
            "model_profiles": {model: [profile()]},
        }
        listed = [f"h{number + each}" for each in range(draw.randint(1, 3))]
        devices[name], number = listed, number + len(listed)
    known = [host for hosts in devices.values() for host in hosts]
    in_file_order = draw.random() < 0.5
    hosts = tuple(known if in_file_order else draw.sample(known, draw.randint(1, len(known))))
    latency = draw.random() < 0.3
    files: dict[str, Any] = {
        "models.yml": {
            model: {
                "layers": layers,
                "mem_MB": [1] * layers,
                "parameters_in": draw.choice((64, 1_000, 150_528)),
                "parameters_out": elements,
            }
        },
        "types.yml": kinds,
        "devices.yml": devices,
    }
    if draw.random() < 0.5 and len(known) > 1:
        links: dict[str, Any] = {}
        for _ in range(draw.randint(1, 5)):
            source, target = draw.sample(known, 2)
            speed = {"bw_Mbps": 0 if draw.random() < 0.1 else some(5, 2000)}
            links.setdefault(source, {})[target] = speed | (
                {"latency_s": some(1e-4, 0.02)} if latency else {}
            )
        files["links.yml"] = links
    tokens = draw.choice((16, 100, 512)) if outline.takes_text else None
    link_bits = draw.choice(("0", "0", "8", "auto"))
    data_rank = draw.choice((0, draw.randrange(len(hosts))))
    transport = draw.choice(TRANSPORTS)
    return Case(files, model, hosts, in_file_order, data_rank, tokens, transport, link_bits, latency)


def planned_run(case: Case, files: str) -> PlannedSchedule | str:
    comm = "--key member.pem" if case.transport == "tcp-tls" else f"-c {case.transport}"
    line = f"0 {len(case.hosts)} -m {case.model} -u {SIZE} {files} -H {','.join(case.hosts)} {comm}"
    line += f" -D {case.data_rank}" if case.data_rank else ""
    try:
        return plan_schedule(
            run_request(f"{line} --link-bits {case.link_bits}"),
            find_outline(case.model),
            InputSizes(case.tokens),
        )
    except InfeasibleError:
        return ENDED


def simulated(case: Case, files: str) -> FinishedSimulation | str:
    line = f"-m {case.model} -u {SIZE} -b {SIZE * MICROBATCHES} {files} --transport {case.transport}"
    line += f" --link-bits {case.link_bits}"
    line += f" --data-host {case.hosts[case.data_rank]}" if case.data_rank else ""
    line += "" if case.in_file_order else f" -H {','.join(case.hosts)}"
    line += "" if case.tokens is None else f" --tokens {case.tokens}"
    try:
        return simulate_request(parse_simulate(line.split()))
    except InfeasibleError:
        return ENDED


def programs_answer(case: Case, files: str) -> dict[str, Any] | str:
    line = f"-m {case.model} -b {SIZE} {files} --transport {case.transport} --link-bits {case.link_bits}"
    line += f" --data-host {case.hosts[case.data_rank]} --format json"
    line += "" if case.in_file_order else f" --hosts {','.join(case.hosts)}"
    line += "" if case.tokens is None else f" --tokens {case.tokens}"
    try:
        answer: dict[str, Any] = json.loads(run_program(with_input_bytes(line.split())))
    except InfeasibleError:
        return ENDED
    return answer


@pytest.mark.parametrize("seed", range(cases(200)))
def test_run_simulation_and_program_make_one_plan(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    case = random_case(seed)
    for name, body in case.files.items():
        Path(name).write_text(yaml.safe_dump(body))
    files = "-sm models.yml -sdt types.yml -sd devices.yml"
    given = "links.yml" in case.files
    run = planned_run(case, files + " -sdn links.yml" * given)
    simulation = simulated(case, files + " -sdn links.yml" * given)
    answer = programs_answer(case, files + " --dev-neighbors-file links.yml" * given)
    if isinstance(run, str):
        assert (simulation, answer) == (ENDED, ENDED)
        return
    assert not isinstance(simulation, str)
    assert not isinstance(answer, str)
    stages = [
        (stage.host, [stage.layers.first, stage.layers.last], stage.quant_bits)
        for stage in run.schedule.stages
    ]
    assert simulation.schedule == run.schedule
    assert [(stage["host"], stage["layers"], stage["quant_bits"]) for stage in answer["schedule"]] == stages
    assert run.prediction is not None
    assert simulation.planned.prediction == run.prediction
    rate = run.prediction.throughput_items_per_s
    assert answer["throughput_items_per_s"] == pytest.approx(rate, rel=0.01)
    steady = simulation.report().steady_items_per_s
    assert steady is not None
    assert steady >= 0.99 * rate
    if not (case.latency and "link" in run.prediction.bottleneck):
        assert steady == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize(
    ("line", "added"),
    [
        ("-m vit-digits", "--input-bytes=64"),  # a byte a pixel
        ("--model-n=vit-digits --data-host a", "--input-bytes=64"),
        ("-mbert-base-uncased --tokens 10", "--input-bytes=240"),
        ("-mbert-base-uncased --lengths 5:3,10:1", "--input-bytes=240"),
        ("-mbert-base-uncased --lengths 5", None),
        ("-m unknown", None),
        ("-m vit-digits --input-bytes 9", None),
        ("--problem -", None),
        ("--format files -sd d.yml", None),
        ("-m", None),
        ("--help", None),
        ("-h", None),
        ("--help-all", None),
        ("--questions", None),
    ],
)
def test_pipeedge_schedule_knows_the_input_of_the_model(line: str, added: str | None) -> None:
    given = line.split()
    assert with_input_bytes(given) == (given if added is None else [*given, added])
