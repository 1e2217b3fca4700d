"""The table of words of a text model: its rows are looked up, never multiplied.

They stay in the weights file, which is mapped into memory, where the file allows it. The system reads the
pages of a row when the row is first looked up, and may drop them again, because they are those of the file. A
table of 250,000 rows is most of the weights of a multilingual model; a sentence needs a few dozen of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["WORD_TABLE", "look_up", "touched_bytes"]

WORD_TABLE = "embeddings.word"
"""Parameter of a shard with a row for each word."""
_PAGE_BYTES = 4096


def look_up(table: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows [N, T, E] of the words ``ids`` [N, T] in ``table`` [vocabulary, E], as ``dtype``.

    A table that is mapped has the number type of its file.
    """
    return F.embedding(ids, table).to(dtype)


def touched_bytes(table: torch.Tensor, rows: int) -> int:
    """Return the bytes of a mapped ``table`` that are in memory after lookups of ``rows`` different rows.

    A row may begin and end within a page, and all of its pages are counted.
    """
    row = table.shape[1] * table.element_size()
    pages = -(-row // _PAGE_BYTES) + 1
    return min(table.numel() * table.element_size(), rows * pages * _PAGE_BYTES)
