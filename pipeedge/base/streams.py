"""Standard input, output and error: closed ones, full disks, and readers that go away.

A *notice* tells what a program does. One that cannot be printed is dropped, and the program goes on. A
*result* is what the user asked for on standard output: it is printed, or the program fails with a line.
A reader that goes away, as ``head`` does when it has seen enough, is never a failure.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn, TextIO

from pipeedge.base.errors import PipeEdgeError, exit_code
from pipeedge.base.wording import printable

__all__ = [
    "end",
    "open_standard_streams",
    "pass_on",
    "print_notice",
    "print_result",
    "say",
    "stop_printing",
    "unprinted",
]


def open_standard_streams() -> None:
    """Open descriptors 0, 1 and 2 where they are closed, so that no file or socket takes their place.

    They are opened the wrong way round: what is written there fails, as it would on a closed stream.
    """
    for number, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, mode)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    # Python sets these to None where the descriptor was closed when it started.
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def say(program: str, line: str) -> None:
    """Print a line for the user on standard error, after the name of the program, if it can be printed."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(f"{program}: {printable(line)}", file=sys.stderr, flush=True)


def print_notice(text: str, *, end: str = "\n") -> None:
    """Print ``text`` on standard output, if it can be printed."""
    try:
        print(text, end=end, flush=True)
    except (OSError, ValueError):
        stop_printing()


def pass_on(text: str, *, error: bool) -> None:
    """Print what another process has printed, on the same stream, if it can be printed."""
    if not error:
        print_notice(text, end="")
    else:
        with suppress(OSError, ValueError):
            print(text, end="", file=sys.stderr, flush=True)


def print_result(text: str, *, end: str = "\n") -> None:
    """Print ``text``, which the user asked for, on standard output.

    Raises:
        PipeEdgeError: it cannot be printed.
    """
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        stop_printing()
        if not isinstance(error, BrokenPipeError):
            raise unprinted(error) from error


def unprinted(error: OSError) -> PipeEdgeError:
    """Return the failure to print a result on standard output as an error for the user."""
    why = "it is closed" if error.errno == errno.EBADF else (error.strerror or str(error)).lower()
    return PipeEdgeError(f"standard output cannot be written: {why}")


def stop_printing() -> None:
    """Throw away what is still to be printed on standard output, and what will be."""
    _discard(sys.stdout)


def _discard(stream: TextIO) -> None:
    with suppress(OSError, ValueError):  # it is not a file of the operating system
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def end(program: str, status: int) -> NoReturn:
    """End the process with ``status``, or with a failure if results are left that cannot be printed."""
    try:
        sys.stdout.flush()
    except OSError as error:
        stop_printing()
        if not isinstance(error, BrokenPipeError):
            say(program, str(unprinted(error)))
            status = status or exit_code(unprinted(error))
    try:
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)  # the interpreter would try again, and fail
    if status or threading.active_count() > 1:
        # A thread may be blocked inside gloo, where nothing can wake it; what must be removed is removed.
        os._exit(status)
    sys.exit(0)
