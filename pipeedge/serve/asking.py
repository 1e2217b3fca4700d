"""Ask the pipeline from the event loop of the server: prepare in threads, and wait for answers in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import anyio
from starlette.requests import Request

from pipeedge.base.errors import InputError, PipeEdgeError
from pipeedge.data import read_threads
from pipeedge.data.items import Item
from pipeedge.serve.answers import ModelAnswer
from pipeedge.serve.pending import PendingAnswers
from pipeedge.serve.replies import HttpError
from pipeedge.serve.requests import ExpiredError, RequestQueue
from pipeedge.serve.service import Service

__all__ = ["Asker"]

_DEADLINE_HEADER = "x-request-timeout"
_RECENT_S = 30.0
"""Seconds since the last result for which the pipeline counts as healthy."""
_PROBE_S = 5.0
"""Seconds within which an item of the server's own must be answered."""


class Asker:
    """Turns requests into items, and items into answers.

    Args:
        service: The model and its queue.
        timeout_s: Longest time to answer a request, in seconds; a header may ask for less.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, service: Service, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.service = service
        self._timeout_s = timeout_s
        self._clock = clock
        self._workers = ThreadPoolExecutor(read_threads(), "prepare")

    def check_count(self, items: int) -> None:
        """Refuse a request with more items than may ever wait, before any of them is prepared.

        Raises:
            InputError: There are too many.
        """
        self.service.queue.check_count(items)

    async def answers(
        self,
        request: Request,
        prepare: Callable[[], Sequence[Item]],
        *,
        quick: bool = False,
        least: int = 1,
    ) -> list[ModelAnswer]:
        """Return the answer of each item.

        Args:
            request: The request.
            prepare: Decodes or tokenises what is asked about.
            quick: Whether that takes so little time that another thread is not worth waking.
            least: Smallest number of items.

        Raises:
            InputError: Something cannot be read, or there are fewer items, or more than may wait.
            QueueFullError: There is no room for them.
            ExpiredError: They were not answered in time.
            HttpError: The client has left.
            PipeEdgeError: The pipeline could not compute one of them.
        """
        timeout_s = self._timeout(request)
        return await self._answers(request, prepare, timeout_s, quick=quick, least=least)

    async def _answers(
        self,
        request: Request,
        prepare: Callable[[], Sequence[Item]],
        timeout_s: float,
        *,
        quick: bool = False,
        least: int = 1,
    ) -> list[ModelAnswer]:
        """Return the answer of each item within ``timeout_s`` seconds, as ``answers`` does."""
        question = _Question(self.service.queue, prepare, least, timeout_s, self._clock)
        # The loop is woken once, when the last answer is there: every time costs as much as a small answer.
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake(_: object = None) -> None:
            if not woken.done():
                woken.set_result(None)

        def wake_loop() -> None:
            with suppress(RuntimeError):  # the server has ended, and with it the loop
                loop.call_soon_threadsafe(wake)

        def wait_for_answers(asked: Future[PendingAnswers]) -> None:
            if asked.cancelled() or asked.exception() is not None:
                wake_loop()
            else:
                asked.result().when_complete(wake_loop)

        asked: Future[PendingAnswers] = Future()
        if quick:
            asked.set_result(question.ask())
        else:
            asked = self._workers.submit(question.ask)
        asked.add_done_callback(wait_for_answers)
        left = asyncio.ensure_future(_disconnected(request))
        left.add_done_callback(wake)
        try:
            with anyio.move_on_after(question.left_s):
                await woken
            if asked.done() and (answers := asked.result()).complete:
                return list(answers)
            if left.done():
                raise HttpError(408, "the client has left", close=True)
            raise question.late()
        finally:
            left.cancel()
            question.give_up()
            asked.cancel()
            asked.add_done_callback(_give_up_answers)

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
            await self._answers(request, lambda: [self.service.probe()], _PROBE_S)
        except (PipeEdgeError, HttpError):
            return False
        return True

    def close(self) -> None:
        """Stop the threads that prepare."""
        self._workers.shutdown(wait=False, cancel_futures=True)


class _Question:
    """Items that are prepared and join the queue, unless the request is over before.

    Args:
        queue: The queue.
        prepare: Decodes or tokenises what is asked about.
        least: Smallest number of items.
        timeout_s: Seconds from now within which the request must be answered, preparation included.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        queue: RequestQueue,
        prepare: Callable[[], Sequence[Item]],
        least: int,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._prepare: Callable[[], Sequence[Item]] | None = prepare
        self._least = least
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline_s = clock() + timeout_s

    @property
    def left_s(self) -> float:
        """Number of seconds until the deadline."""
        return self._deadline_s - self._clock()

    def ask(self) -> PendingAnswers:
        """Prepare the items, and have them wait for the pipeline.

        One thread does both, as the way back to the loop takes as long as a small answer.

        Raises:
            InputError: Something cannot be read, or there are fewer items, or more than may wait.
            QueueFullError: There is no room for them.
            ExpiredError: The request is over.
        """
        prepare = self._prepare
        if prepare is None or self.left_s <= 0:
            raise self.late()
        items = prepare()
        if len(items) < self._least:
            raise InputError("the request has no inputs")
        left_s = self.left_s
        if self._prepare is None or left_s <= 0:
            raise self.late()
        return self._queue.submit(items, timeout_s=left_s)

    def give_up(self) -> None:
        """Have nothing prepared or asked any more.

        Threads that are busy find the question only later, so it lets go of the content of the request.
        """
        self._prepare = None

    def late(self) -> ExpiredError:
        """Return the error of a request that was not answered in time."""
        return ExpiredError(f"the request was not answered within {self._timeout_s:g} s")


def _give_up_answers(asked: Future[PendingAnswers]) -> None:
    """Cancel the answers that are still to come, if there was a question."""
    if not asked.cancelled() and asked.exception() is None:
        asked.result().cancel()


async def _disconnected(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
