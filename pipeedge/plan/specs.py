"""Models, device types and links as the scheduler's YAML files describe them. Pure.

Sizes are bytes, speeds bytes a second, times seconds. ``extra`` holds the keys of a file that no field here
stands for, so that ``plan.spec_files`` writes back what it has read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeedge import _native
from pipeedge.base.errors import SpecError

__all__ = [
    "BYTES_PER_MB",
    "BYTES_PER_SECOND_PER_MBPS",
    "LENGTH_KEYS",
    "DeviceType",
    "LengthProfile",
    "ModelProfile",
    "ModelSpec",
    "NeighborLink",
    "short_dtype",
]

BYTES_PER_MB = 1 << 20
"""``mem_MB`` in YAML counts 2**20 bytes."""
BYTES_PER_SECOND_PER_MBPS = (1 << 20) / 8
"""``bw_Mbps`` in YAML counts 2**20 bits a second."""
LENGTH_KEYS = ("receive_s", "send_s", "activations_MB")
"""Keys that a profile may have beside its times for each sentence length, with one number for each layer."""


def short_dtype(dtype: str) -> str:
    """Return the name of a dtype without a leading ``torch.``."""
    return dtype.removeprefix("torch.")


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a model's layers, the same on every device."""

    mem_bytes: tuple[float, ...]
    """Bytes of each layer's weights in float32."""
    elements_in: int
    """Number of elements of one item that enter the first layer."""
    elements_out: tuple[int, ...]
    """Number of elements of one item that leave each layer."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    tokens: int | None = None
    """Tokens of the sentences whose elements are counted, or None if unknown and for images."""
    elements_in_per_token: int = 0
    """Number of elements that each further token adds to ``elements_in``."""
    elements_out_per_token: tuple[int, ...] = ()
    """Number of elements that each further token adds after each layer; empty without ``tokens``."""
    shared_with: tuple[int, ...] = ()
    """Nearest earlier layer, from 1, with the same weights as each layer, or 0; empty if none are shared."""

    def __post_init__(self) -> None:
        _check_numbers("mem_bytes", self.mem_bytes)
        _check_numbers("elements_in", [self.elements_in, self.elements_in_per_token])
        _check_numbers("elements_out", [*self.elements_out, *self.elements_out_per_token])
        if self.tokens is not None and len(self.elements_out_per_token) != len(self.elements_out):
            raise SpecError(
                f"elements_out_per_token has {len(self.elements_out_per_token)} layers, elements_out "
                f"{len(self.elements_out)}: give both one value a layer"
            )
        if self.shared_with and len(self.shared_with) != len(self.mem_bytes):
            raise SpecError(
                f"shared_with has {len(self.shared_with)} layers, mem_bytes {len(self.mem_bytes)}: "
                "give both one value a layer"
            )
        if len(self.mem_bytes) != len(self.elements_out):
            raise SpecError(
                f"mem_bytes has {len(self.mem_bytes)} layers, elements_out {len(self.elements_out)}: "
                "give both one value a layer"
            )

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.mem_bytes)

    def at_tokens(self, tokens: int) -> ModelSpec:
        """Return the model with the sizes for sentences of ``tokens``; unchanged if it cannot be scaled."""
        if self.tokens is None:
            return self
        more = tokens - self.tokens
        return replace(
            self,
            tokens=tokens,
            elements_in=max(0, self.elements_in + more * self.elements_in_per_token),
            elements_out=tuple(
                max(0, elements + more * each)
                for elements, each in zip(self.elements_out, self.elements_out_per_token, strict=True)
            ),
        )


@dataclass(frozen=True)
class LengthProfile:
    """Measurements of a profile for sentences of another length."""

    tokens: int
    """Tokens of each sentence."""
    time_s: tuple[float, ...]
    """Seconds of each layer for one microbatch."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_numbers("time_s", self.time_s)


