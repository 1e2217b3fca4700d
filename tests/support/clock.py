"""A clock that the test moves."""

from __future__ import annotations


class Clock:
    """Seconds that pass only as the test says."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
