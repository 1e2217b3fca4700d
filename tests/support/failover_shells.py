"""Terms of the shells around the rules of failover, in a simulated world: the rules, plans and violations.

HubShell    Epochs            connections, heartbeats, diagnosis, a planner that takes its time
            LoadDeadlines
RankShell   EpochMember       a disk, links, a stage that computes; on the data rank a feeder and a collector,
            Ledger            all of that twice while the plan changes
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Raw

from pipeedge.control.epoch_member import EpochMember
from pipeedge.control.epochs import Epochs
from pipeedge.control.ledger import Ledger
from pipeedge.control.liveness import Limits
from pipeedge.control.load_deadline import LoadDeadlines

LAYERS = 6
BEAT_S = 1.0
LIMITS = Limits.within(10.0)


class ViolationError(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Rules:
    """The rules that a world drives."""

    epochs: Callable[..., Epochs] = Epochs
    member: Callable[[], EpochMember] = EpochMember
    ledger: Callable[..., Ledger[int]] = Ledger
    loads: Callable[[float], LoadDeadlines] = LoadDeadlines
    from_seed: int = 0
    """Seed from which to look for one that shows a bug which only few do."""

    @property
    def name(self) -> str:
        """Names of the rules that are not the product's own."""
        parts = (self.epochs, self.member, self.ledger, self.loads)
        own = (Epochs, EpochMember, Ledger, LoadDeadlines)
        return " ".join(part.__name__ for part in parts if part not in own)


@dataclass(frozen=True)
class Part:
    """One end of a plan: ranks, incarnations and layers of the stages, and the data rank."""

    stages: list[tuple[int, int, int, int]]
    """Rank, incarnation, first layer, layer after the last."""
    data: tuple[int, int]
    """Rank and incarnation of the data rank."""

    @property
    def ends(self) -> list[tuple[int, int]]:
        """Rank and incarnation of the ends of the links: link n leads from ends[n] to ends[n + 1]."""
        return [self.data, *((rank, number) for rank, number, _, _ in self.stages), self.data]

    @property
    def window(self) -> int:
        return 3 * len(self.stages)


def read_plan(plan: Raw) -> Part:
    body = json.loads(bytes(plan))
    return Part([tuple(stage) for stage in body["stages"]], tuple(body["data"]))
