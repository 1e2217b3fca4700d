"""Test the scheduler of steps against a pipeline in memory that looks at every page."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise

import pytest
from effort import cases
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from step_world import LAYERS, StepWorld

from pipeedge.base.errors import InputError
from pipeedge.base.schedule import LayerRange
from pipeedge.decoding.pages import LostLayers, LostPart
from pipeedge.decoding.step_limits import CacheSize, StepLimits
from pipeedge.decoding.step_times import StepTimes
from pipeedge.decoding.steps import DecodingStep, StepScheduler

PAGE = 4
CURVE = StepTimes(((1.0, 10.0), (8.0, 11.0), (32.0, 30.0)))
"""As measured: few rows take as long as one."""
CACHES = (
    CacheSize(pages=12, page=PAGE),
    CacheSize(pages=40, page=PAGE),
    CacheSize(pages=14, window_pages=9, window=6, page=PAGE),
    CacheSize(pages=0, window_pages=7, window=9, page=PAGE),
)


class StepMachine(RuleBasedStateMachine):
    """Sequences come, go on, are cancelled and lose their caches, in any order."""

    @initialize(
        cache=st.sampled_from(CACHES),
        groups=st.integers(1, 5),
        stages=st.integers(1, 5),
        rows=st.integers(2, 12),
        sequences=st.integers(1, 8),
        times=st.sampled_from([StepTimes.linear(0.0), StepTimes.linear(3.0), CURVE]),
        attention=st.sampled_from([0.0, 0.1]),
        proposals=st.sampled_from([0, 3, 9]),
        places=st.sampled_from([0, 1, 3]),
    )
    def begin(self, cache: CacheSize, places: int, **limits: float) -> None:
        self.context = 44
        bounds = StepLimits(context=self.context, **limits)  # type: ignore[arg-type]
        self.world = StepWorld(bounds, cache, places)

    @rule(
        beginning=st.integers(0, 2),
        length=st.integers(1, 30),
        own=st.integers(0, 2),
        most=st.integers(1, 14),
        stops_after=st.integers(1, 20),
    )
    def add(self, beginning: int, length: int, own: int, most: int, stops_after: int) -> None:
        """Add a sequence, of which many begin alike."""
        prompt = [beginning] * length
        prompt[-1] = own
        self.world.add(prompt, most, stops_after)

    @precondition(lambda self: self.world.alive)
    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        numbers = sorted(self.world.alive)
        self.world.cancel(numbers[which % len(numbers)])

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            if not self.world.step() and self.world.flights:
                self.world.finish()

    @precondition(lambda self: self.world.flights)
    @rule()
    def finish(self) -> None:
        self.world.finish()

    @precondition(lambda self: self.world.steps > 10)
    @rule(
        groups=st.integers(1, 5),
        more=st.integers(-4, 4),
        lost=st.none() | st.sets(st.integers(0, LAYERS - 1)),
        left=st.sets(st.integers(1, LAYERS - 1)),
        outputs=st.frozensets(st.integers(1, LAYERS - 1)),
    )
    def restart(
        self, groups: int, more: int, lost: set[int] | None, left: set[int], outputs: frozenset[int]
    ) -> None:
        """Lose caches, all of them or those of some layers, and outputs.

        Other numbers of groups and pages follow, and other outputs are kept.
        """
        limits, cache = self.world.limits, self.world.cache
        pages = max(cache.pages + more, 11) if cache.pages else 0
        limits, cache = replace(limits, groups=groups), replace(cache, pages=pages, outputs=outputs)
        if lost is None:
            self.world.restart(limits, cache)
        else:
            self.world.restart(limits, cache, lost, keeps=True, outputs=left)

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            self.world.check()


TestSteps = StepMachine.TestCase
TestSteps.settings = settings(max_examples=cases(600), stateful_step_count=60, deadline=None)


def crowd(world: StepWorld, source: random.Random, steps: int) -> None:
    """Keep many sequences, which begin alike, going for some steps, some of which are cancelled."""
    room = min(size for size in (world.cache.pages, world.cache.window_pages) if size) * world.cache.page
    while world.steps < steps:
        if len(world.alive) < 12 and source.random() < 0.5:
            length = source.randint(1, min(room, world.limits.context) - 15)
            prompt = [source.randint(0, 1)] * length
            prompt[-1] = source.randint(0, 3)
            world.add(prompt, source.randint(1, 14), source.randint(1, 20))
        if world.alive and source.random() < 0.02:
            world.cancel(source.choice(sorted(world.alive)))
        if source.random() < 0.0005:
            world.restart()
        if source.random() < 0.002:
            lost = source.choice([(), (0,), (1,), (2,), (1, 2), (3,)])
            cuts = frozenset(source.sample(range(1, LAYERS), source.randint(0, 3)))
            kept = replace(world.cache, outputs=cuts)
            world.restart(cache=kept, lost=lost, keeps=True, outputs=source.sample(range(1, LAYERS), 2))
        if (not world.step() or source.random() < 0.2) and world.flights:
            world.finish()
        if world.steps % 50 == 0:
            world.check()


@pytest.mark.parametrize("cache", CACHES)
def test_a_crowd_neither_starves_nor_loses_pages(cache: CacheSize) -> None:
    source = random.Random(11)
    limits = StepLimits(
        context=44,
        groups=3,
        stages=3,
        rows=9,
        sequences=10,
        times=StepTimes.linear(3),
        attention=0.05,
        proposals=6,
    )
    world = StepWorld(limits, cache, places=2)
    crowd(world, source, cases(25_000, part=25))
    world.drain()
    world.check()
    assert world.finished
    scheduler = world.scheduler
    assert scheduler.reused_tokens
    assert 0 < scheduler.accepted_tokens <= world.accepted
    assert scheduler.accepted_tokens < scheduler.proposed_tokens
    draft = scheduler.draft
    assert draft is not None
    assert 0 < draft.accepted_tokens < draft.proposed_tokens < scheduler.proposed_tokens


@pytest.mark.parametrize("cache", [CACHES[1], CACHES[2]])
def test_all_pages_are_free_again_for_others(cache: CacheSize) -> None:
    """After sequences have ended, been cancelled and yielded, as many run together as at the start."""
    world = StepWorld(StepLimits(context=44, groups=2, stages=2, rows=9, sequences=9), cache)
    prompts = [[number] * 5 for number in range(3)]
    for prompt in prompts:
        world.add(prompt, 3, 3)
    world.step()
    together = world.scheduler.running
    crowd(world, random.Random(3), 300)
    for number in sorted(world.alive):
        world.cancel(number)
    world.drain()
    for prompt in prompts:
        world.add(prompt, 3, 3)
    world.step()
    assert world.scheduler.running == together == 3
    world.drain()


@dataclass
class Figures:
    """What a simulated pipeline did."""

    elapsed: float = 0.0
    tokens: dict[int, list[float]] = field(default_factory=dict)
    """Moments at which each sequence got its tokens."""

    @property
    def rate(self) -> float:
        return sum(map(len, self.tokens.values())) / self.elapsed


def simulate(
    stages: int,
    limits: StepLimits,
    sequences: list[tuple[float, int, int]],
    head: float = 0.0,
    loss: float = math.inf,
    lost: int | None = None,
    believed: StepLimits | None = None,
    shares: Sequence[float] = (),
    hop: float = 0.0,
    *,
    learns: bool = True,
    look: float = 0.0,
    held_up: range = range(0),
) -> Figures:
    """Run sequences through a pipeline of stages, whose steps cost what the limits say.

    Args:
        stages: Number of stages.
        limits: Bounds and costs of steps.
        sequences: When each comes, the length of its prompt, and its number of tokens.
        head: Cost of scoring a row.
        loss: Time at which caches are lost, with what is under way.
        lost: Number of stages, from the first, that lose theirs; None for all, which forget what was there.
        believed: What the scheduler takes the limits for; None if it knows them.
        shares: Part of a step's time that each stage takes; by default, all take an equal part.
        hop: Time to the next place and back to the first.
        learns: Whether the scheduler is told the time.
        look: Longest time between two looks at results, so that several come at once.
        held_up: Seconds in which steps begin that take ten times as long.
    """
    shares = shares or [1 / stages] * stages
    cache = CacheSize(pages=10_000)
    scheduler = StepScheduler(believed or limits, cache)
    figures, now, looked, free = Figures(), 0.0, 0.0, [0.0] * (stages + 1)
    chance = random.Random(0)
    coming = deque(
        sorted((when, number, prompt, most) for number, (when, prompt, most) in enumerate(sequences))
    )
    flights: deque[tuple[float, DecodingStep]] = deque()
    while True:
        while coming and coming[0][0] <= now:
            _, number, prompt, most = coming.popleft()
            scheduler.add(number, [number + 1] * prompt, most)
            figures.tokens[number] = []
        while (step := scheduler.next(now if learns else None)) is not None:
            costs = [limits.cost(part.position, len(part.tokens)) for part in step.parts]
            whole = limits.times.of(sum(costs)) - hop * (stages + 1)
            whole *= 10 if int(now) in held_up else 1
            durations = [
                whole * share * (step.layers is None or stage in range(step.layers.start, step.layers.stop))
                for stage, share in enumerate(shares)
            ]
            moment = now
            for place, took in enumerate([*durations, head * sum(part.scored for part in step.parts)]):
                moment = free[place] = max(moment, free[place]) + took
                moment += hop
            looked = max(moment, looked if moment <= looked else moment + look * chance.random())
            flights.append((looked, step))
        moments = [coming[0][0]] if coming else []
        moments += [flights[0][0]] if flights else []
        if not moments:
            figures.elapsed = now
            return figures
        now = min(moments)
        if now >= loss:
            parts = [LostPart(LayerRange(0, lost))] if lost else []
            scheduler.restart(limits, cache, None if lost is None else LostLayers(stages + 1, parts))
            flights.clear()
            now, loss, free = loss, math.inf, [loss] * (stages + 1)
        while flights and flights[0][0] <= now:
            _, step = flights.popleft()
            scored = [part.sequence for part in step.parts if part.scored]
            scheduler.finished(step.number, dict.fromkeys(scored, (0,)), now=now if learns else None)
            for number in scored:
                figures.tokens[number].append(now)


@pytest.mark.parametrize("stages", [2, 3, 4, 7])
def test_stages_multiply_the_rate(stages: int) -> None:
    """With two groups a stage of as many sequences as one host has, p hosts give nearly p times."""
    one = simulate(1, StepLimits(context=400), [(0, 20, 200)] * 8)
    limits = StepLimits(context=400, groups=2 * stages, stages=stages, sequences=999)
    several = simulate(stages, limits, [(0, 20, 200)] * (8 * 2 * stages), head=0.1)
    assert several.rate > 0.95 * stages * one.rate


def test_a_stage_waits_if_there_are_fewer_groups_than_stages() -> None:
    lone, full = (
        simulate(4, StepLimits(context=400, groups=groups, stages=4), [(0, 20, 200)] * 32).rate
        for groups in (1, 5)
    )
    assert full > 2 * lone


def test_a_run_that_was_held_up_goes_on_as_before() -> None:
    """Other work on the hosts, for as long as 100 steps take, must not leave the run with too few groups."""
    times = StepTimes(((1, 1), (8, 4), (32, 8)))
    limits = StepLimits(context=400, groups=8, stages=4, times=times, attention=0)
    load = [(0.0, 4, 300)] * 32
    usual = simulate(4, limits, load)
    for began in (100, 300, 305):
        late = simulate(4, limits, load, held_up=range(began, began + 100))
        assert late.elapsed < usual.elapsed + 300


@pytest.mark.parametrize("look", [5.0, 10.0, 20.0])
def test_results_that_come_at_once_do_not_make_a_place_look_fast(look: float) -> None:
    """Who scores rows may share its processor with a stage, and get to results only when that has ended."""
    times = StepTimes(((1.0, 8.5), (8.0, 11.4), (32.0, 35.0)))
    limits = StepLimits(400, 4, 2, sequences=48, times=times, attention=0.0)
    load = [(0.0, 4, 200)] * 48
    rates = [
        simulate(2, replace(limits, groups=groups), load, learns=False, look=look).rate
        for groups in range(1, 5)
    ]
    assert simulate(2, limits, load, look=look).rate > 0.95 * max(rates)


@given(
    shares=st.lists(st.floats(0.2, 1), min_size=1, max_size=4),
    hop=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    seconds=st.tuples(st.floats(0, 0.3), st.floats(0.01, 4)),
    texts=st.integers(1, 24),
    wrong=st.floats(0.9, 1.1),
)
@settings(max_examples=cases(40), deadline=None)
def test_groups_are_about_the_best_for_unequal_stages_and_slow_links(
    shares: list[float], hop: float, seconds: tuple[float, float], texts: int, wrong: float
) -> None:
    """Compared with every number of groups, though times were measured wrongly."""
    stages, (few, many) = len(shares), seconds
    links = hop * (stages + 1)
    points = ((1.0, 1 + links), (8.0, 1 + few + links), (32.0, 1 + few + many + links))
    limits = StepLimits(2000, 2 * stages, stages, sequences=texts, times=StepTimes(points), attention=0.0)
    load, parts = [(0.0, 8, 400)] * texts, [share / sum(shares) for share in shares]
    best = max(
        simulate(stages, replace(limits, groups=groups), load, shares=parts, hop=hop, learns=False).rate
        for groups in range(1, 2 * stages + 1)
    )
    measured = StepTimes(tuple((cost, wrong * time) for cost, time in points))
    believed = replace(limits, times=measured)
    assert simulate(stages, limits, load, believed=believed, shares=parts, hop=hop).rate >= 0.75 * best


def test_chunks_of_one_prompt_follow_each_other() -> None:
    one = simulate(1, StepLimits(context=2000, rows=256), [(0, 1024, 1)])
    four = simulate(4, StepLimits(context=2000, rows=256, groups=5, stages=4), [(0, 1024, 1)])
    assert four.elapsed <= 0.33 * one.elapsed


@given(
    wrong=st.lists(st.floats(0.85, 1.18), min_size=3, max_size=3),
    attention=st.floats(0, 5e-4),
)
@settings(max_examples=cases(100), deadline=None)
def test_a_noisy_measurement_hardly_lengthens_a_prompt(wrong: list[float], attention: float) -> None:
    """Times of a shape like TinyLlama's in int8, of which one host reads all rows at once."""
    points = ((1.0, 6.5), (8.0, 11.9), (32.0, 33.2))
    limits = StepLimits(context=2000, rows=512, groups=8, stages=4, times=StepTimes(points))
    found = sorted(seconds * factor for (_, seconds), factor in zip(points, wrong, strict=True))
    times = StepTimes(tuple((cost, seconds) for (cost, _), seconds in zip(points, found, strict=True)))
    believed = replace(limits, times=times, attention=attention)
    prompt = [(0.0, 1024, 1)]
    one = simulate(1, replace(limits, groups=1, stages=1), prompt)
    assert simulate(4, limits, prompt, believed=believed).elapsed <= 0.33 * one.elapsed


