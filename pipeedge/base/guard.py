"""Run a program so that a failure is one line on standard error and an exit status."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from pipeedge.base.errors import (
    EXIT_FAULT,
    EXIT_OK,
    EXIT_PEER,
    PipeEdgeError,
    RequestError,
    exit_code,
    one_line,
)
from pipeedge.base.interrupt import INTERRUPTED, raise_interrupts
from pipeedge.base.streams import open_standard_streams, say

__all__ = ["end_with", "guard"]

_PR_SET_PDEATHSIG = 1
"""Constant of Linux's prctl.h."""


def guard(program: str, main: Callable[[], None], *, verbose: bool) -> int:
    """Run ``main`` and return the exit status; a failure is one line on standard error.

    Ctrl-C and SIGTERM end it without a word.

    Args:
        program: What the line begins with.
        main: Raises to fail.
        verbose: Print the traceback too.
    """
    open_standard_streams()
    try:
        raise_interrupts()
        _check_directory()
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else EXIT_OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if verbose:
            traceback.print_exc()
        line = one_line(error)
        is_ours = exit_code(error) == EXIT_FAULT and not isinstance(error, PipeEdgeError)
        if is_ours and not verbose:
            line = f"internal error: {line} (run again with --verbose to see where)"
        say(program, line)
        return exit_code(error)
    return 0


def _check_directory() -> None:
    """Check that the working directory exists: torch cannot be loaded without one.

    Raises:
        RequestError: It has been removed.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise RequestError("the directory in which this was started is gone: cd to another one") from None


def end_with(launcher: int) -> None:
    """Have the kernel end this process when its parent ends, even by SIGKILL, where the system is Linux.

    Args:
        launcher: Process that started this one, from a thread that lasts as long as itself.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before it was watched
        os._exit(EXIT_PEER)
