"""Reading weights: only the requested tensors, piece by piece, directly into their destination.

What is copied is not mapped into memory: pages of a mapping count towards the resident memory of the process
in addition to the copy made from them, which on a small board decides whether a model fits. Instead, each
reader provides a stream per tensor, which is copied into the parameter a megabyte at a time. Only a table of
words, of which few rows are ever needed, is mapped instead of copied (``weights.mapping``).

A plan needs headers alone and is to be there at once, so torch and numpy are imported where they are used.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any

from pipeedge.base.errors import WeightsError
from pipeedge.base.program import program_name
from pipeedge.base.wording import excerpt

if TYPE_CHECKING:
    import torch

    from pipeedge.base.archive import NpzArchive

__all__ = [
    "INDEX_FILE",
    "SINGLE_FILE",
    "SOURCE_KEY",
    "FilePlace",
    "TensorEntry",
    "WeightsFile",
    "indexed_files",
    "open_weights",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""Weights of a Hugging Face directory: a single file, or the index of several."""

_CHUNK_BYTES = 1 << 20
_SAMPLE_BYTES = 256

_SAFETENSORS_TYPES: Mapping[str, str] = MappingProxyType(
    {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8"}
)
_NUMPY_TYPES: Mapping[str, str] = MappingProxyType({"<f8": "float64", "<f4": "float32", "<f2": "float16"})
_SAFETENSORS_WIDTHS: Mapping[str, int] = MappingProxyType(
    {
        "F64": 8,
        "I64": 8,
        "U64": 8,
        "F32": 4,
        "I32": 4,
        "U32": 4,
        "F16": 2,
        "BF16": 2,
        "I16": 2,
        "U16": 2,
        "I8": 1,
        "U8": 1,
        "BOOL": 1,
    }
)
_MAX_HEADER_BYTES = 100 << 20
SOURCE_KEY = "pipeedge_source"
"""Key in the metadata of a ``.safetensors`` file: fingerprint of the weights it was converted from."""
_LONGEST_REASON = 80
_NO_PICKLE = (
    "is a PyTorch pickle, which is not read because unpickling can run code; convert it once with "
    "transformers: AutoModel.from_pretrained(DIR).save_pretrained(DIR) writes model.safetensors"
)


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

    @abstractmethod
    def entry(self, name: str) -> TensorEntry:
        """Return the shape and number type of one tensor, from the header alone."""

    @abstractmethod
    def identity(self) -> Iterator[bytes]:
        """Yield bytes that identify the content cheaply, regardless of where the file is."""

    @abstractmethod
    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copy a tensor into ``out``, converting its values to the type of ``out``.

        Args:
            name: One of ``names``.
            out: CPU tensor of the entry's shape, with any strides.

        Raises:
            WeightsError: The data ends early or is damaged.
        """

    def place(self, name: str) -> FilePlace | None:
        """Return where the values of a tensor are, or None if they are compressed or not in order."""
        del name
        return None


class _StreamedFile(WeightsFile):
    """A file whose tensors can be read sequentially."""

    @abstractmethod
    def _open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a stream positioned at the tensor's first value."""

    def read_into(self, name: str, out: torch.Tensor) -> None:
        import torch

        from pipeedge.base.archive import read_exactly

        entry = self.entry(name)
        if entry.dtype is None:
            raise WeightsError(f"{self.path}: {name} is of type {entry.dtype_name}; floating point is needed")
        view = out.permute(tuple(reversed(range(out.dim())))) if entry.column_major else out
        while view.dim() > 1 and view.shape[0] == 1:
            view = view[0]  # the first dimension is the one cut into pieces, so this keeps them small
        row = math.prod(view.shape[1:])
        rows_at_once = max(1, _CHUNK_BYTES // (row * entry.dtype.itemsize))
        with self._open(name) as stream:
            for start in range(0, view.shape[0], rows_at_once):
                part = view[start : start + rows_at_once]
                data = read_exactly(stream, part.numel() * entry.dtype.itemsize)
                if data is None:
                    raise WeightsError(
                        f"{self.path} is truncated: the data of {name}, shape {list(entry.shape)}, "
                        "ends early; fetch the file again"
                    )
                part.copy_(torch.frombuffer(data, dtype=entry.dtype).view(part.shape))


class _HeaderError(ValueError):
    """A header that is valid JSON with invalid contents."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object for JSON ``pairs``; raise ``_HeaderError`` for a duplicate name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise _HeaderError(f"{twice} is given twice")
    return found


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _HeaderError(f"{value!r} is not a size")
    return value


class SafetensorsFile(_StreamedFile):
    """A ``.safetensors`` file, https://huggingface.co/docs/safetensors: length, JSON header, data."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length_bytes = file.read(8)
                length = struct.unpack("<Q", length_bytes)[0] if len(length_bytes) == 8 else 0
                if not 2 <= length <= _MAX_HEADER_BYTES:
                    raise WeightsError(f"{path} is not a .safetensors file: it has no header")
                if 8 + length > size:
                    raise WeightsError(f"{path} is truncated within its header; fetch the file again")
                raw = file.read(length)
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
        self._header = raw
        self._entries: dict[str, tuple[TensorEntry, int, int]] = {}
        end = 0
        try:
            for name, value in json.loads(raw, object_pairs_hook=_without_duplicates).items():
                if name == "__metadata__":
                    source = value.get(SOURCE_KEY)
                    self.source = None if source is None else str(source)
                    continue
                kind = str(value["dtype"])
                shape = tuple(_whole(side) for side in value["shape"])
                start, stop = (_whole(offset) for offset in value["data_offsets"])
                width = _SAFETENSORS_WIDTHS.get(kind)
                if start > stop or (width and stop - start != width * math.prod(shape)):
                    raise WeightsError(f"{path}: the header's offsets of {name} do not fit its shape")
                entry = TensorEntry(shape, _SAFETENSORS_TYPES.get(kind), kind)
                self._entries[name] = (entry, 8 + length + start, 8 + length + stop)
                end = max(end, 8 + length + stop)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reason = f" ({excerpt(error, _LONGEST_REASON)})" if isinstance(error, _HeaderError) else ""
            raise WeightsError(
                f"{path} is not a .safetensors file: its header cannot be read{reason}"
            ) from error
        self._check_overlap()
        if end > size:
            first = next(name for name, (_, _, stop) in self._entries.items() if stop > size)
            raise WeightsError(
                f"{path} is truncated: {size} bytes of {end}, the first tensor cut off is {first}, "
                f"shape {list(self._entries[first][0].shape)}; fetch the file again"
            )

    def _check_overlap(self) -> None:
        """Check that no two tensors share bytes."""
        places = sorted(
            (start, stop, name) for name, (_, start, stop) in self._entries.items() if start < stop
        )
        for (_, end, one), (start, _, other) in itertools.pairwise(places):
            if start < end:
                raise WeightsError(
                    f"{self.path}: the header gives {excerpt(one)} and {excerpt(other)} the same bytes"
                )

    @property
    def names(self) -> Collection[str]:
        return self._entries.keys()

    def entry(self, name: str) -> TensorEntry:
        return self._entries[name][0]

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self._entries[name][1])
                yield file
        except OSError as error:
            raise WeightsError(f"{self.path} cannot be read: {error.strerror}") from error

    def place(self, name: str) -> FilePlace:
        _, start, stop = self._entries[name]
        return FilePlace(self.path, start, stop)

    def identity(self) -> Iterator[bytes]:
        yield self._header
        try:
            with self.path.open("rb", buffering=0) as file:
                for _, start, stop in sorted(self._entries.values(), key=lambda value: value[1]):
                    for offset in (start, (start + stop) // 2):
                        file.seek(offset)
                        yield file.read(min(_SAMPLE_BYTES, stop - offset)) or b""
        except OSError as error:
            raise WeightsError(f"{self.path} cannot be read: {error.strerror}") from error


class NpzFile(_StreamedFile):
    """A ``.npz`` file: a zip of ``.npy`` members, stored or deflated."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        from pipeedge.base.archive import NpzArchive  # imports numpy

        self._archive: NpzArchive = NpzArchive(path, WeightsError)
        if not self._archive.members:
            pickled = any(Path(name).name == "data.pkl" for name in self._archive.other_names)
            self._archive.close()
            raise WeightsError(f"{path} {_NO_PICKLE}" if pickled else f"{path} holds no .npy arrays")

    def close(self) -> None:
        self._archive.close()

    @property
    def names(self) -> Collection[str]:
        return self._archive.members.keys()

    def entry(self, name: str) -> TensorEntry:
        header = self._archive.header(name)
        kind = header.dtype.str
        return TensorEntry(header.shape, _NUMPY_TYPES.get(kind), kind, column_major=header.column_major)

    def _open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        return self._archive.data(name)

    def identity(self) -> Iterator[bytes]:
        # The table of contents has a checksum of every member, so this covers the whole content at no cost.
        for name, info in sorted(self._archive.members.items()):
            yield f"{name} {info.file_size} {info.CRC}\n".encode(errors="surrogateescape")


class IndexedDirectory(WeightsFile):
    """Several ``.safetensors`` files listed in one ``model.safetensors.index.json``."""

    def __init__(self, index: Path) -> None:
        super().__init__(index)
        try:
            document = json.loads(index.read_bytes())
            self._files = {str(name): str(file) for name, file in document["weight_map"].items()}
        except OSError as error:
            raise WeightsError(f"{index} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsError(f"{index} is not an index of weights: weight_map is missing") from error
        for file in self._files.values():
            if Path(file).name != file:
                raise WeightsError(f"{index} names {excerpt(repr(file))}, which is not in its own directory")
        self._opened: dict[str, SafetensorsFile] = {}

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that the index lists, in their own order."""
        return tuple(sorted(set(self._files.values())))

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def _file(self, name: str) -> SafetensorsFile:
        file = self._files[name]
        if file not in self._opened:
            path = self.path.parent / file
            if not path.exists():
                raise WeightsError(f"{path} is missing; {self.path} lists it as the file with {name}")
            _check_regular(path)
            self._opened[file] = SafetensorsFile(path)
        opened = self._opened[file]
        if name not in opened.names:
            raise WeightsError(f"{opened.path} does not contain {name}, although {self.path.name} lists it")
        return opened

    def entry(self, name: str) -> TensorEntry:
        return self._file(name).entry(name)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        self._file(name).read_into(name, out)

    def place(self, name: str) -> FilePlace:
        return self._file(name).place(name)

    def identity(self) -> Iterator[bytes]:
        for name in sorted({file: name for name, file in sorted(self._files.items())}.values()):
            yield from self._file(name).identity()


def indexed_files(index: Path) -> tuple[str, ...]:
    """Return the names of the files that an index lists, whether they exist or not.

    Raises:
        WeightsError: It cannot be read, or lists files in other directories.
    """
    return IndexedDirectory(index).files


def open_weights(path: str | os.PathLike[str]) -> WeightsFile:
    """Open a ``.npz`` or ``.safetensors`` file, an index, or a directory with one of the latter two.

    Raises:
        WeightsError: The file is missing, damaged, or of a kind that cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        path = find_in_directory(path)
    if not path.exists():
        raise WeightsError(
            f"no weights at {path}; {program_name('save_model_weights.py')} fetches those of the known "
            "models (--random writes random ones), -M names another file"
        )
    _check_regular(path)
    if path.suffix == ".json":
        return IndexedDirectory(path)
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise WeightsError(f"{path} {_NO_PICKLE}")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
    if magic[:2] == b"PK" or path.suffix == ".npz":
        return NpzFile(path)
    return SafetensorsFile(path)


def _check_regular(path: Path) -> None:
    """Refuse anything but regular files: opening a pipe would block until somebody writes to it."""
    if not path.is_file():
        raise WeightsError(f"{path} is not a regular file; weights are read from .npz and .safetensors files")


def find_in_directory(directory: Path) -> Path:
    """Return the weights in a Hugging Face directory: a single file, or the index of several.

    Raises:
        WeightsError: The directory has neither.
    """
    for name in (SINGLE_FILE, INDEX_FILE):
        if (directory / name).exists():
            return directory / name
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        if (directory / name).exists():
            raise WeightsError(f"{directory / name} {_NO_PICKLE}")
    raise WeightsError(f"{directory} has neither model.safetensors nor model.safetensors.index.json")


def identity_digest(parts: Iterator[bytes]) -> str:
    """Return a short hexadecimal digest of ``parts``."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:32]
