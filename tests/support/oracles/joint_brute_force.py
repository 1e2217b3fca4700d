"""Joint plans by brute force: every microbatch size, cut, order of hosts, number type and width of a case.

It shares no code with the scheduler: costs are added up here as docs/scheduler.md states them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 2}
SIXTY_FOURTH = 1 / 64
"""Losses are multiples, so that sums are exact and a budget can be met exactly."""


@dataclass(frozen=True)
class Profile:
    """Costs on one kind of device in one setting, of each layer."""

    time: list[float]
    weights: list[float]
    activations: list[float]
    receive: list[float]
    send: list[float]
    loss: list[float]
    feed: float
    collect: float
    overhead: float = 0.0
    input_send: float = 0.0
    output_receive: float = 0.0


@dataclass(frozen=True)
class Case:
    """A small problem."""

    layers: int
    elements: list[float]
    """Elements at each cut, from the input to the output."""
    hosts: dict[str, int]
    """Kind of each host."""
    memory: list[float]
    bandwidth: list[float]
    links: dict[tuple[str, str], tuple[float, float]]
    data_host: str | None
    profiles: dict[tuple[int, str], dict[int, Profile]]
    """By microbatch size and number type, then by kind."""
    widths: dict[int, list[float] | None]
    """Losses of bits at each cut between two layers; infinite where not allowed."""
    max_loss: float
    max_latency: float
    objective: str
    """What is made small: the period of an item (``throughput``), ``latency`` or ``energy``."""
    busy: dict[tuple[int, str, int], float]
    """Watts of a busy host, by microbatch size, number type and kind."""
    idle: list[float]
    """Watts of an idle host, by kind."""
    least_rate: float
    """Least items per second where energy is the objective."""
    buffers: tuple[int, int] = (2, 1)
    waiting: Mapping[int, float] = field(default_factory=dict)
    """How many times as long the period is as its longest part, by microbatch size; 1 for others."""

    def to_json(self) -> dict[str, Any]:
        """Return the problem as ``sched-pipeline --plan auto --problem`` reads it."""
        return {
            "settings": [self._setting(size, dtype, kinds) for (size, dtype), kinds in self.profiles.items()],
            "widths": [
                {"bits": bits, "loss": losses and [_finite(loss) for loss in losses]}
                for bits, losses in self.widths.items()
            ],
            "links": self._links_between_settings(),
            "max_loss": _finite(self.max_loss),
            "max_latency_s": _finite(self.max_latency),
        }

    def _links_between_settings(self) -> list[dict[str, Any]]:
        """Return the links between profiled hosts that no setting has both of."""
        together = [
            {host for host, kind in self.hosts.items() if kind in kinds or host == self.data_host}
            for kinds in self.profiles.values()
        ]
        return [
            {"from": a, "to": b, "bw_bytes_per_s": bandwidth, "latency_s": latency}
            for (a, b), (bandwidth, latency) in self.links.items()
            if {a, b} <= set().union(*together) and not any({a, b} <= hosts for hosts in together)
        ]

    def options(self) -> list[str]:
        """Return the options of ``sched-pipeline`` that belong to the problem."""
        found = [f"--objective={self.objective}"]
        if self.objective == "energy" and self.least_rate:
            found.append(f"--min-throughput={self.least_rate!r}")
        return found

    def _setting(self, size: int, dtype: str, kinds: dict[int, Profile]) -> dict[str, Any]:
        hosts = {name: kind for name, kind in self.hosts.items() if kind in kinds or name == self.data_host}
        types = [
            {
                "name": f"k{kind}",
                "mem_bytes": self.memory[kind],
                "bw_bytes_per_s": self.bandwidth[kind],
                "time_s": profile.time,
                "weight_bytes": profile.weights,
                "activation_bytes": profile.activations,
                "receive_s": profile.receive,
                "send_s": profile.send,
                "loss": profile.loss,
                "overhead_s": profile.overhead,
                "feed_s": profile.feed,
                "collect_s": profile.collect,
                "input_send_s": profile.input_send,
                "output_receive_s": profile.output_receive,
                **self._watts(size, dtype, kind),
            }
            for kind, profile in kinds.items()
        ]
        types += [
            {
                "name": f"k{kind}",
                "mem_bytes": 0,
                "bw_bytes_per_s": self.bandwidth[kind],
                "stage_s": [[None] * (self.layers - first) for first in range(self.layers)],
                **self._watts(size, dtype, kind),
            }
            for kind in sorted(set(hosts.values()) - set(kinds))
        ]
        return {
            "dtype": dtype,
            "batch_size": size,
            "element_bytes": ELEMENT_BYTES[dtype],
            **({"waiting": self.waiting[size]} if size in self.waiting else {}),
            "elements_in": self.elements[0],
            "elements_out": self.elements[1:],
            "output_bytes": self.elements[-1] * 4,
            "weight_bytes": [0.0] * self.layers,
            "buffers_in": self.buffers[0],
            "buffers_out": self.buffers[1],
            "types": types,
            "hosts": [{"name": name, "type": f"k{kind}"} for name, kind in hosts.items()],
            "links": [
                {"from": a, "to": b, "bw_bytes_per_s": bandwidth, "latency_s": latency}
                for (a, b), (bandwidth, latency) in self.links.items()
                if a in hosts and b in hosts
            ],
            "data_host": self.data_host,
        }

    def _watts(self, size: int, dtype: str, kind: int) -> dict[str, float]:
        return {"busy_w": self.busy[size, dtype, kind], "idle_w": self.idle[kind]}


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


@dataclass
class Best:
    """The best plan of a case."""

    objective: float = math.inf
    count: int = 0
    """Number of plans that keep all limits."""


@dataclass(frozen=True)
class Stage:
    """A stage of a plan."""

    host: str
    first: int
    last: int
    dtype: str
    bits: int = 0
    """Of the link behind it."""


@dataclass
class Costs:
    """Costs of a plan; infinite where it is not possible."""

    period: float
    latency: float
    loss: float
    work: tuple[tuple[str, float, float], ...] = ()
    """Host, watts and seconds of everything that is computed."""

    def joules(self, case: Case) -> float:
        """Return the energy of a microbatch on the hosts that are on."""
        on = {host for host, _, _ in self.work} | ({case.data_host} if case.data_host else set())
        total = sum(watts * seconds for _, watts, seconds in self.work)
        for host in on:
            waits = self.period - sum(seconds for other, _, seconds in self.work if other == host)
            total += waits * case.idle[case.hosts[host]]
        return total


@dataclass(frozen=True)
class _DataWork:
    """What the data rank itself does for a microbatch, in seconds: the most of any number type."""

    feed: float
    collect: float
    both: float
    input_send: float
    output_receive: float

    def beside(self, first_here: bool, last_here: bool) -> float:
        """Return all of it; the stages at both ends are on its host or not."""
        return self.both + (0 if first_here else self.input_send) + (0 if last_here else self.output_receive)


@dataclass
class _World:
    case: Case
    size: int
    kinds: dict[str, dict[int, Profile]] = field(init=False)
    work: _DataWork = field(init=False)
    known_stages: dict[tuple[str, int, int, str, str], tuple[float, float, float]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.kinds = {
            dtype: kinds for (size, dtype), kinds in self.case.profiles.items() if size == self.size
        }
        self.work = self._data_work()

    def seconds(self, a: str | None, b: str | None, nbytes: float) -> float:
        if a is None or b is None or a == b:
            return 0.0
        links, bandwidth = self.case.links, self.case.bandwidth
        default = (min(bandwidth[self.case.hosts[a]], bandwidth[self.case.hosts[b]]), 0.0)
        rate, wait = links.get((a, b), links.get((b, a), default))
        if nbytes == 0:
            return wait
        return nbytes / rate + wait if rate > 0 else math.inf

    def cut_bytes(self, cut: int, dtype: str) -> float:
        width = 4 if cut == self.case.layers else ELEMENT_BYTES[dtype]
        return self.case.elements[cut] * self.size * width

    def _data_work(self) -> _DataWork:
        data = self.case.data_host
        known = [
            kinds[self.case.hosts[data]]
            for kinds in self.kinds.values()
            if data is not None and self.case.hosts[data] in kinds
        ]
        return _DataWork(
            feed=max((each.feed for each in known), default=0.0),
            collect=max((each.collect for each in known), default=0.0),
            both=max((each.feed + each.collect for each in known), default=0.0),
            input_send=max((each.input_send for each in known), default=0.0),
            output_receive=max((each.output_receive for each in known), default=0.0),
        )

    def data_watts(self) -> float:
        """Return the watts of the data host while it does its own work."""
        kind = self.case.hosts[self.case.data_host or ""]
        return max(self.case.busy[self.size, dtype, kind] for dtype in self.kinds)

    def nothing(self) -> Costs:
        """Return the costs of a plan without stages."""
        data = self.case.data_host
        if data is None:
            return Costs(0.0, 0.0, 0.0)
        return Costs(0.0, 0.0, 0.0, ((data, self.data_watts(), self.work.both),))

    def stage(self, stage: Stage, dtype_before: str) -> tuple[float, float, float]:
        """Seconds without and with the data rank's work, and the loss; infinite if it does not fit."""
        key = (stage.host, stage.first, stage.last, stage.dtype, dtype_before)
        if key not in self.known_stages:
            self.known_stages[key] = self._stage(stage, dtype_before)
        return self.known_stages[key]

    def _stage(self, stage: Stage, dtype_before: str) -> tuple[float, float, float]:
        case, kind = self.case, self.case.hosts[stage.host]
        profile = self.kinds[stage.dtype].get(kind)
        if profile is None:
            return math.inf, math.inf, math.inf
        layers = slice(stage.first, stage.last)
        need = sum(profile.weights[layers]) + max(profile.activations[layers])
        need += case.buffers[0] * self.cut_bytes(stage.first, dtype_before)
        need += case.buffers[1] * self.cut_bytes(stage.last, stage.dtype)
        if need > case.memory[kind] * (1 + 1e-9):
            return math.inf, math.inf, math.inf
        seconds = profile.overhead + sum(profile.time[layers])
        if stage.first > 0 or case.data_host not in (None, stage.host):
            seconds += profile.receive[stage.first]
        if stage.last < case.layers or case.data_host not in (None, stage.host):
            seconds += profile.send[stage.last - 1]
        busy = seconds
        if stage.host == case.data_host:
            busy += self.work.beside(stage.first == 0, stage.last == case.layers)
        return seconds, busy, sum(profile.loss[layers])

    def link(self, before: Stage, host: str) -> tuple[float, float]:
        """Seconds and loss of the link from a stage to another one."""
        nbytes = self.cut_bytes(before.last, before.dtype)
        losses = self.case.widths[before.bits]
        if before.bits:
            nbytes *= before.bits / (8 * ELEMENT_BYTES[before.dtype])
        return self.seconds(before.host, host, nbytes), losses[before.last - 1] if losses else 0.0


