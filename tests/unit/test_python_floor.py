"""Test that every place that states the oldest Python states the same one, and that the pins are for it."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from places import ROOT

from pipeedge.plan.facts import OLDEST_TORCH

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OLDEST = PROJECT["project"]["requires-python"].removeprefix(">=")


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("README.md", r"Python (3\.\d+) or newer"),
        ("docs/development.md", r"pin-dependencies python(3\.\d+)"),
        ("Makefile", r"(3\.\d+) or newer"),
        ("scripts/setup", r"(3\.\d+) or newer"),
        ("scripts/pin-dependencies", r"oldest first: python(3\.\d+)"),
        ("src-native/CMakeLists.txt", r"find_package\(Python (3\.\d+)"),
        ("docs/quick-start.md", r"Python (3\.\d+) or newer"),
        ("docs/dependencies.md", r"every Python from\n(3\.\d+) to"),
    ],
)
def test_the_oldest_python_is_the_same_everywhere(path: str, pattern: str) -> None:
    assert set(re.findall(pattern, (ROOT / path).read_text())) == {OLDEST}


def test_the_oldest_torch_is_the_same_everywhere() -> None:
    wanted = [line for line in PROJECT["project"]["dependencies"] if line.startswith("torch")]
    oldest = ".".join(map(str, OLDEST_TORCH))
    assert wanted
    assert all(line.startswith(f"torch>={oldest},") for line in wanted)


def test_tools_and_setup_compare_with_the_oldest_python() -> None:
    minor = OLDEST.removeprefix("3.")
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py3{minor}"
    assert f"< (3, {minor})" in (ROOT / "scripts" / "setup").read_text()


def test_no_pin_is_for_an_older_python() -> None:
    """With one, the set-up of an interpreter that is not refused would find no version of the package."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    named = re.findall(r"python_version (?:<|>=) '3\.(\d+)'", "\n".join(pins))
    assert all(int(minor) > int(OLDEST.removeprefix("3.")) for minor in named), named


@pytest.mark.parametrize(
    ("machine", "version"), [("x86_64", "2.13.0"), ("aarch64", "2.9.1"), ("arm64", "2.13.0")]
)
def test_torch_has_one_pin_for_each_kind_of_machine(machine: str, version: str) -> None:
    """On Linux on ARM it is the newest that starts on every board and does not want CUDA."""
    here = {"platform_system": "Darwin" if machine == "arm64" else "Linux", "platform_machine": machine}
    lines = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
    ]
    chosen = [pin for pin in map(Requirement, lines) if pin.marker is None or pin.marker.evaluate(here)]
    assert [str(pin.specifier) for pin in chosen] == [f"=={version}"]
    wanted = [Requirement(line) for line in PROJECT["project"]["dependencies"] if line.startswith("torch>")]
    (fits,) = [one for one in wanted if one.marker is None or one.marker.evaluate(here)]
    assert fits.specifier.contains(version)
