"""A model that answers, for Python and for HTTP: what prepares its items, and where they wait."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipeedge.base.errors import InputError
from pipeedge.base.wording import excerpt
from pipeedge.data.items import Item
from pipeedge.models import Model
from pipeedge.models.decoder import DecoderModel
from pipeedge.request.config import RunRequest
from pipeedge.serve.batching import BatchLimits
from pipeedge.serve.preparing import Preparation
from pipeedge.serve.requests import RequestQueue

__all__ = ["NamedModel", "QueuedModel", "name_without_path"]


@dataclass(frozen=True)
class NamedModel:
    """A model that is asked by its name, or by none."""

    given_name: str
    """Name of the model as the user has given it, which may be a path."""
    model: Model | DecoderModel
    """The model, with the name that replies and messages give it."""

    def is_named(self, name: str) -> bool:
        """Return whether ``name`` is that of the model, in either form."""
        return name in (self.model.name, self.given_name)

    def check_name(self, name: str) -> None:
        """Refuse a request for another model.

        Raises:
            InputError: ``name`` is another one.
        """
        if name and not self.is_named(name):
            raise InputError(f"model {excerpt(name)} is not served: ask for {self.model.name}, or for none")


def name_without_path(model: Model | DecoderModel) -> str:
    """Return the last part of the path of a model in a directory, else its name."""
    if model.directory is None or model.repository is not None:
        return model.name
    return Path(model.name).resolve().name or model.name


@dataclass(frozen=True)
class QueuedModel(NamedModel):
    """A model with the queue of what is asked of it."""

    model: Model
    preparation: Preparation
    queue: RequestQueue

    @classmethod
    def open(
        cls,
        request: RunRequest,
        model: Model,
        *,
        max_waiting: int,
        images_as_bytes: bool = True,
        for_strangers: bool = False,
    ) -> QueuedModel:
        """Open what a model needs to answer.

        Args:
            request: Request of the data rank.
            model: The model.
            max_waiting: Largest number of items that wait.
            images_as_bytes: Whether images travel as bytes, if that is exact.
            for_strangers: Whether requests come over a network: messages and replies then have no path of
                this machine, and no sentence may keep the tokenizer for long.

        Raises:
            InputError: Its tokenizer or image processor is missing, or does not fit it.
        """
        preparation = Preparation.open(request, model, as_bytes=images_as_bytes)
        given_name = model.name
        if for_strangers:
            model = replace(model, name=name_without_path(model))
            preparation = preparation.for_strangers(model)
        size = request.microbatch_size
        limits = BatchLimits(max_items=size, max_tokens=size * model.max_tokens, max_waiting=max_waiting)
        queue = RequestQueue(
            limits,
            max_tokens=preparation.max_tokens,
            pixels=preparation.pixels,
            class_names=model.labels,
            output_kind=model.output_kind,
        )
        return cls(given_name, model, preparation, queue)

    def probe(self) -> Item:
        """Return an item by which to find out whether the pipeline answers."""
        if self.model.takes_text:
            return self.preparation.sentence("a", source="probe")
        height, width = self.model.config.image_size
        return self.preparation.item(np.zeros((height, width), np.uint8), "probe")
