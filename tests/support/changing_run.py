"""``runtime.py`` on rank 0, which changes its plan by itself, and again when the file ``change`` appears.

No more than 20 microbatches are fed until the first change has begun, and no more than 40 until the second
one has an outcome: so both happen, whatever the speed. Where the variable ``ANOTHER_TYPE`` is set, the new
plans compute in that number type, with links of 8 bits, and there is no second change.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from pipeedge.base.fields import Options
from pipeedge.base.schedule import LayerRange, Schedule
from pipeedge.control.announcement import Announcement
from pipeedge.control.forms import Refusal
from pipeedge.plan.planning import Plan
from pipeedge.plan.schedule_choice import PlannedSchedule
from pipeedge.run import phases, pipeline
from pipeedge.run.decision import Decider, RunSession
from pipeedge.run.ledger import Ledger
from pipeedge.run.linked_stage import LoadedStage
from pipeedge.run.main import main

FIRST, SECOND = ((1, 4, 0), (5, 16, 2)), ((1, 8, 1), (9, 16, 2))
"""First and last layer, and rank, of each stage of the new plans."""
ANOTHER_TYPE = os.environ.get("ANOTHER_TYPE")
_begun, _over = threading.Event(), threading.Event()
_change, _wait_for_room = Ledger.change, Ledger.wait_for_room
_fed = 0


def _changing(self: Ledger, epoch: int, window: int) -> None:
    _change(self, epoch, window)
    _begun.set()


def _waiting(self: Ledger) -> int | None:
    global _fed
    if _fed == 20:
        _begun.wait()
    if _fed == 40:
        _over.wait()
    number = _wait_for_room(self)
    _fed += number is not None
    return number


def _stages_in_memory() -> int:
    gc.collect()
    return len({id(each.shard) for each in gc.get_objects() if isinstance(each, LoadedStage)})


class ChangingDecider(Decider):
    """A decider that changes its mind."""

    session: RunSession
    """Set when the ranks are about to agree."""

    def decide(self, facts: Mapping[int, Options]) -> Announcement[Plan] | Refusal:
        decided = super().decide(facts)
        if isinstance(decided, Announcement):
            threading.Thread(target=self._change_twice, args=(decided.plan,), daemon=True).start()
        return decided

    def _change_twice(self, plan: Plan) -> None:
        self._change_to(plan, FIRST, "first")
        while _stages_in_memory() > 1:
            time.sleep(0.01)
        print("the weights of the first plan are gone", file=sys.stderr, flush=True)
        while not Path("change").exists() and ANOTHER_TYPE is None:
            time.sleep(0.01)
        if ANOTHER_TYPE is None:
            self._change_to(plan, SECOND, "second")
        _over.set()

    def _change_to(self, plan: Plan, stages: tuple[tuple[int, int, int], ...], name: str) -> None:
        while (since := self.session.snapshot()) is None or not since.running:
            time.sleep(0.01)
        like = plan.schedule.stages[0]
        if ANOTHER_TYPE is not None:
            like = dataclasses.replace(like, dtype=ANOTHER_TYPE, quant_bits=8)
        made = [
            dataclasses.replace(like, layers=LayerRange(first - 1, last), rank=rank)
            for first, last, rank in stages
        ]
        made[-1] = dataclasses.replace(made[-1], quant_bits=0)
        planned = PlannedSchedule(Schedule(tuple(made)))
        outcome = self.change(self.session, planned, since, "the test wants it", f"{name} change")
        print(f"{name} outcome: {outcome}", file=sys.stderr, flush=True)


def agree(context: object, session: RunSession, prepared: object) -> Plan:
    """Agree on a plan, with a decider that has the session."""
    ChangingDecider.session = session
    return phases.agree(context, session, prepared)  # type: ignore[arg-type]


if __name__ == "__main__":
    Ledger.change, Ledger.wait_for_room = _changing, _waiting  # type: ignore[method-assign]
    phases.Decider, pipeline.agree = ChangingDecider, agree  # type: ignore[misc,assignment]
    main()
