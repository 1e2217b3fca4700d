"""A decoder that answers over HTTP: what makes its prompts, and the queue of what is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Protocol

from pipeedge.base.errors import RequestError
from pipeedge.data import ItemSource, ResultSink
from pipeedge.decoding.generation import Piece, WrittenAnswer
from pipeedge.decoding.prompt import Prompt, PromptMaker
from pipeedge.models.decoder import DecoderModel
from pipeedge.observe.token_figures import TextState
from pipeedge.request.config import RunRequest

__all__ = ["OpenText", "SequenceListener", "SequenceQueue", "ServedText"]


class SequenceListener(Protocol):
    """Hears of sequences, in the thread that collects; it must not wait."""

    def grew(self, sequence: int, piece: Piece) -> None:
        """Take another token, with the text that became certain."""

    def ended(self, sequence: int, answer: WrittenAnswer) -> None:
        """Take the whole answer."""

    def failed(self, sequence: int, error: RequestError) -> None:
        """Hear why the sequence has no answer."""

    def broke(self, error: BaseException) -> None:
        """Hear why the run has ended without the answer."""


class SequenceQueue(ItemSource, ResultSink, Protocol):
    """Sequences that wait for their tokens: input and results of a pipeline, as ``run`` has them."""

    started: Event
    error: BaseException | None

    def submit(self, prompt: Prompt, listener: SequenceListener, *, choice: int = 0) -> int:
        """Ask for an answer; return the number by which to cancel it."""

    def cancel(self, sequence: int) -> None:
        """Give a sequence up."""

    def drain(self) -> None:
        """End the run once every sequence has its answer."""

    @property
    def is_ending(self) -> bool:
        """Whether nothing further is to be asked."""

    def state(self) -> TextState:
        """Return the state of this moment."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End, and tell those who wait."""


OpenText = Callable[[RunRequest, DecoderModel], tuple[PromptMaker, SequenceQueue]]
"""Opens the tokenizer of a decoder, and a queue for what is asked of it."""


@dataclass(frozen=True)
class ServedText:
    """A decoder with the queue of what is asked of it."""

    model: DecoderModel
    """The model, with the name that replies and messages give it."""
    prompts: PromptMaker
    queue: SequenceQueue
    given_name: str
    """Name of the model as the user has given it, which may be a path."""

    @classmethod
    def open(cls, request: RunRequest, model: DecoderModel, open_text: OpenText) -> ServedText:
        """Open what a decoder needs to answer strangers, who are told no path of this machine.

        Raises:
            RequestError: Its tokenizer is missing, or a file has nonsense.
        """
        given_name = model.name
        prompts, queue = open_text(request, model)
        if model.directory is not None and model.repository is None:
            model = replace(model, name=Path(model.name).resolve().name or model.name)
        vocabulary = replace(prompts.vocabulary, model_name=model.name, path=Path("tokenizer.json"))
        return cls(model, replace(prompts, vocabulary=vocabulary), queue, given_name)

    def is_named(self, name: str) -> bool:
        """Return whether ``name`` is that of the model, in either form."""
        return name in (self.model.name, self.given_name)
