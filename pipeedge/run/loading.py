"""Load the layers that a plan gives a rank, alone or beside those that it computes with meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from pipeedge.base.payload import PixelTable
from pipeedge.base.schedule import LayerRange, StagePlan
from pipeedge.models.dtypes import find_dtype, slow_here
from pipeedge.models.kernels import choose
from pipeedge.models.progress import ByteBar
from pipeedge.models.shard import Shard
from pipeedge.plan.planning import Plan
from pipeedge.run.context import PATIENCE_S, RankContext
from pipeedge.run.linked_stage import LoadedStage
from pipeedge.run.stage import Stage

__all__ = ["load_stage"]


def load_stage(
    context: RankContext,
    plan: Plan,
    device: torch.device,
    held: LoadedStage | None = None,
    beside: LoadedStage | None = None,
    pause: Callable[[], object] = lambda: None,
) -> LoadedStage | None:
    """Load the layers that the plan gives this rank; return None if it gives none.

    Args:
        context: This rank.
        plan: The plan.
        device: Device to compute on.
        held: Stage with these layers that is loaded already, or None.
        beside: Stage that computes meanwhile; what both have is not loaded again.
        pause: Called after each step of loading.

    Raises:
        WeightsError: The weights cannot be read, or do not fit the model.
    """
    number = plan.schedule.stage_of(context.rank)
    if number is None:
        return None
    stage = plan.schedule.stages[number]
    table = plan.pixel_table if number == 0 else None
    pixels = None if table is None else PixelTable.from_text(table)
    if held is not None:
        return replace(held, number=number, compute=Stage(held.shard, device, pixels))
    dtype = find_dtype(stage.dtype)
    kernels = choose(context.request.model.kernels, dtype, device)
    slow = slow_here(dtype, device)
    if slow is not None:
        context.warn(f"stage {number} on rank {context.rank}: {slow}")
    shared = beside.shard if beside is not None and beside.plan.dtype == stage.dtype else None
    shard = _load_shard(context, stage, device, kernels, shared, pause)
    return LoadedStage(number, shard.parameter_count, kernels, Stage(shard, device, pixels), stage, shard)


def _load_shard(
    context: RankContext,
    stage: StagePlan,
    device: torch.device,
    kernels: str,
    shared: Shard | None,
    pause: Callable[[], object],
) -> Shard:
    """Load the layers of a stage, and show how far that is; what ``shared`` has is not loaded again."""
    model, layers, dtype = context.model, stage.layers, find_dtype(stage.dtype)
    total = model.weight_bytes(layers, dtype)
    if shared is not None:
        both = range(max(layers.start, shared.layers.start), min(layers.stop, shared.layers.stop))
        total -= model.weight_bytes(LayerRange(both.start, both.stop), dtype) if both else 0
    with (
        context.activity.loading(f"loading {layers.named}", total) as load,
        context.patience(f"loading {layers.named} of {model.name}"),
        ByteBar(f"rank {context.rank}: {layers.named}", total, delay_s=PATIENCE_S) as bar,
    ):

        def advance(size: int) -> None:
            bar.advance(size)
            load.advance(size)
            pause()

        pause()
        return model.load(
            layers,
            context.request.model.weights,
            device,
            dtype,
            progress=advance,
            kernels=kernels,
            beside=shared,
        )