@pytest.mark.parametrize(("stages", "groups"), [(1, 1), (4, 5)])
def test_a_long_prompt_slows_others_by_a_bounded_factor(stages: int, groups: int) -> None:
    limits = StepLimits(context=5000, groups=groups, stages=stages, rows=128)
    others = [(0.0, 20, 3000)] * 7
    usual = simulate(stages, limits, others)
    pasted = simulate(stages, limits, [*others, (usual.elapsed / 20, 4096, 1)])
    end = pasted.tokens[7][0]
    assert end < usual.elapsed

    def slow_gap(figures: Figures) -> float:
        gaps = [
            after - before
            for number in range(7)
            for before, after in pairwise(figures.tokens[number])
            if usual.elapsed / 20 <= before < end
        ]
        return sorted(gaps)[int(len(gaps) * 0.95)]

    assert slow_gap(pasted) <= limits.slowdown * slow_gap(usual) * 1.02


@pytest.mark.parametrize(("stages", "lost"), [(1, None), (3, None), (2, 2)])
def test_all_go_on_soon_after_a_loss(stages: int, lost: int | None) -> None:
    """Whoever goes on first does not delay the others, beside one prompt of all their tokens."""
    limits = StepLimits(context=5000, groups=1 if stages == 1 else 2 * stages, stages=stages, rows=128)
    usual = simulate(stages, limits, [(0.0, 300, 600)] * 8)
    loss = usual.elapsed / 2
    disturbed = simulate(stages, limits, [(0.0, 300, 600)] * 8, loss=loss, lost=lost)
    tokens = 8 * 300 + sum(moment < loss for times in usual.tokens.values() for moment in times)
    prompt = simulate(stages, replace(limits, context=9999), [(0.0, tokens, 1)]).elapsed
    pauses = [min(moment for moment in times if moment > loss) - loss for times in disturbed.tokens.values()]
    assert max(pauses) <= 1.1 * prompt


