"""Measure how long each layer takes within a shard, and how much memory it needs while it runs.

    one repetition    |-- layer 1 --|- layer 2 -|----- layer 3 -----| ...     one forward pass of a shard
                      ^ stamp       ^ stamp     ^ stamp             ^ stamp

Layers are not run separately: the shard is run as in the runtime, and the clock is read where one layer ends
and the next begins. So each layer finds the caches and the allocator as in a real run, the times of a
repetition add up to the whole pass, and a drift of the machine affects all layers equally. On a GPU the
stamps are events in its queue, which need no waiting.

Under a quota of processor time a process runs and pauses in turn:

    layers     |--- 1 ---|-- 2 --|-------- 3 --------|        by wall-clock time, layers with a pause
    process    |=====......=====......=====......====|        are slow and the others are fast

so in that case a layer's time is its processor time, stretched like that of the whole pass.

The peak of activations comes from the allocator: torch's profiler records each allocation and release in
order, with marks between the layers. Only tensors count, and nothing that another thread or library
allocates.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from pipeedge.base.errors import PipeEdgeError, RequestError
from pipeedge.base.payload import Payload, PixelTable, TensorSpec
from pipeedge.models.family import attends
from pipeedge.models.shard import Shard

__all__ = [
    "Pacing",
    "Times",
    "activation_peaks",
    "look_up",
    "made_up_payload",
    "shard_bytes",
    "summaries",
    "time_layers",
    "without_delays",
]

Figure = TypeVar("Figure", int, float)
Times = list[list[float]]
"""Seconds of each repetition, for each layer."""

LEAST_REPETITIONS = 5
MOST_REPETITIONS = 50
ENOUGH_S = 5.0
SHORTEST_S = 0.25
"""Shortest time to measure for: 50 passes of a tiny model take less than one interruption of the machine."""
_DELAYED = 1.5
"""Longest time that counts, as a multiple of the median."""


@dataclass(frozen=True)
class Pacing:
    """Number of repetitions of a measurement."""

    repetitions: int | None = None
    """Number of repetitions, or None for 5, up to 50 if 5 take less than 5 s, and more if 50 take less than
    0.25 s."""
    warmup: bool = True
    """Whether to run one pass first that does not count."""

    def __post_init__(self) -> None:
        if self.repetitions is not None and self.repetitions < 1:
            raise RequestError(f"-i/--iterations {self.repetitions}: must be at least 1")

    def repetitions_of(self, pass_s: float) -> int:
        """Return the number of repetitions if one takes ``pass_s`` seconds."""
        if self.repetitions is not None:
            return self.repetitions
        pass_s = max(pass_s, 1e-4)
        usual = min(MOST_REPETITIONS, max(LEAST_REPETITIONS, int(ENOUGH_S / pass_s)))
        return max(usual, int(SHORTEST_S / pass_s))


def without_delays(seconds: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the times of equal work, of which none counts more than half as long again as the median.

    Their mean is what the work takes in a run, which is as long as its slow steps and its fast ones together.
    Longer times are delays that the machine had for another reason.

    Raises:
        ValueError: There are no times, and so no mean.
    """
    times = np.asarray(seconds, np.float64)
    if not times.size:
        raise ValueError("nothing was timed")
    return np.asarray(np.minimum(times, _DELAYED * np.median(times)))


def made_up_payload(specs: Sequence[TensorSpec], device: torch.device, generator: torch.Generator) -> Payload:
    """Return a payload of these ``specs``; times depend only on shapes, and no position is masked.

    Integers, which are the inputs of a text model's first layer, are 1: a token that every vocabulary has,
    an unmasked position, and the second of the two token types.
    """

    def tensor(spec: TensorSpec) -> torch.Tensor:
        if spec.dtype.is_floating_point:
            return torch.randn(spec.shape, generator=generator).to(spec.dtype)
        return torch.ones(spec.shape, dtype=spec.dtype)

    return tuple(tensor(spec).to(device) for spec in specs)


def look_up(payload: Payload, pixels: PixelTable | None, shard: Shard) -> Payload:
    """Return the values of the bytes of pictures in ``payload``, or ``payload`` itself without ``pixels``."""
    if pixels is None:
        return payload
    return tuple(pixels.look_up(tensor, shard.stream_dtype) for tensor in payload)


def shard_bytes(shard: Shard, layer: int) -> int:
    """Return the bytes of the parameters and buffers of ``layer``, with embeddings or head if it has them.

    Weights that several layers share count in each of them, as in a stage of that layer alone.

    Args:
        shard: Shard that contains the layer; may be on ``meta``.
        layer: Number of the layer, from 0, within the shard's range.
    """
    modules: list[nn.Module | None] = [shard.parts[str(layer)]]
    if layer == shard.layers.start:
        modules.append(shard.embeddings)
    if layer == shard.layers.stop - 1:
        modules.append(shard.head)
    if attends(layer):
        modules.append(shard.shared)
    tensors = [tensor for module in modules if module for tensor in (*module.parameters(), *module.buffers())]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def time_layers(
    shard: Shard,
    payload: Payload,
    pacing: Pacing,
    progress: Callable[[float], None] = lambda _part: None,
    clock: Callable[[], float] = time.perf_counter,
    work_clock: Callable[[], float] | None = None,
    pixels: PixelTable | None = None,
) -> tuple[Times, Payload]:
    """Return the times of each layer of ``shard``, and the shard's output.

    Args:
        shard: Shard on the device of ``payload``.
        payload: Input of the shard.
        pacing: Number of repetitions.
        progress: Called between passes with the fraction that is done.
        clock: Returns the time in seconds.
        work_clock: Returns the processor time of this process in seconds, if a quota makes it pause.
        pixels: Values of the bytes of pictures, if ``payload`` has bytes. Looking them up is part of the
            first layer's time, because the first stage of a run does it.
    """
    device = payload[0].device
    stamps = _EventStamps() if device.type == "cuda" else _ClockStamps(clock, work_clock)
    repetitions: list[list[float]] = []
    with torch.inference_mode():
        if pacing.warmup:
            shard(look_up(payload, pixels, shard))
        # An extra pass to choose the number of repetitions would cost as much as one that counts, so the
        # first one that counts decides.
        count, output = 1, payload
        while len(repetitions) < count:
            stamps.begin()
            output = shard(look_up(payload, pixels, shard), stamps.stamp)
            stamps.end()
            repetitions.append([sum(parts) for parts in _by_layer(stamps.seconds(), len(shard.parts))])
            if len(repetitions) == 1:
                count = pacing.repetitions_of(sum(repetitions[0]) * stamps.stretch)
            progress(len(repetitions) / count)
    stretch = stamps.stretch
    return [[stretch * time for time in times] for times in zip(*repetitions, strict=True)], output


