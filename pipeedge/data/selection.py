"""Selection of the items of a data set, and their order. Pure, except that it reads the file of indices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeedge.base.errors import InputError
from pipeedge.request.files import DEFAULT_ITEMS, InputRequest

__all__ = ["read_indices", "select"]


def select(request: InputRequest, available: int) -> list[int]:
    """Return the indices to run out of ``available`` items: those in the file or all, shuffled, then limited.

    Shuffling precedes limiting, so that ``-b 100 --dataset-shuffle`` is a random sample.
    """
    indices: Sequence[int] = range(available)
    limit = request.max_items
    if request.dataset_indices_file is not None:
        indices = read_indices(request.dataset_indices_file, available)
    elif limit is None:
        limit = DEFAULT_ITEMS
    if request.dataset_shuffle:
        # The bit generator is named, because the order for a seed must not change with NumPy's default.
        order = np.random.Generator(np.random.PCG64(request.seed)).permutation(len(indices))
        indices = [indices[int(place)] for place in order]
    return list(indices[:limit])


def read_indices(path: Path, available: int) -> list[int]:
    """Read indices from 0 to ``available - 1`` from ``path``, one per line, skipping blank lines."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the list of indices cannot be read ({error})") from error
    indices = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            index = int(line)
        except ValueError:
            raise InputError(f"{path}:{number}: {line.strip()!r} is not an index") from None
        if not 0 <= index < available:
            raise InputError(f"{path}:{number}: index {index} is outside the data set (0 to {available - 1})")
        indices.append(index)
    if not indices:
        raise InputError(f"{path}: no index in this file")
    return indices
