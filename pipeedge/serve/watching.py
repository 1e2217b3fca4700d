"""What is known of the pipeline while it answers, for the page and the metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from pipeedge.base.schedule import Schedule
from pipeedge.control.liveness import StageWork

__all__ = ["PipelineWatch", "StageState"]

_BEATS = 10
"""Number of heartbeats over which the recent time of a stage is taken."""


@dataclass(frozen=True)
class StageState:
    """A stage as it is now."""

    stage: int
    rank: int
    layers: str
    busy: float
    """Fraction of the recent time in which it computed."""


class PipelineWatch:
    """The schedule, and the latest heartbeats of its stages. Any thread may ask."""

    def __init__(self) -> None:
        self._schedule: Schedule | None = None
        self._heard: deque[Mapping[int, StageWork]] = deque(maxlen=_BEATS)

    def planned(self, schedule: Schedule) -> None:
        """Take the schedule of the pipeline from now on."""
        self._schedule = schedule
        self._heard.clear()

    def heard(self, work: Mapping[int, StageWork]) -> None:
        """Take how the stages have spent their time so far, by rank."""
        self._heard.append(dict(work))

    @property
    def work(self) -> Mapping[int, StageWork]:
        """How the stages have spent their time so far, by rank."""
        heard = tuple(self._heard)
        return heard[-1] if heard else {}

    def stages(self) -> list[StageState]:
        """Return the state of every stage; none before there is a plan."""
        schedule, heard = self._schedule, tuple(self._heard)
        if schedule is None:
            return []
        return [
            StageState(number, stage.rank, stage.layers.named, _busy(heard, stage.rank))
            for number, stage in enumerate(schedule.stages)
        ]

    def bottleneck(self) -> int | None:
        """Return the number of the busiest stage, or None while all are idle."""
        busiest = max(self.stages(), key=lambda state: state.busy, default=None)
        return busiest.stage if busiest is not None and busiest.busy > 0 else None


def _busy(heard: tuple[Mapping[int, StageWork], ...], rank: int) -> float:
    known = [work[rank] for work in heard if rank in work]
    if len(known) < 2:
        return 0.0
    seconds = known[-1].seconds - known[0].seconds
    return min(1.0, max(0.0, (known[-1].busy_s - known[0].busy_s) / seconds)) if seconds > 0 else 0.0
