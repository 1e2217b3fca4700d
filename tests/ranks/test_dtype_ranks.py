"""Ranks and the profiler in bfloat16, float16 and int8, as programs."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from arrays import load_arrays
from processes import run_program, run_world
from shipped_model import CPU, DIGITS, heldout, through

from pipeedge.base.schedule import LayerRange
from pipeedge.data import open_input
from pipeedge.data.agreement import outputs_by_block
from pipeedge.models.weights.download import convert
from pipeedge.plan.spec_files import load_device_types, load_models
from pipeedge.profile.result_files import load_results
from pipeedge.request.files import InputRequest

COMMON = ("-m", "vit-digits", "-b", "360", "-u", "8", "--report", "r.json", "--output", "o.npz")


def reduced_world(directory: Path) -> None:
    ended = run_world(directory, 2, *COMMON, "--dtype", "int8,bfloat16", "-pt", "1,8,9,16")
    assert {end.status for end in ended.values()} == {0}, ended
    report = json.loads((directory / "r.json").read_text())
    assert [stage["dtype"] for stage in report["schedule"]] == ["int8", "bfloat16"]
    assert report["accuracy"]["correct"] >= 355
    full = 8 * 4 * DIGITS.config.hidden * DIGITS.config.image.tokens
    assert report["stages"][0]["bytes_out_mean"] < 0.6 * full
    images, _ = heldout()
    outputs = load_arrays(directory / "o.npz")["outputs"]
    expected = [
        through(DIGITS, [torch.int8, torch.bfloat16], [8], (images[at : at + 8],)) for at in range(0, 360, 8)
    ]
    assert np.array_equal(outputs, torch.cat(expected).numpy())


def compressed_world(directory: Path) -> None:
    ended = run_world(directory, 2, *COMMON, "--dtype", "bfloat16,float16", "-q", "4,8", "-pt", "1,8,9,16")
    assert {end.status for end in ended.values()} == {0}, ended
    report = json.loads((directory / "r.json").read_text())
    assert report["accuracy"]["correct"] >= 350


def plain_world(directory: Path) -> None:
    refused = run_world(directory, 1, *COMMON, "--kernels", "emulated")[0]
    assert refused.status == 2
    assert "--kernels emulated: for float32 this machine has auto, " in refused.line
    ended = run_world(directory, 2, *COMMON, "--kernels", "torch")
    assert {end.status for end in ended.values()} == {0}, ended
    report = json.loads((directory / "r.json").read_text())
    assert [stage["kernels"] for stage in report["stages"]] == ["torch", "torch"]


def test_real_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    worlds = (reduced_world, compressed_world, plain_world)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(world, tmp_path_factory.mktemp(world.__name__)) for world in worlds]:
            future.result()


def checked_world(directory: Path) -> None:
    ended = run_world(directory, 2, *COMMON, "--dtype", "int8", "--check", "20", "-D", "1")
    assert {end.status for end in ended.values()} == {0}, ended
    check = json.loads((directory / "r.json").read_text())["check"]
    assert check["items"] == 20
    assert check["same"] >= 19
    assert 0 < check["largest_deviation"] < 2
    source = open_input(InputRequest(max_items=20), DIGITS)
    exact = outputs_by_block(DIGITS, source, 8, weights=None, device=CPU, dtype=torch.float32)
    off = np.abs(load_arrays(directory / "o.npz")["outputs"][:20] - exact.values.numpy()).max()
    assert check["largest_deviation"] == pytest.approx(off)
    assert "check       " in ended[1].out


def uncheckable_world(directory: Path) -> None:
    stored = directory / "w.safetensors"
    convert(DIGITS, DIGITS.weights_path(), stored, torch.int8, say=lambda _line: None)
    ended = run_world(directory, 1, *COMMON[:4], "-M", stored, "--dtype", "int8", "--check", "4")
    assert ended[0].status == 2
    assert "--check computes in float32" in ended[0].line


def test_real_ranks_beside_float32(tmp_path_factory: pytest.TempPathFactory) -> None:
    worlds = (checked_world, uncheckable_world)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(world, tmp_path_factory.mktemp(world.__name__)) for world in worlds]:
            future.result()


def test_the_profiler_measures_a_type_and_how_it_agrees(tmp_path: Path, logs: Path) -> None:
    options = "-m vit-digits -i 1 --dtype int8 --agreement 24 -o r.yml -dt board --bw-Mbps 100 --mem-MB 512"
    ended = run_program(tmp_path, logs, "profiler.py", *options.split())
    assert ended.status == 0, ended.err
    results = load_results(tmp_path / "r.yml")
    assert results.dtype == "torch.int8"
    assert results.agreement is not None
    assert results.agreement > 0.9
    held = [DIGITS.weight_bytes(LayerRange(at, at + 1), torch.int8) for at in range(16)]
    # Packed weights may have sums of their columns beside them, which small layers notice.
    for layer, weights in zip(results.profile_data, held, strict=True):
        assert weights <= layer.memory_bytes <= 1.06 * weights
    full = [DIGITS.weight_bytes(LayerRange(at, at + 1)) for at in range(16)]
    assert load_models(tmp_path / "models.yml")["vit-digits"].mem_bytes == pytest.approx(full)
    (profile,) = load_device_types(tmp_path / "device_types.yml")["board"].profiles["vit-digits"]
    assert profile.agreement == results.agreement
