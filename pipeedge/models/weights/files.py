"""Files of weights, whose tensors are read piece by piece, directly into their destination.

What is copied is not mapped into memory: pages of a mapping count towards the resident memory of the process
in addition to the copy made from them, which on a small board decides whether a model fits. Instead, each
reader provides a stream per tensor, which is copied into the parameter a megabyte at a time. Only a table of
words, of which few rows are ever needed, is mapped instead of copied (``weights.mapping``).

A plan needs headers alone and is to be there at once, so torch and numpy are imported where they are used.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from pipeedge.base.errors import WeightsError

if TYPE_CHECKING:
    import io

    import torch

__all__ = ["FilePlace", "StreamedFile", "TensorEntry", "WeightsFile", "check_regular", "fill_memory"]

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class TensorEntry:
    """Header of one tensor in a file, without its data."""

    shape: tuple[int, ...]
    number_type: str | None
    """Name of its number type in torch, or None for a type that cannot be a weight."""
    dtype_name: str
    """Name of its number type in the file."""
    column_major: bool = False

    @property
    def dtype(self) -> torch.dtype | None:
        """Number type, or None for a type that cannot be a weight."""
        import torch

        found: torch.dtype | None = None if self.number_type is None else getattr(torch, self.number_type)
        return found


@dataclass(frozen=True)
class FilePlace:
    """Bytes of a file that are the values of a tensor, in order and in its number type."""

    path: Path
    start: int
    """Number of the first byte."""
    stop: int
    """Number behind that of the last byte."""


class WeightsFile(ABC):
    """Named tensors in one file or in several that belong together; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source: str | None = None
        """Fingerprint of the weights that these were converted from, or None if they are the original."""

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close open files; most readers keep none open."""
        return

    @property
    @abstractmethod
    def names(self) -> Collection[str]:
        """Names of all tensors."""

    @property
    def several_readers(self) -> bool:
        """Whether several threads may, and had better, read at the same time, tensors or parts of one."""
        return False

    @abstractmethod
    def entry(self, name: str) -> TensorEntry:
        """Return the shape and number type of one tensor, from the header alone."""

    @abstractmethod
    def identity(self) -> Iterator[bytes]:
        """Yield bytes that identify the content cheaply, regardless of where the file is."""

    @abstractmethod
    def read_into(
        self, name: str, out: torch.Tensor, progress: Callable[[int], object] = lambda _: None
    ) -> None:
        """Copy a tensor into ``out``, converting its values to the type of ``out``.

        Args:
            name: One of ``names``.
            out: CPU tensor of the entry's shape, with any strides.
            progress: Called with the number of values of each piece that is copied.

        Raises:
            WeightsError: The data ends early or is damaged.
        """

    def read_rows(self, name: str, rows: int) -> Iterator[torch.Tensor]:
        """Yield a tensor in parts of so many rows of its first dimension, in the number type of the file.

        Each part is valid until the next one is asked for.

        Raises:
            WeightsError: The data ends early or is damaged, or its type cannot be a weight.
        """
        import torch

        entry = self.entry(name)
        tensor = torch.empty(entry.shape, dtype=entry.dtype or torch.float32)
        self.read_into(name, tensor)
        yield from (tensor[start : start + rows] for start in range(0, len(tensor), rows))

    def announce(self, names: Iterable[str]) -> None:
        """Say which tensors will be read, in this order, so that they are fetched if they are not here yet.

        Args:
            names: Some of ``names``.
        """
        del names

    def place(self, name: str) -> FilePlace | None:
        """Return where the values of a tensor are, or None if they are compressed or not in order."""
        del name
        return None

    def coding(self, name: str) -> str | None:
        """Return the form of a matrix of codes, one of ``native.weight_codings``, or None for plain numbers.

        ``entry`` says the shape and number type of its values, which ``read_rows`` and ``read_into`` give;
        ``place`` is that of its codes.
        """
        del name
        return None

    def is_wide(self, name: str) -> bool:
        """Return whether a matrix has more than 4 bits in a file that has most of its weights in 4 bits.

        A stage of int4 then has it in int8.
        """
        del name
        return False

    def read_coded(self, name: str, rows: int) -> Iterator[torch.Tensor]:
        """Yield a matrix of codes in parts of about so many rows, uint8 [rows, bytes].

        Each part is valid until the next one is asked for.

        Raises:
            WeightsError: The data ends early or is damaged.
        """
        raise TypeError(f"{name} of {self.path} is no matrix of codes; {rows} rows were asked for")

    def read_within(self, name: str, rows: int, within: range) -> Iterator[torch.Tensor]:
        """Yield some rows of a tensor as ``read_coded`` does, or ``read_rows`` if it has plain numbers.

        A file with ``several_readers`` can do this, in several threads for one tensor.
        """
        raise TypeError(f"{self.path} has one reader; {rows} of rows {within} of {name} were asked for")


class StreamedFile(WeightsFile):
    """A file whose tensors can be read sequentially."""

    @abstractmethod
    def _open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a stream positioned at the tensor's first value."""

    def read_into(
        self, name: str, out: torch.Tensor, progress: Callable[[int], object] = lambda _: None
    ) -> None:
        """Copy a tensor into ``out``, a megabyte at a time."""
        entry = self.entry(name)
        view = out.permute(tuple(reversed(range(out.dim())))) if entry.column_major else out
        while view.dim() > 1 and view.shape[0] == 1:
            view = view[0]  # the first dimension is the one cut into pieces, so this keeps them small
        row = math.prod(view.shape[1:])
        rows_at_once = max(1, _CHUNK_BYTES // (row * self._type_of(name).itemsize))
        start = 0
        for piece in self._pieces(name, tuple(view.shape), rows_at_once):
            view[start : start + len(piece)].copy_(piece)
            start += len(piece)
            progress(piece.numel())

    def read_rows(self, name: str, rows: int) -> Iterator[torch.Tensor]:
        """Yield a tensor in parts of so many rows, which share one buffer."""
        entry = self.entry(name)
        if entry.column_major:
            return super().read_rows(name, rows)
        return self._pieces(name, entry.shape, rows)

    def _type_of(self, name: str) -> torch.dtype:
        entry = self.entry(name)
        if entry.dtype is None:
            raise WeightsError(f"{self.path}: {name} is of type {entry.dtype_name}; floating point is needed")
        return entry.dtype

    def _pieces(
        self, name: str, shape: tuple[int, ...], rows: int, dtype: torch.dtype | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield the data of a tensor in order, as parts of so many rows of ``shape``, in one buffer."""
        import torch

        dtype = self._type_of(name) if dtype is None else dtype
        row = math.prod(shape[1:])
        data = bytearray(min(rows, shape[0]) * row * dtype.itemsize)
        with self._open(name) as stream, memoryview(data) as memory:
            for start in range(0, shape[0], rows):
                values = min(rows, shape[0] - start) * row
                if not fill_memory(stream, memory[: values * dtype.itemsize]):
                    whole = list(self.entry(name).shape)
                    raise WeightsError(
                        f"{self.path} is truncated: the data of {name}, shape {whole}, ends early; fetch the "
                        "file again"
                    )
                if values:
                    yield torch.frombuffer(data, dtype=dtype, count=values).view(-1, *shape[1:])


def fill_memory(stream: IO[bytes], memory: memoryview) -> bool:
    """Fill ``memory`` from a stream; return whether it had enough."""
    read = 0
    while read < len(memory):
        part = cast("io.BufferedIOBase", stream).readinto(memory[read:])
        if not part:
            return False
        read += part
    return True


def check_regular(path: Path) -> None:
    """Refuse anything but regular files: opening a pipe would block until somebody writes to it."""
    if not path.is_file():
        raise WeightsError(
            f"{path} is not a regular file; weights are read from .npz, .safetensors and .gguf files"
        )
