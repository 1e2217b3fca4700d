"""Test how weights of decoders are rounded to 4 bits, by products with rows that have a single 1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from decoder_cases import CASES
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge import _native as native
from pipeedge.base.errors import RequestError, WeightsError
from pipeedge.decoding.loop import LocalDecoder
from pipeedge.models import find_model
from pipeedge.models.decoder import find_decoder
from pipeedge.models.dtypes import INT4, dtype_name
from pipeedge.models.kernels import choose
from pipeedge.models.weights.download import convert, save_weights

GROUP, PARTS, LARGEST = 32, 8, 15

Weights = npt.NDArray[np.float32]


def stored(weights: Weights) -> Weights:
    """Return weights [N, K] as a product in 4 bits has them."""
    outputs, inputs = weights.shape
    head = native.DecoderHead(
        weights="int4",
        stream="float32",
        hidden=inputs,
        tokens=outputs,
        norm_centred=False,
        eps=0.0,
        scale=1.0,
        cap=0.0,
    )
    head.fill("weight", 0, weights)
    found = np.empty((inputs, outputs), np.float32)
    head.score(np.eye(inputs, dtype=np.float32), found, threads=1)
    return found.T


def to_bfloat16(values: Weights) -> Weights:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def nearest(weights: Weights) -> Weights:
    """Round to the nearest of 16 numbers between the smallest and the largest, or 0, of each group."""
    groups = weights.reshape(-1, GROUP)
    least = np.minimum(groups.min(1, keepdims=True), 0)
    most = np.maximum(groups.max(1, keepdims=True), 0)
    scale = to_bfloat16(np.maximum((most - least) / LARGEST, 1e-30))
    zero = np.clip(np.rint(-least / scale * PARTS), 0, PARTS * LARGEST) / PARTS
    codes = np.clip(np.rint(groups / scale + zero), 0, LARGEST)
    return ((codes - zero) * scale).astype(np.float32).reshape(weights.shape)


def error(weights: Weights, found: Weights) -> float:
    return float(np.linalg.norm(weights - found) / max(np.linalg.norm(weights), 1e-20))


@settings(max_examples=cases(1000))
@given(
    seed=st.integers(0, 1 << 30),
    groups=st.integers(1, 4),
    outputs=st.integers(1, 40),
    middle=st.sampled_from([0.0, 0.01, -3.0]),
    outlier=st.sampled_from([1.0, 20.0, -500.0]),
    size=st.sampled_from([1e-3, 1.0, 1e6]),
)
def test_no_group_is_further_off_than_by_rounding_to_nearest(
    seed: int, groups: int, outputs: int, middle: float, outlier: float, size: float
) -> None:
    random = np.random.default_rng(seed)
    weights = random.standard_normal((outputs, GROUP * groups)) + middle
    weights[random.integers(outputs), random.integers(GROUP * groups)] *= outlier
    weights = (weights * size).astype(np.float32)
    found, plain = stored(weights), nearest(weights)
    for own, ours, theirs in zip(
        weights.reshape(-1, GROUP), found.reshape(-1, GROUP), plain.reshape(-1, GROUP), strict=True
    ):
        assert error(own, ours) <= error(own, theirs) * 1.001 + 1e-6


def test_a_tenth_is_gained_on_normal_weights() -> None:
    weights = np.random.default_rng(0).standard_normal((256, 1024)).astype(np.float32)
    assert error(weights, stored(weights)) < 0.072
    assert error(weights, nearest(weights)) > 0.077


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5])
def test_equal_weights_stay_equal(value: float) -> None:
    found = stored(np.full((3, 64), value, np.float32))
    assert np.abs(found - value).max() <= 0.004 * abs(value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_not_hidden(value: float) -> None:
    weights = np.ones((2, 64), np.float32)
    weights[1, 40] = value
    found = stored(weights)
    assert np.isnan(found[1, 32:]).all()
    assert np.isfinite(found[0]).all()


def test_encoders_have_no_other_device_for_it() -> None:
    with pytest.raises(RequestError, match=r"--dtype int4 computes on cpu, not on cuda"):
        choose("auto", INT4, torch.device("cuda"))


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_stored_weights_of_encoders_give_the_same_results(
    name: str, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    model, stored = find_model(model_dirs[name]), tmp_path / "w.safetensors"
    convert(model, model.weights_path(), stored, INT4, say=lambda _line: None)
    ids = torch.randint(1, 15, (3, 9), generator=torch.Generator().manual_seed(2))
    inputs = (ids, torch.ones_like(ids), torch.zeros_like(ids))
    ours, theirs = (model.load(weights=path, dtype=INT4)(inputs)[0] for path in (stored, None))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.int8, INT4], ids=str)
@pytest.mark.parametrize("name", ["llama3", "phi3-long", "gpt2", "gemma2"])
def test_stored_weights_of_decoders_give_the_same_scores(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    directory = tmp_path / name
    CASES[name].save(directory, parts=name == "gemma2")
    expected, fingerprint = next_scores(directory, dtype), find_decoder(directory).fingerprint()
    save_weights([str(directory)], Path(), dtype=dtype, say=lambda _line: None)
    assert torch.equal(next_scores(directory, dtype), expected)
    stored = directory / f"model.{dtype_name(dtype)}.safetensors"
    for path in directory.glob("model*"):
        if path != stored:
            path.unlink()
    assert torch.equal(next_scores(directory, dtype), expected)
    assert find_decoder(directory).fingerprint() == fingerprint
    with pytest.raises(
        WeightsError, match=rf"is stored as {dtype_name(dtype)}, bfloat16 is needed; run with"
    ):
        find_decoder(directory).stage(dtype=torch.bfloat16, pages=1, weights=stored)
    with pytest.raises(RequestError, match="are stored as int8 or int4"):
        save_weights([str(directory)], Path(), dtype=torch.bfloat16, say=lambda _line: None)


def next_scores(directory: Path, dtype: torch.dtype) -> torch.Tensor:
    decoder = LocalDecoder(find_decoder(directory), dtype, context=64)
    lists = decoder.begin()
    return decoder.score(decoder.step([(lists, 0, list(range(1, 50)))]))


def test_inputs_need_not_fill_a_group() -> None:
    weights = np.random.default_rng(1).standard_normal((5, 41)).astype(np.float32)
    assert error(weights, stored(weights)) < 0.1
