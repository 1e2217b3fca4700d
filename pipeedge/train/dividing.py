"""How a training is divided among its workers: what they compare, and the plan of worker 0.

facts of all workers ──disagreement?──> costs of layers ──> TrainingPlan ──(announced)──> every worker
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import Raw

from pipeedge.base.fields import decode
from pipeedge.base.machine import available_bytes, resident_bytes
from pipeedge.base.schedule import LayerRange
from pipeedge.observe.timeline import stages_label
from pipeedge.train.costs import measure_costs
from pipeedge.train.networks import Network
from pipeedge.train.orders import Order
from pipeedge.train.partition import check_partition, check_stages, find_partition
from pipeedge.train.preparing import TrainingSetup
from pipeedge.train.request import TrainingRequest

__all__ = ["TrainingPlan", "divide_layers", "find_disagreement", "read_plan", "training_facts", "worker_name"]

_MB = 1 << 20
_START = "batches done"
"""Name of the fact from which batch a worker would continue."""


@dataclass(frozen=True)
class TrainingPlan:
    """The decision of worker 0."""

    layers: tuple[LayerRange, ...]
    """Layers of each stage."""


def read_plan(setup: TrainingSetup, text: Raw) -> TrainingPlan:
    """Parse the plan of worker 0. Raises one of ``fields.MALFORMED`` if it does not fit this training."""
    plan: TrainingPlan = decode(text, TrainingPlan)
    stages, n_layers = setup.order.stages, setup.network.n_layers
    if len(plan.layers) != stages:
        raise ValueError(f"{len(plan.layers)} of {stages} stages")
    if any(part.stop > n_layers for part in plan.layers):
        raise ValueError(f"layers beyond {n_layers}")
    return plan


def training_facts(setup: TrainingSetup) -> dict[str, Any]:
    """Return what this worker was asked to do, for comparison with the others."""
    return {**setup.request.facts(), _START: setup.first_step}


def find_disagreement(facts: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Describe the first option whose value on a worker differs from that of worker 0."""
    wanted = facts[0]
    for rank, said in facts.items():
        for option, value in wanted.items():
            if option != _START and said.get(option) != value:
                return f"rank {rank} was asked for {option} {said.get(option)}, rank 0 for {option} {value}"
        if said.get(_START) != wanted[_START]:
            return (
                f"rank {rank} finds a checkpoint of {said.get(_START)} batches, rank 0 one of "
                f"{wanted[_START]}: all must see the same --checkpoint-dir"
            )
    return None


def divide_layers(request: TrainingRequest, network: Network, order: Order) -> tuple[LayerRange, ...]:
    """Return the layers of each stage, as given or as found by measuring them."""
    given = request.pipeline.partition
    if given is not None:
        return check_partition(given, network.n_layers)
    if order.stages == 1:
        return (LayerRange(0, network.n_layers),)
    check_stages(order.stages, network.n_layers)
    memory_mb = request.pipeline.memory_mb
    allowed = available_bytes() / order.workers if memory_mb is None else memory_mb * _MB
    torch.set_num_threads(request.pipeline.threads)
    return find_partition(
        measure_costs(network, request.microbatch_size, request.microbatches),
        order,
        optimizer=request.optimizer,
        memory_bytes=max(1.0, allowed - resident_bytes()),
    )


def worker_name(order: Order, worker: int, layers: Sequence[LayerRange]) -> str:
    """Describe ``worker`` for messages: ``stages 0 and 2, layers 1-4 9-12``."""
    stages = order.stages_of(worker)
    return f"{stages_label(stages)}, layers {' '.join(str(layers[stage]) for stage in stages)}"
