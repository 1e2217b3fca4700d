"""README.md and docs/: the commands in their blocks are run, in a copy of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from documents import PAGES, Page, console_steps, fits
from places import ROOT
from ports import free_port
from processes import environment

RUN_S = 100.0
"""Time limit for a block of commands, in seconds."""


# --- commands ---------------------------------------------------------------------------------------


def checkout(place: Path, python: Path) -> Path:
    """Create a directory like a clone, next to one with all programs."""
    work, programs = place / "work", place / "bin"
    work.mkdir()
    programs.mkdir()
    for path in [*ROOT.glob("*.py"), *(ROOT / name for name in ("docs", "pipeedge", "tools", "Makefile"))]:
        (work / path.name).symlink_to(path)
    for path in ROOT.glob("*.yml"):
        shutil.copy(path, work)
    # The default port may be taken on a machine where other tests run.
    another = f'case "$1" in runtime.py) set -- "$@" --port {free_port()};; esac'
    scripts = {"python": f'{another}\nexec {python} "$@"'}
    for program, module in (
        ("doctor", "pipeedge.doctor"),
        ("launch", "pipeedge.launch.main"),
        ("report", "pipeedge.report"),
        ("simulate", "pipeedge.simulate"),
    ):
        scripts[f"pipeedge-{program}"] = f'exec {python} -m {module} "$@"'
    scripts["pipeedge"] = f'exec {python} -m pipeedge "$@"'
    for program, line in scripts.items():
        (programs / program).write_text(f"#!/bin/sh\n{line}\n")
        (programs / program).chmod(0o755)
    return work


def run(work: Path, text: str) -> tuple[int, str]:
    """Run commands as a user would type them; return exit status and output."""
    programs = [str(work.parent / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    paths = {"PATH": os.pathsep.join(programs), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
        env={**environment(), **paths, "COLUMNS": "100"},
    )
    return done.returncode, done.stdout


def run_page(page: Page, place: Path, python: Path) -> set[str]:
    """Every block that can be run here, one after the other; return the names of what they leave."""
    work = checkout(place, python)
    before = set(work.iterdir())
    for block in page.blocks:
        where = f"{page.path.name}, block at line {block.line}"
        if block.language == "sh":
            status, printed = run(work, f"set -e\n{block.text}")
            assert status == 0, f"{where} ended with {status}:\n{printed}"
        elif block.language == "console":
            for step in console_steps(block):
                status, printed = run(work, step.command)
                story = f"{where}: {step.command}\nended with {status} and printed:\n{printed}"
                assert fits(step.output, printed, varying=block.varying), story
                assert status == 0 or "echo $?" in step.command, story
    return {path.name + "/" * path.is_dir() for path in set(work.iterdir()) - before}


RUNNABLE = [
    name for name, page in PAGES.items() if {"sh", "console"} & {block.language for block in page.blocks}
]


FOLLOWED_IN_A_CHECKOUT = ("README.md", "docs/quick-start.md")
"""Pages whose commands a newcomer runs in a clone, one after the other."""


@pytest.fixture(scope="module")
def under_way(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, quick_python: Path
) -> Iterator[dict[str, Future[set[str]]]]:
    """Run the commands of the pages, two pages at a time, because they mostly wait."""
    wanted = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(run_page, PAGES[name], tmp_path_factory.mktemp("page"), quick_python)
            for name in RUNNABLE
            if name in wanted
        }


@pytest.mark.parametrize("name", RUNNABLE)
def test_runnable_blocks_give_the_shown_output(name: str, under_way: dict[str, Future[set[str]]]) -> None:
    left = under_way[name].result()
    if left and name in FOLLOWED_IN_A_CHECKOUT and (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "check-ignore", "--no-index", *sorted(left)]
        ignored = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        assert set(ignored.stdout.splitlines()) == left, "git would show what these commands leave"
