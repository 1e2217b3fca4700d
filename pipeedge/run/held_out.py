"""Try plans on held-out items before the run (``--held-out``).

    last items of the input ─┬─> the model in float32 ─────────────────────────────┐
                             └─> stages in the plan's number types, links with its bits ─┴─> agreement

The profiler takes the first items of its input, so these are others if the input has enough of them.
"""

from __future__ import annotations

import torch

from pipeedge.base.errors import WeightsError
from pipeedge.base.schedule import Schedule
from pipeedge.data import InputSource
from pipeedge.data.agreement import Outputs, agreement, outputs_by_block, outputs_of_schedule
from pipeedge.models import Model
from pipeedge.request.config import RunRequest

__all__ = ["HeldOutTrial", "open_held_out"]


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


class HeldOutTrial:
    """A trial of plans on held-out items, computed on this rank.

    Args:
        request: Request of this rank.
        model: The model.
        items: The held-out items.
        device: Device to compute on.
    """

    def __init__(self, request: RunRequest, model: Model, items: InputSource, device: torch.device) -> None:
        self._request = request
        self._model = model
        self._items = items
        self._device = device
        self._exact: dict[int, Outputs] = {}  # by microbatch size

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._items)

    def __call__(self, schedule: Schedule, microbatch_size: int) -> float:
        """Return the fraction of the items whose class under ``schedule`` is that of float32."""
        weights = self._request.model.weights
        if microbatch_size not in self._exact:
            self._exact[microbatch_size] = outputs_by_block(
                self._model,
                self._items,
                microbatch_size,
                weights=weights,
                device=self._device,
                dtype=torch.float32,
            )
        found = outputs_of_schedule(
            self._model,
            self._items,
            microbatch_size,
            schedule,
            weights=weights,
            device=self._device,
            compression=self._request.links.compression,
        )
        classes = self._model.output_kind != "vector"
        return agreement(found, self._exact[microbatch_size], classes=classes).part
