"""Cases of test_troubleshooting.py: models and their weights."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import struct
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from file_server import Site, serving, use_hub, write_cache
from ports import free_port
from safetensors.torch import load_file, save_file
from trouble import DIGITS, Cases, Patch, refused, start

from pipeedge.doctor.notes import FindingLog
from pipeedge.doctor.probe import Probe
from pipeedge.doctor.run_look import look_at_run
from pipeedge.models import find_model
from pipeedge.models.weights.download import HttpSource, download
from pipeedge.models.weights.file_kinds import open_weights
from pipeedge.models.weights.writing import write_converted
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.run.stage import resolve_device

CASES = Cases()
says = CASES.says


def load(weights: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> str:
    """Return the message for these weights of vit-digits, with ``changes`` to its configuration."""
    model = dataclasses.replace(DIGITS, config=dataclasses.replace(DIGITS.config, **changes))
    return refused(lambda: model.load(weights=weights, dtype=dtype))


def safetensors(path: Path, header: str, size: int) -> Path:
    """Write a file with ``header`` and ``size`` bytes of data."""
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(size))
    return path


def tensor(begin: int, end: int) -> str:
    return json.dumps({"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]})


@says("… is truncated: 1000 bytes of 2000, the first tensor cut off is …")
def weights_are_cut_off(patch: Patch) -> str:
    header = f'{{"a": {tensor(0, 1800)}}}'.ljust(192)
    path = safetensors(Path("cut.safetensors"), header, 800)
    return refused(lambda: open_weights(path))


@says("… the same bytes")
def tensors_share_bytes(patch: Patch) -> str:
    path = safetensors(Path("shared.safetensors"), f'{{"a": {tensor(0, 8)}, "b": {tensor(4, 12)}}}', 12)
    return refused(lambda: open_weights(path))


@says("… is given twice")
def a_tensor_is_given_twice(patch: Patch) -> str:
    path = safetensors(Path("twice.safetensors"), f'{{"a": {tensor(0, 8)}, "a": {tensor(8, 16)}}}', 16)
    return refused(lambda: open_weights(path))


@says("… has shape [10, 64], the model needs [1000, 64]; is it of another model?")
def weights_of_another_model(patch: Patch) -> str:
    return load(DIGITS.weights_path(), num_labels=1000)


@says("… is of a deeper model: it has … the model has 3 blocks")
def weights_of_a_deeper_model(patch: Patch) -> str:
    return load(DIGITS.weights_path(), blocks=3)


@says("… but the model's qkv_bias is false: which of the two is right?")
def biases_without_a_place(patch: Patch) -> str:
    return load(DIGITS.weights_path(), qkv_bias=False)


@says("… is 100000; it must be 1 to …")
def a_size_is_absurd(patch: Patch) -> str:
    config = json.loads((DIGITS.weights_path().parent / "config.json").read_text())
    Path("deep").mkdir()
    Path("deep/config.json").write_text(json.dumps({**config, "num_hidden_layers": 100000}))
    return refused(lambda: find_model("deep"))


def in_8_bits() -> Path:
    path = Path("int8.safetensors")
    with open_weights(DIGITS.weights_path()) as source:
        write_converted(path, DIGITS.build(dtype=torch.int8), DIGITS.config, source, "fingerprint")
    return path


@says(
    "… is stored as int8, float32 is needed; run with --dtype int8, or with weights that are not "
    "quantised (-M)"
)
def weights_are_8_bit(patch: Patch) -> str:
    return load(in_8_bits())


@says("… has scales that are not above 0; convert again")
def scales_are_zero(patch: Patch) -> str:
    tensors = load_file(in_8_bits())
    name = next(name for name in tensors if name.endswith("_scale"))
    tensors[name][1] = 0.0
    save_file(tensors, "zero.safetensors")
    return load(Path("zero.safetensors"), torch.int8)


@says("… is packed by zip method 14; np.savez and np.savez_compressed write what can be read")
def weights_are_packed_oddly(patch: Patch) -> str:
    with zipfile.ZipFile("w.npz", "w", zipfile.ZIP_LZMA) as archive:
        for name, value in load_file(DIGITS.weights_path()).items():
            stream = io.BytesIO()
            np.save(stream, value.numpy())
            archive.writestr(f"{name}.npy", stream.getvalue())
    return load(Path("w.npz"))


@says("… cannot be fetched …")
def no_network_to_fetch_over(patch: Patch) -> str:
    source = HttpSource(f"http://127.0.0.1:{free_port()}/w.npz")
    return refused(lambda: download(DIGITS, source, Path("fetched.npz")))


HUB_MODEL = {path.name: path.read_bytes() for path in DIGITS.weights_path().parent.iterdir()}


def ask_hub(patch: Patch, files: Mapping[str, bytes] | None = None, **site: Any) -> str:
    """Return what loading ``lab/model`` says if the cache is empty; the hub has it if there are files."""
    from huggingface_hub import constants

    hub = Site({}, **site)
    if files is not None:
        hub.add_repository("lab/model", files)
    with tempfile.TemporaryDirectory() as cache, serving(hub):
        patch.setattr(constants, "HF_HUB_CACHE", cache)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        use_hub(hub.url, patch)
        return refused(lambda: find_model("lab/model").load())


@says(
    "lab/model is neither a known model nor a directory, and the hub's local cache does not have it "
    "(HF_HUB_OFFLINE is set); …"
)
def repository_is_not_cached(patch: Patch) -> str:
    return refused(lambda: find_model("lab/model"))


@says(
    "lab/model is neither a known model nor a directory, and the Hugging Face hub has no such repository, or "
    "keeps it private; …"
)
def repository_is_unknown(patch: Patch) -> str:
    return ask_hub(patch)


@says("lab/model is neither a known model nor a directory, and … does not answer …")
def hub_is_away(patch: Patch) -> str:
    return ask_hub(patch, HUB_MODEL, status=500, error_code="InternalError")


@says("… is only for people who accepted its conditions: accept them at …")
def repository_is_gated(patch: Patch) -> str:
    return ask_hub(patch, HUB_MODEL, status=403, error_code="GatedRepo", refused="/lab/model/resolve")


@says(
    "… has no safetensors weights (only pytorch_model.bin), and pickles are not read because unpickling can "
    "run code; …"
)
def repository_has_a_pickle(patch: Patch) -> str:
    return ask_hub(patch, {"config.json": HUB_MODEL["config.json"], "pytorch_model.bin": b""})


@says(
    "… cannot be stored in … (No space left on device); free some space, or name another directory with "
    "HF_HUB_CACHE"
)
def cache_is_full(patch: Patch) -> str:
    import huggingface_hub

    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(huggingface_hub, "hf_hub_download", no_space)
    return ask_hub(patch, HUB_MODEL)


def cache_without_weights(patch: Patch) -> None:
    from huggingface_hub import constants

    cache = Path("cache").absolute()
    files = {"config.json": HUB_MODEL["config.json"]}
    write_cache(cache, "lab/model", files, lacks=("modules.json",))
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))


@says("the weights of lab/model are not in the hub's local cache, and HF_HUB_OFFLINE is set: …")
def weights_are_not_cached(patch: Patch) -> str:
    cache_without_weights(patch)
    return refused(lambda: find_model("lab/model").load())


@says("the weights of lab/model are not on this machine; pipeedge fetch fetches them, or a run does")
def doctor_finds_no_cached_weights(patch: Patch) -> str:
    cache_without_weights(patch)
    request = parse_runtime(["0", "1", "-m", "lab/model"], Environment()).request
    return str(look_at_run(request, FindingLog(0, print), Probe(), ()).facts["weights_error"])


@says("-d/--device cuda: this machine has no CUDA device, or torch is a CPU build")
def no_gpu(patch: Patch) -> str:
    patch.setattr(torch.cuda, "is_available", lambda: False)
    return refused(lambda: resolve_device("cuda"))


@says("8 items produced NaN or infinity: check that the weights are complete")
def outputs_are_not_numbers(patch: Patch) -> str:
    tensors = load_file(DIGITS.weights_path())
    tensors["classifier.bias"][:] = float("nan")
    save_file(tensors, "nan.safetensors")
    return start("0 1 -m vit-digits -M nan.safetensors -b 8")
