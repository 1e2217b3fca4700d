"""Load the layers that a plan gives a rank, alone or beside those that it computes with meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from pipeedge.base.payload import PixelTable
from pipeedge.base.schedule import LayerRange, StagePlan
from pipeedge.models import Model
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.decoder_ends import DecoderEnds, head_dtype
from pipeedge.models.dtypes import find_dtype, grouped_bytes, slow_here
from pipeedge.models.kernels import choose
from pipeedge.models.layers.decoder import DecoderStage
from pipeedge.models.layers.kept_outputs import KeptOutputs
from pipeedge.models.progress import ByteBar
from pipeedge.models.shard import Shard
from pipeedge.models.step_rows import StepBounds
from pipeedge.plan.cache_owners import KeptOutput, Standby
from pipeedge.plan.planning import Plan
from pipeedge.run.context import PATIENCE_S, RankContext
from pipeedge.run.linked_stage import LoadedStage
from pipeedge.run.stage import Stage, StepStage
from pipeedge.transport.base import Packet

if TYPE_CHECKING:  # only the data rank needs it
    from pipeedge.data import DataEnds

__all__ = ["begin_text", "load_ends", "load_stage", "load_standby"]


def load_stage(
    context: RankContext,
    plan: Plan,
    device: torch.device,
    held: LoadedStage | None = None,
    beside: LoadedStage | None = None,
    pause: Callable[[], object] = lambda: None,
    adopts: Iterable[tuple[LoadedStage, Collection[int]]] = (),
    outputs: Mapping[KeptOutput, KeptOutputs] = MappingProxyType({}),
) -> LoadedStage | None:
    """Load the layers that the plan gives this rank; return None if it gives none.

    Args:
        context: This rank.
        plan: The plan.
        device: Device to compute on.
        held: Stage with these layers that is loaded already, or None.
        beside: Stage that computes meanwhile; what both have is not loaded again.
        pause: Called after each step of loading.
        adopts: Stages of a decoder, and which of their layers are used, with their caches.
        outputs: What this rank has kept of its outputs.

    Raises:
        WeightsError: The weights cannot be read, or do not fit the model.
    """
    number = plan.schedule.stage_of(context.rank)
    if number is None:
        return None
    stage = plan.schedule.stages[number]
    if held is not None:
        parameters, kernels, shard = held.parameters, held.kernels, held.shard
    elif isinstance(context.model, DecoderModel):
        _warn_if_slow(context, number, stage, device)
        shard = _load_decoder_stage(
            context,
            context.model,
            stage,
            plan.step_bounds,
            ((one.shard, layers) for one, layers in adopts if isinstance(one.shard, DecoderStage)),
            pause,
        )
        parameters, kernels = context.model.parameter_count(stage.layers), "native"
    else:
        _warn_if_slow(context, number, stage, device)
        kernels = choose(context.request.model.kernels, find_dtype(stage.dtype), device)
        same = beside is not None and beside.plan.dtype == stage.dtype
        shared = beside.shard if same and beside is not None and isinstance(beside.shard, Shard) else None
        shard = _load_shard(context, context.model, stage, device, kernels, shared, pause)
        parameters = shard.parameter_count
    kept = _keep_outputs(plan, context.rank, shard, outputs)
    compute = _computing(plan, number, shard, device, kept)
    since = dict(enumerate(plan.since))
    return LoadedStage(number, parameters, kernels, compute, stage, shard, since, kept)


def _warn_if_slow(context: RankContext, number: int, stage: StagePlan, device: torch.device) -> None:
    slow = slow_here(find_dtype(stage.dtype), device)
    if slow is not None:
        context.warn(f"stage {number} on rank {context.rank}: {slow}")


def _keep_outputs(
    plan: Plan, rank: int, shard: Shard | DecoderStage, known: Mapping[KeptOutput, KeptOutputs]
) -> Mapping[KeptOutput, KeptOutputs]:
    """Return what a rank keeps of its outputs, with what is known of that."""
    if not isinstance(shard, DecoderStage):
        return {}
    wanted = [one for one in plan.outputs if one.rank == rank]
    return {one: known.get(one) or shard.outputs_after(one.cut) for one in wanted}


def load_standby(
    context: RankContext,
    plan: Plan,
    standby: Standby,
    device: torch.device,
    pause: Callable[[], object],
) -> LoadedStage:
    """Load layers of another rank that this one stands by for, with room for their cache.

    Args:
        context: This rank.
        plan: The plan.
        standby: What this rank stands by for.
        device: Device to compute on.
        pause: Called after each step of loading.

    Raises:
        WeightsError: The weights cannot be read, or do not fit the model.
    """
    model = context.model
    if not isinstance(model, DecoderModel):
        raise TypeError(f"{model.name} is not a decoder")
    number = plan.copied(standby)
    stage = StagePlan(standby.layers, standby.rank, dtype=standby.dtype)
    shard = _load_decoder_stage(context, model, stage, plan.step_bounds, (), pause)
    parameters = model.parameter_count(stage.layers)
    compute = _computing(plan, number, shard, device, {})
    return LoadedStage(number, parameters, "native", compute, stage, shard)


def _computing(
    plan: Plan,
    number: int,
    shard: Shard | DecoderStage,
    device: torch.device,
    outputs: Mapping[KeptOutput, KeptOutputs],
) -> Callable[[Packet], Packet]:
    """Return what computes the layers of stage ``number``, which are loaded."""
    if isinstance(shard, DecoderStage):
        stages = plan.schedule.stages
        source = stages[number - 1].rank if number else plan.data_rank
        kept = {one.cut: values for one, values in outputs.items()}
        return StepStage(shard, plan.step_bounds, source, is_last=number == len(stages) - 1, outputs=kept)
    table = plan.pixel_table if number == 0 else None
    return Stage(shard, device, None if table is None else PixelTable.from_text(table))


@contextmanager
def _shown(context: RankContext, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how far something is loaded; yield what takes the bytes of each piece."""
    with (
        context.activity.loading(f"loading {what}", total) as load,
        context.patience(f"loading {what} of {context.model.name}"),
        ByteBar(f"rank {context.rank}: {what}", total, delay_s=PATIENCE_S) as bar,
    ):

        def advance(size: int) -> None:
            bar.advance(size)
            load.advance(size)

        yield advance


