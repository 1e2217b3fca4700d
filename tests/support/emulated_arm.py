"""Start Python on an emulated ARM processor, which ``scripts/test-arm DIR`` makes in DIR."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from processes import environment

PREPARED = os.environ.get("PIPEEDGE_ARM")
"""The directory that ``scripts/test-arm`` has made."""
needs_arm = pytest.mark.skipif(
    PREPARED is None, reason="needs an emulated ARM: scripts/test-arm DIR makes one and runs these tests"
)
LIMIT_S = 880.0
"""Seconds until a process counts as hung; an emulated rank takes ten times as long to start."""
TOLERANCES = {"float32": 1e-5, "int8": 0.1, "int4": 0.1, "bfloat16": 0.05}
"""Distance from results on x86, by number type. Attention rounds to bfloat16, which changes codes."""

_CASES = ROOT / "tests" / "support" / "arm_cases.py"


def command(arm: bool) -> list[str]:
    """Return how Python is started on this machine, or on the emulated one."""
    root = Path(PREPARED or "") / "root"
    return ["qemu-aarch64", "-L", str(root), str(root / "usr/bin/python3.11")] if arm else [sys.executable]


def variables(arm: bool, cpu: str = "max") -> dict[str, str]:
    """Return the environment of a process of either kind."""
    own = {**environment(), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if not arm:
        return own | {"PYTHONPATH": str(ROOT)}
    return own | {"PYTHONPATH": f"{ROOT}:{PREPARED}/site", "PYTHONNOUSERSITE": "1", "QEMU_CPU": cpu}


def compare_kernels(arm: bool, first: int, end: int, *beginning: object, cpu: str = "max") -> str:
    """Run a native program, src-native/tests/compare_kernels.cpp, to its end, and return its output."""
    build = f"{PREPARED}/build" if arm else ROOT / "build/native/_skbuild"
    emulator = ["qemu-aarch64", "-L", f"{PREPARED}/root"] if arm else []
    words = (f"{build}/bin/compare_kernels", first, end, *beginning)
    return _run([*emulator, *map(str, words)], variables(arm, cpu))


def compute(arm: bool, *arguments: object, cpu: str = "max") -> None:
    """Run ``arm_cases.py`` to its end."""
    _run([*command(arm), str(_CASES), *map(str, arguments)], variables(arm, cpu))


def _run(words: list[str], environ: dict[str, str]) -> str:
    ended = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
