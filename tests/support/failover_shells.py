"""Terms of the simulated world of failover: the rules that may have a bug, plans, and violations.

HubShell    the product's HubState, with attendance, epochs and watch      sockets and the planner's thread
RankShell   the product's Turns, EpochMember, Ledger, Feeder, Collector    links, and a stage that computes
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import Raw

from pipeedge.base.fields import convert
from pipeedge.base.schedule import LayerRange
from pipeedge.control.epoch_member import EpochMember
from pipeedge.control.liveness import Limits
from pipeedge.control.rules import HubParts, HubState
from pipeedge.data.step_queue import StepQueue
from pipeedge.decoding.steps import StepScheduler
from pipeedge.plan.after_loss import Held
from pipeedge.plan.cache_owners import CacheOwner, CacheOwners, CopiedPages, KeptOutput
from pipeedge.run.ledger import Ledger

LAYERS = 6
TIMEOUT_S = 10.0
BEAT_S = 1.0
LIMITS = Limits.within(TIMEOUT_S)


class ViolationError(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Rules:
    """The rules that a world drives: those of the product, or with a bug in one of them."""

    name: str = ""
    """Name of the bug, if there is one."""
    hub: type[HubState] = HubState
    parts: HubParts = field(default_factory=HubParts)
    """Parts of the hub's rules."""
    member: Callable[[], EpochMember] = EpochMember
    ledger: type[Ledger] = Ledger
    queue: type[StepQueue] = StepQueue
    scheduler: type[StepScheduler] = StepScheduler
    held: type[Held] = Held
    text: bool = False
    """Whether the pipeline generates text, so that its stages remember."""
    from_seed: int = 0
    """Seed from which to look for one that shows a bug which only few do."""


@dataclass(frozen=True)
class Part:
    """One end of a plan: ranks, incarnations and layers of the stages, and the data rank."""

    stages: list[tuple[int, int, int, int]]
    """Rank, incarnation, first layer, layer after the last."""
    data: tuple[int, int]
    """Rank and incarnation of the data rank."""
    pages: int = 0
    """Number of pages of the caches of stages that generate text."""
    number: int = 0
    """Number of the plan."""
    since: tuple[int, ...] = ()
    """For each layer, number of the plan since which its process has had it."""
    standbys: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Rank, incarnation, first layer, layer after the last of those that copy what others have."""
    copies: tuple[CopiedPages, ...] = ()
    """Copies with which layers were taken."""
    outputs: tuple[KeptOutput, ...] = ()
    """Outputs that ranks keep."""

    @property
    def cache_owners(self) -> CacheOwners:
        """Stages, and since when they have their caches."""
        owners = [
            CacheOwner(rank, LayerRange(first, stop), "float32", self.since[first:stop])
            for rank, _, first, stop in self.stages
        ]
        return CacheOwners(self.number, owners, self.copies, self.outputs)

    @property
    def ends(self) -> list[tuple[int, int]]:
        """Rank and incarnation of the ends of the links: link n leads from ends[n] to ends[n + 1]."""
        return [self.data, *((rank, number) for rank, number, _, _ in self.stages), self.data]

    @property
    def window(self) -> int:
        return 3 * len(self.stages)

    @property
    def way(self) -> list[int]:
        """First layer and the layer after the last of each stage, as a microbatch shows its way."""
        return [layer for _, _, first, stop in self.stages for layer in (first, stop)]


def read_plan(plan: Raw) -> Part:
    body = json.loads(bytes(plan))
    stages, data = [tuple(stage) for stage in body["stages"]], tuple(body["data"])
    return Part(
        stages,
        data,
        body.get("pages", 0),
        body["number"],
        tuple(body["since"]),
        [tuple(standby) for standby in body["standbys"]],
        convert(body["copies"], tuple[CopiedPages, ...]),
        convert(body["outputs"], tuple[KeptOutput, ...]),
    )