@given(
    seed=st.integers(0, 999),
    groups=st.integers(1, 6),
    count=st.integers(1, 20),
    lump=st.sampled_from([20, 900]),
)
@settings(max_examples=cases(200), deadline=None)
def test_groups_take_alike(seed: int, groups: int, count: int, lump: int) -> None:
    """In a steady state, no group costs more than an equal share and one sequence, if it is not alone."""
    limits = StepLimits(context=4000, groups=groups, stages=groups, attention=0.01)
    scheduler = StepScheduler(limits, CacheSize(pages=10_000))
    source = random.Random(seed)
    lengths = {number: source.choice([5, 20, lump]) for number in range(count)}
    for number, length in lengths.items():
        scheduler.add(number, [number] * length, 600)
    flights: deque[DecodingStep] = deque()
    settled = 250
    for _ in range(400):
        while (step := scheduler.next()) is not None:
            flights.append(step)
            lengths |= {part.sequence: part.position for part in step.parts}
            if any(len(part.tokens) > 1 or not part.scored for part in step.parts):
                settled = max(settled, step.number + 50)  # a prompt is computed, a chunk at a time
            if step.number > settled:
                rows = [limits.cost(part.position, 1) for part in step.parts]
                share = sum(limits.cost(position + 1, 1) for position in lengths.values()) / groups
                assert len(rows) == 1 or sum(rows) <= share + max(rows)
        step = flights.popleft()
        scheduler.finished(step.number, {part.sequence: (0,) for part in step.parts if part.scored})
        assert step.number < 250 or len(flights) >= min(groups, count) - 1, "a group is missing"


