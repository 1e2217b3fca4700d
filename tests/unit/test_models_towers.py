"""Test that every cut of CLIP, SigLIP, DINOv2 and ModernBERT agrees with transformers."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from effort import cases, cuts_to_try
from fake_models import bert
from hypothesis import given, settings
from hypothesis import strategies as st
from models_oracle import save
from shipped_model import through
from small_models import VOCABULARY
from tower_cases import CASES, TowerCase

from pipeedge.base.errors import ModelError
from pipeedge.base.payload import Payload
from pipeedge.base.schedule import LayerRange
from pipeedge.compress import LinkDecoder, LinkEncoder
from pipeedge.data import InputRequest, open_input
from pipeedge.models import Model, find_model
from pipeedge.models.kernels import available
from pipeedge.models.rotary import rotation_by_position

TOLERANCE = 1e-5
KERNELS = available(torch.float32, torch.device("cpu"))


def case_model(case: TowerCase, directory: Path) -> Model:
    model = find_model(f"{directory}{case.tower}")
    if model.takes_text:
        return model
    height, width = case.inputs["pixel_values"].shape[2:]
    return dataclasses.replace(model, config=model.config.of_image_size((height, width)))


def run_cut(model: Model, cuts: Sequence[int], inputs: Payload, kernels: str) -> torch.Tensor:
    """Return the model's output through shards that end at each of ``cuts`` and at the last layer."""
    payload = inputs
    tokens = inputs[0].shape[1] if model.takes_text else None
    with torch.inference_mode():
        for start, stop in pairwise([0, *cuts, model.n_layers]):
            payload = model.load(LayerRange(start, stop), kernels=kernels)(payload)
            specs = model.payload_specs(stop, inputs[0].shape[0], tokens)
            assert [(tuple(t.shape), t.dtype) for t in payload] == [(s.shape, s.dtype) for s in specs]
            assert all(tensor.is_contiguous() for tensor in payload)
    return payload[0]


single = st.sets(st.integers(1, 11), min_size=1, max_size=3)
multi = st.lists(st.sets(st.integers(1, 11), min_size=2, max_size=11).map(sorted), min_size=1, max_size=3)


@pytest.mark.parametrize("family", CASES)
@settings(max_examples=cases(50, 16))
@given(data=st.data(), single_cuts=single, multi_cuts=multi, kernels=st.sampled_from(KERNELS))
def test_every_cut_equals_transformers(
    family: str, data: st.DataObject, single_cuts: set[int], multi_cuts: list[list[int]], kernels: str
) -> None:
    case = data.draw(CASES[family]())
    reference = case.model()
    expected = case.expected(reference)
    inputs = tuple(case.inputs.values())
    with tempfile.TemporaryDirectory() as directory:
        model = case_model(case, save(reference, Path(directory)))
        whole = run_cut(model, [], inputs, kernels)
        valid = slice(None) if case.valid is None else case.valid
        torch.testing.assert_close(whole[valid], expected[valid], rtol=TOLERANCE, atol=TOLERANCE)
        for cuts in cuts_to_try(model.n_layers - 1, single_cuts) + multi_cuts:
            output = run_cut(model, [cut for cut in cuts if cut < model.n_layers], inputs, kernels)
            assert torch.equal(output, whole), f"cut after {cuts}"


def test_rotations_keep_the_scores_of_equal_distances() -> None:
    """A score depends on the distance of two tokens alone, which is what rotary positions are for."""
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=generator)
    rotation = rotation_by_position(40, 8, 100.0, query.device)
    rotated = [rotation.apply(states.expand(-1, -1, 40, -1)) for states in (query, key)]
    scores = rotated[0][0, 0] @ rotated[1][0, 0].T
    for distance in (0, 1, 17):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-5)


STEPS = {torch.int8: 1.0, torch.bfloat16: 0.3, torch.float16: 0.05}


@pytest.mark.parametrize("family", CASES)
@settings(max_examples=cases(40), derandomize=True)
@given(data=st.data(), dtype=st.sampled_from(list(STEPS)), cuts=multi)
def test_every_cut_gives_the_same_bits_in_reduced_precision(
    family: str, data: st.DataObject, dtype: torch.dtype, cuts: list[list[int]]
) -> None:
    case = data.draw(CASES[family]())
    reference = case.model()
    inputs = tuple(case.inputs.values())
    with tempfile.TemporaryDirectory() as directory:
        model = case_model(case, save(reference, Path(directory)))
        whole = through(model, [dtype], [], inputs)
        inner = [cut for cut in cuts[0] if cut < model.n_layers]
        assert torch.equal(through(model, [dtype] * (len(inner) + 1), inner, inputs), whole)
        expected = case.expected(reference)
        valid = slice(None) if case.valid is None else case.valid
        # Outputs may be larger than one here, as no norm follows a projection.
        step = STEPS[dtype] * max(1.0, float(expected[valid].abs().max()))
        assert (whole - expected)[valid].abs().max() <= step


@pytest.mark.parametrize("name", ["clip", "clip#text", "siglip", "dinov2", "dinov3", "modernbert"])
def test_compressed_links_carry_what_travels_beside_the_hidden_state(
    name: str, model_dirs: dict[str, Path]
) -> None:
    family, mark, tower = name.partition("#")
    model = find_model(f"{model_dirs[family]}{mark}{tower}")
    generator = torch.Generator().manual_seed(0)
    specs = model.payload_specs(0, 2, 7 if model.takes_text else None)
    inputs = tuple(
        torch.randn(spec.shape, generator=generator)
        if spec.dtype.is_floating_point
        else spec.empty().fill_(1)
        for spec in specs
    )
    with torch.inference_mode():
        (exact,) = model.load()(inputs)
        sent = model.load(LayerRange(0, 6))(inputs)
        received = LinkDecoder().decode(LinkEncoder("none", window=4).encode(sent, 8))
        assert all(torch.equal(*pair) for pair in zip(sent[1:], received[1:], strict=True))
        (output,) = model.load(LayerRange(6, model.n_layers))(received)
    assert 0 < (output - exact).abs().max() < 0.02 * exact.abs().max()


