"""Test clamping: formulas against numerical minimisation, errors against the original's."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pipeedge.base.schedule import BIT_WIDTHS
from pipeedge.compress import (
    Granularity,
    Levels,
    LinkDecoder,
    LinkEncoder,
    Sample,
    choose_levels,
    decode_tensor,
    encode_tensor,
)
from pipeedge.compress.clamping import gelu_levels, laplace_levels

CLAMPS = ("none", "laplace", "gelu", "ds-aciq", "mse")
ROWS, LENGTH = 400, 768


def gaussian() -> torch.Tensor:
    return torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(1))


def laplace() -> torch.Tensor:
    uniform = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(2)) - 0.5
    return -uniform.sign() * torch.log1p(-2 * uniform.abs())


def post_gelu() -> torch.Tensor:
    return torch.nn.functional.gelu(1.5 * gaussian() - 1)


def outliers() -> torch.Tensor:
    """A few channels are much larger than the others, as in the residual stream of transformers."""
    values = gaussian()
    values[:, ::128] *= 20
    return values


DISTRIBUTIONS = {f.__name__: f for f in (gaussian, laplace, post_gelu, outliers)}


def relative_error(values: torch.Tensor, decoded: torch.Tensor) -> float:
    return float((decoded - values).norm() / values.norm())


def ours(values: torch.Tensor, bits: int, clamp: str) -> float:
    (decoded,) = LinkDecoder().decode(LinkEncoder(clamp, transform="off").encode((values,), bits))
    return relative_error(values, decoded)


ACIQ = {2: 2.83, 3: 3.89, 4: 5.03, 5: 6.20, 6: 7.41, 7: 8.64, 8: 9.89}
"""alpha / b, as printed by Banner et al."""


def original(values: torch.Tensor, bits: int) -> float:
    """PipeEdge's own: clamped to +-alpha around 0, alpha from the variance of the whole tensor, then
    each item of the microbatch linearly from its minimum to its maximum."""
    alpha = ACIQ[bits] * math.sqrt(0.5 * float(values.var(unbiased=False)))
    items = values.clamp(-alpha, alpha).reshape(8, -1)
    low, high = items.min(1, keepdim=True).values, items.max(1, keepdim=True).values
    step = (high - low) / (2**bits - 1)
    decoded = ((items - low) / step).round() * step + low
    return relative_error(values, decoded.reshape(values.shape))


# --- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "limit"), [(2, 0.36), (4, 0.11), (6, 0.034), (8, 0.0095)])
def test_the_error_on_gaussian_rows(bits: int, limit: float) -> None:
    assert ours(gaussian(), bits, "mse") <= limit


@pytest.mark.parametrize(("bits", "reported"), [(2, 0.393), (4, 0.137), (6, 0.041), (8, 0.010)])
def test_model_of_the_original_matches_its_error(bits: int, reported: float) -> None:
    values = torch.randn(8 * 197, LENGTH, generator=torch.Generator().manual_seed(6))
    assert original(values, bits) == pytest.approx(reported, rel=0.02)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("bits", ACIQ)
def test_error_never_exceeds_that_of_the_original(name: str, bits: int) -> None:
    values = DISTRIBUTIONS[name]()
    assert ours(values, bits, "mse") <= original(values, bits)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("bits", BIT_WIDTHS)
def test_mse_is_the_best_of_all_methods(name: str, bits: int) -> None:
    """The tolerance is the error of a sample."""
    values = DISTRIBUTIONS[name]()
    assert ours(values, bits, "mse") <= 1.03 * min(ours(values, bits, clamp) for clamp in CLAMPS)


# --- the formulas ---------------------------------------------------------------------------------------


def least(cost: Callable[[float], float]) -> float:
    """Find the minimum of ``cost`` to 1e-4 by trying."""
    tried = np.arange(0.5, 25, 1e-4)
    return float(tried[np.argmin(cost(tried))])


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_laplace_minimises_the_expected_error(bits: int) -> None:
    alpha = least(lambda a: 2 * np.exp(-a) + a**2 / (3 * 4**bits))
    assert alpha == pytest.approx(ACIQ[bits], abs=0.02)
    levels = laplace_levels(bits)
    assert levels.low == levels.high == pytest.approx(alpha * (1 - 2.0**-bits), abs=1e-3)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_gelu_minimises_the_expected_one_sided_error(bits: int) -> None:
    """On values of which half are 0 and half exponential, the highest level is half a step below alpha."""
    alpha = least(lambda a: np.exp(-a) + a**2 / (24 * 4**bits))
    values = np.random.default_rng(5).exponential(size=(20, 50_000)).astype(np.float32)
    values[:, ::2] = 0
    sample = Sample.of(values)
    levels = gelu_levels(sample, bits)
    assert levels.low == math.inf
    highest = sample.statistics[:, 2] + levels.high * sample.statistics[:, 3]
    np.testing.assert_allclose(highest, alpha * (1 - 0.5 * 2.0**-bits), rtol=0.02)


def test_gelu_falls_back_to_laplace_for_values_far_below_zero() -> None:
    assert gelu_levels(Sample.of(gaussian().numpy()), 4) == laplace_levels(4)
    assert gelu_levels(Sample.of(post_gelu().numpy()), 4) != laplace_levels(4)


def test_clamps_are_centred_on_the_mean() -> None:
    """Shifted values are clamped alike, unlike in the original."""
    values = gaussian()
    for clamp in CLAMPS:
        if clamp == "gelu":
            continue  # says by the sign of the values whether they are one-sided
        here = choose_levels(clamp, Sample.of(values.numpy()), 4)
        there = choose_levels(clamp, Sample.of((values + 64).numpy()), 4)
        assert here.low == pytest.approx(there.low, rel=0.05)
        assert here.high == pytest.approx(there.high, rel=0.05)


def test_ds_aciq_finds_the_scale_of_the_bulk() -> None:
    """One value in fifty is 30 times too large, which affects ACIQ's estimate more than the search."""
    values = laplace()
    clean = Sample.of(values.numpy()).statistics[:, 3].mean()
    values[:, ::50] *= 30
    sample = Sample.of(values.numpy())
    estimate = sample.statistics[:, 3].mean()
    found = choose_levels("ds-aciq", sample, 4).low / laplace_levels(4).low * estimate
    assert estimate > 1.4 * clean
    assert abs(found - clean) < 0.5 * (estimate - clean)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_mse_search_matches_exhaustive_search(name: str, bits: int) -> None:
    sample = Sample.of(DISTRIBUTIONS[name]()[:48].numpy())
    found = sample.squared_error(bits, choose_levels("mse", sample, bits))
    factors = [0.3 * 1.15**step for step in range(40)]
    best = min(sample.squared_error(bits, Levels(low, high)) for low in factors for high in factors)
    # Where nearly all of the sum is that of a few values, it has many minima.
    assert found <= (1.05 if name == "outliers" else 1.01) * best


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("levels", [Levels(), Levels(1.5, 2.5), Levels(math.inf, 1)])
def test_searched_error_is_the_actual_error(dtype: torch.dtype, levels: Levels) -> None:
    values = gaussian()[:30].to(dtype)
    array = values.view(torch.uint16).numpy() if dtype is torch.bfloat16 else values.numpy()
    decoded = decode_tensor(encode_tensor(values.float(), 3, levels))
    true = float((decoded.double() - values.double()).pow(2).sum())
    assert Sample.of(array).squared_error(3, levels) == pytest.approx(true, rel=1e-5)


