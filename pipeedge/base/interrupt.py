"""Let Ctrl-C and SIGTERM end a program, wherever they find it.

    signal ──> is a module being imported? ──no──> KeyboardInterrupt ──> in a finalizer? ─no─> it ends
                    ^ │ yes                                                    │ yes
                    │ └─── 20 ms ───┐                                          │
                    └───────────────┴<─────────────────────────────────────────┘

A native module that is interrupted while it initialises reports that it cannot be imported. Libraries go on
without modules that cannot be imported, and with them the program that somebody wanted to end. In a callback
of the garbage collector, such as a finalizer, Python prints an exception and goes on.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
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
        if not isinstance(sys.unraisablehook, _Unraisable):
            sys.unraisablehook = _Unraisable(sys.unraisablehook)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal: raise ``KeyboardInterrupt``, once the main thread imports nothing."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT_SYSTEM:
            # Not a threading.Thread, whose locks the main thread may hold at this moment.
            _thread.start_new_thread(_try_again, (number,))
            return
        frame = frame.f_back
    raise KeyboardInterrupt


class _Unraisable:
    """Reports exceptions that cannot be raised, except interrupts, which are tried again.

    Args:
        others: Reports all other exceptions.
    """

    def __init__(self, others: Callable[[sys.UnraisableHookArgs], object]) -> None:
        self._others = others

    def __call__(self, ignored: sys.UnraisableHookArgs) -> None:
        """Handle an exception that Python is about to ignore."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and isinstance(ignored.exc_value, KeyboardInterrupt):
            _thread.start_new_thread(_try_again, (signal.SIGINT,))
        else:
            self._others(ignored)


def _try_again(number: int) -> None:
    time.sleep(_AGAIN_S)
    # To the main thread, which may be waiting in a system call that only a signal of its own ends.
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _end(number: int, frame: FrameType | None) -> None:
    del number, frame
    os._exit(INTERRUPTED)
