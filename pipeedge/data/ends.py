"""The two ends of a pipeline on the data rank: where its microbatches come from, and where its results go.

                 a finished input                           one without an end
    ItemSource   source.InputSource: files, in input order  requests that wait for an answer
    ResultSink   results.ResultWriter: rows of a file       the answers

A source is read as an ``ItemStream``. After a failure, another stream begins with the first item without a
result. A source that cannot read an item again leaves it to the ledger of the run to keep what was fed, or
makes others in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import torch

from pipeedge.base.crew import Crew
from pipeedge.base.payload import PixelTable
from pipeedge.base.text_lengths import TextLengths
from pipeedge.data.source import Group, InputSource, Microbatch, SkippedItem
from pipeedge.observe.lanes import DEFAULT_ROWS, Lane
from pipeedge.observe.pipeline_state import PipelineState
from pipeedge.observe.timeline import ThreadState
from pipeedge.observe.token_figures import TextState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["DataEnds", "ItemSource", "ItemStream", "QueueStream", "ResultSink"]


class ItemStream(Protocol):
    """The items of a source from some item on. Only the thread that feeds the pipeline takes them."""

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Record of each thread that reads ahead."""

    @property
    def fetching(self) -> ThreadState:
        """Activity of the feeding thread without a microbatch: it reads, waits for readers, or is idle."""

    def start(self, crew: Crew) -> None:
        """Begin to read ahead, unless that was done for another plan; close when ``crew`` is stopped."""

    def following(self) -> ItemStream:
        """Return the stream for a plan that takes over from that of this one; perhaps this one."""

    def next(self, microbatch_size: int) -> Group | None:
        """Wait for the next microbatch, of at most that many items, and return it; None after the last.

        Raises:
            InputError: An item cannot be read.
            Closed: The stream was closed meanwhile.
        """


class QueueStream:
    """A stream of what a queue makes when it is asked; no thread reads ahead.

    Args:
        wake: Lets the thread that waits for a microbatch look whether the stream is closed.
    """

    lanes: tuple[Lane, ...] = ()
    fetching = ThreadState.IDLE

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._closed = False

    def start(self, crew: Crew) -> None:
        """Have the stream closed when the crew stops."""
        crew.on_stop(self.close)

    def close(self) -> None:
        """Wake the thread that waits; no microbatch follows."""
        self._closed = True
        self._wake()


class ItemSource(Protocol):
    """Items for the pipeline to compute."""

    @property
    def total(self) -> int | None:
        """Number of items, including those that will turn out to be unreadable; None if there is no end."""

    @property
    def max_tokens(self) -> int | None:
        """Largest number of tokens of an item; None for images."""

    @property
    def lengths(self) -> str | None:
        """Histogram of the numbers of tokens of the items, or None if they do not differ or are unknown."""

    @property
    def pixels(self) -> PixelTable | None:
        """Values that the bytes of images stand for, or None if groups hold what the model takes."""

    @property
    def skipped(self) -> tuple[SkippedItem, ...]:
        """Items skipped so far because they could not be read."""

    def stream(self, *, position: int | None = None, rows: int = DEFAULT_ROWS) -> ItemStream:
        """Return the items from ``position`` on.

        Args:
            position: Position of the first item in the whole input; None for the first one of this source.
                A source whose items cannot be read again goes on with those that no stream has returned.
            rows: Number of activities that each thread keeps on record.
        """


class ResultSink(Protocol):
    """A destination of results; a context manager, which an exception leaves if no more will come."""

    @property
    def items(self) -> int:
        """Number of items written so far by this run."""

    @property
    def unfinished(self) -> Path | None:
        """Path of the rows that a later run can go on from, or None if there are none."""

    def add_dependencies(self, depends_on: Mapping[str, str]) -> None:
        """Hear what the results depend on, by what a message calls it, before the first of them.

        Raises:
            RequestError: The results of an earlier run, which this one goes on from, are of another kind.
        """

    def __enter__(self) -> ResultSink:
        """Open the sink."""

    def write(self, microbatch_number: int, outputs: torch.Tensor, microbatch: Microbatch) -> None:
        """Take the results [items, ...] of one microbatch; they come in the order in which it was fed."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Complete the results, unless there is an ``error``."""


@dataclass(frozen=True)
class DataEnds:
    """Input and results of a run on the data rank, checked before anybody else is kept waiting."""

    source: ItemSource
    sink: ResultSink
    compared: InputSource | None = None
    """First items, whose outputs are compared with float32; None if none are."""
    replaced: frozenset[Path] = frozenset()
    """Outputs that existed before the run."""
    notes: tuple[str, ...] = ()
    """Lines for the user about what an earlier run has left."""
    watcher: PipelineState | None = None
    """Hears of the schedule and the work of the stages, if somebody wants to."""
    held_out: InputSource | None = None
    """Last items, on which plans are tried; None if none are."""
    lengths: TextLengths | None = None
    """Lengths of the texts that are to be generated, or None if they are unknown, or none are."""
    text: Callable[[], TextState] | None = None
    """Function that returns how far the text is, where it is generated."""
    coming_bytes: int = 0
    """Memory that is going to be used besides what is used already, in bytes."""
