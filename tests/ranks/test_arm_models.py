"""Models of every family on ARM, beside their results on x86."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from decoder_cases import CASES
from emulated_arm import TOLERANCES, compute, needs_arm
from gguf_writing import save_gguf

pytestmark = needs_arm

FILES = ("llama3", "qwen2", "phi3-long", "gpt2")
"""Decoders that come in GGUF files, too."""


def assert_alike(here: Path, there: Path, results: int) -> None:
    """Compare two files of arrays, whose names end in their number types, with the largest value of each."""
    expected, found = np.load(here), np.load(there)
    assert len(expected.files) == len(found.files) == results
    for name in expected.files:
        tolerance = TOLERANCES[name.split()[-1]] * max(1, np.abs(expected[name]).max())
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=tolerance, err_msg=name)


def test_encoders_give_the_results_of_x86(tmp_path: Path, model_dirs: dict[str, Path]) -> None:
    """Each family in each number type, of which int8 and int4 round activations to bfloat16."""
    models = tmp_path / "models"
    for name, directory in model_dirs.items():
        shutil.copytree(directory, models / name)
    compute(False, "encoders", models, tmp_path / "x86.npz")
    compute(True, "encoders", models, tmp_path / "arm.npz")
    assert_alike(tmp_path / "x86.npz", tmp_path / "arm.npz", 4 * len(model_dirs))


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of each family of decoders, some also as GGUF files."""
    folder = tmp_path_factory.mktemp("decoders")
    for name, case in CASES.items():
        model = case.save(folder / "models" / name)
        if name in FILES:
            save_gguf(model, folder / "models" / f"{name}.gguf", "Q8_0")
    compute(False, "decoders", folder / "models", folder / "x86.npz")
    return folder


@pytest.mark.parametrize("cpu", ["max", "cortex-a72"])
def test_decoders_give_the_scores_of_x86(decoders: Path, cpu: str) -> None:
    """A text in chunks over pages of the cache, from directories and GGUF files, in each number type."""
    compute(True, "decoders", decoders / "models", decoders / f"{cpu}.npz", cpu=cpu)
    assert_alike(decoders / "x86.npz", decoders / f"{cpu}.npz", 4 * (len(CASES) + len(FILES)))