def _load_decoder_stage(
    context: RankContext,
    model: DecoderModel,
    stage: StagePlan,
    bounds: StepBounds,
    adopts: Iterable[tuple[DecoderStage, Collection[int]]],
    pause: Callable[[], object],
) -> DecoderStage:
    """Load the layers of a stage of a decoder, and reserve memory for its cache."""
    dtype = find_dtype(stage.dtype)
    total = grouped_bytes(dtype, model.parameter_count(stage.layers))
    with _shown(context, stage.layers.named, total) as show:

        def advance(values: int) -> None:
            show(grouped_bytes(dtype, values))
            pause()

        return model.stage(
            stage.layers,
            dtype,
            pages=bounds.pages,
            window_pages=bounds.window_pages,
            context=bounds.context,
            weights=context.request.model.weights,
            progress=advance,
            adopts=adopts,
        )


def begin_text(
    model: DecoderModel, plan: Plan, ends: DecoderEnds, data: DataEnds, *, is_change: bool
) -> None:
    """Let the data rank make steps for a plan.

    Args:
        model: The decoder.
        plan: The plan.
        ends: Embedding, last norm and head.
        data: Input and results of the run.
        is_change: Whether the plan takes over from one that runs.
    """
    from pipeedge.data.step_queue import StepQueue  # only the data rank needs it

    queue = data.source
    if not isinstance(queue, StepQueue):
        raise TypeError("the data rank of a decoder has a queue of steps")
    stages = plan.schedule.stages
    alone = len(stages) == 1 and stages[0].rank == plan.data_rank
    places = 0 if alone else len(stages)
    exact = not any(map(plan.compresses, range(len(stages))))
    text = None if plan.prediction is None else plan.prediction.text
    planned = None if text is None else text.planned_groups
    about = plan.step_bounds, places, model.window, plan.cache_owners
    if is_change:
        queue.change(*about, exact=exact, planned=planned)
    else:
        queue.begin(ends, *about, exact=exact, planned=planned)


def load_ends(context: RankContext, plan: Plan) -> DecoderEnds:
    """Load embedding, last norm and head of a decoder.

    Raises:
        WeightsError: The weights cannot be read, or do not fit the model.
    """
    model = context.model
    if not isinstance(model, DecoderModel):
        raise TypeError(f"{model.name} is not a decoder")
    dtype = find_dtype(plan.schedule.stages[0].dtype)
    with _shown(context, "embedding and head", model.end_bytes(dtype)) as advance:
        return model.ends(
            dtype,
            weights=context.request.model.weights,
            progress=lambda values: advance(grouped_bytes(head_dtype(dtype), values)),
        )


def _load_shard(
    context: RankContext,
    model: Model,
    stage: StagePlan,
    device: torch.device,
    kernels: str,
    shared: Shard | None,
    pause: Callable[[], object],
) -> Shard:
    """Load the layers of a stage, and show how far that is; what ``shared`` has is not loaded again."""
    layers, dtype = stage.layers, find_dtype(stage.dtype)
    total = model.weight_bytes(layers, dtype)
    if shared is not None:
        both = range(max(layers.start, shared.layers.start), min(layers.stop, shared.layers.stop))
        total -= model.weight_bytes(LayerRange(both.start, both.stop), dtype) if both else 0
    with _shown(context, layers.named, total) as show:

        def advance(size: int) -> None:
            show(size)
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
