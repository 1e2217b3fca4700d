"""Filling a shard's parameters from a weights file: names and shapes are checked first, then data is read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from pipeedge.base.errors import WeightsError
from pipeedge.base.wording import excerpt
from pipeedge.models.architecture import Architecture
from pipeedge.models.dtypes import dtype_name
from pipeedge.models.int4 import Int4Linear
from pipeedge.models.int8 import Int8Linear, quantize_rows
from pipeedge.models.linear import OnednnLinear
from pipeedge.models.shard import Shard
from pipeedge.models.weights.comparing import check_coding, check_tensors
from pipeedge.models.weights.files import WeightsFile
from pipeedge.models.weights.locating import Filling
from pipeedge.models.weights.mapping import map_values
from pipeedge.models.weights.names import same
from pipeedge.models.words import WORD_TABLE

__all__ = ["fill", "plan", "read", "read_int8", "scale_name"]

_ROWS = 1 << 8
"""Number of rows of a 4-bit weight that are packed at a time."""


def plan(shard: Shard, architecture: Architecture, file: WeightsFile) -> tuple[Filling, ...]:
    """Find where in ``file`` each parameter of ``shard`` is stored. This reads headers, not data.

    Raises:
        WeightsError: A tensor is missing or of another shape or type (the first is named), or the file
            belongs to a deeper model.
    """
    parameters = shard.stored_tensors()
    fillings = check_tensors(parameters, architecture, file)
    for filling in fillings:
        for source in filling.sources:
            entry = file.entry(source.name)
            if entry.dtype is None:
                kind = excerpt(entry.dtype_name)
                raise WeightsError(f"{file.path}: {source.name} is of type {kind}; floating point is needed")
        _check_int8(filling, parameters[filling.parameter], file)
        check_coding(filling, file, parameters[filling.parameter].dtype)
    return fillings


def fill(
    shard: Shard,
    architecture: Architecture,
    file: WeightsFile,
    *,
    device: str | torch.device = "cpu",
    progress: Callable[[int], object] = lambda _: None,
    beside: Shard | None = None,
) -> Shard:
    """Load weights from ``file`` into ``shard``, built on ``meta``, one tensor at a time; return the shard.

    Each tensor is converted to the shard's type while it is read. Weights that are packed, or quantised to 8
    bits here, pass through one buffer, one after the other. A table of words on the CPU stays in the file, if
    it can be mapped. ``progress`` is called with the bytes stored for each piece that is read, about a
    megabyte. What another shard ``beside`` it has already, of the same type and kernels, is shared with that.

    Raises:
        WeightsError: As for ``plan``, or the data ends early or is damaged.
    """
    fillings = plan(shard, architecture, file)
    filled = () if beside is None else shard.adopt(beside)
    missing = [one for one in fillings if not one.parameter.startswith(filled)]
    meta = shard.stored_tensors()
    packed = {f"{name}.weight": layer for name, layer in shard.packed_layers() if not name.startswith(filled)}
    # One buffer serves all tensors that are packed or quantised: freed blocks of different sizes would leave
    # holes that are not reused.
    whole = {
        one.parameter
        for one in missing
        if not isinstance(packed.get(one.parameter), Int4Linear) or not _has_rows(one)
    }
    memory = torch.empty(max((meta[name].numel() for name in packed if name in whole), default=0))
    file.announce(source.name for filling in missing for source in filling.sources)
    for filling in missing:
        name, place = filling.parameter, meta[filling.parameter]
        layer = packed.get(name)
        stored = layer.coded_bytes if isinstance(layer, Int4Linear) else place.nbytes
        pieces = _Pieces(stored / max(place.numel(), 1), progress)
        if isinstance(layer, Int4Linear):
            _fill_int4(layer, filling, architecture, file, memory, pieces.add)
            pieces.end(stored)
        elif isinstance(layer, Int8Linear):
            weight, scale = read_int8(filling, place.shape, architecture, file, memory, pieces.add)
            layer.set_weight(weight, scale, torch.device(device))
            pieces.end(weight.nbytes + scale.nbytes)
        elif isinstance(layer, OnednnLinear):
            layer.set_weight(read(filling, place.shape, place.dtype, architecture, file, memory, pieces.add))
            pieces.end(place.nbytes)
        else:
            tensor = _mapped(filling, file) if torch.device(device).type == "cpu" else None
            if tensor is None:
                tensor = read(filling, place.shape, place.dtype, architecture, file, progress=pieces.add)
            _assign(shard, name, nn.Parameter(tensor.to(device), requires_grad=False))
            pieces.end(place.nbytes)
    return shard


class _Pieces:
    """The stored bytes of one tensor, told piece by piece.

    Args:
        bytes_per_value: Stored bytes of a value.
        progress: Called with the bytes of each piece.
    """

    def __init__(self, bytes_per_value: float, progress: Callable[[int], object]) -> None:
        self._bytes_per_value = bytes_per_value
        self._progress = progress
        self._told = 0

    def add(self, values: int) -> None:
        """Tell of a number of values that were read."""
        size = int(values * self._bytes_per_value)
        self._told += size
        self._progress(size)

    def end(self, stored: int) -> None:
        """Tell of all that is left of the ``stored`` bytes of the tensor."""
        self._progress(stored - self._told)


def _mapped(filling: Filling, file: WeightsFile) -> torch.Tensor | None:
    """Return a table of words whose memory is that of ``file``, or None for what must be copied."""
    source, *others = filling.sources
    if filling.parameter != WORD_TABLE or others or source.layout is not same:
        return None
    place, entry = file.place(source.name), file.entry(source.name)
    values = None if place is None or entry.dtype is None else map_values(place, entry.dtype)
    return None if values is None else values.view(entry.shape)


def _assign(shard: Shard, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(shard.get_submodule(owner), attribute, parameter)


def read(
    filling: Filling,
    shape: torch.Size,
    dtype: torch.dtype,
    architecture: Architecture,
    file: WeightsFile,
    memory: torch.Tensor | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> torch.Tensor:
    """Return a parameter of ``shape``, converted to ``dtype`` while it is read.

    ``memory``, a large enough float32 buffer, holds it if given. ``progress`` is called with the number of
    values of each piece.
    """
    if memory is None:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        tensor = memory.view(dtype)[: shape.numel()].view(shape)
    for name, view in filling.views(tensor, architecture.heads):
        file.read_into(name, view, progress)
    return tensor


def read_int8(
    filling: Filling,
    shape: torch.Size,
    architecture: Architecture,
    file: WeightsFile,
    memory: torch.Tensor | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an 8-bit weight and its scales, as stored in the file or quantised here in ``memory``."""
    if not _is_int8(filling, file):
        return quantize_rows(read(filling, shape, torch.float32, architecture, file, memory, progress))
    scale = torch.empty(shape[0])
    for source, part in zip(filling.sources, scale.chunk(len(filling.sources)), strict=True):
        file.read_into(scale_name(source.name), part)
        if not bool((part.isfinite() & (part > 0)).all()):
            raise WeightsError(
                f"{file.path}: {scale_name(source.name)} has scales that are not above 0; convert again"
            )
    return read(filling, shape, torch.int8, architecture, file, progress=progress), scale


