"""``profiler_results.yml``: what was measured, layer by layer, as data and as a file.

    model_name: google/vit-base-patch16-224
    dtype: torch.float32
    batch_size: 8
    layers: 48
    profile_data:
    - layer: 1                              # from 1
      memory: 9.3                           # MB of 2**20 bytes: parameters and buffers, exactly
      shape_in: [[3, 224, 224]]             # without the microbatch dimension
      shape_out: [[197, 768], [197, 768]]
      time: 0.079                           # seconds a microbatch, median
      time_spread: 0.001                    # between the quartiles
      memory_activations: 23.2              # MB, the peak while the layer runs; they do not add up
      receive: 0.001                        # seconds: taking its input from a link, were it the first
      send: 0.003                           # seconds: passing its output on, were it the last

Models of text have ``tokens`` at the top, the sentence length of all that, and in each layer ``lengths``:
the same of shorter sentences, with ``tokens``, shapes, times and activations.

In another number type than float32 there is ``memory_float32`` too, and ``agreement`` at the top where it
was measured: the part of items, of 1, whose class was that of float32.

At the top, ``feed`` and ``collect`` are the seconds in which a data rank on this device reads and feeds a
microbatch, and collects its results.

``time_spread`` and what follows it, and ``device``, ``threads``, ``memory_process``, ``agreement``,
``tokens``, ``feed`` and ``collect`` at the top are this tool's own; a file without them loads. Other
keys are kept. A file is extended by layers that it has not; nothing in it is ever replaced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeedge.base.errors import SpecError
from pipeedge.base.wording import count
from pipeedge.base.yamlfile import Field, read_document, write_document
from pipeedge.plan.specs import BYTES_PER_MB, short_dtype

__all__ = [
    "LayerResult",
    "LengthResult",
    "ProfileResults",
    "Shapes",
    "elements",
    "load_results",
    "ranges_text",
    "save_results",
]

Shapes = tuple[tuple[int, ...], ...]


def elements(shapes: Shapes) -> int:
    """Values of one item in a payload of these ``shapes``."""
    return sum(math.prod(shape) for shape in shapes)


@dataclass(frozen=True)
class LengthResult:
    """One layer with sentences of another length."""

    tokens: int
    """Tokens of each sentence."""
    shape_in: Shapes
    """Of one item of what enters."""
    shape_out: Shapes
    """Of one item of what leaves."""
    time_s: float
    """Seconds for one microbatch; the median."""
    time_spread_s: float | None = None
    """Between the quartiles of the repetitions."""
    activations_bytes: float | None = None
    """The most that lives beside weights and input while it runs."""
    receive_s: float | None = None
    """Of taking the layer's input from a link."""
    send_s: float | None = None
    """Of passing the layer's output on to a link."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise SpecError(f"{self.tokens} tokens: a sentence has at least 1")
        _check_numbers(self, f"{self.tokens} tokens", _LENGTH_NUMBERS)


_LENGTH_NUMBERS = ("time_s", "time_spread_s", "activations_bytes", "receive_s", "send_s")


def _check_numbers(owner: object, what: str, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise SpecError(f"{what}: {name} is {value}; it must be finite and not negative")


@dataclass(frozen=True)
class LayerResult:
    """One layer."""

    layer: int
    """From 1."""
    memory_bytes: float
    """Parameters and buffers."""
    shape_in: Shapes
    """Of one item of what enters."""
    shape_out: Shapes
    """Of one item of what leaves."""
    time_s: float
    """For one microbatch; the median."""
    time_spread_s: float | None = None
    """Between the quartiles of the repetitions."""
    activations_bytes: float | None = None
    """The most that lives beside weights and input while it runs; a stage's is the largest of its layers'."""
    receive_s: float | None = None
    """Of taking the layer's input from a link."""
    send_s: float | None = None
    """Of passing the layer's output on to a link."""
    float32_bytes: float | None = None
    """Parameters and buffers where they are float32, as ``models.yml`` counts them; None: as measured."""
    lengths: tuple[LengthResult, ...] = ()
    """The same with sentences of other lengths."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise SpecError(f"layer {self.layer}: layers are counted from 1")
        numbers = ("memory_bytes", *_LENGTH_NUMBERS, "float32_bytes")
        _check_numbers(self, f"layer {self.layer}", numbers)


@dataclass(frozen=True)
class ProfileResults:
    """Layers of one model, measured under the same conditions. Valid by construction.

    Raises:
        SpecError: layers beyond the model, out of order or twice.
    """

    model_name: str
    dtype: str
    batch_size: int
    """Items of a microbatch."""
    layers: int
    """Of the whole model."""
    profile_data: tuple[LayerResult, ...]
    """Sorted by layer; need not be all."""
    device: str | None = None
    """``cpu`` or ``cuda:N``; None where the file does not say."""
    threads: int | None = None
    """Of a computation; None where the file does not say."""
    process_bytes: float | None = None
    """Memory of a rank before it holds a shard."""
    agreement: float | None = None
    """The part of items, of 1, whose class was that of float32; None where nobody compared."""
    tokens: int | None = None
    """Tokens of each sentence; None for images, and where the file does not say."""
    feed_s: float | None = None
    """Seconds in which a data rank here reads and feeds a microbatch; None where the file does not say."""
    collect_s: float | None = None
    """Seconds in which it collects the results of one."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = [result.layer for result in self.profile_data]
        for before, after in pairwise(numbers):
            if before == after:
                raise SpecError(f"layer {after} comes twice")
            if after < before:
                raise SpecError(f"layer {after} comes after layer {before}; they must be sorted")
        if numbers and numbers[-1] > self.layers:
            raise SpecError(f"layer {numbers[-1]} is beyond the model's {count(self.layers, 'layer')}")
        for result in self.profile_data:
            other = tuple(length.tokens for length in result.lengths)
            if other and (self.tokens is None or self.tokens in other or len(set(other)) < len(other)):
                raise SpecError(f"layer {result.layer}: lengths need tokens at the top, and each length once")
            if other != self.other_tokens:
                raise SpecError(
                    f"layer {result.layer} has lengths of {_listed(other)} tokens, layer {numbers[0]} of "
                    f"{_listed(self.other_tokens)}"
                )

    @property
    def other_tokens(self) -> tuple[int, ...]:
        """Sentence lengths that were measured beside ``tokens``, alike for all layers."""
        return tuple(length.tokens for length in self.profile_data[0].lengths) if self.profile_data else ()

    @property
    def missing(self) -> tuple[int, ...]:
        """Layers of the model that were not measured."""
        known = {result.layer for result in self.profile_data}
        return tuple(layer for layer in range(1, self.layers + 1) if layer not in known)

    def whole(self, source: str) -> ProfileResults:
        """Self, or ``SpecError`` where layers are missing."""
        if self.missing:
            raise SpecError(
                f"{source} lacks layers {ranges_text(self.missing)} of {self.layers} of {self.model_name}; "
                "profile those first (-l, -L)"
            )
        return self

    def check_extends(self, old: ProfileResults, source: str) -> None:
        """Raise ``SpecError`` unless the layers here may join those of ``old``, the content of ``source``."""
        here = {
            "model": self.model_name,
            "dtype": short_dtype(self.dtype),
            "batch size": self.batch_size,
            "number of layers": self.layers,
            "device": self.device,
            "thread count": self.threads,
            "sentence length": self._lengths_text,
        }
        there = {
            "model": old.model_name,
            "dtype": short_dtype(old.dtype),
            "batch size": old.batch_size,
            "number of layers": old.layers,
            "device": old.device,
            "thread count": old.threads,
            "sentence length": old._lengths_text,
        }
        for what, value in here.items():
            if there[what] is not None and value is not None and there[what] != value:
                raise SpecError(
                    f"{source} holds results of another {what}: {there[what]}, now it is {value}; "
                    "choose another file with -o"
                )
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
            return "none is known"
        return f"{_listed(sorted((self.tokens, *self.other_tokens)))} tokens"

    def joined(self, old: ProfileResults, source: str) -> ProfileResults:
        """Return these results extended by the layers of ``old``, which were read from ``source``.

        Raises:
            SpecError: as ``check_extends``.
        """
        self.check_extends(old, source)
        together = sorted((*old.profile_data, *self.profile_data), key=lambda result: result.layer)
        return replace(
            old,
            profile_data=tuple(together),
            device=old.device or self.device,
            threads=old.threads or self.threads,
            process_bytes=max((x for x in (old.process_bytes, self.process_bytes) if x), default=None),
            agreement=old.agreement if self.agreement is None else self.agreement,
            feed_s=old.feed_s if self.feed_s is None else self.feed_s,
            collect_s=old.collect_s if self.collect_s is None else self.collect_s,
        )


