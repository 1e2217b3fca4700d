"""Waiting for what happens elsewhere: in another process, or in another thread."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 300.0
"""Far longer than anything takes on a very busy machine: only what hangs is ended by it."""


def until(happened: Callable[[], bool], what: str, within_s: float = LIMIT_S) -> None:
    """Look every few milliseconds until ``happened``; fail, saying ``what`` is missing, if it does not."""
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)
