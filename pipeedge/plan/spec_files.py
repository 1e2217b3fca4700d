"""Read the scheduler's YAML files: models, device types, devices, and links between neighbours.

    models.yml                  model -> layers, mem_MB, parameters_in, parameters_out; for text
                                         tokens, parameters_in_per_token, parameters_out_per_token
    device_types.yml            type  -> bw_Mbps, mem_MB, model_profiles:
                                         model -> [batch_size, dtype, time_s; for text tokens and
                                                   lengths: [tokens, time_s]]
    devices.yml                 type  -> [host]
    device_neighbors_world.yml  host  -> neighbour -> bw_Mbps, latency_s

Units change here: files count megabytes of 2**20 bytes and megabits of 2**20 bits, the code counts
bytes, bytes a second and seconds. Keys that are not known are carried along in ``extra`` and written
back, so that profiles may hold more than the scheduler reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pipeedge.base.wording import count
from pipeedge.base.yamlfile import Field, read_document
from pipeedge.plan.specs import (
    BYTES_PER_MB,
    BYTES_PER_SECOND_PER_MBPS,
    LENGTH_KEYS,
    DeviceType,
    LengthProfile,
    ModelProfile,
    ModelSpec,
    NeighborLink,
    short_dtype,
)

__all__ = [
    "device_types_of",
    "devices_of",
    "find_named",
    "load_device_types",
    "load_devices",
    "load_models",
    "load_neighbors",
    "rename_profiles",
    "spelling_in",
]

_PathLike = str | os.PathLike[str]

_LIST_KEYS = (*LENGTH_KEYS, "weights_MB")
"""Keys of a profile with one number for each layer."""
_MEASURED_KEYS = (*LENGTH_KEYS, "feed_s", "collect_s")
"""Keys that a profile may have beside its times and that the scheduler reads."""

_Named = TypeVar("_Named")


def find_named(entries: Mapping[str, _Named], model: str) -> _Named | None:
    """Return the entry of ``model``, also if it is listed under another path of the same directory."""
    name = spelling_in(entries, model)
    return None if name is None else entries[name]


def rename_profiles(types: Mapping[str, DeviceType], model: str) -> dict[str, DeviceType]:
    """Return ``types`` with the profiles of ``model`` under that name, however they are listed."""
    return {
        name: replace(kind, profiles={**kind.profiles, model: find_named(kind.profiles, model) or ()})
        for name, kind in types.items()
    }


def spelling_in(names: Iterable[str], model: str) -> str | None:
    """Return ``model`` if it is in ``names``, or else a name there that is a path of the same directory."""
    known, directory = list(names), Path(model)
    if model in known:
        return model
    if not directory.is_dir():
        return None
    return next((name for name in known if Path(name).is_dir() and directory.samefile(name)), None)


def load_models(path: _PathLike) -> dict[str, ModelSpec]:
    """Read the models of a file, by name.

    Raises:
        SpecError: the file is not valid; names file, line and key.
    """
    return {name: _read_model(entry) for name, entry in read_document(path).entries().items()}


def _shared_layers(entry: Field, layers: int) -> tuple[int, ...]:
    """Read which earlier layer each one shares its weights with: 0 for none, and no layer is named twice."""
    field = entry.find("shared_with")
    if field is None:
        return ()
    shared = tuple(value.whole_number() for value in field.items())
    if len(shared) != layers:
        field.fail(f"has {count(len(shared), 'value')} for {count(layers, 'layer')}")
    for number, twin in enumerate(shared, start=1):
        if twin and (twin >= number or twin in shared[: number - 1]):
            field.fail(
                f"layer {number} shares the weights of layer {twin}; name the nearest layer before it that "
                "has them, or 0"
            )
    return shared


def _read_model(entry: Field) -> ModelSpec:
    layers = entry.at("layers").whole_number()
    memory = [value.number() for value in entry.at("mem_MB").items()]
    if len(memory) != layers:
        entry.at("mem_MB").fail(f"has {count(len(memory), 'value')} for {count(layers, 'layer')}")
    block = [value.whole_number() for value in entry.at("parameters_out").items()]
    if (layers % len(block) or len(block) > layers) if block else layers:
        entry.at("parameters_out").fail(
            f"has {count(len(block), 'value')} for {count(layers, 'layer')}; give one a layer, or a "
            "block of layers that "
            "repeats a whole number of times"
        )
    shared = _shared_layers(entry, layers)
    tokens = entry.find("tokens")
    per_token: tuple[int, ...] = ()
    if tokens is not None:
        listed = entry.at("parameters_out_per_token")
        per_token = tuple(value.whole_number() for value in listed.items())
        if len(per_token) != layers:
            listed.fail(f"has {count(len(per_token), 'value')} for {count(layers, 'layer')}")
    return ModelSpec(
        mem_bytes=tuple(value * BYTES_PER_MB for value in memory),
        elements_in=entry.at("parameters_in").whole_number(),
        elements_out=tuple(block * (layers // len(block))) if block else (),
        shared_with=shared,
        tokens=None if tokens is None else tokens.whole_number(least=1),
        elements_in_per_token=0 if tokens is None else entry.at("parameters_in_per_token").whole_number(),
        elements_out_per_token=per_token,
        extra=_extra(
            entry,
            {"layers", "mem_MB", "parameters_in", "parameters_out", "shared_with"}
            | (
                {"tokens", "parameters_in_per_token", "parameters_out_per_token"}
                if tokens is not None
                else set()
            ),
        ),
    )


def load_device_types(path: _PathLike) -> dict[str, DeviceType]:
    """Read the device types of a file, by name.

    Raises:
        SpecError: the file is not valid; names file, line and key.
    """
    return device_types_of(read_document(path))


def device_types_of(document: Field) -> dict[str, DeviceType]:
    """Read device types as ``load_device_types`` does, from a map in any document."""
    return {name: _read_device_type(entry) for name, entry in document.entries().items()}


def _read_device_type(entry: Field) -> DeviceType:
    profiles: dict[str, tuple[ModelProfile, ...]] = {}
    for model, listed in entry.at("model_profiles").entries().items():
        known: list[ModelProfile] = []
        for item in listed.items():
            profile = _read_profile(item)
            if any(profile.same_conditions(other) for other in known):
                item.fail(
                    f"is a second profile for batch size {profile.batch_size} and dtype "
                    f"{short_dtype(profile.dtype)}; keep one"
                )
            known.append(profile)
        profiles[model] = tuple(known)
    return DeviceType(
        mem_bytes=entry.at("mem_MB").number() * BYTES_PER_MB,
        bw_bytes_per_s=entry.at("bw_Mbps").number() * BYTES_PER_SECOND_PER_MBPS,
        profiles=profiles,
        extra=_extra(entry, {"bw_Mbps", "mem_MB", "model_profiles"}),
    )


def _read_profile(entry: Field) -> ModelProfile:
    batch_size, dtype = entry.at("batch_size").whole_number(least=1), entry.at("dtype").text()
    time_s = tuple(value.number() for value in entry.at("time_s").items())
    tokens, lengths = entry.find("tokens"), entry.find("lengths")
    length = None if tokens is None else tokens.whole_number(least=1)
    if lengths is not None and length is None:
        lengths.fail("needs tokens beside it, the length of time_s")
    others: list[LengthProfile] = []
    for item in () if lengths is None else lengths.items():
        other = _read_length(item)
        if other.tokens in {length, *(known.tokens for known in others)}:
            item.fail(f"is a second entry for {other.tokens} tokens; keep one")
        if len(other.time_s) != len(time_s):
            item.at("time_s").fail(
                f"has {count(len(other.time_s), 'value')}, that of {length} tokens has {len(time_s)}"
            )
        others.append(other)
    return ModelProfile(
        batch_size=batch_size,
        dtype=dtype,
        time_s=time_s,
        tokens=length,
        lengths=tuple(others),
        extra=_measured(entry, len(time_s), (*_MEASURED_KEYS, "weights_MB"))
        | _extra(
            entry, {"batch_size", "dtype", "time_s", "tokens", "lengths", "weights_MB", *_MEASURED_KEYS}
        ),
    )


def _read_length(entry: Field) -> LengthProfile:
    time_s = tuple(value.number() for value in entry.at("time_s").items())
    return LengthProfile(
        tokens=entry.at("tokens").whole_number(least=1),
        time_s=time_s,
        extra=_measured(entry, len(time_s), _MEASURED_KEYS)
        | _extra(entry, {"tokens", "time_s", *_MEASURED_KEYS}),
    )


def _measured(entry: Field, layers: int, keys: Sequence[str]) -> dict[str, Any]:
    """Read the optional measurements of a profile by the rules of the scheduler."""
    found: dict[str, Any] = {}
    for key in keys:
        value = entry.find(key)
        if value is None:
            continue
        if key in _LIST_KEYS:
            found[key] = [each.number() for each in value.items()]
            if len(found[key]) != layers:
                value.fail(f"has {count(len(found[key]), 'value')}, time_s has {layers}")
        else:
            found[key] = value.number()
    return found


def load_devices(path: _PathLike) -> dict[str, tuple[str, ...]]:
    """Read the hosts of each device type.

    Raises:
        SpecError: the file is not valid, or lists a host twice; names file, line and key.
    """
    return devices_of(read_document(path))


def devices_of(document: Field) -> dict[str, tuple[str, ...]]:
    """Read hosts as ``load_devices`` does, from a map in any document."""
    devices: dict[str, tuple[str, ...]] = {}
    type_of: dict[str, str] = {}
    for type_name, entry in document.entries().items():
        for item in entry.items():
            host = item.text()
            if not host:
                item.fail("is an empty host name")
            if any(char < " " or char == "\x7f" for char in host):
                item.fail("is a host name with a control character in it")
            if host in type_of:
                other = type_of[host]
                also = "" if other == type_name else f"; it stands under {other} already"
                item.fail(f"the host {host} is listed twice{also}")
            type_of[host] = type_name
        devices[type_name] = tuple(item.text() for item in entry.items())
    return devices


def load_neighbors(path: _PathLike) -> dict[str, dict[str, NeighborLink]]:
    """Read the links from each host to its neighbours.

    Raises:
        SpecError: the file is not valid; names file, line and key.
    """
    return {
        host: {name: _read_link(link) for name, link in entry.entries().items()}
        for host, entry in read_document(path).entries().items()
    }


def _read_link(entry: Field) -> NeighborLink:
    latency = entry.find("latency_s")
    return NeighborLink(
        bw_bytes_per_s=entry.at("bw_Mbps").number() * BYTES_PER_SECOND_PER_MBPS,
        latency_s=0.0 if latency is None else latency.number(),
    )


def _extra(entry: Field, known: set[str]) -> dict[str, Any]:
    return {name: value.plain() for name, value in entry.entries().items() if name not in known}
