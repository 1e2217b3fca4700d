"""Weights in GGUF files, as llama.cpp has them, with the values that Hugging Face's files have.

Names are those of the file, for which the families of decoders have a table. Two things differ from Hugging
Face's values, and are undone while rows are read: queries and keys of some architectures have their rows in
another order, because llama.cpp rotates neighbours; norms of Gemma are stored plus 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pipeedge.base.errors import WeightsError
from pipeedge.models.weights.files import FilePlace, TensorEntry, WeightsFile, fill_memory
from pipeedge.models.weights.gguf_header import GgufHeader, StoredTensor, read_gguf_header

if TYPE_CHECKING:
    import torch

__all__ = ["GgufFile", "READABLE_FORMS"]

_PLAIN: Mapping[str, str] = MappingProxyType({"F32": "float32", "F16": "float16", "BF16": "bfloat16"})
_CODED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "BF16": "bfloat16",
        **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), "int4"),
        **dict.fromkeys(("Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K"), "int8"),
    }
)
"""Number types of forms; all others are computed in float32."""
_NARROW = "int4"
READABLE_FORMS = (*_PLAIN, *_CODED)
"""Forms whose values can be read."""
_INTERLEAVED = ("llama", "granite", "smollm3")
"""Architectures that rotate neighbours."""
_PLUS_ONE = ("gemma", "gemma2", "gemma3")
"""Architectures whose norms are stored plus 1."""
_QUERIES, _KEYS = re.compile(r"\.attn_q\.(weight|bias)$"), re.compile(r"\.attn_k\.(weight|bias)$")
_NORM = re.compile(r"norm\.weight$")
_BLOCKS = "blk."
_SAMPLE_BYTES = 256


class GgufFile(WeightsFile):
    """A GGUF file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.header: GgufHeader = read_gguf_header(path)
        self._architecture = self.header.settings.get("general.architecture")

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self.header.tensors.keys()

    def entry(self, name: str) -> TensorEntry:
        """Return the shape of one tensor, and the number type that its values have when they are read."""
        tensor = self.header.tensors[name]
        form = tensor.form.name
        number_type = "float32" if self.coding(name) else _PLAIN.get(form)
        return TensorEntry(tensor.shape, number_type, form)

    @property
    def several_readers(self) -> bool:
        """Whether several threads may read it. To convert numbers, each would have torch start others."""
        return self.stored_dtype != "float32"

    @cached_property
    def stored_dtype(self) -> str:
        """Number type for most of the weights of blocks: with the least loss, then with the fewest bits."""
        counts: dict[str, int] = {}
        for name, tensor in self.header.tensors.items():
            if not name.startswith(_BLOCKS):
                continue
            dtype = self._dtype_of(name)
            counts[dtype] = counts.get(dtype, 0) + math.prod(tensor.shape)
        return max(counts, key=counts.__getitem__, default="float32")

    def is_wide(self, name: str) -> bool:
        """Return whether a matrix has more than 4 bits in a file that has most of its weights in 4 bits."""
        return self.stored_dtype == _NARROW and self._dtype_of(name) != _NARROW

    def coding(self, name: str) -> str | None:
        """Return the form of a tensor's codes, or None if it has plain numbers."""
        tensor = self.header.tensors[name]
        return tensor.form.name if tensor.form.name in _CODED and len(tensor.shape) == 2 else None

    def identity(self) -> Iterator[bytes]:
        """Yield bytes that identify the content cheaply: the header, and two samples of each tensor."""
        yield self.header.raw
        try:
            with self.path.open("rb", buffering=0) as file:
                for tensor in sorted(self.header.tensors.values(), key=lambda each: each.start):
                    for offset in (tensor.start, (tensor.start + tensor.stop) // 2):
                        file.seek(offset)
                        yield file.read(min(_SAMPLE_BYTES, tensor.stop - offset)) or b""
        except OSError as error:
            raise WeightsError(f"{self.path} cannot be read: {error.strerror}") from error

    def place(self, name: str) -> FilePlace | None:
        """Return where the values or codes of a tensor are, or None if reading changes them."""
        if self._head_rows(name) or self._has_plus_one(name):
            return None
        tensor = self.header.tensors[name]
        return FilePlace(self.path, tensor.start, tensor.stop)

    def read_into(
        self, name: str, out: torch.Tensor, progress: Callable[[int], object] = lambda _: None
    ) -> None:
        """Copy a tensor into ``out``, a few rows at a time."""
        start = 0
        for part in self.read_rows(name, max(1, (1 << 18) // math.prod(out.shape[1:]))):
            out[start : start + len(part)].copy_(part)
            start += len(part)
            progress(part.numel())

    def read_rows(self, name: str, rows: int) -> Iterator[torch.Tensor]:
        """Yield a tensor in parts of about so many rows; codes become float32."""
        return self._values(name, rows, self._all_rows(name))

    def read_coded(self, name: str, rows: int) -> Iterator[torch.Tensor]:
        """Yield a matrix of codes in parts of about so many rows, uint8 [rows, bytes]."""
        return self._raw(name, rows, self._all_rows(name))

    def read_within(self, name: str, rows: int, within: range) -> Iterator[torch.Tensor]:
        """Yield some rows of a tensor, codes or numbers."""
        return (self._values if self.coding(name) is None else self._raw)(name, rows, within)

    def _all_rows(self, name: str) -> range:
        return range(self.header.tensors[name].shape[0])

    def _values(self, name: str, rows: int, within: range) -> Iterator[torch.Tensor]:
        import torch

        from pipeedge import _native as native

        coding, tensor = self.coding(name), self.header.tensors[name]
        dtype = self.entry(name).dtype
        if dtype is None:
            raise WeightsError(
                f"{self.path}: {name} is of type {tensor.form.name}, which is not read; "
                f"{', '.join(READABLE_FORMS)} are"
            )
        for part in self._raw(name, rows, within):
            if coding is not None:
                yield torch.from_numpy(native.decode_rows(coding, part.numpy(), tensor.shape[-1])).view(
                    -1, *tensor.shape[1:]
                )
            else:
                values = part.view(dtype).view(-1, *tensor.shape[1:])
                yield values - 1 if self._has_plus_one(name) else values

    def _raw(self, name: str, rows: int, within: range) -> Iterator[torch.Tensor]:
        """Yield the bytes of some rows of the first dimension, in Hugging Face's order, in one buffer."""
        import numpy as np
        import torch

        tensor = self.header.tensors[name]
        head = self._head_rows(name)
        rows = max(1, rows // max(head, 1)) * max(head, 1)
        width = _first_row_bytes(tensor)
        data = bytearray(min(rows, len(within)) * width)
        try:
            with self.path.open("rb", buffering=0) as file, memoryview(data) as memory:
                file.seek(tensor.start + within.start * width)
                for start in range(within.start, within.stop, rows):
                    size = min(rows, within.stop - start) * width
                    if not fill_memory(file, memory[:size]):
                        raise WeightsError(
                            f"{self.path} is truncated: the data of {name}, shape {list(tensor.shape)}, ends "
                            "early; fetch the file again"
                        )
                    part = np.frombuffer(data, np.uint8, size).reshape(-1, width)
                    if head:
                        # By numpy: a copy by torch leaves threads that keep a core busy for a while.
                        part = part.reshape(-1, head // 2, 2, width).swapaxes(1, 2).reshape(-1, width)
                    yield torch.from_numpy(part)
        except OSError as error:
            raise WeightsError(f"{self.path} cannot be read: {error.strerror}") from error

    def _dtype_of(self, name: str) -> str:
        """Return the number type that keeps the weights of a tensor best, with the fewest bits."""
        return _DTYPES.get(self.header.tensors[name].form.name, "float32")

    def _head_rows(self, name: str) -> int:
        """Return the number of rows of a head if those of a tensor are in another order, or 0."""
        if self._architecture not in _INTERLEAVED:
            return 0
        settings, key = self.header.settings, f"{self._architecture}.attention.head_count"
        heads: object = 0
        if _QUERIES.search(name):
            heads = settings.get(key)
        elif _KEYS.search(name):
            heads = settings.get(f"{key}_kv", settings.get(key))
        if not isinstance(heads, int) or heads < 1:
            return 0
        rows = self.header.tensors[name].shape[0]
        return rows // heads if rows % (2 * heads) == 0 else 0

    def _has_plus_one(self, name: str) -> bool:
        return self._architecture in _PLUS_ONE and _NORM.search(name) is not None


def _first_row_bytes(tensor: StoredTensor) -> int:
    """Return the size of a row of the first dimension in bytes."""
    return (tensor.stop - tensor.start) // tensor.shape[0]
