"""Write results into the scheduler's files, keeping the entries that exist.

    ProfileResults ──model_spec──> models.yml            weights and elements of each layer
                   ──model_profile──> device_types.yml   seconds of each layer, and further figures that
                                                         the scheduler may read

Every check can be made before anything is measured, and is repeated before writing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeedge.base.errors import SpecError
from pipeedge.base.wording import figure
from pipeedge.plan import spec_files, spec_writing
from pipeedge.plan.specs import (
    BYTES_PER_MB,
    BYTES_PER_SECOND_PER_MBPS,
    DeviceType,
    LengthProfile,
    ModelProfile,
    ModelSpec,
    StepCosts,
    short_dtype,
)
from pipeedge.profile.results import LayerSteps, Measurement, ProfileResults, Shapes, elements, ranges_text

__all__ = [
    "Figures",
    "add_model",
    "add_profiles",
    "check_model",
    "check_profile",
    "model_profile",
    "model_spec",
    "scaled",
]

_NEAR = 1e-6
"""Relative tolerance for numbers that were rounded as decimal text."""


@dataclass(frozen=True)
class Figures:
    """Figures of a device type, given by the user or measured."""

    mem_bytes: float | None = None
    """Memory in bytes, or None if not given."""
    bw_bytes_per_s: float | None = None
    """Bandwidth in bytes per second, or None if not given."""
    idle_w: float | None = None
    """Watts while it waits, or None if not measured."""


def model_spec(results: ProfileResults, source: str) -> ModelSpec:
    """Return the model in the form of ``models.yml``.

    Raises:
        SpecError: Layers are missing in ``results``, which come from ``source``, or their shapes differ.
    """
    layers = results.whole(source).profile_data
    for before, after in pairwise(layers):
        given, taken = before.measured.shape_out, after.measured.shape_in
        if given != taken:
            raise SpecError(
                f"{source}: the output of layer {before.layer} has shapes {_text(given)}, but the input of "
                f"layer {after.layer} has {_text(taken)}; profile all layers with the same -s"
            )
    first = layers[0]
    shared = tuple(layer.shared_with or 0 for layer in layers)
    windows = tuple(layer.steps.window for layer in layers if layer.steps is not None)
    return ModelSpec(
        # models.yml counts weights in float32; the profile has their size in another type.
        mem_bytes=tuple(
            layer.memory_bytes if layer.float32_bytes is None else layer.float32_bytes for layer in layers
        ),
        shared_with=shared if any(shared) else (),
        context=results.context,
        windows=windows if any(windows) else (),
        elements_in=elements(first.measured.shape_in),
        elements_out=tuple(elements(layer.measured.shape_out) for layer in layers),
        tokens=results.tokens if first.lengths else None,
        elements_in_per_token=_per_token(
            results, first.measured.shape_in, [each.measured.shape_in for each in first.lengths]
        ),
        elements_out_per_token=tuple(
            _per_token(results, layer.measured.shape_out, [each.measured.shape_out for each in layer.lengths])
            for layer in layers
            if layer.lengths
        ),
    )


def _per_token(results: ProfileResults, shapes: Shapes, others: Sequence[Shapes]) -> int:
    """Return the elements that one more token adds, or 0 if only one length was measured."""
    if not others or results.tokens is None:
        return 0
    return (elements(shapes) - elements(others[0])) // (results.tokens - results.other_tokens[0])


def _text(shapes: Shapes) -> str:
    return str([list(shape) for shape in shapes])


def model_profile(results: ProfileResults, source: str) -> ModelProfile:
    """Return the times in the form of ``device_types.yml``.

    Raises:
        SpecError: Layers are missing in ``results``, which come from ``source``.
    """
    layers = results.whole(source).profile_data
    own = [layer.measured for layer in layers]
    exact = short_dtype(results.dtype) == "float32"
    process = results.process_bytes
    return ModelProfile(
        batch_size=results.batch_size,
        dtype=results.dtype,
        time_s=tuple(each.time_s for each in own),
        tokens=results.tokens,
        lengths=tuple(
            _length_profile(tokens, [layer.lengths[number].measured for layer in layers])
            for number, tokens in enumerate(results.other_tokens)
        ),
        **_lists(own),
        weight_bytes=() if exact else tuple(layer.memory_bytes for layer in layers),
        feed_s=results.feed_s,
        collect_s=results.collect_s,
        overhead_s=results.overhead_s,
        handling=results.handling,
        steps=_steps(results),
        agreement=results.agreement,
        busy_w=results.busy_w,
        process_bytes=None if process is None else round(process / BYTES_PER_MB, 1) * BYTES_PER_MB,
        threads=results.threads,
        kernels=results.kernels,
        extra={} if results.device is None else {"device": results.device},
    )


def _steps(results: ProfileResults) -> StepCosts | None:
    """Return the costs of the steps of a decoder, or None for an encoder."""
    steps = [layer.steps for layer in results.profile_data if layer.steps is not None]
    if results.ends is None:
        return None
    lists = {
        field.name: tuple(getattr(each, field.name) for each in steps)
        for field in dataclasses.fields(LayerSteps)
        if field.name != "window"
    }
    return StepCosts(
        **lists,
        ends=results.ends,
        residual=results.residual,
        variation=results.variation,
        load_s_per_byte=results.load_s_per_byte,
    )


def _length_profile(tokens: int, measured: Sequence[Measurement]) -> LengthProfile:
    return LengthProfile(tokens, tuple(each.time_s for each in measured), **_lists(measured))


def _lists(measured: Sequence[Measurement]) -> dict[str, Any]:
    """Return the further figures that all layers have, one number per layer."""
    found = {}
    for field, name in (
        ("spread_s", "time_spread_s"),
        ("receive_s", "receive_s"),
        ("send_s", "send_s"),
        ("activation_bytes", "activations_bytes"),
    ):
        values = [getattr(each, name) for each in measured]
        if None not in values:
            found[field] = tuple(values)
    return found


def scaled(profile: ModelProfile, factor: float) -> ModelProfile:
    """Return the profile of a device that takes ``factor`` times as long, for planning."""
    return replace(
        profile,
        **_scaled_lists(profile, factor),
        lengths=tuple(replace(other, **_scaled_lists(other, factor)) for other in profile.lengths),
        feed_s=None if profile.feed_s is None else factor * profile.feed_s,
        collect_s=None if profile.collect_s is None else factor * profile.collect_s,
        overhead_s=None if profile.overhead_s is None else factor * profile.overhead_s,
        handling={name: costs.scaled(factor) for name, costs in profile.handling.items()},
        steps=None if profile.steps is None else profile.steps.scaled(factor),
    )


def _scaled_lists(profile: ModelProfile | LengthProfile, factor: float) -> dict[str, Any]:
    lists = ("time_s", "spread_s", "receive_s", "send_s")
    return {name: tuple(factor * value for value in getattr(profile, name)) for name in lists}


# --- models.yml -------------------------------------------------------------------------------------


def check_model(path: Path, name: str, spec: ModelSpec, *, overwrite: bool, lenient: bool) -> str | None:
    """Check that ``spec`` may be added to a models file; return a line about a differing entry to be kept.

    Args:
        path: Models file, which need not exist.
        name: Name of the model.
        spec: The model.
        overwrite: Whether to replace a differing entry.
        lenient: Whether to keep an entry that differs only in memory, rather than raise.

    Raises:
        SpecError: The file is not a models file, or has a different model of that name.
    """
    old = spec_files.load_models(path).get(name) if path.exists() else None
    if old is None or overwrite:
        return None
    if spec.tokens is not None:
        old = old.at_tokens(spec.tokens)
    shape = _differences(
        ("layers", [old.layers], [spec.layers]),
        ("parameters_in", [old.elements_in], [spec.elements_in]),
        ("parameters_out", old.elements_out, spec.elements_out),
        ("context", [old.context or 0], [spec.context or 0]),
        ("windows", old.windows, spec.windows),
    )
    memory = _differences(("mem_MB", _mb(old.mem_bytes), _mb(spec.mem_bytes)))
    if shape or (memory and not lenient):
        raise SpecError(
            f"{path}: {name} exists already and differs: {'; '.join(shape + memory)}; replace it with "
            "--overwrite"
        )
    if memory:
        return f"{path}: {name} is kept unchanged: {memory[0]}; replace it with --overwrite"
    return None


def add_model(path: Path, name: str, spec: ModelSpec, *, overwrite: bool, lenient: bool) -> bool:
    """Add a model to a file unless the file has it, and return whether anything was written.

    Raises:
        SpecError: The model may not be added, as in ``check_model``, or the file cannot be written.
    """
    check_model(path, name, spec, overwrite=overwrite, lenient=lenient)
    old = spec_files.load_models(path).get(name) if path.exists() else None
    if old is not None and not overwrite:
        if old.tokens is not None or spec.tokens is None:
            return False
        # The sizes are the same, but the entry now records for which length.
        spec = replace(spec, mem_bytes=old.mem_bytes, extra=old.extra)
        overwrite = True
    spec_writing.add_model(path, name, spec, overwrite=overwrite)
    return True


def _mb(values: tuple[float, ...]) -> list[float]:
    return [value / BYTES_PER_MB for value in values]


def _differences(*compared: tuple[str, Any, Any]) -> list[str]:
    found = []
    for what, there, here in compared:
        if len(there) != len(here):
            continue  # the number of layers is reported instead
        different = [
            index
            for index, (a, b) in enumerate(zip(there, here, strict=True), start=1)
            if abs(a - b) > _NEAR * max(abs(a), abs(b))
        ]
        if not different:
            continue
        first = different[0] - 1
        where = f" of layers {ranges_text(different)}" if len(there) > 1 else ""
        example = "" if len(different) == 1 else f" at layer {first + 1}"
        found.append(
            f"{what}{where} is {figure(there[first], 7)} in the file, {figure(here[first], 7)} now{example}"
        )
    return found


# --- device_types.yml -------------------------------------------------------------------------------


def check_profile(
    path: Path,
    type_name: str,
    profiles: Sequence[tuple[str, ModelProfile]],
    figures: Figures,
    *,
    overwrite: bool,
) -> DeviceType | None:
    """Check that profiles may be added to a device type; return the existing type, or None.

    Args:
        path: Device types file, which need not exist.
        type_name: Name of the device type.
        profiles: Models with their profiles, whose times are not compared.
        figures: Figures of the device type.
        overwrite: Whether to replace existing profiles and figures.

    Raises:
        SpecError: The file is not a device types file, or has such a profile or other figures already.
    """
    old = spec_files.load_device_types(path).get(type_name) if path.exists() else None
    if old is None or overwrite:
        return old
    for model, profile in profiles:
        for known in old.profiles.get(model, ()):
            if known.same_conditions(profile):
                raise SpecError(
                    f"{path}: {type_name} has a profile of {model} for batch size {known.batch_size} and "
                    f"{short_dtype(known.dtype)} already, with {figure(sum(known.time_s), 6)} s per "
                    "microbatch; replace it with --overwrite"
                )
    for what, unit, there, here in (
        ("mem_MB", BYTES_PER_MB, old.mem_bytes, figures.mem_bytes),
        ("bw_Mbps", BYTES_PER_SECOND_PER_MBPS, old.bw_bytes_per_s, figures.bw_bytes_per_s),
    ):
        if here is not None and abs(here - there) > _NEAR * max(here, there):
            raise SpecError(
                f"{path}: {type_name} has {what} {figure(there / unit, 7)}, but {figure(here / unit, 7)} was "
                "given; leave it out, or replace it with --overwrite"
            )
    return old


def add_profiles(
    path: Path,
    type_name: str,
    profiles: Sequence[tuple[str, ModelProfile]],
    figures: Figures,
    *,
    overwrite: bool,
) -> None:
    """Add profiles to a device type, creating type and file if needed and keeping everything else.

    Raises:
        SpecError: The profiles may not be added, as in ``check_profile``, figures of a new type are missing,
            or the file cannot be written.
    """
    check_profile(path, type_name, profiles, figures, overwrite=overwrite)
    spec_writing.add_profiles(
        path,
        type_name,
        profiles,
        mem_bytes=figures.mem_bytes,
        bw_bytes_per_s=figures.bw_bytes_per_s,
        idle_w=figures.idle_w,
    )
