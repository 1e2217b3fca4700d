"""A decoder that answers over HTTP: what makes its prompts, and the queue of what is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pipeedge.data.step_queue import StepQueue
from pipeedge.decoding.prompt import PromptMaker
from pipeedge.models.decoder import DecoderModel
from pipeedge.request.config import RunRequest
from pipeedge.serve.queued_model import NamedModel, name_without_path

__all__ = ["OpenText", "ServedText"]


OpenText = Callable[[RunRequest, DecoderModel], tuple[PromptMaker, StepQueue]]
"""Opens the tokenizer of a decoder, and a queue for what is asked of it."""


@dataclass(frozen=True)
class ServedText(NamedModel):
    """A decoder with the queue of what is asked of it."""

    model: DecoderModel
    prompts: PromptMaker
    queue: StepQueue

    @classmethod
    def open(cls, request: RunRequest, model: DecoderModel, open_text: OpenText) -> ServedText:
        """Open what a decoder needs to answer strangers, who are told no path of this machine.

        Raises:
            RequestError: Its tokenizer is missing, or a file has nonsense.
        """
        prompts, queue = open_text(request, model)
        known = replace(model, name=name_without_path(model))
        vocabulary = replace(prompts.vocabulary, model_name=known.name, path=Path("tokenizer.json"))
        return cls(model.name, known, replace(prompts, vocabulary=vocabulary), queue)
