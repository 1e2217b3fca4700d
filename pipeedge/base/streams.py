"""Standard input, output and error, including closed streams, full disks and readers that go away.

A *notice* reports what a program is doing. If it cannot be printed, it is dropped and the program goes on. A
*result* is what the user asked for on standard output: either it is printed, or the program fails with one
line. A reader that goes away, as ``head`` does once it has seen enough, is never a failure; it ends a program
whose results come one after the other, as Ctrl-C does.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import warnings
from contextlib import suppress
from typing import NoReturn, TextIO

from pipeedge.base.errors import PipeEdgeError, exit_code
from pipeedge.base.wording import printable

__all__ = [
    "end",
    "log_warnings",
    "open_standard_streams",
    "pass_on",
    "print_data",
    "print_notice",
    "print_result",
    "say",
    "stop_printing",
    "unprinted",
]


def open_standard_streams() -> None:
    """Open descriptors 0, 1 and 2 if they are closed, so that no file or socket takes their place.

    Each is opened in the wrong direction: using it fails, as it would on a closed stream.
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


def log_warnings(program: str, level: str = "warning") -> None:
    """Print the warnings of our own code, and nothing that libraries say about the data they are given.

    Anybody may send a server damaged images, or numbers out of range. The reply says what is wrong with them;
    warnings would only fill its standard error.

    Args:
        program: What each line begins with.
        level: Least level of what is printed: error, warning, info or debug; the last two include what
            libraries log.
    """
    logging.basicConfig(format=f"{program}: %(message)s", level=level.upper())
    warnings.filterwarnings("ignore", module=r"(PIL|pillow_heif)\b")
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"(pipeedge|numpy|transformers)\b")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)


def say(program: str, line: str) -> None:
    """Print a line on standard error, prefixed with the name of the program, if it can be printed."""
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
    """Print the output of another process on the stream it came from, if it can be printed."""
    if not error:
        print_notice(text, end="")
    else:
        with suppress(OSError, ValueError):
            print(text, end="", file=sys.stderr, flush=True)


def print_result(text: str, *, end: str = "\n") -> None:
    """Print ``text``, a result that the user asked for, on standard output.

    Raises:
        PipeEdgeError: The text cannot be printed.
    """
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        stop_printing()
        if not isinstance(error, BrokenPipeError):
            raise unprinted(error) from error


def print_data(data: bytes) -> None:
    """Print one of many results on standard output.

    Raises:
        KeyboardInterrupt: The reader has gone away, so nobody wants the others.
        PipeEdgeError: It cannot be printed.
    """
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        stop_printing()
        raise KeyboardInterrupt from None
    except OSError as error:
        stop_printing()
        raise unprinted(error) from error


def unprinted(error: OSError) -> PipeEdgeError:
    """Return the error to report when a result cannot be printed on standard output."""
    why = "it is closed" if error.errno == errno.EBADF else (error.strerror or str(error)).lower()
    return PipeEdgeError(f"standard output cannot be written: {why}")


def stop_printing() -> None:
    """Discard everything still buffered for standard output and everything printed there later."""
    _discard(sys.stdout)


def _discard(stream: TextIO) -> None:
    with suppress(OSError, ValueError):  # the stream has no file descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def end(program: str, status: int) -> NoReturn:
    """End the process with ``status``, or with a failure if buffered results cannot be printed."""
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
        _discard(sys.stderr)  # otherwise the interpreter would flush again at exit, and fail
    if status or threading.active_count() > 1:
        # A thread may be blocked inside gloo, where nothing can wake it. All clean-up is done by now.
        os._exit(status)
    sys.exit(0)
