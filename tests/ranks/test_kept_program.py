"""Test the process of sched-pipeline that answers one call after another."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sched_program import TYPES, Cluster, run, with_types, written
from waiting import LIMIT_S

from pipeedge.base.errors import InfeasibleError, PipeEdgeError, RequestError
from pipeedge.plan import sched_pipeline
from pipeedge.plan.sched_pipeline import Calls, KeptProgram, RefusedError, run_program

PLAN = {"plans": [[{"host": "f1", "layers": [1, 3]}, {"host": "s0", "layers": [4, 4]}]]}
CALLS = [
    (["-m", "m"], ""),
    (["-m", "m", "--format=json", "--data-host=s0"], ""),
    (["-m", "m", "--format=problem"], ""),
    (["-m", "m", "--format=json", "--conditions=-"], json.dumps(PLAN)),
    (["-m", "m", "--conditions=-"], json.dumps({"hosts": [{"host": "f0", "slowness": 9}]})),
    (["-m", "m", "--conditions=-"], json.dumps({"missing": ["f0", "s0"]})),
    (["--format=files", "-sd", "devices.yml"], ""),
    (["--version"], ""),
    # failures
    (["-m", "another"], ""),
    (["-m", 'sömé "one"\nelse\\\u2028\x7f\x85\ufeff\U0001f600'], ""),
    (["-m", "m", "--conditions=-"], json.dumps({"missing": ["f0", "f1", "s0"]})),
    (["-m", "m", "--conditions=-"], json.dumps({"missing": ["x"]})),
    (["-m", "m", "--conditions=-"], "{"),
    (["-m", "m", "--nonsense"], ""),
    (["-m", "m", "--conditions=-"], '{"hosts\\\U0001f600": []}'),
    (["--questions"], ""),
    (["-m", "m", "-sm", "no.yml"], ""),
]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.chdir(tmp_path)
    return written(tmp_path)


@pytest.fixture
def kept() -> Iterator[KeptProgram]:
    with KeptProgram() as program:
        yield program


def outcome(call: Calls, arguments: list[str], text: str) -> str:
    """Return what a call prints, or the kind of its error and its message."""
    try:
        return re.sub(r'"elapsed_s": .*', "", call(arguments, text))
    except PipeEdgeError as error:
        return f"{type(error).__name__}: {error}"


def process_of(kept: KeptProgram) -> int:
    """Return the process that answers, which there is after the first call."""
    kept(["--version"])
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    (found,) = (
        int(child)
        for child in children
        if b"--questions" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
    )
    return found


def until(happens: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.02)
    return happens()


def test_answers_are_those_of_single_calls(cluster: Cluster, kept: KeptProgram) -> None:
    wanted = [outcome(run_program, arguments, text) for arguments, text in CALLS]
    for _ in range(2):
        found = [outcome(kept, arguments, text) for arguments, text in CALLS]
        # A question cannot hold others; a single call with no input has none to answer.
        nested = [arguments for arguments, _ in CALLS].index(["--questions"])
        assert "a question cannot hold others" in found.pop(nested)
        assert found == [one for number, one in enumerate(wanted) if number != nested]


def test_failures_have_the_same_types(cluster: Cluster, kept: KeptProgram) -> None:
    with pytest.raises(RefusedError, match="there is no x in the problem"):
        kept(["-m", "m", "--conditions=-"], json.dumps({"missing": ["x"]}))
    with pytest.raises(InfeasibleError):
        kept(["-m", "m", "--conditions=-"], json.dumps({"missing": ["f0", "f1", "s0"]}))


def test_files_count_as_they_were_first(cluster: Cluster, kept: KeptProgram) -> None:
    before = kept(["-m", "m"])
    with_types(
        cluster, model_profiles={"m": [{**TYPES["fast"]["model_profiles"]["m"][0], "time_s": [9, 1, 1, 1]}]}
    )
    assert run_program(["-m", "m"]) != before
    assert kept(["-m", "m"]) == before
    (cluster.folder / "models.yml").unlink()
    assert kept(["-m", "m"]) == before


def test_one_that_was_killed_between_calls_starts_anew(cluster: Cluster, kept: KeptProgram) -> None:
    before = kept(["-m", "m"])
    killed = process_of(kept)
    os.kill(killed, signal.SIGKILL)
    assert until(lambda: Path(f"/proc/{killed}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    assert kept(["-m", "m"]) == before
    assert process_of(kept) != killed


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let a shell script take the place of the program."""
    program = folder / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sched_pipeline, "find_executable", lambda: program)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("read -r question; exit 7", "failed with exit status 7"),
        ("read -r question; kill -9 $$", "was ended by signal 9"),
        ("exit 7", "failed with exit status 7"),
        ("read -r question; echo nonsense; sleep 100", "is of another version"),
        ("read -r question; echo '{}'; sleep 100", "is of another version"),
        ("read -r question; printf '{'; exec sleep 100", "did not answer within 0 s"),
    ],
)
def test_one_that_fails_during_a_call_is_an_error_and_starts_anew(
    kept: KeptProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: str
) -> None:
    with monkeypatch.context() as patched:
        stand_in(tmp_path, patched, script)
        timeout_s = 0.3 if "did not answer" in error else LIMIT_S
        with pytest.raises(PipeEdgeError, match=error):
            kept(["--version"], timeout_s=timeout_s)
    assert kept(["--version"]) == run_program(["--version"])


