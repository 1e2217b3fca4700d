"""Write a timeline in the trace event format, for Perfetto (ui.perfetto.dev) and chrome://tracing. Pure.

    process = rank, thread = lane        "X" event = span, times in microseconds from the start of the run
    rank 1 (stage 1, layers 25-48)
        stage 1          wait input | compute 0 | wait link | wait input | compute 1 | ...
        stage 1 link          send 0 |                send 1 | ...
        from stage 0     receive 0 |      receive 1 | ...

Transfers are measured by the sending rank; the receiving rank shows each as a receive. Where a run went on
after a failure, the data rank has one more thread, with the parts of each recovery, and an instant event
over all ranks begins each epoch.
The format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from pipeedge.base.schedule import Schedule
from pipeedge.observe.records import EpochRecord
from pipeedge.observe.timeline import LaneId, Span, ThreadState, Timeline, split_epoch

__all__ = ["timeline_events", "trace_events"]

_US = 1e-6


def trace_events(
    timeline: Timeline, schedule: Schedule, data_rank: int, epochs: Sequence[EpochRecord] = ()
) -> dict[str, Any]:
    """Return the whole trace in Chrome's JSON trace format.

    Args:
        timeline: Timeline of the run.
        schedule: Schedule of the run, which determines where each link leads.
        data_rank: Rank at which the first link begins and the last one ends.
        epochs: Epochs of a run that went on after failures, whose schedules apply instead.
    """
    schedules = [(one.started_s, one.schedule) for one in epochs] or [(0.0, schedule)]
    spans = tuple(_with_receives(timeline, schedules, data_rank))
    ranks = {span.rank for span in spans}
    names = {rank: _process([each for _, each in schedules], data_rank, rank) for rank in ranks}
    trace = timeline_events(Timeline(timeline.length_s, spans), names)
    trace["traceEvents"] += _recoveries(
        epochs, data_rank, thread=1 + len({(one.rank, one.lane) for one in spans})
    )
    return trace


def timeline_events(timeline: Timeline, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the spans of a timeline, unchanged, as a trace.

    Args:
        timeline: Timeline of any run.
        names: Description of each rank.
    """
    lanes: dict[tuple[int, str], int] = {}
    events = []
    for span in timeline.spans:
        thread = lanes.setdefault((span.rank, span.lane), len(lanes) + 1)
        events.append(_event(span, thread))
    titles = [*_processes({rank: names[rank] for rank, _ in lanes}), *_threads(lanes)]
    return {"traceEvents": titles + events, "displayTimeUnit": "ms"}


def _destinations(schedule: Schedule, data_rank: int) -> Mapping[str, tuple[int, str]]:
    """Return, for each link's lane, its destination rank and that rank's name for the receiving end."""
    ranks = schedule.ranks
    found = {LaneId.link().label: (ranks[0], "from the data rank")}
    for stage in range(len(ranks)):
        after = ranks[stage + 1] if stage + 1 < len(ranks) else data_rank
        found[LaneId.link(stage).label] = (after, f"from stage {stage}")
    return found


def _with_receives(
    timeline: Timeline, schedules: Sequence[tuple[float, Schedule]], data_rank: int
) -> Iterator[Span]:
    """Yield all spans, and a receive for each send.

    Args:
        timeline: Timeline of the run.
        schedules: Schedules with the times at which they began, in order.
        data_rank: Rank at which the first link begins and the last one ends.
    """
    destinations = [(since_s, _destinations(schedule, data_rank)) for since_s, schedule in schedules]
    for span in timeline.spans:
        yield span
        at = max(0, bisect_right(destinations, span.start_s, key=itemgetter(0)) - 1)
        epoch, sent_on = split_epoch(span.lane)
        if span.doing is ThreadState.SEND and sent_on in destinations[at][1]:
            rank, lane = destinations[at][1][sent_on]
            yield Span(rank, f"{epoch}{lane}", ThreadState.RECEIVE, span.start_s, span.end_s, span.microbatch)


def _recoveries(epochs: Sequence[EpochRecord], data_rank: int, thread: int) -> Iterator[dict[str, Any]]:
    """Yield the events of epochs that began after a failure."""
    later = [one for one in epochs if one.cause]
    if later:
        yield from _threads({(data_rank, "recovery"): thread})
    for one in later:
        details = {"cause": one.cause, "repeated": one.repeated}
        at_s = one.started_s - one.waiting_s - one.preparing_s
        for name, seconds in (
            ("wait for the plan", one.waiting_s),
            ("prepare the plan", one.preparing_s),
            ("fill the pipeline", one.filling_s),
        ):
            start_us, at_s = round(at_s / _US, 3), at_s + seconds
            yield {
                "ph": "X",
                "name": name,
                "cat": "recovery",
                "ts": start_us,
                "dur": round(at_s / _US - start_us, 3),
                "pid": data_rank,
                "tid": thread,
                "args": details,
            }
        yield {
            "ph": "i",
            "s": "g",
            "name": f"epoch {one.number}",
            "cat": "recovery",
            "ts": round(one.started_s / _US, 3),
            "pid": data_rank,
            "tid": thread,
            "args": details,
        }


def _event(span: Span, thread: int) -> dict[str, Any]:
    number = "" if span.microbatch is None or span.doing.is_wait else f" {span.microbatch}"
    start_us = round(span.start_s / _US, 3)
    event: dict[str, Any] = {
        "ph": "X",
        "name": f"{span.doing.value}{number}",
        "cat": "wait" if span.doing.is_wait else "work",
        "ts": start_us,
        "dur": round(span.end_s / _US - start_us, 3),
        "pid": span.rank,
        "tid": thread,
    }
    if span.microbatch is not None:
        event["args"] = {"microbatch": span.microbatch}
    return event


def _process(schedules: Sequence[Schedule], data_rank: int, rank: int) -> str:
    """Describe the roles of ``rank`` in an inference run."""
    roles, host = [], None
    for schedule in schedules:
        stage = schedule.stage_of(rank)
        if stage is not None:
            plan = schedule.stages[stage]
            roles.append(f"stage {stage}, {plan.layers.named}")
            host = plan.host
    parts = ["data rank"] if rank == data_rank else []
    if roles:
        parts.append(", then ".join(role for role, _ in groupby(roles)))
    return ", ".join([*parts, *([host] if host else [])])


def _processes(names: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    for rank, name in sorted(names.items()):
        yield _meta("process_name", rank, 0, {"name": f"rank {rank} ({name})"})
        yield _meta("process_sort_index", rank, 0, {"sort_index": rank})


def _threads(lanes: Mapping[tuple[int, str], int]) -> Iterator[dict[str, Any]]:
    for (rank, lane), thread in lanes.items():
        yield _meta("thread_name", rank, thread, {"name": lane})
        yield _meta("thread_sort_index", rank, thread, {"sort_index": thread})


def _meta(name: str, process: int, thread: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": dict(arguments)}
