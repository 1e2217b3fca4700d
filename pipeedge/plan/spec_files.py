"""Read the scheduler's YAML files: models, device types, devices, and links between neighbours.

    models.yml                  model -> layers, mem_MB, parameters_in, parameters_out; for text
                                         tokens, parameters_in_per_token, parameters_out_per_token
    device_types.yml            type  -> bw_Mbps, mem_MB, model_profiles:
                                         model -> [batch_size, dtype, time_s; for text tokens and
                                                   lengths: [tokens, time_s]]
    devices.yml                 type  -> [host]
    device_neighbors_world.yml  host  -> neighbour -> bw_Mbps, latency_s

The program ``sched-pipeline`` reads them and decides what is valid. It prints their contents as JSON, in
bytes, bytes a second and seconds; its message about an invalid file is raised as it is. Each call here starts
it once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from pipeedge.base.errors import SpecError
from pipeedge.base.fields import MALFORMED, reader
from pipeedge.plan.sched_pipeline import RefusedError, not_understood, run_program
from pipeedge.plan.specs import DeviceType, ModelSpec, NeighborLink, SpecFiles

__all__ = [
    "find_named",
    "load_device_types",
    "load_devices",
    "load_models",
    "load_neighbors",
    "read_files",
    "rename_profiles",
    "spelling_in",
]

_PathLike = str | os.PathLike[str]
_Named = TypeVar("_Named")


class _Link(Struct):
    bw_bytes_per_s: float
    latency_s: float
    extra: dict[str, Any] = {}


class _Contents(Struct):
    """The JSON that the program prints."""

    models: dict[str, ModelSpec] = {}
    device_types: dict[str, DeviceType] = {}
    devices: dict[str, tuple[str, ...]] = {}
    neighbors: dict[str, dict[str, _Link]] = {}


_decode = reader(_Contents)


def read_files(
    *,
    models: _PathLike | None = None,
    device_types: _PathLike | None = None,
    devices: _PathLike | None = None,
    neighbors: _PathLike | None = None,
    cluster: _PathLike | None = None,
) -> SpecFiles:
    """Read the given files, of which ``cluster`` contains or names device types and devices.

    Raises:
        SpecError: A file is not valid; names file, line and key.
        RequestError: The program is missing.
        PipeEdgeError: The program failed.
    """
    options = {
        "--models-file": models,
        "--dev-types-file": device_types,
        "--dev-file": devices,
        "--dev-neighbors-file": neighbors,
        "--cluster-file": cluster,
    }
    given = [f"{name}={os.fspath(path)}" for name, path in options.items() if path is not None]
    try:
        contents: _Contents = _decode(run_program(["--format=files", *given]))
    except RefusedError as error:
        if error.line.startswith("--format"):  # a program older than this form
            raise not_understood(error) from error
        raise SpecError(error.line) from error
    except MALFORMED as error:
        raise not_understood(error) from error
    links = {(source, to): link for source, each in contents.neighbors.items() for to, link in each.items()}
    return SpecFiles(
        models=contents.models,
        device_types=contents.device_types,
        devices=contents.devices,
        neighbors={
            source: {to: NeighborLink(link.bw_bytes_per_s, link.latency_s) for to, link in each.items()}
            for source, each in contents.neighbors.items()
        },
        link_extra={ends: link.extra for ends, link in links.items() if link.extra},
    )


def load_models(path: _PathLike) -> Mapping[str, ModelSpec]:
    """Read the models of a file, by name. Raises SpecError as ``read_files`` does."""
    return read_files(models=path).models


def load_device_types(path: _PathLike) -> Mapping[str, DeviceType]:
    """Read the device types of a file, by name. Raises SpecError as ``read_files`` does."""
    return read_files(device_types=path).device_types


def load_devices(path: _PathLike) -> Mapping[str, tuple[str, ...]]:
    """Read the hosts of each device type. Raises SpecError as ``read_files`` does."""
    return read_files(devices=path).devices


def load_neighbors(path: _PathLike) -> Mapping[str, Mapping[str, NeighborLink]]:
    """Read the links from each host to its neighbours. Raises SpecError as ``read_files`` does."""
    return read_files(neighbors=path).neighbors


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
