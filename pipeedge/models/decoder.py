"""A decoder: its properties, stages and ends."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch

from pipeedge.base.errors import ModelError, RequestError, ScheduleError
from pipeedge.base.payload import TensorSpec
from pipeedge.base.schedule import LayerRange
from pipeedge.base.shapes import Shape
from pipeedge.models.architecture import LAYERS_PER_BLOCK
from pipeedge.models.cuts import step_shapes, stream_type
from pipeedge.models.decoder_ends import DecoderEnds, head_dtype
from pipeedge.models.dtypes import INT4, dtype_name, grouped_bytes, stream_dtype
from pipeedge.models.families.decoder import DecoderOptions
from pipeedge.models.layers.decoder import PAGE, DecoderStage, matrices_of, part_shapes, wide_matrices
from pipeedge.models.model import Model, find_model
from pipeedge.models.outline import Outline
from pipeedge.models.registry import find_any
from pipeedge.models.step_rows import StepBounds
from pipeedge.models.weights.comparing import Placeholder, check_tensors
from pipeedge.models.weights.files import WeightsFile
from pipeedge.models.weights.locating import hub_filling
from pipeedge.models.weights.random_weights import RandomWeights

__all__ = ["DECODER_DTYPES", "DecoderModel", "check_decoder_dtype", "find_decoder", "find_runnable"]

DECODER_DTYPES = (torch.float32, torch.bfloat16, torch.int8, INT4)
"""Number types of the weights of decoders."""
_PADDED = 32
"""Number of values to a multiple of which the cache pads heads."""


@dataclass(frozen=True)
class DecoderModel(Outline):
    """A transformer that generates text and can be cut into stages. It holds no weights."""

    @property
    def block_kinds(self) -> tuple[tuple[int, int], ...]:
        """Window and kind of rotation of each block; blocks that have the same ones take the same time."""
        options = self.config.own(DecoderOptions)
        return tuple(zip(options.windows, options.rotation, strict=True))

    @property
    def window(self) -> int:
        """Number of positions that the widest window of a block reaches, or 0 if no block has one."""
        return max(self.config.own(DecoderOptions).windows)

    @property
    def attends_to_all(self) -> bool:
        """Whether a block attends to all positions."""
        return 0 in self.config.own(DecoderOptions).windows

    def step_specs(
        self, after_layer: int, rows: int, packed: int, dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        """Return the payload of a step that crosses the cut after ``after_layer`` layers.

        Args:
            after_layer: Number of layers before the cut.
            rows: Number of rows.
            packed: Number of values of the tensor that describes them, which every stage gets.
            dtype: Number type of the weights of the stage that sends it, or of the first.
        """
        shapes = step_shapes(self.config, after_layer, rows=rows, dtype=stream_type(dtype_name(dtype)))
        table = () if after_layer == self.n_layers else (TensorSpec((packed,), torch.int32),)
        return (*map(TensorSpec.of, shapes), *table)

    def most_specs(self, after_layer: int, bounds: StepBounds, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
        """Return ``step_specs`` of the largest step within ``bounds``."""
        return self.step_specs(after_layer, bounds.rows, bounds.longest, dtype)

    def parameter_count(self, layers: LayerRange) -> int:
        """Return the number of weights of ``layers``, without those of the ends."""
        return sum(math.prod(shape) for shape in self._shapes(layers))

    def weight_bytes(self, layers: LayerRange, dtype: torch.dtype) -> int:
        """Return the size of the weights of ``layers`` in bytes, about, without those of the ends."""
        size = grouped_bytes(dtype, self.parameter_count(layers))
        if dtype is not INT4:
            return size
        wide = sum(self._wide_values.get(layer, 0) for layer in range(layers.start, layers.stop))
        return size + grouped_bytes(torch.int8, wide) - grouped_bytes(INT4, wide)

    @cached_property
    def _wide_values(self) -> Mapping[int, int]:
        """Number of weights of each layer that stages of int4 have in int8."""
        if not self.is_file:
            return {}
        shapes = {
            f"parts.{layer}.{name}": shape
            for layer in range(self.n_layers)
            for name, shape in part_shapes(self.config, *divmod(layer, LAYERS_PER_BLOCK)).items()
        }
        places = {name: cast("torch.Tensor", Placeholder(shape)) for name, shape in shapes.items()}
        with self.open() as file:
            wide = wide_matrices(check_tensors(places, self.config, file), file)
        found: dict[int, int] = {}
        for name, shape in shapes.items():
            for layer, _ in wide.intersection(matrices_of(name)[:1]):
                found[layer] = found.get(layer, 0) + math.prod(shape)
        return found

    def end_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of embedding, last norm and head in bytes, about."""
        return sum(
            grouped_bytes(head_dtype(dtype), math.prod(shape))
            for name, shape in self.family.shapes(self.config, 0).items()
            if not name.startswith("block.")
        )

    def page_bytes(self, layers: LayerRange, dtype: torch.dtype) -> tuple[int, int]:
        """Return the bytes of a page in all blocks of ``layers`` without a window, and in those with one."""
        options = self.config.own(DecoderOptions)
        width = -(-self.config.width_of_head // _PADDED) * _PADDED
        values = 2 * PAGE * options.kv_heads * width
        first = -(-layers.start // LAYERS_PER_BLOCK)
        last = -(-layers.stop // LAYERS_PER_BLOCK)
        windowed = [options.windows[block] != 0 for block in range(first, last)]
        size = values * stream_dtype(dtype).itemsize
        return windowed.count(False) * size, windowed.count(True) * size

    def output_bytes(self, cut: int, dtype: torch.dtype) -> int:
        """Return the bytes of the rows of a page, as a stage in ``dtype`` sends them on.

        Args:
            cut: Number of layers before the cut behind the stage.
            dtype: Number type of its weights.
        """
        shapes = step_shapes(self.config, cut, rows=PAGE, dtype=stream_type(dtype_name(dtype)))
        return sum(TensorSpec.of(shape).bytes for shape in shapes)

    def _shapes(self, layers: LayerRange) -> Iterator[Shape]:
        for layer in range(layers.start, layers.stop):
            block, part = divmod(layer, LAYERS_PER_BLOCK)
            yield from part_shapes(self.config, block, part).values()

    def stage(
        self,
        layers: LayerRange | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        pages: int,
        window_pages: int = 0,
        context: int | None = None,
        weights: str | os.PathLike[str] | WeightsFile | None = None,
        progress: Callable[[int], object] = lambda _: None,
        adopts: Iterable[tuple[DecoderStage, Collection[int]]] = (),
    ) -> DecoderStage:
        """Load the stage of ``layers`` (by default all) with weights from a file, ready for steps.

        Args:
            layers: Layers to compute.
            dtype: Number type of the weights, one of ``DECODER_DTYPES``.
            pages: Number of pages of the cache of each block that attends to everything.
            window_pages: Number of pages of that of each block with a window.
            context: Longest sequence in tokens; None: the model's.
            weights: File of the weights, or its path; None: the model's own.
            progress: Called with the number of values of each piece that is read.
            adopts: Stages, and which of their layers are used if they fit, with their caches.

        Raises:
            RequestError: The number type is not one of decoders.
            ScheduleError: The layers go beyond the model.
            WeightsError: The file is missing, truncated, of an unknown kind, or does not fit the model.
        """
        check_decoder_dtype(dtype)
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
        stage.adopt(adopts)
        for layer in stage.adopted:
            progress(self.parameter_count(LayerRange(layer, layer + 1)))
        with self._opened(weights, dtype) as file:
            return stage.load(file, progress)

    def ends(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        weights: str | os.PathLike[str] | WeightsFile | None = None,
        progress: Callable[[int], object] = lambda _: None,
    ) -> DecoderEnds:
        """Load embedding, last norm and head; arguments and errors are those of ``stage``."""
        check_decoder_dtype(dtype)
        with self._opened(weights, dtype) as file:
            return DecoderEnds(self.config, file, dtype, progress)

    def _opened(
        self, weights: str | os.PathLike[str] | WeightsFile | None, dtype: torch.dtype
    ) -> WeightsFile:
        return weights if isinstance(weights, WeightsFile) else self.open(weights, dtype)

    def random_weights(self, seed: int = 0) -> RandomWeights:
        """Return random weights of the whole model, which ``stage`` and ``ends`` take in place of a file."""
        shapes: dict[str, torch.Size] = {}
        for block in range(self.n_layers // LAYERS_PER_BLOCK):
            for name, shape in self.family.shapes(self.config, block).items():
                parameter = name.replace("block.{n}", f"parts.{LAYERS_PER_BLOCK * block}")
                views = hub_filling(parameter, self.config).views(
                    cast("torch.Tensor", Placeholder(shape)), self.config.heads
                )
                shapes.update({stored: torch.Size(view.shape) for stored, view in views})
        return RandomWeights(shapes, seed)


def check_decoder_dtype(dtype: torch.dtype) -> None:
    """Refuse number types that decoders do not have.

    Raises:
        RequestError: The number type is not in ``DECODER_DTYPES``.
    """
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
    return _decoder(outline)


def find_runnable(name_or_dir: str | os.PathLike[str]) -> Model | DecoderModel:
    """Return an encoder or a decoder; arguments and errors are those of ``find_any``."""
    outline = find_any(name_or_dir)
    return _decoder(outline) if outline.family.decodes else find_model(name_or_dir)


def _decoder(outline: Outline) -> DecoderModel:
    return DecoderModel(*(getattr(outline, field.name) for field in dataclasses.fields(outline)))
