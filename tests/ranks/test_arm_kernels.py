"""Native kernels on ARM beside those on x86: integers and codes have the same bits, all else is close."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from effort import cases
from emulated_arm import TOLERANCES, compute, needs_arm

pytestmark = needs_arm

VARIANTS = {
    "max": {"neoni8mm", "neondot", "neon"},
    "cortex-a72": {"neon"},
    "cortex-a76": {"neondot", "neon"},
}
"""Instruction sets of a processor for products of integers."""
KINDS = ("layer", "codes", "forms", "score4", "score8", "score16", "score32")
SHAPES = cases(10_000)
ATTENTION_SHAPES = cases(1_500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arm")


@pytest.fixture(scope="module")
def digests(folder: Path) -> Mapping[str, str]:
    compute(False, "kernels", SHAPES, folder / "x86.json")
    found: dict[str, str] = json.loads((folder / "x86.json").read_text())
    return found


@pytest.mark.parametrize("cpu", VARIANTS)
def test_products_and_codes_are_those_of_x86_to_the_bit(
    folder: Path, digests: Mapping[str, str], cpu: str
) -> None:
    """Random shapes for each instruction set of the processor. Decoders' rows have the same bits alone."""
    compute(True, "kernels", SHAPES, folder / f"{cpu}.json", cpu=cpu)
    found = json.loads((folder / f"{cpu}.json").read_text())
    decoders = VARIANTS[cpu] - {"neoni8mm"} | ({"neonbf16"} if cpu == "max" else set())
    assert {name.split()[1] for name in found if name.startswith("layer")} == VARIANTS[cpu]
    assert {name.split()[1] for name in found if name.startswith("score4")} == decoders
    assert {"codes neon", "codes portable"} <= found.keys()
    for kind in KINDS:
        both = {value for each in (digests, found) for name, value in each.items() if name.split()[0] == kind}
        assert len(both) == 1, (digests, found)


@pytest.mark.parametrize("cpu", ["max", "cortex-a72"])
def test_attention_is_that_of_x86(folder: Path, cpu: str) -> None:
    """With biases, rotations and windows. A Cortex-A72 computes in float32 and rounds to bfloat16."""
    if not (folder / "x86.npz").exists():
        compute(False, "attention", ATTENTION_SHAPES, folder / "x86.npz")
    compute(True, "attention", ATTENTION_SHAPES, folder / f"{cpu}.npz", cpu=cpu)
    here, there = np.load(folder / "x86.npz"), np.load(folder / f"{cpu}.npz")
    assert len(there.files) == 2 * ATTENTION_SHAPES
    for name in there.files:
        dtype, number = name.split()
        exact = dtype == "bfloat16" and cpu == "cortex-a72"
        expected = here[f"float32 {number}" if exact else name]
        tolerance = 2.0**-8 if exact else TOLERANCES[dtype]
        np.testing.assert_allclose(there[name], expected, rtol=tolerance, atol=1e-4 + tolerance * (not exact))
