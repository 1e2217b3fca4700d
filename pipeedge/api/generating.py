"""Answers of a decoder to a caller in Python, piece by piece.

caller ──prompt──> StepQueue ──> pipeline ──> [collect] ──pieces──> GeneratedText ──> caller
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pipeedge.base.errors import PipeEdgeError, RequestError
from pipeedge.decoding.generation import Piece, WrittenAnswer
from pipeedge.decoding.prompt import Prompt
from pipeedge.models.decoder import DecoderModel
from pipeedge.request.config import RunRequest
from pipeedge.run.step_queue import Listener, StepQueue
from pipeedge.run.text_ends import TextMaker

__all__ = ["GeneratedText", "QueuedText"]

_Event: TypeAlias = str | WrittenAnswer | BaseException


class _Told:
    """Hears of the sequence, in the thread that collects."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[_Event] = queue.SimpleQueue()

    def grew(self, _sequence: int, piece: Piece) -> None:
        """Take another token."""
        if piece.text:
            self.events.put(piece.text)

    def ended(self, _sequence: int, answer: WrittenAnswer) -> None:
        """Take the whole answer."""
        self.events.put(answer)

    def failed(self, _sequence: int, error: RequestError) -> None:
        """Hear why there is no answer."""
        self.events.put(error)

    def broke(self, error: BaseException) -> None:
        """Hear why the run has ended without the answer."""
        self.events.put(error)


class GeneratedText(Iterator[str]):
    """An answer as it grows: an iterator of pieces of text, with the whole answer at its end.

    Closing it, or forgetting it, gives up what is not generated yet.

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
        self._listener = _Told()
        self._sequence = ask(self._listener)
        self._cancel = cancel
        self._notice = notice
        self._answer: WrittenAnswer | None = None
        self._pieces = self._take()

    def __next__(self) -> str:
        """Wait for the next piece and return it.

        Raises:
            PipeEdgeError: The answer cannot be generated, or the pipeline has failed.
        """
        return next(self._pieces)

    def _take(self) -> Generator[str]:
        ended = False
        try:
            while True:
                told = self._listener.events.get()
                ended = not isinstance(told, str)
                if isinstance(told, WrittenAnswer):
                    self._answer = told
                    return
                if isinstance(told, BaseException):
                    if isinstance(told, PipeEdgeError):
                        self._notice(told)
                    raise told
                yield told
        finally:
            if not ended:
                self._cancel(self._sequence)

    def close(self) -> None:
        """Give up what is not generated yet."""
        self._pieces.close()

    @property
    def answer(self) -> WrittenAnswer:
        """The whole answer; what is left of it is waited for.

        Raises:
            RequestError: It was closed before its end.
            PipeEdgeError: It cannot be generated.
        """
        for _ in self._pieces:
            pass
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
