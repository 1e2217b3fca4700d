"""Ask a decoder from the event loop of the server: prompts in, pieces of answers out.

    request ──> TextQuestion ──prompts──> queue ──> pipeline
                     ^                                 │
                     └─────── tokens, in order ────────┘

Whatever ends a question early, such as a client that leaves, gives its sequences up at once.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import TypeAlias

import anyio
from starlette.requests import Request

from pipeedge.base.crew import Closed
from pipeedge.base.errors import PipeEdgeError, RequestError, one_line
from pipeedge.base.wording import count
from pipeedge.decoding.generation import Piece, WrittenAnswer
from pipeedge.decoding.prompt import Prompt
from pipeedge.decoding.sampling import Sampling
from pipeedge.serve.asking import PROBE_S, RECENT_S, ThreadedAsker, disconnected, wanted_timeout
from pipeedge.serve.pending import EndedError
from pipeedge.serve.replies import HttpError
from pipeedge.serve.requests import ExpiredError, QueueFullError
from pipeedge.serve.served_text import ServedText

__all__ = ["TextAsker", "TextQuestion"]

_LONGEST_RETRY_S = 60

_Told: TypeAlias = tuple[int, Piece | WrittenAnswer | RequestError] | BaseException | None
"""What is told of a sequence; an error that ended the run; or None when the client has left."""


class TextAsker(ThreadedAsker):
    """Turns requests into prompts, and prompts into answers.

    Args:
        service: The decoder and its queue.
        timeout_s: Longest time without a token, in seconds; a header may ask for the whole answer in less.
        max_waiting: Largest number of sequences that wait for their first token.
    """

    def __init__(self, service: ServedText, timeout_s: float, max_waiting: int) -> None:
        super().__init__("prompts")
        self.service = service
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._numbers = itertools.count()
        self._answer_s = 1.0
        self._token_at = -math.inf

    def next_number(self) -> int:
        """Return a number for a prompt, by which those without a seed get random numbers of their own."""
        return next(self._numbers)

    def ask(self, request: Request, prompts: Sequence[Prompt]) -> TextQuestion:
        """Ask for the answers to prompts; use the question as a context manager.

        Raises:
            InputError: One of them can never be answered.
            QueueFullError: Too many wait.
            EndedError: The pipeline takes nothing further.
        """
        state = self.service.queue.state()
        wanted = sum(prompt.sampling.n for prompt in prompts)
        if state.waiting + wanted > self._max_waiting:
            raise QueueFullError(
                f"{count(state.waiting, 'answer')} wait to begin, and there is no room for {wanted} more; "
                "try again later",
                min(_LONGEST_RETRY_S, max(1, math.ceil(self._answer_s))),
            )
        whole_s = wanted_timeout(request)
        return TextQuestion(self, request, prompts, self._timeout_s, whole_s)

    def note_token(self) -> None:
        """Note that a token has come."""
        self._token_at = time.monotonic()

    def note_answer(self, seconds: float) -> None:
        """Note how long an answer took, for those who are told to come back."""
        self._answer_s += 0.2 * (seconds - self._answer_s)

    async def is_healthy(self, request: Request) -> bool:
        """Return whether the pipeline answers: a token came lately, or one of our own does soon."""
        if time.monotonic() - self._token_at < RECENT_S:
            return True
        probe = Prompt((0,), Sampling(temperature=0, max_tokens=1))
        try:
            with anyio.fail_after(PROBE_S), TextQuestion(self, request, [probe], PROBE_S) as question:
                async for _ in question.told():
                    pass
        except (PipeEdgeError, HttpError, TimeoutError):
            return False
        return True


class TextQuestion:
    """The prompts of a request, until they are answered or given up. A context manager, for the event loop.

    Answers are numbered: those to the first prompt come first. All of it but the methods of the listener
    runs on the loop.

    Args:
        asker: Who asks.
        request: The request, whose client may leave.
        prompts: The prompts.
        timeout_s: Longest time without a token, in seconds.
        whole_s: Longest time until the last token.
    """

    def __init__(
        self,
        asker: TextAsker,
        request: Request,
        prompts: Sequence[Prompt],
        timeout_s: float,
        whole_s: float = math.inf,
    ) -> None:
        self._asker = asker
        self._queue = asker.service.queue
        self._request = request
        self._prompts = prompts
        self._timeout_s = timeout_s
        self._whole_s = whole_s
        self._began = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[_Told] = asyncio.Queue()
        self._open: dict[int, int] = {}
        """Numbers of the answers that are still to come, by sequence."""
        self.choices = sum(prompt.sampling.n for prompt in prompts)
        """Number of answers."""
        self.answers: dict[int, WrittenAnswer] = {}
        """Answers by their numbers, as far as they are whole."""

    def __enter__(self) -> TextQuestion:
        """Ask.

        Raises:
            InputError: A prompt can never be answered. None is asked then.
            EndedError: The pipeline takes nothing further.
        """
        try:
            if self._queue.is_ending:
                raise EndedError("the pipeline is ending and takes no further requests")
            for prompt in self._prompts:
                for choice in range(prompt.sampling.n):
                    number = self._queue.submit(prompt, self, choice=choice)
                    self._open[number] = len(self._open)
        except Closed:
            self._cancel()
            raise EndedError("the pipeline has ended") from None
        except BaseException:
            self._cancel()
            raise
        self._leaving = asyncio.ensure_future(disconnected(self._request))
        self._leaving.add_done_callback(lambda _: self._heard.put_nowait(None))
        return self

    def __exit__(self, *exc: object) -> None:
        """Give up what is not answered."""
        self._leaving.cancel()
        self._cancel()

    def _cancel(self) -> None:
        for sequence in self._open:
            self._queue.cancel(sequence)
        self._open = {}

    async def told(self) -> AsyncIterator[tuple[int, Piece | WrittenAnswer]]:
        """Yield what each token adds, and each answer that is whole, with its number, until all are.

        Raises:
            RequestError: An answer cannot be generated.
            ExpiredError: No token came in time.
            HttpError: The client has left.
            PipeEdgeError: The pipeline has failed.
        """
        while self._open:
            told = self._heard.get_nowait() if not self._heard.empty() else await self._next()
            if told is None:
                raise HttpError(408, "the client has left", close=True)
            if isinstance(told, BaseException):
                raise told if isinstance(told, PipeEdgeError) else EndedError(one_line(told))
            sequence, what = told
            if sequence not in self._open:
                continue
            if isinstance(what, RequestError):
                raise what
            if isinstance(what, WrittenAnswer):
                choice = self._open.pop(sequence)
                self.answers[choice] = what
                self._asker.note_answer(time.monotonic() - self._began)
                yield choice, what
            else:
                self._asker.note_token()
                yield self._open[sequence], what

    async def _next(self) -> _Told:
        """Wait for what is told next."""
        left_s = min(self._timeout_s, self._began + self._whole_s - time.monotonic())
        try:
            async with asyncio.timeout(left_s if math.isfinite(left_s) else None):
                return await self._heard.get()
        except TimeoutError:
            limit_s = min(self._timeout_s, self._whole_s)
            raise ExpiredError(f"no token came within {limit_s:g} s") from None

    # -- the listener, in the thread that collects ------------------------------------------------

    def grew(self, sequence: int, piece: Piece) -> None:
        """Take another token."""
        self._tell((sequence, piece))

    def ended(self, sequence: int, answer: WrittenAnswer) -> None:
        """Take the whole answer."""
        self._tell((sequence, answer))

    def failed(self, sequence: int, error: RequestError) -> None:
        """Hear why there is no answer."""
        self._tell((sequence, error))

    def broke(self, error: BaseException) -> None:
        """Hear why the run has ended."""
        self._tell(error)

    def _tell(self, told: _Told) -> None:
        with suppress(RuntimeError):  # the server has ended, and with it the loop
            self._loop.call_soon_threadsafe(self._heard.put_nowait, told)
