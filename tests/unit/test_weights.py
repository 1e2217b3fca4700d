"""Test that every format and naming scheme gives the same shard."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from dialects import Arrays, as_google, without_prefix
from models_oracle import Case, reference_output, save
from safetensors.torch import load_file, save_file
from stored_weights import WRITERS, Saved, as_timm, case, on_disk, write_stored

from pipeedge.base.errors import WeightsError
from pipeedge.base.schedule import LayerRange
from pipeedge.models import Model, find_model
from pipeedge.models.progress import ByteBar
from pipeedge.models.words import WORD_TABLE


def run(model: Model, inputs: tuple[torch.Tensor, ...], weights: Path | None = None) -> torch.Tensor:
    """Return the output through two shards, both read from ``weights``."""
    middle = model.n_layers // 2 + 1
    payload = inputs
    with torch.inference_mode():
        for layers in (LayerRange(0, middle), LayerRange(middle, model.n_layers)):
            payload = model.load(layers, weights)(payload)
    return payload[0]


Outputs = Callable[[str], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def outputs_of(saved: Saved) -> Outputs:
    """Return the outputs of transformers, and of two shards of the named class's own file, computed once."""

    @functools.cache
    def get(cls: str) -> tuple[torch.Tensor, torch.Tensor]:
        reference, model = saved(cls)
        return reference_output(reference.model(), reference.inputs()), run(model, reference.inputs())

    return get


# Dialects, built here from the reference without a look at our own tables -----------------------------


def in_memory(reference: Case) -> Arrays:
    """Return tensors with the names of transformers 5 in memory."""
    return {name: tensor.numpy() for name, tensor in reference.model().state_dict().items()}


