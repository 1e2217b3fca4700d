"""The scheduler's YAML files as data: models, device types, devices, and links between neighbours.

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

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pipeedge import _native
from pipeedge.base.errors import SpecError
from pipeedge.base.wording import count
from pipeedge.base.yamlfile import Field, read_document, write_document

__all__ = [
    "BYTES_PER_MB",
    "BYTES_PER_SECOND_PER_MBPS",
    "DeviceType",
    "LengthProfile",
    "Link",
    "ModelProfile",
    "ModelSpec",
    "add_model",
    "add_profile",
    "device_types_of",
    "devices_of",
    "find_named",
    "load_device_types",
    "load_devices",
    "load_models",
    "load_neighbors",
    "save_device_types",
    "save_devices",
    "save_models",
    "save_neighbors",
    "short_dtype",
    "spelling_in",
]

BYTES_PER_MB = 1 << 20
"""``mem_MB`` in YAML counts 2**20 bytes."""
BYTES_PER_SECOND_PER_MBPS = (1 << 20) / 8
"""``bw_Mbps`` in YAML counts 2**20 bits a second."""

_PathLike = str | os.PathLike[str]


_Named = TypeVar("_Named")


def find_named(entries: Mapping[str, _Named], model: str) -> _Named | None:
    """Return the entry of ``model``, which may be there under another spelling of its directory."""
    name = spelling_in(entries, model)
    return None if name is None else entries[name]


def spelling_in(names: Iterable[str], model: str) -> str | None:
    """Return the name of ``model`` in ``names``: its own or, of a directory, another spelling of its path."""
    known, directory = list(names), Path(model)
    if model in known:
        return model
    if not directory.is_dir():
        return None
    return next((name for name in known if Path(name).is_dir() and directory.samefile(name)), None)


def short_dtype(dtype: str) -> str:
    """``torch.float32`` and ``float32`` are one dtype: the second."""
    return dtype.removeprefix("torch.")


@dataclass(frozen=True)
class ModelSpec:
    """What the layers of a model need, whatever runs them."""

    mem_bytes: tuple[float, ...]
    """Weights of each layer."""
    elements_in: int
    """Elements of one item that enter the first layer."""
    elements_out: tuple[int, ...]
    """Elements of one item that leave each layer."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    tokens: int | None = None
    """Tokens of the sentences of which the elements are; None where unknown, and for images."""
    elements_in_per_token: int = 0
    """Elements that one more token adds to ``elements_in``."""
    elements_out_per_token: tuple[int, ...] = ()
    """Elements that one more token adds behind each layer; empty without ``tokens``."""

    def __post_init__(self) -> None:
        _check_numbers("mem_bytes", self.mem_bytes)
        _check_numbers("elements_in", [self.elements_in, self.elements_in_per_token])
        _check_numbers("elements_out", [*self.elements_out, *self.elements_out_per_token])
        if self.tokens is not None and len(self.elements_out_per_token) != len(self.elements_out):
            raise SpecError(
                f"elements_out_per_token has {len(self.elements_out_per_token)} layers, elements_out "
                f"{len(self.elements_out)}: give both one value a layer"
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
        """Return the model with the sizes of sentences of ``tokens``; as it is where that is unknown."""
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
    """What a profile says of sentences of another length."""

    tokens: int
    """Tokens of each sentence."""
    time_s: tuple[float, ...]
    """Seconds of each layer for one microbatch."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_numbers("time_s", self.time_s)


@dataclass(frozen=True)
class ModelProfile:
    """How long one kind of device takes for the layers of one model."""

    batch_size: int
    """Items of a microbatch."""
    dtype: str
    """As the file has it: ``torch.float32``."""
    time_s: tuple[float, ...]
    """Of each layer, for one microbatch."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    tokens: int | None = None
    """Tokens of each sentence; None where unknown, and for images."""
    lengths: tuple[LengthProfile, ...] = ()
    """The same for sentences of other lengths."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise SpecError(f"a profile's batch_size is {self.batch_size}; it must be at least 1")
        _check_numbers("time_s", self.time_s)
        if self.lengths and self.tokens is None:
            raise SpecError("a profile with lengths needs tokens, the length of time_s")

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """Sentence lengths that were measured, shortest first; empty where unknown, and for images."""
        first = () if self.tokens is None else (self.tokens,)
        return tuple(sorted((*first, *(other.tokens for other in self.lengths))))

    def fits_tokens(self, tokens: int) -> bool:
        """Return whether the profile covers sentences of ``tokens`` tokens."""
        return len(self.known_tokens) > 1 or self.known_tokens == (tokens,)

    def at_tokens(self, tokens: int) -> ModelProfile:
        """Return what sentences of ``tokens`` take; the profile as it is where only one length is known."""
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
        """Return the bytes of each layer's weights in this number type, as ``sched-pipeline`` counts them."""
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
class Link:
    """What joins a host to a neighbour."""

    bw_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers("bw_bytes_per_s", [self.bw_bytes_per_s])
        _check_numbers("latency_s", [self.latency_s])


LENGTH_KEYS = ("receive_s", "send_s", "activations_MB")
"""What is measured at each length beside times, a number a layer."""
LIST_KEYS = (*LENGTH_KEYS, "weights_MB")
"""Keys of a profile with a number a layer."""
MEASURED_KEYS = (*LENGTH_KEYS, "feed_s", "collect_s")
"""What a profile may hold beside times, and the scheduler reads."""


def _numbers(values: Any, layers: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == layers
        and all(isinstance(value, int | float) for value in values)
    )


def _at_length(lists: Mapping[int, Any], tokens: int, *, attention: bool) -> Iterator[float]:
    """Numbers of each layer at a length, from those at others; ``attention``: some layers grow faster."""
    known = sorted(lists)
    for layer, values in enumerate(zip(*(lists[each] for each in known), strict=True)):
        yield _native.at_length(
            [float(each) for each in known], list(values), float(tokens), layer if attention else -1
        )


def _check_numbers(name: str, values: Iterable[float]) -> None:
    for value in values:
        if not (math.isfinite(value) and value >= 0):
            raise SpecError(f"{name} holds {value}; numbers must be finite and not negative")


# --- models.yml -------------------------------------------------------------------------------------


def load_models(path: _PathLike) -> dict[str, ModelSpec]:
    """Read the models of a file, by name.

    Raises:
        SpecError: with file, line and key.
    """
    return {name: _read_model(entry) for name, entry in read_document(path).entries().items()}


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
        tokens=None if tokens is None else tokens.whole_number(least=1),
        elements_in_per_token=0 if tokens is None else entry.at("parameters_in_per_token").whole_number(),
        elements_out_per_token=per_token,
        extra=_extra(
            entry,
            {"layers", "mem_MB", "parameters_in", "parameters_out"}
            | (
                {"tokens", "parameters_in_per_token", "parameters_out_per_token"}
                if tokens is not None
                else set()
            ),
        ),
    )


