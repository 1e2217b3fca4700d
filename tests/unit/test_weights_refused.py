"""Test that weights that are damaged, missing or of another model are refused in one line."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from dialects import Arrays, as_google
from hypothesis import given, settings
from hypothesis import strategies as st
from models_oracle import save
from stored_weights import WRITERS, Saved, as_timm, case, on_disk, write_safetensors, write_stored

from pipeedge.base.errors import InputError, ModelError, WeightsError, one_line
from pipeedge.base.schedule import LayerRange
from pipeedge.data import open_input
from pipeedge.models import Model, find_model
from pipeedge.request.files import InputRequest


def refusal(model: Model, weights: Path | None = None, layers: LayerRange | None = None) -> str:
    with pytest.raises(WeightsError) as caught:
        model.load(layers, weights)
    message = str(caught.value)
    assert message == one_line(caught.value)
    return message


@pytest.mark.parametrize("write", WRITERS)
def test_the_first_tensor_of_another_shape_is_named_with_both_shapes(
    write: Callable[[Path, Arrays], Path], saved: Saved, tmp_path: Path
) -> None:
    _, model = saved("ViTForImageClassification")
    name = "vit.encoder.layer.1.attention.attention.key.weight"
    file = write(tmp_path / "w", {**on_disk(model), name: np.zeros((12, 13), "f4")})
    message = refusal(model, file)
    assert all(part in message for part in (str(file), name, "[12, 13]", "[12, 12]"))
    model.load(LayerRange(0, 4), file)  # block 0 has nothing to do with it


@pytest.mark.parametrize("write", WRITERS)
def test_a_missing_tensor_is_named_as_the_file_would_name_it(
    write: Callable[[Path, Arrays], Path], saved: Saved, tmp_path: Path
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
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = saved("ViTForImageClassification")
    arrays = on_disk(model)
    del arrays["classifier.bias"]
    file = write_safetensors(tmp_path / "w", arrays)

    def read(*_: object) -> None:
        pytest.fail("data was read before the names were checked")

    monkeypatch.setattr("pipeedge.models.weights.safetensors_files.SafetensorsFile.read_into", read)
    assert "classifier.bias" in refusal(model, file)


def test_weights_of_another_model_are_refused(saved: Saved, tmp_path: Path) -> None:
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
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = saved("ViTForImageClassification")
    assert str(tmp_path / "none.npz") in refusal(model, tmp_path / "none.npz")
    assert "neither model.safetensors nor" in refusal(model, tmp_path)
    monkeypatch.chdir(tmp_path)
    message = refusal(find_model("google/vit-base-patch16-224"))
    assert "ViT-B_16-224.npz" in message
    assert "save_model_weights.py" in message


def test_a_pipe_is_refused_where_a_file_is_needed(saved: Saved, tmp_path: Path) -> None:
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


def test_pickle_is_refused_with_advice(saved: Saved, tmp_path: Path) -> None:
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


def test_integer_tensors_are_refused(saved: Saved, tmp_path: Path) -> None:
    _, model = saved("ViTForImageClassification")
    for write in WRITERS:
        file = write(tmp_path / "w", {**on_disk(model), "classifier.bias": np.zeros(5, "i8")})
        message = refusal(model, file)
        assert "classifier.bias" in message
        assert "floating point" in message


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"hello, world, I am no weights file", b"\xff" * 64])
@pytest.mark.parametrize("name", ["w.safetensors", "w.npz", "model.safetensors.index.json", "w"])
def test_garbage_is_refused(content: bytes, name: str, saved: Saved, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert name in refusal(saved("ViTForImageClassification")[1], tmp_path / name)


def test_an_index_that_points_outside_its_directory_is_refused(saved: Saved, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for document in ({"weight_map": {"a": "../b.safetensors"}}, {"weights": {}}, [], {"weight_map": 3}):
        index.write_text(json.dumps(document))
        assert str(index) in refusal(saved("ViTForImageClassification")[1], index)


class Files(dict[str, bytes]):
    """Weights of a model by writer, with a short representation."""

    def __repr__(self) -> str:
        return f"Files({', '.join(self)})"


@pytest.fixture(scope="module")
def files(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Files:
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
    saved: Saved,
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
    saved: Saved,
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


def test_only_the_shards_own_data_is_read(saved: Saved, tmp_path: Path) -> None:
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
