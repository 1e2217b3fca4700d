"""The exception tree, and the exit code of each branch.

    PipeEdgeError                 1  a bug in PipeEdge (as is every exception outside this tree)
    ├── RequestError              2  a wrong request: arguments, files, YAML, an impossible schedule
    │   ├── ScheduleError            an invalid schedule (layers uncovered, overlapping, too many stages)
    │   ├── ModelError               an unknown model, or a configuration of an unsupported kind
    │   ├── WeightsError             weights that are missing, truncated, or of another shape
    │   ├── InputError               an input that cannot be read or does not fit the model
    │   └── SpecError                an error in models.yml, device_types.yml, devices.yml and the like
    ├── InfeasibleError           3  no schedule fits the devices
    └── PeerError                 4  a failure of another rank
        ├── PeerFailedError          the rank reported it, or its connection closed
        └── DeadlineError            the rank did not answer in time

Each message is one line that says what is wrong, where, and what to do about it; the command line prints
it unchanged. A failure raised on one rank travels to the others as a ``PeerFailedError`` that names the
rank, the stage and the first cause.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from pipeedge.base.wording import printable

__all__ = [
    "RAISE_FILE_LIMIT",
    "Account",
    "DeadlineError",
    "InfeasibleError",
    "InputError",
    "ModelError",
    "PeerError",
    "PeerFailedError",
    "PipeEdgeError",
    "RequestError",
    "ScheduleError",
    "SpecError",
    "WeightsError",
    "exit_code",
    "has_too_many_files",
    "one_line",
]

RAISE_FILE_LIMIT = "raise the limit of open files, for example with: ulimit -n 1024"
"""Remedy for the user where a process may not open another file or connection."""

_TOO_MANY_FILES = ("Too many open files", "Failed to init uv loop")
EXIT_OK = 0
EXIT_FAULT = 1
EXIT_REQUEST = 2
EXIT_INFEASIBLE = 3
EXIT_PEER = 4


class PipeEdgeError(Exception):
    """Root of the tree. Raised directly, it reports a bug in PipeEdge."""

    exit_code = EXIT_FAULT
    microbatch: int | None = None
    """Number of the microbatch whose values led to it, or None if none did."""


class RequestError(PipeEdgeError):
    """The user asked for something that cannot be done as asked."""

    exit_code = EXIT_REQUEST


class ScheduleError(RequestError):
    """Layers uncovered, overlapping, out of order or beyond the model; more stages than ranks."""


class ModelError(RequestError):
    """An unknown model name, or a configuration this package does not support."""


class WeightsError(RequestError):
    """A weights file that is missing, truncated, or whose tensors do not fit the model."""


class InputError(RequestError):
    """An input that cannot be read, is empty, or does not fit the model."""


class SpecError(RequestError):
    """A YAML document with missing, unknown or invalid contents."""


class InfeasibleError(PipeEdgeError):
    """The request is well formed, but no schedule can satisfy it."""

    exit_code = EXIT_INFEASIBLE


@dataclass(frozen=True)
class Account:
    """A rank's report of its own failure."""

    rank: int
    cause: str
    """Its line for the user."""


class PeerError(PipeEdgeError):
    """Another rank failed, or did not answer in time."""

    exit_code = EXIT_PEER

    def __init__(self, message: str, *, peer: int | None = None, account: Account | None = None) -> None:
        super().__init__(message)
        self.peer = peer
        """Rank at the other end of the connection that failed, or None if no connection did."""
        self.account = account
        """Report of the rank that failed, or None if it sent none."""


class PeerFailedError(PeerError):
    """A rank reported a failure, or its connection closed."""


class DeadlineError(PeerError):
    """A rank did not answer before the deadline."""


def exit_code(error: BaseException) -> int:
    """Return the process exit status for ``error``."""
    if isinstance(error, PipeEdgeError):
        return error.exit_code
    return EXIT_REQUEST if has_too_many_files(error) else EXIT_FAULT


def has_too_many_files(error: BaseException | None) -> bool:
    """Return whether ``error``, or one that led to it, says that this process may open no more files.

    Those of torch say so in words.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            return True
        if any(words in str(error) for words in _TOO_MANY_FILES):
            return True
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def one_line(error: BaseException) -> str:
    """Return ``error`` as one printable line, never empty, with line breaks and runs of blanks folded."""
    text = printable(" ".join(str(error).split()))
    if has_too_many_files(error):
        what = text if isinstance(error, PipeEdgeError) and text else "too many open files"
        return what if RAISE_FILE_LIMIT in what else f"{what}: {RAISE_FILE_LIMIT}"
    if isinstance(error, PipeEdgeError):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
