"""The command pipeedge, the archive of sources and completion, as programs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from processes import environment
from waiting import LIMIT_S

import pipeedge
from pipeedge.cli.commands import COMMANDS
from pipeedge.cli.completion import SHELLS, completion_script


def start(
    *words: str, options: tuple[str, ...] = (), python: str | Path = sys.executable
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *options, "-m", "pipeedge", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**environment(), "PYTHONPATH": str(ROOT)},
    )


def test_help_imports_no_program() -> None:
    done = start("--help", options=("-X", "importtime"))
    assert done.returncode == 0
    assert all(f"  {command.name} " in done.stdout for command in COMMANDS)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pipeedge.cli.main" in imported
    heavy = {"argparse", "numpy", "rich", "torch", "transformers", "yaml"}
    assert not imported & (heavy | {command.module for command in COMMANDS})


def test_a_program_reads_the_rest_and_names_the_command(quick_python: Path) -> None:
    done = start("run", "0", "2", "-m", "vit-digits", "-pt", "1,8", python=quick_python)
    assert done.returncode == 2
    assert done.stderr.startswith("pipeedge run: layers 9 to 16 are covered by no stage")


@pytest.mark.parametrize("words", [["profile-to-models"], ["profile-to-device-types", "board"]])
def test_converters_of_profiles_are_commands(words: list[str]) -> None:
    done = start(*words, "-i", "none.yml")
    assert done.returncode == 2
    assert done.stderr.startswith(f"pipeedge {words[0]}: none.yml: no such file")


def test_schedule_is_the_native_program() -> None:
    done = start("schedule", "--version")
    assert (done.returncode, done.stdout) == (0, f"sched-pipeline (PipeEdge) {pipeedge.__version__}\n")
    refused = start("schedule", "-b", "none")
    assert refused.returncode == 2
    assert refused.stderr.startswith("pipeedge schedule: error: -b: 'none' is not a whole number")


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_can_read_the_completion_script(shell: str) -> None:
    pytest.importorskip("shtab")
    script = completion_script(shell)
    functions = [f"_{command.name}".replace("-", "_") for command in COMMANDS]  # as shtab names them
    assert all(function in script for function in functions)
    assert "--partition" in script
    if program := shutil.which(shell):
        assert subprocess.run([program, "-n"], input=script, text=True, timeout=10).returncode == 0


def test_bash_completes_commands_and_options() -> None:
    pytest.importorskip("shtab")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    ask = 'COMP_WORDS=({words}); COMP_CWORD={last}; _shtab_pipeedge; printf "%s\\n" "${{COMPREPLY[@]}}"\n'
    asked = [("pipeedge sim", 1), ("pipeedge run --part", 2), ("pipeedge run --comm r", 3)]
    text = (
        completion_script("bash")
        + "\n"
        + "".join(ask.format(words=words, last=last) for words, last in asked)
    )
    done = subprocess.run([bash], input=text, capture_output=True, text=True, timeout=10)
    assert done.stdout.split() == ["simulate", "--partition", "rpc"], done.stderr


ARCHIVED = """
from pathlib import Path
from setuptools.command.egg_info import FileList

files = FileList()
for line in Path("MANIFEST.in").read_text("utf-8").splitlines():
    if line and not line.startswith("#"):
        files.process_template_line(line)
print("\\n".join(files.files))
"""
"""Program that prints what the archive of sources holds, in a process without pip, as setuptools wants it."""


def test_the_archive_of_sources_holds_every_file_of_the_checkout() -> None:
    """MANIFEST.in is interpreted by setuptools, and git lists the files."""
    git = shutil.which("git")
    listed = subprocess.run([git or "git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout")
    done = subprocess.run([sys.executable, "-c", ARCHIVED], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = [name.replace("\\", "/") for name in done.stdout.splitlines()]
    always = {"MANIFEST.in", "pyproject.toml"}
    wanted = {name for name in listed.stdout.splitlines() if not name.startswith((".ci/", ".git"))}
    assert wanted - always <= set(files)
    assert not [name for name in files if name.endswith((".so", ".pyc")) or "src-native/build" in name]
