"""The queue of requests: a source of items without an end, and the sink of their results.

    submit ──────────────┐
    open, reserve, put ──┴> waiting ──next, when there is room──> feed ──> pipeline ──> collect
       └─ PendingAnswers <────────────────── answers ─────────────────────────── write <── ┘

Any thread submits items, or opens a request whose items it puts there part by part. The feeding thread takes
microbatches, as long as not too many are under way; so what waits can still change its company, or be
cancelled. From then on the ledger of the run keeps them, also through a failure, and the collecting thread
writes their results once. ``Backlog`` keeps what waits, and who asks; this module is its threads: who waits
for what, and whom an event wakes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch

from pipeedge.base.crew import Closed
from pipeedge.base.errors import InputError, PipeEdgeError, RequestError, one_line
from pipeedge.base.payload import PixelTable
from pipeedge.base.wording import count
from pipeedge.data.ends import QueueStream
from pipeedge.data.items import Item
from pipeedge.data.source import Microbatch, SkippedItem
from pipeedge.observe.lanes import DEFAULT_ROWS
from pipeedge.serve.backlog import Backlog
from pipeedge.serve.batching import BatchLimits
from pipeedge.serve.in_flight import Entry, QueueState, RequestGroup, deliver, found_of_items
from pipeedge.serve.pending import EndedError, Found, PendingAnswers

__all__ = [
    "ExpiredError",
    "QueueFullError",
    "RequestQueue",
    "RequestStream",
]


_MOST_ITEMS = 2048
"""Number of items that one request may always have, as many as clients of OpenAI send."""


class QueueFullError(RequestError):
    """Too many items or requests wait."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Seconds after which there may be room."""


class ExpiredError(RequestError):
    """The deadline of an item was over before it was computed."""


class _Waiter:
    """A place in the line for room.

    Args:
        answers: Answers to the items that need room.
        items: Number of these items.
        given: Called when they have it, with the lock of the queue.
        woken: Notified when the queue ends, or None if nobody waits for that.
        most_queued: Number of items that the request may have in the queue with these, or None for any.
    """

    def __init__(
        self,
        answers: PendingAnswers,
        items: int,
        given: Callable[[], object],
        *,
        woken: threading.Condition | None = None,
        most_queued: int | None = None,
    ) -> None:
        self.answers = answers
        self.items = items
        self.given = given
        self.woken = woken
        self._most_queued = most_queued

    @property
    def may_go(self) -> bool:
        """Whether the request has few enough items in the queue to get room for others."""
        return self._most_queued is None or self.answers.queued + self.items <= self._most_queued