def save_models(path: _PathLike, models: Mapping[str, ModelSpec]) -> None:
    """Write ``models.yml``, whole or not at all.

    Raises:
        SpecError: the file cannot be written.
    """
    write_document(
        path,
        {
            name: {
                "layers": model.layers,
                "mem_MB": [_tidy(value / BYTES_PER_MB) for value in model.mem_bytes],
                "parameters_in": model.elements_in,
                "parameters_out": list(model.elements_out),
                **_tokens_of(model),
                **model.extra,
            }
            for name, model in models.items()
        },
    )


def _tokens_of(model: ModelSpec) -> dict[str, Any]:
    if model.tokens is None:
        return {}
    return {
        "tokens": model.tokens,
        "parameters_in_per_token": model.elements_in_per_token,
        "parameters_out_per_token": list(model.elements_out_per_token),
    }


def add_model(path: _PathLike, name: str, model: ModelSpec, *, overwrite: bool = False) -> None:
    """Add a model to a file, which need not exist; its other models stay.

    Raises:
        SpecError: the file is not a models file, or has ``name`` already and ``overwrite`` is False.
    """
    models = load_models(path) if Path(path).exists() else {}
    if name in models and not overwrite:
        raise SpecError(f"{path}: the model {name} is there already; overwrite it with -f/--overwrite")
    save_models(path, models | {name: model})


# --- device_types.yml -------------------------------------------------------------------------------


