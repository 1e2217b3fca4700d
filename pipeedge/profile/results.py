"""Represent the measurements of each layer as data and as a file, ``profiler_results.yml``.

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
      memory_activations: 23.2              # MB, the peak while the layer runs; peaks do not add up
      receive: 0.001                        # seconds to receive its input, if a stage begins with it
      send: 0.003                           # seconds to send its output, if a stage ends with it

Text models have ``tokens`` at the top, the sentence length of these figures, and ``lengths`` in each layer:
the same figures for shorter sentences, with ``tokens``, shapes, times and activations.

For number types other than float32 there is ``memory_float32`` too, and ``agreement`` at the top if it was
measured: the fraction of items whose class is that of float32.

At the top, ``feed`` and ``collect`` are the seconds that a data rank on this device takes to read and feed a
microbatch, and to collect its results.

``time_spread`` and the keys after it, and ``device``, ``threads``, ``memory_process``, ``agreement``,
``tokens``, ``feed`` and ``collect`` at the top are this tool's own; a file without them can be read. Other
keys are kept. Missing layers are added to a file; nothing in it is ever replaced.
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
    """Return the number of values of one item in a payload of these ``shapes``."""
    return sum(math.prod(shape) for shape in shapes)


@dataclass(frozen=True)
class LengthResult:
    """Measurements of one layer with sentences of another length."""

    tokens: int
    """Tokens of each sentence."""
    shape_in: Shapes
    """Shapes of one item of the input."""
    shape_out: Shapes
    """Shapes of one item of the output."""
    time_s: float
    """Median seconds for one microbatch."""
    time_spread_s: float | None = None
    """Seconds between the quartiles of the repetitions."""
    activations_bytes: float | None = None
    """Peak memory besides weights and input while the layer runs, in bytes."""
    receive_s: float | None = None
    """Seconds to receive the layer's input from a link."""
    send_s: float | None = None
    """Seconds to send the layer's output to a link."""

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
    """Measurements of one layer."""

    layer: int
    """Number of the layer, from 1."""
    memory_bytes: float
    """Bytes of parameters and buffers."""
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
    float32_bytes: float | None = None
    """Bytes of parameters and buffers in float32, as ``models.yml`` counts them, or None if measured so."""
    lengths: tuple[LengthResult, ...] = ()
    """Measurements with sentences of other lengths."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the file that this program does not know."""

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise SpecError(f"layer {self.layer}: layers are counted from 1")
        numbers = ("memory_bytes", *_LENGTH_NUMBERS, "float32_bytes")
        _check_numbers(self, f"layer {self.layer}", numbers)


@dataclass(frozen=True)
class ProfileResults:
    """Layers of one model, measured under the same conditions and validated on creation.

    Raises:
        SpecError: layers are beyond the model, out of order or repeated.
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
    process_bytes: float | None = None
    """Memory of a rank before it loads a shard, in bytes."""
    agreement: float | None = None
    """Fraction of items whose class is that of float32, or None if it was not measured."""
    tokens: int | None = None
    """Tokens of each sentence, or None for images and if the file does not record it."""
    feed_s: float | None = None
    """Seconds that a data rank takes to read and feed a microbatch, or None if unknown."""
    collect_s: float | None = None
    """Seconds that a data rank takes to collect the results of a microbatch, or None if unknown."""
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

    def check_extends(self, old: ProfileResults, source: str) -> None:
        """Raise ``SpecError`` unless these layers may be added to ``old``, the contents of ``source``."""
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
                    f"{source} has results of another {what}: {there[what]}, but now it is {value}; "
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
            return "unknown"
        return f"{_listed(sorted((self.tokens, *self.other_tokens)))} tokens"

    def joined(self, old: ProfileResults, source: str) -> ProfileResults:
        """Return the layers of ``old``, the contents of ``source``, together with these.

        Raises:
            SpecError: these layers may not be added, as in ``check_extends``.
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
    """Format layer numbers as ranges: ``1-3, 7`` for 1, 2, 3, 7."""
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
        SpecError: it is invalid; the message gives file, line and key.
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
    """Write a results file, completely or not at all.

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
