"""What a number type costs: outputs beside those that the same model gives in float32.

    items ─> block 1 ─> block 2 ─> ... ─> head ─> outputs in float32 ─┐
    items ─> the run, or the same blocks in another type ─> outputs ──┴─> Agreement

The model is computed a block at a time, each loaded when the one before is gone, so a machine that holds a
part of it can do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from pipeedge.base.payload import Payload
from pipeedge.base.schedule import LayerRange
from pipeedge.base.wording import count, figure
from pipeedge.data import InputSource
from pipeedge.models import Model

__all__ = ["Agreement", "Outputs", "agreement", "outputs_by_block"]

SAME_DIRECTION = 0.99
"""The cosine from which on two vectors of a model without classes count as the same answer."""
_LAYERS_AT_ONCE = 4


@dataclass(frozen=True)
class Outputs:
    """Rows of outputs, and which items they are of."""

    numbers: tuple[int, ...]
    """The place of each item in the input."""
    values: torch.Tensor
    """float32 [items, outputs]"""


@dataclass(frozen=True)
class Agreement:
    """How outputs compare with those in float32."""

    items: int
    same: int
    """Items with the same class or, for a model without classes, the same direction."""
    cosine_mean: float
    """Of the outputs of an item, both ways."""
    cosine_min: float
    largest_deviation: float
    """Of any value of any output."""

    @property
    def part(self) -> float:
        """Of the items that are the same, from 0 to 1."""
        return self.same / self.items if self.items else 0.0

    def to_body(self) -> dict[str, Any]:
        """As a report has it."""
        return {**asdict(self), "agreement": self.part}

    def __str__(self) -> str:
        return (
            f"{self.part:.4f} of {count(self.items, 'item')} as in float32, largest deviation "
            f"{figure(self.largest_deviation, 3)}, cosine {self.cosine_mean:.5f} in the mean and "
            f"{self.cosine_min:.5f} at least"
        )


def agreement(found: Outputs, exact: Outputs, *, classes: bool) -> Agreement:
    """Compare the items that are in both.

    Args:
        found: of the run.
        exact: in float32.
        classes: whether the outputs are logits.
    """
    rows = {number: row for row, number in enumerate(found.numbers)}
    common = [(rows[number], row) for row, number in enumerate(exact.numbers) if number in rows]
    if not common:
        return Agreement(0, 0, 0.0, 0.0, 0.0)
    ours, theirs = (found.values[[a for a, _ in common]], exact.values[[b for _, b in common]])
    # A vector of zeros has no direction; two of them are the same.
    cosine = F.cosine_similarity(ours.double(), theirs.double(), dim=1)
    cosine = torch.where((ours == theirs).all(dim=1), 1.0, cosine)
    same = ours.argmax(1) == theirs.argmax(1) if classes else cosine >= SAME_DIRECTION
    return Agreement(
        items=len(common),
        same=int(same.sum()),
        cosine_mean=float(cosine.mean()),
        cosine_min=float(cosine.min()),
        largest_deviation=float((ours - theirs).abs().max()),
    )


def outputs_by_block(
    model: Model,
    source: InputSource,
    ubatch_size: int,
    *,
    weights: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[float], object] = lambda _part: None,
) -> Outputs:
    """The outputs of all items of ``source``, computed a block at a time.

    Args:
        model: the whole of it.
        source: the items; between two blocks the hidden states of all of them are held.
        ubatch_size: items that are computed together.
        weights: of the model; None: where they are by default.
        device: where to compute.
        dtype: of weights and computation.
        progress: called with the part, of 1, that is done.

    Raises:
        PipeEdgeError: an input that cannot be read, weights that are not there or of another type.
    """
    numbers: list[int] = []
    payloads: list[Payload] = []
    for batch in source.microbatches(ubatch_size):
        numbers += batch.numbers
        payloads.append(batch.payload)
    for start in range(0, model.n_layers, _LAYERS_AT_ONCE):
        layers = LayerRange(start, min(start + _LAYERS_AT_ONCE, model.n_layers))
        shard = model.load(layers, weights, device, dtype)
        with torch.inference_mode():
            for index, payload in enumerate(payloads):
                moved = tuple(tensor.to(device) for tensor in payload)
                payloads[index] = tuple(tensor.to("cpu") for tensor in shard(moved))
        del shard  # before the next one comes
        progress(layers.stop / model.n_layers)
    return Outputs(tuple(numbers), _joined(payloads))


def _joined(payloads: Sequence[Payload]) -> torch.Tensor:
    return torch.cat([payload[0] for payload in payloads])
