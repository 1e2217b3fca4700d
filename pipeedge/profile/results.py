"""Measurements of a model's layers, and how those of several runs are joined. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from pipeedge.base.errors import SpecError
from pipeedge.base.wording import count
from pipeedge.plan.specs import EndCosts, TransportHandling, short_dtype

__all__ = [
    "LayerResult",
    "LayerSteps",
    "LengthResult",
    "Measurement",
    "ProfileResults",
    "Shapes",
    "elements",
    "ranges_text",
]

Shapes = tuple[tuple[int, ...], ...]


def elements(shapes: Shapes) -> int:
    """Return the number of values of one item in a payload of these ``shapes``."""
    return sum(math.prod(shape) for shape in shapes)


@dataclass(frozen=True)
class Measurement:
    """Time and memory of one layer for a microbatch, with sentences of one length or with images."""

    shape_in: Shapes
    """Shapes of one item of the input."""
    shape_out: Shapes
    """Shapes of one item of the output."""
    time_s: float
    """Median seconds for one microbatch."""
    time_spread_s: float | None = None
    """Seconds between the quartiles of the repetitions."""
    activations_bytes: float | None = None
    """Peak bytes besides weights and input while the layer runs; a stage needs its layers' largest."""
    receive_s: float | None = None
    """Seconds to receive the layer's input from a link."""
    send_s: float | None = None
    """Seconds to send the layer's output to a link."""

    def check(self, what: str) -> None:
        """Raise ``SpecError`` about ``what`` if a number is impossible."""
        for name in ("time_s", "time_spread_s", "activations_bytes", "receive_s", "send_s"):
            _check_number(f"{what}: {name}", getattr(self, name))


