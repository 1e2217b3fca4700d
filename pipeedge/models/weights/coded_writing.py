"""Write the weights of a decoder as codes of 8 or 4 bits, one tensor at a time.

    matrices of blocks    int8 or int4, in rows of groups: scale, zero (int4), codes (``decoder/codings.hpp``)
    the head              int8, also where it is the table of words
    table of words        bfloat16, of which a run looks up rows
    all else              float32

Names are those of GGUF files, under which every family has whole matrices with a row for each output. The
file is a ``.safetensors`` whose metadata say which of its tensors of bytes are codes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from pipeedge import _native as native
from pipeedge.base.errors import WeightsError
from pipeedge.base.shapes import Shape
from pipeedge.models.architecture import LAYERS_PER_BLOCK, Architecture
from pipeedge.models.dtypes import dtype_name
from pipeedge.models.families.catalogue import family_of
from pipeedge.models.families.decoder import DecoderOptions
from pipeedge.models.layers.decoder import part_shapes, read_rows
from pipeedge.models.weights.comparing import Placeholder, check_tensors
from pipeedge.models.weights.files import WeightsFile
from pipeedge.models.weights.locating import Filling, stored_name
from pipeedge.models.weights.safetensors_files import CODED_KEY, SOURCE_KEY
from pipeedge.models.weights.writing import coded_shape, replacing, safetensors_header
from pipeedge.models.words import WORD_TABLE

__all__ = ["HEAD", "write_coded"]

HEAD = "head.scores.weight"
_HEAD_CODING = "int8"


@dataclass(frozen=True)
class _Item:
    """A tensor to write."""

    name: str
    filling: Filling
    shape: Shape
    coding: str | None
    dtype: torch.dtype
    """Number type of plain numbers, or of the bytes of codes."""

    @property
    def stored_shape(self) -> torch.Size:
        """Shape in the file."""
        if self.coding is None:
            return torch.Size(self.shape)
        return coded_shape(self.coding, self.shape)


def write_coded(
    target: Path,
    architecture: Architecture,
    source: WeightsFile,
    dtype: torch.dtype,
    fingerprint: str,
    *,
    progress: Callable[[int], object] = lambda _bytes: None,
) -> None:
    """Write all weights of a decoder in int8 or int4, as a run would round them when it loads ``source``.

    Args:
        target: A ``.safetensors`` file.
        architecture: Architecture of the model.
        source: Weights to read from.
        dtype: Number type to convert to.
        fingerprint: Fingerprint of ``source``, stored in the file.
        progress: Called with the bytes of each part written.

    Raises:
        WeightsError: ``source`` does not fit or is damaged, or ``target`` cannot be written.
    """
    items = list(_items(architecture, source, dtype))
    coded = {item.name: [item.coding, item.shape[1]] for item in items if item.coding is not None}
    metadata = {SOURCE_KEY: fingerprint, CODED_KEY: json.dumps(coded)}
    with replacing(target) as temporary, temporary.open("wb") as file:
        file.write(safetensors_header(((one.name, one.dtype, one.stored_shape) for one in items), metadata))
        for item in items:
            for part in _parts(item, source):
                data = part.contiguous().view(torch.uint8).numpy().data
                file.write(data)
                progress(data.nbytes)


def _items(architecture: Architecture, source: WeightsFile, dtype: torch.dtype) -> Iterator[_Item]:
    shapes: dict[str, Shape] = {
        name: shape
        for name, shape in family_of(architecture).shapes(architecture, 0).items()
        if not name.startswith("block.")
    }
    for layer in range(architecture.n_layers):
        own = part_shapes(architecture, *divmod(layer, LAYERS_PER_BLOCK))
        shapes |= {f"parts.{layer}.{name}": shape for name, shape in own.items()}
    places = {name: cast("torch.Tensor", Placeholder(shape)) for name, shape in shapes.items()}
    for filling in check_tensors(places, architecture, source):
        name, shape = filling.parameter, shapes[filling.parameter]
        if any(source.coding(one.name) for one in filling.sources):
            raise WeightsError(f"{source.path} has codes already; convert the weights they were made from")
        stored = stored_name(name, architecture)
        if name == WORD_TABLE:
            yield _Item(stored, filling, shape, None, torch.bfloat16)
            if architecture.own(DecoderOptions).tied:
                yield _Item(stored_name(HEAD, architecture), filling, shape, _HEAD_CODING, torch.uint8)
        elif name == HEAD:
            yield _Item(stored, filling, shape, _HEAD_CODING, torch.uint8)
        elif name.startswith("parts.") and len(shape) == 2:
            yield _Item(stored, filling, shape, dtype_name(dtype), torch.uint8)
        else:
            yield _Item(stored, filling, shape, None, torch.float32)


def _parts(item: _Item, source: WeightsFile) -> Iterator[torch.Tensor]:
    """Yield the rows of a tensor as they are stored."""
    threads = torch.get_num_threads()
    for part in read_rows(item.filling, item.shape, source):
        if item.coding is None:
            yield part.values.to(item.dtype)
        else:
            rows = part.array.reshape(-1, math.prod(item.shape[1:]))
            yield torch.from_numpy(native.encode_rows(item.coding, rows, threads=threads))
