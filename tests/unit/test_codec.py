"""Test the codec against a NumPy implementation that shares only the documented layout."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracles.packed_codes import unpack

from pipeedge import _native as native
from pipeedge.base.errors import PeerFailedError
from pipeedge.base.payload import TensorSpec
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
    wire_specs,
)
from pipeedge.compress.wire import from_wire, to_wire

INF = math.inf

# --- the oracle ------------------------------------------------------------------------------------------


def wanted_ranges(rows: np.ndarray, bits: int, levels: Levels) -> tuple[np.ndarray, np.ndarray]:
    """Compute scale and offset in double precision."""
    rows = rows.astype(np.float64)
    low, high = rows.min(1), rows.max(1)
    mean = rows.mean(1)
    deviation = np.abs(rows - mean[:, None]).mean(1)
    if math.isfinite(levels.low):
        low = np.maximum(low, mean - levels.low * deviation)
    if math.isfinite(levels.high):
        high = np.minimum(high, mean + levels.high * deviation)
    return (high - low) / (2**bits - 1), low


def wanted_codes(rows: np.ndarray, scale: np.ndarray, offset: np.ndarray, bits: int) -> np.ndarray:
    """Compute codes as real numbers, because halfway values may be rounded either way."""
    scale = scale.astype(np.float64)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        level = (rows.astype(np.float64) - offset.astype(np.float64)[:, None]) / scale
    return np.clip(np.where(scale == 0, 0, level), 0, 2**bits - 1)


def bfloat16_of(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).to(torch.bfloat16)


# --- codes ----------------------------------------------------------------------------------------------

SHAPES = [(1, 1), (3, 7), (5, 64), (8, 197), (2, 768), (3, 2048), (1, 5000), (700, 3)]


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("levels", [Levels(), Levels(2.0, 3.0), Levels(INF, 1.5)])
def test_codes_and_ranges_match_the_oracle(bits: int, shape: tuple[int, int], levels: Levels) -> None:
    rows = np.random.default_rng(sum(shape) + bits).normal(0.3, 2, shape).astype(np.float32)
    encoded = encode_tensor(torch.from_numpy(rows), bits, levels)
    scale, offset = encoded.ranges.numpy()
    for mine, wanted in zip((scale, offset), wanted_ranges(rows, bits, levels), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=2e-6, atol=1e-6)

    assert encoded.codes.numel() == native.packed_bytes(rows.size, bits)
    codes = unpack(encoded.codes.numpy(), rows.size, bits).reshape(shape)
    assert np.abs(codes - wanted_codes(rows, scale, offset, bits)).max() <= 0.5 + 2**bits * 2.0**-21

    decoded = decode_tensor(encoded).numpy()
    np.testing.assert_array_equal(decoded, offset[:, None] + codes.astype(np.float32) * scale[:, None])


@pytest.mark.parametrize("bits", BIT_WIDTHS)
def test_bfloat16_is_encoded_exactly(bits: int) -> None:
    rows = np.random.default_rng(bits).normal(size=(9, 97)).astype(np.float32)
    small = bfloat16_of(rows)
    encoded = encode_tensor(small, bits, Levels(2, 2))
    as_float = encode_tensor(small.float(), bits, Levels(2, 2))
    torch.testing.assert_close(encoded.codes, as_float.codes, rtol=0, atol=0)
    torch.testing.assert_close(encoded.ranges, as_float.ranges, rtol=0, atol=0)
    decoded = decode_tensor(encoded)
    assert decoded.dtype is torch.bfloat16
    torch.testing.assert_close(decoded, decode_tensor(as_float).to(torch.bfloat16), rtol=0, atol=0)


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("variant", ["portable", "avx2", "avx512"])
def test_every_instruction_set_matches_the_oracle(variant: str, bits: int, dtype: type) -> None:
    if variant not in native.codec_variants():
        pytest.skip(f"this processor does not have {variant}")
    values = np.random.default_rng(bits).normal(size=(7, 771)).astype(np.float32)
    given = values
    if dtype is np.uint16:  # the upper half of a float32 is a bfloat16
        given = (values.view(np.uint32) >> 16).astype(np.uint16)
        values = (given.astype(np.uint32) << 16).view(np.float32)
    packed = np.zeros(native.packed_bytes(values.size, bits), np.uint8)
    ranges = np.zeros((2, 7), np.float32)
    back = np.zeros_like(given)
    native.encode(
        values=given, rows=7, bits=bits, low=2.5, high=3, codes=packed, ranges=ranges, variant=variant
    )
    native.decode(codes=packed, ranges=ranges, bits=bits, values=back, variant=variant)
    scale, offset = ranges
    for mine, wanted in zip((scale, offset), wanted_ranges(values, bits, Levels(2.5, 3)), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=2e-6, atol=1e-6)
    codes = unpack(packed, values.size, bits).reshape(values.shape)
    assert np.abs(codes - wanted_codes(values, scale, offset, bits)).max() <= 0.5 + 2**bits * 2.0**-21
    decoded = torch.from_numpy(offset[:, None] + codes.astype(np.float32) * scale[:, None])
    if dtype is np.uint16:
        assert torch.equal(torch.from_numpy(back.view(np.int16)).view(torch.bfloat16), decoded.bfloat16())
    else:
        np.testing.assert_array_equal(back, decoded.numpy())


def test_instruction_sets_that_exist_here_give_the_same_bytes() -> None:
    variants = native.codec_variants()
    if len(variants) == 1:
        pytest.skip("this processor has only the portable codec")
    values = np.random.default_rng(0).normal(size=(7, 771)).astype(np.float32)
    found = set()
    for variant in variants:
        packed, ranges = np.zeros(native.packed_bytes(values.size, 5), np.uint8), np.zeros((2, 7), np.float32)
        native.encode(
            values=values, rows=7, bits=5, low=2.5, high=3, codes=packed, ranges=ranges, variant=variant
        )
        found.add((packed.tobytes(), ranges.tobytes()))
    assert len(found) == 1


@given(count=st.integers(0, 100_000), bits=st.sampled_from(BIT_WIDTHS))
def test_codes_are_packed_without_gaps(count: int, bits: int) -> None:
    exact = math.ceil(count * bits / 8)
    assert exact <= native.packed_bytes(count, bits) <= exact + 2
    assert native.packed_bytes(count // 8 * 8, bits) == count // 8 * bits


@pytest.mark.parametrize(
    ("granularity", "rows"), [(Granularity.TOKEN, 12), (Granularity.ITEM, 3), (Granularity.TENSOR, 1)]
)
def test_granularity_decides_which_values_share_a_range(granularity: Granularity, rows: int) -> None:
    tensor = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(1))
    encoded = encode_tensor(tensor, 8, granularity=granularity)
    assert encoded.ranges.shape == (2, rows)
    torch.testing.assert_close(encoded.ranges[1], tensor.reshape(rows, -1).min(1).values)
    assert (decode_tensor(encoded) - tensor).abs().max() <= error_bound(encoded).max()


# --- the stated bound -----------------------------------------------------------------------------------

ANY_FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=cases(150))
@given(
    rows=hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=40), elements=ANY_FLOAT),
    bits=st.sampled_from(BIT_WIDTHS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_error_is_within_the_stated_bound(rows: np.ndarray, bits: int, dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(rows).clamp(-3.3e38, 3.3e38).to(dtype)
    encoded = encode_tensor(tensor, bits)
    error = (decode_tensor(encoded).double() - tensor.double()).abs()
    assert bool(torch.isfinite(error).all())
    assert bool((error <= error_bound(encoded)[:, None]).all())


@settings(max_examples=cases(100))
@given(
    rows=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=40),
        elements=st.floats(-100, 100, width=32),
    ),
    bits=st.sampled_from(BIT_WIDTHS),
    low=st.floats(0, 10),
    high=st.floats(0, 10),
)
def test_clamped_values_become_the_outermost_level(
    rows: np.ndarray, bits: int, low: float, high: float
) -> None:
    tensor = torch.from_numpy(rows)
    encoded = encode_tensor(tensor, bits, Levels(low, high))
    scale, offset = encoded.ranges.double()
    inside = torch.minimum(
        torch.maximum(tensor.double(), offset[:, None]), (offset + scale * (2**bits - 1))[:, None]
    )
    error = (decode_tensor(encoded).double() - inside).abs()
    assert bool((error <= error_bound(encoded)[:, None]).all())


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -3.4028234e38, 3.4028234e38, 7.25])
def test_constants_are_exact(bits: int, value: float) -> None:
    tensor = torch.full((3, 50), value)
    torch.testing.assert_close(decode_tensor(encode_tensor(tensor, bits, Levels(1, 1))), tensor)


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0), (2, 0, 3), ()])
def test_empty_tensors_and_scalars(bits: int, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    decoded = decode_tensor(encode_tensor(tensor, bits))
    assert decoded.shape == tensor.shape
    torch.testing.assert_close(decoded, tensor)


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("at", [0, 31, 32, 767, 768, 1535])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_for_nan_or_infinity_names_the_row(bad: float, at: int, dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 768, dtype=dtype)
    tensor.view(-1)[at] = bad
    for levels in (Levels(), Levels(2, 2)):
        with pytest.raises(NonFiniteError, match=f"row {at // 768} of 2"):
            encode_tensor(tensor, 4, levels)


def test_overflowing_sums_are_not_taken_for_infinities() -> None:
    tensor = torch.tensor([[3e38, 3e38, 3e38, -3e38, -3e38, 0.0]])
    encoded = encode_tensor(tensor, 8, Levels(1, 1))
    assert (decode_tensor(encoded) - tensor).abs().max() <= error_bound(encoded).max()


@pytest.mark.parametrize("bits", [-1, 0, 1, 9, 15, 17, 32])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="2 to 8 and 16"):
        encode_tensor(torch.ones(4), bits)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="cannot be encoded"):
        encode_tensor(torch.ones(4, dtype=dtype), 8)


def test_arrays_that_do_not_fit_are_refused() -> None:
    values = np.ones((4, 6), np.float32)
    good = {"values": values, "rows": 4, "bits": 4, "low": 1.0, "high": 1.0}
    codes, ranges = np.zeros(12, np.uint8), np.zeros((2, 4), np.float32)
    read_only = np.zeros(12, np.uint8)
    read_only.flags.writeable = False
    for change, message in [
        ({"rows": 5}, "not 5 equal rows"),
        ({"rows": 0}, "not 0 equal rows"),
        ({"rows": -1}, "not -1 equal rows"),
        ({"values": values.astype(np.float64)}, "neither float32"),
        ({"values": values.T}, "not contiguous"),
        ({"codes": codes[:-1]}, "codes has 11 values, not 12"),
        ({"codes": codes.view(np.int8)}, "not uint8"),
        ({"codes": read_only}, "read-only"),
        ({"ranges": ranges[:1]}, "ranges has 4 values, not 8"),
        ({"low": -1.0}, "0 or more"),
        ({"high": math.nan}, "0 or more"),
        ({"variant": "mmx"}, "no variant 'mmx'"),
    ]:
        with pytest.raises(ValueError, match=message):
            native.encode(**{**good, "codes": codes, "ranges": ranges, **change})
    with pytest.raises(ValueError, match="codes has 11"):
        native.decode(codes=codes[:-1], ranges=ranges, bits=4, values=values)


# --- on the wire ----------------------------------------------------------------------------------------


def payload() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(2, 5, 16, generator=generator),
        torch.randn(2, 5, 8, generator=generator).to(torch.bfloat16),
        torch.tensor([[True, False], [True, True]]),
        torch.arange(6).reshape(2, 3),
    )


@pytest.mark.parametrize("bits", BIT_WIDTHS)
def test_masks_and_integers_are_never_encoded(bits: int) -> None:
    sent = payload()
    came = LinkDecoder().decode(LinkEncoder("mse").encode(sent, bits))
    assert [(t.dtype, t.shape) for t in came] == [(t.dtype, t.shape) for t in sent]
    for before, after in zip(sent[2:], came[2:], strict=True):
        assert after is before
    assert not torch.equal(came[0], sent[0])


def test_zero_bits_is_exact_and_copies_nothing() -> None:
    sent = payload()
    came = LinkDecoder().decode(LinkEncoder("mse").encode(sent, 0))
    assert all(after is before for before, after in zip(sent, came, strict=True))


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("granularity", Granularity)
def test_link_capacity_fits_its_payloads(bits: int, granularity: Granularity) -> None:
    sent = payload()
    specs = tuple(TensorSpec(tuple(t.shape), t.dtype) for t in sent)
    wire = LinkEncoder("laplace", granularity).encode(sent, bits)
    assert wire_specs(specs, bits, granularity) == tuple(TensorSpec(tuple(t.shape), t.dtype) for t in wire)


def test_bits_may_change_from_one_microbatch_to_the_next() -> None:
    encoder, decoder, sent = LinkEncoder("mse"), LinkDecoder(), payload()
    errors = []
    for bits in (2, 8, 0, 3, 16, 4):
        came = decoder.decode(encoder.encode(sent, bits))
        errors.append(float((came[0] - sent[0]).norm()))
    assert errors[2] == 0 < errors[4] < errors[1] < errors[5] < errors[3] < errors[0]


def broken(change: dict[int, int] | None = None, *, drop: int = 0, extra: bool = False) -> tuple:
    wire = list(to_wire([encode_tensor(torch.ones(2, 8), 4, transform=Transform(8, 1)), torch.ones(3)]))
    for column, value in (change or {}).items():
        wire[0][0, column] = value
    if drop:
        wire = wire[:-drop]
    return tuple([*wire, torch.ones(1)] if extra else wire)


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        ((), "table"),
        ((torch.ones(2, 8),), "table"),
        ((torch.ones(2, 8, dtype=torch.int64),), "table"),
        ((torch.tensor(1),), "table"),
        (broken(drop=1), "fewer tensors"),
        (broken(drop=2), "fewer tensors"),
        (broken(extra=True), "more tensors"),
        (broken({0: 9}), "claims 9 bits"),
        (broken({0: -4}), "claims -4 bits"),
        (broken({1: 3}), "granularity 3"),
        (broken({2: 4}), "type 4"),
        (broken({3: 3}), "transform that does not exist: a block of 3"),
        (broken({3: 2048}), "transform that does not exist: a block of 2048"),
        (broken({3: -8}), "transform that does not exist: a block of -8"),
        (broken({3: 0}), "transform that does not exist: a block of 0"),
        (broken({4: -1}), "transform that does not exist: the seed -1"),
        (broken({5: 7}), "7 dimensions"),
        (broken({5: -1}), "-1 dimensions"),
        (broken({6: -2}), "granularity"),
        (broken({6: 1 << 40, 7: 1 << 40}), "impossible"),
        (broken({6: 0, 7: 1 << 62}), "impossible"),
        (broken({6: 3}), "instead of"),
        (broken({0: 5}), "instead of"),
        (broken({1: 2}), "instead of"),
    ],
)
def test_claims_of_a_peer_are_checked(wire: tuple, message: str) -> None:
    with pytest.raises(PeerFailedError, match=message):
        from_wire(wire)


@settings(max_examples=cases(400))
@given(
    column=st.integers(0, 11),
    value=st.one_of(st.integers(-3, 20), st.sampled_from([64, 256, 1 << 31, (1 << 63) - 1, -(1 << 63)])),
    second=st.integers(0, 11),
    other=st.integers(-1, 16),
)
def test_damaged_tables_are_refused_or_decode_in_bounds(
    column: int, value: int, second: int, other: int
) -> None:
    try:
        parts = from_wire(broken({second: other, column: value}))
    except PeerFailedError:
        return
    for part in parts:
        if isinstance(part, EncodedTensor):
            assert decode_tensor(part).shape == part.shape


def test_ranges_that_are_not_finite_are_refused() -> None:
    encoded = encode_tensor(torch.ones(2, 8), 4)
    encoded.ranges[1, 0] = math.nan
    with pytest.raises(PeerFailedError, match="not finite"):
        from_wire(to_wire([encoded]))


def test_error_names_tensor_and_row_of_a_nan() -> None:
    tensors = payload()
    tensors[1][1, 2, 3] = math.nan
    for clamp in ("none", "mse"):
        with pytest.raises(NonFiniteError, match="tensor 1 of the payload, row 7 of 10"):
            LinkEncoder(clamp).encode(tensors, 4)
    assert LinkEncoder("mse").encode(tensors, 0)


def test_encoded_tensor_reports_its_size() -> None:
    encoded = encode_tensor(torch.ones(4, 16), 4)
    assert isinstance(encoded, EncodedTensor)
    assert encoded.bytes == 4 * 16 // 2 + 4 * 8


def test_float16_is_encoded_as_float32() -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).half()
    encoded, wide = encode_tensor(tensor, 6), encode_tensor(tensor.float(), 6)
    assert torch.equal(encoded.codes, wide.codes)
    assert torch.equal(decode_tensor(encoded), decode_tensor(wide))
