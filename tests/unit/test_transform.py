"""Test the Hadamard transform of compressed links against SciPy's matrices."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracles.packed_codes import unpack
from scipy.linalg import hadamard as hadamard_matrix

from pipeedge import _native as native
from pipeedge.base.schedule import BIT_WIDTHS
from pipeedge.compress import (
    EncodedTensor,
    Granularity,
    Levels,
    LinkDecoder,
    LinkEncoder,
    NonFiniteError,
    Transform,
    decode_tensor,
    encode_tensor,
    error_bound,
    hadamard,
)
from pipeedge.compress.transform import HADAMARD_BLOCKS, MAX_SEED
from pipeedge.compress.wire import from_wire

# --- the oracle: one orthogonal matrix for a whole row ----------------------------------------------------

MASK = (1 << 64) - 1


def signs(seed: int, count: int) -> np.ndarray:
    """Return the signs of SplitMix64's bits, in Python's integers."""
    found = []
    for word in range(1, -(-count // 64) + 1):
        z = (seed + word * 0x9E3779B97F4A7C15) & MASK
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        z ^= z >> 31
        found += [-1.0 if z >> bit & 1 else 1.0 for bit in range(64)]
    return np.array(found[:count])


@cache
def matrix(length: int, block: int, seed: int) -> np.ndarray:
    """Return the matrix by which a row is multiplied: the product of those of all steps."""
    while block > length:
        block //= 2
    turn = hadamard_matrix(block) / math.sqrt(block)
    product = np.eye(length)
    for start in range(0, length - block + 1, block):
        product[start : start + block] *= signs(seed, block)[:, None]
    for start in range(block, length - block + 1, block):
        first, second = product[start - block : start].copy(), product[start : start + block].copy()
        product[start - block : start] = (first + second) / math.sqrt(2)
        product[start : start + block] = (first - second) / math.sqrt(2)
    for start in range(0, length - block + 1, block):
        product[start : start + block] = turn @ product[start : start + block]
    if length % block:
        product[-block:] = turn @ (signs(seed, block)[:, None] * product[-block:])
    return product


LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from([64, 197, 200, 256, 384, 768, 1000, 1024, 1100]))
BLOCKS = st.sampled_from(HADAMARD_BLOCKS)
SEEDS = st.sampled_from([0, 1, 20240404, MAX_SEED])


def random_rows(length: int, rows: int = 3) -> np.ndarray:
    return np.random.default_rng(length).normal(0.2, 3, (rows, length)).astype(np.float32)


# --- the transform ----------------------------------------------------------------------------------------


@settings(max_examples=cases(60))
@given(length=LENGTHS, block=BLOCKS, seed=SEEDS)
def test_rows_are_multiplied_by_an_orthogonal_matrix(length: int, block: int, seed: int) -> None:
    by = matrix(length, block, seed)
    np.testing.assert_allclose(by @ by.T, np.eye(length), atol=1e-12)
    rows = random_rows(length)
    np.testing.assert_allclose(Transform(block, seed).rows(rows), rows @ by.T, rtol=0, atol=3e-5)


@settings(max_examples=cases(60))
@given(length=LENGTHS, block=BLOCKS, seed=SEEDS, bits=st.sampled_from(BIT_WIDTHS))
def test_decoding_multiplies_by_the_inverse(length: int, block: int, seed: int, bits: int) -> None:
    rows = random_rows(length)
    encoded = encode_tensor(torch.from_numpy(rows), bits, Levels(3, 3), transform=Transform(block, seed))
    codes = unpack(encoded.codes.numpy(), rows.size, bits).reshape(rows.shape)
    scale, offset = encoded.ranges.numpy()[:, :, None].astype(np.float64)
    wanted = (offset + codes * scale) @ matrix(length, block, seed)
    np.testing.assert_allclose(decode_tensor(encoded).numpy(), wanted, rtol=0, atol=5e-5)


@settings(max_examples=cases(60))
@given(length=LENGTHS, block=BLOCKS, bits=st.sampled_from(BIT_WIDTHS))
def test_quantised_rows_are_the_transformed_ones(length: int, block: int, bits: int) -> None:
    rows, transform = random_rows(length), Transform(block, 5)
    mine = encode_tensor(torch.from_numpy(rows), bits, Levels(2, 3), transform=transform)
    turned = encode_tensor(torch.from_numpy(transform.rows(rows)), bits, Levels(2, 3))
    assert torch.equal(mine.codes, turned.codes)
    assert torch.equal(mine.ranges, turned.ranges)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("length", [1, 5, 24, 60, 64, 197, 768, 1000, 3072])
def test_instruction_sets_give_the_same_bits(length: int, dtype: type) -> None:
    variants = native.codec_variants()
    if len(variants) == 1:
        pytest.skip("this processor has only the portable codec")
    values = random_rows(length)
    if dtype is np.uint16:  # the upper half of a float32 is a bfloat16
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    found: dict[int, set[tuple[bytes, ...]]] = {}
    for variant in variants:
        for block in HADAMARD_BLOCKS:
            turned = native.transform_rows(values=values, rows=3, block=block, seed=9, variant=variant)
            packed = np.zeros(native.packed_bytes(values.size, 5), np.uint8)
            ranges, back = np.zeros((2, 3), np.float32), np.zeros_like(values)
            how = {"bits": 5, "block": block, "seed": 9, "variant": variant}
            native.encode(values=values, rows=3, low=2.5, high=3, codes=packed, ranges=ranges, **how)
            native.decode(codes=packed, ranges=ranges, values=back, **how)
            result = tuple(array.tobytes() for array in (turned, packed, ranges, back))
            found.setdefault(block, set()).add(result)
    assert [len(results) for results in found.values()] == [1] * len(HADAMARD_BLOCKS)


def test_bfloat16_is_transformed_in_single_precision() -> None:
    values = torch.from_numpy(random_rows(300)).bfloat16()
    encoded = encode_tensor(values, 8, transform=hadamard(300))
    wide = encode_tensor(values.float(), 8, transform=hadamard(300))
    assert torch.equal(encoded.codes, wide.codes)
    assert torch.equal(decode_tensor(encoded), decode_tensor(wide).bfloat16())


@pytest.mark.parametrize("granularity", Granularity)
def test_rows_of_any_granularity_are_transformed(granularity: Granularity) -> None:
    values = torch.from_numpy(random_rows(3 * 50, rows=4)).reshape(4, 3, 50)
    encoded = encode_tensor(values, 16, granularity=granularity, transform=Transform(64, 1))
    torch.testing.assert_close(decode_tensor(encoded), values, rtol=0, atol=2e-3)


# --- the stated bound -------------------------------------------------------------------------------------


@settings(max_examples=cases(150))
@given(
    rows=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=70),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    bits=st.sampled_from(BIT_WIDTHS),
    block=BLOCKS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_error_is_within_the_stated_bound(
    rows: np.ndarray, bits: int, block: int, dtype: torch.dtype
) -> None:
    tensor = torch.from_numpy(rows).clamp(-3.3e38, 3.3e38).to(dtype)
    encoded = encode_tensor(tensor, bits, transform=Transform(block, 3))
    error = (decode_tensor(encoded).double() - tensor.double()).abs()
    assert bool(torch.isfinite(error).all())
    assert bool((error <= error_bound(encoded)[:, None]).all())
    if encoded.transform is not None:  # the root mean square of a row has the bound without sqrt(length)
        norms = error.pow(2).sum(1).sqrt()
        assert bool((norms <= error_bound(encoded)).all())


def test_large_values_become_as_small_as_the_papers_say() -> None:
    """The largest of n values is below sqrt(2 ln(2 n / p) / n) norms, but for a fraction p of the seeds."""
    n, p = 256, 0.1
    row = np.zeros((1, n), np.float32)
    row[0, :5] = [20, -20, 5, 5, 1]
    limit = float(np.linalg.norm(row)) * math.sqrt(2 * math.log(2 * n / p) / n)
    beyond = [np.abs(Transform(n, seed).rows(row)).max() > limit for seed in range(200)]
    assert sum(beyond) <= p * len(beyond)


# --- values that are special ------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BIT_WIDTHS)
def test_rows_of_zeros_are_exact(bits: int) -> None:
    values = torch.zeros(3, 100)
    values[1] = torch.from_numpy(random_rows(100, rows=1)[0])
    decoded = decode_tensor(encode_tensor(values, bits, transform=hadamard(100)))
    assert torch.equal(decoded[0::2], values[0::2])


@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0), (), (1,)])
def test_empty_tensors_and_scalars(shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, 3.0)
    torch.testing.assert_close(decode_tensor(encode_tensor(tensor, 8, transform=Transform(256, 1))), tensor)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 255, 256, 767, 768, 1535])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_for_nan_or_infinity_names_the_row(bad: float, at: int, dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 768, dtype=dtype)
    tensor.view(-1)[at] = bad
    with pytest.raises(NonFiniteError, match=f"row {at // 768} of 2"):
        encode_tensor(tensor, 4, Levels(2, 2), transform=hadamard(768))
    for transform in ("auto", "hadamard"):
        with pytest.raises(NonFiniteError, match=f"row {at // 768} of 2"):
            LinkEncoder("mse", transform=transform).encode((tensor,), 4)


@pytest.mark.parametrize("value", [1e37, 3.4e38])
def test_values_whose_sums_may_overflow_are_encoded_without(value: float) -> None:
    tensor = torch.ones(2, 64)
    tensor[1, 7] = value
    encoded = encode_tensor(tensor, 16, Levels(1, 1), transform=Transform(2, 0))
    assert encoded.transform is None
    assert bool(((decode_tensor(encoded) - tensor).abs() <= error_bound(encoded)[:, None]).all())
    (decoded,) = LinkDecoder().decode(LinkEncoder("mse", transform="hadamard").encode((tensor,), 16))
    assert bool(torch.isfinite(decoded).all())


@pytest.mark.parametrize("block", [-1, 1, 3, 768, 2048])
def test_other_blocks_are_refused(block: int) -> None:
    with pytest.raises(ValueError, match="block"):
        Transform(block, 0)
    with pytest.raises(ValueError, match="a block of"):
        native.transform_rows(values=random_rows(8), rows=3, block=block, seed=0)
    with pytest.raises(ValueError, match="a block of"):
        native.decode(
            codes=np.zeros(3, np.uint8),
            ranges=np.zeros((2, 3), np.float32),
            bits=8,
            values=np.zeros((3, 1), np.float32),
            block=block,
        )


def test_a_transform_needs_a_block_and_a_seed_that_fit() -> None:
    with pytest.raises(ValueError, match="needs a block"):
        native.transform_rows(values=random_rows(8), rows=3, block=0, seed=0)
    for seed in (-1, MAX_SEED + 1):
        with pytest.raises(ValueError, match="the seed"):
            Transform(64, seed)


@pytest.mark.parametrize(
    ("length", "block"),
    [(1, 2), (3, 2), (50, 32), (64, 64), (192, 64), (197, 128), (768, 256), (800, 512), (1024, 1024)],
)
def test_blocks_divide_the_usual_rows(length: int, block: int) -> None:
    assert hadamard(length).block == block
    assert hadamard(4 * 1024).block == 1024


# --- links ------------------------------------------------------------------------------------------------


def normal(*large: int) -> torch.Tensor:
    """Return normally distributed rows, with the channels ``large`` twenty times as large."""
    values = torch.randn(400, 768, generator=torch.Generator().manual_seed(1))
    values[:, list(large)] *= 20
    return values


def link_error(values: torch.Tensor, bits: int, transform: str = "auto", clamp: str = "mse") -> float:
    (decoded,) = LinkDecoder().decode(LinkEncoder(clamp, transform=transform).encode((values,), bits))
    return float((decoded - values).norm() / values.norm())


@pytest.mark.parametrize("large", [(100, 500), (100, 101), (600, 700), (3, 259)])
@pytest.mark.parametrize(("bits", "limit"), [(2, 0.37), (3, 0.21), (4, 0.12), (8, 0.009)])
def test_the_error_with_two_large_channels(large: tuple[int, int], bits: int, limit: float) -> None:
    assert link_error(normal(*large), bits) <= limit


@pytest.mark.parametrize(("bits", "limit"), [(2, 0.345), (3, 0.195), (4, 0.109), (8, 0.0073)])
def test_the_error_on_normally_distributed_values(bits: int, limit: float) -> None:
    assert link_error(normal(), bits) <= limit


@pytest.mark.parametrize("clamp", ["none", "laplace", "gelu", "ds-aciq", "mse"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("values", [normal(), normal(5, 6), torch.nn.functional.gelu(1.5 * normal() - 1)])
def test_the_transform_is_used_where_it_lowers_the_error(clamp: str, bits: int, values: torch.Tensor) -> None:
    with_it, without = (link_error(values, bits, transform, clamp) for transform in ("hadamard", "off"))
    assert link_error(values, bits, "auto", clamp) <= 1.02 * min(with_it, without)


def transform_of(encoder: LinkEncoder, values: torch.Tensor, bits: int = 4) -> Transform | None:
    (part,) = from_wire(encoder.encode((values,), bits))
    assert isinstance(part, EncodedTensor)
    return part.transform


def test_the_choice_is_made_anew_in_every_window() -> None:
    encoder = LinkEncoder("mse", window=2)
    gelu = torch.nn.functional.gelu(1.5 * normal() - 1)
    found = [transform_of(encoder, values, 2) for values in (gelu, normal(7), normal(7), gelu, gelu)]
    assert found == [None, None, hadamard(768), hadamard(768), None]


def test_off_and_hadamard_are_obeyed() -> None:
    assert transform_of(LinkEncoder("mse", transform="off"), normal(5)) is None
    assert transform_of(LinkEncoder("mse", transform="hadamard"), normal()) == hadamard(768)
    with pytest.raises(ValueError, match="there is no transform fourier"):
        LinkEncoder("mse", transform="fourier")


def test_fraction_of_transformed_tensors_is_counted() -> None:
    encoder = LinkEncoder("mse", window=1)
    assert encoder.transformed_fraction == 0
    mask = torch.ones(4, dtype=torch.bool)
    encoder.encode((normal(7), mask), 2)
    assert encoder.transformed_fraction == 1
    encoder.encode((normal(7), torch.zeros(4, 8)), 2)
    assert encoder.transformed_fraction == pytest.approx(2 / 3)
    encoder.encode((normal(7), mask), 0)
    assert encoder.transformed_fraction == pytest.approx(2 / 3)


@pytest.mark.parametrize("granularity", Granularity)
def test_rows_longer_than_the_sample_are_chosen_for_too(granularity: Granularity) -> None:
    values = normal(100, 500).reshape(4, 100, 768)
    encoder = LinkEncoder("mse", granularity)
    (part,) = from_wire(encoder.encode((values,), 4))
    assert isinstance(part, EncodedTensor)
    assert part.transform is not None
    error = (decode_tensor(part) - values).norm() / values.norm()
    assert float(error) <= 0.16
