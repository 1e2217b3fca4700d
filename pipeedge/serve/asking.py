"""Ask the pipeline from the event loop of the server: prepare in threads, and wait for answers in time."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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

__all__ = ["AskedCounts", "Asker", "Prepare"]

_Result = TypeVar("_Result")

Prepare: TypeAlias = Callable[[range], Sequence[Item | InputError]]
"""Returns some items of a request, by their numbers, or why one of them is none."""

_DEADLINE_HEADER = "x-request-timeout"
_RECENT_S = 30.0
"""Seconds since the last result for which the pipeline counts as healthy."""
_PROBE_S = 5.0
"""Seconds within which an item of the server's own must be answered."""


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


class Asker:
    """Turns requests into items, and items into answers.

    Args:
        service: The model and its queue.
        timeout_s: Longest time to answer a request, in seconds; a header may ask for less.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, service: QueuedModel, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.service = service
        self._timeout_s = timeout_s
        self._clock = clock
        self._workers = ThreadPoolExecutor(read_threads(), "prepare")
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
        timeout_s = min(timeout_s, self._timeout(request))
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
        queue = self.service.queue
        question = _Question(queue, items, prepare, timeout_s, self._clock)
        answers = question.answers
        # The loop is woken once, when the last answer is there: every time costs as much as a small answer.
        # Only a request of several parts needs to be woken for each.
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def wake(_: object = None) -> None:
            with suppress(RuntimeError):  # the server has ended, and with it the loop
                loop.call_soon_threadsafe(changed.set)

        left = asyncio.ensure_future(_disconnected(request))
        left.add_done_callback(lambda _: changed.set())

        async def wait_for(is_true: Callable[[], object]) -> None:
            """Wait until ``is_true``, or until there is nothing to wait for."""
            while not (is_true() or answers.complete or left.done()):
                await changed.wait()
                changed.clear()

        try:
            with anyio.move_on_after(question.left_s):
                answers.when_complete(wake)
                for first in range(0, items, queue.part_size):
                    part = range(first, min(first + queue.part_size, items))
                    is_last = part.stop == items
                    if not queue.reserve(answers, len(part), wake):
                        await wait_for(lambda: answers.reserved)
                    if answers.complete or left.done():
                        break
                    if quick:
                        question.ask(part)
                        continue
                    asked = self._workers.submit(question.ask, part)
                    asked.add_done_callback(functools.partial(_wake_if_over, wake, is_last))
                    await wait_for(functools.partial(_is_over, asked, is_last))
                    if asked.done():
                        asked.result()
                await wait_for(lambda: False)
            if answers.complete:
                return answers
            if left.done():
                raise HttpError(408, "the client has left", close=True)
            raise question.late()
        finally:
            left.cancel()
            question.give_up()

    def _timeout(self, request: Request) -> float:
        text = request.headers.get(_DEADLINE_HEADER)
        if text is None:
            return self._timeout_s
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise InputError(f"the header {_DEADLINE_HEADER} must be seconds above 0")
        return min(seconds, self._timeout_s)

    async def is_healthy(self, request: Request) -> bool:
        """Return whether the pipeline answers: a result came lately, or an item of our own has one soon."""
        if self.service.queue.seconds_since_result() < _RECENT_S:
            return True
        try:
            await self._answers(request, 1, lambda _: [self.service.probe()], _PROBE_S)
        except (PipeEdgeError, HttpError):
            return False
        return True

    async def in_thread(self, work: Callable[[], _Result]) -> _Result:
        """Return what ``work`` does, which takes too long for the loop."""
        return await asyncio.wrap_future(self._workers.submit(work))

    def close(self) -> None:
        """Stop the threads that prepare."""
        self._workers.shutdown(wait=False, cancel_futures=True)


class _Question:
    """What a request asks, until it is given up.

    Args:
        queue: The queue.
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
        items: int,
        prepare: Prepare,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._prepare: Prepare | None = prepare
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline_s = clock() + timeout_s
        self.answers = queue.open(items, timeout_s=timeout_s)

    @property
    def left_s(self) -> float:
        """Number of seconds until the deadline."""
        return self._deadline_s - self._clock()

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

    def give_up(self) -> None:
        """Have nothing prepared, asked or computed any more.

        Threads that are busy find the question only later, so it lets go of the content of the request.
        """
        self._prepare = None
        self.answers.cancel()

    def late(self) -> ExpiredError:
        """Return the error of a request that was not answered in time."""
        return ExpiredError(f"the request was not answered within {self._timeout_s:g} s")


def _is_over(asked: Future[None], is_last: bool) -> bool:
    """Return whether the loop has to go on after a part was asked: with the next one, or as it has failed."""
    return asked.done() and (not is_last or asked.cancelled() or asked.exception() is not None)


def _wake_if_over(wake: Callable[[], None], is_last: bool, asked: Future[None]) -> None:
    if _is_over(asked, is_last):
        wake()


async def _disconnected(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
