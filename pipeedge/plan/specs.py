"""Models, device types and links as the scheduler's YAML files describe them. Pure.

Sizes are bytes, speeds bytes a second, times seconds. ``extra`` holds the keys of a file that no field here
stands for, so that ``plan.spec_writing`` writes back what ``plan.spec_files`` has read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeedge import _native
from pipeedge.base.errors import SpecError

__all__ = [
    "BYTES_PER_MB",
    "BYTES_PER_SECOND_PER_MBPS",
    "DeviceType",
    "EndCosts",
    "LengthProfile",
    "ModelProfile",
    "ModelSpec",
    "NeighborLink",
    "SpecFiles",
    "StepCosts",
    "TransportHandling",
    "short_dtype",
]

BYTES_PER_MB = 1 << 20
"""``mem_MB`` in YAML counts 2**20 bytes."""
BYTES_PER_SECOND_PER_MBPS = (1 << 20) / 8
"""``bw_Mbps`` in YAML counts 2**20 bits a second."""


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
    context: int | None = None
    """Longest sequence of a decoder in tokens, or None for an encoder."""
    windows: tuple[int, ...] = ()
    """Positions that a row attends to at most in each layer of a decoder, or 0; empty without windows."""
    shared_with: tuple[int, ...] = ()
    """Nearest earlier layer, from 1, with the same weights as each layer, or 0; empty if none are shared."""
    agreement_at_bits: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """Fraction of items classified as with uncompressed links if the cut after each layer but the last sends
    so many bits per value, by these bits; empty if unknown."""

    def __post_init__(self) -> None:
        for bits, agreement in self.agreement_at_bits.items():
            _check_numbers(f"agreement_at_bits {bits}", agreement)
        _check_numbers("mem_bytes", self.mem_bytes)
        _check_numbers("elements_in", [self.elements_in, self.elements_in_per_token])
        _check_numbers("elements_out", [*self.elements_out, *self.elements_out_per_token])
        if self.tokens is not None and len(self.elements_out_per_token) != len(self.elements_out):
            raise SpecError(
                f"elements_out_per_token has {len(self.elements_out_per_token)} layers, elements_out "
                f"{len(self.elements_out)}: give both one value a layer"
            )
        if self.windows and len(self.windows) != len(self.mem_bytes):
            raise SpecError(
                f"windows has {len(self.windows)} layers, mem_bytes {len(self.mem_bytes)}: give both one "
                "value a layer"
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
    spread_s: tuple[float, ...] = ()
    """Seconds between the quartiles of the repetitions for each layer; empty if unknown."""
    receive_s: tuple[float, ...] = ()
    """Seconds to receive a microbatch if the layer is the first of a stage; empty if unknown."""
    send_s: tuple[float, ...] = ()
    """Seconds to send a microbatch if the layer is the last of a stage; empty if unknown."""
    activation_bytes: tuple[float, ...] = ()
    """Bytes in use while each layer computes; empty if unknown."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_numbers("time_s", self.time_s)


