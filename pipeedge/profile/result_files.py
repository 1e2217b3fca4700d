"""Read and write the measurements of each layer as a file, ``profiler_results.yml``.

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

At the top, ``handling`` has what each transport costs a stage: ``receive`` and ``send`` in seconds for each
microbatch, ``receive_per_MB`` and ``send_per_MB`` in seconds for each 2**20 bytes of it. ``feed`` and
``collect`` are the seconds that a data rank on this device takes to read and feed a microbatch, and to
collect its results. ``overhead`` are those of any stage besides its layers and links.

``busy_W`` and ``idle_W`` are the watts of the machine while it computes these layers, and while it
waits.

Layers of a decoder have ``steps``: what a step costs, in seconds (``profile.step_fit``), the bytes that a
position takes in the cache, and the ``window``. At the top, there are ``ends`` (embedding and head), the
``context`` (the longest sequence), the ``residual`` of the fit, the ``variation`` of the time of a step, and
``load_per_MB``, the seconds to load 2**20 bytes of weights.

``time_spread`` and the keys after it, and ``device``, ``threads``, ``kernels``, ``memory_process``,
``busy_W``, ``idle_W``, ``agreement``, ``tokens``, ``feed``, ``collect``, ``overhead`` and ``handling`` at the
top are this tool's own; a file without them can be read. Other keys are kept. Missing layers are added to a
file; nothing in it is ever replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeedge.base.errors import SpecError
from pipeedge.base.yamlfile import Field, read_document, write_document
from pipeedge.plan.specs import BYTES_PER_MB, EndCosts, TransportHandling
from pipeedge.profile.results import (
    LayerResult,
    LayerSteps,
    LengthResult,
    Measurement,
    ProfileResults,
    Shapes,
)

__all__ = ["load_results", "save_results"]

_MEASURED_KEYS = {
    "time": ("time_s", 1),
    "time_spread": ("time_spread_s", 1),
    "memory_activations": ("activations_bytes", BYTES_PER_MB),
    "receive": ("receive_s", 1),
    "send": ("send_s", 1),
}
"""Field of a measurement, and its unit in the file, for each key."""
_TOP_KEYS = {
    "model_name",
    "dtype",
    "batch_size",
    "layers",
    "profile_data",
    "device",
    "threads",
    "kernels",
    "memory_process",
    "busy_W",
    "idle_W",
    "agreement",
    "tokens",
    "feed",
    "collect",
    "overhead",
    "handling",
    "ends",
    "context",
    "residual",
    "variation",
    "load_per_MB",
}
_ENDS_KEYS = {
    "fixed": ("fixed_s", 1),
    "start": ("start_s", 1),
    "row": ("row_s", 1),
    "feed": ("feed_s", 1),
    "feed_row": ("feed_row_s", 1),
    "memory": ("memory_bytes", BYTES_PER_MB),
}
"""Field of the costs of a decoder's ends, and its unit in the file, for each key."""
_STEPS_KEYS = {
    "fixed": "fixed_s",
    "start": "start_s",
    "row": "row_s",
    "many_start": "many_start_s",
    "many_row": "many_row_s",
    "position": "position_s",
    "chunk_position": "chunk_position_s",
    "cache_bytes": "cache_bytes",
}
"""Field of a layer's costs in a step for each key."""
_HANDLING_KEYS = {
    "receive": ("receive_s", 1),
    "receive_per_MB": ("receive_s_per_byte", BYTES_PER_MB),
    "send": ("send_s", 1),
    "send_per_MB": ("send_s_per_byte", BYTES_PER_MB),
}
"""Field of what a transport costs, and the bytes in its unit, for each key."""


def load_results(path: Path) -> ProfileResults:
    """Read a results file.

    Raises:
        SpecError: It is invalid; the message gives file, line and key.
    """
    document = read_document(path)
    threads, process, device = (document.find(key) for key in ("threads", "memory_process", "device"))
    kernels = document.find("kernels")
    agreement, tokens = document.find("agreement"), document.find("tokens")
    feed, collect, overhead = (document.find(key) for key in ("feed", "collect", "overhead"))
    ends, context, residual = (document.find(key) for key in ("ends", "context", "residual"))
    load, variation = document.find("load_per_MB"), document.find("variation")
    handling, watts = document.find("handling"), {key: document.find(key) for key in ("busy_W", "idle_W")}
    try:
        return ProfileResults(
            model_name=document.at("model_name").text(),
            dtype=document.at("dtype").text(),
            batch_size=document.at("batch_size").whole_number(least=1),
            layers=document.at("layers").whole_number(least=1),
            profile_data=tuple(_read_layer(entry) for entry in document.at("profile_data").items()),
            device=None if device is None else device.text(),
            threads=None if threads is None else threads.whole_number(least=1),
            kernels=None if kernels is None else kernels.text(),
            process_bytes=None if process is None else process.number() * BYTES_PER_MB,
            **{key.lower(): value.number() for key, value in watts.items() if value is not None},
            agreement=None if agreement is None else agreement.number(),
            tokens=None if tokens is None else tokens.whole_number(least=1),
            feed_s=None if feed is None else feed.number(),
            collect_s=None if collect is None else collect.number(),
            overhead_s=None if overhead is None else overhead.number(),
            handling={} if handling is None else _read_handling(handling),
            ends=None if ends is None else _read_ends(ends),
            context=None if context is None else context.whole_number(least=1),
            residual=None if residual is None else residual.number(),
            variation=None if variation is None else variation.number(),
            load_s_per_byte=None if load is None else load.number() / BYTES_PER_MB,
            extra=_rest(document, _TOP_KEYS),
        )
    except SpecError as error:
        where = "" if str(error).startswith(document.file) else f"{document.file}: "
        raise SpecError(f"{where}{error}") from error


