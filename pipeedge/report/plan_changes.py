"""Plans of a run that followed its first one, for the report: as JSON and as lines for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pipeedge.base.schedule import Schedule
from pipeedge.base.wording import count, figure, percent
from pipeedge.observe.records import EpochRecord, ReplanRecord

__all__ = ["epoch_lines", "epochs_body", "replan_lines", "replans_body", "schedule_body"]


def schedule_body(schedule: Schedule) -> list[dict[str, Any]]:
    """Return a schedule for JSON: one object per stage."""
    return [
        {
            "stage": stage,
            "rank": plan.rank,
            "host": plan.host,
            "layers": [plan.layers.first, plan.layers.last],
            "quant_bits": plan.quant_bits,
            "dtype": plan.dtype,
        }
        for stage, plan in enumerate(schedule.stages)
    ]


def epochs_body(epochs: Sequence[EpochRecord]) -> list[dict[str, Any]]:
    """Return epochs for JSON."""
    return [
        {
            "epoch": one.number,
            "started_s": one.started_s,
            "cause": one.cause,
            "lost_ranks": list(one.lost),
            "waiting_s": one.waiting_s,
            "preparing_s": one.preparing_s,
            "filling_s": one.filling_s,
            "lost_s": one.lost_s,
            "repeated": one.repeated,
            "items": one.items,
            "predicted_items_per_s": one.predicted_items_per_s,
            "steady_items_per_s": one.steady_items_per_s,
            "schedule": schedule_body(one.schedule),
        }
        for one in epochs
    ]


def epoch_lines(epochs: Sequence[EpochRecord], how: str = "measured") -> Iterator[str]:
    """Yield a line that sums up the failures that the run survived, then some for each; none without any.

    What was predicted of the last epoch is not among them, as it is compared in detail.

    Args:
        epochs: Epochs of the run.
        how: How their figures came about: ``measured`` or ``simulated``.
    """
    later = [one for one in epochs if one.cause]
    if not later:
        return
    lost_s, repeated = sum(one.lost_s for one in later), sum(one.repeated for one in later)
    yield f"{len(epochs)}: {lost_s:.2f} s without a new result, {_repeated(repeated)}"
    yield from _predicted(epochs[0], how)
    for one in later:
        stages = ", ".join(f"{plan.layers} on rank {plan.rank}" for plan in one.schedule.stages)
        yield f"{one.number} began after {one.started_s:.2f} s, with layers {stages}: {one.cause}"
        yield (
            f"  {one.waiting_s:.2f} s until its plan, {one.preparing_s:.2f} s to prepare it, "
            f"{one.filling_s:.2f} s to fill the pipeline; {_repeated(one.repeated)}"
        )
        if one is not epochs[-1]:
            yield from _predicted(one, how)


def _predicted(epoch: EpochRecord, how: str) -> Iterator[str]:
    """Yield a line that compares the throughput of an epoch with its own prediction, if both are known."""
    predicted, steady = epoch.predicted_items_per_s, epoch.steady_items_per_s
    if predicted and steady is not None:
        yield (
            f"epoch {epoch.number} was predicted to reach {figure(predicted)} items/s, {how} "
            f"{figure(steady)} ({percent(steady / predicted - 1)})"
        )


def replans_body(replans: Sequence[ReplanRecord]) -> list[dict[str, Any]]:
    """Return better plans that were found for JSON."""
    return [
        {
            "at_s": one.at_s,
            "why": one.why,
            "predicted_gain_percent": 100 * one.gain,
            "measured_gain_percent": None if one.measured_gain is None else 100 * one.measured_gain,
            "outcome": one.outcome,
            "microbatch": one.microbatch,
            "seconds": one.seconds,
            "schedule": schedule_body(one.schedule),
        }
        for one in replans
    ]


def replan_lines(replans: Sequence[ReplanRecord]) -> Iterator[str]:
    """Yield a line for each better plan that was found."""
    for one in replans:
        stages = ", ".join(f"{plan.layers} on rank {plan.rank}" for plan in one.schedule.stages)
        gain = f"{one.gain:+.0%} predicted"
        if one.measured_gain is not None:
            gain += f", {one.measured_gain:+.0%} measured"
        done = f"switched at microbatch {one.microbatch}" if one.microbatch is not None else one.outcome
        yield f"after {one.at_s:.2f} s: {one.why}; layers {stages}: {gain}; {done}"


def _repeated(microbatches: int) -> str:
    return f"{count(microbatches, 'microbatch')} computed again"
