"""Native kernels on ARM beside those on x86: integers and codes have the same bits, all else is close."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from effort import cases
from emulated_arm import TOLERANCES, compare_kernels, needs_arm

pytestmark = needs_arm

VARIANTS = {
    "max": {"neoni8mm", "neondot", "neon"},
    "cortex-a72": {"neon"},
    "cortex-a76": {"neondot", "neon"},
}
"""Instruction sets of a processor for products of integers."""
KERNELS = {"layer", "codes", "forms", "score4", "score8", "score16", "score32"}
SHAPES = cases(10_000)
ATTENTION_SHAPES = cases(1_500)
AT_ONCE = 1_000
"""Shapes that a process computes."""


@pytest.mark.parametrize("first", range(0, SHAPES, AT_ONCE))
@pytest.mark.parametrize("cpu", VARIANTS)
def test_products_and_codes_are_those_of_x86_to_the_bit(cpu: str, first: int) -> None:
    """All instruction sets of a processor agree, and decoders' rows have the same bits alone."""
    digests, variants = [], {}
    for arm in (False, True):
        lines = compare_kernels(arm, first, min(SHAPES, first + AT_ONCE), cpu=cpu).splitlines()
        words = {name: rest for name, *rest in map(str.split, lines)}
        assert words.keys() == KERNELS
        digests.append({name: digest for name, (digest, *_) in words.items()})
        variants = {name: set(own) for name, (_, *own) in words.items()}
    assert digests[0] == digests[1]
    assert variants["layer"] == VARIANTS[cpu]
    assert variants["score4"] == VARIANTS[cpu] - {"neoni8mm"} | ({"neonbf16"} if cpu == "max" else set())
    assert variants["codes"] == {"neon", "portable"}


@pytest.mark.parametrize("cpu", ["max", "cortex-a72"])
def test_attention_is_that_of_x86(tmp_path: Path, cpu: str) -> None:
    """With biases, rotations and windows. A Cortex-A72 computes in float32 and rounds to bfloat16."""
    for arm in (False, True):
        compare_kernels(arm, 0, ATTENTION_SHAPES, tmp_path / str(arm), cpu=cpu)
    for dtype in ("float32", "bfloat16"):
        exact = dtype == "bfloat16" and cpu == "cortex-a72"
        expected, found = (
            np.fromfile(tmp_path / name, np.float32)
            for name in (f"False.{'float32' if exact else dtype}", f"True.{dtype}")
        )
        assert len(found) > 1000 * ATTENTION_SHAPES
        tolerance = 2.0**-8 if exact else TOLERANCES[dtype]
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-4 + tolerance * (not exact))
