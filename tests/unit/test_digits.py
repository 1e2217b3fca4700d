"""Test the included model, its data, and the script that made them."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from places import ROOT
from safetensors import safe_open

from pipeedge.data import InputRequest, open_input
from pipeedge.data.defaults import asset
from pipeedge.data.results import Accuracy
from pipeedge.models import DIGITS, find_model

TOOL = ROOT / "tools" / "train_vit_digits.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = spec_from_file_location("train_vit_digits", TOOL)
    module = module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    with np.load(asset("digits.npz"), allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


@pytest.fixture(scope="module")
def printed() -> dict[str, float]:
    """Return the training script's measurement on the held-out images."""
    return json.loads(asset("vit-digits/training.json").read_text())["held_out"]


def test_split_matches_the_script(tool: ModuleType, arrays: dict[str, np.ndarray]) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    expected = tool.split_digits(digits.images, digits.target)
    assert sorted(expected) == sorted(arrays)
    for name, array in expected.items():
        assert arrays[name].dtype == np.uint8
        np.testing.assert_array_equal(arrays[name], array)


def test_the_split_is_a_partition_with_every_class_held_out(arrays: dict[str, np.ndarray]) -> None:
    from sklearn.datasets import load_digits

    def rows(images: np.ndarray, labels: np.ndarray) -> list[tuple[int, ...]]:
        return [(int(label), *map(int, image.ravel())) for image, label in zip(images, labels, strict=True)]

    digits = load_digits()
    parts = [rows(arrays[f"images_{part}"], arrays[f"labels_{part}"]) for part in ("train", "heldout")]
    assert [len(part) for part in parts] == [1437, 360]
    assert sorted(parts[0] + parts[1]) == sorted(rows(digits.images, digits.target))
    assert not set(parts[0]) & set(parts[1])
    assert np.bincount(arrays["labels_heldout"]).tolist() == [36] * 10


def test_shards_reproduce_the_recorded_accuracy(printed: dict[str, float]) -> None:
    model = find_model(DIGITS)
    shard = model.load()
    accuracy = Accuracy()
    with torch.inference_mode():
        for microbatch in open_input(InputRequest(max_items=360), model).microbatches(64):
            (logits,) = shard(microbatch.payload)
            accuracy = accuracy.with_outputs(logits, microbatch.labels)
    assert (accuracy.correct, accuracy.labelled) == (printed["correct"], printed["labelled"])
    assert accuracy.top1 is not None
    assert accuracy.top1 >= 0.97


def test_transformers_reads_the_same_model(printed: dict[str, float], arrays: dict[str, np.ndarray]) -> None:
    from transformers import ViTForImageClassification

    model = ViTForImageClassification.from_pretrained(asset("vit-digits"), local_files_only=True).eval()
    pixels = torch.from_numpy(arrays["images_heldout"]).float()[:, None] / 8 - 1
    with torch.inference_mode():
        best = model(pixel_values=pixels).logits.argmax(dim=1).numpy()
    assert int((best == arrays["labels_heldout"]).sum()) == printed["correct"]


def test_shipped_model_is_small_and_in_the_usual_format() -> None:
    weights = asset("vit-digits/model.safetensors")
    assert weights.stat().st_size < 1_000_000
    with safe_open(weights, "pt") as stored:
        names = set(stored.keys())
        assert {stored.get_tensor(name).dtype for name in names} == {torch.float32}
    assert "vit.encoder.layer.3.attention.attention.query.weight" in names
    config = json.loads(asset("vit-digits/config.json").read_text())
    sizes = (config["num_hidden_layers"], config["image_size"], config["num_channels"])
    assert sizes == (4, 8, 1)
    assert asset("chelsea.jpg").stat().st_size < 60_000
    total = sum(path.stat().st_size for path in asset(".").rglob("*") if path.is_file())
    assert total < 2_000_000


def test_training_is_reproducible(tool: ModuleType, arrays: dict[str, np.ndarray]) -> None:
    pixels = tool.pixel_values(arrays["images_train"][:256])
    labels = torch.from_numpy(arrays["labels_train"][:256]).long()

    def trained() -> torch.nn.Module:
        torch.manual_seed(3)
        model = tool.build_model()
        tool.train(model, pixels, labels, epochs=1, seed=3)
        return model

    one, two = trained(), trained()
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), two.parameters(), strict=True))


def test_the_script_writes_a_model_and_says_what_it_measured(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(TOOL), "--output", str(tmp_path), "--epochs", "2"])
    try:
        tool.main()
    finally:
        torch.use_deterministic_algorithms(False)
    measured = json.loads((tmp_path / "training.json").read_text())["held_out"]
    assert (
        capsys.readouterr().out == f"held-out accuracy {measured['top1']:.4f} ({measured['correct']}/360)\n"
    )
    assert measured["correct"] > 36  # better than guessing, after two passes already
    shipped = {path.name for path in asset("vit-digits").iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == shipped
    assert (tmp_path / "config.json").read_text() == asset("vit-digits/config.json").read_text()
