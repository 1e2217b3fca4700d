"""Try plans on held-out items before the run (``--held-out``).

    last items of the input ─┬─> the model in float32 ─────────────────────────────┐
                             └─> stages in the plan's number types, links with its bits ─┴─> agreement

The profiler takes the first items of its input, so these are others if the input has enough of them.
"""

from __future__ import annotations

import functools

import torch

from pipeedge.base.errors import WeightsError
from pipeedge.base.schedule import Schedule
from pipeedge.data import InputSource
from pipeedge.data.agreement import Outputs, agreement, outputs_by_block, outputs_of_schedule
from pipeedge.models import Model
from pipeedge.plan.choice import Trial
from pipeedge.request.config import RunRequest

__all__ = ["held_out_trial", "open_held_out"]


def open_held_out(request: RunRequest, model: Model, source: InputSource) -> InputSource:
    """Return the last items of ``source``, after checking that the model can be computed here.

    Raises:
        InputError: There are fewer different items.
        WeightsError: This rank does not have the whole model.
    """
    try:
        model.check_weights(request.model.weights)
    except WeightsError as error:
        raise WeightsError(f"--held-out computes the whole model here: {error}") from error
    wanted = request.schedule.held_out
    held_out = source.rest(max(0, len(source) - wanted))
    held_out.check_distinct(wanted, "--held-out")
    return held_out


def held_out_trial(request: RunRequest, model: Model, items: InputSource, device: torch.device) -> Trial:
    """Return a trial of plans on held-out items, computed on this rank.

    Args:
        request: Request of this rank.
        model: The model.
        items: The held-out items.
        device: Device to compute on.
    """
    weights, classes = request.model.weights, model.output_kind != "vector"

    @functools.cache
    def exact(microbatch_size: int) -> Outputs:
        return outputs_by_block(
            model, items, microbatch_size, weights=weights, device=device, dtype=torch.float32
        )

    def agrees(schedule: Schedule, microbatch_size: int) -> float:
        found = outputs_of_schedule(
            model,
            items,
            microbatch_size,
            schedule,
            weights=weights,
            device=device,
            compression=request.links.compression,
        )
        return agreement(found, exact(microbatch_size), classes=classes).part

    return Trial(len(items), agrees)
