"""PipeEdge's compiled core (src-native/bindings/module.cpp)."""

from typing import Literal, final

import numpy as np
import numpy.typing as npt

@final
class ScheduleResult:
    """A schedule and what is proven about it."""

    @property
    def status(self) -> Literal["optimal", "bounded", "infeasible", "unknown"]:
        """Whether the objective is proven to be the least, is one within ``gap`` of it, or there is none.

        ``unknown``: the time was up before any schedule was found or ruled out.
        """

    @property
    def stages(self) -> npt.NDArray[np.int64]:
        """``[stages, 3]``: host, first layer, last layer; layers half-open from 0. Empty without one."""

    @property
    def link_bits(self) -> list[int]:
        """Bits a value on the link behind each stage but the last; 0: as it is."""

    @property
    def objective_s(self) -> float:
        """Seconds: the bottleneck or the latency, as asked for; infinite without a schedule."""

    @property
    def lower_bound_s(self) -> float:
        """Seconds that no schedule can beat; infinite when none exists."""

    @property
    def gap(self) -> float:
        """``(objective - lower bound) / objective``; 0 when proven, 1 when nothing was found."""

    @property
    def bottleneck_s(self) -> float:
        """Seconds between one microbatch and the next: the slowest stage or link."""

    @property
    def latency_s(self) -> float:
        """Seconds of one microbatch through an idle pipeline, all stages and links."""

    @property
    def elapsed_s(self) -> float:
        """Seconds the solver took."""

def at_length(lengths: list[float], values: list[float], wanted: float, layer: int) -> float:
    """Return what a layer takes for sentences of ``wanted`` tokens (``src-native/core/lengths.hpp``).

    Args:
        lengths: tokens of a sentence at which it was measured, ascending.
        values: what was measured at each of them.
        wanted: tokens of a sentence.
        layer: from 0, which says whether it holds attention; -1: a quantity that grows as bytes do.
    """

def element_bytes() -> dict[str, int]:
    """Return the bytes of a value that crosses a cut, by the number type of the stage that sends it."""

def scaled_weights(dtype: str, float32_bytes: list[float]) -> list[float]:
    """Return the bytes of each layer's weights in a number type, where no profile says them exactly.

    Args:
        dtype: number type, without ``torch.``.
        float32_bytes: bytes of each layer's weights in float32.

    Raises:
        ValueError: a number type that is not known.
    """

def schedule(
    *,
    mem_bytes: npt.ArrayLike,
    elements_out: npt.ArrayLike,
    elements_in: float,
    type_mem_bytes: npt.ArrayLike,
    type_bw_bytes_per_s: npt.ArrayLike,
    type_time_s: npt.ArrayLike,
    host_types: npt.ArrayLike,
    link_hosts: npt.ArrayLike = ...,
    link_bw_bytes_per_s: npt.ArrayLike = ...,
    link_latency_s: npt.ArrayLike = ...,
    data_host: int | None = None,
    batch_size: float = 8.0,
    element_bytes: float = 4.0,
    buffers_in: float = 2.0,
    buffers_out: float = 2.0,
    objective: Literal["throughput", "latency"] = "throughput",
    time_limit_s: float = 10.0,
    type_receive_s: npt.ArrayLike = ...,
    type_send_s: npt.ArrayLike = ...,
    type_activation_bytes: npt.ArrayLike = ...,
    type_stage_s: npt.ArrayLike = ...,
    link_bits: int | None = 0,
    type_feed_s: npt.ArrayLike = ...,
    type_collect_s: npt.ArrayLike = ...,
    input_bytes: float | None = None,
) -> ScheduleResult:
    """Find the best schedule of ``L`` layers on ``H`` hosts of ``T`` types, without the interpreter lock.

    Args:
        mem_bytes: ``[L]``, weights of each layer.
        elements_out: ``[L]``, elements of one item that leave each layer.
        elements_in: elements of one item that enter the first layer.
        type_mem_bytes: ``[T]``, memory of a host of each type.
        type_bw_bytes_per_s: ``[T]``, bandwidth of a host's interface, either direction.
        type_time_s: ``[T, L]``, seconds of each layer for a microbatch of ``batch_size`` items.
        host_types: ``[H]``, index of each host's type.
        link_hosts: ``[K, 2]``, from and to, of links that differ from what the types say. The opposite
            direction, unless listed, is the same.
        link_bw_bytes_per_s: ``[K]``; 0 means that nothing passes.
        link_latency_s: ``[K]``, added to each message.
        data_host: the host whose links to the first stage and from the last are counted.
        batch_size: items of a microbatch.
        element_bytes: bytes of an element.
        buffers_in: microbatches held in front of a stage, as memory.
        buffers_out: microbatches held behind it.
        objective: the least bottleneck (then fewest hosts, then least latency), or the least latency
            (then least bottleneck, then fewest hosts).
        time_limit_s: wall clock; when it is up, the best answer so far is returned with its bound.
        type_receive_s: ``[T, L]``, seconds of taking a microbatch from a link, where the layer is the first
            of its stage; without it nothing.
        type_send_s: ``[T, L]``, the same of passing it on, where the layer is the last.
        type_activation_bytes: ``[T, L]``, memory beside weights and buffers while the layer computes; a stage
            needs the largest.
        type_stage_s: ``[T, L + 1, L + 1]``, what a type bids for the stage ``[first, last)``, infinite where
            it does not take it. Bids stand for times, handling and memory, which should be 0 then.
        link_bits: bits a value on links between stages, 0: as they are; None: as wide as links can be without
            being the bottleneck (throughput only).
        type_feed_s: ``[T]``, seconds to read and feed a microbatch where a type is the data host's.
        type_collect_s: ``[T]``, seconds to collect its results there. A stage on the data host takes both
            beside its own time; without one they overlap.
        input_bytes: bytes of one item of input; None: ``elements_in * element_bytes``.

    Raises:
        ValueError: shapes that disagree, numbers that are negative or not finite, indices out of range.
    """

# --- codec: the layout of the codes is in src-native/codec/codec.hpp ---

def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes of ``count`` codes of ``bits`` bits.

    That is ``ceil(count * bits / 8)``, and up to 2 more where the last block is not a multiple of 8.

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
    variant: str | None = None,
) -> int | None:
    """Quantise and pack ``values``: ``x' = offset + code * scale``, a scale and an offset for each row.

    The levels of a row run from ``max(min, mean - low * deviation)`` to ``min(max, mean + high *
    deviation)``, both included; the deviation is the mean absolute one. Infinite factors give the whole
    range. A row whose values are all the same is exact.

    Args:
        values: contiguous; float32, or the bits of bfloat16 as uint16.
        rows: of equal length, into which the values are split.
        bits: 2 to 8, or 16.
        low: factor for the lower end of the range, 0 or more.
        high: factor for the upper end, 0 or more.
        codes: written; ``packed_bytes`` of them.
        ranges: written; the scales of all rows, then the offsets.
        variant: one of ``codec_variants``; None for the best. All give the same result.

    Returns:
        The first row with a NaN or an infinity, where it stopped; None if there is none.

    Raises:
        ValueError: arrays that do not fit each other, bits or factors outside their range.
    """

def decode(
    *,
    codes: npt.NDArray[np.uint8],
    ranges: npt.NDArray[np.float32],
    bits: int,
    values: npt.NDArray[np.float32] | npt.NDArray[np.uint16],
    variant: str | None = None,
) -> None:
    """Reverse ``encode``, into ``values``.

    Raises:
        ValueError: arrays that do not fit each other.
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
