"""Test that every format and naming scheme gives the same shard, and that damage is reported."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from dialects import Arrays, as_google, without_prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from models_oracle import Case, reference_output, save, scramble
from safetensors.torch import load_file, save_file

from pipeedge.base.errors import InputError, ModelError, WeightsError, one_line
from pipeedge.base.schedule import LayerRange
from pipeedge.data import open_input
from pipeedge.models import Model, find_model
from pipeedge.models.progress import ByteBar
from pipeedge.models.weights.locating import hub_tensors
from pipeedge.models.weights.random_weights import RandomWeights
from pipeedge.models.weights.writing import write_random
from pipeedge.models.words import WORD_TABLE
from pipeedge.request.files import InputRequest

IMAGE_OPTIONS = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "image_size": [8, 12],
    "patch_size": [4, 3],
    "num_channels": 2,
    "num_labels": 5,
}
BERT_OPTIONS = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "vocab_size": 30,
    "max_position_embeddings": 9,
    "type_vocab_size": 2,
    "num_labels": 3,
}


def case(cls: str, **changes: object) -> Case:
    options = BERT_OPTIONS if cls.startswith("Bert") else IMAGE_OPTIONS
    lengths = (9, 4) if cls.startswith("Bert") else ()
    return Case(cls, tuple({**options, **changes}.items()), 7, 2, lengths)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Case, Model]]:
    """Return a reference of the named class as a Hugging Face directory, created once."""
    made: dict[str, tuple[Case, Model]] = {}

    def get(cls: str) -> tuple[Case, Model]:
        if cls not in made:
            directory = tmp_path_factory.mktemp(cls)
            made[cls] = case(cls), find_model(save(case(cls).model(), directory))
        return made[cls]

    return get


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
def outputs_of(saved: Callable[[str], tuple[Case, Model]]) -> Outputs:
    """Return the outputs of transformers, and of two shards of the named class's own file, computed once."""

    @functools.cache
    def get(cls: str) -> tuple[torch.Tensor, torch.Tensor]:
        reference, model = saved(cls)
        return reference_output(reference.model(), reference.inputs()), run(model, reference.inputs())

    return get


# Dialects, built here from the reference without a look at our own tables -----------------------------


def on_disk(model: Model) -> Arrays:
    """Return the tensors of the file that transformers wrote, with names as on the hub."""
    assert model.directory is not None
    return {name: tensor.numpy() for name, tensor in load_file(model.directory / "model.safetensors").items()}


def in_memory(reference: Case) -> Arrays:
    """Return tensors with the names of transformers 5 in memory."""
    return {name: tensor.numpy() for name, tensor in reference.model().state_dict().items()}


def as_timm(hub: Mapping[str, np.ndarray], blocks: int) -> Arrays:
    hub = without_prefix(hub)
    out = {
        "cls_token": hub["embeddings.cls_token"],
        "pos_embed": hub["embeddings.position_embeddings"],
    }
    if "embeddings.distillation_token" in hub:
        out["dist_token"] = hub["embeddings.distillation_token"]
    pairs = {
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "norm": "layernorm",
        "head": "cls_classifier" if "cls_classifier.weight" in hub else "classifier",
    }
    if "distillation_classifier.weight" in hub:
        pairs["head_dist"] = "distillation_classifier"
    for n in range(blocks):
        old, new = f"encoder.layer.{n}", f"blocks.{n}"
        pairs |= {
            f"{new}.norm1": f"{old}.layernorm_before",
            f"{new}.norm2": f"{old}.layernorm_after",
            f"{new}.attn.proj": f"{old}.attention.output.dense",
            f"{new}.mlp.fc1": f"{old}.intermediate.dense",
            f"{new}.mlp.fc2": f"{old}.output.dense",
        }
        for leaf in ("weight", "bias"):
            out[f"{new}.attn.qkv.{leaf}"] = np.concatenate(
                [hub[f"{old}.attention.attention.{part}.{leaf}"] for part in ("query", "key", "value")]
            )
    for new, old in pairs.items():
        for leaf in ("weight", "bias"):
            out[f"{new}.{leaf}"] = hub[f"{old}.{leaf}"]
    return out


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


def write_stored(path: Path, arrays: Arrays) -> Path:
    np.savez(path.with_suffix(".npz"), **arrays)
    return path.with_suffix(".npz")


def write_deflated(path: Path, arrays: Arrays) -> Path:
    np.savez_compressed(path.with_suffix(".npz"), **arrays)
    return path.with_suffix(".npz")


