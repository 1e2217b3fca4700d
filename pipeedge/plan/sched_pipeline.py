"""Run the program ``sched-pipeline``, which reads the scheduler's files and schedules."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeedge.base.errors import InfeasibleError, PipeEdgeError, RequestError
from pipeedge.base.program import program_name
from pipeedge.request.environment import inherited_environment

__all__ = [
    "GRACE_S",
    "PROGRAM",
    "RefusedError",
    "UndecidedError",
    "find_executable",
    "not_understood",
    "run_program",
]

PROGRAM = "sched-pipeline"
GRACE_S = 60.0
"""Seconds beyond its time limit, for reading the files and finding out why nothing is feasible."""


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
        raise RequestError(f"{program} does not start: {error.strerror}") from error
    except ValueError as error:  # a zero byte in a name
        raise RequestError(f"a name cannot be passed to {program_name(PROGRAM)}: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise PipeEdgeError(f"{program_name(PROGRAM)} did not answer within {error.timeout:.0f} s") from error
    if done.returncode != 0:
        raise _failure(done.returncode, done.stdout, done.stderr)
    return done.stdout


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