@pytest.mark.parametrize("clamp", CLAMPS)
@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("value", [0.0, 5.0, -1e30])
def test_constant_tensors_are_exact_with_every_clamp(clamp: str, bits: int, value: float) -> None:
    values = torch.full((3, 40), value)
    assert torch.equal(LinkDecoder().decode(LinkEncoder(clamp).encode((values,), bits))[0], values)


def test_unknown_methods_and_negative_levels_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no clamp tanh"):
        choose_levels("tanh", Sample.of(gaussian().numpy()), 4)
    for low, high in [(-1, 1), (1, -0.5), (math.nan, 1)]:
        with pytest.raises(ValueError, match="negative"):
            Levels(low, high)


# --- windows --------------------------------------------------------------------------------------------


def test_levels_are_chosen_once_per_window() -> None:
    """A microbatch is encoded differently after others in a new window."""
    narrow, wide = gaussian()[:64], post_gelu()[:64]

    def codes(encoder: LinkEncoder, values: torch.Tensor) -> bytes:
        return encoder.encode((values,), 3)[1].numpy().tobytes()

    alone = codes(LinkEncoder("mse"), wide)
    encoder = LinkEncoder("mse", window=3)
    codes(encoder, narrow)
    assert [codes(encoder, wide) == alone for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("granularity", Granularity)
def test_large_rows_are_sampled(granularity: Granularity) -> None:
    values = gaussian().reshape(8, 50, LENGTH)
    (decoded,) = LinkDecoder().decode(LinkEncoder("mse", granularity).encode((values,), 4))
    assert relative_error(values, decoded) <= 0.13