def costs_of(case: Case, size: int, stages: list[Stage]) -> Costs:
    """Return the costs of a plan."""
    world = _World(case, size)
    total = world.nothing()
    before: Stage | None = None
    for stage in stages:
        _add(total, world, before, stage)
        before = stage
    assert before is not None
    _end(total, world, before)
    return total


def _add(total: Costs, world: _World, before: Stage | None, stage: Stage) -> None:
    if before is None:
        link = world.seconds(world.case.data_host, stage.host, world.cut_bytes(0, stage.dtype))
        loss = 0.0
        _add_data_work(total, world, stage.host, world.work.feed, world.work.input_send)
    else:
        link, loss = world.link(before, stage.host)
    seconds, busy, own_loss = world.stage(stage, stage.dtype if before is None else before.dtype)
    total.period = max(total.period, link, busy)
    total.latency += link + seconds
    total.loss += loss + own_loss
    watts = world.case.busy.get((world.size, stage.dtype, world.case.hosts[stage.host]), 0.0)
    total.work += ((stage.host, watts, seconds),)


def _add_data_work(total: Costs, world: _World, host: str, seconds: float, link_s: float) -> None:
    """Add what the data rank does at one end of the pipeline, whose stage is on ``host``."""
    data = world.case.data_host
    if data not in (None, host):
        seconds += link_s
        total.work += ((str(data), world.data_watts(), link_s),)
    total.period = max(total.period, seconds)


