"""Stages of decoders: consecutive layers that remember the keys and values of every token they have seen.

A *step* is rows: hidden states of some tokens of some sequences, [R, D]. Native code (``src-
native/decoder``) executes it as one call. A row's result has the same bits alone, among the rows of other
sequences, and in a chunk of a prompt, with any number of threads, because each sum has one order.

    part of block          0                1             2              3
                    hidden │ attention      │ projection  │ MLP in       │ MLP out
    crosses the cut        └> context, skip └> hidden     └> inner, skip └> hidden

The cache consists of *pages* of 32 positions, which are addressed from outside: each sequence comes with
the numbers of its pages, in order. Blocks with a window have pages of their own, and a list of numbers in
which a page that the window has left may appear again. A stage decides and frees nothing, and a position
that is written twice has the same contents.

Shapes in docstrings: R rows, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, repeat
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from pipeedge import _native as native
from pipeedge.base.errors import PeerFailedError, WeightsError
from pipeedge.base.schedule import LayerRange
from pipeedge.base.shapes import Shape
from pipeedge.models.architecture import LAYERS_PER_BLOCK, Architecture
from pipeedge.models.cuts import step_shapes
from pipeedge.models.dtypes import INT4, dtype_name, stream_dtype
from pipeedge.models.families.catalogue import family_of
from pipeedge.models.families.decoder import NATIVE_ACTIVATIONS, DecoderOptions
from pipeedge.models.layers.kept_outputs import KeptOutputs
from pipeedge.models.rotary import scaled_frequencies
from pipeedge.models.weights.comparing import Placeholder, check_coding, check_tensors
from pipeedge.models.weights.files import WeightsFile
from pipeedge.models.weights.locating import Filling
from pipeedge.models.weights.names import same

__all__ = [
    "PAGE",
    "DecoderStage",
    "TensorRows",
    "StepRows",
    "as_array",
    "finite_codes",
    "in_readers",
    "matrices_of",
    "one_at_a_time",
    "part_shapes",
    "read_rows",
    "reader_shares",
    "wide_matrices",
]

PAGE: int = native.DECODER_PAGE
"""Positions of a page of the cache."""
_PART_OF = {
    "norm1": 0,
    "q": 0,
    "k": 0,
    "v": 0,
    "qkv": 0,
    "q_norm": 0,
    "k_norm": 0,
    "proj": 1,
    "end1": 1,
    "norm2": 2,
    "gate": 2,
    "up": 2,
    "gate_up": 2,
    "down": 3,
    "end2": 3,
}
"""Layer of a block that each of its modules belongs to."""
_MATRICES = {"q": ("qkv",), "k": ("qkv",), "v": ("qkv",), "gate_up": ("gate", "up")}
"""Matrices of native code that modules are stored in; those of others have the names of the modules."""
_NORMS = {
    "norm1": "attention_norm",
    "norm2": "mlp_norm",
    "end1": "attention_end",
    "end2": "mlp_end",
    "q_norm": "query_norm",
    "k_norm": "key_norm",
}
"""Norms, and what native code calls them."""
_PART_BYTES = 1 << 20
"""Size in bytes of the rows that are read and packed at a time, about; starting threads takes time, too."""
_VALUE_BYTES = {name: size / values for name, values, size in native.weight_codings()}
"""Sizes of the values of codings."""
_TOGETHER = 64
"""Number of rows that packing divides among threads without sharing a panel."""
_Piece = TypeVar("_Piece")


@dataclass(frozen=True)
class StepRows:
    """The rows of one sequence in a step."""

    position: int
    """Position of the first row in the sequence."""
    rows: int
    pages: npt.NDArray[np.int32]
    """Numbers of the pages of positions 0 to 31, 32 to 63, and so on, up to the last row at least."""
    window_pages: npt.NDArray[np.int32]
    """The same for blocks with a window, in which only those that the window reaches count."""

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """Place of each row among those of all pages that are not of windows."""
        positions = np.arange(self.position, self.position + self.rows)
        return self.pages[positions // PAGE].astype(np.int64) * PAGE + positions % PAGE


class DecoderStage:
    """Consecutive layers of a decoder with their cache.

    Args:
        architecture: Dimensions of the model.
        layers: Layers to compute.
        dtype: Number type of the weights: float32, bfloat16, int8, with a scale for each 32 weights, or int4,
            with a scale and a zero for each 32. Matrices that a file has in more bits than most of its
            weights are int8 in a stage of int4.
        pages: Number of pages of the cache of each block that attends to everything.
        window_pages: Number of pages of that of each block with a window.
        context: Longest sequence in tokens.
    """

    def __init__(
        self,
        architecture: Architecture,
        layers: LayerRange,
        dtype: torch.dtype = torch.float32,
        *,
        pages: int,
        window_pages: int,
        context: int,
    ) -> None:
        self.architecture = architecture
        self.layers = layers
        """Layers that this stage computes."""
        self.dtype = dtype
        self.stream_dtype = stream_dtype(dtype)
        """Number type of payloads and of the cache."""
        self._first_block = layers.start // LAYERS_PER_BLOCK
        self._pages, self._window_pages, self._context = pages, window_pages, context
        self.adopted: set[int] = set()
        """Layers that other stages have, too, and that are not loaded."""
        options = architecture.own(DecoderOptions)
        last_block = -(-layers.stop // LAYERS_PER_BLOCK)
        first = self._first_block * LAYERS_PER_BLOCK
        self._native = native.DecoderStage(
            hidden=architecture.hidden,
            heads=architecture.heads,
            kv_heads=options.kv_heads,
            head_size=architecture.width_of_head,
            inner=architecture.intermediate,
            weights=dtype_name(dtype),
            stream=dtype_name(self.stream_dtype),
            norm_centred=options.layer_norm,
            eps=architecture.eps,
            head_norm=options.head_norm,
            gated=options.gated,
            activation=NATIVE_ACTIVATIONS[architecture.activation],
            scale=options.scale,
            score_cap=options.score_cap,
            residual_scale=options.residual_scale,
            rotations=[
                (
                    scaled_frequencies(rotary, context).tolist(),
                    rotary.magnitude,
                    rotary.original if rotary.scaling == "dynamic" else 0,
                    rotary.base,
                    rotary.factor,
                )
                for rotary in options.rotary
            ],
            temper_from=options.temper_from,
            temper=options.temper,
            blocks=[
                (options.rotation[block], options.windows[block])
                for block in range(self._first_block, last_block)
            ],
            first=layers.start - first,
            end=layers.stop - first,
            pages=pages,
            window_pages=window_pages,
        )

    @property
    def cache_bytes(self) -> int:
        """Size of the whole cache in bytes, of which the system provides what is used."""
        return self._native.cache_bytes

    @property
    def weight_bytes(self) -> int:
        """Size of the packed matrices in bytes, all of which a step reads."""
        return self._native.weight_bytes

    def outputs_after(self, cut: int) -> KeptOutputs:
        """Return room for the payloads of a cut behind a layer of the stage, by the pages of the cache."""
        return KeptOutputs(self.architecture, cut, self.stream_dtype, self._pages * PAGE)

    def behind(self, cut: int) -> DecoderStage:
        """Return the layers behind a cut as a stage of their own, with these weights and this cache."""
        stage = DecoderStage(
            self.architecture,
            LayerRange(cut, self.layers.stop),
            self.dtype,
            pages=self._pages,
            window_pages=self._window_pages,
            context=self._context,
        )
        stage.adopt([(self, range(cut, self.layers.stop))])
        return stage

    def adopt(self, others: Iterable[tuple[DecoderStage, Collection[int]]]) -> None:
        """Use the layers that other stages have, too, with their weights and their caches.

        All of them may go on, but not compute at the same time.

        Args:
            others: Stages, and which layers to use if they have them; the last one that does counts.
        """
        for other, wanted in others:
            if other.dtype is not self.dtype or other._pages < self._pages:
                continue
            own, theirs = (LAYERS_PER_BLOCK * one._first_block for one in (self, other))
            for layer in (layer for layer in self.layers.shared(other.layers) if layer in wanted):
                self._native.adopt(layer - own, other._native, layer - theirs)
                self.adopted.add(layer)

    def read_page(self, page: int, layers: LayerRange, values: npt.NDArray[np.uint8]) -> None:
        """Copy what the cache of some layers, without windows, has in a page to ``values``."""
        self._native.read_page(*self._blocks_of(layers), page, values)

    def write_page(self, page: int, values: npt.NDArray[np.uint8]) -> None:
        """Replace what the whole cache has in a page.

        Raises:
            ValueError: There is no such page, or ``values`` has another size.
        """
        self._native.write_page(*self._blocks_of(self.layers), page, values)

    def clear_cache(self) -> None:
        """Set all keys and values to 0, for which the system provides the memory of the whole cache.

        Before, all that nothing was written to may be one page of zeros, which the caches hold.
        """
        self._native.clear_cache()

    def _blocks_of(self, layers: LayerRange) -> tuple[int, int]:
        """Return the first block whose cache is in some layers, and how many there are."""
        first, stop = (-(-layer // LAYERS_PER_BLOCK) for layer in (layers.start, layers.stop))
        return first - self._first_block, stop - first

    def stored_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return placeholders of the tensors to read from a file, by name, one layer after the other."""
        found: dict[str, Any] = {}
        for layer in sorted(set(range(self.layers.start, self.layers.stop)) - self.adopted):
            for name, shape in part_shapes(self.architecture, *divmod(layer, LAYERS_PER_BLOCK)).items():
                found[f"parts.{layer}.{name}"] = Placeholder(shape)
        return found

    def load(self, file: WeightsFile, progress: Callable[[int], object] = lambda _: None) -> DecoderStage:
        """Read the weights of the stage from ``file``, one tensor at a time or several; return the stage.

        ``progress`` is called with the number of values of each piece.

        Raises:
            WeightsError: A tensor is missing or of another shape, or the data ends early.
        """
        shapes = self.stored_tensors()
        fillings = check_tensors(shapes, self.architecture, file)
        file.announce(source.name for filling in fillings for source in filling.sources)
        if self.dtype is INT4:
            for layer, matrix in wide_matrices(fillings, file):
                self._native.widen(layer // LAYERS_PER_BLOCK - self._first_block, matrix)
        for filling in fillings:
            check_coding(filling, file, self.dtype)
        blocks = [list(block) for _, block in groupby(fillings, self._block_of)]
        advance = one_at_a_time(progress)

        def read(block: Iterable[Filling], threads: int) -> None:
            for filling in block:
                shape = shapes[filling.parameter].shape
                with finite_codes(filling, file):
                    for part in read_rows(filling, shape, file, advance):
                        self._put(filling, part, threads)

        in_readers(blocks if file.several_readers else [fillings], read)
        return self

    def _block_of(self, filling: Filling) -> int:
        """Return the number of the block of the stage that has a parameter."""
        return int(filling.parameter.split(".")[1]) // LAYERS_PER_BLOCK - self._first_block

    def _put(self, filling: Filling, part: TensorRows, threads: int) -> None:
        """Hand rows of a parameter on to native code, which packs them in so many threads."""
        block, (module, kind) = self._block_of(filling), filling.parameter.split(".")[2:]
        row, values = part.row, part.values
        options = self.architecture.own(DecoderOptions)
        width, size = self.architecture.hidden, self.architecture.width_of_head
        if module in _NORMS:
            if options.norm_offset and kind == "weight":
                values = values + 1
            first = row + (width if kind == "bias" else 0)
            self._native.fill(block, _NORMS[module], first, as_array(values))
            return
        if module == "gate_up":
            inner = self.architecture.intermediate
            gate = max(0, inner - row)  # rows of the gate, which come first
            self._fill(block, "gate", kind, TensorRows(row, values[:gate], part.coding), threads)
            self._fill(
                block, "up", kind, TensorRows(max(0, row - inner), values[gate:], part.coding), threads
            )
            return
        queries, keys = self.architecture.heads * size, options.kv_heads * size
        places = {"q": ("qkv", 0), "k": ("qkv", queries), "v": ("qkv", queries + keys)}
        name, first = places.get(module, (module, 0))
        self._fill(block, name, kind, TensorRows(first + row, values, part.coding), threads)

    def _fill(self, block: int, name: str, kind: str, part: TensorRows, threads: int) -> None:
        name = name if kind == "weight" else f"{name}_bias"
        if len(part.values):
            self._native.fill(block, name, part.row, part.array, threads=threads, coding=part.coding)

    def checked_inputs(
        self, sequences: Sequence[StepRows], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return the payload of the cut before the stage as ``step`` takes it.

        Hidden states may have another number type, as after a stage that computes in another one.

        Raises:
            PeerFailedError: It does not fit the rows.
        """
        rows = sum(one.rows for one in sequences)
        wanted = step_shapes(self.architecture, self.layers.start, rows=rows, dtype="float32")
        shapes = [tuple(tensor.shape) for tensor in inputs]
        if shapes != [shape.shape for shape in wanted] or not all(map(torch.is_floating_point, inputs)):
            raise PeerFailedError(f"its tensors have the shapes {shapes}, which do not fit {rows} rows")
        return tuple(tensor.to(self.stream_dtype).contiguous() for tensor in inputs)

    def unknown_outputs(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Return a payload of the cut after the stage for rows whose values nobody needs."""
        shapes = step_shapes(
            self.architecture, self.layers.stop, rows=rows, dtype=dtype_name(self.stream_dtype)
        )
        return tuple(torch.zeros(shape.shape, dtype=self.stream_dtype) for shape in shapes)

    def step(
        self,
        sequences: Sequence[StepRows],
        inputs: Sequence[torch.Tensor],
        *,
        threads: int | None = None,
        variant: str | None = None,
        seconds: npt.NDArray[np.float64] | None = None,
        processor_time: bool = False,
        stop: int | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Execute a step: write the cache, and return the payload of the cut after the stage.

        Where hidden states go in and out, they are replaced in place, so that the result is the input.

        Args:
            sequences: Rows of each sequence, in the order of the rows of the inputs; no sequence twice.
            inputs: Payload of the cut before the stage, as ``step_shapes`` lists it, contiguous.
            threads: Number of threads, or None for torch's.
            variant: One of ``native.decoder_variants``, or None for the best.
            seconds: Array of a number for each layer, which gets its time; or None.
            processor_time: Whether that is the calling thread's processor time, which no pause makes longer.
            stop: Layer from which on none computes, so that the result is unspecified; None for all.

        Raises:
            ValueError: Payload, pages or positions do not fit the stage.
        """
        rows = sum(one.rows for one in sequences)
        shapes = step_shapes(
            self.architecture, self.layers.stop, rows=rows, dtype=dtype_name(self.stream_dtype)
        )
        in_place = self.layers.start % 2 == 0 and self.layers.stop % 2 == 0
        outputs = (
            tuple(inputs)
            if in_place
            else tuple(torch.empty(shape.shape, dtype=self.stream_dtype) for shape in shapes)
        )
        self._native.step(
            [(one.pages, one.window_pages, one.position, one.rows) for one in sequences],
            [as_array(tensor) for tensor in inputs],
            [as_array(tensor) for tensor in outputs],
            threads=torch.get_num_threads() if threads is None else threads,
            variant=variant,
            seconds=seconds,
            processor_time=processor_time,
            layers=-1 if stop is None or stop >= self.layers.stop else max(0, stop - self.layers.start),
        )
        return outputs


def part_shapes(architecture: Architecture, block: int, part: int) -> dict[str, Shape]:
    """Return the shapes of the stored tensors of a layer of a block, 0 to 3, by their names in the block."""
    names = family_of(architecture).shapes(architecture, block)
    own = {
        name.removeprefix("block.{n}."): shape
        for name, shape in names.items()
        if name.startswith("block.{n}.")
    }
    return {name: shape for name, shape in own.items() if _PART_OF[name.partition(".")[0]] == part}


def wide_matrices(fillings: Iterable[Filling], file: WeightsFile) -> frozenset[tuple[int, str]]:
    """Return the matrices, by layer and name, that stages of int4 have in int8.

    They are those that ``file`` has in more bits than most others. What native code has in one matrix, such
    as queries, keys and values, has one number type.
    """
    return frozenset(
        (layer, matrix)
        for filling in fillings
        if any(file.is_wide(source.name) for source in filling.sources)
        for layer, matrix in matrices_of(filling.parameter)
    )


def matrices_of(parameter: str) -> tuple[tuple[int, str], ...]:
    """Return layer and name of the matrices of native code that have a parameter; none if it is a vector."""
    _, layer, module, kind = parameter.split(".")
    if kind != "weight" or module in _NORMS:
        return ()
    return tuple((int(layer), matrix) for matrix in _MATRICES.get(module, (module,)))


@dataclass(frozen=True)
class TensorRows:
    """Some rows of a parameter."""

    row: int
    """Number of the first one."""
    values: torch.Tensor
    """Rows in float32, bfloat16, or codes, uint8 [rows, bytes]."""
    coding: str | None = None
    """Form of the codes, or None for numbers."""

    @property
    def array(self) -> Any:
        """The rows as native code expects them."""
        return as_array(self.values)


def in_readers(pieces: Sequence[_Piece], read: Callable[[_Piece, int], None]) -> None:
    """Call ``read`` with each piece and with a number of threads, in as many readers as there are threads.

    Readers do not wait for each other after each part of a tensor, as threads that pack one do.
    """
    threads = torch.get_num_threads()
    readers = min(threads, len(pieces))
    if readers < 2:
        for piece in pieces:
            read(piece, threads)
        return
    with ThreadPoolExecutor(readers) as pool:
        for _ in pool.map(read, pieces, repeat(threads // readers)):
            pass


def one_at_a_time(progress: Callable[[int], object]) -> Callable[[int], None]:
    """Return a function that several readers may call at the same time."""
    lock = Lock()

    def advance(values: int) -> None:
        with lock:
            progress(values)

    return advance


def reader_shares(filling: Filling, rows: int, file: WeightsFile) -> list[range]:
    """Divide the rows of a parameter among readers, for ``read_rows``; panels are not shared."""
    whole = len(filling.sources) > 1 or filling.sources[0].layout is not same
    readers = torch.get_num_threads() if file.several_readers and not whole else 1
    size = -(-rows // readers // _TOGETHER) * _TOGETHER
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


@contextmanager
def finite_codes(filling: Filling, file: WeightsFile) -> Iterator[None]:
    """Say which tensor it is whose codes native code refuses: one of their scales is not a number."""
    try:
        yield
    except ValueError as error:
        names = ", ".join(source.name for source in filling.sources)
        raise WeightsError(f"{file.path}: {names}: {error}; fetch the file again") from error


def read_rows(
    filling: Filling,
    shape: Sequence[int],
    file: WeightsFile,
    progress: Callable[[int], object] = lambda _: None,
    within: range | None = None,
) -> Iterator[TensorRows]:
    """Yield a parameter of ``shape`` in parts, which are small and valid until the next one is asked for.

    ``within`` are the rows to read, one of ``reader_shares``; None: all.
    """
    if any(source.layout is not same for source in filling.sources):
        tensor = torch.empty(tuple(shape))
        for name, view in filling.views(tensor, 1):
            file.read_into(name, view, progress)
        yield TensorRows(0, tensor)
        return
    row = 0 if within is None else within.start
    for source in filling.sources:
        coding = file.coding(source.name)
        row_bytes = math.prod(shape[1:]) * (2 if coding is None else _VALUE_BYTES[coding])
        part_bytes = _PART_BYTES / (2 if file.several_readers else 1)  # each has a part
        together = max(1, int(part_bytes / row_bytes) // _TOGETHER) * _TOGETHER
        if within is not None and len(within) < shape[0]:
            parts = file.read_within(source.name, together, within)
        else:
            parts = (file.read_rows if coding is None else file.read_coded)(source.name, together)
        for part in parts:
            as_it_is = coding is not None or (part.dtype is torch.bfloat16 and part.dim() > 1)
            yield TensorRows(row, part if as_it_is else part.to(torch.float32), coding)
            row += len(part)
            progress(len(part) * math.prod(shape[1:]))


def as_array(tensor: torch.Tensor) -> Any:
    """Return a tensor's memory as the native code expects it: float32, or the bits of bfloat16."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
