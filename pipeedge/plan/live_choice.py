"""Decide whether a running pipeline should have another plan. Pure: search and costs are passed in.

    WorkWindow ──measured──> Conditions ──ChangeDetector──> nothing has moved: nothing to do
                              │                something has, or hosts have come ──search──> candidates
                              └──history──> throughput of each candidate and of the present plan, under the
                                            conditions of the latest windows ──worth it?──> Proposal

A change has to pay for all of the latest windows together, not for the latest one, and each change doubles
the number of those windows for a while. So a load that comes and goes soon faces the plan that is best for
its mixture, instead of being chased.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeedge.base.wording import figure
from pipeedge.observe.records import HostsAsRun
from pipeedge.plan.change_detection import MANY_WINDOWS, WINDOWS, ChangeDetector, WorkWindow, items_per_s
from pipeedge.plan.conditions import Conditions, HostPair, StepMix, measured
from pipeedge.plan.costs import MomentCosts, PlanCosts
from pipeedge.plan.placing import Placing

__all__ = [
    "CostsOf",
    "CostsOfSteps",
    "LivePlanning",
    "MeasuredGain",
    "Objective",
    "Proposal",
    "Search",
    "moved_words",
]

Search = Callable[[Conditions, frozenset[str], Placing], Placing | None]
"""Returns the best stages for the conditions, on some hosts, that can be loaded beside the present ones."""
CostsOf = Callable[[Sequence[Placing], Placing, Sequence[Conditions]], Sequence[PlanCosts]]
"""Returns what plans cost that are to be loaded beside the present one, as profiled and at some moments."""
CostsOfSteps = Callable[[Placing, StepMix, Sequence[Conditions]], PlanCosts]
"""Returns what a plan of a decoder costs for some steps, as profiled and at some moments."""
_Key = tuple[str, ...]
"""A host, or the two hosts of a link."""

LEAST_GAIN = 0.08
"""Smallest gain that is worth a change, as a fraction. In more than ``MANY_WINDOWS`` windows together a
smaller one can be told from noise, whose mean shrinks with the root of their number."""
HORIZON_S = 600.0
"""Seconds that a run without an end is taken to go on."""
_LOAD_BYTES_PER_S = 100e6
"""Rate at which weights are taken to be loaded; what they cost is a part of what a change has to pay for."""
_SPARE_S = 2.0
"""Seconds that a change has to save at least."""
_KEPT = 240
"""Number of windows for which conditions are remembered."""
_AS_RUN = 60
"""Number of windows of which the speed of hosts is told."""
_REMEMBERED = 3 * _KEPT
"""Number of windows for which a change makes others wait."""
_LIMITED = 0.7
"""Fraction of the throughput that the stages allow, below which the input limits it instead."""
_CANDIDATES = 4
"""Number of plans that are remembered."""
_LOOKED = 8 * WINDOWS
"""Number of windows after a change of hosts during which better plans are searched for."""
_PAID = -0.05
"""Measured gain below which a change is taken back."""


@dataclass(frozen=True)
class Objective:
    """What plans are to make as good as they can."""

    name: str = "throughput"
    """``throughput``, ``latency`` or ``energy``."""
    min_items_per_s: float = 0.0
    """Least throughput where energy is the objective."""

    @property
    def is_rate(self) -> bool:
        """Whether it can be measured as items per second."""
        return self.name == "throughput"

    def merit(self, moment: MomentCosts) -> float:
        """Return how good a plan is then: items a second, or the inverse of seconds or joules."""
        if self.is_rate:
            return moment.items_per_s
        value = moment.joules_per_item if self.name == "energy" else moment.latency_s
        return 0.0 if value is None else 1 / value


@dataclass(frozen=True)
class Proposal:
    """Another plan, and what it promises."""

    stages: Placing
    gain: float
    """Predicted gain in what is the objective, as a fraction."""
    why: str
    """Reason for the change, for the user."""
    items_per_s: float
    """Items per second of the present plan, as measured while the conditions were what they are."""
    conditions: Conditions
    """Conditions that are expected to last."""
    objective: Objective = Objective()
    before: float | None = None
    """Seconds of latency, or joules of an item, of the present plan; None if the objective is another."""


@dataclass(frozen=True)
class MeasuredGain:
    """Gain that a change was predicted to bring, and the measured one."""

    predicted: float
    measured: float


@dataclass(frozen=True)
class _Trial:
    """A change whose gain is not known yet."""

    before: Placing
    items_per_s: float
    predicted: float


class LivePlanning:
    """Watches a run and proposes other plans.

    Args:
        search: Finds the best plan for some conditions.
        costs: Says what plans cost.
        data_host: Host that reads the input and collects the results, or None if that costs nothing.
        costs_of_steps: Says what plans of a decoder cost; None for an encoder.
        objective: What plans are to make as good as they can.
        varying: Whether items differ in size, like sentences.
        outdated: Reason why the present plan may not be the best though nothing has moved, for the user; None
            if it was made for the times that ``costs`` knows.
    """

    def __init__(
        self,
        search: Search,
        costs: CostsOf,
        data_host: str | None = None,
        *,
        costs_of_steps: CostsOfSteps | None = None,
        objective: Objective = Objective(),
        varying: bool = False,
        outdated: str | None = None,
    ) -> None:
        self._outdated = outdated
        self._search = search
        self._costs = costs
        self._data_host = data_host
        self._costs_of_steps = costs_of_steps
        self._objective = objective
        self._varying = varying
        self._profiled: tuple[Placing, PlanCosts] | None = None
        self._reached_at: tuple[int, Placing, float] | None = None
        self._moved_figures: ChangeDetector[_Key] = ChangeDetector()
        self._present: Placing = ()
        self._hosts: frozenset[str] = frozenset()
        self._since_hosts: int | None = None  # windows since the hosts have changed
        self._windows = 0
        self._history: deque[tuple[Conditions, float]] = deque(maxlen=_KEPT)
        self._seen_at: dict[_Key, int] = {}
        self._candidates: deque[Placing] = deque(maxlen=_CANDIDATES)
        self._failed: dict[Placing, int] = {}  # the window in which a plan turned out to be slower
        self._changes: list[int] = []  # windows in which the plan was changed
        self._trial: _Trial | None = None
        self._back: tuple[Placing, float] | None = None  # the plan before, and by how much it was faster
        self._of_present: deque[WorkWindow] = deque(maxlen=MANY_WINDOWS)  # its windows
        self._of_plan = 0  # number of all of its windows
        self._calm: deque[float] = deque(maxlen=MANY_WINDOWS)  # what plans reached while nothing had moved

    # -- events -----------------------------------------------------------------------------------

    def changed(self, proposal: Proposal) -> None:
        """Note that the run follows a proposal from now on."""
        self._changes.append(self._windows)
        self._trial = _Trial(self._present, self._rate(), proposal.gain)
        self._candidates.append(self._present)
        self._restart(proposal.stages)

    def dropped(self) -> None:
        """Note that the run could not follow a proposal; the next one has to wait longer."""
        self._changes.append(self._windows)

    def take(
        self, window: WorkWindow, present: Placing, hosts: frozenset[str], left_items: float | None
    ) -> Proposal | None:
        """Return a plan that is worth a change, or None.

        Args:
            window: What the present plan did.
            present: Stages of the plan that runs.
            hosts: Hosts that may have a part.
            left_items: Items that are still to be computed; None for a run without an end.
        """
        began = self._windows > 0 or self._outdated is not None
        if present != self._present:  # not by a proposal: a rank was lost
            self._trial = None
            self._restart(present)
            self._since_hosts = 0 if began else None
        if hosts != self._hosts:
            self._since_hosts = 0 if began else None
            self._hosts = hosts
        self._note(window)
        waited = self._due()
        if waited is None:
            return self._taken_back()
        self._look(self.expected)
        if self._patience() > WINDOWS:
            self._look(_mean(list(self._recent(self._patience()))))
        return self._best(waited, left_items) or self._taken_back()

    def gain(self) -> MeasuredGain | None:
        """Return what the latest change has brought, once, when that is known."""
        trial = self._trial
        if trial is None or not self.is_settled:
            return None
        if not self._objective.is_rate:  # no window shows it
            self._trial = None
            return None
        found = MeasuredGain(trial.predicted, items_per_s(self._of_present) / trial.items_per_s - 1)
        # A single disturbed window does not take a change back.
        middle = statistics.median(items_per_s([window]) for window in self._of_present)
        is_slower = max(found.measured, middle / trial.items_per_s - 1) < _PAID
        if is_slower and self._is_limit(_LIMITED / 2):
            self._failed[self._present] = self._windows
            self._back = (trial.before, 1 / (1 + found.measured) - 1)
            self._changes.append(self._windows)  # it counts twice
        self._trial = None
        return found

    @property
    def is_settled(self) -> bool:
        """Whether the present plan has run for so long that its conditions are known."""
        return len(self._of_present) >= WINDOWS

    def as_run(self) -> HostsAsRun | None:
        """Return what hosts were like while the present plan ran; None before the first window."""
        windows = min(self._of_plan, _AS_RUN)
        if not windows:
            return None
        seen = [conditions for conditions, _ in self._history][-windows:]
        (costs,) = self._costs([self._present], self._present, seen)
        rates = [moment.items_per_s for moment in costs.moments]
        mean = _mean(seen)
        return HostsAsRun(
            {host: mean.of_host(host) for host in mean.hosts}, statistics.fmean(rates) if all(rates) else None
        )

    @property
    def slowness(self) -> dict[str, float]:
        """Slowness of hosts as measured lately, relative to what all of them have in common, by host."""
        known = self._known(self._moved_figures.measured())
        return {key[0]: value for key, value in known.items() if len(key) == 1}

    @property
    def expected(self) -> Conditions:
        """Conditions to plan for. They are known after the first window."""
        return self._absolute(self._known(self._moved_figures.settled()))

    # -- details ----------------------------------------------------------------------------------

    def _restart(self, present: Placing) -> None:
        self._moved_figures.expect(self._known(self._moved_figures.settled()))
        self._present = present
        self._back = None
        self._of_present.clear()
        self._of_plan = 0
        self._since_hosts = None

    def _note(self, window: WorkWindow) -> None:
        """Note one more window."""
        self._windows += 1
        seen = self._seen(window)
        window = self._comparable(window, seen)
        values: dict[_Key, float] = {(host,): slow / seen.common for host, slow in seen.hosts.items()}
        values |= {pair: slow / seen.common for pair, slow in seen.links.items()}
        self._moved_figures.add(values)
        self._seen_at |= dict.fromkeys(values, self._windows)
        self._history.append((seen, items_per_s([window])))
        self._of_present.append(window)
        self._of_plan += 1
        if self.is_settled and not self._moved_figures.duration:
            self._calm.append(self._reached())
        if self._since_hosts is not None:
            self._since_hosts = self._since_hosts + 1 if self._since_hosts < _LOOKED else None
        forgotten = self._windows - self._memory()
        if forgotten in self._seen_at.values():  # a host without a stage may have recovered
            self._since_hosts = 0

    def _due(self) -> int | None:
        """Return for how many windows something has been other than planned, when it is time to look."""
        for since in (self._moved_figures.duration, self._since_hosts or 0):
            times, rest = divmod(since, WINDOWS)
            if times and not rest and not times & (times - 1):
                return since
        return None

    def _look(self, conditions: Conditions) -> None:
        """Search for one more candidate."""
        found = self._search(conditions, self._hosts, self._present)
        if found is not None and found not in self._candidates:
            self._candidates.append(found)

    def _absolute(self, known: Mapping[_Key, float]) -> Conditions:
        """Return the conditions of hosts and links whose slowness relative to the common one is known."""
        common = self._history[-1][0].common
        return _conditions({key: value * common for key, value in known.items()}, common)

    def _known(self, known: Mapping[_Key, float]) -> dict[_Key, float]:
        """Return what is known of hosts and links, without what was seen too long ago."""
        oldest = self._windows - self._memory()
        return {key: value for key, value in known.items() if self._seen_at.get(key, oldest) > oldest}

    def _recent(self, windows: int) -> Iterator[Conditions]:
        """Yield the conditions of the latest windows.

        What a window did not measure is as in the mean of those windows that did, else as known otherwise.
        What was seen last of a host whose load comes and goes would make it look slow, or quick, throughout.
        """
        latest = list(self._history)[-windows:]
        known = {**self._known(self._moved_figures.settled()), **_mean_slowness([seen for seen, _ in latest])}
        for seen, _ in latest:
            rest = _conditions({key: value * seen.common for key, value in known.items()}, seen.common)
            yield dataclasses.replace(
                seen, hosts={**rest.hosts, **seen.hosts}, links={**rest.links, **seen.links}
            )

    def _recent_changes(self) -> int:
        return sum(at > self._windows - _REMEMBERED for at in self._changes)

    def _patience(self) -> int:
        """Return for how many windows together a change has to pay."""
        return min(_KEPT, WINDOWS << self._recent_changes())

    def _memory(self) -> int:
        """Return for how many windows it is believed that a host without a stage is as it was."""
        return min(_KEPT, _LOOKED << self._recent_changes())

    @property
    def _measured(self) -> Conditions:
        """Conditions of the latest windows."""
        return self._absolute(self._known(self._moved_figures.measured()))

    def _seen(self, window: WorkWindow) -> Conditions:
        """Return the conditions of a window."""
        profiled = self._as_profiled()
        if window.steps is not None and self._costs_of_steps is not None:
            profiled = self._costs_of_steps(self._present, window.steps, [])
        return measured(profiled, window.stages, self._data_host, varying=self._varying)

    def _comparable(self, window: WorkWindow, seen: Conditions) -> WorkWindow:
        """Return a window with figures that can be compared with those of others.

        How many tokens a second a decoder writes depends on how many texts grow, and on their lengths. So
        its windows count as many tokens as it would have written of the texts that the plan is for.
        """
        if window.steps is None or self._costs_of_steps is None:
            return window
        (planned,) = self._costs([self._present], self._present, [seen])
        steps = self._costs_of_steps(self._present, window.steps, [seen])
        factor = planned.moments[0].items_per_s / steps.moments[0].items_per_s
        return dataclasses.replace(window, items=factor * window.items)

    def _as_profiled(self) -> PlanCosts:
        """Return the costs of the present plan as its profiles say."""
        known = self._profiled
        if known is None or known[0] != self._present:
            (costs,) = self._costs([self._present], self._present, [])
            self._profiled = known = (self._present, costs)
        return known[1]

    def _moments(self, windows: int) -> list[Conditions]:
        """Return the conditions under which plans are compared.

        Of many windows together, those are all of them. Of a few windows, the first may only in part have the
        conditions of the others, so that their median counts. What has hardly moved counts as measured here:
        that two hosts are planned as equals does not make them equally fast.
        """
        return list(self._recent(windows)) if windows > WINDOWS else [self._measured]

    def _merits(self, costs: Sequence[PlanCosts]) -> list[float]:
        """Return how good each plan is in the mean of all moments.

        One that is too slow is worth nothing, unless the first one, the present plan, is too slow itself:
        then the fastest one is the best.
        """
        rates = [statistics.fmean(one.items_per_s for one in each.moments) for each in costs]
        least = self._objective.min_items_per_s * (1 - 1e-9)
        if self._objective.is_rate or rates[0] < least:
            return rates
        merits = [statistics.fmean(map(self._objective.merit, each.moments)) for each in costs]
        return [merit if rate >= least else 0.0 for merit, rate in zip(merits, rates, strict=True)]

    def _is_limit(self, least: float = _LIMITED) -> bool:
        """Return whether the stages and links limit the throughput, and not the input.

        Those of a decoder always do while texts grow, and other times are not in its windows.
        """
        return self._costs_of_steps is not None or self._reached() >= least

    def _reached(self) -> float:
        """Return the throughput of the latest windows, as a fraction of what the slowest stage allows."""
        known = self._reached_at
        if known is None or known[:2] != (self._windows, self._present):
            rates = [rate for _, rate in list(self._history)[-WINDOWS:]]
            (costs,) = self._costs([self._present], self._present, list(self._recent(WINDOWS)))
            reached = (rate / moment.items_per_s for rate, moment in zip(rates, costs.moments, strict=True))
            self._reached_at = known = (self._windows, self._present, statistics.median(reached))
        return known[2]

    def _reach(self) -> float:
        """Return what a balanced plan reaches of what its slowest stage allows, compared with the present.

        Where all stages take about as long and microbatches vary, each waits for the others now and then. One
        that has become much slower than the others never does, so that its plan reaches more.
        """
        if not self._calm:
            return 1.0
        return min(1.0, max(_LIMITED, statistics.median(self._calm) / max(self._reached(), _LIMITED)))

    def _best(self, waited: int, left_items: float | None) -> Proposal | None:
        # Where no number has moved, only many windows tell a gain from noise.
        windows = max(waited if self._moved_figures.duration else MANY_WINDOWS, self._patience())
        plans = [self._present, *self._possible()]
        if len(plans) == 1:
            return None
        costs = self._costs(plans, self._present, self._moments(windows))
        now, *merits = self._merits(costs)
        if not now:
            return None
        reach = self._reach() if self._objective.is_rate else 1.0
        least = LEAST_GAIN * min(1.0, math.sqrt(MANY_WINDOWS / windows))
        best: tuple[Proposal, PlanCosts] | None = None
        why = moved_words(self._moved_figures.moved()) or self._outdated or "other hosts are there"
        for stages, its_costs, merit in zip(plans[1:], costs[1:], merits, strict=True):
            gain = reach * merit / now - 1
            if its_costs.fits and gain >= least and (best is None or gain > best[0].gain):
                best = self._proposal(stages, gain, why, 1 / now), its_costs
        if best is None or (self._objective.name != "latency" and not self._is_limit()):
            return None
        rate = statistics.fmean(moment.items_per_s for moment in costs[0].moments)
        return best[0] if self._pays(*best, rate, left_items) else None

    def _possible(self) -> Iterator[Placing]:
        """Yield the candidates whose hosts are there."""
        for stages in self._candidates:
            if stages != self._present and not self._has_failed(stages) and self._are_here(stages):
                yield stages

    def _are_here(self, stages: Placing) -> bool:
        return {stage.host for stage in stages} <= self._hosts

    def _has_failed(self, stages: Placing) -> bool:
        return self._windows - self._failed.get(stages, -_KEPT) < _KEPT

    def _taken_back(self) -> Proposal | None:
        """Return the plan before the present one, if that has turned out to be slower.

        Of two plans that have both turned out to be slower, as a load that comes and goes may make them look,
        the present one stays.
        """
        if self._back is None or self._has_failed(self._back[0]) or not self._are_here(self._back[0]):
            return None
        (costs,) = self._costs([self._back[0]], self._present, [])
        return self._proposal(*self._back, "the last change made the run slower") if costs.fits else None

    def _proposal(self, stages: Placing, gain: float, why: str, before: float | None = None) -> Proposal:
        objective = self._objective
        known = None if objective.is_rate else before
        return Proposal(stages, gain, why, self._rate(), self.expected, objective, known)

    def _rate(self) -> float:
        """Return the items per second of the present plan since the conditions are what they are.

        The first window in which a number has moved may have the new conditions only in part.
        """
        moved = max(WINDOWS, self._moved_figures.duration) - 1
        return items_per_s(list(self._of_present)[-moved:])

    def _pays(
        self, proposal: Proposal, costs: PlanCosts, items_per_s: float, left_items: float | None
    ) -> bool:
        """Return whether a proposal saves more than it costs.

        What is saved is time, if the throughput is the objective. Else the new plan has to run for longer
        than it is loaded.
        """
        left_s = HORIZON_S if left_items is None else left_items / items_per_s
        saved_s = left_s - left_s / (1 + proposal.gain) if self._objective.is_rate else left_s
        load_s = max(stage.load_bytes or 0.0 for stage in costs.schedule) / _LOAD_BYTES_PER_S
        return saved_s > load_s + _SPARE_S


def _conditions(known: Mapping[_Key, float], common: float) -> Conditions:
    hosts = {key[0]: value for key, value in known.items() if len(key) == 1}
    links: dict[HostPair, float] = {(key[0], key[1]): value for key, value in known.items() if len(key) == 2}
    return Conditions(hosts, links, common)


def _mean(seen: Sequence[Conditions]) -> Conditions:
    """Return the mean conditions of several windows that know the same hosts and links."""
    first = seen[-1]
    return Conditions(
        {host: statistics.fmean(one.of_host(host) for one in seen) for host in first.hosts},
        {pair: statistics.fmean(one.links.get(pair, 1.0) for one in seen) for pair in first.links},
        statistics.fmean(one.common for one in seen),
    )


def _mean_slowness(seen: Sequence[Conditions]) -> dict[_Key, float]:
    """Return the mean slowness of each host and link, relative to the common one, where it was measured."""
    values: dict[_Key, list[float]] = {}
    for one in seen:
        for host, slow in one.hosts.items():
            values.setdefault((host,), []).append(slow / one.common)
        for pair, slow in one.links.items():
            values.setdefault(pair, []).append(slow / one.common)
    return {key: statistics.fmean(found) for key, found in values.items()}


def moved_words(moved: Mapping[tuple[str, ...], float]) -> str:
    """Say which hosts, and which links between two, take how many times as long as planned."""
    names = {key: key[0] if len(key) == 1 else f"the link from {key[0]} to {key[1]}" for key in moved}
    return "; ".join(
        f"{names[key]} takes {figure(ratio)} times as long as planned" for key, ratio in sorted(moved.items())
    )
