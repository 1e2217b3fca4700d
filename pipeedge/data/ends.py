"""The two ends of a pipeline on the data rank: where its microbatches come from, and where its results go.

                 a finished input                           one without an end
    ItemSource   DataSetSource: files, in input order       requests that wait for an answer
    ResultSink   results.ResultWriter: rows of a file       the answers

A source is read as a ``GroupStream``. After a failure it is read again, by another stream that begins with
the first item without a result, so a source keeps, or can read again, every item that the sink does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import torch

from pipeedge.base.crew import Crew
from pipeedge.base.payload import PixelTable
from pipeedge.data.read_ahead import ReadAhead, read_threads
from pipeedge.data.source import Group, InputSource, Microbatch, SkippedItem
from pipeedge.observe.lanes import DEFAULT_ROWS, Lane
from pipeedge.observe.timeline import ThreadState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeedge.base.schedule import Schedule
    from pipeedge.control.liveness import StageWork

__all__ = [
    "DataEnds",
    "DataSetSource",
    "DataSetStream",
    "GroupStream",
    "ItemSource",
    "ResultSink",
    "Watcher",
]


class GroupStream(Protocol):
    """The microbatches of a source from some item on. Only the thread that feeds the pipeline takes them."""

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Record of each thread that reads ahead."""

    @property
    def fetching(self) -> ThreadState:
        """Activity of the feeding thread without a microbatch: it reads items, or waits for them."""

    def wait_for_room(self) -> None:
        """Wait as long as the source wants nothing more to be under way.

        Raises:
            Closed: The stream was closed.
        """

    def fit(self, stages: int) -> None:
        """Fit a pipeline of ``stages`` from now on, which takes the place of the one before."""

    def start(self, crew: Crew) -> None:
        """Start the threads that read ahead, if there are any."""

    def wait(self) -> None:
        """Wait as long as there is nothing to take but more may come.

        Raises:
            Closed: The stream was closed meanwhile.
        """

    def take(self) -> Group | None:
        """Return the next microbatch, or None after the last. There may be fewer items in it than asked for.

        Raises:
            InputError: An item cannot be read.
            Closed: The stream was closed meanwhile.
        """


class ItemSource(Protocol):
    """Items for the pipeline to compute."""

    @property
    def total(self) -> int | None:
        """Number of items, including those that will turn out to be unreadable; None if there is no end."""

    @property
    def max_tokens(self) -> int | None:
        """Largest number of tokens of an item; None for images."""

    @property
    def pixels(self) -> PixelTable | None:
        """Values that the bytes of images stand for, or None if groups hold what the model takes."""

    @property
    def skipped(self) -> tuple[SkippedItem, ...]:
        """Items skipped so far because they could not be read."""

    def stream(
        self,
        microbatch_size: int,
        *,
        position: int | None = None,
        rows: int = DEFAULT_ROWS,
        stages: int = 1,
    ) -> GroupStream:
        """Return the microbatches from an item on.

        Args:
            microbatch_size: Largest number of items in a microbatch.
            position: Position of the item in the whole input; None for the first one of this source.
            rows: Number of activities that each thread keeps on record.
            stages: Number of stages, for sources that form their microbatches only when there is room.
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


class Watcher(Protocol):
    """Shows a pipeline that has no end."""

    def planned(self, schedule: Schedule) -> None:
        """Hear of the schedule of the pipeline from now on."""

    def heard(self, work: Mapping[int, StageWork]) -> None:
        """Hear how the stages have spent their time so far, by rank; any thread may tell."""

    def prepares(self, epoch: int, cause: str, lost: Sequence[int]) -> None:
        """Hear that an epoch is prepared, of a run that goes on after failures.

        Args:
            epoch: Number of the epoch.
            cause: Why the epoch before failed; empty for the first.
            lost: Ranks that were lost since.
        """

    def changed(self, epoch: int, cause: str) -> None:
        """Hear that another plan has taken the place of the one before, without a failure.

        Args:
            epoch: Number of its epoch.
            cause: Why it is better.
        """

    def goes_on(self, seconds: float, repeated: int) -> None:
        """Hear that the run goes on.

        Args:
            seconds: Seconds without a result.
            repeated: Number of microbatches that are computed again.
        """


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
    watcher: Watcher | None = None
    """Hears of the schedule and the work of the stages, if somebody wants to."""
    held_out: InputSource | None = None
    """Last items, on which plans are tried; None if none are."""


class DataSetStream:
    """The microbatches of a finished input. It never waits: items are there to be read until they end.

    Args:
        source: Input, which begins with the first item.
        microbatch_size: Number of items in a microbatch; only the last may have fewer.
        reading: Threads that read the items ahead, or None if each is read when it is needed.
    """

    def __init__(self, source: InputSource, microbatch_size: int, reading: ReadAhead | None = None) -> None:
        self._reading = reading
        self._groups = source.groups(microbatch_size, None if reading is None else reading.readings())

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Record of each thread that reads ahead."""
        return () if self._reading is None else self._reading.lanes

    @property
    def fetching(self) -> ThreadState:
        """Activity of the feeding thread without a microbatch."""
        return ThreadState.READ if self._reading is None else ThreadState.WAIT_INPUT

    def start(self, crew: Crew) -> None:
        """Start to read ahead."""
        if self._reading is not None:
            self._reading.start(crew)

    def wait_for_room(self) -> None:
        """Return at once."""

    def fit(self, stages: int) -> None:
        """Do nothing: the links hold back an input that is there already."""

    def wait(self) -> None:
        """Return at once."""

    def take(self) -> Group | None:
        """Return the next microbatch, or None after the last."""
        return next(self._groups, None)


class DataSetSource:
    """A finished input, whose items can be read again."""

    def __init__(self, source: InputSource) -> None:
        self._source = source

    @property
    def total(self) -> int:
        """Number of items."""
        return len(self._source)

    @property
    def max_tokens(self) -> int | None:
        """Number of tokens of the longest item; None for images."""
        return self._source.max_tokens

    @property
    def pixels(self) -> PixelTable | None:
        """Values that the bytes of images stand for."""
        return self._source.pixels

    @property
    def skipped(self) -> tuple[SkippedItem, ...]:
        """Items skipped so far, each once, however many streams have read it."""
        return self._source.skipped

    def stream(
        self,
        microbatch_size: int,
        *,
        position: int | None = None,
        rows: int = DEFAULT_ROWS,
        stages: int = 1,
    ) -> DataSetStream:
        """Return the microbatches from item ``position`` on, read ahead unless they are in memory."""
        del stages  # the links hold back an input that is there already
        rest = self._source if position is None else self._source.rest(position)
        if rest.in_memory:
            return DataSetStream(rest, microbatch_size)
        reading = ReadAhead(rest, microbatch_size, threads=read_threads(), rows=rows)
        return DataSetStream(rest, microbatch_size, reading)
