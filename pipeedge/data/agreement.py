"""Agreement between a run's outputs and the same model's float32 outputs: the cost of a number type.

    items ─> block 1 ─> block 2 ─> ... ─> head ─> outputs in float32 ─┐
    items ─> the run, or the same blocks in another type ─> outputs ──┴─> Agreement

The model is computed one block at a time, and each block is loaded after the previous one is released, so a
machine that cannot hold the whole model can do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from pipeedge.base.payload import Payload
from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.base.wording import count, figure
from pipeedge.compress.link import LinkDecoder, LinkEncoder
from pipeedge.data.source import InputSource, Microbatch
from pipeedge.models import Model
from pipeedge.models.dtypes import dtype_name, find_dtype
from pipeedge.request.scheduling import CompressionRequest

__all__ = [
    "Agreement",
    "Outputs",
    "agreement",
    "joined",
    "outputs_by_block",
    "outputs_of_schedule",
]

SAME_DIRECTION = 0.99
"""Least cosine at which two vectors of a model without classes count as the same answer."""
SAME_NUMBER = 0.02
"""Largest difference at which two numbers of a regression count as the same answer, as a fraction of the
largest of all answers.
"""
_LAYERS_AT_ONCE = 4


@dataclass(frozen=True)
class Outputs:
    """Rows of outputs, and the items that they belong to."""

    numbers: tuple[int, ...]
    """Position of each item in the input."""
    values: torch.Tensor
    """Outputs, float32 [items, outputs] or [items, tokens, outputs]."""


@dataclass(frozen=True)
class Agreement:
    """Comparison of outputs with those in float32."""

    items: int
    same: int
    """Number of items with the same class, of every token if each has one, or, for a model without classes,
    the same direction; of a regression, nearly the same number.
    """
    cosine_mean: float
    """Mean cosine between an item's outputs and those in float32."""
    cosine_min: float
    largest_deviation: float
    """Largest absolute difference of any value of any output."""
    unit: str = "item"
    """What is compared: ``item``, or ``token`` of answers, whose class is the most probable one."""

    @property
    def part(self) -> float:
        """Fraction of the items that are the same, from 0 to 1."""
        return self.same / self.items if self.items else 0.0

    def to_body(self) -> dict[str, Any]:
        """Return the comparison as plain data for a report."""
        return {**asdict(self), "agreement": self.part}

    def __str__(self) -> str:
        return (
            f"{self.part:.4f} of {count(self.items, self.unit)} as in float32, largest deviation "
            f"{figure(self.largest_deviation, 3)}, cosine {self.cosine_mean:.5f} on average and "
            f"{self.cosine_min:.5f} at least"
        )


def agreement(found: Outputs, exact: Outputs, *, classes: bool) -> Agreement:
    """Compare the items that are in both.

    Args:
        found: Outputs of the run.
        exact: Outputs in float32.
        classes: Whether the outputs are logits, or the numbers of a regression.
    """
    rows = {number: row for row, number in enumerate(found.numbers)}
    common = [(rows[number], row) for row, number in enumerate(exact.numbers) if number in rows]
    if not common:
        return Agreement(0, 0, 0.0, 0.0, 0.0)
    ours, theirs = (found.values[[a for a, _ in common]], exact.values[[b for _, b in common]])
    # A vector of zeros has no direction; two of them count as equal.
    ours, theirs = (_padded(values, max(ours.shape[1:-1], theirs.shape[1:-1])) for values in (ours, theirs))
    cosine = F.cosine_similarity(ours.flatten(1).double(), theirs.flatten(1).double(), dim=1)
    cosine = torch.where((ours == theirs).flatten(1).all(dim=1), 1.0, cosine)
    if not classes:
        same = cosine >= SAME_DIRECTION
    elif theirs.shape[-1] == 1:
        alike = (ours - theirs).abs() <= SAME_NUMBER * theirs.abs().max()
        same = alike.flatten(1).all(dim=1)
    else:
        same = (ours.argmax(-1) == theirs.argmax(-1)).reshape(len(ours), -1).all(dim=1)
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
    """Return the outputs of all items of ``source``, computed one block at a time in one number type.

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
    whole = StagePlan(LayerRange(0, model.n_layers), 0, dtype=dtype_name(dtype))
    return outputs_of_schedule(
        model, source, microbatch_size, Schedule((whole,)), weights=weights, device=device, progress=progress
    )


def outputs_of_schedule(
    model: Model,
    source: InputSource,
    microbatch_size: int,
    schedule: Schedule,
    *,
    weights: Path | None,
    device: torch.device,
    compression: CompressionRequest | None = None,
    progress: Callable[[float], object] = lambda _part: None,
) -> Outputs:
    """Return the outputs of all items of ``source``, with the number types and bits of a schedule.

    Its stages are computed here one after the other, one block at a time.

    Args:
        model: The whole model.
        source: The items. Between two blocks, the hidden states of all of them are in memory.
        microbatch_size: Number of items computed together.
        schedule: Layers and number types of the stages, and the bits of the links between them.
        weights: Weights of the model, or None for the default ones.
        device: Device to compute on.
        compression: How links compress values; None for the defaults.
        progress: Called with the fraction that is done, from 0 to 1.

    Raises:
        PipeEdgeError: The input cannot be read, or the weights are missing or of another type.
    """
    numbers: list[int] = []
    batches: list[Microbatch] = []
    payloads: list[Payload] = []
    for batch in source.microbatches(microbatch_size):
        numbers += batch.numbers
        batches.append(replace(batch, payload=()))
        payloads.append(batch.payload)
    for stage in schedule.stages:
        for start in range(stage.layers.start, stage.layers.stop, _LAYERS_AT_ONCE):
            layers = LayerRange(start, min(start + _LAYERS_AT_ONCE, stage.layers.stop))
            shard = model.load(layers, weights, device, find_dtype(stage.dtype))
            with torch.inference_mode():
                for index, payload in enumerate(payloads):
                    moved = tuple(tensor.to(device) for tensor in payload)
                    payloads[index] = tuple(tensor.to("cpu") for tensor in shard(moved))
            del shard  # released before the next one is loaded
            progress(layers.stop / model.n_layers)
        if stage.quant_bits:
            payloads = _through_link(payloads, stage.quant_bits, compression or CompressionRequest())
    outputs = [batch.without_padding(found) for (found,), batch in zip(payloads, batches, strict=True)]
    return Outputs(tuple(numbers), joined(outputs))


def _through_link(payloads: Sequence[Payload], bits: int, compression: CompressionRequest) -> list[Payload]:
    """Return payloads as received over a link with ``bits`` bits a value."""
    encoder = LinkEncoder(
        compression.clamp, window=compression.window_size, transform=compression.link_transform
    )
    decoder = LinkDecoder()
    return [decoder.decode(encoder.encode(payload, bits)) for payload in payloads]


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the outputs of several microbatches as one tensor, with zeros where others have more tokens."""
    longest = max(part.shape[1:-1] for part in parts)
    return torch.cat([_padded(part, longest) for part in parts])


def _padded(outputs: torch.Tensor, tokens: tuple[int, ...]) -> torch.Tensor:
    """Return outputs [items, tokens, ...] with zeros up to ``tokens``; others as they are."""
    return F.pad(outputs, (0, 0, 0, tokens[0] - outputs.shape[1])) if tokens else outputs