def test_one_that_takes_no_question_is_an_error(
    kept: KeptProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "exec sleep 100")
    with pytest.raises(PipeEdgeError, match="did not answer within 0 s"):
        kept(["--version"], "x" * 1_000_000, timeout_s=0.3)


def test_a_long_question_is_answered(cluster: Cluster, kept: KeptProgram) -> None:
    text = json.dumps({"hosts": [{"host": "f0", "slowness": 2}] * 20_000})
    arguments = ["-m", "m", "--conditions=-"]
    assert outcome(kept, arguments, text) == outcome(run_program, arguments, text)


def test_one_that_is_missing_is_refused(
    kept: KeptProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sched_pipeline, "find_executable", lambda: tmp_path / "none")
    with pytest.raises(RequestError, match="none does not start: No such file"):
        kept(["--version"])


def test_close_ends_it(kept: KeptProgram) -> None:
    ended = process_of(kept)
    kept.close()
    assert not Path(f"/proc/{ended}").exists()
    kept.close()


def test_it_ends_with_the_process_that_asks() -> None:
    script = (
        "import os; from pipeedge.plan.sched_pipeline import KeptProgram\n"
        "kept = KeptProgram(); kept(['--version']); print(kept._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    child = Path(f"/proc/{done.stdout.strip()}/cmdline")
    # A process that has ended has no command line, or is gone.
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert until(lambda: not child.exists() or b"--questions" not in child.read_bytes())


@pytest.mark.parametrize(
    ("question", "error"),
    [
        ("{}", "the key arguments is missing"),
        ("[1", "is not valid YAML"),
        ("", "is empty"),
        ('{"arguments": [{}]}', "arguments"),
        ('{"arguments": ["--version"], "input": []}', "input"),
    ],
)
def test_what_is_no_question_is_an_answer_too(question: str, error: str) -> None:
    version = json.dumps({"arguments": ["--version"]})
    done = run("--questions", text=f"{question}\n{version}\n")
    first, second = map(json.loads, done.out.splitlines())
    assert (done.code, first["status"], first["printed"]) == (0, 2, "")
    assert first["said"].startswith("sched-pipeline: error: question")
    assert error in first["said"]
    assert second == {"status": 0, "printed": run("--version").out, "said": ""}


def test_questions_stand_alone() -> None:
    for arguments in (["--questions", "-m", "m"], ["-m", "m", "--questions"]):
        assert "leave out the others" in run(*arguments).error
