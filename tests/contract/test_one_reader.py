"""Test that every program that reads the scheduler's files reports what their one reader says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from shipped_model import DIGITS

from pipeedge.auction import main as auction
from pipeedge.auction.options import parse_auction
from pipeedge.base.errors import RequestError
from pipeedge.launch.main import parse_launch
from pipeedge.plan.schedule_choice import plan_schedule
from pipeedge.plan.spec_writing import add_links
from pipeedge.plan.specs import NeighborLink
from pipeedge.profile import emitting
from pipeedge.profile.options import parse_profiler
from pipeedge.profile.request import SyntheticCommand
from pipeedge.profile.synthetic import synthesize
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.simulate.options import parse_simulate
from pipeedge.simulate.session import simulate_request
from pipeedge.testbed.cluster_file import load_cluster

SCHEDULER_FILES = ["-sm", "models.yml", "-sdt", "device_types.yml", "-sd", "devices.yml"]
DAMAGED = {
    "models.yml": (
        "m: {layers: 1, mem_MB: [1], parameters_in: 1, parameters_out: [1]\n",
        "models.yml:2: is not valid YAML",
    ),
    "device_types.yml": (
        "board:\n  bw_Mbps: fast\n",
        "device_types.yml:2: board: bw_Mbps: is 'fast'; a number is expected",
    ),
    "devices.yml": (
        "board: [a]\nother: [b, a]\n",
        "devices.yml:2: other: entry 2: the host a is listed twice; it stands under board already",
    ),
    "neighbors.yml": ("a:\n  b: 100\n", "neighbors.yml:2: a: b: is '100'; a map is expected"),
}
"""A damaged text of each file, and the beginning of the reader's line about it."""


def plan(*options: str) -> object:
    arguments = ["0", "1", "-m", "vit-digits", *SCHEDULER_FILES, *options]
    return plan_schedule(parse_runtime(arguments, Environment()).request, DIGITS)


def simulate() -> object:
    return simulate_request(
        parse_simulate(["-m", "m", *SCHEDULER_FILES, "-sdn", "neighbors.yml", "-b", "8", "-u", "8"])
    )


def bid() -> None:
    arguments = ["0", "1", "-m", "m", "-H", "a", *SCHEDULER_FILES[:4], "-sdnw", "neighbors.yml"]
    auction._take_part(parse_auction(arguments, Environment()))


def profile() -> object:
    return emitting.check_profile(Path("device_types.yml"), "board", [], emitting.Figures(), overwrite=False)


def synthetic() -> None:
    command = parse_profiler(
        ["--synthetic", "2", "--from", "board", "-dt", "slow", "-sdt", "device_types.yml"]
    )
    assert isinstance(command, SyntheticCommand)
    synthesize(command, print)


PROGRAMS: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "runtime": (plan, ("models.yml", "device_types.yml", "devices.yml")),
    "runtime --dtype auto": (lambda: plan("--dtype", "auto"), ("device_types.yml", "devices.yml")),
    "simulator": (simulate, tuple(DAMAGED)),
    "launcher": (lambda: parse_launch(["-sd", "devices.yml"]), ("devices.yml",)),
    "auction": (bid, ("models.yml", "device_types.yml", "neighbors.yml")),
    "profiler": (profile, ("device_types.yml",)),
    "profiler --synthetic": (synthetic, ("device_types.yml",)),
    "doctor --neighbors-file": (
        lambda: add_links(Path("neighbors.yml"), {("a", "b"): NeighborLink(1.0)}),
        ("neighbors.yml",),
    ),
    "test bed": (lambda: load_cluster("CLUSTER.yml"), ("device_types.yml", "devices.yml")),
}


@pytest.mark.parametrize(
    ("program", "name"), [(program, name) for program, (_, names) in PROGRAMS.items() for name in names]
)
def test_damaged_file_ends_every_program_with_the_line_of_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for other in DAMAGED:
        Path(other).write_text("{}\n")
    Path("CLUSTER.yml").write_text("device_types: device_types.yml\ndevices: devices.yml\n")
    text, line = DAMAGED[name]
    Path(name).write_text(text)
    start, _ = PROGRAMS[program]
    with pytest.raises(RequestError) as caught:
        start()
    assert str(caught.value).removeprefix("sched-pipeline: ").startswith(line)
    assert "\n" not in str(caught.value)
