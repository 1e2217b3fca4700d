"""Tell glibc what to do with freed memory during a training; does nothing on other systems."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["keep_freed_memory", "return_freed_memory"]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""Constants of glibc's malloc.h."""


def keep_freed_memory() -> None:
    """Keep freed memory in the process.

    A training frees and allocates the same tensors over and over, and getting new pages from the system for
    each would cost more than a tenth of the time (docs/training.md).
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
