"""State of the pipeline while it answers, for the page and the metrics."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeedge.base.schedule import Schedule
from pipeedge.base.wording import count
from pipeedge.observe.metrics import StageWork

__all__ = ["EpochState", "PipelineEvent", "PipelineState", "StageState"]

_BEATS = 10
"""Number of heartbeats over which the recent time of a stage is taken."""
_EVENTS = 20
_LIMITING = 0.5
"""Busy fraction below which no stage limits the throughput: the pipeline waits for requests."""


@dataclass(frozen=True)
class StageState:
    """A stage as it is now."""

    stage: int
    rank: int
    layers: str
    busy: float
    """Fraction of the recent time in which it computed."""
    wait_link: float
    """Fraction of the recent time in which it waited for its outgoing link."""


@dataclass(frozen=True)
class EpochState:
    """The epoch of a run that goes on after failures, and what the earlier ones have cost."""

    number: int = 0
    """Number of the epoch; 0 if the run ends with the first rank that is lost."""
    recovering: bool = False
    """Whether the epoch is still being prepared, or its first result is awaited."""
    lost_ranks: int = 0
    recoveries: int = 0
    lost_s: float = 0.0
    """Seconds without a result because of failures."""
    repeated: int = 0
    """Number of microbatches that were computed again."""


@dataclass(frozen=True)
class PipelineEvent:
    """Something that happened to the pipeline."""

    at: float
    """Time in seconds since 1970."""
    line: str


class PipelineState:
    """The schedule, its epochs, and the latest heartbeats of its stages. Any thread may tell and ask.

    Args:
        clock: Returns the time in seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._schedule: Schedule | None = None
        self._heard: deque[Mapping[int, StageWork]] = deque(maxlen=_BEATS)
        self._epoch = EpochState()
        self._slowness: Mapping[str, float] = {}
        self._events: deque[PipelineEvent] = deque(maxlen=_EVENTS)

    # -- told by the run -----------------------------------------------------------------------------

    def planned(self, schedule: Schedule) -> None:
        """Take the schedule of the pipeline from now on."""
        stages = ", ".join(f"{stage.layers.named} on rank {stage.rank}" for stage in schedule.stages)
        with self._lock:
            self._schedule = schedule
            self._heard.clear()
            self._note(f"runs with {stages}")

    def heard(self, work: Mapping[int, StageWork]) -> None:
        """Take how the stages have spent their time so far, by rank."""
        with self._lock:
            self._heard.append(dict(work))

    def prepares(self, epoch: int, cause: str, lost: Sequence[int]) -> None:
        """Note that an epoch is prepared."""
        with self._lock:
            lost_ranks = self._epoch.lost_ranks + len(lost)
            self._epoch = replace(self._epoch, number=epoch, recovering=bool(cause), lost_ranks=lost_ranks)
            if cause:
                self._note(cause)

    def changed(self, epoch: int, cause: str) -> None:
        """Note that another plan has taken the place of the one before, without a failure."""
        with self._lock:
            self._epoch = replace(self._epoch, number=epoch)
            self._note(cause)

    def goes_on(self, seconds: float, repeated: int) -> None:
        """Note that results come again."""
        with self._lock:
            self._epoch = replace(
                self._epoch,
                recovering=False,
                recoveries=self._epoch.recoveries + 1,
                lost_s=self._epoch.lost_s + seconds,
                repeated=self._epoch.repeated + repeated,
            )
            again = count(repeated, "microbatch")
            self._note(f"goes on after {seconds:.1f} s without a result; {again} computed again")

    def measured(self, slowness: Mapping[str, float]) -> None:
        """Take how slow the hosts are, as multiples of what their profiles say."""
        with self._lock:
            self._slowness = dict(slowness)

    def _note(self, line: str) -> None:
        self._events.append(PipelineEvent(self._clock(), str(line)))  # plain, for JSON

    # -- asked by the server -------------------------------------------------------------------------

    @property
    def work(self) -> Mapping[int, StageWork]:
        """How the stages have spent their time so far, by rank."""
        with self._lock:
            return self._heard[-1] if self._heard else {}

    @property
    def epoch(self) -> EpochState:
        """The epoch, and what the earlier ones have cost."""
        with self._lock:
            return self._epoch

    @property
    def slowness(self) -> Mapping[str, float]:
        """Time of the layers of each host as a multiple of its profile, relative to what all have in common.

        It is empty where there are no profiles, and until enough microbatches were computed.
        """
        with self._lock:
            return self._slowness

    def events(self) -> list[PipelineEvent]:
        """Return the latest events, the last one first."""
        with self._lock:
            return list(reversed(self._events))

    def stages(self) -> list[StageState]:
        """Return the state of every stage; none before there is a plan."""
        with self._lock:
            schedule, heard = self._schedule, tuple(self._heard)
        if schedule is None:
            return []
        return [
            StageState(number, stage.rank, stage.layers.named, *_spent(heard, stage.rank))
            for number, stage in enumerate(schedule.stages)
        ]

    def dtypes(self) -> list[str]:
        """Return the number type of every stage; none before there is a plan."""
        with self._lock:
            return [] if self._schedule is None else [stage.dtype for stage in self._schedule.stages]

    def bottleneck(self) -> int | None:
        """Return the number of the busiest stage, or None if none is busy enough to limit the throughput."""
        busiest = max(self.stages(), key=lambda state: state.busy, default=None)
        return busiest.stage if busiest is not None and busiest.busy >= _LIMITING else None


def _spent(heard: Sequence[Mapping[int, StageWork]], rank: int) -> tuple[float, float]:
    """Return the fractions of the recent time in which a stage computed, and waited for its link."""
    known = [work[rank] for work in heard if rank in work]
    seconds = known[-1].seconds - known[0].seconds if len(known) > 1 else 0.0
    if seconds <= 0:
        return 0.0, 0.0
    busy_s = known[-1].busy_s - known[0].busy_s
    link_s = known[-1].wait_link_s - known[0].wait_link_s
    return min(1.0, max(0.0, busy_s / seconds)), min(1.0, max(0.0, link_s / seconds))