@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    lengths=st.lists(st.integers(1, 5), min_size=30, max_size=30),
    attention=st.sampled_from([0.0, 1e-4, 1e-3, 3e-3]),
)
@example(sizes=[3, 5], lengths=[1] * 30, attention=1e-4)
@example(sizes=[1, 3, 5, 4], lengths=[1] * 30, attention=3e-3)
@settings(max_examples=cases(200), deadline=None)
def test_groups_of_unequal_size_are_soon_equal(
    sizes: list[int], lengths: list[int], attention: float
) -> None:
    """However many texts the groups begin with, none keeps two more than another."""
    groups, count = len(sizes), sum(sizes)
    limits = StepLimits(
        context=2000, groups=groups, stages=groups, times=StepTimes.linear(0.1), attention=attention
    )
    scheduler = StepScheduler(limits, CacheSize(pages=10_000))
    flights: deque[DecodingStep] = deque()
    numbers = iter(range(count))
    for size in sizes:
        for number in islice(numbers, size):
            scheduler.add(number, [number] * lengths[number], 1500)
        step = scheduler.next()
        assert step is not None
        flights.append(step)
    rows: list[int] = []
    for _ in range(50 * groups):
        step = flights.popleft()
        scheduler.finished(step.number, {part.sequence: (0,) for part in step.parts if part.scored})
        while (step := scheduler.next()) is not None:
            flights.append(step)
            rows.append(step.rows)
    settled = rows[-20 * groups :]
    assert max(settled) - min(settled) <= (count % groups > 0)


