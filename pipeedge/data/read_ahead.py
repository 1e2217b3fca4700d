"""Reading ahead: items are read in separate threads, a bounded number before they are needed.

    items, in order ──┬─> [read 0] ─┐
                      ├─> [read 1] ─┼─> at most ``ahead`` read or being read ──> take, in order
                      └─> [read 2] ─┘

Decoding an image takes longer than many stages and needs no result of the pipeline, so it proceeds while
microbatches are computed. An unreadable item is passed on as a value and judged in its turn, so the same
item fails first for any number of threads.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator

import torch

from pipeedge.base.crew import Closed, Crew
from pipeedge.data.items import Reading
from pipeedge.data.source import InputSource
from pipeedge.observe.lanes import DEFAULT_ROWS, READ_AHEAD, Lane
from pipeedge.observe.timeline import LaneId, LaneKind, ThreadState

__all__ = ["ReadAhead", "read_threads"]

_MOST_THREADS = 4
"""Largest number of threads. More would take processor time from a stage on this rank, and more memory.
"""


def read_threads() -> int:
    """Return the number of threads that read the input: as many as this rank computes with, up to four."""
    return min(_MOST_THREADS, torch.get_num_threads())


class ReadAhead:
    """Reader of the items of ``source``, once and in order.

    Args:
        source: The input.
        microbatch_size: Number of items in a microbatch, which is how many are read ahead.
        threads: Number of reading threads.
        clock: Returns the time in seconds.
        rows: Number of activities that each thread keeps on record.
    """

    def __init__(
        self,
        source: InputSource,
        microbatch_size: int,
        *,
        threads: int,
        clock: Callable[[], float] = time.perf_counter,
        rows: int = DEFAULT_ROWS,
    ) -> None:
        self._source = source
        self._microbatch_size = microbatch_size
        self._ahead = max(microbatch_size, threads)
        self._changed = threading.Condition()
        self._next_read = 0
        self._next_taken = 0
        self._read: dict[int, Reading] = {}
        self._closed = False
        self.lanes = tuple(
            Lane(LaneId(LaneKind.READ, thread=number), READ_AHEAD, clock, rows)
            for number in range(min(threads, len(source)))
        )
        """Record of each thread's activities. Items are counted to microbatches as if none were skipped."""

    def start(self, crew: Crew) -> None:
        """Start reading, in threads of ``crew``."""
        crew.on_stop(self.close)
        for lane in self.lanes:
            crew.start(lane.lane.label, functools.partial(self.run, lane))

    def readings(self) -> Iterator[Reading]:
        """Yield every item, or why it cannot be read, in order; blocks until the next one is read.

        Raises:
            Closed: The reader was closed.
        """
        for number in range(len(self._source)):
            with self._changed:
                self._changed.wait_for(lambda number=number: self._closed or number in self._read)  # type: ignore[misc]
                if self._closed:
                    raise Closed
                reading = self._read.pop(number)
                self._next_taken = number + 1
                self._changed.notify_all()
            yield reading

    def run(self, lane: Lane) -> None:
        """Read items in the calling thread until none are left.

        Raises:
            Closed: The reader was closed.
        """
        lane.begin()
        while (number := self._claim()) is not None:
            lane.enter(ThreadState.READ)
            reading = self._source.attempt(number)
            with self._changed:
                self._read[number] = reading
                self._changed.notify_all()
            lane.finish(number // self._microbatch_size, 1)

    def close(self) -> None:
        """Stop reading, and wake waiting threads."""
        with self._changed:
            self._closed = True
            self._read.clear()
            self._changed.notify_all()

    def _claim(self) -> int | None:
        """Return the next item to read, once there is room for it, or None after the last."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or self._next_read == len(self._source)
                    or self._next_read < self._next_taken + self._ahead
                )
            )
            if self._closed:
                raise Closed
            if self._next_read == len(self._source):
                return None
            self._next_read += 1
            return self._next_read - 1
