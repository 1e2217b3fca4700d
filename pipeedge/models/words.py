"""The table of words of a text model: its rows are looked up, never multiplied.

They stay in the weights file, which is mapped into memory, where the file allows it. The system reads the
pages of a row when the row is first looked up, and may drop them again, because they are those of the file. A
table of 250,000 rows is most of the weights of a multilingual model; a sentence needs a few dozen of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pipeedge import _native as native

__all__ = ["WORD_TABLE", "CodedWords", "look_up", "touched_bytes"]

WORD_TABLE = "embeddings.word"
"""Parameter of a shard with a row for each word."""
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class CodedWords:
    """A table whose rows are codes with scales, as in a GGUF file."""

    codes: torch.Tensor
    """Rows, uint8 [vocabulary, bytes]."""
    coding: str
    """Their form, one of ``native.weight_codings``."""
    width: int
    """Number of values of a row, E."""


def look_up(table: torch.Tensor | CodedWords, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows [N, T, E] of the words ``ids`` [N, T] in ``table`` [vocabulary, E], as ``dtype``.

    A table that is mapped has the number type of its file.
    """
    if isinstance(table, CodedWords):
        rows = table.codes[ids.flatten()].numpy()
        values = native.decode_rows(table.coding, rows, table.width)
        return torch.from_numpy(values).view(*ids.shape, table.width).to(dtype)
    return F.embedding(ids, table).to(dtype)


def touched_bytes(table: torch.Tensor, rows: int) -> int:
    """Return the bytes of a mapped ``table`` that are in memory after lookups of ``rows`` different rows.

    A row may begin and end within a page, and all of its pages are counted.
    """
    row = table.shape[1] * table.element_size()
    pages = -(-row // _PAGE_BYTES) + 1
    return min(table.numel() * table.element_size(), rows * pages * _PAGE_BYTES)