def _end(total: Costs, world: _World, last: Stage) -> None:
    _add_data_work(total, world, last.host, world.work.collect, world.work.output_receive)
    link = world.seconds(last.host, world.case.data_host, world.cut_bytes(world.case.layers, last.dtype))
    total.period = max(total.period, link) * world.case.waiting.get(world.size, 1.0)
    total.latency += link


def objective_of(case: Case, size: int, total: Costs) -> float:
    """Return what the case wants to be small; infinite where the throughput is too low."""
    if case.objective == "latency":
        return total.latency
    if case.objective == "throughput":
        return total.period / size
    slow = size < case.least_rate * total.period * (1 - 1e-9)
    return math.inf if slow else total.joules(case) / size


def find_best(case: Case) -> Best:
    """Return the best objective over all plans that keep the limits."""
    best = Best()
    for size in sorted({size for size, _ in case.profiles}):
        world = _World(case, size)
        for total in _plans(world, world.nothing(), None, frozenset()):
            if total.loss > case.max_loss or total.latency > case.max_latency * (1 + 1e-9):
                continue
            objective = objective_of(case, size, total)
            if math.isfinite(objective):
                best.count += 1
                best.objective = min(best.objective, objective)
    return best


def _plans(world: _World, so_far: Costs, before: Stage | None, used: frozenset[str]) -> Iterator[Costs]:
    first = 0 if before is None else before.last
    for host in world.case.hosts:
        if host in used:
            continue
        for dtype in world.kinds:
            for last in range(first + 1, world.case.layers + 1):
                done = last == world.case.layers
                for bits in (0,) if done else world.case.widths:
                    if bits >= 8 * ELEMENT_BYTES[dtype]:
                        continue
                    stage = Stage(host, first, last, dtype, bits)
                    total = Costs(so_far.period, so_far.latency, so_far.loss, so_far.work)
                    _add(total, world, before, stage)
                    if total.loss > world.case.max_loss or math.isinf(total.loss + total.latency):
                        continue
                    if done:
                        _end(total, world, stage)
                        yield total
                    else:
                        yield from _plans(world, total, stage, used | {host})


