"""Weights in ``.safetensors`` files: one, or several with an index."""

from __future__ import annotations

import io
import itertools
import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, cast

from pipeedge.base.errors import WeightsError
from pipeedge.base.wording import excerpt
from pipeedge.models.weights.files import FilePlace, StreamedFile, TensorEntry, WeightsFile, check_regular
from pipeedge.models.weights.pieces import PartialFile, Range

if TYPE_CHECKING:
    import torch

__all__ = [
    "CODED_KEY",
    "INDEX_FILE",
    "SINGLE_FILE",
    "SOURCE_KEY",
    "IndexedDirectory",
    "SafetensorsFile",
    "indexed_files",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""Weights of a Hugging Face directory: a single file, or the index of several."""
SOURCE_KEY = "pipeedge_source"
"""Key in the metadata of a ``.safetensors`` file: fingerprint of the weights it was converted from."""
CODED_KEY = "pipeedge_coded"
"""Key in the metadata: a JSON object with the form and the width of each matrix of codes, by its name."""

_SAMPLE_BYTES = 256
_MAX_HEADER_BYTES = 100 << 20
_LONGEST_REASON = 80
_SAFETENSORS_TYPES: Mapping[str, str] = MappingProxyType(
    {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8"}
)
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


class _HeaderError(ValueError):
    """A header that is valid JSON with invalid contents."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object for JSON ``pairs``; raise ``_HeaderError`` for a duplicate name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise _HeaderError(f"{twice} is given twice")
    return found


def _coded(metadata: Mapping[str, str]) -> dict[str, tuple[object, object]]:
    """Return the form and width of the matrices of codes."""
    text = metadata.get(CODED_KEY)
    found: dict[str, tuple[object, object]] = {} if text is None else json.loads(text)
    return found


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _HeaderError(f"{value!r} is not a size")
    return value


class SafetensorsFile(StreamedFile):
    """A ``.safetensors`` file, https://huggingface.co/docs/safetensors: length, JSON header, data."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._partial = PartialFile(path)
            size = path.stat().st_size
            with io.BufferedReader(self._partial.open()) as file:
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
        self._codings: dict[str, str] = {}
        coded: dict[str, tuple[str, int]] = {}
        end = 0
        try:
            for name, value in json.loads(raw, object_pairs_hook=_without_duplicates).items():
                if name == "__metadata__":
                    source = value.get(SOURCE_KEY)
                    self.source = None if source is None else str(source)
                    coded = {name: (str(one), _whole(width)) for name, (one, width) in _coded(value).items()}
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
        for name, (coding, width) in coded.items():
            self._set_coding(name, coding, width)
        if end > size:
            first = next(name for name, (_, _, stop) in self._entries.items() if stop > size)
            raise WeightsError(
                f"{path} is truncated: {size} bytes of {end}, the first tensor cut off is {first}, "
                f"shape {list(self._entries[first][0].shape)}; fetch the file again"
            )

    def _set_coding(self, name: str, coding: str, width: int) -> None:
        """Note that a tensor of bytes has codes for rows of ``width`` weights."""
        from pipeedge import _native as native

        sizes = {form: (values, size) for form, values, size in native.weight_codings()}
        entry, start, stop = self._entries.get(name, (None, 0, 0))
        values, size = sizes.get(coding, (1, 0))
        row = -(-width // values) * size
        if entry is None or entry.dtype_name != "U8" or len(entry.shape) != 2 or row != entry.shape[1]:
            raise WeightsError(f"{self.path}: {excerpt(name)} is not a matrix of {excerpt(coding)} codes")
        self._entries[name] = (TensorEntry((entry.shape[0], width), "float32", coding), start, stop)
        self._codings[name] = coding

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
        """Names of all tensors."""
        return self._entries.keys()

    def entry(self, name: str) -> TensorEntry:
        """Return the shape and number type of one tensor."""
        return self._entries[name][0]

    def coding(self, name: str) -> str | None:
        """Return the form of a matrix of codes, or None for plain numbers."""
        return self._codings.get(name)

    def read_coded(self, name: str, rows: int) -> Iterator[torch.Tensor]:
        """Yield a matrix of codes in parts of so many rows."""
        import torch

        _, start, stop = self._entries[name]
        count = self.entry(name).shape[0]
        return self._pieces(name, (count, (stop - start) // max(count, 1)), rows, torch.uint8)

    def read_rows(self, name: str, rows: int) -> Iterator[torch.Tensor]:
        """Yield a tensor in parts of so many rows; codes become float32."""
        if name not in self._codings:
            yield from super().read_rows(name, rows)
            return
        import torch

        from pipeedge import _native as native

        width = self.entry(name).shape[1]
        for part in self.read_coded(name, rows):
            yield torch.from_numpy(native.decode_rows(self._codings[name], part.numpy(), width))

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        try:
            with self._partial.open() as file:
                file.seek(self._entries[name][1])
                yield cast("IO[bytes]", file)
        except OSError as error:
            raise WeightsError(f"{self.path} cannot be read: {error.strerror}") from error

    def place(self, name: str) -> FilePlace:
        """Return where the values of a tensor are."""
        _, start, stop = self._entries[name]
        self._partial.wait(start, stop)
        return FilePlace(self.path, start, stop)

    def announce(self, names: Iterable[str]) -> None:
        """Have tensors fetched that are not on this machine yet."""
        self._partial.announce(self._entries[name][1:] for name in names)

    def close(self) -> None:
        """Have nothing more fetched."""
        self._partial.close()

    def samples(self) -> Iterator[Range]:
        """Yield the ranges of the file that ``identity`` reads besides the header."""
        for _, start, stop in sorted(self._entries.values(), key=lambda value: value[1]):
            for offset in (start, (start + stop) // 2):
                yield offset, min(offset + _SAMPLE_BYTES, stop)

    def identity(self) -> Iterator[bytes]:
        """Yield bytes that identify the content cheaply; a file with missing pieces has them all the same."""
        yield self._header
        try:
            with self.path.open("rb", buffering=0) as file:
                for start, stop in self.samples():
                    file.seek(start)
                    yield file.read(stop - start) or b""
        except OSError as error:
            raise WeightsError(f"{self.path} cannot be read: {error.strerror}") from error


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
        """Names of all tensors."""
        return self._files.keys()

    def _file(self, name: str) -> SafetensorsFile:
        file = self._files[name]
        if file not in self._opened:
            path = self.path.parent / file
            if not path.exists():
                raise WeightsError(f"{path} is missing; {self.path} lists it as the file with {name}")
            check_regular(path)
            self._opened[file] = SafetensorsFile(path)
        opened = self._opened[file]
        if name not in opened.names:
            raise WeightsError(f"{opened.path} does not contain {name}, although {self.path.name} lists it")
        return opened

    def entry(self, name: str) -> TensorEntry:
        """Return the shape and number type of one tensor."""
        return self._file(name).entry(name)

    def read_into(
        self, name: str, out: torch.Tensor, progress: Callable[[int], object] = lambda _: None
    ) -> None:
        """Copy a tensor into ``out``."""
        self._file(name).read_into(name, out, progress)

    def read_rows(self, name: str, rows: int) -> Iterator[torch.Tensor]:
        """Yield a tensor in parts of so many rows."""
        return self._file(name).read_rows(name, rows)

    def place(self, name: str) -> FilePlace:
        """Return where the values of a tensor are."""
        return self._file(name).place(name)

    def announce(self, names: Iterable[str]) -> None:
        """Have tensors fetched that are not on this machine yet."""
        by_file: dict[SafetensorsFile, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file(name), []).append(name)
        for file, own in by_file.items():
            file.announce(own)

    def close(self) -> None:
        """Have nothing more fetched."""
        for file in self._opened.values():
            file.close()

    def identity(self) -> Iterator[bytes]:
        """Yield bytes that identify the content cheaply."""
        for name in sorted({file: name for name, file in sorted(self._files.items())}.values()):
            yield from self._file(name).identity()


def indexed_files(index: Path) -> tuple[str, ...]:
    """Return the names of the files that an index lists, whether they exist or not.

    Raises:
        WeightsError: It cannot be read, or lists files in other directories.
    """
    return IndexedDirectory(index).files
