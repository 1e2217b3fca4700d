"""How long each layer takes where it stands, and how much memory it needs while it runs.

    one repetition    |-- layer 1 --|- layer 2 -|----- layer 3 -----| ...     one forward pass of a shard
                      ^ stamp       ^ stamp     ^ stamp             ^ stamp

Layers are not run by themselves: the shard is run as the runtime runs it, and the clock is read where
one layer ends and the next begins. So each finds the caches and the allocator as in a real run, the
times of a repetition add up to it, and a drift of the machine meets all layers alike. On a GPU the
stamps are events in its queue, which cost no waiting.

Under a quota of processor time a process runs, then stands still, again and again:

    layers     |--- 1 ---|-- 2 --|-------- 3 --------|        by the wall's clock the layer in which it
    process    |=====......=====......=====......====|        stood still is slow, the others are fast

so there a layer's time is its processor time, stretched as the whole was.

The peak of activations comes from the allocator: torch's profiler is told of each allocation and
release, in order, with marks between the layers. Nothing that is not a tensor counts, and nothing that
another thread or library does to the process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from pipeedge.base.errors import PipeEdgeError, RequestError
from pipeedge.base.payload import Payload, TensorSpec
from pipeedge.models import Shard

__all__ = [
    "Pacing",
    "Times",
    "activation_peaks",
    "made_up_payload",
    "shard_bytes",
    "summaries",
    "time_layers",
]

Times = list[list[float]]
"""Seconds, for each repetition of each layer."""

LEAST_REPETITIONS = 5
MOST_REPETITIONS = 50
ENOUGH_S = 5.0


@dataclass(frozen=True)
class Pacing:
    """How often."""

    repetitions: int | None = None
    """None: 5, and up to 50 where 5 take less than 5 s."""
    warmup: bool = True
    """One pass before, which does not count."""

    def __post_init__(self) -> None:
        if self.repetitions is not None and self.repetitions < 1:
            raise RequestError(f"-i/--iterations {self.repetitions}: at least 1 is needed")

    def repetitions_of(self, pass_s: float) -> int:
        """How many, when one takes ``pass_s``."""
        if self.repetitions is not None:
            return self.repetitions
        return min(MOST_REPETITIONS, max(LEAST_REPETITIONS, int(ENOUGH_S / max(pass_s, 1e-6))))


def made_up_payload(specs: Sequence[TensorSpec], device: torch.device, generator: torch.Generator) -> Payload:
    """Return a payload of these ``specs``. Times depend on shapes alone; no position is masked.

    Integers, which make up the first layer's input, are all 1: a token id that every vocabulary has, an
    attention mask that masks nothing, and the second of the two token types.
    """

    def tensor(spec: TensorSpec) -> torch.Tensor:
        if spec.dtype.is_floating_point:
            return torch.randn(spec.shape, generator=generator).to(spec.dtype)
        return torch.ones(spec.shape, dtype=spec.dtype)

    return tuple(tensor(spec).to(device) for spec in specs)


def shard_bytes(shard: Shard, layer: int) -> int:
    """Parameters and buffers of ``layer``, from 0, in bytes; embeddings and head included where they are.

    Args:
        shard: holds the layer; may be on ``meta``.
        layer: within the shard's range.
    """
    modules: list[nn.Module | None] = [shard.parts[str(layer)]]
    if layer == shard.layers.start:
        modules.append(shard.embeddings)
    if layer == shard.layers.stop - 1:
        modules.append(shard.head)
    tensors = [tensor for module in modules if module for tensor in (*module.parameters(), *module.buffers())]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def time_layers(
    shard: Shard,
    payload: Payload,
    pacing: Pacing,
    progress: Callable[[float], None] = lambda _part: None,
    clock: Callable[[], float] = time.perf_counter,
    work_clock: Callable[[], float] | None = None,
) -> tuple[Times, Payload]:
    """Time each layer of ``shard``, and return the times and the output of the shard.

    Args:
        shard: layers to time, on the same device as ``payload``.
        payload: input of the shard.
        pacing: number of passes and warm-up.
        progress: called between passes with the fraction that is done.
        clock: clock in seconds.
        work_clock: processor time of this process in seconds, if a quota suspends the process at times.
    """
    device = payload[0].device
    stamps = _EventStamps() if device.type == "cuda" else _ClockStamps(clock, work_clock)
    repetitions: list[list[float]] = []
    with torch.inference_mode(), _between_layers(shard, stamps.stamp):
        if pacing.warmup:
            shard(payload)
        # A first pass that nobody keeps would cost as much as one that counts, so the first one that
        # counts says how many follow.
        count, output = 1, payload
        while len(repetitions) < count:
            stamps.begin()
            output = shard(payload)
            stamps.end()
            repetitions.append(stamps.seconds())
            if len(repetitions) == 1:
                count = pacing.repetitions_of(sum(repetitions[0]) * stamps.stretch)
            progress(len(repetitions) / count)
    stretch = stamps.stretch
    return [[stretch * time for time in times] for times in zip(*repetitions, strict=True)], output


def summaries(times: Times) -> list[tuple[float, float]]:
    """Of each layer the time it usually takes, and the distance between the quartiles of its times.

    Usual times are medians, lengthened by what makes them add up to the median of whole passes. In each
    pass something holds up one layer or another: it is in no layer's median, but in every pass.

    Args:
        times: of the layers of one shard, in seconds, as ``time_layers`` gives them.
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


