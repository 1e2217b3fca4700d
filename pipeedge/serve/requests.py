"""The queue of requests: a source of items without an end, and the sink of their results.

    submit ──> waiting ──wait, when there is room──> under way ──feed──> pipeline
       └─ PendingAnswers                                 └────── write <── collect
             <──────────────────── answers ────────────────────┘

Any thread submits. The feeding thread takes microbatches, as long as not too many are under way; so what
waits can still change its company, or be cancelled. The collecting thread writes their results. Items under
way are kept until then, and another stream can feed them again after a failure. ``Backlog`` keeps the items;
this module is its threads: who waits for what, and whom an event wakes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch

from pipeedge.base.crew import Closed, Crew
from pipeedge.base.errors import InputError, PipeEdgeError, RequestError, one_line
from pipeedge.base.payload import PixelTable
from pipeedge.base.wording import count
from pipeedge.data.items import Item
from pipeedge.data.source import Group, Microbatch, SkippedItem
from pipeedge.observe.lanes import DEFAULT_ROWS, Lane
from pipeedge.observe.timeline import ThreadState
from pipeedge.serve.backlog import Backlog
from pipeedge.serve.batching import BatchLimits
from pipeedge.serve.flights import Entry, QueueState, deliver, found_of_items
from pipeedge.serve.pending import EndedError, PendingAnswers

__all__ = [
    "ExpiredError",
    "QueueFullError",
    "RequestQueue",
    "RequestStream",
]


class QueueFullError(RequestError):
    """Too many items wait."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds after which there may be room."""


class ExpiredError(RequestError):
    """The deadline of an item was over before it was computed."""


class _Waiter:
    """A thread that waits for room, in a line with others.

    Args:
        items: Number of items that it wants to add.
        lock: Lock of the queue.
    """

    def __init__(self, items: int, lock: threading.Lock) -> None:
        self.items = items
        self.woken = threading.Condition(lock)


