"""The bottleneck: the part of the pipeline that limits its throughput. Pure functions.

    before the bottleneck     stages wait for their outgoing link
    the bottleneck            a stage that is busy all the time, or a link, or the reading of the input
    behind it                 stages wait for input
    none                      the pipeline waits for requests

The bottleneck is where waiting for the link turns into waiting for input: a stage that hardly waits or, if no
stage is busy throughout, the link between two stages. Filling and draining are not counted. Reading the input
is counted from the beginning, because the pipeline idles until the first items are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from pipeedge.observe.timeline import ThreadState
from pipeedge.report.saved import SavedRun, SavedStage

__all__ = ["Bottleneck", "Part", "Shares", "find_bottleneck", "shares"]

BUSY = 0.9
"""Busy fraction from which on a stage has no time for more."""
FELT = 0.05
"""Waiting fraction below which waiting does not indicate anything."""

_WAITS = {doing.value for doing in ThreadState if doing.is_wait}


class Part(StrEnum):
    """A part of the pipeline that can be the bottleneck."""

    STAGE = "stage"
    LINK = "link"
    """The link into the stage of that number; after the last stage, the link back to the data rank."""
    INPUT = "input"
    """Reading the input on the data rank; its number is 0."""
    REQUESTS = "requests"
    """None: there was nothing to do most of the time; its number is 0."""


@dataclass(frozen=True)
class Bottleneck:
    """The bottleneck, and the reason why."""

    part: Part
    number: int
    """Number of the stage; for a link, of the stage that it leads to."""
    line: str
    """Description for people."""


@dataclass(frozen=True)
class Shares:
    """Shares of a stage's time between filling and draining."""

    working_s: float
    active_s: float
    starved: float
    """Fraction of the time spent waiting for input."""
    blocked: float
    """Fraction of the time spent waiting for the outgoing link."""


def shares(stage: SavedStage) -> Shares | None:
    """Return the shares of one stage, or None if its activities are not known."""
    if stage.seconds is None:
        return None
    working = sum(seconds for doing, seconds in stage.seconds.items() if doing not in _WAITS)
    starved = stage.seconds.get(ThreadState.WAIT_INPUT.value, 0.0)
    blocked = stage.seconds.get(ThreadState.WAIT_LINK.value, 0.0)
    total = working + starved + blocked
    return Shares(working, total, starved / total, blocked / total) if total > 0 else None


def find_bottleneck(run: SavedRun) -> Bottleneck | None:
    """Return the part of ``run`` that limits its throughput, or None if nothing is known about its stages.

    Of several epochs, it is that of the last one.
    """
    found = _find(run)
    if found is None or len(run.epochs) < 2:
        return found
    return replace(found, line=f"In epoch {run.epochs[-1].number}, the last one: {found.line}")


def _find(run: SavedRun) -> Bottleneck | None:
    found = [shares(stage) for stage in run.stages]
    known = [share for share in found if share is not None]
    if len(known) < len(run.stages):
        return None
    # The stage that was active longest processed all microbatches at the pace of the whole pipeline. A stage
    # before the bottleneck may be busy all the time while links fill, but not for as long.
    paced_s = max(share.active_s for share in known)
    busiest = max(range(len(known)), key=lambda stage: known[stage].working_s)
    busy = known[busiest].working_s / paced_s
    link, occupied = _most_occupied_link(run, paced_s)
    reading_s, idle_s = _reading_s(run), (run.feed_s or {}).get(ThreadState.IDLE.value, 0.0)
    if idle_s > max(known[busiest].working_s, occupied * paced_s, reading_s):
        return _idle(run, idle_s)
    if reading_s > max(known[busiest].working_s, occupied * paced_s) and reading_s >= FELT * (
        run.last_epoch_s or 0.0
    ):
        return _input(run, reading_s)
    if occupied >= max(BUSY, busy):
        return _link(run, link, f"it is occupied {occupied:.0%} of the time")
    turn, waiting = max(_turns(known), key=lambda found: found[1])
    if busy < BUSY and waiting >= FELT:
        if turn == 0 and idle_s > (run.feed_s or {}).get(ThreadState.WAIT_LINK.value, 0.0):
            return _idle(run, idle_s)
        if turn == 0 and reading_s > (run.feed_s or {}).get(ThreadState.WAIT_LINK.value, 0.0):
            return _input(run, reading_s)
        return _link(run, turn, _waiting_neighbors(run, turn, known))
    return _stage(run, busiest, busy)


