"""Tell the collector of Python and the heap of glibc how this program uses memory."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["keep_freed_memory", "lasting_imports", "return_freed_memory", "share_one_heap"]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
"""Constants of glibc's malloc.h."""


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Keep Python's collector of cycles from looking for garbage in what the body imports.

    Nothing of it is ever freed, and there is much: torch is imported in 6 % less time without the collector,
    and a full collection later would look through hundreds of thousands of objects.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def share_one_heap() -> None:
    """Let all threads of this process allocate from one heap, if the C library is glibc.

    By default each thread gets its own heap, and cannot use memory that another thread has freed: the
    activations of the computing thread would come on top of what loading left behind (46 MB for a quarter
    of ViT-Large). Only one thread computes, so there is no contention for the heap's lock.
    """
    mallopt = _function("mallopt")
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Keep freed memory in the process, if the C library is glibc.

    A training or a stage frees and allocates the same tensors over and over, and getting new pages from the
    system for each would cost up to a tenth of the time and more (docs/training.md).
    """
    mallopt = _function("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 << 20)


def return_freed_memory() -> None:
    """Return freed memory to the system now, before an allocation for which the free pieces are too small."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _function(name: str) -> Callable[..., Any] | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)
