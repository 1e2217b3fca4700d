"""Test the trace: Perfetto's format, every span once, and a receive for every send."""

from __future__ import annotations

import json

from saved_reports import recovered_epochs

from pipeedge.base.schedule import Schedule
from pipeedge.observe.timeline import Span, ThreadState, Timeline
from pipeedge.observe.trace import trace_events

SCHEDULE = (
    Schedule.from_partition([1, 6, 7, 16]).with_rank_order([1, 0], world_size=2).with_hosts(["mb-1", "mb-0"])
)


def test_a_row_for_each_rank_and_thread() -> None:
    spans = (
        Span(1, "stage 0", ThreadState.FILL, 0.0, 0.001),
        Span(1, "stage 0", ThreadState.COMPUTE, 0.001, 0.003, 0),
        Span(1, "stage 0", ThreadState.WAIT_INPUT, 0.003, 0.004, 1),
        Span(1, "stage 0 link", ThreadState.SEND, 0.003, 0.0045, 0),
        Span(0, "stage 1", ThreadState.COMPUTE, 0.0045, 0.006, 0),
        Span(0, "stage 1 link", ThreadState.SEND, 0.006, 0.0061, 0),
        Span(2, "feed link", ThreadState.SEND, 0.0, 0.001, 0),
        Span(2, "collect", ThreadState.WRITE, 0.0061, 0.007, 0),
    )
    trace = json.loads(json.dumps(trace_events(Timeline(0.007, spans), SCHEDULE, 2)))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    meta = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    processes = {event["pid"]: event["args"]["name"] for event in meta if event["name"] == "process_name"}
    lanes = [event for event in meta if event["name"] == "thread_name"]
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in lanes}
    assert processes == {
        0: "rank 0 (stage 1, layers 7-16, mb-1)",
        1: "rank 1 (stage 0, layers 1-6, mb-0)",
        2: "rank 2 (data rank)",
    }
    named = {
        (event["pid"], threads[event["pid"], event["tid"]], event["name"], event["ts"], event["dur"])
        for event in events
    }
    assert named == {
        (1, "stage 0", "fill", 0, 1000),
        (1, "stage 0", "compute 0", 1000, 2000),
        (1, "stage 0", "wait input", 3000, 1000),
        (1, "stage 0 link", "send 0", 3000, 1500),
        (0, "from stage 0", "receive 0", 3000, 1500),
        (0, "stage 1", "compute 0", 4500, 1500),
        (0, "stage 1 link", "send 0", 6000, 100),
        (2, "from stage 1", "receive 0", 6000, 100),
        (2, "feed link", "send 0", 0, 1000),
        (1, "from the data rank", "receive 0", 0, 1000),
        (2, "collect", "write 0", 6100, 900),
    }
    assert {event["cat"] for event in events if event["name"].startswith(("wait", "fill"))} == {"wait"}
    assert len({event["tid"] for event in events}) == len(threads)


def test_a_run_of_one_rank_has_one_process() -> None:
    schedule = Schedule.from_partition([1, 16])
    trace = trace_events(
        Timeline(1.0, (Span(0, "stage 0", ThreadState.COMPUTE, 0.0, 1.0, 0),)), schedule, data_rank=0
    )
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["rank 0 (data rank, stage 0, layers 1-16)"]


def test_recoveries_have_a_row_and_links_lead_where_their_epoch_has_them() -> None:
    epochs = recovered_epochs()
    sends = [Span(0, "stage 0 link", ThreadState.SEND, at, at + 0.1, 7) for at in (5.0, 12.0, 21.0)]
    spans = (*sends, Span(3, "stage 1", ThreadState.COMPUTE, 21.2, 21.5, 7))
    trace = trace_events(Timeline(30.0, spans), epochs[0].schedule, 0, epochs)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    receives = [(event["pid"], event["ts"]) for event in events if event["name"] == "receive 7"]
    assert receives == [(1, 5e6), (3, 12e6), (3, 21e6)]
    parts = [(event["name"], event["ts"], event["dur"]) for event in events if event["cat"] == "recovery"]
    assert parts == [
        ("wait for the plan", 9.75e6, 0.25e6),
        ("prepare the plan", 10e6, 0.5e6),
        ("fill the pipeline", 10.5e6, 1e6),
        ("wait for the plan", 18e6, 0.5e6),
        ("prepare the plan", 18.5e6, 1.5e6),
        ("fill the pipeline", 20e6, 2e6),
    ]
    moments = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert [(event["name"], event["ts"], event["s"]) for event in moments] == [
        ("epoch 2", 10.5e6, "g"),
        ("epoch 3", 20e6, "g"),
    ]
    assert moments[0]["args"] == {"cause": epochs[1].cause, "repeated": 4}
    names = {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    assert names[0] == "rank 0 (data rank, stage 0, layers 1-4)"
    assert names[3] == "rank 3 (stage 1, layers 5-8, then stage 1, layers 5-12)"
    threads = [event for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert len({event["tid"] for event in threads}) == len(threads)
    assert {event["args"]["name"] for event in threads if event["pid"] == 0} == {"stage 0 link", "recovery"}