def _most_occupied_link(run: SavedRun, paced_s: float) -> tuple[int, float]:
    """Return the most occupied link, and the fraction of the time that it carries data.

    The fraction excludes waiting for the next stage. The receiving end measured it, or else it follows from
    the best throughput seen for any microbatch.
    """
    occupied = [
        (stage.figures.get("link_s") or stage.figures.get("send_s_best", 0.0))
        * stage.figures.get("microbatches", 0.0)
        / paced_s
        for stage in run.stages
    ]
    most = max(range(len(occupied)), key=lambda stage: occupied[stage])
    return most + 1, min(1.0, occupied[most])


def _reading_s(run: SavedRun) -> float:
    """Return the seconds in which the pipeline waited for input still being read; 0 if not known."""
    feed = run.feed_s or {}
    return sum(feed.get(doing.value, 0.0) for doing in (ThreadState.WAIT_INPUT, ThreadState.READ))


def _turns(known: list[Shares]) -> Iterator[tuple[int, float]]:
    """Yield each link, and how long stages wait at both of its ends."""
    last = len(known)
    for link in range(last + 1):
        before = known[link - 1].blocked if link else 1.0
        behind = known[link].starved if link < last else 1.0
        yield link, min(before, behind)


def _stage(run: SavedRun, number: int, busy: float) -> Bottleneck:
    stage = run.stages[number]
    line = f"Stage {number} on {stage.place}, {stage.which}: "
    if busy >= BUSY:
        line += f"it works {busy:.0%} of the time"
        line += ", and the others wait for it" if len(run.stages) > 1 else ""
    else:
        line += (
            f"the busiest stage works {busy:.0%} of the time; no single part limits the throughput"
            if len(run.stages) > 1
            else f"it works {busy:.0%} of the time"
        )
    return Bottleneck(Part.STAGE, number, line)


def _idle(run: SavedRun, idle_s: float) -> Bottleneck:
    part = min(1.0, idle_s / run.last_epoch_s) if run.last_epoch_s else 1.0
    return Bottleneck(
        Part.REQUESTS, 0, f"None: the pipeline was idle {part:.0%} of the time, waiting for requests"
    )


def _input(run: SavedRun, reading_s: float) -> Bottleneck:
    where = "" if run.data_rank is None else f" on rank {run.data_rank}"
    part = min(1.0, reading_s / run.last_epoch_s) if run.last_epoch_s else 1.0
    return Bottleneck(
        Part.INPUT, 0, f"Reading the input{where}: the pipeline waits for it {part:.0%} of the time"
    )


def _link(run: SavedRun, number: int, why: str) -> Bottleneck:
    last = len(run.stages)
    if number == 0:
        local = run.data_rank == run.stages[0].rank
        what = (
            f"Reading the input on {run.stages[0].place}"
            if local
            else f"Reading the input, or the link to stage 0 on {run.stages[0].place}"
        )
    elif number == last:
        local = run.data_rank == run.stages[-1].rank
        what = (
            f"Writing the results on {run.stages[-1].place}"
            if local
            else f"The link back from stage {last - 1} on {run.stages[-1].place}, or writing the results"
        )
    else:
        before, behind = run.stages[number - 1], run.stages[number]
        what = f"The link from stage {number - 1} on {before.place} to stage {number} on {behind.place}"
    return Bottleneck(Part.LINK, number, f"{what}: {why}")


def _waiting_neighbors(run: SavedRun, number: int, known: list[Shares]) -> str:
    words = []
    if number:
        words.append(f"stage {number - 1} waits {known[number - 1].blocked:.0%} of the time to send")
    if number < len(run.stages):
        words.append(f"stage {number} waits {known[number].starved:.0%} of the time for input")
    return ", ".join(words)