def _fill_int4(
    layer: Int4Linear,
    filling: Filling,
    architecture: Architecture,
    file: WeightsFile,
    memory: torch.Tensor,
    progress: Callable[[int], object],
) -> None:
    """Pack a 4-bit weight from the codes in the file, or round it here, some rows at a time if possible."""
    if not _has_rows(filling):
        weight = read(filling, layer.stored.shape, torch.float32, architecture, file, memory, progress)
        layer.set_rows(0, weight.numpy())
        return
    row = 0
    for source in filling.sources:
        coded = file.coding(source.name) is not None
        for part in (file.read_coded if coded else file.read_rows)(source.name, _ROWS):
            try:
                layer.set_rows(row, (part if coded else part.float()).numpy())
            except ValueError as error:
                raise WeightsError(f"{file.path}: {source.name}: {error}; convert again") from error
            row += len(part)
            progress(len(part) * layer.inputs)


def _has_rows(filling: Filling) -> bool:
    """Return whether the rows of a matrix are those of its file."""
    return all(source.layout is same for source in filling.sources)


def scale_name(name: str) -> str:
    """Return the name that a file gives to the scales of its 8-bit weight ``name``."""
    return f"{name}_scale"


def _is_int8(filling: Filling, file: WeightsFile) -> bool:
    return any(file.entry(source.name).dtype is torch.int8 for source in filling.sources)


def _check_int8(filling: Filling, place: torch.Tensor, file: WeightsFile) -> None:
    """Check that 8-bit weights are wanted and have their scales.

    Raises:
        WeightsError: They do not fit. The message says what would.
    """
    if not _is_int8(filling, file):
        return
    rows = place.shape[0] // len(filling.sources)
    for source in filling.sources:
        name, scale = source.name, scale_name(source.name)
        if place.dtype is not torch.int8:
            raise WeightsError(
                f"{file.path}: {name} is stored as int8, {dtype_name(place.dtype)} is needed; run with "
                "--dtype int8, or with weights that are not quantised (-M)"
            )
        if file.entry(name).dtype is not torch.int8 or scale not in file.names:
            raise WeightsError(f"{file.path}: {name} has no scales ({scale}) to its 8-bit values")
        entry = file.entry(scale)
        if entry.shape != (rows,) or entry.dtype is not torch.float32:
            raise WeightsError(
                f"{file.path}: {scale} is {entry.dtype_name} of shape {list(entry.shape)}; float32 of "
                f"[{rows}] is needed"
            )
