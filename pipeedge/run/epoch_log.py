"""Notes of the data rank about the epochs of a run, for the report and the user. One epoch alone is no news.

stopped ──> prepared ──> runs ──first result──> the record is whole: what the failure has cost
            changes ────────────first result──> the record of an epoch beside another one
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pipeedge.base.backpressure import window
from pipeedge.base.wording import count
from pipeedge.control.turns import Turns
from pipeedge.observe.monitoring import Exporter
from pipeedge.observe.records import EpochRecord
from pipeedge.plan.planning import Plan
from pipeedge.run.context import RankContext

if TYPE_CHECKING:  # only the data rank needs it
    from pipeedge.observe.pipeline_state import PipelineState
    from pipeedge.observe.token_figures import TextState
    from pipeedge.run.progress import DataProgress

__all__ = ["EpochLog"]


class EpochLog:
    """Notes of the data rank about each epoch, for the report and the user.

    Args:
        context: This rank.
        progress: Microbatches under way, and results.
        turns: Orders of the hub, which tell when an epoch was stopped.
        exporter: Server of the metrics, or None.
        watcher: Told of each epoch by a run that answers requests, or None.
        text: Returns how far the text is, where it is generated; None elsewhere.
    """

    def __init__(
        self,
        context: RankContext,
        progress: DataProgress,
        turns: Turns,
        exporter: Exporter | None,
        watcher: PipelineState | None,
        text: Callable[[], TextState] | None = None,
    ) -> None:
        self._context = context
        self._progress = progress
        self._exporter = exporter
        self._watcher = watcher
        self._text = text
        self._turns = turns
        self._fed = 0  # of the last epoch, and not written
        self._has_stopped = False  # two epochs stop together if the plan was about to change
        self._silent_since: float | None = None
        self._repeated = 0  # since then
        self._repeated_tokens = self._kept_tokens = 0  # before that, where text is generated
        self._record: EpochRecord | None = None
        self._prepared_at = 0.0

    @property
    def first_of_next(self) -> int | None:
        """Lowest number of a microbatch that the next epoch is fed, while the plan changes."""
        return self._progress.ledger.first_of_next

    def stopped(self, *, dropped: bool) -> int:
        """Note that an epoch has stopped; return the lowest number of a microbatch that is not written.

        Args:
            dropped: Whether it was fed nothing, because it was prepared beside another one.
        """
        if dropped or self._has_stopped:
            return self._progress.ledger.written
        self._has_stopped = True
        self._fed = self._progress.ledger.under_way
        self._repeated += self._fed
        if self._silent_since is None:
            self._silent_since = self._last_sign(self._turns.stopped_at)
        return self._progress.ledger.written

    def _last_sign(self, otherwise: float) -> float:
        """Return the time since which results are missing; while nothing is asked, none are.

        Args:
            otherwise: The time to return if none are, or none has come yet.
        """
        last, fed_at = self._progress.collected.last_at, self._progress.ledger.oldest_fed_at
        if self._watcher is not None:  # an input without end: the last result may be hours ago
            return otherwise if fed_at is None else max(fed_at, last or 0.0)
        return otherwise if last is None else last

    def prepared(self, epoch: int, plan: Plan) -> None:
        """Note that an epoch is prepared."""
        self._has_stopped = False
        now = time.perf_counter()
        self._prepared_at = now
        self._progress.ledger.restart(epoch, _window(plan))
        if not plan.goes_on:
            return
        waiting_s = max(0.0, now - self._turns.stopped_at) if self._silent_since is not None else 0.0
        self._record = EpochRecord(
            epoch,
            plan.schedule,
            0.0,
            cause=plan.cause,
            lost=plan.lost,
            waiting_s=waiting_s,
            repeated=self._fed,
            predicted_items_per_s=_predicted(plan),
        )
        if self._watcher is not None:
            self._watcher.prepares(epoch, plan.cause, plan.lost)

    def changes(self, epoch: int, plan: Plan) -> None:
        """Note that an epoch gets what follows, beside one that goes on until the rest has passed."""
        collected, ledger = self._progress.collected, self._progress.ledger

        def on_first(at: float) -> None:
            began = ledger.began_at
            since = self._last_sign(at)
            record = EpochRecord(
                epoch,
                plan.schedule,
                0.0 if began is None else at - began,
                cause=plan.cause,
                filling_s=max(0.0, at - since),
                predicted_items_per_s=_predicted(plan),
            )
            collected.epochs.append(record)
            if self._exporter is not None:
                self._exporter.add_epoch(record)
            if self._watcher is not None:
                self._watcher.changed(epoch, plan.cause)
            after = "the one before" if self._watcher is None else "it was fed, or after the one before"
            self._context.warn(
                f"the plan has changed at microbatch {ledger.first_of_next}, "
                f"whose result came {at - since:.2f} s after {after}"
            )

        collected.change(epoch, on_first)
        ledger.change(epoch, _window(plan))

    def runs(self) -> None:
        """Note that the epoch runs."""
        collected, record = self._progress.collected, self._record
        if record is None:
            return
        now, began = time.perf_counter(), self._progress.ledger.began_at
        preparing_s = now - self._prepared_at if self._silent_since is not None else 0.0
        record = replace(record, started_s=0.0 if began is None else now - began, preparing_s=preparing_s)

        def on_first(at: float) -> None:
            if self._silent_since is None:
                return
            collected.epochs[-1] = replace(record, filling_s=max(0.0, at - now))
            seconds = at - self._silent_since
            self._context.warn(f"the run goes on after {seconds:.1f} s without a result; {self._again()}")
            if self._watcher is not None:
                self._watcher.goes_on(seconds, self._repeated)
            self._silent_since, self._repeated = None, 0

        collected.restart(on_first)
        collected.epochs.append(record)
        if self._exporter is not None:
            self._exporter.add_epoch(record)
        if self._watcher is not None and not self._repeated:
            collected.report_first(now)  # nobody waits for a result

    def _again(self) -> str:
        """Return what is computed again since results were missing, in the units of the run."""
        if self._text is None:
            return f"{count(self._repeated, 'microbatch')} computed again"
        now = self._text()
        again, kept = now.repeated_tokens - self._repeated_tokens, now.kept_tokens - self._kept_tokens
        self._repeated_tokens, self._kept_tokens = now.repeated_tokens, now.kept_tokens
        return f"{count(again, 'token')} computed again{f', {kept} kept' if kept else ''}"


def _predicted(plan: Plan) -> float | None:
    """Return the throughput that was predicted of a plan, or None without a prediction."""
    return None if plan.prediction is None else plan.prediction.throughput_items_per_s


def _window(plan: Plan) -> int:
    return window(len(plan.schedule.stages), endless=plan.items is None, goes_on=plan.goes_on)
