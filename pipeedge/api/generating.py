"""Answers of a decoder to a caller in Python, piece by piece.

caller ──prompt──> StepQueue ──> pipeline ──> [collect] ──pieces──> GeneratedText ──> caller
"""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pipeedge.base.errors import PipeEdgeError, RequestError
from pipeedge.data.step_queue import Listener, StepQueue
from pipeedge.decoding.generation import Piece, WrittenAnswer
from pipeedge.decoding.prompt import Prompt
from pipeedge.models.decoder import DecoderModel
from pipeedge.request.config import RunRequest
from pipeedge.run.text_ends import TextMaker

__all__ = ["GeneratedText", "QueuedText"]

_Event: TypeAlias = str | WrittenAnswer | BaseException | None
"""A piece, the whole answer, why there is none, or None when it was given up."""


class _Told:
    """Hears of the sequence, in the thread that collects."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self.wake: Callable[[], None] = _do_nothing
        """Called behind every event."""

    def tell(self, event: _Event) -> None:
        """Take an event."""
        self.events.put(event)
        self.wake()

    def grew(self, _sequence: int, piece: Piece) -> None:
        """Take another token."""
        if piece.text:
            self.tell(piece.text)

    def ended(self, _sequence: int, answer: WrittenAnswer) -> None:
        """Take the whole answer."""
        self.tell(answer)

    def failed(self, _sequence: int, error: RequestError) -> None:
        """Hear why there is no answer."""
        self.tell(error)

    def broke(self, error: BaseException) -> None:
        """Hear why the run has ended without the answer."""
        self.tell(error)

    async def next(self) -> _Event:
        """Wait for the next event while other tasks go on."""
        loop = asyncio.get_running_loop()
        came = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(came.set)

        self.wake = wake
        try:
            while True:
                with suppress(queue.Empty):
                    return self.events.get_nowait()
                await came.wait()
                came.clear()
        finally:
            self.wake = _do_nothing


def _do_nothing() -> None:
    pass


class GeneratedText(Iterator[str], AsyncIterator[str]):
    """An answer as it grows: an iterator of pieces of text, with the whole answer at its end.

    ``for`` waits for pieces in this thread, ``async for`` while other tasks go on. Closing it, or forgetting
    it, gives up what is not generated yet, and so does the end of a task that waits for it.

    Args:
        ask: Asks for the answer, and returns the number of the sequence.
        cancel: Gives a sequence up.
        notice: Called with the error of an answer that failed.
    """

    def __init__(
        self,
        ask: Callable[[Listener], int],
        cancel: Callable[[int], None],
        notice: Callable[[PipeEdgeError], None],
    ) -> None:
        self._ended = True
        self._listener = _Told()
        self._sequence = ask(self._listener)
        self._cancel = cancel
        self._notice = notice
        self._answer: WrittenAnswer | None = None
        self._ended = False

    def __next__(self) -> str:
        """Wait for the next piece and return it.

        Raises:
            PipeEdgeError: The answer cannot be generated, or the pipeline has failed.
        """
        if self._ended:
            raise StopIteration
        try:
            told = self._listener.events.get()
        except BaseException:  # such as Ctrl-C
            self.close()
            raise
        if not self._goes_on(told):
            raise StopIteration
        return str(told)

    async def __anext__(self) -> str:
        """Wait for the next piece while other tasks go on; errors are those of ``next``."""
        if self._ended:
            raise StopAsyncIteration
        try:
            told = await self._listener.next()
        except BaseException:  # the task was cancelled
            self.close()
            raise
        if not self._goes_on(told):
            raise StopAsyncIteration
        return str(told)

    def _goes_on(self, told: _Event) -> bool:
        """Return whether an event is a piece.

        Raises:
            PipeEdgeError: It is an error.
        """
        if isinstance(told, str):
            return True
        self._ended = True
        if isinstance(told, WrittenAnswer):
            self._answer = told
        elif isinstance(told, PipeEdgeError):
            self._notice(told)
        if isinstance(told, BaseException):
            raise told
        return False

    def close(self) -> None:
        """Give up what is not generated yet."""
        if not self._ended:
            self._ended = True
            self._cancel(self._sequence)
            self._listener.tell(None)  # somebody else may wait for a piece

    def __del__(self) -> None:
        self.close()

    @property
    def answer(self) -> WrittenAnswer:
        """The whole answer; what is left of it is waited for.

        Raises:
            RequestError: It was closed before its end.
            PipeEdgeError: It cannot be generated.
        """
        for _ in self:
            pass
        return self._whole()

    async def whole(self) -> WrittenAnswer:
        """Return the whole answer, and wait for what is left of it while other tasks go on.

        Errors are those of ``answer``.
        """
        async for _ in self:
            pass
        return self._whole()

    def _whole(self) -> WrittenAnswer:
        if self._answer is None:
            raise RequestError("the answer was given up before its end")
        return self._answer

    @property
    def text(self) -> str:
        """Text of the whole answer; see ``answer``."""
        return self.answer.text


@dataclass(frozen=True)
class QueuedText:
    """A decoder with the queue of what is asked of it."""

    model: DecoderModel
    maker: TextMaker
    queue: StepQueue
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def open(cls, request: RunRequest, model: DecoderModel) -> QueuedText:
        """Open what a decoder needs to answer.

        Raises:
            RequestError: Its tokenizer is missing, or a file has nonsense.
        """
        maker = TextMaker.open(request, model)
        return cls(model, maker, maker.queue())

    def ask(
        self, asked: Mapping[str, Any], name: str, notice: Callable[[PipeEdgeError], None]
    ) -> GeneratedText:
        """Ask for the answer to a prompt in the form of a line of a ``.jsonl``.

        Args:
            asked: The prompt and its sampling options.
            name: What messages call the prompt.
            notice: Called with the error of an answer that failed.

        Raises:
            InputError: It cannot be run.
        """
        prompt = self.maker.prompts.from_document(dict(asked), next(self._numbers), name)
        if prompt.sampling.n != 1:
            raise RequestError(f"{name}: n is {prompt.sampling.n}; ask once for each answer")
        return self.submit(prompt, notice)

    def submit(self, prompt: Prompt, notice: Callable[[PipeEdgeError], None]) -> GeneratedText:
        """Ask for the answer to a prompt; errors are those of ``ask``."""
        return GeneratedText(lambda listener: self.queue.submit(prompt, listener), self.queue.cancel, notice)