def summaries(times: Times) -> list[tuple[float, float]]:
    """Return the typical time of each layer, and the distance between the quartiles of its times.

    Typical times are medians, scaled so that they add up to the median of whole passes. Each pass is delayed
    in one layer or another; these delays are in every pass, but in no layer's median.

    Args:
        times: Seconds of the layers of one shard, as ``time_layers`` returns them.
    """
    found = []
    for layer in times:
        if len(layer) == 1:
            found.append((layer[0], 0.0))
            continue
        low, middle, high = statistics.quantiles(layer, n=4, method="inclusive")
        found.append((middle, high - low))
    whole = statistics.median(sum(each) for each in zip(*times, strict=True))
    medians = sum(middle for middle, _ in found)
    scale = whole / medians if medians else 1.0
    return [(middle * scale, spread) for middle, spread in found]


def _by_layer(figures: list[Figure], layers: int) -> list[list[Figure]]:
    """Return the figures of each layer from those of a pass, which may go through the layers repeatedly."""
    return [figures[layer::layers] for layer in range(layers)]


class _ClockStamps:
    """Times layers by a clock, or by the processor time of the process if ``work_clock`` is given."""

    def __init__(self, clock: Callable[[], float], work_clock: Callable[[], float] | None) -> None:
        self._clock = clock
        self._work_clock = work_clock
        self._began = self._elapsed = self._worked = 0.0
        self._stamps: list[float] = []

    @property
    def stretch(self) -> float:
        """Elapsed seconds per second of ``seconds``."""
        return self._elapsed / self._worked if self._work_clock and self._worked else 1.0

    def begin(self) -> None:
        self._began = self._clock()
        self._stamps = [self._now()]

    def stamp(self) -> None:
        self._stamps.append(self._now())

    def end(self) -> None:
        self._elapsed += self._clock() - self._began
        self._worked += self._stamps[-1] - self._stamps[0]

    def _now(self) -> float:
        return (self._work_clock or self._clock)()

    def seconds(self) -> list[float]:
        return [after - before for before, after in pairwise(self._stamps)]


class _EventStamps:
    """Times layers by a GPU's own clock."""

    stretch = 1.0

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def begin(self) -> None:
        torch.cuda.synchronize()
        self._events = []
        self.stamp()

    def stamp(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def end(self) -> None:
        torch.cuda.synchronize()

    def seconds(self) -> list[float]:
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._events)]


# --- activations ------------------------------------------------------------------------------------

_MARK = "pipeedge: a layer ends"
_ALLOCATION = "[memory]"
"""Name that torch's profiler gives to an event of the allocator."""


def activation_peaks(shard: Shard, payload: Payload) -> tuple[list[int], Payload]:
    """Return each layer's peak memory besides weights and input, in bytes, and the shard's output."""
    if payload[0].device.type == "cuda":
        return _cuda_peaks(shard, payload)
    return _cpu_peaks(shard, payload)


def _cpu_peaks(shard: Shard, payload: Payload) -> tuple[list[int], Payload]:
    def mark() -> None:
        with torch.profiler.record_function(_MARK):
            pass

    cpu = torch.profiler.ProfilerActivity.CPU
    recording = torch.profiler.profile(activities=[cpu], profile_memory=True)
    with torch.inference_mode(), recording:
        output = shard(payload, mark)
    # The public events omit releases of memory, so use the raw events.
    recorded: Any = recording.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() in (_ALLOCATION, _MARK)]
    events.sort(key=lambda event: event.start_ns())
    peaks = peaks_between([event.nbytes() if event.name() == _ALLOCATION else None for event in events])
    *peaks, _ = peaks  # nothing follows the last mark
    layers = len(shard.parts)
    if not peaks or len(peaks) % layers:
        raise PipeEdgeError(f"torch's profiler recorded {len(peaks)} layers, but {layers} ran")
    return [max(parts) for parts in _by_layer(peaks, layers)], output


def peaks_between(changes: Sequence[int | None]) -> list[int]:
    """Return the peak of the running total of ``changes`` in bytes for each part between marks (None)."""
    total = peak = 0
    peaks = []
    for change in (*changes, None):
        if change is None:
            peaks.append(peak)
            peak = total
        else:
            total += change
            peak = max(peak, total)
    return peaks


def _cuda_peaks(shard: Shard, payload: Payload) -> tuple[list[int], Payload]:
    peaks: list[int] = []

    def mark() -> None:
        peaks.append(torch.cuda.max_memory_allocated() - before)
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        output = shard(payload, mark)
    return [max(parts) for parts in _by_layer(peaks, len(shard.parts))], output
