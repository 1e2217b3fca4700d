"""Ask the pipeline from the event loop of the server: prepare in threads, and wait for answers in time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import anyio
from starlette.requests import Request

from pipeedge.base.errors import InputError, PipeEdgeError
from pipeedge.data import read_threads
from pipeedge.data.items import Item
from pipeedge.serve.pending import PendingAnswers
from pipeedge.serve.queued_model import QueuedModel
from pipeedge.serve.replies import HttpError
from pipeedge.serve.requests import ExpiredError, RequestQueue

__all__ = [
    "PROBE_S",
    "RECENT_S",
    "AskedCounts",
    "Asker",
    "Prepare",
    "ThreadedAsker",
    "disconnected",
    "wanted_timeout",
]

_Result = TypeVar("_Result")

Prepare: TypeAlias = Callable[[range], Sequence[Item | InputError]]
"""Returns some items of a request, by their numbers, or why one of them is none."""

_DEADLINE_HEADER = "x-request-timeout"
RECENT_S = 30.0
"""Seconds since the last result for which the pipeline counts as healthy."""
PROBE_S = 5.0
"""Seconds within which an item, or a token, of the server's own must be answered."""


@dataclass(frozen=True)
class AskedCounts:
    """Counts of requests to the model, and the time that they took."""

    answers: int = 0
    answers_s: float = 0.0
    """Seconds that all of them took together, from a request to its answer."""
    failures: int = 0
    failures_s: float = 0.0
    last_at: float = 0.0
    """Time of the last answer, in seconds since 1970; 0 before the first."""

    def answered(self, seconds: float, now: float) -> AskedCounts:
        """Return the counts with one more answer."""
        return replace(self, answers=self.answers + 1, answers_s=self.answers_s + seconds, last_at=now)

    def failed(self, seconds: float) -> AskedCounts:
        """Return the counts with one more request without an answer."""
        return replace(self, failures=self.failures + 1, failures_s=self.failures_s + seconds)


class ThreadedAsker:
    """An asker with threads for what takes too long for the event loop.

    Args:
        name: Name of the threads.
    """

    def __init__(self, name: str) -> None:
        self._workers = ThreadPoolExecutor(read_threads(), name)

    async def in_thread(self, work: Callable[[], _Result]) -> _Result:
        """Return what ``work`` does, which takes too long for the loop."""
        return await asyncio.wrap_future(self._workers.submit(work))

    def close(self) -> None:
        """Stop the threads."""
        self._workers.shutdown(wait=False, cancel_futures=True)


