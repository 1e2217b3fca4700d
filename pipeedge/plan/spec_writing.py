"""Write the scheduler's YAML files, and add entries to them.

Files keep what is in them: an added entry leaves the text of the others, with their comments, as it is, and
keys that are not known here are written back. What the files say comes from ``plan.spec_files``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeedge.base.errors import SpecError
from pipeedge.base.yamledit import update_document
from pipeedge.base.yamlfile import write_document
from pipeedge.plan.spec_files import load_device_types, load_models, read_files
from pipeedge.plan.specs import (
    BYTES_PER_MB,
    BYTES_PER_SECOND_PER_MBPS,
    DeviceType,
    LengthProfile,
    ModelProfile,
    ModelSpec,
    NeighborLink,
    SpecFiles,
)

__all__ = [
    "EXAMPLE",
    "add_links",
    "add_model",
    "add_profiles",
    "save_device_types",
    "save_devices",
    "save_models",
    "save_neighbors",
]

_PathLike = str | os.PathLike[str]

EXAMPLE = "# A worked example"
"""Beginning of the first line of a worked example, which says that nothing is added to it by default."""


def save_models(path: _PathLike, models: Mapping[str, ModelSpec]) -> None:
    """Write ``models.yml``, whole or not at all.

    Raises:
        SpecError: The file cannot be written.
    """
    write_document(path, {name: _model_entry(model) for name, model in models.items()})


def _model_entry(model: ModelSpec) -> dict[str, Any]:
    return {
        "layers": model.layers,
        "mem_MB": [_tidy(value) for value in _mb(model.mem_bytes)],
        "parameters_in": model.elements_in,
        "parameters_out": list(model.elements_out),
        **({"shared_with": list(model.shared_with)} if model.shared_with else {}),
        **({} if model.context is None else {"context": model.context}),
        **({"windows": list(model.windows)} if model.windows else {}),
        **_tokens_of(model),
        **_agreement_of(model),
        **model.extra,
    }


def _tokens_of(model: ModelSpec) -> dict[str, Any]:
    if model.tokens is None:
        return {}
    return {
        "tokens": model.tokens,
        "parameters_in_per_token": model.elements_in_per_token,
        "parameters_out_per_token": list(model.elements_out_per_token),
    }


def _agreement_of(model: ModelSpec) -> dict[str, Any]:
    if not model.agreement_at_bits:
        return {}
    return {"agreement_at_bits": {bits: list(parts) for bits, parts in model.agreement_at_bits.items()}}


def add_model(path: _PathLike, name: str, model: ModelSpec, *, overwrite: bool = False) -> None:
    """Add a model to a file, which need not exist; its other models stay as they are written.

    Raises:
        SpecError: The file is not a models file, or has ``name`` already and ``overwrite`` is False.
    """
    models = load_models(path) if Path(path).exists() else {}
    if name in models and not overwrite:
        raise SpecError(f"{path}: the model {name} is there already; overwrite it with -f/--overwrite")
    whole = {key: _model_entry(known) for key, known in {**models, name: model}.items()}
    update_document(path, {name: whole[name]}, whole, outdated=EXAMPLE)


def _profile_entry(profile: ModelProfile) -> dict[str, Any]:
    notes = {
        "feed_s": profile.feed_s,
        "collect_s": profile.collect_s,
        "overhead_s": profile.overhead_s,
        "agreement": profile.agreement,
        "threads": profile.threads,
        "kernels": profile.kernels,
        "busy_W": profile.busy_w,
        "process_MB": None if profile.process_bytes is None else profile.process_bytes / BYTES_PER_MB,
    }
    return {
        "batch_size": profile.batch_size,
        "dtype": profile.dtype,
        **_lists(profile),
        **({"weights_MB": _mb(profile.weight_bytes)} if profile.weight_bytes else {}),
        **{key: value for key, value in notes.items() if value is not None},
        **_handling_of(profile),
        **_steps_of(profile),
        **profile.extra,
        **({} if profile.tokens is None else {"tokens": profile.tokens}),
        **({"lengths": [_length_entry(other) for other in profile.lengths]} if profile.lengths else {}),
    }


def _handling_of(profile: ModelProfile) -> dict[str, Any]:
    if not profile.handling:
        return {}
    return {
        "handling": {
            transport: {
                "receive_s": costs.receive_s,
                "receive_s_per_MB": costs.receive_s_per_byte * BYTES_PER_MB,
                "send_s": costs.send_s,
                "send_s_per_MB": costs.send_s_per_byte * BYTES_PER_MB,
                **costs.extra,
            }
            for transport, costs in profile.handling.items()
        }
    }


def _steps_of(profile: ModelProfile) -> dict[str, Any]:
    steps = profile.steps
    if steps is None:
        return {}
    lists = ["fixed_s", "start_s", "row_s", "position_s", "chunk_position_s", "cache_bytes"]
    lists += ["many_start_s", "many_row_s"] if steps.many_row_s else []
    ends = {
        name: getattr(steps.ends, name) for name in ("fixed_s", "start_s", "row_s", "feed_s", "feed_row_s")
    }
    return {
        "steps": {
            **{name: list(getattr(steps, name)) for name in lists},
            "ends": {**ends, "mem_MB": steps.ends.memory_bytes / BYTES_PER_MB},
            **({} if steps.residual is None else {"residual": steps.residual}),
            **({} if steps.variation is None else {"variation": steps.variation}),
            **(
                {}
                if steps.load_s_per_byte is None
                else {"load_s_per_MB": steps.load_s_per_byte * BYTES_PER_MB}
            ),
        }
    }


def _length_entry(profile: LengthProfile) -> dict[str, Any]:
    return {"tokens": profile.tokens, **_lists(profile), **profile.extra}


def _lists(profile: ModelProfile | LengthProfile) -> dict[str, list[float]]:
    """Return the measurements of each layer."""
    measured = {
        "spread_s": list(profile.spread_s),
        "receive_s": list(profile.receive_s),
        "send_s": list(profile.send_s),
        "activations_MB": _mb(profile.activation_bytes),
    }
    return {"time_s": list(profile.time_s)} | {key: values for key, values in measured.items() if values}


def _mb(values: Iterable[float]) -> list[float]:
    return [value / BYTES_PER_MB for value in values]


def save_device_types(path: _PathLike, types: Mapping[str, DeviceType]) -> None:
    """Write ``device_types.yml``, whole or not at all.

    Raises:
        SpecError: The file cannot be written.
    """
    write_document(path, {name: _type_entry(kind) for name, kind in types.items()})


def _type_entry(kind: DeviceType) -> dict[str, Any]:
    watts_of = {"busy_W": kind.busy_w, "idle_W": kind.idle_w}
    return {
        "bw_Mbps": _tidy(kind.bw_bytes_per_s / BYTES_PER_SECOND_PER_MBPS),
        "mem_MB": _tidy(kind.mem_bytes / BYTES_PER_MB),
        **{key: _tidy(watts) for key, watts in watts_of.items() if watts is not None},
        "model_profiles": {
            model: [_profile_entry(profile) for profile in profiles]
            for model, profiles in kind.profiles.items()
        },
        **kind.extra,
    }


def add_profiles(
    path: _PathLike,
    type_name: str,
    profiles: Iterable[tuple[str, ModelProfile]],
    *,
    mem_bytes: float | None = None,
    bw_bytes_per_s: float | None = None,
    idle_w: float | None = None,
) -> None:
    """Add profiles to a device type of a file; neither need exist; other types stay as they are written.

    Args:
        path: The file.
        type_name: The device type.
        profiles: Name of the model and profile; one of the same batch size and dtype is replaced.
        mem_bytes: Memory of the device type; needed where the type is new.
        bw_bytes_per_s: Its bandwidth; needed where the type is new.
        idle_w: Watts that were measured while it waits. A type that has the watts of a meter keeps them, and
            none of those that were measured are added.

    Raises:
        SpecError: The file is not a device types file, or the type is new and has no memory or bandwidth.
    """
    types = load_device_types(path) if Path(path).exists() else {}
    old = types.get(type_name)
    if old is None:
        if mem_bytes is None or bw_bytes_per_s is None:
            raise SpecError(
                f"{path}: the device type {type_name} is new; give its memory (-dtm MB) and bandwidth "
                "(-dtb Mbps)"
            )
        old = DeviceType(mem_bytes, bw_bytes_per_s)
    known = dict(old.profiles)
    metered = old.busy_w is not None
    for model, measured in profiles:
        profile = replace(measured, busy_w=None) if metered else measured
        others = tuple(other for other in known.get(model, ()) if not profile.same_conditions(other))
        known[model] = (*others, profile)
    new = replace(
        old,
        mem_bytes=old.mem_bytes if mem_bytes is None else mem_bytes,
        bw_bytes_per_s=old.bw_bytes_per_s if bw_bytes_per_s is None else bw_bytes_per_s,
        profiles=known,
        idle_w=old.idle_w if metered or idle_w is None else idle_w,
    )
    whole = {name: _type_entry(kind) for name, kind in {**types, type_name: new}.items()}
    update_document(path, {type_name: whole[type_name]}, whole, outdated=EXAMPLE)


def save_devices(path: _PathLike, devices: Mapping[str, Iterable[str]]) -> None:
    """Write ``devices.yml``, whole or not at all.

    Raises:
        SpecError: The file cannot be written.
    """
    write_document(path, {type_name: list(hosts) for type_name, hosts in devices.items()})


def save_neighbors(path: _PathLike, neighbors: Mapping[str, Mapping[str, NeighborLink]]) -> None:
    """Write ``device_neighbors_world.yml``, whole or not at all.

    Raises:
        SpecError: The file cannot be written.
    """
    write_document(path, {host: _links_entry(links) for host, links in neighbors.items()})


def _links_entry(links: Mapping[str, NeighborLink]) -> dict[str, dict[str, Any]]:
    return {
        name: {"bw_Mbps": _tidy(link.bw_bytes_per_s / BYTES_PER_SECOND_PER_MBPS)}
        | ({"latency_s": link.latency_s} if link.latency_s else {})
        for name, link in links.items()
    }


def add_links(path: _PathLike, links: Mapping[tuple[str, str], NeighborLink]) -> None:
    """Add links to a neighbours file, which need not exist; its other links stay.

    Args:
        path: The file.
        links: Links by source and destination host.

    Raises:
        SpecError: The file is not a neighbours file, or cannot be written.
    """
    known = read_files(neighbors=path) if Path(path).exists() else SpecFiles()
    neighbors = {host: dict(each) for host, each in known.neighbors.items()}
    for (source, destination), link in links.items():
        neighbors.setdefault(source, {})[destination] = link
    whole = {host: _links_entry(each) for host, each in neighbors.items()}
    for (source, destination), extra in known.link_extra.items():
        whole[source][destination].update(extra)
    update_document(path, {source: whole[source] for source, _ in links}, whole, outdated=EXAMPLE)


def _tidy(value: float) -> float | int:
    """Return whole numbers as integers, which YAML writes without ``.0``."""
    return int(value) if float(value).is_integer() else float(value)
