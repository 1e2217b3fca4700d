"""A bounded queue that can be closed, so that no thread waits on it forever.

put ──> [ · · ] ──> get          close(): both sides see Closed at once, whatever is queued
                                 finish(): getters drain what is queued, then see None
                                 finish_with(value): they see this value instead of what is queued or to come
                                 unbound(): putters never wait again
"""

from __future__ import annotations

import sys
from collections import deque
from threading import Condition
from typing import Generic, TypeVar

from pipeedge.base.crew import Closed

__all__ = ["Channel"]

T = TypeVar("T")


class Channel(Generic[T]):
    """A queue of at most ``capacity`` values between two threads."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"the capacity of a channel must be at least 1, not {capacity}")
        self._capacity = capacity
        self._values: deque[T] = deque()
        self._changed = Condition()
        self._finished = False
        self._closed = False

    def put(self, value: T) -> None:
        """Append ``value``; blocks while the channel is full.

        Raises:
            Closed: The channel was closed.
        """
        with self._changed:
            while len(self._values) >= self._capacity and not self._closed and not self._finished:
                self._changed.wait()
            if self._closed or self._finished:
                raise Closed
            self._values.append(value)
            if len(self._values) == 1:  # else nobody waits for one
                self._changed.notify_all()

    def get(self) -> T | None:
        """Return the oldest value, or None once the channel is finished and empty; blocks while empty.

        Raises:
            Closed: The channel was closed.
        """
        return next(iter(self.get_waiting(1)), None)

    def get_waiting(self, most: int) -> list[T]:
        """Return up to ``most`` of the oldest values, as many as there are; blocks while there is none.

        There is none once the channel is finished and empty.

        Raises:
            Closed: The channel was closed.
        """
        with self._changed:
            while not self._values and not self._finished and not self._closed:
                self._changed.wait()
            if self._closed:
                raise Closed
            was_full = len(self._values) == self._capacity
            values = [self._values.popleft() for _ in range(min(most, len(self._values)))]
            if was_full:  # else nobody waits for room
                self._changed.notify_all()
            return values

    @property
    def empty(self) -> bool:
        """Return whether the channel is empty at this moment."""
        with self._changed:
            return not self._values

    def finish(self) -> None:
        """Announce that no more values will come."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def finish_with(self, value: T) -> None:
        """Let ``value`` take the place of what is queued and to come; if nothing is either, do nothing."""
        with self._changed:
            if self._finished and not self._values:
                return
            self._values = deque([value])
            self._finished = True
            self._changed.notify_all()

    def unbound(self) -> None:
        """Let the channel hold any number of values from now on."""
        with self._changed:
            self._capacity = sys.maxsize
            self._changed.notify_all()

    def close(self) -> None:
        """Close the channel: threads that wait now or later get ``Closed``."""
        self.close_and_take()

    def close_and_take(self) -> list[T]:
        """Close the channel, and return the values that nobody has taken."""
        with self._changed:
            self._closed = True
            values = list(self._values)
            self._values.clear()
            self._changed.notify_all()
            return values