def test_equal_beginnings_are_computed_once() -> None:
    scheduler = StepScheduler(StepLimits(context=400, rows=64, groups=3, stages=3), CacheSize(pages=40))
    system = list(range(100))
    for number in range(3):
        scheduler.add(number, [*system, number], 2)
    rows = 0
    flights: deque[DecodingStep] = deque()
    for _ in range(20):
        while (step := scheduler.next()) is not None:
            flights.append(step)
            rows += step.rows
        if flights:
            step = flights.popleft()
            scheduler.finished(step.number, {part.sequence: (0,) for part in step.parts if part.scored})
    assert scheduler.running == scheduler.waiting == 0
    assert rows <= 101 + 2 * (101 - 96) + 3  # three whole pages of two sequences are not computed
    assert scheduler.reused_tokens == 2 * 96
    assert scheduler.kept_pages == 3


def test_unused_beginnings_give_way_to_others_the_least_recently_used_first() -> None:
    scheduler = StepScheduler(StepLimits(context=64), CacheSize(pages=6, page=4))

    def rows_of(number: int, prompt: list[int]) -> int:
        scheduler.add(number, prompt, 1)
        rows = 0
        while (step := scheduler.next()) is not None:
            rows += step.rows
            scheduler.finished(step.number, {part.sequence: (0,) for part in step.parts if part.scored})
        return rows

    first, second, third = ([token] * 9 for token in (1, 2, 3))  # two full pages each
    assert [rows_of(0, first), rows_of(1, second)] == [9, 9]
    assert rows_of(2, first) == 1
    assert rows_of(3, third) == 9  # takes the place of the second
    assert rows_of(4, first) == 1
    assert rows_of(5, second) == 5  # of which one page was needed, the later one


