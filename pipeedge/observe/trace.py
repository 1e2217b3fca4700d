"""Write a timeline in the trace event format, for Perfetto (ui.perfetto.dev) and chrome://tracing. Pure.

    process = rank, thread = lane        "X" event = span, times in microseconds from the start of the run
    rank 1 (stage 1, layers 25-48)
        stage 1          wait input | compute 0 | wait link | wait input | compute 1 | ...
        stage 1 link          send 0 |                send 1 | ...
        from stage 0     receive 0 |      receive 1 | ...

Transfers are measured by the sending rank; the receiving rank shows each as a receive.
The format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeedge.base.schedule import Schedule
from pipeedge.observe.timeline import LaneId, Span, ThreadState, Timeline

__all__ = ["timeline_events", "trace_events"]

_US = 1e-6


def trace_events(timeline: Timeline, schedule: Schedule, data_rank: int) -> dict[str, Any]:
    """Return the whole trace in Chrome's JSON trace format.

    Args:
        timeline: timeline of the run.
        schedule: schedule of the run, which determines where each link leads.
        data_rank: rank at which the first link begins and the last one ends.
    """
    spans = tuple(_with_receives(timeline, _destinations(schedule, data_rank)))
    ranks = {span.rank for span in spans}
    return timeline_events(
        Timeline(timeline.length_s, spans), {rank: _process(schedule, data_rank, rank) for rank in ranks}
    )


def timeline_events(timeline: Timeline, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the spans of a timeline, unchanged, as a trace.

    Args:
        timeline: timeline of any run.
        names: description of each rank.
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


def _with_receives(timeline: Timeline, destinations: Mapping[str, tuple[int, str]]) -> Iterator[Span]:
    for span in timeline.spans:
        yield span
        if span.doing is ThreadState.SEND and span.lane in destinations:
            rank, lane = destinations[span.lane]
            yield Span(rank, lane, ThreadState.RECEIVE, span.start_s, span.end_s, span.microbatch)


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


def _process(schedule: Schedule, data_rank: int, rank: int) -> str:
    """Describe the role of ``rank`` in an inference run."""
    parts = ["data rank"] if rank == data_rank else []
    stage = schedule.stage_of(rank)
    if stage is not None:
        plan = schedule.stages[stage]
        parts += [f"stage {stage}", plan.layers.named, *([plan.host] if plan.host else [])]
    return ", ".join(parts)


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
