"""What the data rank notes of the epochs of a run that answers requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.data.source import Microbatch
from pipeedge.observe.pipeline_state import EpochState, PipelineState
from pipeedge.run.epoch_log import EpochLog
from pipeedge.run.progress import DataProgress

SCHEDULE = Schedule((StagePlan(LayerRange(0, 4), 0, "a", 0, "float32"),))
FORETOLD = SimpleNamespace(throughput_items_per_s=40.0)
FIRST: Any = SimpleNamespace(
    items=64, schedule=SCHEDULE, cause="", lost=(), goes_on=True, prediction=FORETOLD
)
BETTER: Any = SimpleNamespace(
    items=64, schedule=SCHEDULE, cause="host b is twice as slow", lost=(), goes_on=True, prediction=None
)


def batch(number: int) -> Microbatch:
    return Microbatch((), (None,), ("",), (number,))


@pytest.mark.parametrize(("fed_at", "waited_s"), [(3699.75, 0.25), (99.0, 3600.0)])
def test_a_change_while_nothing_is_asked_costs_no_time(fed_at: float, waited_s: float) -> None:
    progress, watch, lines = DataProgress(), PipelineState(), list[str]()
    context: Any = SimpleNamespace(warn=lines.append)
    log = EpochLog(context, progress, cast(Any, SimpleNamespace(stopped_at=0.0)), None, watch)
    log.prepared(1, FIRST)
    log.runs()
    ledger, collected = progress.ledger, progress.collected
    ledger.begin(0.0)
    ledger.feed(0, batch(0), 99.0)
    collected.add_result(100.0, 0.0, 99.0, 1, epoch=1)
    ledger.wrote(0)
    log.changes(2, BETTER)
    ledger.feed(1, batch(1), fed_at)
    collected.add_result(3700.0, 0.0, fed_at, 1, epoch=2)
    assert collected.epochs[-1].filling_s == waited_s
    assert f"whose result came {waited_s:.2f} s after" in lines[-1]
    assert watch.epoch == EpochState(number=2)


def test_each_epoch_is_measured_beside_its_own_prediction() -> None:
    progress = DataProgress()
    context: Any = SimpleNamespace(warn=lambda _line: None)
    turns: Any = SimpleNamespace(stopped_at=0.0)
    log = EpochLog(context, progress, turns, None, None)
    log.prepared(1, FIRST)
    log.runs()
    ledger, collected = progress.ledger, progress.collected
    ledger.begin(0.0)

    def results(numbers: range, seconds: float, *, epoch: int) -> None:
        for number in numbers:
            ledger.feed(number, batch(number), number * seconds)
            collected.add_result(number * seconds, 0.0, number * seconds, 8, epoch=epoch)
            ledger.wrote(number)

    results(range(5), 2.0, epoch=1)  # 4 items/s, although 40 were predicted
    log.stopped(dropped=False)
    log.prepared(2, BETTER)
    log.runs()
    results(range(5, 8), 4.0, epoch=2)
    first, second = collected.finished_epochs()
    assert (first.items, first.predicted_items_per_s, first.steady_items_per_s) == (40, 40.0, 4.0)
    assert (second.items, second.predicted_items_per_s, second.steady_items_per_s) == (24, None, 2.0)