# Towers, and sizes of images -----------------------------------------------------------------------------


def test_a_tower_is_chosen_by_its_name(model_dirs: dict[str, Path]) -> None:
    vision, text = (find_model(f"{model_dirs['clip']}{tower}") for tower in ("", "#text"))
    assert (vision.config.family, vision.takes_text) == ("clip_vision", False)
    assert (text.config.family, text.takes_text) == ("clip_text", True)
    assert find_model(f"{model_dirs['clip']}#vision").config == vision.config
    assert vision.fingerprint() != text.fingerprint()
    assert vision.converted_path(torch.int8).name == "model.vision.int8.safetensors"
    with pytest.raises(ModelError, match="model_type 'vit' has no text tower: leave out #text"):
        find_model(f"{model_dirs['vit']}#text")


OTHER_SIZES = {
    "vit": ("ViTForImageClassification", {"interpolate_pos_encoding": True}),
    "deit": ("DeiTForImageClassificationWithTeacher", {"interpolate_pos_encoding": True}),
    "siglip": ("SiglipForImageClassification", {"interpolate_pos_encoding": True}),
    "dinov2": ("Dinov2WithRegistersForImageClassification", {}),
}


@pytest.mark.parametrize("family", [*OTHER_SIZES, "clip"])
@pytest.mark.parametrize("size", [(16, 16), (24, 24), (9, 30), (27, 4)])
def test_images_of_another_size_equal_transformers(
    family: str, size: tuple[int, int], model_dirs: dict[str, Path]
) -> None:
    """Positions are those of 4 x 4 patches of 4 x 4 pixels."""
    directory = model_dirs[family]
    pixels = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        if family == "clip":
            clip = transformers.CLIPModel.from_pretrained(directory).eval()
            expected = clip.get_image_features(pixels, interpolate_pos_encoding=True).pooler_output
        else:
            cls, options = OTHER_SIZES[family]
            reference = getattr(transformers, cls).from_pretrained(directory).eval()
            expected = reference(pixels, **options).logits
    model = find_model(f"{directory}#{size[0]}x{size[1]}")
    assert model.config.image_size == size
    for cuts in ([], [1, 7]):
        output = run_cut(model, cuts, (pixels,), "torch")
        torch.testing.assert_close(output, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert model.fingerprint() == find_model(directory).fingerprint()


def test_size_of_images_is_chosen_by_the_name(model_dirs: dict[str, Path]) -> None:
    own, other = (find_model(f"{model_dirs['vit']}{end}") for end in ("", "#20"))
    assert (own.max_tokens, other.max_tokens) == (17, 26)
    assert other.name == f"{model_dirs['vit']}#20"
    assert find_model(f"{model_dirs['vit']}#16").config == own.config
    assert find_model(f"{model_dirs['clip']}#vision#20").config.image_size == (20, 20)
    assert find_model("google/vit-base-patch16-224#384x224").max_tokens == 24 * 14 + 1
    for name, message in [
        (f"{model_dirs['vit']}#3", r"vit#3: image_size \[3, 3\] is smaller than patch_size \[4, 4\]"),
        (f"{model_dirs['vit']}#9999", "image_size is .9999, 9999.; height and width must be 1 to 4096"),
        (f"{model_dirs['clip']}#text#20", "clip#text takes sentences: leave out #20"),
        ("bert-base-uncased#224", "bert-base-uncased takes sentences: leave out #224"),
    ]:
        with pytest.raises(ModelError, match=message):
            find_model(name)


@pytest.mark.parametrize(
    ("processor", "size"),
    [
        (
            {"do_center_crop": True, "crop_size": {"height": 8, "width": 12}, "size": {"shortest_edge": 9}},
            (8, 12),
        ),
        ({"do_center_crop": True, "crop_size": 8}, (8, 8)),
        ({"do_center_crop": False, "size": {"height": 20, "width": 16}}, (20, 16)),
        ({"size": {"shortest_edge": 9}}, (16, 16)),
        (None, (16, 16)),
    ],
)
def test_images_have_the_size_of_the_models_own_processor(
    processor: dict[str, object] | None, size: tuple[int, int], model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model_dirs["dinov2"], directory)
    if processor is not None:
        (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    model = find_model(directory)
    assert model.config.image_size == size
    reference = transformers.Dinov2WithRegistersForImageClassification.from_pretrained(directory).eval()
    pixels = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = reference(pixels).logits
    torch.testing.assert_close(run_cut(model, [5], (pixels,), "torch"), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"do_center_crop": true, "crop_size": {"height": "x", "width": 1}}']
)
def test_processor_that_makes_no_sense_is_named(
    content: str, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model_dirs["dinov2"], directory)
    (directory / "preprocessor_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        find_model(directory)


def test_sentences_of_siglip_are_padded_to_their_full_length(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    (tmp_path / "s.txt").write_text("the cat sat\nall day\n")
    model = bert(len(VOCABULARY), 9, directory=tmp_path)
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, family="siglip_text"))
    assert model.full_length
    (microbatch,) = open_input(InputRequest(paths=(tmp_path / "s.txt",)), model).microbatches(2)
    assert [tensor.shape for tensor in microbatch.payload] == [(2, 9)] * 3
    assert microbatch.payload[0][1].tolist()[4:] == [0] * 5
    assert bool((microbatch.payload[1] == 1).all())
