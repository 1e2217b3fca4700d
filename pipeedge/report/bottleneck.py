"""Who holds the others back. Pure.

    before the bottleneck     everybody waits for the link to be taken from
    the bottleneck            a stage that is busy all the time, or a link, or the reading of the input
    behind it                 everybody waits for input

So where waiting for the link turns into waiting for input, there it is: inside a stage that hardly waits,
or, where no stage is busy throughout, on the link between the two. Filling and draining are not counted;
reading the input is, from the beginning, because the pipeline stands still until the first of it is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from pipeedge.observe.timeline import Doing
from pipeedge.report.saved import SavedRun, SavedStage

__all__ = ["Bottleneck", "Part", "Shares", "find_bottleneck", "shares"]

BUSY = 0.9
"""A stage that works for that part of its time has no time for more."""
FELT = 0.05
"""Waiting for less than this part is no sign of anything."""

_WAITS = {doing.value for doing in Doing if doing.is_wait}


class Part(str, Enum):
    """What can be a bottleneck."""

    STAGE = "stage"
    LINK = "link"
    """Into the stage of that number; after the last stage: back to the data rank."""
    INPUT = "input"
    """Reading it, on the data rank; its number is 0."""


@dataclass(frozen=True)
class Bottleneck:
    """One part of the pipeline, and why it is that one."""

    part: Part
    number: int
    """Of the stage; of a link, that of the stage it leads to."""
    line: str
    """For people."""


@dataclass(frozen=True)
class Shares:
    """Where the time of a stage went between filling and draining."""

    working_s: float
    active_s: float
    starved: float
    """Part of it: waiting for input."""
    blocked: float
    """Part of it: waiting for its outgoing link."""


def shares(stage: SavedStage) -> Shares | None:
    """Of one stage; None where it is not known what it was at."""
    if stage.seconds is None:
        return None
    working = sum(seconds for doing, seconds in stage.seconds.items() if doing not in _WAITS)
    starved = stage.seconds.get(Doing.WAIT_INPUT.value, 0.0)
    blocked = stage.seconds.get(Doing.WAIT_LINK.value, 0.0)
    total = working + starved + blocked
    return Shares(working, total, starved / total, blocked / total) if total > 0 else None


def find_bottleneck(run: SavedRun) -> Bottleneck | None:
    """The part of ``run`` that decides its throughput; None where nothing is known about its stages."""
    found = [shares(stage) for stage in run.stages]
    known = [share for share in found if share is not None]
    if len(known) < len(run.stages):
        return None
    # The stage that took longest had all microbatches at the pace of the whole pipeline. One before the
    # bottleneck may be busy all the time while links fill, but not for as long.
    paced_s = max(share.active_s for share in known)
    busiest = max(range(len(known)), key=lambda stage: known[stage].working_s)
    busy = known[busiest].working_s / paced_s
    link, occupied = _most_occupied_link(run, paced_s)
    reading_s = _reading_s(run)
    if reading_s > max(known[busiest].working_s, occupied * paced_s) and reading_s >= FELT * (
        run.length_s or 0.0
    ):
        return _input(run, reading_s)
    if occupied >= max(BUSY, busy):
        return _link(run, link, f"it is occupied {occupied:.0%} of the time")
    turn, waiting = max(_turns(known), key=lambda found: found[1])
    if busy < BUSY and waiting >= FELT:
        if turn == 0 and reading_s > (run.feed_s or {}).get(Doing.WAIT_LINK.value, 0.0):
            return _input(run, reading_s)
        return _link(run, turn, _who_waits(run, turn, known))
    return _stage(run, busiest, busy)


def _most_occupied_link(run: SavedRun, paced_s: float) -> tuple[int, float]:
    """That link, and for what part of the time it would be occupied, without what it waits for the next
    stage: as its receiving end measured it, or else had every microbatch gone at the best pace seen."""
    occupied = [
        (stage.figures.get("link_s") or stage.figures.get("send_s_best", 0.0))
        * stage.figures.get("microbatches", 0.0)
        / paced_s
        for stage in run.stages
    ]
    most = max(range(len(occupied)), key=lambda stage: occupied[stage])
    return most + 1, min(1.0, occupied[most])


def _reading_s(run: SavedRun) -> float:
    """Seconds that the pipeline could not be fed because the input was still being read; 0 if not known."""
    feed = run.feed_s or {}
    return sum(feed.get(doing.value, 0.0) for doing in (Doing.WAIT_INPUT, Doing.READ))


def _turns(known: list[Shares]) -> Iterator[tuple[int, float]]:
    """Each link, and how much is waited at both its ends."""
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
        line += ", the others wait for it" if len(run.stages) > 1 else ""
    else:
        line += (
            f"the busiest, at work {busy:.0%} of the time; no single part holds all others back"
            if len(run.stages) > 1
            else f"at work {busy:.0%} of the time"
        )
    return Bottleneck(Part.STAGE, number, line)


def _input(run: SavedRun, reading_s: float) -> Bottleneck:
    where = "" if run.data_rank is None else f" on rank {run.data_rank}"
    part = min(1.0, reading_s / run.length_s) if run.length_s else 1.0
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


def _who_waits(run: SavedRun, number: int, known: list[Shares]) -> str:
    words = []
    if number:
        words.append(f"stage {number - 1} waits {known[number - 1].blocked:.0%} of the time to send")
    if number < len(run.stages):
        words.append(f"stage {number} waits {known[number].starved:.0%} of it for input")
    return ", ".join(words)