class Asker(ThreadedAsker):
    """Turns requests into items, and items into answers.

    Args:
        service: The model and its queue.
        timeout_s: Longest time to answer a request, in seconds; a header may ask for less.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, service: QueuedModel, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__("prepare")
        self.service = service
        self._timeout_s = timeout_s
        self._clock = clock
        self.asked = AskedCounts()
        """Counts of requests to the model."""

    async def answers(
        self,
        request: Request,
        items: int,
        prepare: Prepare,
        *,
        quick: bool = False,
        timeout_s: float = math.inf,
    ) -> PendingAnswers:
        """Wait for the answers of a request, and return them.

        Args:
            request: The request.
            items: Number of its items.
            prepare: Decodes or tokenises what is asked about.
            quick: Whether that takes so little time that another thread is not worth waking.
            timeout_s: Seconds that the client waits, if it says so in the body.

        Raises:
            InputError: Something cannot be read, or there are no items, or too many.
            QueueFullError: Too many requests wait.
            ExpiredError: They were not answered in time.
            HttpError: The client has left.
            PipeEdgeError: The pipeline could not compute one of them.
        """
        timeout_s = min(timeout_s, self._timeout_s, wanted_timeout(request))
        began = self._clock()
        try:
            answers = await self._answers(request, items, prepare, timeout_s, quick=quick)
        except BaseException:
            self.asked = self.asked.failed(self._clock() - began)
            raise
        self.asked = self.asked.answered(self._clock() - began, time.time())
        return answers

    async def _answers(
        self, request: Request, items: int, prepare: Prepare, timeout_s: float, *, quick: bool = False
    ) -> PendingAnswers:
        """Wait for the answers for ``timeout_s`` seconds, as ``answers`` does."""
        if not items:
            raise InputError("the request has no inputs")
        with _Question(self.service.queue, request, items, prepare, timeout_s, self._clock) as question:
            with anyio.move_on_after(question.left_s):
                await question.answered(None if quick else self._workers)
            if question.answers.complete:
                return question.answers
            if question.client_left:
                raise HttpError(408, "the client has left", close=True)
            raise question.late()

    async def is_healthy(self, request: Request) -> bool:
        """Return whether the pipeline answers: a result came lately, or an item of our own has one soon."""
        if self.service.queue.seconds_since_result() < RECENT_S:
            return True
        try:
            await self._answers(request, 1, lambda _: [self.service.probe()], PROBE_S)
        except (PipeEdgeError, HttpError):
            return False
        return True


class _Question:
    """What a request asks, until it is answered or given up. A context manager, for the event loop.

        answered     part by part: room for it ──> ask, in a thread ──> ... ──> the last answer
        until        waits for one of these, or for what ends the question: all answers, or the client leaves
        wake         called by any thread when one of them may have come

    The loop is woken once, when the last answer is there: every time costs as much as a small answer. Only a
    request of several parts needs to be woken for each.

    Args:
        queue: The queue.
        request: The request, whose client may leave.
        items: Number of items.
        prepare: Decodes or tokenises what is asked about.
        timeout_s: Seconds from now within which the request must be answered, preparation included.
        clock: Returns the time in seconds.

    Raises:
        InputError: There are too many items.
        QueueFullError: Too many requests wait.
        EndedError: The pipeline is ending.
    """

    def __init__(
        self,
        queue: RequestQueue,
        request: Request,
        items: int,
        prepare: Prepare,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._items = items
        self._prepare: Prepare | None = prepare
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline_s = clock() + timeout_s
        self.answers = queue.open(items, timeout_s=timeout_s)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._leaving = asyncio.ensure_future(disconnected(request))
        self._leaving.add_done_callback(lambda _: self._changed.set())

    def __enter__(self) -> _Question:
        return self

    def __exit__(self, *exc: object) -> None:
        """Have nothing prepared, asked or computed any more.

        Threads that are busy find the question only later, so it lets go of the content of the request.
        """
        self._leaving.cancel()
        self._prepare = None
        self.answers.cancel()

    @property
    def left_s(self) -> float:
        """Number of seconds until the deadline."""
        return self._deadline_s - self._clock()

    @property
    def client_left(self) -> bool:
        """Whether the client has left."""
        return self._leaving.done()

    async def answered(self, workers: Executor | None) -> None:
        """Ask part by part, and wait until all is answered, or the client has left.

        Args:
            workers: Threads that prepare, or None to do it here.

        Raises:
            InputError: Something cannot be read.
        """
        self.answers.when_complete(self.wake)
        for first in range(0, self._items, self._queue.part_size):
            part = range(first, min(first + self._queue.part_size, self._items))
            if not self._queue.reserve(self.answers, len(part), self.wake):
                await self.until(lambda: self.answers.reserved)
            if self._is_over:
                return
            if workers is None:
                self.ask(part)
            else:
                await self._ask_in_thread(workers, part)
        await self.until(lambda: False)

    async def _ask_in_thread(self, workers: Executor, part: range) -> None:
        """Have a thread ask; return when the next part can follow, or once all is answered."""
        asked = workers.submit(self.ask, part)
        is_last = part.stop == self._items

        def goes_on() -> bool:
            return asked.done() and (not is_last or asked.cancelled() or asked.exception() is not None)

        asked.add_done_callback(lambda _: self.wake() if goes_on() else None)
        await self.until(goes_on)
        if asked.done():
            asked.result()

    async def until(self, happened: Callable[[], object]) -> None:
        """Wait until ``happened``, or until there is nothing to wait for."""
        while not (happened() or self._is_over):
            await self._changed.wait()
            self._changed.clear()

    def wake(self) -> None:
        """Let ``until`` look again; called by any thread."""
        with suppress(RuntimeError):  # the server has ended, and with it the loop
            self._loop.call_soon_threadsafe(self._changed.set)

    @property
    def _is_over(self) -> bool:
        return self.answers.complete or self.client_left

    def ask(self, part: range) -> None:
        """Prepare some items, and have them wait for the pipeline.

        One thread does both, as the way back to the loop takes as long as a small answer.

        Raises:
            InputError: Something cannot be read.
            ExpiredError: The request is over.
        """
        prepare = self._prepare
        if prepare is None or self.left_s <= 0:
            raise self.late()
        found = prepare(part)
        if self._prepare is None or self.left_s <= 0:
            raise self.late()
        self._queue.put(self.answers, found, part.start)

    def late(self) -> ExpiredError:
        """Return the error of a request that was not answered in time."""
        return ExpiredError(f"the request was not answered within {self._timeout_s:g} s")


def wanted_timeout(request: Request) -> float:
    """Return the seconds within which a client wants to be answered, as a header says; infinite without it.

    Raises:
        InputError: It says something else.
    """
    text = request.headers.get(_DEADLINE_HEADER)
    if text is None:
        return math.inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise InputError(f"the header {_DEADLINE_HEADER} must be seconds above 0")
    return seconds


async def disconnected(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
