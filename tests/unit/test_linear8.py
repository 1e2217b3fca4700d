"""Test linear layers in 8 bits against double precision, and each instruction set against the others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge import _native as native
from pipeedge.models.int8_passes import (
    Finish,
    finish_sums,
    finish_with_torch,
    quantize_tokens,
    quantize_with_torch,
)

VARIANTS = native.linear8_variants()
PRODUCTS = VARIANTS[:-1]
STEP = 2.0**-8
"""Largest error of rounding to bfloat16, relative to the value."""
ACTIVATIONS = {
    "none": lambda y: y,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
}
SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 140), st.integers(1, 100))
SEEDS = st.integers(0, 2**32)


def bits(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint16).numpy()


class Case:
    """A layer with random weights, rows of different sizes, and whatever may be left out."""

    def __init__(self, shape: tuple[int, int, int], seed: int, parts: str = "norm bias residual") -> None:
        self.rows, self.inputs, self.outputs = shape
        rng = np.random.default_rng(seed)

        def halves(*size: int, scale: Any = 1.0) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal(size) * scale).bfloat16()

        self.x = halves(self.rows, self.inputs, scale=10.0 ** rng.integers(-3, 4, (self.rows, 1)))
        self.norm = (halves(self.inputs), halves(self.inputs), 1e-6) if "norm" in parts else None
        self.bias = halves(self.outputs) if "bias" in parts else None
        self.residual = halves(self.rows, self.outputs) if "residual" in parts else None
        self.weights = torch.from_numpy(rng.integers(-127, 128, (self.outputs, self.inputs), np.int8))
        self.scales = torch.from_numpy(rng.random(self.outputs, np.float32) / 3000)

    @property
    def native_norm(self) -> Any:
        return None if self.norm is None else (bits(self.norm[0]), bits(self.norm[1]), self.norm[2])

    def finish(self, activation: str) -> dict[str, Any]:
        return {
            "scales": self.scales.numpy(),
            "bias": None if self.bias is None else bits(self.bias),
            "activation": activation,
            "residual": None if self.residual is None else bits(self.residual),
        }

    def quantised(self, variant: str) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = torch.empty(self.x.shape, dtype=torch.uint8), torch.empty(self.rows)
        native.linear8_quantise(
            x=bits(self.x),
            norm=self.native_norm,
            codes=codes.numpy(),
            row_scales=scales.numpy(),
            threads=1,
            variant=variant,
        )
        return codes, scales

    def finished(
        self, sums: torch.Tensor, scales: torch.Tensor, activation: str, variant: str
    ) -> torch.Tensor:
        out = torch.empty((self.rows, self.outputs), dtype=torch.bfloat16)
        native.linear8_finish(
            sums=sums.numpy(),
            row_scales=scales.numpy(),
            out=bits(out),
            threads=1,
            variant=variant,
            **self.finish(activation),
        )
        return out

    def applied(self, activation: str, variant: str | None, threads: int = 1) -> torch.Tensor:
        packed = np.empty(native.linear8_packed_bytes(self.outputs, self.inputs, variant), np.int8)
        native.linear8_pack(weights=self.weights.numpy(), packed=packed, variant=variant)
        out = torch.empty((self.rows, self.outputs), dtype=torch.bfloat16)
        native.linear8_apply(
            x=bits(self.x),
            norm=self.native_norm,
            packed=packed,
            out=bits(out),
            threads=threads,
            variant=variant,
            **self.finish(activation),
        )
        return out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits_of(a), bits_of(b))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype is torch.bfloat16 else torch.int32)


# --- quantisation ---------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(shape=SHAPES, seed=SEEDS, parts=st.sampled_from(["", "norm"]))
def test_codes_are_the_nearest_to_the_normalised_row(
    shape: tuple[int, int, int], seed: int, parts: str
) -> None:
    case = Case(shape, seed, parts)
    values = case.x.double()
    if case.norm is not None:
        weight, bias, eps = case.norm
        values = F.layer_norm(values, (case.inputs,), weight.double(), bias.double(), eps)
    codes, scales = case.quantised(VARIANTS[-1])
    expected = values.abs().amax(1) / 127
    torch.testing.assert_close(scales.double(), expected.clamp(min=1e-30), rtol=1e-4, atol=1e-30)
    off = (codes.double() - 128) - values / scales.double()[:, None]
    assert float(off.abs().max()) <= 0.5 + 127 * 1e-4
    for variant in PRODUCTS:
        others = case.quantised(variant)
        assert torch.equal(others[0], codes)
        assert same(others[1], scales)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("parts", ["", "norm"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 31, 37])
def test_a_row_with_nan_or_infinity_gives_nan(variant: str, parts: str, bad: float, at: int) -> None:
    case = Case((3, 38, 5), 0, parts)
    case.x[1, at] = bad
    scales = case.quantised(variant)[1]
    assert scales.isnan().tolist() == [False, True, False]
    if variant in PRODUCTS:
        assert case.applied("gelu", variant).isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_zeros_and_of_extreme_values_are_exact(variant: str) -> None:
    case = Case((3, 40, 5), 0, "")
    case.x[0], case.x[1], case.x[2] = 0, 1e-40, 3e38
    codes, scales = case.quantised(variant)
    assert codes[0].eq(128).all()
    assert codes[1].eq(128).all()
    assert codes[2].eq(255).all()
    assert scales[2] == pytest.approx(3e38 / 127, rel=0.01)


# --- what follows the product ---------------------------------------------------------------------------


@settings(max_examples=60)
@given(shape=SHAPES, seed=SEEDS, parts=st.sampled_from(["", "bias", "residual", "bias residual"]))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_results_are_rounded_once_from_double(
    activation: str, shape: tuple[int, int, int], seed: int, parts: str
) -> None:
    case = Case(shape, seed, parts)
    rng = np.random.default_rng(seed)
    sums = torch.from_numpy(rng.integers(-(2**22), 2**22, (case.rows, case.outputs), np.int32))
    scales = torch.from_numpy(rng.random(case.rows, np.float32) / 100)
    exact = sums.double() * case.scales.double() * scales.double()[:, None]
    if case.bias is not None:
        exact += case.bias.double()
    size = exact.abs()
    exact = ACTIVATIONS[activation](exact)
    if case.residual is not None:
        exact += case.residual.double()
        size += case.residual.double().abs()
    found = case.finished(sums, scales, activation, VARIANTS[-1])
    bound = STEP * exact.abs() + 2e-6 * (1 + size)
    assert bool((found.double() - exact).abs().le(bound).all())
    for variant in PRODUCTS:
        assert same(case.finished(sums, scales, activation, variant), found)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("activation", "reference"), list(ACTIVATIONS.items())[1:])
def test_gelu_is_accurate_everywhere(variant: str, activation: str, reference: Any) -> None:
    """Sums are the values in steps of 2^-14, from -128 to 128, and huge ones."""
    steps = torch.cat([torch.arange(-(2**21), 2**21, 61), torch.tensor([-(2**31), 2**31 - 1])]).int()
    case = Case((1, 1, len(steps)), 0, "")
    case.scales = torch.full((len(steps),), 2.0**-14)
    found = case.finished(steps[None], torch.ones(1), activation, variant)[0].double()
    exact = reference(steps.double() * 2.0**-14)
    assert bool((found - exact).abs().le(STEP * exact.abs() + 1e-6).all())


# --- whole layers ---------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    shape=SHAPES,
    seed=SEEDS,
    parts=st.sampled_from(["", "norm bias", "bias residual"]),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
)
def test_a_layer_is_the_exact_sum_between_its_passes(
    shape: tuple[int, int, int], seed: int, parts: str, activation: str
) -> None:
    case = Case(shape, seed, parts)
    codes, scales = case.quantised("portable")
    sums = ((codes.long() - 128) @ case.weights.long().t()).int()
    expected = case.finished(sums, scales, activation, "portable")
    for variant in PRODUCTS:
        assert same(case.applied(activation, variant), expected)


@pytest.mark.parametrize("variant", PRODUCTS)
@pytest.mark.parametrize("rows", [1, 13, 14, 15, 111, 112, 113, 250])
def test_the_largest_sums_do_not_overflow(variant: str, rows: int) -> None:
    case = Case((rows, 2052, 33), 0, "")
    case.x[:] = 1
    case.x[rows // 2] = -1
    case.weights[:] = 127
    case.weights[5] = -127
    exact = torch.full((rows, 33), 127 * 2052.0).double()
    exact[rows // 2] *= -1
    exact[:, 5] *= -1
    found = case.applied("none", variant).double()
    torch.testing.assert_close(found, exact * case.scales.double(), rtol=STEP, atol=0)


@pytest.mark.parametrize("variant", PRODUCTS)
def test_threads_do_not_change_the_result(variant: str) -> None:
    case = Case((301, 512, 520), 0)
    assert same(case.applied("gelu", variant, threads=3), case.applied("gelu", variant))


def test_passes_of_other_devices_agree() -> None:
    case = Case((50, 96, 64), 0)
    norm = torch.nn.LayerNorm(96, eps=1e-6, dtype=torch.bfloat16).requires_grad_(False)
    assert case.norm is not None
    norm.weight.copy_(case.norm[0])
    norm.bias.copy_(case.norm[1])
    case.x[7, 3] = math.inf
    codes, scales = quantize_tokens(case.x, norm)
    found_codes, found_scales = quantize_with_torch(case.x, norm)
    assert float((found_codes.float() - codes.float()).abs().max()) <= 1
    torch.testing.assert_close(found_scales, scales, equal_nan=True)
    sums = torch.randint(-(2**20), 2**20, (50, 64), generator=torch.Generator().manual_seed(0)).int()
    for name in ("linear", "gelu", "gelu_new"):
        steps = Finish(case.scales, case.bias, name, case.residual)
        expected = finish_sums(sums, scales, steps)
        torch.testing.assert_close(finish_with_torch(sums, scales, steps), expected, equal_nan=True)


def test_arrays_that_do_not_fit_are_refused() -> None:
    case = Case((4, 6, 5), 0)
    packed = np.zeros(native.linear8_packed_bytes(5, 6), np.int8)
    good = {
        "x": bits(case.x),
        "norm": case.native_norm,
        "packed": packed,
        "out": np.empty((4, 5), np.uint16),
        "threads": 1,
        **case.finish("gelu"),
    }
    native.linear8_apply(**good)
    short, wide = np.zeros(4, np.uint16), np.zeros(5, np.float32)
    for change, message in [
        ({"x": bits(case.x)[0]}, "1 dimensions, not 2"),
        ({"x": case.x.float().numpy()}, "x is not uint16"),
        ({"x": bits(case.x)[:, :5]}, "not contiguous"),
        ({"norm": (short, short, 0.0)}, "weight has 4 values, not 6"),
        ({"packed": packed[:-1]}, f"packed has {len(packed) - 1} values, not {len(packed)}"),
        ({"scales": np.zeros(5)}, "scales is not float32"),
        ({"bias": short}, "bias has 4 values, not 5"),
        ({"bias": wide}, "bias is not uint16"),
        ({"residual": short}, "residual has 4 values, not 20"),
        ({"activation": "relu"}, "no activation 'relu'"),
        ({"out": np.empty((4, 4), np.uint16)}, "out has 16 values, not 20"),
        ({"threads": 0}, "0 threads"),
        ({"variant": "mmx"}, "no variant 'mmx'"),
        ({"variant": "portable"}, "'portable' .* has no product"),
    ]:
        with pytest.raises(ValueError, match=message):
            native.linear8_apply(**{**good, **change})
    with pytest.raises(ValueError, match="weights is not int8"):
        native.linear8_pack(weights=np.zeros((5, 6), np.int16), packed=packed)
    with pytest.raises(ValueError, match="sums is not int32"):
        native.linear8_finish(
            sums=np.zeros((4, 5), np.int64),
            row_scales=np.zeros(4, np.float32),
            out=good["out"],
            threads=1,
            **case.finish("none"),
        )
