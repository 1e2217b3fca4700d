"""Ranks that run the families of models beside ViT, DeiT and BERT, checked by the data rank's own result."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from arrays import load_arrays
from PIL import Image
from processes import run_program, run_world
from small_models import WORDS

from pipeedge.models import find_model

PAIRS = [(" ".join(WORDS[: 1 + n % 7]), " ".join(WORDS[n % 4 : n % 4 + 3])) for n in range(11)]


@dataclass(frozen=True)
class Case:
    """A run of a small model."""

    model: str
    """Family in ``small_models``, with a tower or a size of images behind it."""
    input: str
    """Name of the input file, or folder."""
    options: tuple[str, ...]
    ranks: int
    cosine: float
    """Least cosine between results and those of float32 without compression."""


CASES = {
    "reranker of pairs in a table, int8 over TCP": Case(
        "mpnet", "pairs.tsv", ("--dtype", "int8", "-c", "tcp", "-pt", "1,5,6,8,9,12"), 3, 0.98
    ),
    "pairs in lines over compressed links": Case(
        "modernbert", "pairs.jsonl", ("-q", "8,8,0", "-pt", "1,2,3,7,8,12"), 3, 0.98
    ),
    "sentence vectors in bfloat16 over RPC": Case(
        "roberta sentences", "pairs.txt", ("--dtype", "bfloat16", "-c", "rpc", "-pt", "1,6,7,12"), 2, 0.98
    ),
    "shared blocks, converted": Case("albert converted", "pairs.tsv", ("--dtype", "float16"), 2, 0.999),
    "images of another size": Case("dinov2#24x20", "pictures", ("-pt", "1,3,4,12", "-q", "16,0"), 2, 0.999),
    "image tower in float32": Case("clip", "pictures", ("-pt", "1,5,6,12", "-D", "1"), 2, 0.999999),
}


def write_inputs(directory: Path) -> None:
    lines = [f"{one}\t{other}" for one, other in PAIRS]
    (directory / "pairs.tsv").write_text("\n".join(["sentence1\tsentence2", *lines]) + "\n")
    objects = [json.dumps({"text": one, "text_pair": other}) for one, other in PAIRS]
    (directory / "pairs.jsonl").write_text("\n".join(objects) + "\n")
    (directory / "pairs.txt").write_text("\n".join(one for one, _ in PAIRS) + "\n")
    (directory / "pictures").mkdir()
    chance = np.random.default_rng(0)
    for number in range(len(PAIRS)):
        pixels = chance.integers(0, 256, (30, 26, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(directory / "pictures" / f"{number}.png")


def write_sentence_model(source: Path, target: Path) -> None:
    """Write the encoder of a classifier as sentence-transformers does, with the mean of its tokens."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "architectures": ["RobertaModel"]}))
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (target / "modules.json").write_text(json.dumps(modules))
    (target / "1_Pooling").mkdir()
    (target / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, model_dirs: dict[str, Path]) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("family-models")
    write_sentence_model(model_dirs["roberta"], root / "sentences")
    shutil.copytree(model_dirs["albert"], root / "albert")
    return {**model_dirs, "roberta sentences": root / "sentences", "albert converted": root / "albert"}


def run_case(case: Case, models: dict[str, Path], directory: Path) -> None:
    write_inputs(directory)
    family, mark, size = case.model.partition("#")
    name = f"{models[family]}{mark}{size}"
    if "converted" in family:
        ended = run_program(directory, directory, "save_model_weights.py", "-m", name, "--dtype", "float16")
        assert ended.status == 0, ended.err
        assert (models[family] / "model.float16.safetensors").exists()
    common = ("-m", name, "--input", case.input, "-u", "4", "--output", "o.npz", "--report", "r.json")
    ended = run_world(directory, case.ranks, *common, *case.options, "--check", len(PAIRS))
    assert {end.status for end in ended.values()} == {0}, ended
    check = json.loads((directory / "r.json").read_text())["check"]
    outputs = load_arrays(directory / "o.npz")["outputs"]
    model = find_model(name)
    assert outputs.shape == (len(PAIRS), model.config.output_size)
    assert check["items"] == len(PAIRS)
    assert check["cosine_mean"] >= case.cosine
    if "sentences" in family:
        np.testing.assert_allclose(np.linalg.norm(outputs, axis=1), 1, atol=1e-4)
    if case.cosine > 0.9999:
        assert check["largest_deviation"] <= 1e-5 * max(1, np.abs(outputs).max())


@pytest.fixture(scope="module")
def played(
    tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]
) -> dict[str, BaseException | None]:
    """Run all cases, three at a time, because ranks mostly wait for imports and for each other."""
    with ThreadPoolExecutor(3) as pool:
        futures = {
            name: pool.submit(run_case, case, models, tmp_path_factory.mktemp("family"))
            for name, case in CASES.items()
        }
    return {name: future.exception() for name, future in futures.items()}


@pytest.mark.parametrize("name", CASES)
def test_real_ranks(name: str, played: dict[str, BaseException | None]) -> None:
    error = played[name]
    if error is not None:
        raise error