@pytest.mark.parametrize(
    ("prompt", "most", "cache", "message"),
    [
        (0, 5, CacheSize(pages=9), "no tokens"),
        (30, 90, CacheSize(pages=9), "longer than the context of 100"),
        (30, 40, CacheSize(pages=2), "longer than the cache, which holds 64"),
        (30, 40, CacheSize(pages=9, window_pages=1, window=40), "cache of windows"),
    ],
)
def test_what_can_never_run_is_refused(prompt: int, most: int, cache: CacheSize, message: str) -> None:
    scheduler = StepScheduler(StepLimits(context=100), cache)
    with pytest.raises(InputError, match=message):
        scheduler.add(0, [1] * prompt, most)


@given(
    cost=st.floats(0, 500),
    position=st.integers(0, 5000),
    attention=st.sampled_from([0.0, 1e-4, 0.02]),
    reading=st.sampled_from([0.0, 1e-2]),
)
def test_rows_for_a_cost_are_as_many_as_it_pays(
    cost: float, position: int, attention: float, reading: float
) -> None:
    limits = StepLimits(context=9000, attention=attention, reading=reading)
    rows = limits.rows_for(cost, position)
    assert rows == 0 or limits.cost(position, rows) <= cost + 1e-6
    assert limits.cost(position, rows + 1) > cost - 1e-6


def test_a_text_waits_until_there_is_room_beside_the_prompts_of_others() -> None:
    """Two prompts come at once, and the pages are those of one text: nobody yields."""
    world = StepWorld(StepLimits(context=40, rows=8), CacheSize(pages=10, page=PAGE))
    for first in (1, 2):
        world.add([first] * 24, 16, 16)
    world.step()
    assert (world.scheduler.running, world.scheduler.waiting) == (1, 1)
    world.drain()
    assert world.scheduler.yields == 0


def test_a_sequence_that_waited_for_pages_runs_once_it_is_alone() -> None:
    scheduler = StepScheduler(StepLimits(context=40), CacheSize(pages=2, page=PAGE))
    for number in range(2):
        scheduler.add(number, [number] * (PAGE + 1), 1)
    for number in range(2):
        step = scheduler.next()
        assert step is not None
        assert [part.sequence for part in step.parts] == [number]
        scheduler.finished(step.number, {number: [1]})