def _check_number(what: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise SpecError(f"{what} is {value}; it must be finite and not negative")


@dataclass(frozen=True)
class LengthResult:
    """Measurement of one layer with sentences of another length."""

    tokens: int
    """Tokens of each sentence."""
    measured: Measurement

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise SpecError(f"{self.tokens} tokens: a sentence has at least 1")
        self.measured.check(f"{self.tokens} tokens")


@dataclass(frozen=True)
class LayerSteps:
    """Costs of one layer of a decoder in a step, as in ``plan.specs.StepCosts``."""

    fixed_s: float
    start_s: float
    row_s: float
    many_start_s: float
    many_row_s: float
    position_s: float
    chunk_position_s: float
    cache_bytes: float
    window: int
    """Positions that a row attends to at most, or 0."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check_number(f"steps: {name}", value)


@dataclass(frozen=True)
class LayerResult:
    """Results of one layer."""

    layer: int
    """Number of the layer, from 1."""
    memory_bytes: float
    """Bytes of parameters and buffers."""
    measured: Measurement
    """Measurement with images, or with the longest sentences."""
    float32_bytes: float | None = None
    """Bytes of parameters and buffers in float32, as ``models.yml`` counts them, or None if measured so."""
    shared_with: int | None = None
    """Number of the nearest earlier layer with the same weights, or None if they are its own."""
    lengths: tuple[LengthResult, ...] = ()
    """Measurements with sentences of other lengths."""
    steps: LayerSteps | None = None
    """Costs in the steps of a decoder, or None for an encoder."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the file that this program does not know."""

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise SpecError(f"layer {self.layer}: layers are counted from 1")
        if self.shared_with is not None and not 1 <= self.shared_with < self.layer:
            raise SpecError(
                f"layer {self.layer}: shared_with is {self.shared_with}; it must be an earlier layer"
            )
        self.measured.check(f"layer {self.layer}")
        for name in ("memory_bytes", "float32_bytes"):
            _check_number(f"layer {self.layer}: {name}", getattr(self, name))


@dataclass(frozen=True)
class ProfileResults:
    """Layers of one model, measured under the same conditions and validated on creation.

    Raises:
        SpecError: Layers are beyond the model, out of order or repeated.
    """

    model_name: str
    dtype: str
    """Number type of weights and computation."""
    batch_size: int
    """Number of items in a microbatch."""
    layers: int
    """Number of layers of the whole model."""
    profile_data: tuple[LayerResult, ...]
    """Measured layers, sorted; not necessarily all."""
    device: str | None = None
    """``cpu`` or ``cuda:N``, or None if the file does not record it."""
    threads: int | None = None
    """Number of compute threads, or None if the file does not record it."""
    kernels: str | None = None
    """Kernels of the linear layers (``models.kernels``), or None if the file does not record them."""
    process_bytes: float | None = None
    """Memory of a rank before it loads a shard, in bytes."""
    busy_w: float | None = None
    """Watts of the device while it was measured, or None if unknown."""
    idle_w: float | None = None
    """Watts of the device while it waits, or None if unknown."""
    agreement: float | None = None
    """Fraction of items whose class is that of float32, or None if it was not measured."""
    tokens: int | None = None
    """Tokens of each sentence, or None for images and if the file does not record it."""
    feed_s: float | None = None
    """Seconds that a data rank takes to read and feed a microbatch, or None if unknown."""
    collect_s: float | None = None
    """Seconds that a data rank takes to collect the results of a microbatch, or None if unknown."""
    overhead_s: float | None = None
    """Seconds that a stage takes for a microbatch besides its layers and links, or None if unknown."""
    handling: Mapping[str, TransportHandling] = field(default_factory=dict)
    """Costs of each transport for a stage; empty if unknown."""
    ends: EndCosts | None = None
    """Costs of the ends of a decoder, or None for an encoder."""
    context: int | None = None
    """Longest sequence of a decoder in tokens, or None for an encoder."""
    residual: float | None = None
    """Largest relative deviation of a measured step of a decoder from what its layers' costs say."""
    variation: float | None = None
    """Standard deviation of the time of a step of a decoder, as a part of the mean, or None if unknown."""
    load_s_per_byte: float | None = None
    """Seconds to load a byte of a decoder's weights, or None if unknown."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the file that this program does not know."""

    def __post_init__(self) -> None:
        numbers = [result.layer for result in self.profile_data]
        for before, after in pairwise(numbers):
            if before == after:
                raise SpecError(f"layer {after} is listed twice")
            if after < before:
                raise SpecError(f"layer {after} follows layer {before}, but layers must be sorted")
        if numbers and numbers[-1] > self.layers:
            raise SpecError(f"layer {numbers[-1]} is beyond the model's {count(self.layers, 'layer')}")
        for result in self.profile_data:
            if (result.steps is None) != (self.ends is None):
                raise SpecError(
                    f"layer {result.layer}: a decoder has steps in each layer, and ends at the top"
                )
            other = tuple(length.tokens for length in result.lengths)
            if other and (self.tokens is None or self.tokens in other or len(set(other)) < len(other)):
                raise SpecError(
                    f"layer {result.layer}: lengths need the key tokens at the top, and each length only once"
                )
            if other != self.other_tokens:
                raise SpecError(
                    f"layer {result.layer} has lengths of {_listed(other)} tokens, but layer {numbers[0]} of "
                    f"{_listed(self.other_tokens)}"
                )

    @property
    def other_tokens(self) -> tuple[int, ...]:
        """Sentence lengths measured besides ``tokens``, the same for all layers."""
        return tuple(length.tokens for length in self.profile_data[0].lengths) if self.profile_data else ()

    @property
    def missing(self) -> tuple[int, ...]:
        """Layers of the model that were not measured."""
        known = {result.layer for result in self.profile_data}
        return tuple(layer for layer in range(1, self.layers + 1) if layer not in known)

    def whole(self, source: str) -> ProfileResults:
        """Return these results, or raise ``SpecError`` if layers are missing."""
        if self.missing:
            raise SpecError(
                f"{source} lacks layers {ranges_text(self.missing)} of {self.layers} of {self.model_name}; "
                "profile those first (-l, -L)"
            )
        return self

    def check_conditions(self, old: ProfileResults, source: str) -> None:
        """Raise ``SpecError`` if ``old``, the contents of ``source``, was measured under other conditions."""
        here = {
            "model": self.model_name,
            "dtype": short_dtype(self.dtype),
            "batch size": self.batch_size,
            "number of layers": self.layers,
            "device": self.device,
            "thread count": self.threads,
            "set of kernels": self.kernels,
            "sentence length": self._lengths_text,
        }
        there = {
            "model": old.model_name,
            "dtype": short_dtype(old.dtype),
            "batch size": old.batch_size,
            "number of layers": old.layers,
            "device": old.device,
            "thread count": old.threads,
            "set of kernels": old.kernels,
            "sentence length": old._lengths_text,
        }
        for what, value in here.items():
            if there[what] is not None and value is not None and there[what] != value:
                raise SpecError(
                    f"{source} has results of another {what}: {there[what]}, but now it is {value}; "
                    "choose another file with -o"
                )

    def is_in(self, old: ProfileResults) -> bool:
        """Return whether ``old`` has results of all these layers."""
        return {result.layer for result in self.profile_data} <= {result.layer for result in old.profile_data}

    def check_extends(self, old: ProfileResults, source: str) -> None:
        """Raise ``SpecError`` unless these layers may be added to ``old``, the contents of ``source``."""
        self.check_conditions(old, source)
        known = {result.layer for result in old.profile_data}
        twice = [result.layer for result in self.profile_data if result.layer in known]
        if twice:
            raise SpecError(
                f"{source} has layers {ranges_text(twice)} already, and results are never replaced; choose "
                "other layers (-l, -L) or another file (-o), or use them as they are (--from-results)"
            )

    @property
    def _lengths_text(self) -> str | None:
        if not self.profile_data:
            return None
        if self.tokens is None:
            return "unknown"
        return f"{_listed(sorted((self.tokens, *self.other_tokens)))} tokens"

    def joined(self, old: ProfileResults, source: str) -> ProfileResults:
        """Return the layers of ``old``, the contents of ``source``, together with these.

        Raises:
            SpecError: These layers may not be added, as in ``check_extends``.
        """
        self.check_extends(old, source)
        together = sorted((*old.profile_data, *self.profile_data), key=lambda result: result.layer)
        return replace(
            old,
            profile_data=tuple(together),
            device=old.device or self.device,
            threads=old.threads or self.threads,
            kernels=old.kernels or self.kernels,
            process_bytes=max((x for x in (old.process_bytes, self.process_bytes) if x), default=None),
            busy_w=old.busy_w if self.busy_w is None else self.busy_w,
            idle_w=old.idle_w if self.idle_w is None else self.idle_w,
            agreement=old.agreement if self.agreement is None else self.agreement,
            feed_s=old.feed_s if self.feed_s is None else self.feed_s,
            collect_s=old.collect_s if self.collect_s is None else self.collect_s,
            overhead_s=old.overhead_s if self.overhead_s is None else self.overhead_s,
            handling=self.handling or old.handling,
            residual=max((x for x in (old.residual, self.residual) if x is not None), default=None),
            variation=max((x for x in (old.variation, self.variation) if x is not None), default=None),
            load_s_per_byte=old.load_s_per_byte if self.load_s_per_byte is None else self.load_s_per_byte,
        )


def _listed(tokens: Sequence[int]) -> str:
    return ", ".join(map(str, tokens)) or "no other"


def ranges_text(layers: Sequence[int]) -> str:
    """Format layer numbers as ranges: ``1-3, 7`` for 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and parts[-1][1] == layer - 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
