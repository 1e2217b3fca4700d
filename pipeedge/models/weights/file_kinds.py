"""Open files of weights, each with the reader of its kind."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING

from pipeedge.base.errors import WeightsError
from pipeedge.base.program import program_name
from pipeedge.models.weights.files import StreamedFile, TensorEntry, WeightsFile, check_regular
from pipeedge.models.weights.gguf_files import GgufFile
from pipeedge.models.weights.gguf_header import GGUF_SUFFIX, MAGIC
from pipeedge.models.weights.pieces import PartialFile
from pipeedge.models.weights.safetensors_files import (
    INDEX_FILE,
    SINGLE_FILE,
    IndexedDirectory,
    SafetensorsFile,
)

if TYPE_CHECKING:
    from pipeedge.base.archive import NpzArchive

__all__ = ["find_in_directory", "identity_digest", "open_weights"]

_NUMPY_TYPES: Mapping[str, str] = MappingProxyType({"<f8": "float64", "<f4": "float32", "<f2": "float16"})
_NO_PICKLE = (
    "is a PyTorch pickle, which is not read because unpickling can run code; convert it once with "
    "transformers: AutoModel.from_pretrained(DIR).save_pretrained(DIR) writes model.safetensors"
)


class NpzFile(StreamedFile):
    """A ``.npz`` file: a zip of ``.npy`` members, stored or deflated."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        from pipeedge.base.archive import NpzArchive  # imports numpy

        self._partial = PartialFile(path)
        whole = self._partial.is_whole
        self._archive: NpzArchive = NpzArchive(path, WeightsError, None if whole else self._partial.open())
        if not self._archive.members:
            pickled = any(Path(name).name == "data.pkl" for name in self._archive.other_names)
            self._archive.close()
            raise WeightsError(f"{path} {_NO_PICKLE}" if pickled else f"{path} holds no .npy arrays")

    def close(self) -> None:
        self._archive.close()
        self._partial.close()

    @property
    def names(self) -> Collection[str]:
        return self._archive.members.keys()

    def entry(self, name: str) -> TensorEntry:
        header = self._archive.header(name)
        kind = header.dtype.str
        return TensorEntry(header.shape, _NUMPY_TYPES.get(kind), kind, column_major=header.column_major)

    def announce(self, names: Iterable[str]) -> None:
        self._partial.announce(self._archive.extent(name) for name in names)

    def _open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        return self._archive.data(name)

    def identity(self) -> Iterator[bytes]:
        # The table of contents has a checksum of every member, so this covers the whole content at no cost.
        for name, info in sorted(self._archive.members.items()):
            yield f"{name} {info.file_size} {info.CRC}\n".encode(errors="surrogateescape")


def open_weights(path: str | os.PathLike[str]) -> WeightsFile:
    """Open a file of weights of any kind, an index of several, or a directory with either.

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
    check_regular(path)
    if path.suffix == ".json":
        return IndexedDirectory(path)
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise WeightsError(f"{path} {_NO_PICKLE}")
    try:
        pieces = PartialFile(path)
        with pieces.open() as file:
            magic = file.read(4) or b""
        pieces.close()
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
    if magic[:2] == b"PK" or path.suffix == ".npz":
        return NpzFile(path)
    if magic == MAGIC or path.suffix == GGUF_SUFFIX:
        return GgufFile(path)
    return SafetensorsFile(path)


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
