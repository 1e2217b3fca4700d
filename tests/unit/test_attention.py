"""Test native attention against double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge import _native as native
from pipeedge.models import attention
from pipeedge.models.attention import attend

DTYPES = [torch.float32, torch.bfloat16]
NATIVE = [getattr(torch, name) for name in native.attention_types()]
needs_native = pytest.mark.skipif(len(NATIVE) < 2, reason="this processor has no AVX-512 for bfloat16")


def random_qkv(shape: tuple[int, int, int], dtype: torch.dtype, seed: int, scale: float = 1) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def oracle(qkv: torch.Tensor, heads: int, bias: torch.Tensor | None) -> torch.Tensor:
    """Return equation 1 in double precision."""
    items, tokens, width = qkv.shape
    query, key, value = (
        part.view(items, tokens, heads, -1).transpose(1, 2) for part in qkv.double().split(width // 3, 2)
    )
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
    weights = torch.softmax(scores if bias is None else scores + bias.double(), 3)
    return (weights @ value).transpose(1, 2).reshape(items, tokens, -1)


def computed(qkv: torch.Tensor, heads: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    with torch.inference_mode():
        return attend(qkv, heads, bias)


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
    bias = None
    if masked:
        hidden = torch.from_numpy(np.random.default_rng(seed).random((items, 1, 1, tokens)) < 0.3)
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    before = qkv.clone()
    found = computed(qkv, heads, bias)
    # A result is a mean of values. Its weights change by the rounding of the scores, which grow with scale^2.
    tolerance = scale * (2e-6 + 1e-6 * scale**2 if dtype is torch.float32 else 0.03)
    torch.testing.assert_close(found.double(), oracle(qkv, heads, bias), rtol=0, atol=tolerance)
    assert found.dtype is dtype
    assert found.is_contiguous()
    assert torch.equal(qkv, before)


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
        native.attend(qkv=source.numpy(), heads=3, bias=None, out=out.numpy(), threads=threads)
    assert torch.equal(*outputs)


@needs_native
def test_arrays_that_do_not_fit_are_refused() -> None:
    qkv, out = np.zeros((2, 5, 96), np.float32), np.zeros((2, 5, 32), np.float32)
    good = {"qkv": qkv, "heads": 2, "bias": None, "out": out, "threads": 1}
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
        ({"out": out[:1]}, "out has 160 values, not 320"),
        ({"out": out.view(np.uint32)}, "out is not float32"),
        ({"threads": 0}, "0 threads"),
    ]:
        with pytest.raises(ValueError, match=message):
            native.attend(**{**good, **change})
