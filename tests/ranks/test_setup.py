"""Test what set-up refuses before it creates anything, and that the installed package is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT


@pytest.mark.parametrize(
    ("interpreter", "line"),
    [
        ("echo 3.10; exit 1", "is Python 3.10; Python 3.11 or newer is needed: name one with PYTHON=..."),
        ("exit 1", "does not start; Python 3.11 or newer is needed: name one with PYTHON=..."),
    ],
)
def test_an_old_python_is_refused_in_one_line(interpreter: str, line: str, tmp_path: Path) -> None:
    python, environment = tmp_path / "python", tmp_path / "environment"
    python.write_text(f"#!/bin/sh\n{interpreter}\n")
    python.chmod(0o755)
    ended = subprocess.run(
        [ROOT / "scripts" / "setup", environment],
        env={**os.environ, "PYTHON": str(python), "CXX": "no-compiler"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (1, f"setup: {python} {line}\n")
    assert not environment.exists()


def test_an_environment_of_an_old_python_is_refused_in_one_line(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\n[ "$1" = -m ] && exit 0\necho 3.10; exit 1\n')
    python.chmod(0o755)
    ended = subprocess.run(
        [ROOT / "scripts" / "setup", tmp_path], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        f"setup: {tmp_path} has Python 3.10; 3.11 or newer is needed: choose another place with VENV=..., "
        "and an interpreter with PYTHON=..."
    ]


def test_the_package_is_found_beside_a_folder_of_its_name(tmp_path: Path) -> None:
    """As that of a clone beside the user's script, or in the directory in which Python starts."""
    (tmp_path / "pipeedge").mkdir()
    (tmp_path / "ask.py").write_text("from pipeedge import __file__, __version__; print(__file__)\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in (["ask.py"], ["-c", "import pipeedge; print(pipeedge.__file__)"]):
        ended = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ended.stdout, ended.stderr) == (f"{ROOT / 'pipeedge' / '__init__.py'}\n", "")
