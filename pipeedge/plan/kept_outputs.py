"""Which ranks keep what they send on, so that less is computed again after a loss. Pure.

    stages             rank 0 [1-8], keeps outputs    rank 1 [9-16], keeps outputs    rank 2 [17-24]
    without rank 1     rank 0 [1-12]                                                  rank 2 [13-24]

Layers 9 to 16 compute again then, from the outputs of layer 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeedge.base.schedule import Schedule
from pipeedge.base.wording import figure
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.step_rows import StepBounds
from pipeedge.plan.cache_owners import KeptOutput
from pipeedge.plan.cache_size import rank_bytes

__all__ = ["ChosenOutputs", "choose_outputs"]

_MB = 1 << 20


@dataclass(frozen=True)
class ChosenOutputs:
    """Outputs that ranks keep."""

    outputs: tuple[KeptOutput, ...]
    memory: Mapping[int, int | None]
    """Bytes that are left on each rank beside them; None where that is unknown."""
    notes: tuple[str, ...] = ()
    """Why a rank keeps none, for each that has too little memory."""


def choose_outputs(
    model: DecoderModel,
    schedule: Schedule,
    bounds: StepBounds,
    outputs: Sequence[KeptOutput],
    memory: Mapping[int, int | None],
    data_rank: int,
) -> ChosenOutputs:
    """Return the outputs that ranks keep, as far as their memory allows.

    Args:
        model: The decoder.
        schedule: Its stages.
        bounds: Bounds of steps.
        outputs: What the ranks could keep.
        memory: Bytes that each rank can allocate; None where that is unknown.
        data_rank: Rank that holds both ends.
    """
    left, kept, notes = dict(memory), list[KeptOutput](), list[str]()
    for stage in schedule.stages:
        own = [one for one in outputs if one.rank == stage.rank]
        size = sum(bounds.pages * model.output_bytes(one.cut, find_dtype(stage.dtype)) for one in own)
        free = left.get(stage.rank)
        if free is not None and own:
            room = free - rank_bytes(model, schedule, bounds, stage.rank, data_rank)
            if size > room:
                notes.append(
                    f"--keep-outputs: rank {stage.rank} would need {figure(size / _MB, 3)} MB for its "
                    f"outputs, and has {figure(max(0, room) / _MB, 3)} MB left: give a smaller --cache-mb"
                )
                continue
            left[stage.rank] = free - size
        kept += own
    return ChosenOutputs(tuple(kept), left, tuple(notes))