def write_safetensors(path: Path, arrays: Arrays) -> Path:
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    save_file(tensors, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


WRITERS = [write_stored, write_deflated, write_safetensors]


@pytest.mark.parametrize(("cls", "dialect"), DIALECTS)
@pytest.mark.parametrize("write", WRITERS)
def test_every_format_and_dialect_gives_the_same_model(
    cls: str,
    dialect: str,
    write: Callable[[Path, Arrays], Path],
    saved: Callable[[str], tuple[Case, Model]],
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
    saved: Callable[[str], tuple[Case, Model]],
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
def test_other_floating_types_become_float32(
    dtype: torch.dtype, saved: Callable[[str], tuple[Case, Model]], tmp_path: Path
) -> None:
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
    saved: Callable[[str], tuple[Case, Model]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, model = saved("ViTForImageClassification")
    monkeypatch.setattr(sys, "stderr", _Terminal() if terminal else io.StringIO())
    with ByteBar("layers 1-8", model.weight_bytes(), delay_s=delay_s) as bar:
        model.load(progress=bar.advance)
    assert ("layers 1-8: 100%" in sys.stderr.getvalue()) == shown


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_progress_of_loading_adds_up_to_the_bytes_of_the_weights(
    dtype: torch.dtype, saved: Callable[[str], tuple[Case, Model]]
) -> None:
    _, model = saved("ViTForImageClassification")
    for layers in (LayerRange(0, 8), LayerRange(2, 7)):
        loaded: list[int] = []
        model.load(layers, dtype=dtype, progress=loaded.append)
        assert sum(loaded) == model.weight_bytes(layers, dtype)


def test_weights_have_the_requested_dtype(saved: Callable[[str], tuple[Case, Model]]) -> None:
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
    stored: torch.dtype, dtype: torch.dtype, saved: Callable[[str], tuple[Case, Model]], tmp_path: Path
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


def test_writing_to_mapped_words_leaves_the_file_alone(saved: Callable[[str], tuple[Case, Model]]) -> None:
    _, model = saved("BertForSequenceClassification")
    before = model.default_weights.read_bytes()
    table = model.load(LayerRange(0, 1)).word_table
    assert table is not None
    table.zero_()
    assert model.default_weights.read_bytes() == before
    assert model.load(LayerRange(0, 1)).word_table.abs().sum() > 0


def test_words_that_cannot_be_mapped_are_copied(
    saved: Callable[[str], tuple[Case, Model]], tmp_path: Path
) -> None:
    """A header of odd length puts values where no number of their type can be."""
    _, model = saved("BertForSequenceClassification")
    raw = model.default_weights.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    odd = tmp_path / "odd.safetensors"
    odd.write_bytes(struct.pack("<Q", length + 1) + raw[8 : 8 + length] + b" " + raw[8 + length :])
    ours, theirs = (model.load(LayerRange(0, 1), file).word_table for file in (odd, None))
    assert torch.equal(ours, theirs)


def test_memory_counts_the_rows_of_words_that_may_be_looked_up(
    saved: Callable[[str], tuple[Case, Model]],
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


def test_loaded_shards_are_frozen_and_in_evaluation_mode(saved: Callable[[str], tuple[Case, Model]]) -> None:
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
    saved: Callable[[str], tuple[Case, Model]], tmp_path: Path
) -> None:
    reference, model = saved("ViTForImageClassification")
    extra = {"vit.pooler.dense.weight": np.ones((12, 12), "f4"), "vit.pooler.dense.bias": np.ones(12, "f4")}
    file = write_stored(tmp_path / "w", {**on_disk(model), **extra})
    assert torch.equal(run(model, reference.inputs(), file), run(model, reference.inputs()))


def test_googles_pre_logits_stand_before_the_classifier(
    saved: Callable[[str], tuple[Case, Model]], tmp_path: Path
) -> None:
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


# What is wrong, in one line -------------------------------------------------------------------------------


def refusal(model: Model, weights: Path | None = None, layers: LayerRange | None = None) -> str:
    with pytest.raises(WeightsError) as caught:
        model.load(layers, weights)
    message = str(caught.value)
    assert message == one_line(caught.value)
    return message


@pytest.mark.parametrize("write", WRITERS)
def test_the_first_tensor_of_another_shape_is_named_with_both_shapes(
    write: Callable[[Path, Arrays], Path], saved: Callable[[str], tuple[Case, Model]], tmp_path: Path
) -> None:
    _, model = saved("ViTForImageClassification")
    name = "vit.encoder.layer.1.attention.attention.key.weight"
    file = write(tmp_path / "w", {**on_disk(model), name: np.zeros((12, 13), "f4")})
    message = refusal(model, file)
    assert all(part in message for part in (str(file), name, "[12, 13]", "[12, 12]"))
    model.load(LayerRange(0, 4), file)  # block 0 has nothing to do with it


@pytest.mark.parametrize("write", WRITERS)
def test_a_missing_tensor_is_named_as_the_file_would_name_it(
    write: Callable[[Path, Arrays], Path], saved: Callable[[str], tuple[Case, Model]], tmp_path: Path
) -> None:
    _, model = saved("ViTForImageClassification")
    for arrays, name, shape in (
        (on_disk(model), "vit.encoder.layer.1.attention.attention.value.bias", "[12]"),
        (as_timm(on_disk(model), 2), "blocks.1.mlp.fc1.weight", "[20, 12]"),
        (as_google(on_disk(model), 2, 3), "Transformer/encoderblock_1/MlpBlock_3/Dense_0/kernel", "[12, 20]"),
    ):
        del arrays[name]
        file = write(tmp_path / "w", arrays)
        message = refusal(model, file)
        assert all(part in message for part in (str(file), name, shape))


def test_names_and_shapes_are_all_checked_before_data_is_read(
    saved: Callable[[str], tuple[Case, Model]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = saved("ViTForImageClassification")
    arrays = on_disk(model)
    del arrays["classifier.bias"]
    file = write_safetensors(tmp_path / "w", arrays)

    def read(*_: object) -> None:
        pytest.fail("data was read before the names were checked")

    monkeypatch.setattr("pipeedge.models.weights.safetensors_files.SafetensorsFile.read_into", read)
    assert "classifier.bias" in refusal(model, file)


def test_weights_of_another_model_are_refused(
    saved: Callable[[str], tuple[Case, Model]], tmp_path: Path
) -> None:
    _, vit = saved("ViTForImageClassification")
    _, bert = saved("BertForSequenceClassification")
    assert bert.directory is not None
    assert "embeddings" in refusal(vit, bert.directory / "model.safetensors")
    deeper = case("ViTForImageClassification", num_hidden_layers=3).model()
    save(deeper, tmp_path)
    message = refusal(vit, tmp_path)
    assert "deeper" in message
    assert "layer.2." in message


def test_missing_file_error_says_where_it_was_expected(
    saved: Callable[[str], tuple[Case, Model]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = saved("ViTForImageClassification")
    assert str(tmp_path / "none.npz") in refusal(model, tmp_path / "none.npz")
    assert "neither model.safetensors nor" in refusal(model, tmp_path)
    monkeypatch.chdir(tmp_path)
    message = refusal(find_model("google/vit-base-patch16-224"))
    assert "ViT-B_16-224.npz" in message
    assert "save_model_weights.py" in message


def test_a_pipe_is_refused_where_a_file_is_needed(
    saved: Callable[[str], tuple[Case, Model]], tmp_path: Path
) -> None:
    """Opening a pipe would wait for a writer."""
    _, model = saved("ViTForImageClassification")
    for name in ("w.npz", "w.safetensors", "config.json"):
        os.mkfifo(tmp_path / name)
        if name.startswith("w."):
            assert "is not a regular file" in refusal(model, tmp_path / name)
    with pytest.raises(ModelError, match=r"config\.json is not a regular file"):
        find_model(tmp_path)
    with pytest.raises(InputError, match="is not a regular file"):
        open_input(InputRequest(paths=(tmp_path / "w.npz",)), model)


def test_pickle_is_refused_with_advice(saved: Callable[[str], tuple[Case, Model]], tmp_path: Path) -> None:
    reference, model = saved("ViTForImageClassification")
    torch.save(reference.model().state_dict(), tmp_path / "pytorch_model.bin")
    shutil.copy(tmp_path / "pytorch_model.bin", tmp_path / "renamed.npz")
    for path in (tmp_path, tmp_path / "pytorch_model.bin", tmp_path / "renamed.npz"):
        message = refusal(model, path)
        assert "pickle" in message
        assert "save_pretrained" in message
    objects = tmp_path / "objects.npz"
    np.savez(objects, **{"vit.embeddings.cls_token": np.array([{}], dtype=object)})
    refusal(model, objects)


def test_integer_tensors_are_refused(saved: Callable[[str], tuple[Case, Model]], tmp_path: Path) -> None:
    _, model = saved("ViTForImageClassification")
    for write in WRITERS:
        file = write(tmp_path / "w", {**on_disk(model), "classifier.bias": np.zeros(5, "i8")})
        message = refusal(model, file)
        assert "classifier.bias" in message
        assert "floating point" in message


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"hello, world, I am no weights file", b"\xff" * 64])
@pytest.mark.parametrize("name", ["w.safetensors", "w.npz", "model.safetensors.index.json", "w"])
def test_garbage_is_refused(
    content: bytes, name: str, saved: Callable[[str], tuple[Case, Model]], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    assert name in refusal(saved("ViTForImageClassification")[1], tmp_path / name)


def test_an_index_that_points_outside_its_directory_is_refused(
    saved: Callable[[str], tuple[Case, Model]], tmp_path: Path
) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for document in ({"weight_map": {"a": "../b.safetensors"}}, {"weights": {}}, [], {"weight_map": 3}):
        index.write_text(json.dumps(document))
        assert str(index) in refusal(saved("ViTForImageClassification")[1], index)


class Files(dict[str, bytes]):
    """Weights of a model by writer, with a short representation."""

    def __repr__(self) -> str:
        return f"Files({', '.join(self)})"


@pytest.fixture(scope="module")
def files(saved: Callable[[str], tuple[Case, Model]], tmp_path_factory: pytest.TempPathFactory) -> Files:
    _, model = saved("ViTForImageClassification")
    path = tmp_path_factory.mktemp("files") / "w"
    return Files({write.__name__: write(path, on_disk(model)).read_bytes() for write in WRITERS})


@settings(max_examples=40)
@given(
    kind=st.sampled_from([write.__name__ for write in WRITERS]), fraction=st.floats(0, 1, exclude_max=True)
)
def test_a_file_cut_off_anywhere_is_refused(
    kind: str,
    fraction: float,
    files: Files,
    saved: Callable[[str], tuple[Case, Model]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    content = files[kind]
    path = tmp_path_factory.mktemp("cut") / ("w.safetensors" if "safe" in kind else "w.npz")
    path.write_bytes(content[: int(len(content) * fraction)])
    assert str(path) in refusal(saved("ViTForImageClassification")[1], path)


@settings(max_examples=30)
@given(kind=st.sampled_from(["write_stored", "write_deflated"]), data=st.data())
def test_a_damaged_npz_never_gives_other_weights(
    kind: str,
    data: st.DataObject,
    files: Files,
    saved: Callable[[str], tuple[Case, Model]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    _, model = saved("ViTForImageClassification")
    path = tmp_path_factory.mktemp("damage") / "w.npz"
    path.write_bytes(files[kind])
    with zipfile.ZipFile(path) as archive:
        member = data.draw(st.sampled_from(archive.infolist()))
    content = bytearray(files[kind])
    position = data_offset(member) + data.draw(st.integers(0, member.compress_size - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    shard, message = None, ""
    try:
        shard = model.load(weights=path, kernels="torch")
    except WeightsError as error:
        message = str(error)
    if shard is None:
        assert member.filename.removesuffix(".npy") in message
    else:
        # Some bits of a deflated stream carry no data, such as the one that marks its last block.
        assert kind == "write_deflated"
        pairs = zip(shard.parameters(), model.load(kernels="torch").parameters(), strict=True)
        assert all(torch.equal(read, meant) for read, meant in pairs)


def data_offset(member: zipfile.ZipInfo) -> int:
    """Return the offset after the local header: 30 bytes, the name, and numpy's 20 bytes of zip64 sizes."""
    return member.header_offset + 30 + len(member.filename) + 20


def test_only_the_shards_own_data_is_read(saved: Callable[[str], tuple[Case, Model]], tmp_path: Path) -> None:
    _, model = saved("ViTForImageClassification")
    path = write_stored(tmp_path / "w", on_disk(model))
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if ".layer.1." in member.filename or "classifier" in member.filename:
                content[data_offset(member) + member.compress_size - 1] ^= 1
    path.write_bytes(content)
    model.load(LayerRange(0, 4), path)
    for layer in range(4, 8):
        refusal(model, path, LayerRange(layer, layer + 1))


# Random weights -----------------------------------------------------------------------------------------


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
    write: Callable[[Path, Arrays], Path], saved: Callable[[str], tuple[Case, Model]], tmp_path: Path
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