def load_device_types(path: _PathLike) -> dict[str, DeviceType]:
    """Read the device types of a file, by name.

    Raises:
        SpecError: with file, line and key.
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
        extra=_measured(entry, len(time_s), (*MEASURED_KEYS, "weights_MB"))
        | _extra(entry, {"batch_size", "dtype", "time_s", "tokens", "lengths", "weights_MB", *MEASURED_KEYS}),
    )


def _read_length(entry: Field) -> LengthProfile:
    time_s = tuple(value.number() for value in entry.at("time_s").items())
    return LengthProfile(
        tokens=entry.at("tokens").whole_number(least=1),
        time_s=time_s,
        extra=_measured(entry, len(time_s), MEASURED_KEYS)
        | _extra(entry, {"tokens", "time_s", *MEASURED_KEYS}),
    )


def _measured(entry: Field, layers: int, keys: Sequence[str]) -> dict[str, Any]:
    """Read what a profile may hold beside its times, by the rules of the scheduler."""
    found: dict[str, Any] = {}
    for key in keys:
        value = entry.find(key)
        if value is None:
            continue
        if key in LIST_KEYS:
            found[key] = [each.number() for each in value.items()]
            if len(found[key]) != layers:
                value.fail(f"has {count(len(found[key]), 'value')}, time_s has {layers}")
        else:
            found[key] = value.number()
    return found


def _profile_entry(profile: ModelProfile) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "batch_size": profile.batch_size,
        "dtype": profile.dtype,
        "time_s": list(profile.time_s),
        **profile.extra,
    }
    if profile.tokens is not None:
        entry["tokens"] = profile.tokens
    if profile.lengths:
        entry["lengths"] = [
            {"tokens": other.tokens, "time_s": list(other.time_s), **other.extra} for other in profile.lengths
        ]
    return entry


def save_device_types(path: _PathLike, types: Mapping[str, DeviceType]) -> None:
    """Write ``device_types.yml``, whole or not at all.

    Raises:
        SpecError: the file cannot be written.
    """
    write_document(
        path,
        {
            name: {
                "bw_Mbps": _tidy(type_.bw_bytes_per_s / BYTES_PER_SECOND_PER_MBPS),
                "mem_MB": _tidy(type_.mem_bytes / BYTES_PER_MB),
                "model_profiles": {
                    model: [_profile_entry(profile) for profile in profiles]
                    for model, profiles in type_.profiles.items()
                },
                **type_.extra,
            }
            for name, type_ in types.items()
        },
    )


def add_profile(
    path: _PathLike,
    type_name: str,
    model: str,
    profile: ModelProfile,
    *,
    mem_bytes: float | None = None,
    bw_bytes_per_s: float | None = None,
    overwrite: bool = False,
) -> None:
    """Add a profile to a device type of a file; neither need exist; everything else stays.

    Args:
        path: the file.
        type_name: the device type.
        model: what was profiled.
        profile: the times.
        mem_bytes: memory of the device type; needed where the type is new.
        bw_bytes_per_s: its bandwidth; needed where the type is new.
        overwrite: replace a profile of the same batch size and dtype, or other figures of the type.

    Raises:
        SpecError: the file is not a device types file; the type is new and has no memory or bandwidth;
            or something would have to be replaced and ``overwrite`` is False.
    """
    types = load_device_types(path) if Path(path).exists() else {}
    old = types.get(type_name)
    if old is None and (mem_bytes is None or bw_bytes_per_s is None):
        raise SpecError(
            f"{path}: the device type {type_name} is new; give its memory (-dtm MB) and bandwidth (-dtb Mbps)"
        )
    if old is None:
        old = DeviceType(mem_bytes=mem_bytes or 0.0, bw_bytes_per_s=bw_bytes_per_s or 0.0)
    profiles = old.profiles.get(model, ())
    others = tuple(other for other in profiles if not profile.same_conditions(other))
    changes = (mem_bytes not in (None, old.mem_bytes)) or (bw_bytes_per_s not in (None, old.bw_bytes_per_s))
    if not overwrite and len(others) < len(profiles):
        raise SpecError(
            f"{path}: {type_name} has a profile of {model} for batch size {profile.batch_size} and dtype "
            f"{profile.dtype} already; overwrite it with -f/--overwrite"
        )
    if not overwrite and changes:
        raise SpecError(
            f"{path}: {type_name} has another memory or bandwidth already; overwrite it with -f/--overwrite"
        )
    new = replace(
        old,
        mem_bytes=old.mem_bytes if mem_bytes is None else mem_bytes,
        bw_bytes_per_s=old.bw_bytes_per_s if bw_bytes_per_s is None else bw_bytes_per_s,
        profiles={**old.profiles, model: (*others, profile)},
    )
    save_device_types(path, types | {type_name: new})


# --- devices.yml ------------------------------------------------------------------------------------


def load_devices(path: _PathLike) -> dict[str, tuple[str, ...]]:
    """Read the hosts of each device type.

    Raises:
        SpecError: with file, line and key; also for a host that is listed twice.
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


def save_devices(path: _PathLike, devices: Mapping[str, Iterable[str]]) -> None:
    """Write ``devices.yml``, whole or not at all.

    Raises:
        SpecError: the file cannot be written.
    """
    write_document(path, {type_name: list(hosts) for type_name, hosts in devices.items()})


# --- device_neighbors_world.yml ---------------------------------------------------------------------


def load_neighbors(path: _PathLike) -> dict[str, dict[str, Link]]:
    """Read the links from each host to its neighbours.

    Raises:
        SpecError: with file, line and key.
    """
    return {
        host: {name: _read_link(link) for name, link in entry.entries().items()}
        for host, entry in read_document(path).entries().items()
    }


def _read_link(entry: Field) -> Link:
    latency = entry.find("latency_s")
    return Link(
        bw_bytes_per_s=entry.at("bw_Mbps").number() * BYTES_PER_SECOND_PER_MBPS,
        latency_s=0.0 if latency is None else latency.number(),
    )


def save_neighbors(path: _PathLike, neighbors: Mapping[str, Mapping[str, Link]]) -> None:
    """Write ``device_neighbors_world.yml``, whole or not at all.

    Raises:
        SpecError: the file cannot be written.
    """
    write_document(
        path,
        {
            host: {
                name: {"bw_Mbps": _tidy(link.bw_bytes_per_s / BYTES_PER_SECOND_PER_MBPS)}
                | ({"latency_s": link.latency_s} if link.latency_s else {})
                for name, link in links.items()
            }
            for host, links in neighbors.items()
        },
    )


# ----------------------------------------------------------------------------------------------------


def _extra(entry: Field, known: set[str]) -> dict[str, Any]:
    return {name: value.plain() for name, value in entry.entries().items() if name not in known}


def _tidy(value: float) -> float | int:
    """Whole numbers without ``.0``, as people write them."""
    return int(value) if float(value).is_integer() else float(value)
