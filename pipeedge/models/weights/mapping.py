"""Tensors whose memory is that of a file."""

from __future__ import annotations

import mmap

import torch

from pipeedge.base.errors import WeightsError
from pipeedge.models.weights.files import FilePlace

__all__ = ["map_values"]


def map_values(place: FilePlace, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the values of ``dtype`` at a place in a file, or None if they cannot be mapped.

    Pages are read when they are first touched, without those around them: rows are looked up here and there.
    Writing to the values does not change the file.

    Raises:
        WeightsError: The file cannot be read, or ends early.
    """
    if place.start == place.stop or place.start % dtype.itemsize:
        return None
    page = place.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with place.path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), place.stop - page, access=mmap.ACCESS_COPY, offset=page)
    except OSError as error:
        raise WeightsError(f"{place.path} cannot be read: {error.strerror}") from error
    except ValueError:  # the length is beyond the end of the file
        raise WeightsError(f"{place.path} is truncated: it has become shorter; fetch it again") from None
    if hasattr(mmap, "MADV_RANDOM"):
        memory.madvise(mmap.MADV_RANDOM)
    values = (place.stop - place.start) // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=values, offset=place.start - page)
