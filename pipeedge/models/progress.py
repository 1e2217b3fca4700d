"""A progress bar in bytes, for weights that are fetched, converted or loaded."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["ByteBar"]


class ByteBar:
    """A progress bar on standard error, if that is a terminal; a context manager.

    Args:
        label: Text before the bar.
        total: Total number of bytes, or None if it is not known.
        initial: Number of bytes that were present before.
        delay_s: Seconds after which the bar appears; shorter work shows none.
    """

    def __init__(self, label: str, total: int | None, initial: int = 0, delay_s: float = 0.0) -> None:
        self._bar: Any = None
        if sys.stderr is None or not sys.stderr.isatty():
            return
        from tqdm import tqdm

        self._bar = tqdm(
            desc=label,
            total=total,
            initial=initial,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            delay=delay_s,
        )

    def __enter__(self) -> ByteBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int) -> None:
        """Add ``count`` completed bytes."""
        if self._bar is not None:
            self._bar.update(count)