def _listed(tokens: Sequence[int]) -> str:
    return ", ".join(map(str, tokens)) or "no other"


def ranges_text(layers: Sequence[int]) -> str:
    """``1-3, 7`` for 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and parts[-1][1] == layer - 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


_LAYER_KEYS = {
    "memory": ("memory_bytes", BYTES_PER_MB),
    "time": ("time_s", 1),
    "time_spread": ("time_spread_s", 1),
    "memory_activations": ("activations_bytes", BYTES_PER_MB),
    "memory_float32": ("float32_bytes", BYTES_PER_MB),
    "receive": ("receive_s", 1),
    "send": ("send_s", 1),
}
_NEEDED = {"memory", "time"}
_LENGTH_KEYS = {key: _LAYER_KEYS[key] for key in _LAYER_KEYS if _LAYER_KEYS[key][0] in _LENGTH_NUMBERS}
_TOP_KEYS = {
    "model_name",
    "dtype",
    "batch_size",
    "layers",
    "profile_data",
    "device",
    "threads",
    "memory_process",
    "agreement",
    "tokens",
    "feed",
    "collect",
}


def load_results(path: Path) -> ProfileResults:
    """Read a results file.

    Raises:
        SpecError: the file is malformed; the message names the file, line and key.
    """
    document = read_document(path)
    threads, process, device = (document.find(key) for key in ("threads", "memory_process", "device"))
    agreement, tokens = document.find("agreement"), document.find("tokens")
    feed, collect = document.find("feed"), document.find("collect")
    try:
        return ProfileResults(
            model_name=document.at("model_name").text(),
            dtype=document.at("dtype").text(),
            batch_size=document.at("batch_size").whole_number(least=1),
            layers=document.at("layers").whole_number(least=1),
            profile_data=tuple(_read_layer(entry) for entry in document.at("profile_data").items()),
            device=None if device is None else device.text(),
            threads=None if threads is None else threads.whole_number(least=1),
            process_bytes=None if process is None else process.number() * BYTES_PER_MB,
            agreement=None if agreement is None else agreement.number(),
            tokens=None if tokens is None else tokens.whole_number(least=1),
            feed_s=None if feed is None else feed.number(),
            collect_s=None if collect is None else collect.number(),
            extra=_rest(document, _TOP_KEYS),
        )
    except SpecError as error:
        where = "" if str(error).startswith(document.file) else f"{document.file}: "
        raise SpecError(f"{where}{error}") from error


def _read_layer(entry: Field) -> LayerResult:
    lengths = entry.find("lengths")
    return LayerResult(
        layer=entry.at("layer").whole_number(least=1),
        shape_in=_read_shapes(entry.at("shape_in")),
        shape_out=_read_shapes(entry.at("shape_out")),
        lengths=() if lengths is None else tuple(_read_length(length) for length in lengths.items()),
        extra=_rest(entry, {"layer", "shape_in", "shape_out", "lengths", *_LAYER_KEYS}),
        **_read_numbers(entry, _LAYER_KEYS),
    )


def _read_length(entry: Field) -> LengthResult:
    return LengthResult(
        tokens=entry.at("tokens").whole_number(least=1),
        shape_in=_read_shapes(entry.at("shape_in")),
        shape_out=_read_shapes(entry.at("shape_out")),
        **_read_numbers(entry, _LENGTH_KEYS),
    )


def _read_numbers(entry: Field, keys: Mapping[str, tuple[str, float]]) -> dict[str, Any]:
    numbers = {}
    for key, (name, unit) in keys.items():
        value = entry.at(key) if key in _NEEDED else entry.find(key)
        numbers[name] = None if value is None else value.number() * unit
    return numbers


def _read_shapes(entry: Field) -> Shapes:
    return tuple(tuple(size.whole_number(least=1) for size in shape.items()) for shape in entry.items())


def _rest(entry: Field, known: set[str]) -> dict[str, Any]:
    return {name: value.plain() for name, value in entry.entries().items() if name not in known}


def save_results(path: Path, results: ProfileResults) -> None:
    """Write a results file, whole or not at all.

    Raises:
        SpecError: it cannot be written.
    """
    top = {
        "model_name": results.model_name,
        "dtype": results.dtype,
        "batch_size": results.batch_size,
        "layers": results.layers,
        "device": results.device,
        "threads": results.threads,
        "memory_process": None if results.process_bytes is None else results.process_bytes / BYTES_PER_MB,
        "agreement": results.agreement,
        "tokens": results.tokens,
        "feed": results.feed_s,
        "collect": results.collect_s,
    }
    document = {key: value for key, value in top.items() if value is not None}
    write_document(
        path, {**document, **results.extra, "profile_data": [_layer(x) for x in results.profile_data]}
    )


def _layer(result: LayerResult) -> dict[str, Any]:
    known = _known(result, _LAYER_KEYS)
    entry = {
        "layer": result.layer,
        "memory": known.pop("memory"),
        **_shapes(result),
        "time": known.pop("time"),
        **known,
    }
    if result.lengths:
        entry["lengths"] = [
            {"tokens": length.tokens, **_shapes(length), **_known(length, _LENGTH_KEYS)}
            for length in result.lengths
        ]
    return {**entry, **result.extra}


def _known(result: LayerResult | LengthResult, keys: Mapping[str, tuple[str, float]]) -> dict[str, Any]:
    numbers = {key: (getattr(result, name), unit) for key, (name, unit) in keys.items()}
    return {key: value / unit for key, (value, unit) in numbers.items() if value is not None}


def _shapes(result: LayerResult | LengthResult) -> dict[str, Any]:
    return {
        "shape_in": [list(shape) for shape in result.shape_in],
        "shape_out": [list(shape) for shape in result.shape_out],
    }