def random_case(rng: np.random.Generator) -> Case:
    """Return a random small case; about one in six has no plan."""
    layers = int(rng.choice([1, 2, 3, 4, 5], p=[0.05, 0.25, 0.35, 0.3, 0.05]))
    kinds = int(rng.integers(1, 4))
    names = [f"h{number}" for number in range(int(rng.choice([1, 2, 3, 4], p=[0.15, 0.4, 0.4, 0.05])))]
    several = int(rng.choice([1, 2, 3], p=[0.3, 0.5, 0.2]))
    dtypes = sorted(map(str, rng.choice(list(ELEMENT_BYTES), size=several, replace=False)))
    sizes = [int(size) for size in rng.choice([1, 2, 4], size=int(rng.integers(1, 3)), replace=False)]
    hosts = {name: int(rng.integers(kinds)) for name in names}
    data_host = str(rng.choice(names)) if rng.random() < 0.5 else None
    links = {
        (a, b): (float(rng.choice([0, 10, 40, 160])), float(rng.choice([0, 0.1])))
        for a in names
        for b in names
        if a != b and rng.random() < 0.15
    }
    speed = rng.uniform(0.3, 2, size=kinds)
    faster = dict(zip(ELEMENT_BYTES, (1.0, 0.7, 0.45), strict=True))
    lossy = dict(zip(ELEMENT_BYTES, (0, 1, 3), strict=True))
    present = rng.random() < 0.7

    def profile(kind: int, size: int, dtype: str) -> Profile:
        def some(low: float, high: float, chance: float) -> list[float]:
            return [float(value) for value in rng.uniform(low, high, size=layers) * (rng.random() < chance)]

        own = rng.spawn(1)[0]  # leaves the other numbers of each seed as they were
        scale = float(speed[kind] * faster[dtype] * (size + 0.5))
        return Profile(
            time=[float(value) * scale for value in rng.uniform(0.2, 1, size=layers)],
            weights=[float(value) * ELEMENT_BYTES[dtype] for value in rng.uniform(1, 20, size=layers)],
            activations=some(0, 20, 0.3),
            receive=some(0, 0.2, 0.4),
            send=some(0, 0.2, 0.4),
            loss=[float(value) * SIXTY_FOURTH for value in rng.integers(0, lossy[dtype] + 1, size=layers)],
            feed=float(rng.uniform(0, 1)) * (rng.random() < 0.4),
            collect=float(rng.uniform(0, 0.3)) * (rng.random() < 0.4),
            overhead=float(own.uniform(0, 0.2)) * (own.random() < 0.4),
        )

    profiles: dict[tuple[int, str], dict[int, Profile]] = {}
    for size in sizes:
        for dtype in dtypes:
            made = {
                kind: profile(kind, size, dtype) for kind in range(kinds) if present or rng.random() < 0.7
            }
            if any(kind in made for kind in hosts.values()):
                profiles[size, dtype] = made
    if not profiles:
        profiles[sizes[0], dtypes[0]] = {kind: profile(kind, sizes[0], dtypes[0]) for kind in range(kinds)}

    widths: dict[int, list[float] | None] = {0: None}
    for bits, worst in ((16, 1), (8, 3), (4, 8)):
        if rng.random() < 0.4:
            losses = [float(value) * SIXTY_FOURTH for value in rng.integers(0, worst + 1, size=layers - 1)]
            widths[bits] = [math.inf if rng.random() < 0.1 else loss for loss in losses]
    if len(widths) > 1 and rng.random() < 0.2:
        del widths[0]
    tight = rng.random() < 0.4
    case = Case(
        layers=layers,
        elements=[float(value) for value in rng.integers(0, 12, size=layers + 1)],
        hosts=hosts,
        memory=[float(rng.uniform(60, 300)) if tight else 1e6 for _ in range(kinds)],
        bandwidth=[float(rng.choice([5, 20, 80, 320])) for _ in range(kinds)],
        links=links,
        data_host=data_host,
        profiles=profiles,
        widths=widths,
        max_loss=float(rng.integers(0, 12)) * SIXTY_FOURTH if rng.random() < 0.8 else math.inf,
        max_latency=float(rng.uniform(1, 12)) if rng.random() < 0.4 else math.inf,
        objective="latency" if rng.random() < 0.4 else "throughput",
        busy={},
        idle=[],
        least_rate=0.0,
    )
    return _with_waiting(_with_data_links(_with_power(case, kinds, rng), rng), rng)