@dataclass(frozen=True)
class ModelProfile:
    """Measurements of one model's layers on one kind of device."""

    batch_size: int
    """Number of items in a microbatch."""
    dtype: str
    """Name of the dtype as the file spells it, such as ``torch.float32``."""
    time_s: tuple[float, ...]
    """Seconds of each layer for one microbatch."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    tokens: int | None = None
    """Tokens of each sentence, or None if unknown and for images."""
    lengths: tuple[LengthProfile, ...] = ()
    """Measurements for sentences of other lengths."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise SpecError(f"a profile's batch_size is {self.batch_size}; it must be at least 1")
        _check_numbers("time_s", self.time_s)
        if self.lengths and self.tokens is None:
            raise SpecError("a profile with lengths needs tokens, the length of time_s")

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """Measured sentence lengths, shortest first; empty if unknown and for images."""
        first = () if self.tokens is None else (self.tokens,)
        return tuple(sorted((*first, *(other.tokens for other in self.lengths))))

    def fits_tokens(self, tokens: int) -> bool:
        """Return whether the profile covers sentences of ``tokens`` tokens."""
        return len(self.known_tokens) > 1 or self.known_tokens == (tokens,)

    def at_tokens(self, tokens: int) -> ModelProfile:
        """Return the profile for sentences of ``tokens``; unchanged if only one length was measured."""
        if not self.lengths or self.tokens is None:
            return self
        extra = dict(self.extra)
        for key in LENGTH_KEYS:
            lists = {other.tokens: other.extra.get(key) for other in self.lengths}
            lists[self.tokens] = extra.get(key)
            if all(_numbers(each, len(self.time_s)) for each in lists.values()):
                of_link = key in ("receive_s", "send_s")
                extra[key] = list(_at_length(lists, tokens, attention=not of_link))
        times = {self.tokens: self.time_s, **{other.tokens: other.time_s for other in self.lengths}}
        time_s = tuple(_at_length(times, tokens, attention=True))
        return replace(self, time_s=time_s, extra=extra, tokens=tokens, lengths=())

    @property
    def agreement(self) -> float | None:
        """Fraction of items classified as in float32 when this was profiled, or None if unknown."""
        if short_dtype(self.dtype) == "float32":
            return 1.0
        value = self.extra.get("agreement")
        return float(value) if isinstance(value, int | float) else None

    def weights_of(self, model: ModelSpec) -> tuple[float, ...]:
        """Return the bytes of each layer's weights in this dtype, as ``sched-pipeline`` counts them."""
        exact = self.extra.get("weights_MB")
        if _numbers(exact, model.layers):
            return tuple(megabytes * BYTES_PER_MB for megabytes in exact or ())
        return tuple(_native.scaled_weights(short_dtype(self.dtype), list(model.mem_bytes)))

    def same_conditions(self, other: ModelProfile) -> bool:
        """Return whether both were measured with the same microbatch size and dtype."""
        return self.batch_size == other.batch_size and short_dtype(self.dtype) == short_dtype(other.dtype)


@dataclass(frozen=True)
class DeviceType:
    """A kind of hardware, with its profiles by model."""

    mem_bytes: float
    bw_bytes_per_s: float
    profiles: Mapping[str, tuple[ModelProfile, ...]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_numbers("mem_bytes", [self.mem_bytes])
        _check_numbers("bw_bytes_per_s", [self.bw_bytes_per_s])


@dataclass(frozen=True)
class NeighborLink:
    """Speed of the connection from a host to a neighbour."""

    bw_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers("bw_bytes_per_s", [self.bw_bytes_per_s])
        _check_numbers("latency_s", [self.latency_s])


def _numbers(values: Any, layers: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == layers
        and all(isinstance(value, int | float) for value in values)
    )


def _at_length(lists: Mapping[int, Any], tokens: int, *, attention: bool) -> Iterator[float]:
    """Interpolate the numbers of each layer between measured lengths.

    Args:
        lists: numbers of each layer, by length in tokens.
        tokens: length to interpolate for.
        attention: whether the numbers of attention layers grow faster than linearly.
    """
    known = sorted(lists)
    for layer, values in enumerate(zip(*(lists[each] for each in known), strict=True)):
        yield _native.at_length(
            [float(each) for each in known], list(values), float(tokens), layer if attention else -1
        )


def _check_numbers(name: str, values: Iterable[float]) -> None:
    for value in values:
        if not (math.isfinite(value) and value >= 0):
            raise SpecError(f"{name} holds {value}; numbers must be finite and not negative")
