"""Test that mutated files are refused in one line or read correctly, without internal errors."""

from __future__ import annotations

import io
import json
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from mutations import document_bytes, mutate_bytes, mutate_document, refused, rounds
from safetensors.torch import load_file, save_file
from saved_reports import simulated_body, through_json

from pipeedge.base.archive import read_exactly
from pipeedge.base.errors import InputError, ModelError, RequestError, WeightsError
from pipeedge.base.payload import Payload
from pipeedge.data import arrays, open_input
from pipeedge.models import Model, find_model
from pipeedge.models.weights.file_kinds import open_weights
from pipeedge.models.weights.writing import write_converted
from pipeedge.report import compare_lines, read_run, render_run, summary_lines
from pipeedge.report.main import ReportRequest, make_report
from pipeedge.request.files import InputRequest

ROUNDS = 40


def outputs(model: Model, weights: Path | None = None) -> torch.Tensor:
    """Compute the model's outputs for inputs of its sizes."""
    specs = model.payload_specs(0, 1)
    payload: Payload = tuple(torch.ones(spec.shape, dtype=spec.dtype) for spec in specs)
    with torch.inference_mode():
        return model.load(weights=weights)(payload)[0]


# --- config.json -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    [
        *("vit", "deit", "dinov2", "clip", "siglip"),
        *("bert", "roberta", "distilbert", "mpnet", "albert", "modernbert"),
    ],
)
def test_mutated_config_is_refused_in_one_line_or_computes(
    family: str, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model_dirs[family], directory)
    document = json.loads((directory / "config.json").read_bytes())
    chance = random.Random(family)

    def use() -> None:
        model = find_model(directory)
        model.check_sizes()
        outputs(model)

    for _ in range(rounds(ROUNDS // 2)):
        mutated = document_bytes(mutate_document(document, chance), chance)
        if chance.randrange(4) == 0:
            mutated = mutate_bytes(mutated, chance)
        (directory / "config.json").write_bytes(mutated)
        refused(use)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("vit", {"num_hidden_layers": 100_000}, "blocks is 100000; it must be 1 to 1000"),
        ("vit", {"num_hidden_layers": 900}, "has no tensor"),
        ("vit", {"image_size": 30_000}, "height and width must be 1 to 4096"),
        ("vit", {"image_size": 4000}, "position_embeddings has shape"),
        ("bert", {"vocab_size": 4_000_000}, "word_embeddings.weight has shape"),
        ("bert", {"hidden_size": 60_000}, "has shape"),
        ("vit", {"qkv_bias": False}, "but the model's qkv_bias is false"),
        ("vit", {"qkv_bias": "no"}, "qkv_bias is 'no'; true or false is needed"),
        ("vit", {"layer_norm_eps": float("nan")}, "layer_norm_eps nan"),
        ("vit", {"layer_norm_eps": 10**400}, "a number is needed"),
    ],
)
def test_sizes_are_compared_before_anything_is_built(
    family: str, changes: dict[str, object], words: str, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model_dirs[family], directory)
    document = json.loads((directory / "config.json").read_bytes())
    (directory / "config.json").write_text(json.dumps(document | changes))
    with pytest.raises((ModelError, WeightsError), match=words):
        find_model(directory).check_sizes()


