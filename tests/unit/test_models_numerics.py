"""Test that every cut of every family agrees with transformers, and all cuts are bit-identical."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from effort import cases, cuts_to_try
from hypothesis import given, settings
from hypothesis import strategies as st
from models_oracle import TEXT_CLASSES, Case, image_cases, reference_output, save, text_cases

from pipeedge.base.payload import Payload
from pipeedge.base.schedule import LayerRange
from pipeedge.models import DIGITS, Model, find_model, shard
from pipeedge.models.kernels import available
from pipeedge.models.layers.mpnet import relative_buckets

TOLERANCE = 1e-5


KERNELS = available(torch.float32, torch.device("cpu"))


def run_cut(model: Model, cuts: Sequence[int], inputs: Payload, kernels: str = "auto") -> Payload:
    """Return the model's output through shards that end at each of ``cuts`` and at the last layer."""
    bounds = [0, *cuts, model.n_layers]
    payload = inputs
    with torch.inference_mode():
        for start, stop in pairwise(bounds):
            before = [tensor.clone() for tensor in payload]
            result = model.load(LayerRange(start, stop), kernels=kernels)(payload)
            assert all(torch.equal(a, b) for a, b in zip(before, payload, strict=True)), "input written to"
            check_specs(model, stop, inputs, result)
            payload = result
    return payload


def check_specs(model: Model, after_layer: int, inputs: Payload, payload: Payload) -> None:
    """Check the shapes, types and contiguity of what crosses a cut."""
    tokens = inputs[0].shape[1] if model.takes_text else None
    specs = model.payload_specs(after_layer, inputs[0].shape[0], tokens)
    assert [(tuple(t.shape), t.dtype) for t in payload] == [(spec.shape, spec.dtype) for spec in specs]
    assert all(tensor.is_contiguous() for tensor in payload)


def check_every_cut(
    case: Case, single_cuts: set[int], multi_cuts: Sequence[Sequence[int]], kernels: str
) -> None:
    reference = case.model()
    inputs = case.inputs()
    expected = reference_output(reference, inputs)
    with tempfile.TemporaryDirectory() as directory:
        model = find_model(save(reference, Path(directory)))
        check_specs(model, 0, inputs, inputs)
        (whole,) = run_cut(model, [], inputs, kernels)
        torch.testing.assert_close(whole, expected, rtol=0, atol=TOLERANCE)
        for cuts in [*cuts_to_try(model.n_layers - 1, single_cuts), *multi_cuts]:
            (output,) = run_cut(model, [cut for cut in cuts if cut < model.n_layers], inputs, kernels)
            assert torch.equal(output, whole), f"cut after {cuts}"


single = st.sets(st.integers(1, 11), min_size=1, max_size=3)
multi = st.lists(st.sets(st.integers(1, 11), min_size=2, max_size=11).map(sorted), min_size=1, max_size=3)


@settings(max_examples=cases(100))
@given(case=image_cases("vit"), single_cuts=single, multi_cuts=multi, kernels=st.sampled_from(KERNELS))
def test_vit_equals_transformers_at_every_cut(
    case: Case, single_cuts: set[int], multi_cuts: list[list[int]], kernels: str
) -> None:
    check_every_cut(case, single_cuts, multi_cuts, kernels)


@settings(max_examples=cases(100))
@given(case=image_cases("deit"), single_cuts=single, multi_cuts=multi, kernels=st.sampled_from(KERNELS))
def test_deit_equals_transformers_at_every_cut(
    case: Case, single_cuts: set[int], multi_cuts: list[list[int]], kernels: str
) -> None:
    check_every_cut(case, single_cuts, multi_cuts, kernels)


@pytest.mark.parametrize("family", TEXT_CLASSES)
@settings(max_examples=cases(50, 16))
@given(data=st.data(), single_cuts=single, multi_cuts=multi, kernels=st.sampled_from(KERNELS))
def test_text_families_equal_transformers_at_every_cut(
    family: str, data: st.DataObject, single_cuts: set[int], multi_cuts: list[list[int]], kernels: str
) -> None:
    check_every_cut(data.draw(text_cases(family)), single_cuts, multi_cuts, kernels)


def test_relative_positions_fall_into_the_buckets_of_transformers() -> None:
    """Distances beyond 128 tokens, where all buckets are used."""
    position = torch.arange(300)
    relative = position[None, :] - position[:, None]
    expected = transformers.models.mpnet.modeling_mpnet.MPNetEncoder.relative_position_bucket(relative)
    found = relative_buckets(relative)
    assert torch.equal(found, expected)
    assert len(found.unique()) == 32 - 1  # distance 0 belongs to one direction


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_model_in_the_package_equals_transformers_at_every_cut(kernels: str) -> None:
    model = find_model(DIGITS)
    assert model.n_layers == 16
    reference = transformers.ViTForImageClassification.from_pretrained(model.directory).eval()
    inputs = (torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0)),)
    expected = reference_output(reference, inputs)
    for cuts in [[cut] for cut in range(1, 16)]:
        torch.testing.assert_close(run_cut(model, cuts, inputs, kernels)[0], expected, rtol=0, atol=TOLERANCE)


def test_input_strides_make_no_difference() -> None:
    """Frames arrive as views into buffers, images as channels last."""
    model = find_model(DIGITS)
    pixels = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    payload: Payload = (pixels,)
    with torch.inference_mode():
        for layer in range(model.n_layers):
            shard = model.load(LayerRange(layer, layer + 1))
            expected = shard(payload)
            strided = tuple(tensor.transpose(0, -1).contiguous().transpose(0, -1) for tensor in payload)
            assert not any(tensor.is_contiguous() for tensor in strided)
            result = shard(strided)
            assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
            assert all(tensor.is_contiguous() for tensor in result)
            payload = expected


@pytest.mark.parametrize("family", ["vit", "bert", "albert", "mpnet", "modernbert", "clip", "dinov3"])
def test_large_microbatches_are_computed_some_items_at_a_time(
    family: str, model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is that of these items alone, to the bit, and no cut changes it."""
    model = find_model(str(model_dirs[family]))
    generator = torch.Generator().manual_seed(4)
    inputs = tuple(
        torch.randn(spec.shape, generator=generator)
        if spec.dtype.is_floating_point
        else torch.randint(1, 2 if name != "input_ids" else 16, spec.shape, generator=generator)
        for name, spec in zip(model.input_names, model.input_specs(5, 9, eight_bit=False), strict=True)
    )
    parts = [slice(0, 2), slice(2, 4), slice(4, 5)]
    alone = [run_cut(model, [], tuple(tensor[part] for tensor in inputs))[0] for part in parts]
    tokens = 9 if model.takes_text else model.config.image.tokens
    monkeypatch.setattr(shard, "_LARGEST_INNER_BYTES", 2 * tokens * model.config.intermediate * 4)
    for cuts in ([], [1], [3, 6]):
        assert torch.equal(run_cut(model, cuts, inputs)[0], torch.cat(alone)), f"cut after {cuts}"
    assert not len(run_cut(model, [], tuple(tensor[:0] for tensor in inputs))[0])