class RequestQueue:
    """Items that wait for an answer; both ends of a pipeline.

    A request of many items brings them in parts. Its later parts get room in turn with other requests, and
    only while few of its own items wait, so it keeps nobody from being answered.

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
        self._class_names = class_names
        self._output_kind = output_kind
        self._clock = clock
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        """Notified when the feeding thread may go on."""
        self._line: deque[_Waiter] = deque()
        """Those who wait for room, in order of their arrival. Only the first one that may go gets any: if
        others could take each place that becomes free, one with many items would wait for ever.
        """
        self._backlog = Backlog(limits)
        self.limits = limits
        """Limits of the queue and of its microbatches."""
        self.part_size = min(limits.max_waiting, max(limits.max_waiting // 8, limits.max_items))
        """Largest number of items that a request of many should bring at once."""
        self._share = min(limits.max_waiting, max(limits.max_waiting // 4, 2 * self.part_size))
        """Largest number of items of one request in the queue."""
        self.most_items = max(limits.max_waiting, _MOST_ITEMS)
        """Largest number of items of one request."""
        self._draining = False
        self._error: PipeEdgeError | None = None

    # -- any thread --------------------------------------------------------------------------------

    def submit(
        self, items: Sequence[Item], *, timeout_s: float | None = None, block: bool = False
    ) -> PendingAnswers:
        """Add ``items``, all at once or none, and return their answers, which are still to come.

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
        if len(items) > self.limits.max_waiting:
            raise InputError(
                f"{count(len(items), 'item')} at once: at most {self.limits.max_waiting} may wait; "
                "ask about them in parts"
            )
        answers = self._answers(len(items), timeout_s)
        with self._lock:
            self._check_open()
            if self._has_room(answers, len(items)):
                self._enter(answers, items)
            elif block:
                self._wait_and_enter(answers, items)
            else:
                self._backlog.refuse(len(items))
                raise QueueFullError(
                    f"{count(self._backlog.waiting, 'item')} wait already, and there is no room for "
                    f"{len(items)} more; try again later",
                    self._backlog.retry_after_s(),
                )
        return answers

    def open(self, items: int, *, timeout_s: float | None = None) -> PendingAnswers:
        """Accept a request of ``items`` that ``put`` brings later, and return their answers.

        From now on it counts as a request that waits; it is answered even if the pipeline is told to end.

        Args:
            items: Number of its items.
            timeout_s: Seconds after which they need not be computed any more.

        Raises:
            InputError: There are more items than one request may have.
            QueueFullError: Too many requests wait.
            EndedError: The pipeline takes no further requests.
        """
        if items > self.most_items:
            raise InputError(
                f"{count(items, 'item')} in one request: at most {self.most_items:,} are answered; send "
                "several requests"
            )
        answers = self._answers(items, timeout_s)
        with self._lock:
            self._check_open()
            if self._backlog.requests_waiting >= self.limits.max_waiting:
                self._backlog.refuse(items)
                raise QueueFullError(
                    f"{count(self._backlog.requests_waiting, 'request')} wait already; try again later",
                    self._backlog.retry_after_s(),
                )
            self._backlog.open(answers)
        return answers

    def reserve(self, answers: PendingAnswers, items: int, wake: Callable[[], object]) -> bool:
        """Keep room for ``items`` of a request, at most ``part_size``, before they are prepared.

        Args:
            answers: The request.
            items: Number of the items.
            wake: Called by any thread when the request has got room for them that it did not get at once.

        Returns:
            Whether there is room now. If not, the request waits for it in turn.
        """
        with self._lock:
            if self._has_room(answers, items, self._share):
                return True
            if answers.unclaimed:
                self._line.append(_Waiter(answers, items, wake, most_queued=self._share))
            return False

    def put(self, answers: PendingAnswers, found: Sequence[Item | InputError], first: int) -> None:
        """Add items of a request, as many as there is room for by ``reserve``.

        Args:
            answers: The request, which may have been given up.
            found: The items, or why there is none.
            first: Place of the first one among the answers.
        """
        wrong: list[tuple[int, Found]] = []
        with self._lock:
            if not answers.unclaimed:
                return
            places, items = [], list[Item]()
            for place, each in enumerate(found, start=first):
                if isinstance(each, Item):
                    places.append(place)
                    items.append(each)
                else:
                    wrong.append((place, each))
            if wrong:
                self._backlog.fail(answers, len(wrong))
                self._give_room()
                self._work.notify_all()  # it may have been the last one
            self._put(answers, items, places)
        answers.put(wrong)

    def _answers(self, items: int, timeout_s: float | None) -> PendingAnswers:
        deadline_s = None if timeout_s is None else self._clock() + timeout_s
        return PendingAnswers(items, self._class_names, self._withdraw, self._output_kind, deadline_s)

    def _check_open(self) -> None:
        """Raise an error if the pipeline takes no further requests."""
        if self._error is not None:
            raise self._error
        if self._draining:
            raise EndedError("the pipeline is ending and takes no further items")

    def _put(self, answers: PendingAnswers, items: Sequence[Item], places: Sequence[int]) -> None:
        self._backlog.offer(Entry.of(items, answers, places), answers.deadline_s)
        self._work.notify_all()

    def _has_room(self, answers: PendingAnswers, items: int, most_queued: int | None = None) -> bool:
        """Keep room for items, if there is some and nobody else waits for it. Return whether there is."""
        waiter = _Waiter(answers, items, lambda: None, most_queued=most_queued)
        if self._line or not waiter.may_go or self._backlog.room < items:
            return False
        self._backlog.reserve(answers, items)
        return True

    def _enter(self, answers: PendingAnswers, items: Sequence[Item]) -> None:
        """Add all items of a request at once, into room that was kept for them."""
        self._backlog.open(answers)
        self._put(answers, items, range(len(items)))

    def _wait_and_enter(self, answers: PendingAnswers, items: Sequence[Item]) -> None:
        """Wait for room, and add all items of a request in its turn.

        Raises:
            EndedError: The pipeline takes no further items.
        """
        woken = threading.Condition(self._lock)

        def enter() -> None:
            self._enter(answers, items)
            woken.notify()

        waiter = _Waiter(answers, len(items), enter, woken=woken)
        self._line.append(waiter)
        try:
            woken.wait_for(lambda: waiter not in self._line or self._ended())
            if waiter in self._line:
                self._check_open()
        except BaseException:
            if waiter in self._line:
                self._line.remove(waiter)
                self._give_room()  # to whoever is next
            else:
                self._backlog.withdraw(answers)
            raise

    def _give_room(self) -> None:
        """Keep room for those whose turn it is, and wake them."""
        for waiter in tuple(self._line):
            if not waiter.may_go:
                continue  # until more of its own items are under way
            if waiter.woken is not None and self._ended():
                continue  # its request was not accepted before the end
            if self._backlog.room < waiter.items:
                break
            self._line.remove(waiter)
            self._backlog.reserve(waiter.answers, waiter.items)
            waiter.given()

    def drain(self) -> None:
        """Take no further requests; the stream ends when all items of those that wait have been fed."""
        with self._lock:
            self._draining = True
            self._notify_all()

    def abandon(self) -> None:
        """Take no further requests, and give up those that wait; what is under way is still answered."""
        error = EndedError("the pipeline was closed before the item was computed")
        with self._lock:
            self._draining = True
            dropped = self._backlog.drop_waiting()
            unprepared = [answers for answers in self._backlog.requests if answers.unfed]
            self._notify_all()
        self._reject(dropped, error)
        _fail_all(unprepared, error)

    def fail(self, error: BaseException) -> None:
        """Give up all items without an answer, and take no others, because of ``error``."""
        cause = error if isinstance(error, PipeEdgeError) else EndedError(one_line(error))
        with self._lock:
            self._draining = True
            self._error = self._error or cause
            dropped = self._backlog.drop_waiting()
            requests = self._backlog.requests
            self._notify_all()
        self._reject(dropped, cause)
        _fail_all(requests, cause)

    @property
    def error(self) -> PipeEdgeError | None:
        """Error of all items that have no answer, once the pipeline has failed or ended."""
        with self._lock:
            return self._error

    def state(self) -> QueueState:
        """Return the state of this moment."""
        with self._lock:
            return self._backlog.state()

    @property
    def is_ending(self) -> bool:
        """Whether no further requests are taken."""
        return self._ended()

    @property
    def lengths(self) -> str | None:
        """Histogram of the numbers of tokens of the items that were answered lately; None if unknown."""
        if self.max_tokens is None:
            return None
        with self._lock:
            return self._backlog.counts.lengths.histogram(self._clock())

    def seconds_since_result(self) -> float:
        """Return the seconds since the last result; infinite before the first."""
        with self._lock:
            return self._clock() - self._backlog.counts.written_at

    def _ended(self) -> bool:
        return self._draining or self._error is not None

    def _notify_all(self) -> None:
        self._work.notify_all()
        for waiter in self._line:
            if waiter.woken is not None:
                waiter.woken.notify()

    def _withdraw(self, answers: PendingAnswers) -> None:
        """Let the items leave the queue whose answers nobody wants."""
        with self._lock:
            self._backlog.withdraw(answers)
            self._line = deque(waiter for waiter in self._line if waiter.answers is not answers)
            self._work.notify_all()
            self._give_room()

    def _reject(self, entries: Sequence[Entry], error: PipeEdgeError) -> None:
        with self._lock:
            claimed = self._backlog.give_up(entries, error)
        deliver(claimed)

    # -- the feeding thread --------------------------------------------------------------------------

    def stream(self, *, position: int | None = None, rows: int = DEFAULT_ROWS) -> RequestStream:
        """Return the microbatches of what waits, now or later; no thread reads ahead, and nothing again."""
        del position, rows
        return RequestStream(self)

    def next_group(self, microbatch_size: int, is_closed: Callable[[], bool]) -> RequestGroup | None:
        """Wait for items, and return the next microbatch; None after the last.

        Args:
            microbatch_size: Largest number of items in a microbatch, at least that of the limits.
            is_closed: Whether the stream was closed.

        Raises:
            Closed: The stream was closed.
        """
        if microbatch_size < self.limits.max_items:
            raise ValueError(f"microbatches of {self.limits.max_items} items do not fit {microbatch_size}")
        while True:
            with self._lock:
                self._work.wait_for(lambda: is_closed() or self._backlog.waiting or self._is_drained())
                if is_closed():
                    raise Closed
                now = self._clock()
                expired, group = self._backlog.expire(now), self._backlog.form(now)
                self._give_room()
                is_over = group is None and self._is_drained()
            if expired:
                self._reject(expired, ExpiredError("the deadline was over before the item was computed"))
            if group is not None or is_over:
                return group

    def wake(self) -> None:
        """Let the feeding thread look again whether its stream was closed."""
        with self._lock:
            self._work.notify_all()

    def _is_drained(self) -> bool:
        """Whether nothing waits any more, and nothing will."""
        return self._draining and not self._backlog.requests_waiting

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
        """Answer the items of a microbatch."""
        group, found = microbatch.origin, found_of_items(outputs, microbatch)
        if not isinstance(group, RequestGroup):
            raise PipeEdgeError(f"received results of microbatch {microbatch_number}, which nobody asked for")
        with self._lock:
            claimed = self._backlog.answer(group, found, self._clock())
        deliver(claimed)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Fail all items that have no answer: none will come."""
        self.fail(error if error is not None else EndedError("the pipeline has ended"))


def _fail_all(requests: Sequence[PendingAnswers], error: PipeEdgeError) -> None:
    """Give up what is still to come of ``requests``, because of ``error``."""
    for answers in requests:
        answers.cancel(error)


class RequestStream(QueueStream):
    """Microbatches of requests, for the thread that feeds the pipeline.

    Args:
        queue: Queue of the requests.
    """

    def __init__(self, queue: RequestQueue) -> None:
        super().__init__(queue.wake)
        self._queue = queue

    def following(self) -> RequestStream:
        """Return this stream, from which another plan takes what follows."""
        return self

    def next(self, microbatch_size: int) -> RequestGroup | None:
        """Wait for items, and return the next microbatch, or None if no more will come.

        Raises:
            Closed: The stream was closed.
        """
        return self._queue.next_group(microbatch_size, lambda: self._closed)
