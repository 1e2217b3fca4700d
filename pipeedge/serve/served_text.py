"""A decoder that answers over HTTP: what makes its prompts, and the queue of what is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pipeedge.data.step_queue import StepQueue
from pipeedge.decoding.prompt import PromptMaker
from pipeedge.models.decoder import DecoderModel
from pipeedge.request.config import RunRequest

__all__ = ["OpenText", "ServedText"]


OpenText = Callable[[RunRequest, DecoderModel], tuple[PromptMaker, StepQueue]]
"""Opens the tokenizer of a decoder, and a queue for what is asked of it."""


@dataclass(frozen=True)
class ServedText:
    """A decoder with the queue of what is asked of it."""

    model: DecoderModel
    """The model, with the name that replies and messages give it."""
    prompts: PromptMaker
    queue: StepQueue
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
