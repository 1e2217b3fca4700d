"""Run the program ``sched-pipeline``, which reads the scheduler's files and schedules.

run_program      a process for a call
KeptProgram      a process for all calls, which reads each file once: for questions that come again and again

Both take the same calls, and give the same results.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from pipeedge.base.errors import InfeasibleError, PipeEdgeError, RequestError
from pipeedge.base.program import program_name
from pipeedge.request.environment import inherited_environment

__all__ = [
    "GRACE_S",
    "PROGRAM",
    "Calls",
    "KeptProgram",
    "RefusedError",
    "UndecidedError",
    "find_executable",
    "not_understood",
    "run_program",
]

PROGRAM = "sched-pipeline"
GRACE_S = 60.0
"""Seconds beyond its time limit, for reading the files and finding out why nothing is feasible."""
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


class Calls(Protocol):
    """Calls the program."""

    def __call__(self, arguments: Sequence[str], text: str = "", *, timeout_s: float = GRACE_S) -> str:
        """Return what the program prints. Takes and raises the same as ``run_program``."""
        ...


class RefusedError(RequestError):
    """The program refused its files or options."""

    def __init__(self, line: str) -> None:
        super().__init__(f"{program_name(PROGRAM)}: {line}")
        self.line = line
        """The reason, without the name of the program."""


class UndecidedError(InfeasibleError):
    """The time limit passed before a schedule was found or excluded."""


def find_executable() -> Path:
    """Return the path of ``sched-pipeline``, beside this interpreter or else on the ``PATH``.

    Raises:
        RequestError: It is in neither place.
    """
    beside = Path(sys.executable).parent
    found = shutil.which(PROGRAM, path=str(beside)) or shutil.which(PROGRAM)
    if found is None:
        raise RequestError(
            f"{PROGRAM} is neither in {beside} nor on the PATH; install the package (pip install -e .)"
        )
    return Path(found)


def run_program(arguments: Sequence[str], text: str = "", *, timeout_s: float = GRACE_S) -> str:
    """Run the program and return what it prints.

    Args:
        arguments: Command line of the program.
        text: Text for its standard input.
        timeout_s: Seconds to wait for it.

    Raises:
        RefusedError: The files or options are wrong.
        RequestError: The program is missing.
        InfeasibleError: No schedule is feasible, or none was found in time (``UndecidedError``).
        PipeEdgeError: The program failed.
    """
    program = find_executable()
    try:
        done = subprocess.run(
            [program_name(PROGRAM), *arguments],
            executable=program,
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
            # A copy: execve would read the environment itself while another thread may be changing it.
            env=inherited_environment(),
        )
    except OSError as error:
        raise _no_start(program, error) from error
    except ValueError as error:  # a zero byte in a name
        raise RequestError(f"a name cannot be passed to {program_name(PROGRAM)}: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise _no_answer(timeout_s) from error
    if done.returncode != 0:
        raise _failure(done.returncode, done.stdout, done.stderr)
    return done.stdout


class KeptProgram:
    """A process of the program that answers one call after another, from one thread.

    Files count as they were when a call first named them. The process starts with the first call, and anew
    if it has ended since; it ends with ``close``, or with this process.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> KeptProgram:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, arguments: Sequence[str], text: str = "", *, timeout_s: float = GRACE_S) -> str:
        """Return what the program prints. Takes and raises the same as ``run_program``."""
        question = json.dumps({"arguments": list(arguments), "input": text}, ensure_ascii=False)
        # What YAML does not allow as it is, which JSON does.
        question = _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", question)
        try:
            line = self._answer(question.encode(errors="replace") + b"\n", timeout_s)
            # A message of yaml-cpp may end within a letter.
            answer = json.loads(line.decode(errors="replace"))
            status, printed, said = (answer[key] for key in ("status", "printed", "said"))
        except (ValueError, KeyError, TypeError) as error:
            self.close()
            raise not_understood(error) from error
        except BaseException:
            self.close()
            raise
        if status != 0:
            raise _failure(status, printed, said)
        return str(printed)

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(BrokenPipeError), process:  # it waits, too
                process.kill()

    def _answer(self, question: bytes, timeout_s: float) -> bytes:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        if process.stdin is None or process.stdout is None:
            raise ValueError("a process without pipes")
        deadline = time.monotonic() + timeout_s
        left, answer = memoryview(question), b""
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(process.stdin, selectors.EVENT_WRITE)
                ready.register(process.stdout, selectors.EVENT_READ)
                while not answer.endswith(b"\n"):
                    able = {key.fileobj for key, _ in ready.select(max(0.0, deadline - time.monotonic()))}
                    if not able:
                        raise _no_answer(timeout_s)
                    if process.stdin in able:  # there is room for so many bytes
                        left = left[os.write(process.stdin.fileno(), left[: select.PIPE_BUF]) :]
                        if not left:
                            ready.unregister(process.stdin)
                    if process.stdout in able:
                        got = os.read(process.stdout.fileno(), 1 << 16)
                        if not got:
                            raise _failure(process.wait(), "", "")
                        answer += got
        except BrokenPipeError as error:
            raise _failure(process.wait(), "", "") from error
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        program = find_executable()
        try:
            self._process = subprocess.Popen(
                [program_name(PROGRAM), "--questions"],
                executable=program,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what it says is in its answers
                env=inherited_environment(),
            )
        except OSError as error:
            raise _no_start(program, error) from error
        return self._process


def _no_start(program: Path, error: OSError) -> RequestError:
    return RequestError(f"{program} does not start: {error.strerror}")


def _no_answer(timeout_s: float) -> PipeEdgeError:
    return PipeEdgeError(f"{program_name(PROGRAM)} did not answer within {timeout_s:.0f} s")


def _failure(code: int, stdout: str, stderr: str) -> PipeEdgeError:
    called = program_name(PROGRAM)
    # Not splitlines(), which also divides at characters that names may contain.
    line = stderr.strip().split("\n")[-1].removeprefix(f"{called}: ").removeprefix("error: ")
    if code == RefusedError.exit_code:
        return RefusedError(line)
    if code == InfeasibleError.exit_code:
        undecided = '"unknown"' in stdout
        return (UndecidedError if undecided else InfeasibleError)(f"{called}: {line}")
    how = f"was ended by signal {-code}" if code < 0 else f"failed with exit status {code}"
    return PipeEdgeError(f"{called} {how}" + (f": {line}" if line else ""))


def not_understood(error: Exception) -> PipeEdgeError:
    """Return the error for an answer that cannot be read, which ``error`` describes."""
    return PipeEdgeError(
        f"{program_name(PROGRAM)} is of another version: its answer is not understood ({error!r}); install "
        "the package anew"
    )
