"""Test that the scheduler scales times to sentences of other lengths than those of a profile."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_program import run

from pipeedge.plan.spec_writing import save_device_types, save_devices, save_models
from pipeedge.plan.specs import DeviceType, LengthProfile, ModelProfile, ModelSpec


def times_at(profile: ModelProfile, tokens: int) -> list[float]:
    """Return the seconds of each layer that the scheduler counts for sentences of ``tokens``."""
    layers = len(profile.time_s)
    ones = (1,) * layers
    model = ModelSpec((1.0,) * layers, 1, ones, tokens=512, elements_out_per_token=(0,) * layers)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_models(folder / "models.yml", {"m": model})
        save_device_types(folder / "device_types.yml", {"kind": DeviceType(1e9, 1e6, {"m": (profile,)})})
        save_devices(folder / "devices.yml", {"kind": ["a"]})
        done = run("--format=problem", "-m=m", f"--tokens={tokens}", cwd=folder)
    assert done.code == 0, done.err
    found: list[float] = json.loads(done.out)["types"][0]["time_s"]
    return found


products = st.tuples(st.floats(0, 1), st.floats(0, 1e-2), st.just(0.0))
attention = st.tuples(st.just(0.0), st.floats(0, 1e-2), st.floats(0, 1e-4))


@settings(max_examples=cases(60, 15), deadline=None)
@given(
    blocks=st.lists(st.tuples(attention, products, products, products), min_size=1, max_size=2),
    lengths=st.lists(st.integers(1, 512), min_size=2, max_size=3, unique=True),
    wanted=st.integers(1, 512),
)
def test_times_follow_from_those_at_other_lengths(
    blocks: list[tuple[tuple[float, float, float], ...]], lengths: list[int], wanted: int
) -> None:
    layers = [layer for block in blocks for layer in block]

    def times(tokens: int) -> tuple[float, ...]:
        return tuple(a + b * tokens + c * tokens**2 for a, b, c in layers)

    first, *others = lengths
    measured = ModelProfile(
        8, "float32", times(first), first, tuple(LengthProfile(each, times(each)) for each in others)
    )
    assert times_at(measured, wanted) == pytest.approx(list(times(wanted)), rel=1e-6, abs=1e-9)


def test_a_single_length_is_not_scaled() -> None:
    one = ModelProfile(8, "float32", (1.0,), 512)
    assert times_at(one, 128) == [1.0]


def test_noisy_times_stay_within_bounds() -> None:
    # Falling times, which only noise gives, do not become negative further on.
    noisy = ModelProfile(8, "float32", (2.0, 2.0), 100, (LengthProfile(200, (1.0, 1.0)),))
    assert times_at(noisy, 1000) == [1.0, 1.0]
    assert times_at(noisy, 10) == [pytest.approx(0.335), 2.0]
    steep = ModelProfile(8, "float32", (0.0, 1.0), 100, (LengthProfile(200, (0.0, 9.0)),))
    assert times_at(steep, 10) == [0.0, pytest.approx(0.1)]
