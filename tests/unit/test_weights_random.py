"""Test random weights, and the fingerprints that tell weights apart."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from dialects import Arrays
from hypothesis import given, settings
from hypothesis import strategies as st
from models_oracle import save, scramble
from safetensors.torch import save_file
from stored_weights import WRITERS, Saved, case, on_disk

from pipeedge.base.schedule import LayerRange
from pipeedge.models import find_model
from pipeedge.models.weights.locating import hub_tensors
from pipeedge.models.weights.random_weights import RandomWeights
from pipeedge.models.weights.writing import write_random


@settings(max_examples=15)
@given(cuts=st.sets(st.integers(1, 47), max_size=6).map(sorted), seed=st.integers(0, 2**64))
def test_random_weights_do_not_depend_on_the_cut(cuts: list[int], seed: int) -> None:
    model = find_model("facebook/deit-tiny-distilled-patch16-224")
    layer = cuts[0] if cuts else 0
    bounds = [*cuts, 48]
    alone = dict(
        model.random(LayerRange(layer, bounds[1 if cuts else 0]), seed, kernels="torch").named_parameters()
    )
    within = dict(model.random(LayerRange(layer, 48), seed, kernels="torch").named_parameters())
    assert alone
    assert all(torch.equal(tensor, within[name]) for name, tensor in alone.items())


def test_random_weights_are_the_same_on_every_machine() -> None:
    source = RandomWeights({"encoder.layer.0.output.dense.weight": torch.Size([4])}, 3)
    values = torch.empty(4)
    source.read_into("encoder.layer.0.output.dense.weight", values)
    assert [value.hex() for value in values.tolist()] == GOLDEN


GOLDEN = [
    "-0x1.fc4bb60000000p-7",
    "0x1.ae0bae0000000p-7",
    "-0x1.e082aa0000000p-7",
    "-0x1.61b59c0000000p-8",
]


def test_random_weights_have_the_expected_deviation() -> None:
    shard = find_model("bert-base-uncased").random(LayerRange(4, 8), seed=1, kernels="torch")
    for name, tensor in shard.named_parameters():
        centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        assert abs(tensor.mean().item() - centre) < 0.005
        assert tensor.std().item() == pytest.approx(0.02, rel=0.15)
    drawn = [tensor.flatten()[:8] for tensor in shard.parameters()]
    assert len({tuple(values.tolist()) for values in drawn}) == len(drawn)
    other = find_model("bert-base-uncased").random(LayerRange(4, 8), seed=2, kernels="torch")
    pairs = zip(shard.parameters(), other.parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in pairs)


def test_written_random_weights_are_the_models_own_and_transformers_reads_them(tmp_path: Path) -> None:
    model = find_model("facebook/deit-tiny-distilled-patch16-224")
    file = tmp_path / "DeiT_T_distilled.npz"
    write_random(file, model.build(), model.config, seed=5)
    read = dict(model.load(weights=file, kernels="torch").named_parameters())
    assert all(
        torch.equal(t, read[name]) for name, t in model.random(seed=5, kernels="torch").named_parameters()
    )

    with np.load(file) as arrays:
        save_file({n: torch.from_numpy(arrays[n]) for n in arrays.files}, tmp_path / "model.safetensors")
    options = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "num_labels": 1000}
    transformers.DeiTConfig(**options).save_pretrained(tmp_path)
    reference, report = transformers.DeiTForImageClassificationWithTeacher.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    pixels = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = reference.eval()(pixels).logits
        (output,) = model.load(weights=file)((pixels,))
        payload: tuple[torch.Tensor, ...] = (pixels,)
        for layer in range(model.n_layers):
            payload = model.load(LayerRange(layer, layer + 1), file)(payload)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
    assert torch.equal(payload[0], output)


@pytest.mark.parametrize("name", ["google/vit-huge-patch14-224-in21k", "bert-large-uncased"])
def test_hub_names_cover_every_parameter_once(name: str) -> None:
    model = find_model(name)
    shapes = hub_tensors(model.build(), model.config)
    assert sum(shape.numel() for shape in shapes.values()) == model.parameter_count()


# Fingerprints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", WRITERS)
def test_fingerprints_distinguish_weights_and_configurations(
    write: Callable[[Path, Arrays], Path], saved: Saved, tmp_path: Path
) -> None:
    _, model = saved("ViTForImageClassification")
    arrays = on_disk(model)
    file = write(tmp_path / "w", arrays)
    (tmp_path / "elsewhere").mkdir()
    copy = Path(shutil.copy(file, tmp_path / "elsewhere" / f"other{file.suffix}"))
    assert model.fingerprint(file) == model.fingerprint(copy)

    tuned = {name: array + np.float32(0.001) for name, array in arrays.items()}
    one = {**arrays, "classifier.bias": arrays["classifier.bias"] + np.float32(0.001)}
    prints = {model.fingerprint(write(tmp_path / f"w{n}", a)) for n, a in enumerate((arrays, tuned, one))}
    assert len(prints) == 3

    other = find_model(save(case("ViTForImageClassification", hidden_act="relu").model(), tmp_path / "relu"))
    assert other.fingerprint(file) != model.fingerprint(file)


def test_fingerprints_cover_every_file_of_an_index(tmp_path: Path) -> None:
    reference = case("BertForSequenceClassification")
    prints = set()
    for seed in (1, 1, 2):
        built = reference.model()
        scramble(built, seed)
        built.save_pretrained(tmp_path / str(len(prints)), max_shard_size="3KB")
        prints.add(find_model(tmp_path / str(len(prints))).fingerprint())
    assert len(prints) == 2
