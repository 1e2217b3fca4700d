"""The layers that a rank has loaded last, which the next epoch may need again.

Loading cannot be interrupted, and may take minutes from a slow disk. It therefore has a thread of its own,
so that a rank stops at once when its epoch fails while it loads. The next epoch waits for the thread first:
memory may not suffice for both, and what it loads may be what is needed then.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from pipeedge.plan.planning import Plan
from pipeedge.run.context import RankContext
from pipeedge.run.phases import load_stage

if TYPE_CHECKING:
    from pipeedge.run.stage_part import LoadedStage

__all__ = ["Shelf"]


class Shelf:
    """What a rank has loaded.

    Args:
        device: Device to compute on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._held: LoadedStage | None = None
        self._loading = False
        self._error: BaseException | None = None

    def take(self, context: RankContext, plan: Plan) -> LoadedStage | None:
        """Return the stage that a plan gives this rank, loaded; None if it gives none.

        Args:
            context: This rank, whose crew stops the wait.
            plan: The plan.

        Raises:
            WeightsError: The weights cannot be read, or do not fit the model.
        """
        number = plan.schedule.stage_of(context.rank)
        if number is None:
            return None
        context.crew.on_stop(self._wake)
        self._wait(context)
        if self._held is None or not self._held.serves(plan.schedule.stages[number]):
            self._held, self._loading = None, True
            threading.Thread(target=self._load, args=(context, plan), name="load", daemon=True).start()
            self._wait(context)
        return load_stage(context, plan, self._device, self._held)

    def _load(self, context: RankContext, plan: Plan) -> None:
        loaded, error = None, None
        try:
            loaded = load_stage(context, plan, self._device)
        except BaseException as failure:  # kept whole, to be raised in the thread that waits
            error = failure
        with self._changed:
            self._held, self._error, self._loading = loaded, error, False
            self._changed.notify_all()

    def _wait(self, context: RankContext) -> None:
        """Wait until nothing is being loaded; raise what stops the epoch, or what went wrong."""
        with self._changed:
            self._changed.wait_for(lambda: not self._loading or context.crew.stopped)
            error, self._error = self._error, None
        context.crew.wait(0)
        if error is not None:
            raise error

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
