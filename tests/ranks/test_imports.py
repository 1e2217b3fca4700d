"""What a program imports before it answers, and what a rank imports: importing is most of a start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from places import ROOT
from ports import free_port
from processes import environment
from waiting import LIMIT_S

COMPUTING = {"torch", "numpy", "safetensors", "PIL"}
SHOWING = {"rich", "jinja2"}
NEVER = {"transformers", "datasets", "scipy", "matplotlib", "prometheus_client"}


def run(logs: Path, *commands: tuple[str, ...], script: Sequence[str] = ("runtime.py",)) -> list[set[str]]:
    """Run ``script`` with each list of words, all at once; return what each imported until it ended."""
    started = []
    for number, words in enumerate(commands):
        command = [sys.executable, "-X", "importtime", *script, *words]
        with (logs / str(number)).open("w") as log:  # a pipe would fill up, and its program would wait
            started.append(
                subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=log)
            )
    found = []
    for number, process in enumerate(started):
        status, err = process.wait(LIMIT_S), (logs / str(number)).read_text()
        lines = [line for line in err.splitlines() if line.startswith("import time:")]
        assert status == 0, err.replace("\n".join(lines), "")
        found.append({line.rpartition("|")[2].strip() for line in lines})
    return found


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    (imported,) = run(tmp_path, ("--help",))
    assert "pipeedge.request.options" in imported
    assert not imported & (COMPUTING | SHOWING | NEVER | {"yaml"})


@pytest.mark.parametrize(
    "options",
    [
        ("-m", "vit-digits"),
        ("-m", "vit-digits", "-pt", "1,8,9,16", "-q", "8,0", "--dtype", "bfloat16"),
        ("-m", "bert-base-uncased", "-M", "no.npz"),
    ],
)
def test_a_dry_run_imports_nothing_to_compute_or_show(options: tuple[str, ...], tmp_path: Path) -> None:
    (imported,) = run(tmp_path, ("0", "2", *options, "--dry-run"))
    assert not imported & (COMPUTING | SHOWING | NEVER | {"yaml"})


def test_a_scheduled_dry_run_does_not_import_torch(tmp_path: Path) -> None:
    files = ("-sm", "models.yml", "-sdt", "device_types.yml", "-sd", "devices.yml", "-H", "mb-0,mb-1,mb-2")
    options = ("0", "3", "-m", "google/vit-base-patch16-224", *files, "-q", "8,8,0", "--dry-run")
    (imported,) = run(tmp_path, options)
    assert "pipeedge.plan.scheduler" in imported
    assert not imported & (NEVER | {"torch", "safetensors", "PIL"})


def test_a_simulation_does_not_import_torch(tmp_path: Path) -> None:
    files = ("-sm", "models.yml", "-sdt", "device_types.yml", "-sd", "devices.yml")
    options = ("-m", "google/vit-base-patch16-224", *files, "-b", "64")
    (imported,) = run(tmp_path, options, script=("-m", "pipeedge.simulate"))
    assert "pipeedge.simulate.simulation" in imported
    assert not imported & (NEVER | {"torch", "safetensors", "PIL"})


def test_a_rank_imports_only_what_its_part_needs(tmp_path: Path) -> None:
    options = ("2", "-m", "vit-digits", "--port", str(free_port()))
    data, stage = run(tmp_path, ("0", *options), ("1", *options))
    assert {"torch", "PIL", "rich"} <= data
    assert "torch" in stage
    unneeded = NEVER | {"jinja2", "yaml", "pipeedge.transport.rpc", "PIL.PdfImagePlugin"}
    unneeded |= {"torch._dynamo", "torch._decomp", "torch._refs"}
    assert not data & unneeded
    assert not stage & (unneeded | {"PIL", "rich", "pipeedge.data", "pipeedge.report"})


def test_what_needs_all_of_torch_can_be_imported_later() -> None:
    code = """
import sys
from pipeedge.base.deferred_imports import META_KERNELS, import_postponed, postponed
with postponed(META_KERNELS):
    import torch
assert not set(META_KERNELS) & set(sys.modules)
import_postponed()
import torch._dynamo
print(torch.nn.functional.gelu(torch.empty(2, device="meta")).cumsum(0).shape)
"""
    command = [sys.executable, "-c", code]
    found = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (found.returncode, found.stdout) == (0, "torch.Size([2])\n"), found.stderr


def test_a_rank_that_reads_text_imports_the_rest_of_torch_first(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    text = tmp_path / "sentences.txt"
    text.write_text("the cat sat on a mat\nall day the cat slept\n")
    options = ("0", "1", "-m", str(model_dirs["bert"]), "--input", str(text), "--port", str(free_port()))
    (imported,) = run(tmp_path, options)
    assert {"transformers", "torch._decomp"} <= imported
