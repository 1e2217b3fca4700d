"""Let Ctrl-C and SIGTERM end a program, and not be lost while modules are imported.

    signal ──> is a module being imported? ──no──> KeyboardInterrupt in the main thread
                      │ yes       ^
                      └── 20 ms ──┘

A native module that is interrupted while it initialises reports that it cannot be imported. Libraries go on
without modules that cannot be imported, and with them the program that somebody wanted to end.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType

__all__ = ["INTERRUPTED", "ending_at_once", "interrupt", "raise_interrupts", "start"]

INTERRUPTED = 130
"""Exit status after Ctrl-C or SIGTERM, as shells have it."""
_AGAIN_S = 0.02
"""Seconds until an interrupt that came during an import is tried again."""
_IMPORT_SYSTEM = "<frozen importlib._bootstrap>"
"""File name of Python's own functions that import a module, in tracebacks."""
_ENDING = (signal.SIGINT, signal.SIGTERM)


def start(module: str, function: str = "main") -> None:
    """Import a program and run it; a signal that comes while it is imported ends the process at once.

    Args:
        module: Full name of the program's module.
        function: Function of the module that runs the program and ends the process.
    """
    with ending_at_once():
        program: Callable[[], None] = getattr(import_module(module), function)
    program()


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the process while the body imports modules: there is nothing to clean up."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_interrupts() -> None:
    """Let Ctrl-C and SIGTERM raise ``KeyboardInterrupt`` from now on, unless they are ignored.

    Other handlers than Python's own stay. Does nothing outside of the main thread, which alone may ask for
    signals.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, interrupt)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal: raise ``KeyboardInterrupt``, once the main thread imports nothing."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT_SYSTEM:
            # Not a threading.Thread, whose locks the main thread may hold at this moment.
            _thread.start_new_thread(_try_again, (number,))
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _try_again(number: int) -> None:
    time.sleep(_AGAIN_S)
    # To the main thread, which may be waiting in a system call that only a signal of its own ends.
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _end(number: int, frame: FrameType | None) -> None:
    del number, frame
    os._exit(INTERRUPTED)
