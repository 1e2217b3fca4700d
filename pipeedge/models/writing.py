"""Writing weights as ``.npz``, a tensor at a time, under a temporary name until whole."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from pipeedge.errors import WeightsError
from pipeedge.models.architecture import Architecture
from pipeedge.models.fill import hub_tensors, plan
from pipeedge.models.random_weights import RandomWeights
from pipeedge.models.shard import Shard
from pipeedge.models.weights import WeightsFile

__all__ = ["make_directory_of", "needed_names", "replacing", "write_npz", "write_random"]


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path beside ``target`` that takes its place if the body succeeds, and else goes.

    Raises:
        WeightsError: the directory cannot be written to, or the disk is full.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    make_directory_of(target)
    try:
        yield temporary
        temporary.replace(target)
    except OSError as error:
        raise WeightsError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def make_directory_of(target: Path) -> None:
    """Make the directory that ``target`` is to lie in, unless it is there.

    Raises:
        WeightsError: it cannot be made.
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

    Members are stored, not deflated: weights do not compress, and are read at the speed of the disk.

    Args:
        target: the file to write.
        names: tensors of ``source``.
        source: where they come from.
        progress: called with the bytes of each tensor written.

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
    """Write to ``target`` the weights that ``shard`` would get from ``Model.random(seed=seed)``."""
    source = RandomWeights(hub_tensors(shard, architecture), seed)
    write_npz(target, source.names, source, progress=progress)


def needed_names(shard: Shard, architecture: Architecture, source: WeightsFile) -> tuple[str, ...]:
    """The tensors of ``source`` that make up ``shard``.

    Raises:
        WeightsError: one is missing or of another shape.
    """
    fillings = plan(shard, architecture, source)
    return tuple(tensor.name for filling in fillings for tensor in filling.sources)
