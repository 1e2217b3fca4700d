"""A simulated world that drives the product's failover: virtual time, a network, and processes that fail.

    World(seed).run() -> Outcome        the same seed gives the same trace

The world owns time, chance, threads, the network and the disturbances. All else is the product's: the hub's
state with its epochs, attendance and diagnosis; at each rank the member's rules and turns; on the data rank
the ledger, the feeder and the collector. ``failover_shells`` names the shells around them. Everything that
happens is an event in one queue, and after each one the invariants are checked. The network delays messages,
and keeps the order within a connection. A cut holds them back until it heals, in one direction or both. When
a disk stops, what its process loads hangs, while its heartbeats go on.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from failover_hub_shell import HubShell
from failover_rank_shell import RankShell
from failover_shells import LAYERS, Rules, ViolationError
from failover_text import TextLoad
from failover_threads import Threads

from pipeedge.control.epochs import Step

_MOST_DISTURBANCES = 7
_BESIDE = (Step.CHANGING, Step.DROPPING, Step.SWITCHING, Step.STOPPING)
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
    goes_on: bool
    trace: tuple[str, ...]


@dataclass
class Limits:
    """Sizes of a world, drawn once."""

    ranks: int
    microbatches: int
    data_rank: int
    goes_on: bool
    """Policy: whether the run goes on after a loss."""
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
    poison: int | None
    """Number of the microbatch that no stage can compute."""
    hangs: bool
    """Whether a stage may take very long for a microbatch."""
    endless: bool = False
    """Whether the items are requests, which can be taken once, rather than a file."""


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
        seed: Decides everything that happens.
        rules: The rules to drive.
    """

    def __init__(self, seed: int, rules: Rules = Rules()) -> None:  # noqa: B008 - it is frozen
        self.chance = random.Random(seed)
        self.rules = rules
        self.now = 0.0
        self.trace: list[str] = []
        self._events: list[tuple[float, float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self.limits = self._draw()
        self.text = TextLoad(self) if rules.text else None
        """What is asked, if the pipeline generates text."""
        if self.text is not None:
            self.limits = replace(self.limits, poison=None, endless=False)
        self.network = Network(self)
        self.threads = Threads(self)
        self.window = 0
        """Largest number of microbatches under way in the epoch that the data rank runs."""
        self.rows: list[int] = []
        """Numbers of the microbatches in the output."""
        self.taken = 0
        """Number of items of requests that were taken."""
        self.failovers = self.switches = self.drops = 0
        self.poisoned = 0
        """Number of processes that have failed because of one microbatch."""
        self._disturbances = 0
        self._opened = 0
        self.processes: dict[int, RankShell] = {}
        """Processes by incarnation."""
        self._ended_at: float | None = None
        self.hub = HubShell(self)
        for rank in range(self.limits.ranks):
            self._start(rank)
        self.data = next(one for one in self.processes.values() if one.rank == self.limits.data_rank)
        """The process that has the ledger of the run."""

    def _draw(self) -> Limits:
        chance = self.chance
        ranks, microbatches = chance.randint(2, 6), chance.randint(1, 30)
        return Limits(
            ranks=ranks,
            microbatches=microbatches,
            data_rank=0 if chance.random() < 0.6 else chance.randrange(ranks),
            goes_on=chance.random() < 0.9,
            changes_little=chance.random() < 0.5,
            order=tuple(chance.sample(range(ranks), ranks)) if chance.random() < 0.5 else None,
            capacity={rank: chance.choice((3, 4, LAYERS)) for rank in range(ranks)},
            disturbances=chance.randint(1, 5),
            changes=chance.choice((0, 1, 3, 6)),
            ambushes=chance.random() < 0.5,
            poison=chance.randrange(microbatches) if chance.random() < 0.05 else None,
            hangs=chance.random() < 0.2,
            endless=chance.random() < 0.3,
        )

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, and all who were waited for have told their figures."""
        if not self.hub.is_over:
            return False
        return self.hub.step is Step.ENDED or self.data.has_summary or not self.data.alive

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
            ViolationError: An invariant does not hold.
        """
        try:
            self._run()
        finally:
            self.threads.kill()
        complete = self.hub.step is Step.COMPLETE
        goes_on = self.limits.goes_on
        return Outcome(complete, self.failovers, self.switches, self.drops, goes_on, tuple(self.trace))

    def _run(self) -> None:
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
                raise ViolationError(f"nobody moves any longer: {self.hub.step.value}")
            try:
                event(*args)
            except ViolationError:
                raise
            except Exception as error:
                raise ViolationError(f"{type(error).__name__}: {error}") from error
            self._check()
        self._check_end()

    def compute_s(self, process: RankShell) -> float:
        """Return the seconds that a stage computes."""
        if self.limits.hangs and self.chance.random() < 0.01:
            process.disturbed = True  # it does not stop either
            return self.chance.choice((3.0, 30.0))
        return self.chance.uniform(0.02, 0.3)

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
        kinds = (self._kill, self._fail, self._pause, self._stop_disk, self._cut, self._start_again)
        disks = 25 if any(process.alive and process.loads for process in self.processes.values()) else 2
        (disturbance,) = self.chance.choices(kinds, (40, 10, 15, disks, 25, 10))
        disturbance()
        if self.chance.random() < 0.2:
            self.after(self.chance.uniform(0.0, 2.0), self.disturb)

    def _victim(self) -> RankShell | None:
        alive = [process for process in self.processes.values() if process.alive and process.rank != 0]
        return self.chance.choice(alive) if alive else None

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
            process.fail(self.chance.choice((None, None, self.chance.randrange(1000))))

    def _pause(self) -> None:
        process = self._victim()
        if process is not None and not process.paused:
            self.note("pause", process.name)
            process.pause()
            self.after(self.chance.choice((0.5, 2.0, 15.0)), process.resume)
            if self.chance.random() < 0.2:
                self.after(self.chance.uniform(0.0, 3.0), self._return, process.rank)

    def _stop_disk(self) -> None:
        """Let a disk answer no longer, for a while or for ever, if possible that of a process that loads."""
        processes = [process for process in self.processes.values() if process.alive and process.rank != 0]
        loading = [process for process in processes if process.loads]
        if processes:
            process = self.chance.choice(loading or processes)
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

    def _start(self, rank: int) -> RankShell:
        self._opened += 1
        process = RankShell(self, rank, self._opened)
        process.disturbed = any(cuts for way, cuts in self.network.cuts.items() if rank in way)
        self.processes[self._opened] = process
        return process

    # -- invariants -------------------------------------------------------------------------------

    def _check(self) -> None:
        step = self.hub.step
        if self._ended_at is None and self.is_over:
            self._ended_at = self.now
        here = [self.processes[number] for number in self.hub.members.values()]
        active = set[int]().union(*(process.active for process in here if process.alive))
        if len(active) > (2 if step in _BESIDE else 1) and not self.hub.is_over:
            raise ViolationError(f"epochs {sorted(active)} are active together")
        under_way = self.data.ledger.under_way
        if under_way > self.window:
            raise ViolationError(f"{under_way} microbatches under way, {self.window} allowed")

    def _check_end(self) -> None:
        limits, step = self.limits, self.hub.step
        if self._ended_at is None:
            raise ViolationError(f"nothing can happen any longer: {step.value}")
        if step is Step.COMPLETE and self.text is not None:
            self.text.check_end()
        elif step is Step.COMPLETE and self.rows != list(range(limits.microbatches)):
            raise ViolationError(f"complete with rows {self.rows} of {limits.microbatches}")
        for process in self.processes.values():
            should_know = process.alive and not process.disturbed and process.began_at <= self._ended_at
            if should_know and not process.knows_end:
                raise ViolationError(f"{process.name} does not know that the run has ended")
