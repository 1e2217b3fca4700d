"""ARM beside x86, under qemu: ``scripts/test-arm DIR`` makes what is needed in DIR, and runs these tests.

    x86 rank 0 ──frames──> ARM rank 1 ──frames──> x86 rank 0        one pipeline of both kinds

Integers and codes are the same to the bit on both; all else is as close as rounding allows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pip
import pytest
from decoder_cases import CASES as DECODERS
from places import ROOT
from ports import free_port
from processes import environment
from waiting import until

from pipeedge.models.decoder import find_decoder

PREPARED = os.environ.get("PIPEEDGE_ARM")
pytestmark = pytest.mark.skipif(
    PREPARED is None, reason="needs an emulated ARM: scripts/test-arm DIR makes one and runs these tests"
)

CASES = ROOT / "tests" / "support" / "arm_cases.py"
LIMIT_S = 900.0
"""An emulated rank takes ten times as long to start."""
PROCESSORS = ("max", "cortex-a72", "cortex-a76")
FAMILIES = ("vit", "deit", "bert", "mpnet", "albert", "dinov2", "modernbert", "dinov3")
TEXTS = ("llama3", "qwen3", "gemma2", "phi3")
TOLERANCES = {"float32": 1e-5, "int8": 0.1, "bfloat16": 0.05}


def command(arm: bool) -> list[str]:
    """Return how Python is started on this machine, or on the emulated one."""
    root = Path(PREPARED or "") / "root"
    return ["qemu-aarch64", "-L", str(root), str(root / "usr/bin/python3.11")] if arm else [sys.executable]


def variables(arm: bool, cpu: str = "max") -> dict[str, str]:
    """Return the environment of a process of either kind."""
    own = {**environment(), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if not arm:
        return own | {"PYTHONPATH": str(ROOT)}
    return own | {"PYTHONPATH": f"{ROOT}:{PREPARED}/site", "PYTHONNOUSERSITE": "1", "QEMU_CPU": cpu}


def compute(arm: bool, *arguments: object, cpu: str = "max") -> None:
    """Run ``arm_cases.py`` to its end."""
    ended = subprocess.run(
        [*command(arm), str(CASES), *map(str, arguments)],
        env=variables(arm, cpu),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arm")


@pytest.fixture(scope="module")
def digests(folder: Path) -> Mapping[str, str]:
    compute(False, "kernels", 3000, folder / "x86.json")
    found: dict[str, str] = json.loads((folder / "x86.json").read_text())
    return found


@pytest.mark.parametrize("cpu", PROCESSORS)
def test_products_and_codes_are_those_of_x86_to_the_bit(
    folder: Path, digests: Mapping[str, str], cpu: str
) -> None:
    """Three thousand random shapes for each instruction set that the processor has.

    Decoders' products have 500 in each number type, and rows with the same bits alone.
    """
    compute(True, "kernels", 3000, folder / f"{cpu}.json", cpu=cpu)
    found = json.loads((folder / f"{cpu}.json").read_text())
    layers = {
        "max": {"neoni8mm", "neondot", "neon"},
        "cortex-a72": {"neon"},
        "cortex-a76": {"neondot", "neon"},
    }
    decoders = layers[cpu] | ({"neonbf16"} if cpu == "max" else set())
    assert {name.split()[1] for name in found if name.startswith("layer")} == layers[cpu]
    assert {name.split()[1] for name in found if name.startswith("score4")} == decoders
    assert {"codes neon", "codes portable"} <= found.keys()
    for kind in ("layer", "codes", "score4", "score8", "score16", "score32"):
        both = {value for each in (digests, found) for name, value in each.items() if name.split()[0] == kind}
        assert len(both) == 1, (digests, found)


@pytest.mark.parametrize("cpu", ["max", "cortex-a72"])
def test_attention_is_that_of_x86(folder: Path, cpu: str) -> None:
    """With biases, rotations and windows. A Cortex-A72 computes in float32 and rounds to bfloat16."""
    compute(False, "attention", 150, folder / "x86-attention.npz")
    compute(True, "attention", 150, folder / f"{cpu}-attention.npz", cpu=cpu)
    here, there = np.load(folder / "x86-attention.npz"), np.load(folder / f"{cpu}-attention.npz")
    assert len(there.files) == 300
    for name in there.files:
        dtype, number = name.split()
        exact = dtype == "bfloat16" and cpu == "cortex-a72"
        expected = here[f"float32 {number}" if exact else name]
        tolerance = 2.0**-8 if exact else TOLERANCES[dtype]
        np.testing.assert_allclose(there[name], expected, rtol=tolerance, atol=1e-4 + tolerance * (not exact))


def test_models_give_the_results_of_x86(folder: Path, model_dirs: dict[str, Path]) -> None:
    models = folder / "models"
    for family in FAMILIES:
        shutil.copytree(model_dirs[family], models / family)
    compute(False, "families", models, folder / "x86.npz")
    compute(True, "families", models, folder / "arm.npz")
    here, there = np.load(folder / "x86.npz"), np.load(folder / "arm.npz")
    assert len(here.files) == 2 * len(FAMILIES)
    for name in here.files:
        tolerance = TOLERANCES[name.split()[1]]
        np.testing.assert_allclose(there[name], here[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("cpu", ["max", "cortex-a72"])
def test_decoders_give_the_scores_of_x86(folder: Path, cpu: str) -> None:
    """In float32 to rounding. Others differ by what their attention rounds to bfloat16."""
    models = folder / "texts"
    if not models.exists():
        for name in TEXTS:
            DECODERS[name].save(models / name)
        compute(False, "texts", models, folder / "x86-texts.npz")
    compute(True, "texts", models, folder / f"{cpu}-texts.npz", cpu=cpu)
    here, there = np.load(folder / "x86-texts.npz"), np.load(folder / f"{cpu}-texts.npz")
    assert len(here.files) == 4 * len(TEXTS)
    for name in here.files:
        tolerance = TOLERANCES.get(name.split()[1], 0.1) * np.abs(here[name]).max()
        np.testing.assert_allclose(there[name], here[name], rtol=0, atol=tolerance, err_msg=name)


class Mixed:
    """Ranks of both kinds in one run.

    Args:
        folder: Where they run.
        kinds: Kind of each rank: x86, or arm.
        options: Options of all ranks.
        own: Options of the data rank.
        stack: Ends those that are left.
    """

    def __init__(
        self,
        folder: Path,
        kinds: str,
        options: tuple[object, ...],
        own: tuple[object, ...],
        stack: ExitStack,
    ) -> None:
        self.folder = folder
        size, port = len(kinds.split()), free_port()
        self.processes = []
        for rank, kind in enumerate(kinds.split()):
            words = (ROOT / "runtime.py", rank, size, "--port", port, *options, *(own if rank == 0 else ()))
            with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
                process = subprocess.Popen(
                    [*command(kind == "arm"), *map(str, words)],
                    cwd=folder,
                    env=variables(kind == "arm"),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                )
            stack.callback(process.wait)
            stack.callback(process.kill)
            self.processes.append(process)

    def said(self, rank: int) -> str:
        return (self.folder / f"{rank}.err").read_text()

    def ended(self, *ranks: int) -> list[int]:
        return [self.processes[rank].wait(LIMIT_S) for rank in ranks]

    def results(self) -> np.ndarray:
        found: np.ndarray = np.load(self.folder / "out.npz")["outputs"]
        return found


@contextmanager
def mixed(folder: Path, kinds: str, *options: object, items: int) -> Iterator[Mixed]:
    """Start ranks of both kinds, and end those that are left."""
    pixels = np.random.default_rng(3).integers(-64, 64, (items, 1, 8, 8)) / 64
    np.savez(folder / "in.npz", pixel_values=pixels.astype(np.float32))
    own = ("--output", "out.npz", "--input", folder / "in.npz")
    with ExitStack() as stack:
        yield Mixed(folder, kinds, ("-m", "vit-digits", "--timeout", 300, *options), own, stack)


def alone(folder: Path) -> np.ndarray:
    """Return what one rank of this machine computes from the same input."""
    words = (ROOT / "runtime.py", 0, 1, "-m", "vit-digits", "--input", "in.npz", "--output", "alone.npz")
    subprocess.run([*command(False), *map(str, words)], cwd=folder, env=variables(False), check=True)
    found: np.ndarray = np.load(folder / "alone.npz")["outputs"]
    return found


@pytest.mark.parametrize("links", [("-c", "tcp"), ("-c", "p2p"), ("-c", "tcp", "-q", "8,8,0")], ids=" ".join)
def test_a_pipeline_of_both_kinds_gives_the_results_of_one_machine(
    tmp_path: Path, links: tuple[object, ...]
) -> None:
    """The frames of the compressed links are written on one kind and read on the other, both ways."""
    cuts = ("-pt", "1,5,6,11,12,16", "-r", "0,1,2") if "-q" in links else ("-pt", "1,8,9,16")
    kinds = "x86 arm x86" if "-q" in links else "x86 arm"
    with mixed(tmp_path, kinds, *links, *cuts, items=40) as ranks:
        assert ranks.ended(*range(len(kinds.split()))) == [0] * len(kinds.split()), ranks.said(0)
        assert re.search(r"the ranks are not alike \(torch \S+ on x86_64: .* on aarch64: ", ranks.said(0))
        tolerance = 0.3 if "-q" in links else 1e-4
        np.testing.assert_allclose(ranks.results(), alone(tmp_path), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kinds", ["x86 arm x86", "x86 x86 arm"], ids=["to x86", "to ARM"])
def test_a_rank_of_the_other_kind_takes_the_place_of_a_lost_one(tmp_path: Path, kinds: str) -> None:
    """Every item gives one result, as close to that of one machine as before."""
    cuts = ("-c", "tcp", "-u", 2, "-pt", "1,8,9,16")  # the third rank is a spare
    with mixed(tmp_path, kinds, *cuts, items=4000) as ranks:
        until(lambda: rows(tmp_path) > 0, "rows are written", LIMIT_S)
        ranks.processes[1].send_signal(signal.SIGKILL)
        assert ranks.ended(0, 2) == [0, 0], ranks.said(0)
        assert "; the run goes on with layers 1-8 on rank 0, layers 9-16 on rank 2" in ranks.said(0)
        np.testing.assert_allclose(ranks.results(), alone(tmp_path), rtol=0, atol=1e-4)


def rows(folder: Path) -> int:
    """Return the bytes of the unfinished output."""
    part = folder / "out.npz.part"
    return part.stat().st_size if part.exists() else 0


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_a_decoder_over_both_kinds_writes_the_text_of_one_machine(tmp_path: Path, dtype: str) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Sort 5 2 9 1.\nWhat is 1 + 2?\n")
    options = ("-m", "llama-puzzles", "-c", "tcp", "--dtype", dtype, "--timeout", 300)
    own = ("--input", prompts, "--greedy", "--max-tokens", 12, "--output")
    layers = find_decoder("llama-puzzles").n_layers
    with ExitStack() as stack:
        cuts = ("-pt", f"1,{layers // 2},{layers // 2 + 1},{layers}")
        ranks = Mixed(tmp_path, "x86 arm", (*options, *cuts), (*own, "out.jsonl"), stack)
        assert ranks.ended(0, 1) == [0, 0], ranks.said(0)
    words = (ROOT / "runtime.py", 0, 1, *options, *own, "alone.jsonl")
    subprocess.run([*command(False), *map(str, words)], cwd=tmp_path, env=variables(False), check=True)
    found, expected = (text_rows(tmp_path / name) for name in ("out.jsonl", "alone.jsonl"))
    assert len(found) == 2
    assert found == expected


def text_rows(path: Path) -> list[str]:
    """Return the texts of an output."""
    return [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]


def test_setup_brings_no_cuda_to_a_board(tmp_path: Path) -> None:
    """pip, on the emulated machine, chooses the packages of ``make setup``, and downloads nothing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    own = f"{project['name']}["
    wanted = [*project["dependencies"], *extras["runtime"], *extras["plot"], *extras["dev"]]
    (tmp_path / "wanted.txt").write_text("\n".join(line for line in wanted if not line.startswith(own)))
    report = tmp_path / "report.json"
    options = ("--dry-run", "--ignore-installed", "--only-binary=:all:", "-qq", "--report", report)
    files = ("-c", ROOT / "constraints.txt", "-r", tmp_path / "wanted.txt")
    words = (Path(pip.__file__).parent, "install", "--disable-pip-version-check", *options, *files)
    ended = subprocess.run(
        [*command(True), *map(str, words)],
        env={**variables(True), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    chosen = {each["metadata"]["name"].lower() for each in json.loads(report.read_text())["install"]}
    assert {"torch", "numpy", "transformers"} <= chosen
    assert not {name for name in chosen if re.match("nvidia|cuda|triton", name)}
