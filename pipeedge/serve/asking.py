"""Ask the pipeline from the event loop of the server: prepare in threads, and wait for answers in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import anyio
from starlette.requests import Request

from pipeedge.base.errors import InputError, PipeEdgeError
from pipeedge.data import read_threads
from pipeedge.data.items import Item
from pipeedge.serve.answers import ModelAnswer
from pipeedge.serve.pending import PendingAnswers
from pipeedge.serve.replies import HttpError
from pipeedge.serve.requests import ExpiredError
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
    """

    def __init__(self, service: Service, timeout_s: float) -> None:
        self.service = service
        self._timeout_s = timeout_s
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
        timeout_s = self._deadline(request)
        answers = await self._ask(prepare, timeout_s, quick=quick, least=least)
        try:
            await self._wait(request, answers, timeout_s)
        finally:
            answers.cancel()
        return list(answers)

    async def _ask(
        self,
        prepare: Callable[[], Sequence[Item]],
        timeout_s: float,
        *,
        quick: bool = False,
        least: int = 1,
    ) -> PendingAnswers:
        """Prepare items, and have them wait for the pipeline."""

        def ask() -> PendingAnswers:
            items = prepare()
            if len(items) < least:
                raise InputError("the request has no inputs")
            # From this thread, as the way back to the loop takes as long as a small answer.
            return self.service.queue.submit(items, timeout_s=timeout_s)

        if quick:
            return ask()
        return await asyncio.get_running_loop().run_in_executor(self._workers, ask)

    async def _wait(self, request: Request, answers: PendingAnswers, timeout_s: float) -> None:
        """Wait until all ``answers`` are there.

        Raises:
            ExpiredError: That took too long.
            HttpError: The client has left.
        """
        # The loop is woken once, when the last answer is there: every time costs as much as a small answer.
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake(_: object = None) -> None:
            if not woken.done():
                woken.set_result(None)

        def wake_loop() -> None:
            with suppress(RuntimeError):  # the server has ended, and with it the loop
                loop.call_soon_threadsafe(wake)

        left = asyncio.ensure_future(_disconnected(request))
        left.add_done_callback(wake)
        answers.when_complete(wake_loop)
        try:
            with anyio.move_on_after(timeout_s):
                await woken
            if answers.complete:
                return
            if left.done():
                raise HttpError(408, "the client has left", close=True)
            raise ExpiredError(f"the request was not answered within {timeout_s:g} s")
        finally:
            left.cancel()

    def _deadline(self, request: Request) -> float:
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
            probe = await self._ask(lambda: [self.service.probe()], _PROBE_S)
            try:
                await self._wait(request, probe, _PROBE_S)
                list(probe)
            finally:
                probe.cancel()  # else probes fill the queue while nothing is fed
        except (PipeEdgeError, HttpError):
            return False
        return True

    def close(self) -> None:
        """Stop the threads that prepare."""
        self._workers.shutdown(wait=False, cancel_futures=True)


async def _disconnected(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
