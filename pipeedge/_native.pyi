"""PipeEdge's compiled core (src-native/bindings/module.cpp)."""

from typing import Literal

import numpy as np
import numpy.typing as npt

def arm_features() -> list[str]:
    """Return which of neon, dot, i8mm, bf16 and fp16_arith an ARM processor has; none on others.

    Nor are there any where the system does not tell (it does on Linux).
    """

def element_bytes() -> dict[str, int]:
    """Return the bytes of a value that crosses a cut, by the number type of the stage that sends it."""

def link_seconds(sizes: list[float], bw_bytes_per_s: float, latency_s: float) -> list[float]:
    """Return the seconds that a link takes for each of these numbers of bytes; infinite without bandwidth."""

def scaled_weights(dtype: str, float32_bytes: list[float]) -> list[float]:
    """Return the bytes of each layer's weights in a number type, for profiles that do not have them.

    Args:
        dtype: number type, without ``torch.``.
        float32_bytes: bytes of each layer's weights in float32.

    Raises:
        ValueError: the number type is unknown.
    """

def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes of ``count`` codes of ``bits`` bits.

    That is ``ceil(count * bits / 8)``, and up to 2 more if the last block is not a multiple of 8.

    Raises:
        ValueError: bits other than 2 to 8 and 16.
    """

def encode(
    *,
    values: npt.NDArray[np.float32] | npt.NDArray[np.uint16],
    rows: int,
    bits: int,
    low: float,
    high: float,
    codes: npt.NDArray[np.uint8],
    ranges: npt.NDArray[np.float32],
    block: int = 0,
    seed: int = 0,
    variant: str | None = None,
) -> int | None:
    """Quantise and pack ``values``: ``x' = offset + code * scale``, a scale and an offset for each row.

    The levels of a row run from ``max(min, mean - low * deviation)`` to ``min(max, mean + high *
    deviation)``, inclusive; the deviation is the mean absolute deviation. Infinite factors give the whole
    range. A row of equal values is exact.

    Args:
        values: contiguous; float32, or the bits of bfloat16 as uint16.
        rows: number of rows of equal length.
        bits: 2 to 8, or 16.
        low: factor for the lower end of the range, 0 or more.
        high: factor for the upper end, 0 or more.
        codes: output of ``packed_bytes`` bytes.
        ranges: output with the scales of all rows, then the offsets.
        block: block of the Hadamard transform of each row: a power of two from 2 to 1024, or 0 for none.
        seed: seed of the signs of that transform.
        variant: one of ``codec_variants``; None for the best. All give the same result.

    Returns:
        The first row with a NaN or an infinity, or, with a transform, values above 1e34, where it stopped;
        None if there is none.

    Raises:
        ValueError: arrays that do not fit each other, bits or factors outside their range.
    """

def decode(
    *,
    codes: npt.NDArray[np.uint8],
    ranges: npt.NDArray[np.float32],
    bits: int,
    values: npt.NDArray[np.float32] | npt.NDArray[np.uint16],
    block: int = 0,
    seed: int = 0,
    variant: str | None = None,
) -> None:
    """Reverse ``encode``, into ``values``.

    Raises:
        ValueError: arrays that do not fit each other, bits or a block outside their range.
    """

def transform_rows(
    *,
    values: npt.NDArray[np.float32] | npt.NDArray[np.uint16],
    rows: int,
    block: int,
    seed: int,
    variant: str | None = None,
) -> npt.NDArray[np.float32]:
    """Return the Hadamard transform of each row, as ``encode`` quantises it; shape (rows, length).

    Raises:
        ValueError: values that are not that many equal rows, or a block outside its range.
    """

def row_statistics(
    values: npt.NDArray[np.float32] | npt.NDArray[np.uint16], rows: int
) -> npt.NDArray[np.float32]:
    """Of each row: minimum, maximum, mean, mean absolute deviation from the mean; shape (rows, 4).

    Raises:
        ValueError: a row with a NaN or an infinity; values that are not that many equal rows.
    """

def squared_error(
    *,
    values: npt.NDArray[np.float32] | npt.NDArray[np.uint16],
    statistics: npt.NDArray[np.float32],
    bits: int,
    low: float,
    high: float,
) -> float:
    """Sum of ``(x - x')**2`` if ``values`` were encoded so; ``statistics`` are those of the rows.

    Raises:
        ValueError: arrays that do not fit each other, bits or factors outside their range.
    """

def codec_variants() -> list[str]:
    """Return the instruction sets that the codec is compiled for and this processor has, best first."""

# --- linear8: linear layers with 8-bit weights, defined in src-native/linear8/linear8.hpp ---

_Bfloat16 = npt.NDArray[np.uint16]
_Norm = tuple[_Bfloat16, _Bfloat16, float]
_Activation = Literal["none", "gelu", "gelu_tanh"]

def linear8_variants() -> list[str]:
    """Return the instruction sets that the layers are compiled for and this processor has, best first.

    The last is ``portable``, which quantises and finishes but has no product.
    """

def linear8_packed_bytes(outputs: int, inputs: int, variant: str | None = None) -> int:
    """Return the bytes of the packed weights of a layer, for one of ``linear8_variants``, or for the best."""

def linear8_pack(
    *, weights: npt.NDArray[np.int8], packed: npt.NDArray[np.int8], variant: str | None = None
) -> None:
    """Write ``weights`` [outputs, inputs] to ``packed``, in the order that ``linear8_apply`` reads.

    Variants read them in different orders, so ``variant`` must be that of ``linear8_apply``.
    """

def linear8_apply(
    *,
    x: _Bfloat16,
    norm: _Norm | None,
    packed: npt.NDArray[np.int8],
    scales: npt.NDArray[np.float32],
    bias: _Bfloat16 | None,
    activation: _Activation,
    residual: _Bfloat16 | None,
    out: _Bfloat16,
    threads: int,
    variant: str | None = None,
) -> None:
    """Apply a LayerNorm, a linear layer and its activation, and add a residual.

    Args:
        x: the bits of bfloat16, [M, K].
        norm: weight, bias and epsilon of a LayerNorm of the rows of ``x``, if there is one.
        packed: weights written by ``linear8_pack`` for the same variant.
        scales: scales of the weights, [N].
        bias: [N].
        activation: function applied before the residual is added.
        residual: [M, N].
        out: output, [M, N].
        threads: largest number of threads; few rows use fewer.
        variant: one of ``linear8_variants``; None for the best. All give the same bits.

    Raises:
        ValueError: arrays that do not fit each other, a variant without product.
    """

def linear8_quantise(
    *,
    x: _Bfloat16,
    norm: _Norm | None,
    codes: npt.NDArray[np.uint8],
    row_scales: npt.NDArray[np.float32],
    threads: int,
    variant: str | None = None,
) -> None:
    """Quantise the rows of ``x`` [M, K], or their LayerNorm, as ``linear8_apply`` does.

    Args:
        x: the bits of bfloat16, [M, K].
        norm: weight, bias and epsilon of a LayerNorm, if there is one.
        codes: output [M, K], with 128 for zero.
        row_scales: output [M]; NaN for rows with NaN or infinity.
        threads: largest number of threads.
        variant: one of ``linear8_variants``; None for the best.

    Raises:
        ValueError: arrays that do not fit each other.
    """

def linear8_finish(
    *,
    sums: npt.NDArray[np.int32],
    row_scales: npt.NDArray[np.float32],
    scales: npt.NDArray[np.float32],
    bias: _Bfloat16 | None,
    activation: _Activation,
    residual: _Bfloat16 | None,
    out: _Bfloat16,
    threads: int,
    variant: str | None = None,
) -> None:
    """Compute what ``linear8_apply`` does from the sums of products [M, N] and the scales of the rows.

    Raises:
        ValueError: arrays that do not fit each other.
    """

# --- attention: defined in src-native/attention/attention.hpp ---

ATTENTION_HEAD_MULTIPLE: int
"""The sizes of heads are multiples of this."""

def attention_types() -> list[Literal["float32", "bfloat16"]]:
    """Return the number types for which this processor has the instructions."""

def attend(
    *,
    qkv: npt.NDArray[np.float32] | _Bfloat16,
    heads: int,
    bias: npt.NDArray[np.float32] | None,
    distances: npt.NDArray[np.float32] | None,
    rotation: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None,
    reach: int | None,
    out: npt.NDArray[np.float32] | _Bfloat16,
    threads: int,
) -> None:
    """Compute multi-head attention.

    Args:
        qkv: queries, keys and values side by side, [N, T, 3D]; float32, or the bits of bfloat16.
        heads: number of heads, whose size is a multiple of ``ATTENTION_HEAD_MULTIPLE``.
        bias: bias added to the scores of each key, [N, T].
        distances: bias for each distance from a query to a key, from 1 - T to T - 1, [H, 2T - 1].
        rotation: cosines and sines of the angles by which queries and keys of the last R tokens are rotated,
            [R, E / 2] each for heads of size E; value i of a head and value i + E / 2 are one point.
        reach: largest distance between a query and the keys that it attends to, or None for all keys.
        out: output, [N, T, D].
        threads: largest number of threads.

    Raises:
        ValueError: arrays that do not fit each other, or a number type that this processor lacks.
    """

# --- decoder: stages and heads of decoders, defined in src-native/decoder/stage.hpp ---

DECODER_PAGE: int
"""Positions of a page of the cache."""

_Stream = npt.NDArray[np.float32] | _Bfloat16

def weight_codings() -> list[tuple[str, int, int]]:
    """Return the forms in which files hold rows of weights, with the weights and the bytes of a unit."""

def decode_rows(coding: str, rows: npt.NDArray[np.uint8], width: int) -> npt.NDArray[np.float32]:
    """Return the weights of rows of codes, [rows, width].

    Raises:
        ValueError: there is no such form, or rows of another length.
    """

def encode_rows(coding: str, rows: _Stream, *, threads: int) -> npt.NDArray[np.uint8]:
    """Return rows of weights as codes of ``int8`` or ``int4``, rounded as a stage would round them.

    Raises:
        ValueError: it is another form, or the weights are no matrix.
    """

def decoder_variants() -> list[str]:
    """Return the instruction sets that decoders are compiled for and this processor has, best first."""

class DecoderStage:
    """Consecutive layers of a decoder, with their cache; the result of a row depends on no other row.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    def __init__(
        self,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        inner: int,
        weights: str,
        stream: str,
        norm_centred: bool,
        eps: float,
        head_norm: str,
        gated: bool,
        activation: str,
        scale: float,
        score_cap: float,
        residual_scale: float,
        rotations: list[tuple[list[float], float, int, float, float]],
        temper_from: int,
        temper: float,
        blocks: list[tuple[int, int]],
        first: int,
        end: int,
        pages: int,
        window_pages: int,
    ) -> None: ...
    def fill(
        self,
        block: int,
        name: str,
        first: int,
        values: _Stream | npt.NDArray[np.uint8],
        *,
        threads: int = 1,
        coding: str | None = None,
    ) -> None:
        """Pack a part of the weights of a block, from row ``first`` on; a vector is float32.

        Raises:
            ValueError: the stage has no such weights, they have another shape, or scales of ``coding`` are
                not finite.
        """

    def widen(self, block: int, name: str) -> None:
        """Hold a matrix of a stage of int4 in int8; call this before it is filled.

        Raises:
            ValueError: the stage has no such matrix.
        """

    def adopt(self, layer: int, other: DecoderStage, others_layer: int) -> None:
        """Use a layer of another stage, weights and cache, in place of an own one.

        Both count from the first layer of their first block.

        Raises:
            ValueError: a stage does not have the layer, or they do not fit each other.
        """

    def read_page(self, first: int, blocks: int, page: int, values: npt.NDArray[np.uint8]) -> None:
        """Copy the keys and values of a page, of those of some blocks that have a cache, to ``values``.

        Raises:
            ValueError: there is no such block or page, a block has a window, or ``values`` has another size.
        """

    def write_page(self, first: int, blocks: int, page: int, values: npt.NDArray[np.uint8]) -> None:
        """Replace what ``read_page`` copies; errors are the same."""

    def clear_cache(self) -> None:
        """Set all keys and values to 0, for which the system provides the memory of the whole cache."""

    def step(
        self,
        sequences: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], int, int]],
        inputs: list[_Stream],
        outputs: list[_Stream],
        *,
        threads: int,
        variant: str | None = None,
        seconds: npt.NDArray[np.float64] | None = None,
        processor_time: bool = False,
        layers: int = -1,
    ) -> None:
        """Execute a step: pages, pages of windows, position of the first row, and rows of each sequence.

        Each layer's time is written to ``seconds``, if that is given: elapsed, or the calling thread's
        ``processor_time``. Only the first ``layers`` compute, and the outputs are unspecified then; -1: all
        of them.

        Raises:
            ValueError: arrays, pages or positions that do not fit the stage.
        """

    @property
    def cache_bytes(self) -> int: ...
    @property
    def page_bytes(self) -> int:
        """Bytes of a page of a block."""

    @property
    def weight_bytes(self) -> int: ...

class DecoderHead:
    """Last norm and head of a decoder."""

    def __init__(
        self,
        *,
        weights: str,
        stream: str,
        hidden: int,
        tokens: int,
        norm_centred: bool,
        eps: float,
        scale: float,
        cap: float,
    ) -> None: ...
    def fill(
        self,
        name: str,
        first: int,
        values: _Stream | npt.NDArray[np.uint8],
        *,
        threads: int = 1,
        coding: str | None = None,
    ) -> None:
        """Pack a part of ``weight``, or copy ``norm`` or ``bias``.

        Raises:
            ValueError: there is no such part, it has another shape, or scales of ``coding`` are not finite.
        """

    def score(
        self,
        hidden: _Stream,
        scores: npt.NDArray[np.float32],
        *,
        threads: int,
        variant: str | None = None,
    ) -> None:
        """Compute the scores of all tokens of each row.

        Raises:
            ValueError: arrays that do not fit each other.
        """

    @property
    def weight_bytes(self) -> int: ...
