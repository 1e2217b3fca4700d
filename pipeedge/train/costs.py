"""Measure the cost of one microbatch in each layer, forward and backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pipeedge.base.payload import specs_bytes
from pipeedge.base.schedule import LayerRange
from pipeedge.train.batchlinear import BatchLinear
from pipeedge.train.networks import Network, StageModule

__all__ = ["LayerCosts", "measure_costs"]

_WARM_UP = 1
_MEASURED = 3


@dataclass(frozen=True)
class LayerCosts:
    """Costs of one microbatch in each layer of a network."""

    seconds: Sequence[float]
    """Seconds of the forward and backward pass."""
    parameter_bytes: Sequence[int]
    """Bytes of the parameters."""
    activation_bytes: Sequence[int]
    """Bytes kept from the forward to the backward pass."""
    crossing_bytes: Sequence[int]
    """Bytes of the layer's output."""


def measure_costs(
    network: Network,
    microbatch_size: int,
    microbatches: int,
    clock: Callable[[], float] = time.perf_counter,
) -> LayerCosts:
    """Run and measure every layer by itself, with the threads of this process.

    Args:
        network: The network to measure.
        microbatch_size: Number of items in a microbatch.
        microbatches: Number of microbatches in a batch, over which work done once per batch is spread.
        clock: Returns the time in seconds.
    """
    seconds, parameters, activations, crossing = [], [], [], []
    for layer in range(network.n_layers):
        stage = network.build(LayerRange(layer, layer + 1))
        wide = [part for part in stage.modules() if isinstance(part, BatchLinear)]
        for part in wide:
            part.expect(microbatches)
        given = tuple(
            torch.zeros(spec.shape, dtype=spec.dtype).normal_().requires_grad_(layer > 0)
            for spec in network.crossing(layer, microbatch_size)
        )
        kept = _kept_bytes(stage, given)
        times = [_seconds(stage, given, clock) for _ in range(_WARM_UP + _MEASURED)]
        began = clock()
        for part in wide:
            part.finish()
        seconds.append(statistics.median(times[_WARM_UP:]) + (clock() - began) / microbatches)
        parameters.append(sum(p.numel() * p.element_size() for p in stage.parameters()))
        activations.append(kept)
        crossing.append(specs_bytes(network.crossing(layer + 1, microbatch_size)))
    return LayerCosts(seconds, parameters, activations, crossing)


def _seconds(stage: StageModule, given: tuple[torch.Tensor, ...], clock: Callable[[], float]) -> float:
    began = clock()
    outputs = _outputs(stage, given)
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    return clock() - began


def _kept_bytes(stage: StageModule, given: tuple[torch.Tensor, ...]) -> int:
    """Return the bytes that autograd keeps, counting each storage once and no weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a node that keeps its own result would otherwise keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = _outputs(stage, given)
    del outputs
    return sum(kept.values())


def _outputs(stage: StageModule, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the outputs that have a gradient; a pooling right after the input may have none."""
    result = stage(*given)
    return [out for out in (result if isinstance(result, tuple) else (result,)) if out.requires_grad]
