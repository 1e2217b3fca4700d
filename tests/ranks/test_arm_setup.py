"""What ``make setup`` brings to an ARM board, by pip's own choice of packages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from emulated_arm import LIMIT_S, needs_arm
from places import ROOT

pytestmark = needs_arm

PLATFORMS = tuple(f"manylinux_2_{minor}_aarch64" for minor in range(36, 16, -1))
"""Wheels that Debian 12 installs on a board, best first; its glibc is 2.36."""
PIP = """
import platform, runpy
platform.machine = lambda: "aarch64"
runpy.run_module("pip", run_name="__main__")
"""
"""pip as on a board: ``--platform`` chooses the wheels, but markers look at the machine that pip runs on."""


def test_setup_brings_no_cuda_to_a_board(tmp_path: Path) -> None:
    """Nothing is installed. The choice is that of pip, from the index that is configured here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    own = f"{project['name']}["
    wanted = [*project["dependencies"], *extras["runtime"], *extras["plot"], *extras["dev"]]
    (tmp_path / "wanted.txt").write_text("\n".join(line for line in wanted if not line.startswith(own)))
    report = tmp_path / "report.json"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    board = [word for platform in PLATFORMS for word in ("--platform", platform)]
    board += ["--implementation", "cp", "--python-version", python, "--target", str(tmp_path / "nowhere")]
    options = ("--dry-run", "--ignore-installed", "--only-binary=:all:", "-qq", "--report", report)
    files = ("-c", ROOT / "constraints.txt", "-r", tmp_path / "wanted.txt")
    ended = subprocess.run(
        [sys.executable, "-c", PIP, "install", *map(str, (*board, *options, *files))],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    chosen = {
        each["metadata"]["name"].lower(): each["download_info"]["url"]
        for each in json.loads(report.read_text())["install"]
    }
    assert {"torch", "numpy", "transformers"} <= chosen.keys()
    assert re.search(r"/torch-2\.9\.1-.*aarch64\.whl", chosen["torch"])
    assert not {name for name in chosen if re.match("nvidia|cuda|triton", name)}
