"""A decoder: its properties, stages and ends."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pipeedge.base.errors import ModelError, RequestError, ScheduleError
from pipeedge.base.schedule import LayerRange
from pipeedge.models.decoder_ends import DecoderEnds
from pipeedge.models.dtypes import dtype_name
from pipeedge.models.layers.decoder import DecoderStage
from pipeedge.models.outline import Outline
from pipeedge.models.registry import find_any

__all__ = ["DECODER_DTYPES", "DecoderModel", "find_decoder"]

DECODER_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
"""Number types of the weights of decoders."""


@dataclass(frozen=True)
class DecoderModel(Outline):
    """A transformer that generates text and can be cut into stages. It holds no weights."""

    def stage(
        self,
        layers: LayerRange | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        pages: int,
        window_pages: int = 0,
        context: int | None = None,
        weights: str | os.PathLike[str] | None = None,
        progress: Callable[[int], object] = lambda _: None,
    ) -> DecoderStage:
        """Load the stage of ``layers`` (by default all) with weights from a file, ready for steps.

        Args:
            layers: Layers to compute.
            dtype: Number type of the weights, one of ``DECODER_DTYPES``.
            pages: Number of pages of the cache of each block that attends to everything.
            window_pages: Number of pages of that of each block with a window.
            context: Longest sequence in tokens; None: the model's.
            weights: File of the weights; None: the model's own.
            progress: Called with the number of values of each piece that is read.

        Raises:
            RequestError: The number type is not one of decoders.
            ScheduleError: The layers go beyond the model.
            WeightsError: The file is missing, truncated, of an unknown kind, or does not fit the model.
        """
        _check_dtype(dtype)
        layers = layers if layers is not None else LayerRange(0, self.n_layers)
        if layers.stop > self.n_layers:
            raise ScheduleError(
                f"the range {layers} goes beyond {self.name}: its layers are 1 to {self.n_layers}"
            )
        stage = DecoderStage(
            self.config,
            layers,
            dtype,
            pages=pages,
            window_pages=window_pages,
            context=self.config.max_positions if context is None else context,
        )
        with self.open(weights) as file:
            return stage.load(file, progress)

    def ends(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        weights: str | os.PathLike[str] | None = None,
        progress: Callable[[int], object] = lambda _: None,
    ) -> DecoderEnds:
        """Load embedding, last norm and head; arguments and errors are those of ``stage``."""
        _check_dtype(dtype)
        with self.open(weights) as file:
            return DecoderEnds(self.config, file, dtype, progress)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DECODER_DTYPES:
        supported = ", ".join(map(dtype_name, DECODER_DTYPES))
        raise RequestError(f"--dtype {dtype_name(dtype)}: models that generate text have {supported}")


def find_decoder(name_or_dir: str | os.PathLike[str], *, fetch: bool = True) -> DecoderModel:
    """Return what ``registry.find_any`` does, as a decoder whose stages can be made.

    Raises:
        ModelError: It does not generate text, besides the reasons of ``find_any``.
    """
    outline = find_any(name_or_dir, fetch=fetch)
    if not outline.family.decodes:
        raise ModelError(f"{outline.name} does not generate text: it is an encoder ({outline.family.name})")
    return DecoderModel(*(getattr(outline, field.name) for field in dataclasses.fields(outline)))