def _read_handling(entry: Field) -> dict[str, TransportHandling]:
    return {
        transport: TransportHandling(
            **{name: costs.at(key).number() / unit for key, (name, unit) in _HANDLING_KEYS.items()},
            extra=_rest(costs, set(_HANDLING_KEYS)),
        )
        for transport, costs in entry.entries().items()
    }


def _read_ends(entry: Field) -> EndCosts:
    return EndCosts(**{name: entry.at(key).number() * unit for key, (name, unit) in _ENDS_KEYS.items()})


def _read_steps(entry: Field) -> LayerSteps:
    numbers = {
        # Older files have one line for all rows.
        name: (entry.find(key) or entry.at(key.removeprefix("many_"))).number()
        for key, name in _STEPS_KEYS.items()
    }
    return LayerSteps(**numbers, window=entry.at("window").whole_number())


def _read_layer(entry: Field) -> LayerResult:
    lengths, float32 = entry.find("lengths"), entry.find("memory_float32")
    shared, steps = entry.find("shared_with"), entry.find("steps")
    known = {"layer", "memory", "memory_float32", "shared_with", "shape_in", "shape_out", "lengths", "steps"}
    return LayerResult(
        layer=entry.at("layer").whole_number(least=1),
        memory_bytes=entry.at("memory").number() * BYTES_PER_MB,
        measured=_read_measurement(entry),
        float32_bytes=None if float32 is None else float32.number() * BYTES_PER_MB,
        shared_with=None if shared is None else shared.whole_number(least=1),
        lengths=() if lengths is None else tuple(_read_length(length) for length in lengths.items()),
        steps=None if steps is None else _read_steps(steps),
        extra=_rest(entry, known | set(_MEASURED_KEYS)),
    )


def _read_length(entry: Field) -> LengthResult:
    return LengthResult(entry.at("tokens").whole_number(least=1), _read_measurement(entry))


def _read_measurement(entry: Field) -> Measurement:
    numbers: dict[str, Any] = {"time_s": entry.at("time").number()}
    for key, (name, unit) in _MEASURED_KEYS.items():
        value = entry.find(key)
        if value is not None:
            numbers[name] = value.number() * unit
    return Measurement(
        shape_in=_read_shapes(entry.at("shape_in")), shape_out=_read_shapes(entry.at("shape_out")), **numbers
    )


def _read_shapes(entry: Field) -> Shapes:
    return tuple(tuple(size.whole_number(least=1) for size in shape.items()) for shape in entry.items())


def _rest(entry: Field, known: set[str]) -> dict[str, Any]:
    return {name: value.plain() for name, value in entry.entries().items() if name not in known}


def save_results(path: Path, results: ProfileResults) -> None:
    """Write a results file, completely or not at all.

    Raises:
        SpecError: It cannot be written.
    """
    top = {
        "model_name": results.model_name,
        "dtype": results.dtype,
        "batch_size": results.batch_size,
        "layers": results.layers,
        "device": results.device,
        "threads": results.threads,
        "kernels": results.kernels,
        "memory_process": None if results.process_bytes is None else results.process_bytes / BYTES_PER_MB,
        "busy_W": results.busy_w,
        "idle_W": results.idle_w,
        "agreement": results.agreement,
        "tokens": results.tokens,
        "feed": results.feed_s,
        "collect": results.collect_s,
        "overhead": results.overhead_s,
        "handling": _handling(results.handling) or None,
        "ends": None if results.ends is None else _ends(results.ends),
        "context": results.context,
        "residual": results.residual,
        "variation": results.variation,
        "load_per_MB": None if results.load_s_per_byte is None else results.load_s_per_byte * BYTES_PER_MB,
    }
    document = {key: value for key, value in top.items() if value is not None}
    write_document(
        path, {**document, **results.extra, "profile_data": [_layer(x) for x in results.profile_data]}
    )


def _handling(costs: Mapping[str, TransportHandling]) -> dict[str, dict[str, Any]]:
    return {
        transport: {key: getattr(one, name) * unit for key, (name, unit) in _HANDLING_KEYS.items()}
        | dict(one.extra)
        for transport, one in costs.items()
    }


def _ends(ends: EndCosts) -> dict[str, float]:
    return {key: getattr(ends, name) / unit for key, (name, unit) in _ENDS_KEYS.items()}


def _steps(steps: LayerSteps) -> dict[str, float]:
    return {key: getattr(steps, name) for key, name in _STEPS_KEYS.items()} | {"window": steps.window}


def _layer(result: LayerResult) -> dict[str, Any]:
    measured = _measurement(result.measured)
    entry = {
        "layer": result.layer,
        "memory": result.memory_bytes / BYTES_PER_MB,
        "shape_in": measured.pop("shape_in"),
        "shape_out": measured.pop("shape_out"),
        **measured,
    }
    if result.float32_bytes is not None:
        entry["memory_float32"] = result.float32_bytes / BYTES_PER_MB
    if result.shared_with is not None:
        entry["shared_with"] = result.shared_with
    if result.steps is not None:
        entry["steps"] = _steps(result.steps)
    if result.lengths:
        entry["lengths"] = [
            {"tokens": length.tokens, **_measurement(length.measured)} for length in result.lengths
        ]
    return {**entry, **result.extra}


def _measurement(measured: Measurement) -> dict[str, Any]:
    numbers = {key: (getattr(measured, name), unit) for key, (name, unit) in _MEASURED_KEYS.items()}
    return {
        "shape_in": [list(shape) for shape in measured.shape_in],
        "shape_out": [list(shape) for shape in measured.shape_out],
        **{key: value / unit for key, (value, unit) in numbers.items() if value is not None},
    }