def _with_waiting(case: Case, rng: np.random.Generator) -> Case:
    """Return the case with microbatches that wait for others, in some sizes of some cases."""
    some = {size for size, _ in case.profiles if rng.random() < 0.3}
    return replace(case, waiting={size: float(rng.uniform(1, 1.5)) for size in sorted(some)})


def _with_data_links(case: Case, rng: np.random.Generator) -> Case:
    """Return the case with what the data rank spends on its links; a third of the profiles do not know it."""

    def linked(profile: Profile) -> Profile:
        send, receive = (float(rng.uniform(0, 0.8)) * (rng.random() < 0.8) for _ in range(2))
        return replace(profile, input_send=send, output_receive=receive)

    def known(profiles: dict[int, Profile]) -> dict[int, Profile]:
        return {
            kind: linked(profile) if rng.random() < 0.7 else profile for kind, profile in profiles.items()
        }

    return replace(case, profiles={key: known(kinds) for key, kinds in case.profiles.items()})


def _with_power(case: Case, kinds: int, rng: np.random.Generator) -> Case:
    """Return the case with watts; about two in five want the least energy."""
    # Some hosts take nothing while they wait, others as much as when they compute.
    idle = [float(rng.uniform(0, 8)) * (rng.random() < 0.8) for _ in range(kinds)]
    busy = {
        (size, dtype, kind): idle[kind] + float(rng.uniform(0, 20)) * (rng.random() < 0.9)
        for size, dtype in case.profiles
        for kind in range(kinds)
    }
    return replace(
        case,
        busy=busy,
        idle=idle,
        objective="energy" if rng.random() < 0.4 else case.objective,
        least_rate=float(rng.uniform(0.1, 1.5)) * (rng.random() < 0.5),
    )
