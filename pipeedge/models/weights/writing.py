"""Writing weights atomically, one tensor at a time.

Originals are written in float32 as ``.npz``. Weights converted to another type are written as
``.safetensors``; the scales of an 8-bit tensor are stored next to it under its name followed by ``_scale``.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from pipeedge import _native as native
from pipeedge.base.errors import WeightsError
from pipeedge.base.files import temporary_beside
from pipeedge.models.architecture import Architecture
from pipeedge.models.dtypes import INT4
from pipeedge.models.shard import Shard
from pipeedge.models.weights.files import WeightsFile
from pipeedge.models.weights.fill import plan, read, read_int8, scale_name
from pipeedge.models.weights.locating import Filling, hub_filling, hub_tensors
from pipeedge.models.weights.random_weights import RandomWeights
from pipeedge.models.weights.safetensors_files import CODED_KEY, SOURCE_KEY

__all__ = [
    "make_directory_of",
    "needed_names",
    "coded_shape",
    "replacing",
    "safetensors_header",
    "write_converted",
    "write_npz",
    "write_random",
]

_SAFETENSORS_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.int8: "I8",
        torch.uint8: "U8",
    }
)
_HEADER_ALIGNMENT = 8


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target`` that replaces it on success and is removed on failure.

    Raises:
        WeightsError: The directory is not writable, or the disk is full.
    """
    make_directory_of(target)
    temporary = temporary_beside(target)
    try:
        yield temporary
        temporary.replace(target)
    except OSError as error:
        raise WeightsError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def make_directory_of(target: Path) -> None:
    """Create the directory of ``target`` unless it exists.

    Raises:
        WeightsError: The directory cannot be created.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightsError(f"{target} cannot be written: {error.strerror or error}") from error


def write_npz(
    target: Path,
    names: Iterable[str],
    source: WeightsFile,
    *,
    progress: Callable[[int], object] = lambda _bytes: None,
) -> None:
    """Write the named tensors of ``source`` to ``target`` as float32, holding one of them at a time.

    Members are stored, not deflated: weights hardly compress, and stored ones are read at the speed of the
    disk.

    Args:
        target: File to write.
        names: Names of tensors of ``source``.
        source: Weights to read from.
        progress: Called with the bytes of each tensor written.

    Raises:
        WeightsError: ``source`` is damaged, or ``target`` cannot be written.
    """
    with (
        replacing(target) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED, allowZip64=True) as archive,
    ):
        for name in names:
            tensor = torch.empty(source.entry(name).shape)
            source.read_into(name, tensor)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, tensor.numpy(), allow_pickle=False)
            progress(tensor.nbytes)


def write_random(
    target: Path,
    shard: Shard,
    architecture: Architecture,
    seed: int,
    *,
    progress: Callable[[int], object] = lambda _bytes: None,
) -> None:
    """Write the weights that ``shard`` would get from ``Model.random(seed=seed)`` to ``target``."""
    source = RandomWeights(hub_tensors(shard, architecture), seed)
    write_npz(target, source.names, source, progress=progress)


def write_converted(
    target: Path,
    shard: Shard,
    architecture: Architecture,
    source: WeightsFile,
    fingerprint: str,
    *,
    progress: Callable[[int], object] = lambda _bytes: None,
) -> None:
    """Write what ``shard``, on ``meta``, would read from ``source`` to ``target``, in the shard's type.

    Args:
        target: A ``.safetensors`` file, written with the hub's names.
        shard: Shard of the number type to convert to.
        architecture: Architecture of its model.
        source: Weights to read from.
        fingerprint: Fingerprint of ``source``, stored in the file.
        progress: Called with the bytes of each parameter written.

    Raises:
        WeightsError: ``source`` does not fit or is damaged, or ``target`` cannot be written.
    """
    places = shard.stored_tensors()
    fillings = plan(shard, architecture, source)
    specs = [
        spec
        for filling in fillings
        for spec in _stored_specs(filling.parameter, places[filling.parameter], architecture)
    ]
    with replacing(target) as temporary, temporary.open("wb") as file:
        file.write(
            safetensors_header(specs, {SOURCE_KEY: fingerprint, **_coded_metadata(places, architecture)})
        )
        for filling in fillings:
            place, written = places[filling.parameter], 0
            for tensor in _stored(filling, place, architecture, source):
                data = tensor.contiguous().view(torch.uint8).numpy().data
                file.write(data)
                written += data.nbytes
            progress(written)


def _stored(
    filling: Filling, place: torch.Tensor, architecture: Architecture, source: WeightsFile
) -> Iterator[torch.Tensor]:
    """Yield the tensors that represent a parameter in a file: its parts, and their scales if any."""
    hub = hub_filling(filling.parameter, architecture)
    if place.dtype is INT4:
        weight = read(filling, place.shape, torch.float32, architecture, source)
        for _, view in hub.views(weight, architecture.heads):
            rows = view.contiguous().numpy()
            yield torch.from_numpy(native.encode_rows("int4", rows, threads=torch.get_num_threads()))
        return
    if place.dtype is not torch.int8:
        tensor = read(filling, place.shape, place.dtype, architecture, source)
        yield from (view for _, view in hub.views(tensor, architecture.heads))
        return
    tensor, scale = read_int8(filling, place.shape, architecture, source)
    yield from (view for _, view in hub.views(tensor, architecture.heads))
    yield from scale.chunk(len(hub.sources))


def _stored_specs(
    parameter: str, place: torch.Tensor, architecture: Architecture
) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
    """Yield the name, number type and shape of each tensor of ``_stored``."""
    views = dict(hub_filling(parameter, architecture).views(place, architecture.heads))
    if place.dtype is INT4:
        yield from ((name, torch.uint8, coded_shape("int4", view.shape)) for name, view in views.items())
        return
    yield from ((name, place.dtype, view.shape) for name, view in views.items())
    if place.dtype is torch.int8:
        yield from ((scale_name(name), torch.float32, view.shape[:1]) for name, view in views.items())


def coded_shape(coding: str, shape: Sequence[int]) -> torch.Size:
    """Return the shape of a matrix of weights as codes, uint8 [rows, bytes]."""
    sizes = {name: (values, size) for name, values, size in native.weight_codings()}
    values, size = sizes[coding]
    return torch.Size((shape[0], -(-shape[1] // values) * size))


def _coded_metadata(places: Mapping[str, torch.Tensor], architecture: Architecture) -> dict[str, str]:
    """Return what a file says of its matrices of codes, if it has any."""
    coded = {
        name: ("int4", view.shape[1])
        for parameter, place in places.items()
        if place.dtype is INT4
        for name, view in hub_filling(parameter, architecture).views(place, architecture.heads)
    }
    return {CODED_KEY: json.dumps(coded)} if coded else {}


def safetensors_header(
    specs: Iterable[tuple[str, torch.dtype, torch.Size]], metadata: Mapping[str, str]
) -> bytes:
    """Return the length and JSON header of the tensors: https://huggingface.co/docs/safetensors."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape in specs:
        size, kind = shape.numel() * dtype.itemsize, _SAFETENSORS_NAMES[dtype]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT)
    return struct.pack("<Q", len(encoded)) + encoded


def needed_names(shard: Shard, architecture: Architecture, source: WeightsFile) -> tuple[str, ...]:
    """Return the names of the tensors of ``source`` that make up ``shard``.

    Raises:
        WeightsError: A tensor is missing or of another shape.
    """
    fillings = plan(shard, architecture, source)
    return tuple(tensor.name for filling in fillings for tensor in filling.sources)
