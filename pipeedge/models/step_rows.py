"""The rows of a step as a tensor that travels with it, and the payloads of steps.

Each stage needs to know, beside the hidden states, which rows belong to which sequence and where their pages
are. The data rank says so in one tensor of int32, which every stage passes on:

    sequences first last kind number | position rows pages window-pages | ... | numbers of pages
              6                      |    4 for each sequence                 |  of all sequences

The layers from ``first`` to ``last``, counted from 1, compute the rows: after a loss, others may know them
already. ``kind`` is 1 if some rows read a prompt, and 0 if all continue texts. ``number`` is that of the
step, in two values: its lower 31 bits, and the others. Both have all bits if the step only measures. Numbers
of pages of windows come behind all others.

A stage checks the tensor before native code sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pipeedge.base.errors import PeerFailedError
from pipeedge.base.fields import Count, Positive
from pipeedge.base.schedule import LayerRange
from pipeedge.models.layers.decoder import PAGE, StepRows

__all__ = [
    "StepBounds",
    "computing_layers",
    "kind_of_rows",
    "number_of_step",
    "pack_rows",
    "packed_length",
    "unpack_rows",
]

_HEAD, _COLUMNS = 6, 4
_NUMBER_BITS = 31
_TRIAL = (1 << 2 * _NUMBER_BITS) - 1
_ALL_LAYERS: int = np.iinfo(np.int32).max


@dataclass(frozen=True)
class StepBounds:
    """Bounds of all steps of a run, which every rank knows from the plan."""

    context: Positive
    """Longest sequence in tokens."""
    rows: Positive
    """Most rows of a step."""
    sequences: Positive
    """Most sequences that run at a time."""
    pages: Count
    """Number of pages of the cache of each block that attends to everything."""
    window_pages: Count
    """Number of pages of that of each block with a window."""

    @property
    def longest(self) -> int:
        """Number of int32 values of the longest tensor of rows."""
        sequences = min(self.sequences, self.rows)
        return packed_length(sequences, 2 * sequences * -(-self.context // PAGE))


def packed_length(sequences: int, pages: int) -> int:
    """Return the number of values of a tensor of rows, with the ``pages`` of both kinds of all sequences."""
    return _HEAD + _COLUMNS * sequences + pages


def pack_rows(
    rows: Sequence[StepRows],
    into: torch.Tensor,
    layers: LayerRange | None = None,
    *,
    kind: int = 0,
    number: int | None = 0,
) -> None:
    """Write the rows of the sequences of a step, in order, to an int32 tensor of ``packed_length``.

    Args:
        rows: The rows.
        into: The tensor.
        layers: Layers that compute them; None for all.
        kind: 1 if some of them read a prompt, else 0.
        number: Number of the step; None if it only measures.
    """
    table = [(one.position, one.rows, len(one.pages), len(one.window_pages)) for one in rows]
    high, low = divmod(_TRIAL if number is None else number, 1 << _NUMBER_BITS)
    computing = layers or LayerRange(0, _ALL_LAYERS)
    head = (len(rows), computing.first, computing.last, kind, low, high)
    parts = [np.array(head, np.int32), np.array(table, np.int32).ravel()]
    parts += [one.pages for one in rows]
    parts += [one.window_pages for one in rows]
    np.concatenate(parts, out=into.numpy())


def computing_layers(tensor: torch.Tensor) -> LayerRange:
    """Return the layers that compute the rows of a step that was unpacked before, maybe beyond the model."""
    return LayerRange.inclusive(int(tensor[1]), int(tensor[2]))


def kind_of_rows(tensor: torch.Tensor) -> int:
    """Return 1 if rows of a step that was unpacked before read a prompt, else 0."""
    return int(tensor[3] != 0)


def number_of_step(tensor: torch.Tensor) -> int | None:
    """Return the number of a step that was unpacked before; None if it only measures."""
    number = int(tensor[4]) + (int(tensor[5]) << _NUMBER_BITS)
    return None if number == _TRIAL else number


def unpack_rows(tensor: torch.Tensor, bounds: StepBounds) -> list[StepRows]:
    """Return the rows of the sequences of a step.

    Raises:
        PeerFailedError: The tensor is malformed, or has positions or pages beyond the ``bounds``.
    """
    if tensor.dtype is not torch.int32 or tensor.dim() != 1 or tensor.numel() < _HEAD:
        raise PeerFailedError("a step does not say which rows belong to which sequence")
    values = tensor.contiguous().numpy()
    sequences = int(values[0])
    head = _HEAD + _COLUMNS * sequences
    if not 0 < sequences <= bounds.sequences or head > len(values):
        raise PeerFailedError(f"a step claims {sequences} sequences")
    if not 1 <= values[1] <= values[2]:
        raise PeerFailedError(f"a step is for the layers {values[1]} to {values[2]}")
    if (values[4:_HEAD] < 0).any():
        raise PeerFailedError("a step has an impossible number")
    table = values[_HEAD:head].reshape(sequences, _COLUMNS).astype(np.int64)
    if (table < 0).any() or (table[:, 1] == 0).any() or table[:, 1].sum() > bounds.rows:
        raise PeerFailedError("a step claims an impossible number of rows")
    ends = table[:, 0] + table[:, 1]
    if ends.max() > bounds.context:
        raise PeerFailedError(f"a step claims position {ends.max() - 1} in a context of {bounds.context}")
    if head + table[:, 2:].sum() != len(values):
        raise PeerFailedError("a step has other numbers of pages than it claims")
    split = head + int(table[:, 2].sum())
    for pages, size in ((values[head:split], bounds.pages), (values[split:], bounds.window_pages)):
        if len(pages) and not (pages.min() >= 0 and pages.max() < size):
            raise PeerFailedError(f"a step claims a page beyond the {size} of the cache")
    wanted = -(-ends // PAGE)
    for column, available in ((2, bounds.pages), (3, bounds.window_pages)):
        if available and (table[:, column] < wanted).any():
            raise PeerFailedError("a step has too few pages for its positions")
    found, first, window_first = [], head, split
    for position, rows, full, windowed in table.tolist():
        own, own_window = values[first : first + full], values[window_first : window_first + windowed]
        found.append(StepRows(position, rows, own, own_window))
        first, window_first = first + full, window_first + windowed
    return found
