"""Test that the commands in ``deploy/`` are what the program takes, and that their limits suit each other."""

from __future__ import annotations

import configparser
import re
import shlex
from collections.abc import Sequence
from typing import Any

import pytest
import yaml
from places import ROOT

from pipeedge.nodes.options import parse_node
from pipeedge.request.config import RunRequest
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime

DEPLOY = ROOT / "deploy"


def request_of(words: Sequence[str]) -> RunRequest:
    program, command, *argv = words
    assert (program.rpartition("/")[2], command) == ("pipeedge", "run")
    return parse_runtime(argv, Environment()).request


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))


@pytest.fixture
def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "pipeedge.service").read_text("utf-8"))
    return parser


def check_goes_on(request: RunRequest, grace_s: float) -> None:
    assert request.transport.comm == "tcp"
    assert request.transport.on_failure == "continue"
    assert request.serve.request_timeout_s < grace_s


def test_the_unit_runs_a_rank_that_ends_within_its_time(unit: configparser.RawConfigParser) -> None:
    service = unit["Service"]
    for rank in range(3):
        request = request_of(shlex.split(service["ExecStart"].replace("${RANK}", str(rank))))
        assert (request.world.rank, request.world.size) == (rank, 3)
        assert request.serve.is_local
        check_goes_on(request, float(service["TimeoutStopSec"]))
    assert service["Restart"] == "on-failure"


def test_the_unit_of_a_node_is_a_node_that_has_time_to_end() -> None:
    parser = configparser.RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "pipeedge-node.service").read_text("utf-8"))
    program, command, *argv = shlex.split(parser["Service"]["ExecStart"])
    assert (program.rpartition("/")[2], command) == ("pipeedge", "node")
    request = parse_node(argv, Environment())
    assert str(request.directory) == f"/var/lib/{parser['Service']['StateDirectory']}"
    assert float(parser["Service"]["TimeoutStopSec"]) > 40  # what a run has to answer what it has accepted


def test_the_containers_are_one_world() -> None:
    services = compose()["services"]
    requests = {name: request_of(shlex.split(each["command"])) for name, each in services.items()}
    assert sorted(request.world.rank for request in requests.values()) == list(range(len(services)))
    for name, request in requests.items():
        assert request.world.size == len(services)
        assert requests[request.world.addr].world.rank == 0
        assert services[name]["restart"] == "on-failure"
        assert services[name]["init"]
        check_goes_on(request, float(services[name]["stop_grace_period"].removesuffix("s")))
    (data_rank,) = (name for name, each in services.items() if "ports" in each)
    serve = requests[data_rank].serve
    assert requests[data_rank].world.rank == 0
    assert services[data_rank]["ports"] == [f"127.0.0.1:{serve.port}:{serve.port}"]
    assert not serve.is_local  # or nothing reaches it from outside of its container
    assert f":{serve.port}/health" in services[data_rank]["healthcheck"]["test"][-1]


def test_the_image_is_built_from_what_is_there() -> None:
    lines = (DEPLOY / "Dockerfile").read_text("utf-8").replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert [word for word, _ in steps if word == "FROM"] == ["FROM", "FROM"]
    extras = re.search(r"\[([\w,]+)\]", " ".join(rest for word, rest in steps if word == "RUN"))
    assert extras is not None
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert set(extras[1].split(",")) <= set(known)
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    for line in allowed:
        assert not line.startswith("!") or (ROOT / line[1:]).exists()
    user = next(rest for word, rest in steps if word == "USER")
    assert any(f"useradd --create-home {user}" in rest for word, rest in steps if word == "RUN")


def test_the_guide_quotes_the_files(unit: configparser.RawConfigParser) -> None:
    guide = (ROOT / "docs" / "serving.md").read_text("utf-8")
    for key in ("ExecStart", "Restart", "TimeoutStopSec", "SuccessExitStatus"):
        assert f"{key}={unit['Service'][key]}\n" in guide
    assert compose()["services"]["rank0"]["command"] in guide