@contextmanager
def _between_layers(shard: Shard, mark: Callable[[], None]) -> Iterator[None]:
    """Call ``mark`` whenever one layer of ``shard`` ends and another begins.

    Embeddings belong to the first layer and heads to the last, so the pass itself begins and ends those.
    """

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs, output
        mark()

    inner = list(shard.parts.values())[:-1]
    handles = [part.register_forward_hook(hook) for part in inner]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _ClockStamps:
    """Times by the clock of the thread that computes, or by the work of the process, where that is asked."""

    def __init__(self, clock: Callable[[], float], work_clock: Callable[[], float] | None) -> None:
        self._clock = clock
        self._work_clock = work_clock
        self._began = self._elapsed = self._worked = 0.0
        self._stamps: list[float] = []

    @property
    def stretch(self) -> float:
        """Seconds that pass while a second of ``seconds`` does."""
        return self._elapsed / self._worked if self._work_clock and self._worked else 1.0

    def begin(self) -> None:
        self._began = self._clock()
        self._stamps = [self._now()]

    def stamp(self) -> None:
        self._stamps.append(self._now())

    def end(self) -> None:
        self.stamp()
        self._elapsed += self._clock() - self._began
        self._worked += self._stamps[-1] - self._stamps[0]

    def _now(self) -> float:
        return (self._work_clock or self._clock)()

    def seconds(self) -> list[float]:
        return [after - before for before, after in pairwise(self._stamps)]


class _EventStamps:
    """Times by a GPU's own clock."""

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
        self.stamp()
        torch.cuda.synchronize()

    def seconds(self) -> list[float]:
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._events)]


# --- activations ------------------------------------------------------------------------------------

_MARK = "pipeedge: a layer ends"
_ALLOCATION = "[memory]"
"""What torch's profiler calls an event of the allocator."""


def activation_peaks(shard: Shard, payload: Payload) -> tuple[list[int], Payload]:
    """Return the peak bytes in use while each layer runs, without weights and input, and the output."""
    if payload[0].device.type == "cuda":
        return _cuda_peaks(shard, payload)
    return _cpu_peaks(shard, payload)


def _cpu_peaks(shard: Shard, payload: Payload) -> tuple[list[int], Payload]:
    def mark() -> None:
        with torch.profiler.record_function(_MARK):
            pass

    cpu = torch.profiler.ProfilerActivity.CPU
    recording = torch.profiler.profile(activities=[cpu], profile_memory=True)
    with torch.inference_mode(), _between_layers(shard, mark), recording:
        output = shard(payload)
    # The public events leave out when memory was released; these are what they are made of.
    recorded: Any = recording.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() in (_ALLOCATION, _MARK)]
    events.sort(key=lambda event: event.start_ns())
    peaks = peaks_between([event.nbytes() if event.name() == _ALLOCATION else None for event in events])
    if len(peaks) != len(shard.parts):
        raise PipeEdgeError(f"torch's profiler tells of {len(peaks)} layers where {len(shard.parts)} ran")
    return peaks, output


def peaks_between(changes: Sequence[int | None]) -> list[int]:
    """Return the peaks of the running total of ``changes`` in bytes, one per section between marks (None)."""
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
    with torch.inference_mode(), _between_layers(shard, mark):
        output = shard(payload)
    mark()
    return peaks, output