def test_null_qkv_bias_means_biases_as_leaving_it_out_does(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(model_dirs["vit"], tmp_path / "model")
    document = json.loads((tmp_path / "model" / "config.json").read_bytes())
    (tmp_path / "model" / "config.json").write_text(json.dumps(document | {"qkv_bias": None}))
    assert torch.equal(outputs(find_model(tmp_path / "model")), outputs(find_model(model_dirs["vit"])))


# --- weights -----------------------------------------------------------------------------------------


def with_header(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(change(header)).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def test_mutated_safetensors_headers_are_refused_or_give_the_same_values(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    model = find_model(model_dirs["vit"])
    whole, data = outputs(model), model.weights_path().read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    file = tmp_path / "w.safetensors"
    chance = random.Random(5)

    def use() -> None:
        assert torch.equal(outputs(model, file), whole)

    seen = 0
    for _ in range(rounds(ROUNDS)):
        if chance.randrange(2):
            file.write_bytes(with_header(data, lambda header: mutate_document(header, chance)))
        else:
            file.write_bytes(mutate_bytes(data[: 8 + length], chance) + data[8 + length :])
        seen += refused(use)
    assert seen > rounds(ROUNDS) // 2


def test_mutated_npz_weights_are_refused_or_give_the_same_values(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    model = find_model(model_dirs["vit"])
    whole, file = outputs(model), tmp_path / "w.npz"
    arrays = {name: tensor.numpy() for name, tensor in load_file(model.weights_path()).items()}
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    stored = io.BytesIO()
    np.savez(stored, **arrays)
    chance = random.Random(6)

    def use() -> None:
        assert torch.equal(outputs(model, file), whole)

    seen = 0
    for _ in range(rounds(ROUNDS)):
        data = chance.choice((packed, stored)).getvalue()
        if chance.randrange(2):
            file.write_bytes(mutate_bytes(data, chance))
        else:  # the table of contents
            tail = chance.randint(1, len(data) // 3)
            file.write_bytes(data[:-tail] + mutate_bytes(data[-tail:], chance))
        seen += refused(use)
    assert seen > rounds(ROUNDS) // 2


def npy(header: bytes, version: bytes = b"\x01\x00", data: bytes = b"") -> bytes:
    width = "<H" if version == b"\x01\x00" else "<I"
    return b"\x93NUMPY" + version + struct.pack(width, len(header)) + header + data


ODD_HEADERS = (
    b"",
    b"\xff" * 40,
    b"{",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (1" + b"0" * 5000 + b",)}",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': " + b"(" * 900 + b")" * 900 + b"}",
    b"{[]: 1}",
    b"{'descr': [('a', '<f4', -1)], 'fortran_order': False, 'shape': (1,)}",
    b"{'descr': 'O', 'fortran_order': False, 'shape': (1,)}",
    b"{'descr': None, 'fortran_order': 1, 'shape': [1]}",
    b"  indent\n\tdedent\n",
    b"'''",
    b"1L" * 30,
)


@pytest.mark.parametrize("header", ODD_HEADERS)
@pytest.mark.parametrize("version", [b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x07"])
def test_odd_array_headers_are_refused(header: bytes, version: bytes, tmp_path: Path) -> None:
    model = find_model("vit-digits")
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        for name in load_file(model.weights_path()):
            archive.writestr(f"{name}.npy", npy(header, version))
    with pytest.raises(WeightsError, match=r"is not a readable array|has shape"):
        outputs(model, tmp_path / "w.npz")


@pytest.mark.parametrize(
    ("method", "twice", "words"),
    [
        (zipfile.ZIP_BZIP2, False, "packed by zip method 12"),
        (zipfile.ZIP_LZMA, False, "packed by zip method 14"),
        (zipfile.ZIP_STORED, True, r"holds classifier\.bias\.npy twice"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_that_numpy_would_not_write_are_refused(
    method: int, twice: bool, words: str, tmp_path: Path
) -> None:
    model = find_model("vit-digits")
    with zipfile.ZipFile(tmp_path / "w.npz", "w", method) as archive:
        for name, tensor in load_file(model.weights_path()).items():
            stream = io.BytesIO()
            np.save(stream, tensor.numpy())
            for _ in range(1 + (twice and name == "classifier.bias")):
                archive.writestr(f"{name}.npy", stream.getvalue())
    with pytest.raises(WeightsError, match=words):
        outputs(model, tmp_path / "w.npz")


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    model = find_model("vit-digits")
    one, two = "vit.encoder.layer.0.layernorm_before.bias", "vit.encoder.layer.0.layernorm_after.bias"

    def overlap(header: dict[str, Any]) -> dict[str, Any]:
        return {**header, one: header[two]}

    (tmp_path / "w.safetensors").write_bytes(with_header(model.weights_path().read_bytes(), overlap))
    with pytest.raises(WeightsError, match="the same bytes"):
        outputs(model, tmp_path / "w.safetensors")


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_8_bit_scales_that_are_not_above_zero_are_refused(scale: float, tmp_path: Path) -> None:
    model = find_model("vit-digits")
    file = tmp_path / "w.safetensors"
    with open_weights(model.weights_path()) as source:
        write_converted(file, model.build(dtype=torch.int8), model.config, source, "fingerprint")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("_scale"))
    tensors[name][1] = scale
    save_file(tensors, file)
    with pytest.raises(WeightsError, match="has scales that are not above 0"):
        model.load(weights=file, dtype=torch.int8)


# --- inputs ------------------------------------------------------------------------------------------


def input_arrays(model: Model, items: int) -> dict[str, np.ndarray]:
    specs = model.payload_specs(0, items)
    arrays = {
        name: np.ones(spec.shape, np.float32 if spec.dtype.is_floating_point else np.int64)
        for name, spec in zip(model.input_names, specs, strict=True)
    }
    return {**arrays, "labels": np.arange(items) % model.config.num_labels}


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_mutated_input_arrays_are_refused_or_give_the_same_values(
    family: str, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    model, file = find_model(model_dirs[family]), tmp_path / "x.npz"
    whole = input_arrays(model, 3)
    forms = []
    for save in (np.savez, np.savez_compressed):
        stream = io.BytesIO()
        save(stream, **whole)
        forms.append(stream.getvalue())
    chance = random.Random(family)

    def use() -> None:
        (microbatch,) = open_input(InputRequest(paths=(file,)), model).microbatches(8)
        for tensor, name in zip(microbatch.payload, model.input_names, strict=True):
            assert np.array_equal(tensor.numpy(), whole[name]) or name == "token_type_ids"

    seen = 0
    for _ in range(rounds(ROUNDS)):
        file.write_bytes(mutate_bytes(chance.choice(forms), chance))
        seen += refused(use)
    assert seen > rounds(ROUNDS) // 2


def test_archive_bomb_reads_only_the_rows_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = find_model("vit-digits")
    items = 100_000
    header = npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d, 1, 8, 8)}" % items)
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pixel_values.npy", header + bytes(256 * items))
    read = []

    def counted(stream: IO[bytes], size: int) -> bytearray | None:
        read.append(size)
        return read_exactly(stream, size)

    monkeypatch.setattr(arrays, "read_exactly", counted)
    request = InputRequest(paths=(tmp_path / "x.npz",), max_items=8)
    assert len(open_input(request, model)) == 8
    assert read == [8 * 256]
    monkeypatch.setattr(arrays, "available_bytes", lambda: 1 << 20)
    with pytest.raises(InputError, match=r"reading 100,000 items takes .* MB are free; run fewer \(-b\)"):
        open_input(InputRequest(paths=(tmp_path / "x.npz",)), model)


@pytest.mark.parametrize("label", [2**63, 2**64 - 1, 2**31])
def test_labels_outside_the_classes_are_refused(label: int, tmp_path: Path) -> None:
    model = find_model("vit-digits")
    labels = np.array([label], np.uint64)
    np.savez(tmp_path / "x.npz", pixel_values=np.zeros((1, 1, 8, 8), np.float32), labels=labels)
    with pytest.raises(InputError, match=f"labels has {label}, not a class of vit-digits"):
        open_input(InputRequest(paths=(tmp_path / "x.npz",)), model)


# --- saved reports -----------------------------------------------------------------------------------


def test_mutated_reports_are_refused_in_one_line_or_shown() -> None:
    body = through_json(simulated_body([0.1, 0.2], microbatches=4))
    other = read_run(body, "other.json")
    chance = random.Random(8)

    def use() -> None:
        run = read_run(mutated, "run.json")
        render_run(run)
        summary_lines(run)
        compare_lines(run, other)

    for _ in range(rounds(ROUNDS) // 2):
        mutated = mutate_document(body, chance)
        refused(use)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda lane: lane["start_us"].__setitem__(1, float("nan")), r"start_us\[1\] is nan"),
        (lambda lane: lane["end_us"].__setitem__(1, 1e300), "which is not a time of a run"),
        (lambda lane: lane["doing"].__setitem__(1, []), "not text"),
        (lambda lane: lane["microbatch"].__setitem__(1, "x"), "not a number"),
    ],
)
def test_invalid_spans_are_refused(damage: Callable[[dict[str, Any]], None], words: str) -> None:
    body = through_json(simulated_body([0.1, 0.2], microbatches=4))
    damage(body["timeline"]["lanes"][0])
    with pytest.raises(RequestError, match=words):
        read_run(body, "run.json")


def test_nonstandard_json_numbers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"model": "m", "elapsed_s": NaN}')
    with pytest.raises(RequestError, match=r"is not valid JSON \(NaN is not a number\)"):
        make_report(ReportRequest((tmp_path / "run.json",)))