class RequestQueue:
    """Items that wait for an answer; both ends of a pipeline.

    Args:
        limits: Limits of the queue and of its microbatches.
        max_tokens: Number of tokens of the longest item that will come; None for images.
        pixels: Values that the bytes of images stand for, or None if items hold what the model takes.
        class_names: Names of the classes, or None if the model does not define them.
        output_kind: What the outputs are, see ``ModelAnswer``.
        clock: Returns the time in seconds.
    """

    total = None
    skipped: tuple[SkippedItem, ...] = ()
    unfinished: Path | None = None

    def __init__(
        self,
        limits: BatchLimits,
        *,
        max_tokens: int | None = None,
        pixels: PixelTable | None = None,
        class_names: Sequence[str] | None = None,
        output_kind: str = "logits",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_tokens = max_tokens
        self.pixels = pixels
        self.started = threading.Event()
        """Set when the pipeline begins to take items."""
        self._limits = limits
        self._class_names = class_names
        self._output_kind = output_kind
        self._clock = clock
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        """Notified when the feeding thread may go on."""
        self._line: deque[_Waiter] = deque()
        """Threads that wait for room, in order of their arrival. Only the first one gets any: if others could
        take each place that becomes free, a request of many items would wait for ever.
        """
        self._backlog = Backlog(limits)
        self._widest = 0
        """Number of microbatches under way from which on no thread feeds another."""
        self._draining = False
        self._error: PipeEdgeError | None = None

    # -- any thread --------------------------------------------------------------------------------

    def submit(
        self, items: Sequence[Item], *, timeout_s: float | None = None, block: bool = False
    ) -> PendingAnswers:
        """Add ``items``, all or none, and return their answers, which are still to come.

        Callers that wait for room get it first come, first served. While one of them waits, callers that do
        not are refused.

        Args:
            items: Items that fit the model.
            timeout_s: Seconds after which they need not be computed any more.
            block: Whether to wait for room, rather than to refuse the items.

        Raises:
            InputError: There are more items than may ever wait.
            QueueFullError: There is no room for them now.
            EndedError: The pipeline takes no further items.
        """
        deadline_s = None if timeout_s is None else self._clock() + timeout_s
        self.check_count(len(items))
        answers = PendingAnswers(len(items), self._class_names, self._withdraw, self._output_kind)
        entries = Entry.of(items, answers)
        with self._lock:
            try:
                if block:
                    self._wait_for_room(len(items))
                if self._error is not None:
                    raise self._error
                if self._draining:
                    raise EndedError("the pipeline is ending and takes no further items")
                if (self._line and not block) or not self._backlog.offer(entries, deadline_s):
                    self._backlog.refuse(len(items))
                    raise QueueFullError(
                        f"{count(self._backlog.waiting, 'item')} wait already, and there is no room for "
                        f"{len(items)} more; try again later",
                        self._backlog.retry_after_s(),
                    )
                if self._backlog.has_room_under_way(self._widest):
                    self._work.notify_all()
            finally:
                self._notify_of_room()  # whoever is next in line may have room too
        return answers

    def _wait_for_room(self, items: int) -> None:
        if self._ended() or (not self._line and self._backlog.room >= items):
            return
        waiter = _Waiter(items, self._lock)
        self._line.append(waiter)
        try:
            waiter.woken.wait_for(
                lambda: self._ended() or (self._line[0] is waiter and self._backlog.room >= items)
            )
        finally:
            self._line.remove(waiter)

    def check_count(self, items: int) -> None:
        """Refuse a request with more items than may ever wait.

        Raises:
            InputError: There are too many.
        """
        if items > self._limits.max_waiting:
            raise InputError(
                f"{count(items, 'item')} in one request: at most {self._limits.max_waiting} may wait; "
                "send several requests"
            )

    def drain(self) -> None:
        """Take no further items; the stream ends when all that wait have been fed."""
        with self._lock:
            self._draining = True
            self._notify_all()

    def abandon(self) -> None:
        """Take no further items, and give up those that wait; what is under way is still answered."""
        with self._lock:
            self._draining = True
            dropped = self._backlog.drop_waiting()
            self._notify_all()
        self._reject(dropped, EndedError("the pipeline was closed before the item was computed"))

    def fail(self, error: BaseException) -> None:
        """Give up all items without an answer, and take no others, because of ``error``."""
        cause = error if isinstance(error, PipeEdgeError) else EndedError(one_line(error))
        with self._lock:
            self._draining = True
            self._error = self._error or cause
            dropped = self._backlog.drop_all()
            self._notify_all()
        self._reject(dropped, cause)

    def state(self) -> QueueState:
        """Return the state of this moment."""
        with self._lock:
            return self._backlog.state()

    def seconds_since_result(self) -> float:
        """Return the seconds since the last result; infinite before the first."""
        with self._lock:
            return self._clock() - self._backlog.counts.written_at

    def _ended(self) -> bool:
        return self._draining or self._error is not None

    def _notify_all(self) -> None:
        self._work.notify_all()
        for waiter in self._line:
            waiter.woken.notify()

    def _withdraw(self, answers: PendingAnswers) -> None:
        """Let the items leave the queue whose answers nobody wants."""
        with self._lock:
            self._backlog.withdraw(answers)
            self._work.notify_all()
            self._notify_of_room()

    def _reject(self, entries: Sequence[Entry], error: PipeEdgeError) -> None:
        with self._lock:
            claimed = self._backlog.give_up(entries, error)
        deliver(claimed)

    # -- the feeding thread --------------------------------------------------------------------------

    def stream(
        self,
        microbatch_size: int,
        *,
        position: int | None = None,
        rows: int = DEFAULT_ROWS,
        stages: int = 1,
    ) -> RequestStream:
        """Return the microbatches of what waits, now or later.

        Args:
            microbatch_size: Largest number of items in a microbatch, at least that of the limits.
            position: Position of the first item to feed among all that were fed; those from there on that
                have no results are fed again. None for the first one without a result.
            rows: Not used, as no thread reads ahead.
            stages: Number of stages, each of which has one microbatch to compute and another that waits.
        """
        del rows
        if microbatch_size < self._limits.max_items:
            raise ValueError(f"microbatches of {self._limits.max_items} items do not fit {microbatch_size}")
        with self._lock:
            self._backlog.feed_again(position)
        return RequestStream(self, self.window(stages))

    def window(self, stages: int) -> int:
        """Return the largest number of microbatches under way in a pipeline of ``stages``."""
        window = 2 * stages + 1
        with self._lock:
            self._widest = max(self._widest, window)
        return window

    def wait_for_room(self, window: int, is_closed: Callable[[], bool]) -> None:
        """Wait until fewer than ``window`` microbatches are under way, or some are to be fed again.

        Raises:
            Closed: The stream was closed.
        """
        with self._lock:
            self._work.wait_for(lambda: is_closed() or self._backlog.has_room_under_way(window))
            if is_closed():
                raise Closed

    def next_flight(self, window: int, is_closed: Callable[[], bool]) -> Group | None:
        """Wait for items and for room in the pipeline, and return the next microbatch; None after the last.

        Args:
            window: Largest number of microbatches under way.
            is_closed: Whether the stream was closed.

        Raises:
            Closed: The stream was closed.
        """
        while True:
            with self._lock:
                self._work.wait_for(lambda: is_closed() or self._is_ready(window))
                if is_closed():
                    raise Closed
                expired, flight = list[Entry](), self._backlog.next_again()
                if flight is None:
                    now = self._clock()
                    expired, flight = self._backlog.expire(now), self._backlog.form(now)
                    self._notify_of_room()
                is_over = flight is None and self._draining
            if expired:
                self._reject(expired, ExpiredError("the deadline was over before the item was computed"))
            if flight is not None:
                return flight.group
            if is_over:
                return None

    def wake(self) -> None:
        """Let the feeding thread look again whether its stream was closed."""
        with self._lock:
            self._work.notify_all()

    def _is_ready(self, window: int) -> bool:
        return self._backlog.has_next(window) or (self._draining and not self._backlog.waiting)

    def _notify_of_room(self) -> None:
        if self._line and self._backlog.room >= self._line[0].items:
            self._line[0].woken.notify()

    # -- the collecting thread -----------------------------------------------------------------------

    @property
    def items(self) -> int:
        """Number of items that have an answer."""
        return self._backlog.counts.answered

    def add_dependencies(self, depends_on: Mapping[str, str]) -> None:
        """Do nothing: answers are not kept for a later run."""

    def __enter__(self) -> RequestQueue:
        """Begin to take items."""
        self.started.set()
        return self

    def write(self, microbatch_number: int, outputs: torch.Tensor, microbatch: Microbatch) -> None:
        """Answer the items of the oldest microbatch under way."""
        found = found_of_items(outputs, microbatch)
        with self._lock:
            if not self._backlog.is_due(microbatch.numbers):
                raise PipeEdgeError(f"received results of microbatch {microbatch_number}, which is not due")
            claimed = self._backlog.land(found, self._clock())
            self._work.notify_all()
        deliver(claimed)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Fail all items that have no answer: none will come."""
        self.fail(error if error is not None else EndedError("the pipeline has ended"))


class RequestStream:
    """Microbatches of requests, for the thread that feeds the pipeline.

    Args:
        queue: Queue of the requests.
        window: Largest number of microbatches under way.
    """

    lanes: tuple[Lane, ...] = ()
    fetching = ThreadState.IDLE

    def __init__(self, queue: RequestQueue, window: int) -> None:
        self._queue = queue
        self._window = window
        self._closed = False
        self._next: Group | None = None

    def fit(self, stages: int) -> None:
        """Fit a pipeline of ``stages`` from now on, which takes the place of the one before."""
        self._window = self._queue.window(stages)

    def start(self, crew: Crew) -> None:
        """Have the stream closed when the crew stops."""
        crew.on_stop(self.close)

    def wait_for_room(self) -> None:
        """Wait for room in the pipeline.

        Raises:
            Closed: The stream was closed.
        """
        self._queue.wait_for_room(self._window, lambda: self._closed)

    def wait(self) -> None:
        """Wait for items and for room in the pipeline.

        Raises:
            Closed: The stream was closed.
        """
        self._next = self._queue.next_flight(self._window, lambda: self._closed)

    def take(self) -> Group | None:
        """Return the microbatch that ``wait`` has found, or None if no more will come."""
        return self._next

    def close(self) -> None:
        """Wake the thread that waits."""
        self._closed = True
        self._queue.wake()