@dataclass(frozen=True)
class TransportHandling:
    """Costs of a transport for a stage, in addition to ``receive_s`` and ``send_s`` of its layers."""

    receive_s: float
    """Seconds to receive a microbatch, whatever its size."""
    receive_s_per_byte: float
    """Seconds to receive a byte of it."""
    send_s: float
    """Seconds to send a microbatch, whatever its size."""
    send_s_per_byte: float
    """Seconds to send a byte of it."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("receive_s", "receive_s_per_byte", "send_s", "send_s_per_byte"):
            _check_numbers(name, [getattr(self, name)])

    def scaled(self, factor: float) -> TransportHandling:
        """Return the costs on a device that takes ``factor`` times as long."""
        return replace(
            self,
            receive_s=factor * self.receive_s,
            receive_s_per_byte=factor * self.receive_s_per_byte,
            send_s=factor * self.send_s,
            send_s_per_byte=factor * self.send_s_per_byte,
        )


@dataclass(frozen=True)
class EndCosts:
    """Costs of the ends of a decoder, on the data rank."""

    fixed_s: float
    """Seconds of the head and the choice of tokens in a step, however few rows decide a token."""
    start_s: float
    """Seconds of those in a step in which many rows do, besides those of the rows."""
    row_s: float
    """Seconds of each of those rows."""
    feed_s: float
    """Seconds to make a step, and of the threads that hand it over to one another."""
    feed_row_s: float
    """Seconds of the same for each text that has rows in it."""
    memory_bytes: float
    """Bytes of embedding, last norm and head."""

    def __post_init__(self) -> None:
        for name in ("fixed_s", "start_s", "row_s", "feed_s", "feed_row_s", "memory_bytes"):
            _check_numbers(name, [getattr(self, name)])

    def scaled(self, factor: float) -> EndCosts:
        """Return the costs on a device that takes ``factor`` times as long."""
        names = ("fixed_s", "start_s", "row_s", "feed_s", "feed_row_s")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


@dataclass(frozen=True)
class StepCosts:
    """Costs of the steps of a decoder, by layer: ``profile.step_fit`` says how they add up."""

    fixed_s: tuple[float, ...]
    """Seconds of a step, however few rows it has."""
    start_s: tuple[float, ...]
    """Seconds of a step with many rows, besides those of the rows."""
    row_s: tuple[float, ...]
    """Seconds of each row of such a step."""
    position_s: tuple[float, ...]
    """Seconds of each position that a row attends to, where each row is of another sequence."""
    chunk_position_s: tuple[float, ...]
    """Seconds of each position that a row attends to, where the rows are of one sequence."""
    cache_bytes: tuple[float, ...]
    """Bytes of the cache for each position of a sequence."""
    ends: EndCosts
    many_start_s: tuple[float, ...] = ()
    """Seconds of a step with very many rows, if less, besides those of the rows; empty: as ``start_s``."""
    many_row_s: tuple[float, ...] = ()
    """Seconds of each row of such a step; empty as well, then."""
    residual: float | None = None
    """Largest relative deviation of a measured step from these numbers, or None if unknown."""
    variation: float | None = None
    """Standard deviation of the time of a step, as a part of the mean, or None if unknown."""
    load_s_per_byte: float | None = None
    """Seconds to load a byte of weights from a file that was read before, or None if unknown."""

    def __post_init__(self) -> None:
        for name in (*_STEP_SECONDS, "cache_bytes"):
            values = getattr(self, name)
            _check_numbers(name, values)
            is_left_out = name in _MANY and not (self.many_start_s or self.many_row_s)
            if len(values) != len(self.fixed_s) and not is_left_out:
                raise SpecError(f"{name} has {len(values)} layers, fixed_s {len(self.fixed_s)}")
        for name, value in (("load_s_per_MB", self.load_s_per_byte), ("variation", self.variation)):
            if value is not None:
                _check_numbers(name, [value])

    def scaled(self, factor: float) -> StepCosts:
        """Return the costs on a device that takes ``factor`` times as long."""
        seconds: dict[str, Any] = {
            name: tuple(factor * value for value in getattr(self, name)) for name in _STEP_SECONDS
        }
        if self.load_s_per_byte is not None:
            seconds["load_s_per_byte"] = factor * self.load_s_per_byte
        return replace(self, **seconds, ends=self.ends.scaled(factor))


_MANY = ("many_start_s", "many_row_s")
_STEP_SECONDS = ("fixed_s", "start_s", "row_s", "position_s", "chunk_position_s", *_MANY)


@dataclass(frozen=True)
class ModelProfile:
    """Measurements of one model's layers on one kind of device."""

    batch_size: int
    """Number of items in a microbatch."""
    dtype: str
    """Name of the dtype as the file spells it, such as ``torch.float32``."""
    time_s: tuple[float, ...]
    """Seconds of each layer for one microbatch."""
    tokens: int | None = None
    """Tokens of each sentence, or None if unknown and for images."""
    lengths: tuple[LengthProfile, ...] = ()
    """Measurements for sentences of other lengths."""
    spread_s: tuple[float, ...] = ()
    """Seconds between the quartiles of the repetitions for each layer; empty if unknown."""
    receive_s: tuple[float, ...] = ()
    """Seconds to receive a microbatch if the layer is the first of a stage; empty if unknown."""
    send_s: tuple[float, ...] = ()
    """Seconds to send a microbatch if the layer is the last of a stage; empty if unknown."""
    activation_bytes: tuple[float, ...] = ()
    """Bytes in use while each layer computes, in addition to weights and buffers; empty if unknown."""
    weight_bytes: tuple[float, ...] = ()
    """Bytes of each layer's weights in this dtype; empty if unknown."""
    feed_s: float | None = None
    """Seconds to read and feed a microbatch on the data host, or None if unknown."""
    collect_s: float | None = None
    """Seconds to collect the results of a microbatch on the data host, or None if unknown."""
    overhead_s: float | None = None
    """Seconds of a microbatch in any stage besides its layers and links, or None if unknown."""
    agreement: float | None = None
    """Fraction of items classified as in float32, or None if unknown."""
    process_bytes: float | None = None
    """Memory of the process without a stage, or None if unknown."""
    busy_w: float | None = None
    """Watts of the device while it was measured, or None if unknown."""
    threads: int | None = None
    """Number of compute threads, or None if unknown."""
    kernels: str | None = None
    """Name of the kernels, or None if unknown."""
    handling: Mapping[str, TransportHandling] = field(default_factory=dict)
    """Costs of handling by transport; empty if unknown."""
    steps: StepCosts | None = None
    """Costs of the steps of a decoder, of which ``time_s`` is one of one row; None for an encoder."""
    extra: Mapping[str, Any] = field(default_factory=dict)

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

    def weights_of(self, model: ModelSpec) -> tuple[float, ...]:
        """Return the bytes of each layer's weights in this dtype, as ``sched-pipeline`` counts them."""
        if self.weight_bytes:
            return self.weight_bytes
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
    busy_w: float | None = None
    """Watts while it computes, for profiles without their own, or None if unknown."""
    idle_w: float | None = None
    """Watts while it waits, or None if unknown."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_numbers("mem_bytes", [self.mem_bytes])
        _check_numbers("bw_bytes_per_s", [self.bw_bytes_per_s])
        _check_numbers("watts", [watts for watts in (self.busy_w, self.idle_w) if watts is not None])


@dataclass(frozen=True)
class NeighborLink:
    """Speed of the connection from a host to a neighbour."""

    bw_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers("bw_bytes_per_s", [self.bw_bytes_per_s])
        _check_numbers("latency_s", [self.latency_s])


@dataclass(frozen=True)
class SpecFiles:
    """Contents of the scheduler's files; empty for files that were not read."""

    models: Mapping[str, ModelSpec] = field(default_factory=dict)
    device_types: Mapping[str, DeviceType] = field(default_factory=dict)
    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Hosts of each device type."""
    neighbors: Mapping[str, Mapping[str, NeighborLink]] = field(default_factory=dict)
    """Links by source and destination host."""
    link_extra: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    """Keys that no field stands for, of links that have any."""

    def type_of(self, host: str) -> DeviceType | None:
        """Return the device type of ``host``, or None if it is unknown."""
        names = (name for name, hosts in self.devices.items() if host in hosts)
        return self.device_types.get(next(names, ""))


def _check_numbers(name: str, values: Iterable[float]) -> None:
    for value in values:
        if not (math.isfinite(value) and value >= 0):
            raise SpecError(f"{name} holds {value}; numbers must be finite and not negative")
