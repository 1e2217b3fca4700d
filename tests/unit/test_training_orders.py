"""Test orders: the drawn ones, and properties of all, by an interpreter of dependencies."""

from __future__ import annotations

import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.errors import ScheduleError
from pipeedge.train.orders import SCHEDULES, Action, Operation, Order, bubble, make_order, simulate

DRAWN = {
    "gpipe": (
        "F0 F1 F2 F3 .. .. .. B0 B0 B1 B1 B2 B2 B3 B3",
        ".. F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3",
    ),
    "1f1b": (
        "F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 .. B3 B3",
        ".. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3",
    ),
    "staggered": (
        "F0 F1 F2 .. B0 B0 F3 B1 B1 .. B2 B2 .. B3 B3",
        ".. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3",
    ),
    "zero-bubble": (
        "F0 F1 .. I0 W0 I1 F2 W1 F3 I2 W2 I3 W3",
        ".. F0 I0 F1 I1 W0 W1 F2 I2 F3 I3 W2 W3",
    ),
}
"""Drawings at the top of the module: two workers with one stage each, four microbatches."""


def drawing(order: Order) -> tuple[str, ...]:
    def row(worker: int) -> str:
        cells: list[str] = []
        for timed in simulate(order, lambda action: 2 if action.kind is Operation.BACKWARD else 1)[worker]:
            cells += [".."] * (int(timed.start_s) - len(cells))
            name = f"{timed.action.kind.value}{timed.action.microbatch}"
            cells += [name] * int(timed.end_s - timed.start_s)
        return " ".join(cells)

    return tuple(row(worker) for worker in range(order.workers))


@pytest.mark.parametrize("schedule", DRAWN)
def test_the_drawings_match_the_orders(schedule: str) -> None:
    assert drawing(make_order(schedule, stages=2, workers=2, microbatches=4)) == DRAWN[schedule]


def run_in_turns(order: Order) -> None:
    """Run every worker as far as its dependencies allow, and check that all reach their end."""
    done: set[tuple[str, int, int]] = set()
    left = [list(actions) for actions in order.actions]
    last = order.stages - 1
    progress = True
    while progress:
        progress = False
        for actions in left:
            while actions:
                action = actions[0]
                stage, number, kind = action.stage, action.microbatch, action.kind.value
                if kind == "F":
                    ready = stage == 0 or ("F", stage - 1, number) in done
                elif kind == "W":
                    ready = ("I", stage, number) in done
                else:
                    behind = {("B", stage + 1, number), ("I", stage + 1, number)}
                    ready = ("F", stage, number) in done and (stage == last or bool(behind & done))
                if not ready:
                    break
                assert (kind, stage, number) not in done, f"{action} is done twice"
                done.add((kind, stage, number))
                actions.pop(0)
                progress = True
    assert not any(left), f"stuck at {[str(actions[0]) for actions in left if actions]}"


@st.composite
def numbers(draw: st.DrawFn) -> tuple[str, int, int, int]:
    schedule = draw(st.sampled_from([name for name in SCHEDULES if name != "sequential"]))
    workers = draw(st.integers(1, 5))
    if schedule == "interleaved":
        return schedule, workers * draw(st.integers(2, 4)), workers, workers * draw(st.integers(1, 4))
    return schedule, workers + draw(st.integers(0, 6)), workers, workers + draw(st.integers(0, 12))


@given(numbers())
@settings(max_examples=cases(150))
def test_any_order_does_everything_once_without_deadlock(case: tuple[str, int, int, int]) -> None:
    schedule, stages, workers, microbatches = case
    order = make_order(schedule, stages=stages, workers=workers, microbatches=microbatches)
    run_in_turns(order)
    kinds = "FIW" if schedule == "zero-bubble" else "FB"
    wanted = {
        Action(stage, Operation(kind), number)
        for stage in range(stages)
        for kind in kinds
        for number in range(microbatches)
    }
    found = [action for actions in order.actions for action in actions]
    assert len(found) == len(wanted)
    assert set(found) == wanted
    for worker, actions in enumerate(order.actions):
        assert {order.placement[action.stage] for action in actions} == {worker}
    assert 0 <= bubble(order) < 1


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 20))
@settings(max_examples=cases(60))
def test_held_microbatches_and_bubble_match_the_formulas(workers: int, more_stages: int, more: int) -> None:
    """GPipe holds all microbatches, 1F1B as many as there are workers behind; both wait (W - 1) / (M + W - 1)
    of the time; zero-bubble holds as many as there are workers, and waits no longer."""
    stages, microbatches = workers + more_stages, workers + more

    def order(schedule: str) -> Order:
        return make_order(schedule, stages=stages, workers=workers, microbatches=microbatches)

    wait = (workers - 1) / (microbatches + workers - 1)
    assert [order("gpipe").held(worker) for worker in range(workers)] == [microbatches] * workers
    assert [order("1f1b").held(w) for w in range(workers)] == [workers - w for w in range(workers)]
    assert [order("staggered").held(w) for w in range(workers)] == [
        min(microbatches, 2 * (workers - w) - 1) for w in range(workers)
    ]
    assert max(order("zero-bubble").held(worker) for worker in range(workers)) <= workers
    for schedule in ("gpipe", "1f1b"):
        assert bubble(order(schedule)) == pytest.approx(wait)
    assert bubble(order("staggered")) <= wait + 1e-9
    assert bubble(order("zero-bubble")) <= wait + 1e-9


def test_interleaving_divides_the_bubble_by_the_rounds() -> None:
    """(W - 1) / (v M + W - 1), arXiv:2104.04473, section 2.2."""
    for workers, rounds, microbatches in ((2, 2, 16), (4, 2, 16), (4, 3, 8), (3, 4, 9)):
        order = make_order("interleaved", stages=workers * rounds, workers=workers, microbatches=microbatches)
        assert bubble(order) == pytest.approx((workers - 1) / (rounds * microbatches + workers - 1))


@pytest.mark.parametrize(
    ("schedule", "stages", "workers", "microbatches", "words"),
    [
        ("pipedream", 4, 2, 8, "there is no schedule 'pipedream'"),
        ("1f1b", 2, 3, 8, "each worker needs at least one stage"),
        ("sequential", 4, 2, 8, "runs on 1 worker"),
        ("1f1b", 4, 4, 3, "at least as many microbatches as workers"),
        ("zero-bubble", 4, 2, 1, "at least as many microbatches as workers"),
        ("interleaved", 4, 4, 8, "at least 2"),
        ("interleaved", 5, 2, 8, "at least 2"),
        ("interleaved", 4, 2, 7, "multiple of 2 microbatches"),
    ],
)
def test_impossible_orders_are_rejected(
    schedule: str, stages: int, workers: int, microbatches: int, words: str
) -> None:
    with pytest.raises(ScheduleError, match=words):
        make_order(schedule, stages=stages, workers=workers, microbatches=microbatches)


def test_simulating_a_deadlocked_order_raises() -> None:
    good = make_order("1f1b", stages=2, workers=2, microbatches=3)
    early = (good.actions[0], good.actions[1][::-1])
    with pytest.raises(ValueError, match=r"worker [01] never gets to"):
        simulate(Order(good.placement, early), lambda action: 1.0)
