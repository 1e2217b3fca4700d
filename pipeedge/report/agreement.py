"""Agreement between a run's outputs and the same model's float32 outputs: the cost of a number type.

    items ─> block 1 ─> block 2 ─> ... ─> head ─> outputs in float32 ─┐
    items ─> the run, or the same blocks in another type ─> outputs ──┴─> Agreement

The model is computed one block at a time, and each block is loaded after the previous one is released, so a
machine that cannot hold the whole model can do it.
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
"""Least cosine at which two vectors of a model without classes count as the same answer."""
_LAYERS_AT_ONCE = 4


@dataclass(frozen=True)
class Outputs:
    """Rows of outputs, and the items that they belong to."""

    numbers: tuple[int, ...]
    """Position of each item in the input."""
    values: torch.Tensor
    """Outputs, float32 [items, outputs]."""


@dataclass(frozen=True)
class Agreement:
    """Comparison of outputs with those in float32."""

    items: int
    same: int
    """Number of items with the same class or, for a model without classes, the same direction."""
    cosine_mean: float
    """Mean cosine between an item's outputs and those in float32."""
    cosine_min: float
    largest_deviation: float
    """Largest absolute difference of any value of any output."""

    @property
    def part(self) -> float:
        """Fraction of the items that are the same, from 0 to 1."""
        return self.same / self.items if self.items else 0.0

    def to_body(self) -> dict[str, Any]:
        """Return the comparison as plain data for a report."""
        return {**asdict(self), "agreement": self.part}

    def __str__(self) -> str:
        return (
            f"{self.part:.4f} of {count(self.items, 'item')} as in float32, largest deviation "
            f"{figure(self.largest_deviation, 3)}, cosine {self.cosine_mean:.5f} on average and "
            f"{self.cosine_min:.5f} at least"
        )


def agreement(found: Outputs, exact: Outputs, *, classes: bool) -> Agreement:
    """Compare the items that are in both.

    Args:
        found: Outputs of the run.
        exact: Outputs in float32.
        classes: Whether the outputs are logits.
    """
    rows = {number: row for row, number in enumerate(found.numbers)}
    common = [(rows[number], row) for row, number in enumerate(exact.numbers) if number in rows]
    if not common:
        return Agreement(0, 0, 0.0, 0.0, 0.0)
    ours, theirs = (found.values[[a for a, _ in common]], exact.values[[b for _, b in common]])
    # A vector of zeros has no direction; two of them count as equal.
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
    microbatch_size: int,
    *,
    weights: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[float], object] = lambda _part: None,
) -> Outputs:
    """Return the outputs of all items of ``source``, computed one block at a time.

    Args:
        model: The whole model.
        source: The items. Between two blocks, the hidden states of all of them are in memory.
        microbatch_size: Number of items computed together.
        weights: Weights of the model, or None for the default ones.
        device: Device to compute on.
        dtype: Number type of weights and computation.
        progress: Called with the fraction that is done, from 0 to 1.

    Raises:
        PipeEdgeError: The input cannot be read, or the weights are missing or of another type.
    """
    numbers: list[int] = []
    payloads: list[Payload] = []
    for batch in source.microbatches(microbatch_size):
        numbers += batch.numbers
        payloads.append(batch.payload)
    for start in range(0, model.n_layers, _LAYERS_AT_ONCE):
        layers = LayerRange(start, min(start + _LAYERS_AT_ONCE, model.n_layers))
        shard = model.load(layers, weights, device, dtype)
        with torch.inference_mode():
            for index, payload in enumerate(payloads):
                moved = tuple(tensor.to(device) for tensor in payload)
                payloads[index] = tuple(tensor.to("cpu") for tensor in shard(moved))
        del shard  # released before the next one is loaded
        progress(layers.stop / model.n_layers)
    return Outputs(tuple(numbers), _joined(payloads))


def _joined(payloads: Sequence[Payload]) -> torch.Tensor:
    return torch.cat([payload[0] for payload in payloads])
