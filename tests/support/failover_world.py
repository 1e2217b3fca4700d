"""A simulated world that drives the rules of failover: virtual time, a network, and processes that fail.

    World(seed).run() -> Outcome        the same seed gives the same trace

The world owns time, chance, the network and the disturbances; ``failover_shells`` tells of the shells around
the rules, which are those of the product. Everything that happens is an event in one queue, and after each
one the invariants are checked. The network delays messages, and keeps the order within a connection. A cut
holds them back until it heals, in one direction or both. Copies of frames of old epochs arrive at any time.
When a disk stops, what its process loads hangs, while its heartbeats go on.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from failover_hub_shell import HubShell
from failover_rank_shell import RankShell
from failover_shells import LAYERS, Rules, ViolationError

from pipeedge.control.epochs import EpochStep
from pipeedge.control.ledger import Ledger

_MOST_DISTURBANCES = 7
_BESIDE = (EpochStep.CHANGING, EpochStep.DROPPING, EpochStep.SWITCHING, EpochStep.STOPPING)
"""Steps in which two epochs may be active beside each other."""
_FOR_EVER_S = 1e6
_GIVES_UP_AFTER_S = 300.0
"""Virtual seconds without an end that count as no end."""


@dataclass(frozen=True)
class Outcome:
    """What one simulated run came to."""

    complete: bool
    failovers: int
    """Epochs that ran after one that failed."""
    switches: int
    """Changes of the plan that took place."""
    drops: int
    """Changes of the plan that did not, while the epoch before ran on."""
    trace: tuple[str, ...]


@dataclass
class Limits:
    """Sizes of a world, drawn once."""

    ranks: int
    microbatches: int
    data_rank: int
    changes_little: bool
    """Whether plans after the first change as little as possible."""
    order: tuple[int, ...] | None
    """Order in which the planner always takes the ranks; None if it takes any."""
    capacity: Mapping[int, int]
    """Number of layers that each rank can hold."""
    disturbances: int
    changes: int
    """Number of times that another plan is asked for though nothing is lost."""
    ambushes: bool
    """Whether disturbances follow at once when a recovery begins."""


@dataclass
class Network:
    """Connections between processes; each keeps the order of its messages."""

    world: World
    cuts: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of cuts from one rank to another."""
    held: list[tuple[tuple[int, int], object, Callable[..., None], tuple[Any, ...]]] = field(
        default_factory=list
    )
    last: dict[object, float] = field(default_factory=dict)

    def carry(self, way: tuple[int, int], lane: object, deliver: Callable[..., None], *args: Any) -> None:
        """Call ``deliver`` after a delay, when everything sent before on ``lane`` has arrived."""
        delay = 0.0 if way[0] == way[1] else self.world.chance.uniform(0.001, 0.03)
        at = max(self.world.now + delay, self.last.get(lane, 0.0) + 1e-6)
        self.last[lane] = at
        self.world.at(at, self._arrive, way, lane, deliver, args)

    def _arrive(
        self, way: tuple[int, int], lane: object, deliver: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        if self.cuts.get(way) or any(waiting == lane for _, waiting, _, _ in self.held):
            self.held.append((way, lane, deliver, args))
        else:
            deliver(*args)

    def cut(self, ways: list[tuple[int, int]], seconds: float) -> None:
        for way in ways:
            self.cuts[way] = self.cuts.get(way, 0) + 1
        self.world.after(seconds, self.heal, ways)

    def heal(self, ways: list[tuple[int, int]]) -> None:
        self.world.note("heal", ways)
        for way in ways:
            self.cuts[way] -= 1
        held, self.held = self.held, []
        for way, lane, deliver, args in held:
            if self.cuts.get(way):
                self.held.append((way, lane, deliver, args))
            else:
                deliver(*args)  # before what is on its way behind it


class World:
    """One simulated run.

    Args:
        seed: decides everything that happens.
        rules: the rules to drive.
    """

    def __init__(self, seed: int, rules: Rules = Rules()) -> None:  # noqa: B008 - it is frozen
        self.chance = random.Random(seed)
        self.rules = rules
        self.now = 0.0
        self.trace: list[str] = []
        self._events: list[tuple[float, float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self.limits = self._draw()
        self.network = Network(self)
        self.ledger: Ledger[int] = rules.ledger(1)
        self.window = 0
        """Largest number of microbatches under way in the epoch that the data rank runs."""
        self.rows: list[int] = []
        """Numbers of the microbatches in the output."""
        self.input_ended = False
        self.read: dict[int, int] = {}
        """What each microbatch holds, drawn when it is read for the first time."""
        self.failovers = self.switches = self.drops = 0
        self._disturbances = 0
        self._opened = 0
        self.processes: dict[int, RankShell] = {}
        """Processes by incarnation."""
        for rank in range(self.limits.ranks):
            self._start(rank)
        members = {process.rank: number for number, process in self.processes.items()}
        self.hub = HubShell(self, rules.epochs(members, self.limits.data_rank))
        self._ended_at: float | None = None

    def _draw(self) -> Limits:
        chance = self.chance
        ranks = chance.randint(2, 6)
        return Limits(
            ranks=ranks,
            microbatches=chance.randint(1, 24),
            data_rank=0 if chance.random() < 0.6 else chance.randrange(ranks),
            changes_little=chance.random() < 0.5,
            order=tuple(chance.sample(range(ranks), ranks)) if chance.random() < 0.5 else None,
            capacity={rank: chance.choice((2, 3, 4, LAYERS)) for rank in range(ranks)},
            disturbances=chance.randint(1, 5),
            changes=chance.choice((0, 1, 3, 6)),
            ambushes=chance.random() < 0.5,
        )

    # -- time -------------------------------------------------------------------------------------

    def at(self, time: float, event: Callable[..., None], *args: Any) -> None:
        self._scheduled += 1
        # Events of one instant happen in any order.
        heapq.heappush(self._events, (time, self.chance.random(), self._scheduled, event, args))

    def after(self, seconds: float, event: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, event, *args)

    def note(self, *what: object) -> None:
        self.trace.append(f"{self.now:.6f} {' '.join(map(str, what))}")

    def run(self) -> Outcome:
        """Let everything happen until the run has ended everywhere.

        Raises:
            ViolationError: an invariant does not hold.
        """
        for _ in range(self.limits.disturbances):
            self.after(self.chance.uniform(0.0, 4.0), self.disturb)
        for _ in range(self.limits.changes):
            self.after(self.chance.uniform(0.3, 4.0), self.hub.change)
        for process in list(self.processes.values()):
            process.begin()
        self.hub.begin()
        while self._events and (self._ended_at is None or self.now < self._ended_at + 1.0):
            self.now, _, _, event, args = heapq.heappop(self._events)
            if self._ended_at is None and self.now > _GIVES_UP_AFTER_S:
                raise ViolationError(f"nobody moves any longer: {self.hub.epochs.step.value}")
            try:
                event(*args)
            except (ValueError, KeyError) as error:
                raise ViolationError(f"{type(error).__name__}: {error}") from error
            self._check()
        self._check_end()
        return Outcome(
            self.hub.epochs.step is EpochStep.COMPLETE,
            self.failovers,
            self.switches,
            self.drops,
            tuple(self.trace),
        )

    # -- disturbances -----------------------------------------------------------------------------

    def ambush(self) -> None:
        """Maybe disturb a recovery, of which a step begins at this moment."""
        if self.limits.ambushes and self.chance.random() < 0.25:
            self.after(self.chance.choice((0.0, 0.01, 0.15)), self.disturb)

    def ambush_the_end(self) -> None:
        """Maybe kill a process while the hub is about to hear that all results are written."""
        if self.limits.ambushes:
            self.after(0.0, self._kill)

    def disturb(self) -> None:
        """Let one thing go wrong, and maybe a second one soon."""
        if self._ended_at is not None or self._disturbances >= _MOST_DISTURBANCES:
            return
        self._disturbances += 1
        kinds = (self._kill, self._fail, self._pause, self._hang, self._cut, self._start_again)
        hangs = 25 if any(process.is_loading for process in self.processes.values()) else 2
        (disturbance,) = self.chance.choices(kinds, (40, 10, 15, hangs, 25, 10))
        disturbance()
        if self.chance.random() < 0.2:
            self.after(self.chance.uniform(0.0, 2.0), self.disturb)

    def _victim(self, *, loading: bool = False) -> RankShell | None:
        """Return a process that lives, one that loads if there is one and it is to be."""
        alive = [process for process in self.processes.values() if process.alive and process.rank != 0]
        chosen = [process for process in alive if process.is_loading] if loading else []
        return self.chance.choice(chosen or alive) if alive else None

    def _kill(self) -> None:
        process = self._victim()
        if process is not None:
            self.note("kill", process.name)
            process.die()
            if self.chance.random() < 0.5:
                self.after(self.chance.choice((0.1, 0.6, 3.0)), self._return, process.rank)

    def _fail(self) -> None:
        process = self._victim()
        if process is not None and not process.paused:
            self.note("fail", process.name)
            process.fail()

    def _pause(self) -> None:
        process = self._victim()
        if process is not None and not process.paused:
            self.note("pause", process.name)
            process.pause()
            self.after(self.chance.choice((0.5, 2.0, 15.0)), process.resume)
            if self.chance.random() < 0.2:
                self.after(self.chance.uniform(0.0, 3.0), self._return, process.rank)

    def _hang(self) -> None:
        """Let a disk answer no longer, for a while or for ever."""
        process = self._victim(loading=True)
        if process is not None:
            self.note("disk of", process.name, "stops")
            process.stop_disk()
            self.after(self.chance.choice((1.0, 6.0, _FOR_EVER_S)), process.start_disk)

    def _cut(self) -> None:
        one, other = self.chance.sample(range(self.limits.ranks), 2)
        ways = self.chance.choice(([(one, other)], [(one, other), (other, one)]))
        self.note("cut", ways)
        self.network.cut(ways, self.chance.choice((0.3, 3.0, 20.0, _FOR_EVER_S)))
        for process in self.processes.values():
            process.disturbed |= process.rank in (one, other)
        if self.chance.random() < 0.4:  # a middlebox resets the connection
            for process in self.processes.values():
                if process.rank == other:
                    process.notice_reset(one)

    def _start_again(self) -> None:
        """Start a rank that may still run, as a user may by mistake."""
        rank = self.chance.randrange(1, self.limits.ranks)
        self._return(rank)

    def _return(self, rank: int) -> None:
        process = self._start(rank)
        self.note("start", process.name)
        process.begin()
        self.hub.greet(process)

    def _start(self, rank: int) -> RankShell:
        self._opened += 1
        process = RankShell(self, rank, self._opened)
        process.disturbed = any(self.network.cuts.get(way) for way in ((0, rank), (rank, 0)))
        self.processes[self._opened] = process
        return process

    # -- invariants -------------------------------------------------------------------------------

    def _check(self) -> None:
        epochs = self.hub.epochs
        if self._ended_at is None and epochs.step in (EpochStep.COMPLETE, EpochStep.ENDED):
            self._ended_at = self.now
        members = epochs.membership.incarnations
        here = [self.processes[number] for number in members.values()]
        active = set[int]().union(*(process.active for process in here if process.alive))
        if len(active) > (2 if epochs.step in _BESIDE else 1) and self._ended_at is None:
            raise ViolationError(f"epochs {sorted(active)} are active together")
        for process in here:
            process.check()
        if self.ledger.under_way > self.window:
            raise ViolationError(f"{self.ledger.under_way} microbatches under way, {self.window} allowed")

    def _check_end(self) -> None:
        epochs, limits = self.hub.epochs, self.limits
        if self._ended_at is None:
            raise ViolationError(f"nothing can happen any longer: {epochs.step.value}")
        if epochs.step is EpochStep.COMPLETE and self.rows != list(range(limits.microbatches)):
            raise ViolationError(f"complete with rows {self.rows} of {limits.microbatches}")
        for process in self.processes.values():
            should_know = process.alive and not process.disturbed and process.began_at <= self._ended_at
            if should_know and not process.ended:
                raise ViolationError(f"{process.name} does not know that the run has ended")
