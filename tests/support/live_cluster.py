"""A pipeline whose hosts change their speed, in simulated time, and an oracle that plans for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from oracles.plan_costs import costs_of, kind_of, period_s

from pipeedge.base.schedule import LayerRange
from pipeedge.plan.change_detection import WorkWindow
from pipeedge.plan.conditions import Conditions, StageFigures
from pipeedge.plan.live_choice import LivePlanning
from pipeedge.plan.placing import PlacedStage, Placing
from pipeedge.plan.problem import HostKind, LayerSizes, Problem

WINDOW_S = 5.0
Slowness = Callable[[float, str], float]
"""Slowness of a host at a time."""


def problem_of(hosts: int, layers: int = 24, *, memory: float = 1e9, layer_s: float = 0.01) -> Problem:
    """Return equal hosts whose links take no time to speak of."""
    kind = HostKind("board", memory, 1e12, time_s=(layer_s,) * layers, dtype="float32")
    return Problem(
        layers=LayerSizes((4e6,) * layers, 1000.0, (1000.0,) * layers, 4.0),
        kinds=(kind,),
        hosts={f"h{number}": "board" for number in range(hosts)},
        batch_size=8.0,
    )


def best_placing(problem: Problem, conditions: Conditions, hosts: Sequence[str]) -> Placing:
    """Return the stages with the shortest period, links aside: a table over sets of hosts and layers."""
    layers = len(problem.layers.elements_out)
    table: dict[tuple[int, int], tuple[float, Placing]] = {(0, 0): (0.0, ())}
    for used in range(1 << len(hosts)):
        for start in range(layers):
            worst, stages = table.get((used, start), (float("inf"), ()))
            for number, host in enumerate(hosts):
                if used >> number & 1 or worst == float("inf"):
                    continue
                times = kind_of(problem, host).time_s
                seconds = 0.0
                for stop in range(start + 1, layers + 1):
                    seconds += times[stop - 1] * conditions.of_host(host)
                    key = (used | 1 << number, stop)
                    cost = max(worst, seconds)
                    if cost < table.get(key, (float("inf"), ()))[0] * (1 - 1e-9):
                        table[key] = (cost, (*stages, PlacedStage(host, LayerRange(start, stop))))
    return min((found for (_, stop), found in table.items() if stop == layers), key=lambda one: one[0])[1]


@dataclass
class LiveCluster:
    """A run over a cluster, one window after the other.

    Args:
        problem: The profiles.
        slowness: How slow each host is at a time.
        noise: Draws the factor by which a measurement is off.
    """

    problem: Problem
    slowness: Slowness
    noise: Callable[[], float] = lambda: 1.0
    switch_s: float = 2.0
    """Seconds of throughput that a change costs."""
    left_items: float | None = None
    present: Placing = ()
    now_s: float = 0.0
    items: float = 0.0
    switches: list[tuple[float, Placing]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hosts = list(self.problem.hosts)
        self.planning = LivePlanning(self.search, costs_of(self.problem))
        self.present = self.present or best_placing(self.problem, Conditions(), self.hosts)

    def search(self, conditions: Conditions, hosts: frozenset[str], present: Placing) -> Placing:
        return best_placing(self.problem, conditions, sorted(hosts))

    def window(self) -> None:
        """Let one window pass, and do what the planning proposes."""
        begun = self.now_s
        steps = 10
        slow = [
            {host: self.slowness(begun + WINDOW_S * step / steps, host) for host in self.hosts}
            for step in range(steps)
        ]
        rates = [self.rate(self.present, now) for now in slow]
        rate = sum(rates) / steps
        figures = []
        for stage in self.present:
            # Weighted by the microbatches of each moment, as counters are.
            mean = sum(now[stage.host] * one for now, one in zip(slow, rates, strict=True)) / sum(rates)
            seconds = sum(kind_of(self.problem, stage.host).time_s[stage.layers.start : stage.layers.stop])
            figures.append(StageFigures(seconds * mean * self.noise() / self.problem.batch_size))
        self.now_s += WINDOW_S
        self.items += rate * WINDOW_S
        self.rates.append(rate)
        window = WorkWindow(0, self.now_s, WINDOW_S, round(rate * WINDOW_S), tuple(figures))
        proposal = self.planning.take(window, self.present, frozenset(self.hosts), self.left_items)
        self.planning.gain()
        if proposal is not None:
            self.planning.changed(proposal)
            self.present = proposal.stages
            self.items -= self.switch_s * rate
            self.rates[-1] -= self.switch_s / WINDOW_S * rate
            self.switches.append((self.now_s, proposal.stages))

    def rate(self, stages: Placing, slow: Mapping[str, float]) -> float:
        return self.problem.batch_size / period_s(self.problem, stages, Conditions(slow))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        while self.now_s < seconds:
            self.window()


def gaussian(seed: int, deviation: float) -> Callable[[], float]:
    """Return noise around 1."""
    random = Random(seed)
    return lambda: max(0.3, random.gauss(1.0, deviation))
