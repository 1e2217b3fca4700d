"""Test native attention against double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge import _native as native
from pipeedge.models import attention
from pipeedge.models.attention import Bias, DistanceBias, attend
from pipeedge.models.rotary import Rotation, rotation_by_position

NOTHING = {"bias": None, "distances": None, "rotation": None, "reach": None}
DTYPES = [torch.float32, torch.bfloat16]
NATIVE = [getattr(torch, name) for name in native.attention_types()]
needs_native = pytest.mark.skipif(len(NATIVE) < 2, reason="this processor has no AVX-512 for bfloat16")


def random_qkv(shape: tuple[int, int, int], dtype: torch.dtype, seed: int, scale: float = 1) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def turned(states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Return states [N, H, T, E] multiplied as complex numbers, for the last tokens."""
    x, y = states.chunk(2, -1)
    points = torch.complex(x, y)
    factors = torch.ones(points.shape[2:], dtype=points.dtype)
    if len(rotation.cos):
        factors[-len(rotation.cos) :] = torch.complex(rotation.cos.double(), rotation.sin.double())
    points = points * factors
    return torch.cat([points.real, points.imag], -1)


def oracle(
    qkv: torch.Tensor,
    heads: int,
    bias: torch.Tensor | None,
    rotation: Rotation | None = None,
    reach: int | None = None,
) -> torch.Tensor:
    """Return equation 1 in double precision, with all pairs of tokens, for biases that broadcast to them."""
    items, tokens, width = qkv.shape
    query, key, value = (
        part.view(items, tokens, heads, -1).transpose(1, 2) for part in qkv.double().split(width // 3, 2)
    )
    if rotation is not None:
        query, key = turned(query, rotation), turned(key, rotation)
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
    if reach is not None:
        places = torch.arange(tokens)
        scores = scores.masked_fill((places[:, None] - places).abs() > reach, -math.inf)
    weights = torch.softmax(scores if bias is None else scores + bias.double(), 3)
    return (weights @ value).transpose(1, 2).reshape(items, tokens, -1)


def computed(
    qkv: torch.Tensor,
    heads: int,
    bias: Bias = None,
    rotation: Rotation | None = None,
    reach: int | None = None,
) -> torch.Tensor:
    with torch.inference_mode():
        return attend(qkv, heads, bias, rotation=rotation, reach=reach)


def key_bias(items: int, tokens: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a bias [N, 1, 1, T] that hides three keys of ten, as padding does."""
    hidden = torch.from_numpy(np.random.default_rng(seed).random((items, 1, 1, tokens)) < 0.3)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)


@settings(max_examples=100)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 4)),
    size=st.sampled_from([8, 16, 24, 32, 48, 64, 80]),
    dtype=st.sampled_from(DTYPES),
    masked=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 20.0]),
    seed=st.integers(0, 2**32),
)
def test_attention_is_that_of_double_precision(
    shape: tuple[int, int, int], size: int, dtype: torch.dtype, masked: bool, scale: float, seed: int
) -> None:
    items, tokens, heads = shape
    qkv = random_qkv((items, tokens, 3 * heads * size), dtype, seed, scale)
    bias = key_bias(items, tokens, dtype, seed) if masked else None
    before = qkv.clone()
    found = computed(qkv, heads, bias)
    # A result is a mean of values. Its weights change by the rounding of the scores, which grow with scale^2.
    tolerance = scale * (2e-6 + 3e-6 * scale**2 if dtype is torch.float32 else 0.03)
    torch.testing.assert_close(found.double(), oracle(qkv, heads, bias), rtol=0, atol=tolerance)
    assert found.dtype is dtype
    assert found.is_contiguous()
    assert torch.equal(qkv, before)


@settings(max_examples=cases(200))
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 4)),
    size=st.sampled_from([8, 16, 24, 32, 48, 64, 80]),
    dtype=st.sampled_from(DTYPES),
    features=st.sets(st.sampled_from(["mask", "distances", "rotation", "prefix"])),
    reach=st.one_of(st.none(), st.integers(0, 70)),
    seed=st.integers(0, 2**32),
)
def test_rotations_windows_and_biases_of_distances_are_those_of_double_precision(
    shape: tuple[int, int, int],
    size: int,
    dtype: torch.dtype,
    features: set[str],
    reach: int | None,
    seed: int,
) -> None:
    items, tokens, heads = shape
    qkv = random_qkv((items, tokens, 3 * heads * size), dtype, seed)
    of_keys = key_bias(items, tokens, dtype, seed) if "mask" in features else None
    bias: Bias = of_keys
    exact = None if of_keys is None else of_keys.double()
    if "distances" in features:
        by_distance = random_qkv((1, heads, 2 * tokens - 1), dtype, seed + 1)[0]
        bias = DistanceBias(by_distance, of_keys)
        places = torch.arange(tokens)
        of_pairs = by_distance.double()[:, places - places[:, None] + tokens - 1]
        exact = of_pairs if exact is None else of_pairs + exact
    rotation = None
    if "rotation" in features:
        rotated = tokens // 2 if "prefix" in features else tokens
        rotation = rotation_by_position(rotated, size, 100.0, qkv.device)
    found = computed(qkv, heads, bias, rotation, reach)
    expected = oracle(qkv, heads, exact, rotation, reach)
    # A token all of whose keys are hidden attends to any of them, as long as the result is finite.
    valid = torch.ones(items, tokens, dtype=torch.bool)
    if of_keys is not None:
        near = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs() <= (
            tokens if reach is None else reach
        )
        valid = ((of_keys[:, 0] == 0) & near).any(-1)
    assert found.isfinite().all()
    tolerance = 4e-6 if dtype is torch.float32 else 0.06
    torch.testing.assert_close(found.double()[valid], expected[valid], rtol=0, atol=tolerance)
    assert found.dtype is dtype
    assert found.is_contiguous()


@settings(max_examples=cases(20))
@given(tokens=st.integers(500, 900), reach=st.integers(0, 300), dtype=st.sampled_from(DTYPES))
def test_windows_of_long_sentences_are_those_of_double_precision(
    tokens: int, reach: int, dtype: torch.dtype
) -> None:
    """Many windows, whose first and last keys are anywhere in a group that is computed at once."""
    qkv = random_qkv((1, tokens, 3 * 32), dtype, tokens)
    tolerance = 4e-6 if dtype is torch.float32 else 0.06
    found = computed(qkv, 2, reach=reach)
    torch.testing.assert_close(found.double(), oracle(qkv, 2, None, reach=reach), rtol=0, atol=tolerance)
    with torch.no_grad():  # which torch computes
        found = attend(qkv, 2, None, reach=reach)
    torch.testing.assert_close(found.double(), oracle(qkv, 2, None, reach=reach), rtol=0, atol=tolerance)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_inference_is_native_and_training_has_gradients(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    original = native.attend
    monkeypatch.setattr(
        attention.native, "attend", lambda **given: (calls.append(given["heads"]), original(**given))
    )
    qkv = random_qkv((2, 20, 3 * 64), dtype, 0)
    assert computed(qkv, 2).shape == (2, 20, 64)
    assert calls == [2]
    qkv.requires_grad_(True)
    attend(qkv, 2, None).sum().backward()
    assert qkv.grad is not None
    assert calls == [2]


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_attention_is_as_near_to_double_precision_as_torch_is(dtype: torch.dtype) -> None:
    qkv = random_qkv((2, 197, 3 * 192), dtype, 1)
    exact = oracle(qkv, 3, None)
    with torch.no_grad():
        theirs = attend(qkv, 3, None)
    ours = computed(qkv, 3)
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_reach_only_what_depends_on_them(dtype: torch.dtype, bad: float) -> None:
    items, tokens, heads, size = 2, 30, 2, 32
    for part in range(3):
        qkv = random_qkv((items, tokens, 3 * heads * size), dtype, 2)
        qkv[1, 17, part * heads * size + size + 3] = bad  # of item 1, token 17, head 1
        found = computed(qkv, heads).view(items, tokens, heads, size)
        finite = found.isfinite()
        assert finite[0].all()
        assert finite[1, :, 0].all()
        if part == 0:  # a query
            assert not finite[1, 17, 1].any()
            assert finite[1, torch.arange(tokens) != 17, 1].all()
        elif part == 1:  # a key: minus infinity as a score is a weight of zero
            assert not finite[1, :, 1].all()
            assert math.isinf(bad) or not finite[1, :, 1].any()
        else:  # a value
            assert not finite[1, :, 1, 3].any()
            assert finite[1, :, 1, 4:].all()


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_item_without_tokens_attends_evenly(dtype: torch.dtype) -> None:
    qkv = random_qkv((1, 21, 3 * 32), dtype, 3)
    bias = torch.full((1, 1, 1, 21), torch.finfo(dtype).min, dtype=dtype)
    mean = qkv[:, :, 64:].double().mean(1, keepdim=True).expand(1, 21, 32)
    torch.testing.assert_close(computed(qkv, 2, bias).double(), mean, rtol=0, atol=0.01)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_attention(dtype: torch.dtype) -> None:
    qkv = random_qkv((4, 197, 3 * 192), dtype, 4)
    source = qkv.view(torch.uint16) if dtype is torch.bfloat16 else qkv
    outputs = [torch.empty((4, 197, 192), dtype=source.dtype) for _ in range(2)]
    for threads, out in zip((1, 3), outputs, strict=True):
        native.attend(
            **{**NOTHING, "qkv": source.numpy(), "heads": 3, "out": out.numpy(), "threads": threads}
        )
    assert torch.equal(*outputs)


@needs_native
def test_arrays_that_do_not_fit_are_refused() -> None:
    qkv, out = np.zeros((2, 5, 96), np.float32), np.zeros((2, 5, 32), np.float32)
    good = {**NOTHING, "qkv": qkv, "heads": 2, "out": out, "threads": 1}
    angles = np.zeros((5, 8), np.float32)
    native.attend(**good)
    for change, message in [
        ({"qkv": qkv[0]}, "2 dimensions, not 3"),
        ({"qkv": qkv.astype(np.float64)}, "qkv is not uint16"),
        ({"qkv": qkv[:, :, ::2]}, "not queries"),
        ({"qkv": qkv[:, ::2]}, "not contiguous"),
        ({"heads": 4}, "not queries, keys and values of 4 heads, each a multiple of 16"),
        ({"heads": 0}, "of 0 heads"),
        ({"bias": np.zeros(9, np.float32)}, "bias has 9 values, not 10"),
        ({"bias": np.zeros(10)}, "bias is not float32"),
        ({"distances": np.zeros((2, 10), np.float32)}, "distances has 20 values, not 18"),
        ({"rotation": (angles[:, :4].copy(), angles)}, "cosines has 20 values, not 40"),
        ({"rotation": (angles, angles[:3])}, "sines has 24 values, not 40"),
        ({"rotation": (np.zeros((6, 8), np.float32), angles)}, "each of at most 5 tokens"),
        ({"reach": -1}, "a reach of -1: at least 0"),
        ({"out": out[:1]}, "out has 160 values, not 320"),
        ({"out": out.view(np.uint32)}, "out is not float32"),
        ({"threads": 0}, "0 threads"),
    ]:
        with pytest.raises(ValueError, match=message):
            native.attend(**{**good, **change})