def with_gamma(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Return tensors with TensorFlow's names for BERT's norms."""
    return {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): array
        for name, array in arrays.items()
    }


DIALECTS: dict[tuple[str, str], Callable[[Case, Model], Arrays]] = {}
for _cls in (
    "ViTForImageClassification",
    "DeiTForImageClassificationWithTeacher",
    "DeiTForImageClassification",
    "BertForSequenceClassification",
):
    DIALECTS |= {
        (_cls, "hub"): lambda _, model: on_disk(model),
        (_cls, "hub without prefix"): lambda _, model: without_prefix(on_disk(model)),
        (_cls, "memory"): lambda reference, _: in_memory(reference),
        (_cls, "memory without prefix"): lambda reference, _: without_prefix(in_memory(reference)),
    }
    if _cls.startswith("Bert"):
        DIALECTS[_cls, "gamma"] = lambda _, model: with_gamma(on_disk(model))
        DIALECTS[_cls, "gamma without prefix"] = lambda _, model: with_gamma(without_prefix(on_disk(model)))
    else:
        DIALECTS[_cls, "timm"] = lambda _, model: as_timm(on_disk(model), 2)
DIALECTS["ViTForImageClassification", "google"] = lambda _, model: as_google(on_disk(model), 2, 3)


@pytest.mark.parametrize(("cls", "dialect"), DIALECTS)
@pytest.mark.parametrize("write", WRITERS)
def test_every_format_and_dialect_gives_the_same_model(
    cls: str,
    dialect: str,
    write: Callable[[Path, Arrays], Path],
    saved: Saved,
    outputs_of: Outputs,
    tmp_path: Path,
) -> None:
    reference, model = saved(cls)
    file = write(tmp_path / "weights", DIALECTS[cls, dialect](reference, model))
    whole, by_default = outputs_of(cls)
    output = run(model, reference.inputs(), file)
    torch.testing.assert_close(output, whole, rtol=0, atol=1e-5)
    assert torch.equal(output, by_default)


@pytest.mark.parametrize("chunk", [1, 40, 100, 1000])
def test_piece_size_does_not_change_the_tensor(
    chunk: int,
    saved: Saved,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, model = saved("ViTForImageClassification")
    expected = dict(model.load(kernels="torch").named_parameters())
    monkeypatch.setattr("pipeedge.models.weights.files._CHUNK_BYTES", chunk)
    for dialect in ("hub", "timm", "google"):
        arrays = DIALECTS["ViTForImageClassification", dialect](case("ViTForImageClassification"), model)
        for write in WRITERS:
            shard = model.load(weights=write(tmp_path / "w", arrays), kernels="torch")
            assert all(torch.equal(tensor, expected[name]) for name, tensor in shard.named_parameters())


def test_a_directory_with_an_index_is_read_file_by_file(tmp_path: Path) -> None:
    reference = case("BertForSequenceClassification")
    reference.model().save_pretrained(tmp_path, max_shard_size="3KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = find_model(tmp_path)
    assert model.weights_path().name == "model.safetensors.index.json"
    expected = reference_output(reference.model(), reference.inputs())
    for weights in (None, tmp_path, tmp_path / "model.safetensors.index.json"):
        torch.testing.assert_close(run(model, reference.inputs(), weights), expected, rtol=0, atol=1e-5)

    # A rank needs only the files that hold its own shard ...
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    first = {file for name, file in index.items() if "embeddings" in name or "layer.0" in name}
    last = set(index.values()) - first
    for file in last:
        (tmp_path / file).unlink()
    model.load(LayerRange(0, 4))
    # ... and the missing one is named, with what it holds.
    with pytest.raises(WeightsError, match=r"00\d-of-\d+\.safetensors is missing[:;] .* (bert|class)"):
        model.load(LayerRange(0, 8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_types_become_float32(dtype: torch.dtype, saved: Saved, tmp_path: Path) -> None:
    reference, model = saved("ViTForImageClassification")
    tensors = {name: torch.from_numpy(array).to(dtype) for name, array in on_disk(model).items()}
    save_file(tensors, tmp_path / "w.safetensors")
    files = [tmp_path / "w.safetensors"]
    if dtype != torch.bfloat16:
        np.savez(tmp_path / "w.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})
        files.append(tmp_path / "w.npz")
    rounded = reference.model()
    rounded.load_state_dict({name: t.to(dtype).float() for name, t in rounded.state_dict().items()})
    for file in files:
        assert {p.dtype for p in model.load(weights=file).parameters()} == {torch.float32}
        expected = reference_output(rounded, reference.inputs())
        torch.testing.assert_close(run(model, reference.inputs(), file), expected, rtol=0, atol=1e-5)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "delay_s", "shown"), [(True, 0, True), (True, 60, False), (False, 0, False)]
)
def test_slow_loading_shows_a_progress_bar(
    terminal: bool,
    delay_s: float,
    shown: bool,
    saved: Saved,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, model = saved("ViTForImageClassification")
    monkeypatch.setattr(sys, "stderr", _Terminal() if terminal else io.StringIO())
    with ByteBar("layers 1-8", model.weight_bytes(), delay_s=delay_s) as bar:
        model.load(progress=bar.advance)
    assert ("layers 1-8: 100%" in sys.stderr.getvalue()) == shown


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_progress_of_loading_adds_up_to_the_bytes_of_the_weights(dtype: torch.dtype, saved: Saved) -> None:
    _, model = saved("ViTForImageClassification")
    for layers in (LayerRange(0, 8), LayerRange(2, 7)):
        loaded: list[int] = []
        model.load(layers, dtype=dtype, progress=loaded.append)
        assert sum(loaded) == model.weight_bytes(layers, dtype)


def test_weights_have_the_requested_dtype(saved: Saved) -> None:
    """All but the table of words, which stays in its file."""
    reference, model = saved("BertForSequenceClassification")
    shard = model.load(dtype=torch.bfloat16)
    others = {parameter.dtype for name, parameter in shard.named_parameters() if name != WORD_TABLE}
    assert others == {torch.bfloat16}
    with torch.inference_mode():
        (output,) = shard(reference.inputs())
    assert output.dtype == torch.float32
    expected = reference_output(reference.model(), reference.inputs())
    torch.testing.assert_close(output, expected, rtol=0.1, atol=0.1)


STORED = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_words_looked_up_in_the_file_are_those_of_a_copy(
    stored: torch.dtype, dtype: torch.dtype, saved: Saved, tmp_path: Path
) -> None:
    """Converted before or after they are looked up, to the bit."""
    reference, model = saved("BertForSequenceClassification")
    tensors = {name: tensor.to(stored) for name, tensor in load_file(model.default_weights).items()}
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    mapped = model.load(LayerRange(0, 1), file, dtype=dtype)
    assert mapped.word_table is not None
    assert mapped.word_table.dtype is stored
    arrays = {name: tensor.double().float().numpy() for name, tensor in tensors.items()}
    np.savez(tmp_path / "model.npz", **arrays)
    copied = model.load(LayerRange(0, 1), tmp_path / "model.npz", dtype=dtype)
    with torch.inference_mode():
        found, expected = (shard(reference.inputs()) for shard in (mapped, copied))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_writing_to_mapped_words_leaves_the_file_alone(saved: Saved) -> None:
    _, model = saved("BertForSequenceClassification")
    before = model.default_weights.read_bytes()
    table = model.load(LayerRange(0, 1)).word_table
    assert table is not None
    table.zero_()
    assert model.default_weights.read_bytes() == before
    assert model.load(LayerRange(0, 1)).word_table.abs().sum() > 0


def test_words_that_cannot_be_mapped_are_copied(saved: Saved, tmp_path: Path) -> None:
    """A header of odd length puts values where no number of their type can be."""
    _, model = saved("BertForSequenceClassification")
    raw = model.default_weights.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    odd = tmp_path / "odd.safetensors"
    odd.write_bytes(struct.pack("<Q", length + 1) + raw[8 : 8 + length] + b" " + raw[8 + length :])
    ours, theirs = (model.load(LayerRange(0, 1), file).word_table for file in (odd, None))
    assert torch.equal(ours, theirs)


def test_memory_counts_the_rows_of_words_that_may_be_looked_up(
    saved: Saved,
) -> None:
    _, small = saved("BertForSequenceClassification")
    text = dataclasses.replace(small.config.text, vocab=100_000)
    model = dataclasses.replace(small, config=dataclasses.replace(small.config, input=text))
    first, width = LayerRange(0, 4), model.config.hidden
    table = 4 * 100_000 * width
    rest = model.weight_bytes(first) - table
    assert model.held_bytes(first, torch.float32, 7) == rest + 7 * 2 * 4096
    assert model.held_bytes(first, torch.float32, 10**6) == rest + table
    assert model.held_bytes(first, torch.float32, 7, "weights.npz") == rest + table
    later = LayerRange(4, model.n_layers)
    assert model.held_bytes(later, torch.float32, 7) == model.weight_bytes(later)


def test_loaded_shards_are_frozen_and_in_evaluation_mode(saved: Saved) -> None:
    shard = saved("BertForSequenceClassification")[1].load()
    assert not shard.training
    assert not any(module.training for module in shard.modules())
    assert not any(parameter.requires_grad for parameter in shard.parameters())


# Poolers: the file decides -----------------------------------------------------------------------------


@pytest.mark.parametrize("cls", ["ViTModel", "DeiTModel", "BertModel"])
def test_without_a_pooler_in_the_file_the_first_token_is_the_output(cls: str, tmp_path: Path) -> None:
    reference = case(cls)
    model = find_model(save(reference.model(), tmp_path))
    expected = reference_output(reference.model(), reference.inputs())
    torch.testing.assert_close(run(model, reference.inputs()), expected, rtol=0, atol=1e-5)

    arrays = {name: array for name, array in on_disk(model).items() if not name.startswith("pooler")}
    file = write_stored(tmp_path / "headless", arrays)
    bare = reference.model()
    bare.pooler = None
    expected = reference_output(bare, reference.inputs())
    torch.testing.assert_close(run(model, reference.inputs(), file), expected, rtol=0, atol=1e-5)


def test_a_pooler_left_over_from_pretraining_is_not_put_before_a_classifier(
    saved: Saved, tmp_path: Path
) -> None:
    reference, model = saved("ViTForImageClassification")
    extra = {"vit.pooler.dense.weight": np.ones((12, 12), "f4"), "vit.pooler.dense.bias": np.ones(12, "f4")}
    file = write_stored(tmp_path / "w", {**on_disk(model), **extra})
    assert torch.equal(run(model, reference.inputs(), file), run(model, reference.inputs()))


def test_googles_pre_logits_stand_before_the_classifier(saved: Saved, tmp_path: Path) -> None:
    reference, model = saved("ViTForImageClassification")
    generator = np.random.default_rng(0)
    kernel, bias = generator.normal(size=(12, 6)).astype("f4"), generator.normal(size=6).astype("f4")
    head = generator.normal(size=(6, 5)).astype("f4")
    arrays = as_google(on_disk(model), 2, 3) | {
        "pre_logits/kernel": kernel,
        "pre_logits/bias": bias,
        "head/kernel": head,
    }
    with torch.inference_mode():
        first = reference.model().vit(*reference.inputs()).last_hidden_state[:, 0].numpy()
    expected = np.tanh(first @ kernel + bias) @ head + arrays["head/bias"]
    output = run(model, reference.inputs(), write_stored(tmp_path / "w", arrays))
    np.testing.assert_allclose(output.numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_layers_of_another_shard_are_shared_and_not_loaded_again(dtype: torch.dtype) -> None:
    model = find_model("vit-digits")
    images = (torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)),)
    held = model.load(LayerRange(0, 10), dtype=dtype)
    loaded: list[int] = []
    shard = model.load(LayerRange(0, 16), dtype=dtype, progress=loaded.append, beside=held)
    whole: list[int] = []
    expected = model.load(LayerRange(0, 16), dtype=dtype, progress=whole.append)(images)
    assert torch.equal(shard(images)[0], expected[0])
    assert all(shard.parts[layer] is part for layer, part in held.parts.items())
    assert sum(loaded) == model.weight_bytes(LayerRange(10, 16), dtype)
    assert sum(whole) == model.weight_bytes(LayerRange(0, 16), dtype)
