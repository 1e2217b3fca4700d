"""Test the page of a saved report: the bottleneck, the charts, and damaged reports."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from mutations import rounds
from saved_reports import poisoned, recovered_epochs, simulated_body, through_json

from pipeedge.base.errors import RequestError
from pipeedge.observe.records import EpochRecord, ReplanRecord
from pipeedge.observe.timeline import Span, ThreadState, Timeline
from pipeedge.report import (
    compare_lines,
    find_bottleneck,
    read_run,
    render_comparison,
    render_run,
    summary_lines,
)
from pipeedge.report.bottleneck import Part
from pipeedge.report.charts import Curve, histogram, lines, si
from pipeedge.report.comparison import compare_runs
from pipeedge.report.gantt import coarsened, to_data
from pipeedge.report.main import ReportRequest, make_report, parse_report
from pipeedge.report.plan_changes import epoch_lines, epochs_body, replans_body
from pipeedge.report.render import gantt_section


class Page(HTMLParser):
    """Elements of a page, and text by section."""

    VOID = frozenset({"meta", "line", "rect", "polyline", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.sections: dict[str | None, str] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._section: str | None = None
        self._open: list[str] = []
        self.feed(html)
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "section":
            self._section = dict(attrs).get("id")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID:
            return
        assert self._open.pop() == tag
        if tag == "section":
            self._section = None

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.sections[self._section] = self.sections.get(self._section, "") + data


def bottleneck(body: dict[str, Any]) -> tuple[Part, int, str]:
    found = find_bottleneck(read_run(through_json(body), "run.json"))
    assert found is not None
    return found.part, found.number, found.line


# --- the bottleneck ---------------------------------------------------------------------------------


@given(st.integers(1, 6), st.data())
@settings(max_examples=40)
def test_slow_stage_is_named(count: int, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, count - 1))
    compute = data.draw(st.lists(st.floats(0.2, 1.0), min_size=count, max_size=count))
    compute[slow] = 1.5
    part, number, line = bottleneck(simulated_body(compute))
    assert (part, number) == (Part.STAGE, slow)
    assert f"Stage {slow} on rank {slow} (pi{slow})" in line


@given(st.integers(2, 6), st.data())
@settings(max_examples=40)
def test_slow_link_is_named(count: int, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, count - 2))
    compute = data.draw(st.lists(st.floats(0.2, 1.0), min_size=count, max_size=count))
    wires = [0.01] * (count - 1)
    wires[slow] = 1.5
    part, number, line = bottleneck(simulated_body(compute, wires))
    assert (part, number) == (Part.LINK, slow + 1)
    assert f"link from stage {slow} on rank {slow}" in line


def seconds(**spent: float) -> dict[str, float]:
    return {name.replace("_", " "): value for name, value in spent.items()}


def body_of(
    *stages: dict[str, float], send_s_best: float = 0.0, link_s: float | None = None
) -> dict[str, Any]:
    """Return a report with only the times of activities."""
    return {
        "model": "m",
        "data_rank": 0,
        "schedule": [{"rank": n, "layers": [n + 1, n + 1]} for n in range(len(stages))],
        "stages": [
            {
                "stage": n,
                "rank": n,
                "seconds": spent,
                "microbatches": 10,
                "send_s_best": send_s_best,
                "link_s": link_s,
            }
            for n, spent in enumerate(stages)
        ],
    }


@pytest.mark.parametrize(
    ("stages", "named"),
    [
        # A stage whose processor stutters is still the one that the others wait for.
        ((seconds(compute=5, wait_link=5), seconds(compute=9.2, wait_input=0.8)), (Part.STAGE, 1)),
        ((seconds(compute=9.2, wait_link=0.8), seconds(compute=5, wait_input=5)), (Part.STAGE, 0)),
        # Both ends wait: it is what is between them.
        ((seconds(compute=6, wait_link=4), seconds(compute=5, wait_input=5)), (Part.LINK, 1)),
        # Nothing else is known of a link's own pace but that.
        ((seconds(compute=4, wait_input=6), seconds(compute=5, wait_input=5)), (Part.LINK, 0)),
        ((seconds(compute=4, wait_link=6), seconds(compute=5, wait_link=5)), (Part.LINK, 2)),
        # Filling and draining say nothing.
        ((seconds(compute=2, drain=8), seconds(compute=1.8, wait_input=0.1, fill=8)), (Part.STAGE, 0)),
    ],
)
def test_bottleneck_follows_from_the_time_shares(
    stages: tuple[dict[str, float], ...], named: tuple[Part, int]
) -> None:
    assert bottleneck(body_of(*stages))[:2] == named


def test_a_saturated_link_is_named_before_a_stage_nearly_as_slow() -> None:
    stages = (seconds(compute=9.3, wait_link=0.7), seconds(compute=9, wait_input=1))
    assert bottleneck(body_of(*stages, send_s_best=0.5))[:2] == (Part.STAGE, 0)
    assert bottleneck(body_of(*stages, send_s_best=0.99))[:2] == (Part.LINK, 1)
    assert bottleneck(body_of(*stages, send_s_best=0.01, link_s=0.99))[:2] == (Part.LINK, 1)


def test_ends_on_the_data_rank_are_named_by_their_activity() -> None:
    assert "Reading the input on rank 0" in bottleneck(body_of(seconds(compute=4, wait_input=6)))[2]
    assert "Writing the results on rank 0" in bottleneck(body_of(seconds(compute=4, wait_link=6)))[2]


@pytest.mark.parametrize(
    ("body", "flags", "end"),
    [
        (body_of(seconds(compute=4, wait_input=6)), ["waits for input"], None),
        (body_of(seconds(compute=4, wait_link=6)), [], "Writing the results holds the others back."),
        (
            body_of(seconds(compute=6, wait_link=4), seconds(compute=5, wait_input=5)),
            ["slow link"],
            None,
        ),
        (
            body_of(seconds(compute=4, wait_link=6), seconds(compute=5, wait_link=5)),
            [],
            "The link back to the data rank holds the others back.",
        ),
        (body_of(seconds(compute=9.9, wait_link=0.1)), [], None),
    ],
)
def test_the_page_flags_a_slow_link_only_where_there_is_a_link(
    body: dict[str, Any], flags: list[str], end: str | None
) -> None:
    html = render_run(read_run(through_json(body), "run.json"))
    assert re.findall(r'class="flag">([^<]*)<', html) == flags
    assert re.findall(r'class="note">([^<]* holds the others back\.)<', html) == ([end] if end else [])


def reading_body(length_s: float, **feed_s: float) -> dict[str, Any]:
    """Return a run of two stages that compute for 4 s each, with the times of its feeding thread."""
    spans, at = [], 0.0
    for doing, length in seconds(**feed_s).items():
        spans.append(Span(0, "feed", ThreadState(doing), at, at + length))
        at += length
    busy = length_s - 4
    body = body_of(seconds(compute=4, wait_input=busy), seconds(compute=4, wait_input=busy))
    return {**body, "data_rank": None, "timeline": Timeline(length_s, tuple(spans)).to_body()}


def test_reading_is_named_where_it_takes_longer_than_any_stage() -> None:
    slow = reading_body(10, read=0.5, wait_input=8.5, drain=1)
    assert bottleneck(slow) == (
        Part.INPUT,
        0,
        "Reading the input on rank 0: the pipeline waits for it 90% of the time",
    )
    assert bottleneck(reading_body(10, read=0.5, wait_input=0.5, wait_link=9))[:2] == (Part.LINK, 0)
    assert bottleneck(reading_body(10, read=2, wait_input=1, wait_link=1, drain=6))[0] is Part.INPUT
    page = Page(render_run(read_run(through_json(slow), "run.json")))
    assert "the pipeline waits for it 90% of the time" in page.sections[None]


def test_time_without_requests_is_idle_and_not_reading() -> None:
    quiet = reading_body(10, read=0.1, idle=9.0, wait_link=0.9)
    assert bottleneck(quiet) == (
        Part.REQUESTS,
        0,
        "None: the pipeline was idle 90% of the time, waiting for requests",
    )
    half = reading_body(10, idle=3.9, wait_link=3.0, drain=3.1)
    assert bottleneck(half)[0] is Part.REQUESTS  # though a stage works as long
    assert bottleneck(reading_body(10, idle=0.2, wait_link=9))[:2] == (Part.LINK, 0)


def test_one_microbatch_that_was_read_longer_than_computed_waited_for_input() -> None:
    """The stages were filling; only the feeding thread shows the reason."""
    body = reading_body(4.01, wait_input=4, read=0.01)
    for stage in body["stages"]:
        stage["seconds"] = seconds(compute=0.005, fill=4.0)
    assert bottleneck(body)[0] is Part.INPUT


def test_no_bottleneck_without_measurements() -> None:
    body = {"model": "m", "schedule": [{"rank": 0, "layers": [1, 4]}]}
    assert find_bottleneck(read_run(body, "r")) is None


# --- the Gantt chart --------------------------------------------------------------------------------


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    spans, longest = [], 0.0
    for lane in range(draw(st.integers(1, 4))):
        at = 0.0
        for number in range(draw(st.integers(0, 60))):
            at += draw(st.sampled_from([0.0, 0.0, 0.003]))
            end = at + draw(st.sampled_from([0.0, 1e-6, 0.001, 0.02, 1.0]))
            spans.append(
                Span(lane, f"stage {lane}", draw(st.sampled_from(list(ThreadState))), at, end, number)
            )
            at = end
        longest = max(longest, at)
    return Timeline(longest, tuple(spans))


@given(timelines(), st.integers(1, 100))
def test_coarser_is_smaller_and_adds_up_to_the_same(timeline: Timeline, limit: int) -> None:
    drawn = coarsened(timeline, spans=limit)
    lanes = len(timeline.lanes)
    if len(timeline.spans) <= limit:
        assert drawn == timeline
    # Each lane has room for every kind of thing at least once.
    if timeline.length_s:
        assert len(drawn.spans) <= max(limit, lanes * len(ThreadState)) + lanes * len(ThreadState)
    for rank, lane in timeline.lanes:
        before, after = timeline.seconds(rank, lane), drawn.seconds(rank, lane)
        for doing in before:
            assert after.get(doing, 0.0) == pytest.approx(before[doing], abs=1e-9)
        spans = [span for span in drawn.spans if span.lane == lane]
        for one, other in itertools.pairwise(spans):
            assert one.end_s <= other.start_s + 1e-9
        assert all(span.end_s <= timeline.length_s + 1e-9 for span in spans)


def test_lanes_beyond_the_limit_are_left_out_evenly() -> None:
    spans = tuple(Span(rank, f"stage {rank}", ThreadState.COMPUTE, 0.0, 1.0) for rank in range(1000))
    ranks = [rank for rank, _ in coarsened(Timeline(1.0, spans), lanes=11).lanes]
    assert (ranks[0], ranks[-1], len(ranks)) == (0, 999, 11)


@given(timelines())
def test_page_data_matches_the_timeline(timeline: Timeline) -> None:
    data = json.loads(json.dumps(to_data(timeline)))
    found = []
    for lane in data["lanes"]:
        at = 0
        for doing, start, length, number in zip(
            lane["doing"], lane["start"], lane["length"], lane["microbatch"], strict=True
        ):
            at += start
            found.append((lane["rank"], lane["lane"], data["shades"][doing]["label"], at, length, number))
    assert len(found) == len(timeline.spans)
    for (rank, lane, _, start, length, number), span in zip(found, timeline.spans, strict=True):
        assert (rank, lane, number) == (span.rank, span.lane, span.microbatch)
        assert start == pytest.approx(span.start_s * 1e6, abs=0.51)
        assert length == pytest.approx(span.seconds * 1e6, abs=1.01)


def test_waits_are_distinguishable_without_colour() -> None:
    spans = tuple(Span(0, "stage 0", doing, 0.0, 1.0) for doing in ThreadState)
    shades = to_data(Timeline(1.0, spans))["shades"]
    assert len({shade["label"] for shade in shades}) == len(ThreadState)
    waits = [shade for shade in shades if "bubble" in shade["label"]]
    assert len(waits) == sum(doing.is_wait for doing in ThreadState)
    assert all(shade["pattern"] for shade in waits)
    assert not any(shade["pattern"] for shade in shades if shade not in waits)


# --- charts -----------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=200))
def test_every_value_is_in_the_histogram_once(values: list[float]) -> None:
    chart = histogram("latency", values, [("median", values[0])])
    counts = [int(found) for found in re.findall(r"<title>(\d+) of", chart.svg)]
    assert sum(counts) == len(values)
    assert max(counts) == int(chart.y_ticks[0])
    assert not re.search(r"nan|inf", chart.svg)


def test_a_series_with_gaps() -> None:
    chart = lines("pace", [Curve("stage 0", [1.0, 2.0, 3.0, 4.0], [5.0, None, 6.0, 7.0])], "items/s")
    assert chart is not None
    assert chart.svg.count("<polyline") == 2
    assert chart.y_ticks == ("10 items/s", "5 items/s", "0 items/s")
    assert lines("nothing", [Curve("stage 0", [1.0], [None])], "s") is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 "), (1, "1 "), (999.4, "999 "), (999.9, "1 k"), (0.0123456, "12.3 m"), (2.5e9, "2.5 G")],
)
def test_figures_have_three_digits_and_a_prefix(value: float, text: str) -> None:
    assert si(value) == text


# --- the page ---------------------------------------------------------------------------------------

SECTIONS = {
    "timeline": "gantt",
    "energy": "energy",
    "predicted": "predicted",
    "skipped": "skipped",
}


def test_a_whole_report_has_every_section() -> None:
    page = Page(render_run(read_run(through_json(simulated_body([1.0, 2.0])), "run.json")))
    wanted = {"schedule", "gantt", "times", "charts", "predicted", "energy", "stages", "skipped", "origin"}
    assert wanted <= set(page.sections)
    assert "pi1" in page.sections["schedule"]
    assert "layers 5–8" in page.sections["schedule"]
    assert "250 MB" in page.sections["schedule"]
    assert "rapl" in page.sections["energy"]
    assert "not measured on pi1" in page.sections["energy"]
    assert "RAPL: no counters" in page.sections["energy"]
    assert "runtime.py 0 2 -pt 1,4,5,8" in page.sections["origin"]
    assert "torch 2.13.0" in page.sections["origin"]
    assert "90.00%" in page.sections[None]
    assert "Stage 1 on rank 1 (pi1)" in page.sections[None]


def test_missing_part_leaves_out_only_its_section() -> None:
    whole = simulated_body([1.0, 2.0], microbatches=4)
    for key in sorted(set(whole) - {"model", "schedule"}):
        body = {name: value for name, value in whole.items() if name != key}
        page = Page(render_run(read_run(through_json(body), "run.json")))
        if key in SECTIONS:
            assert SECTIONS[key] not in page.sections
        null = Page(render_run(read_run({**through_json(whole), key: None}, "run.json")))
        assert null.sections == page.sections, key
    least = {name: whole[name] for name in ("model", "schedule")}
    assert "schedule" in Page(render_run(read_run(through_json(least), "run.json"))).sections


def test_epochs_are_shown_if_a_failure_was_survived() -> None:
    body = simulated_body([1.0, 1.6, 0.7])
    body["epochs"] = epochs_body(recovered_epochs())
    run = read_run(through_json(body), "run.json")
    page = Page(render_run(run))
    for expected in ("no heartbeat for 2 s", "5–12 on rank 3", "250 ms", "1.5 s", "computed again"):
        assert expected in page.sections["epochs"], expected
    assert "5.75 s without a new result, 7 microbatches computed again" in page.sections[None]
    gantt = gantt_section(run.timeline, run.epochs)
    assert gantt is not None
    assert gantt.data["marks"] == [
        {"label": "epoch 2", "start": 9_750_000, "end": 11_500_000},
        {"label": "epoch 3", "start": 18_000_000, "end": 22_000_000},
    ]
    body["epochs"] = body["epochs"][:1]
    undisturbed = Page(render_run(read_run(through_json(body), "run.json")))
    assert "epochs" not in undisturbed.sections


def several_epochs() -> dict[str, Any]:
    """Return a report of three epochs on four ranks; the last one is drawn on the lanes of the run."""
    body = simulated_body([1.0, 1.6])
    body["epochs"] = epochs_body(foretold_epochs())
    body["schedule"] = body["epochs"][-1]["schedule"]
    spans = (
        Span(0, "epoch 1, stage 0", ThreadState.COMPUTE, 0.0, 9.75),
        Span(2, "epoch 1, stage 2", ThreadState.WAIT_INPUT, 0.0, 9.75),
        Span(0, "epoch 2, stage 0", ThreadState.RECOVER, 9.75, 10.5),
        Span(0, "epoch 2, stage 0", ThreadState.COMPUTE, 10.5, 18.0),
        Span(0, "stage 0", ThreadState.RECOVER, 18.0, 20.0),
        Span(0, "stage 0", ThreadState.COMPUTE, 20.0, 40.0),
        Span(3, "stage 1", ThreadState.COMPUTE, 20.0, 40.0),
    )
    for stage in body["stages"]:
        del stage["seconds"]
    body["timeline"] = Timeline(40.0, spans).to_body()
    body["series"] = [
        {"stage": 0, "rank": 0, "epoch": epoch, "t_s": [start, start + 1], "items_per_s": [rate, rate]}
        for epoch, start, rate in ((3, 21.0, 8.0), (1, 1.0, 4.0))
    ]
    return body


def foretold_epochs() -> list[EpochRecord]:
    first, second, third = recovered_epochs()
    return [
        replace(first, predicted_items_per_s=40.0, steady_items_per_s=10.0),
        replace(second, predicted_items_per_s=30.0),
        replace(third, predicted_items_per_s=8.0, steady_items_per_s=7.9),
    ]


def test_the_time_of_each_epoch_is_accounted_for_and_then_summed_up() -> None:
    run = read_run(through_json(several_epochs()), "run.json")
    shown = Page(render_run(run)).sections["times"]
    for expected in ("epoch 1, 9.75 s", "epoch 2, 8.25 s", "epoch 3, 22 s", "all epochs, 40 s"):
        assert expected in shown, expected
    assert "Nothing was recorded of stage 1 on rank 1, layers 5–8, whose rank was lost." in shown
    assert [one.stages[0].seconds for one in run.epochs] == [
        {"compute": pytest.approx(9.75)},
        {"recover": pytest.approx(0.75), "compute": pytest.approx(7.5)},
        {"recover": pytest.approx(2.0), "compute": pytest.approx(20.0)},
    ]
    table = shown[shown.index("sum") :]  # bars come first, then the table
    (whole,) = re.findall(r"all epochs.*?rank 0\s*(.*?)rank 2", table, re.DOTALL)
    assert "37.2 s" in whole  # computing: 9.75 + 7.5 + 20
    assert "2.75 s" in whole  # two recoveries


def test_each_epoch_is_compared_with_its_own_plan() -> None:
    page = Page(render_run(read_run(through_json(several_epochs()), "run.json")))
    said = page.sections["predicted"]
    assert "throughput of epoch 1, full pipeline40 items/s10 items/s-75.0 %" in said
    assert "throughput of epoch 3, full pipeline8 items/s7.9 items/s" in said
    assert "epoch 2" not in said  # a failure came before its second result
    assert "-75.0 %" in page.sections["epochs"]
    (line,) = (line for line in epoch_lines(foretold_epochs()) if "predicted" in line)
    assert line == "epoch 1 was predicted to reach 40 items/s, measured 10 (-75.0%)"


def test_curves_begin_with_the_first_epoch() -> None:
    page = render_run(read_run(through_json(several_epochs()), "run.json"))
    chart = page[page.index("Throughput of each stage") :]
    parts = re.findall(r'points="([^"]+)"', chart[: chart.index("</figure>")])
    assert len(parts) == 2  # one curve, with a gap between the epochs
    assert float(parts[0].split(",")[0]) < float(parts[1].split(",")[0])


def test_the_bottleneck_is_that_of_the_last_epoch() -> None:
    found = find_bottleneck(read_run(through_json(several_epochs()), "run.json"))
    assert found is not None
    assert found.line.startswith("In epoch 3, the last one: Stage 0 on rank 0, layers 1–4: it works 100%")


def test_better_plans_are_shown_with_their_gains() -> None:
    body = simulated_body([1.0, 1.6, 0.7])
    schedule = recovered_epochs()[0].schedule
    body["replans"] = replans_body(
        [
            ReplanRecord(3.0, "b is slow", schedule, 0.25, "switched", 7, 1.5, 0.2),
            ReplanRecord(9.0, "c is slow", schedule, 0.5),
        ]
    )
    shown = Page(render_run(read_run(through_json(body), "run.json"))).sections[None]
    for expected in ("+20%", "+25% predicted; b is slow", "+50% predicted", "c is slow"):
        assert expected in shown, expected


def test_the_times_of_a_stage_are_the_length_of_the_run() -> None:
    body = simulated_body([1.0, 2.0, 0.5], [0.3, 0.8])
    said = read_run(through_json(body), "run.json")
    for stage in body["stages"]:
        del stage["seconds"]
    drawn = read_run(through_json(body), "run.json")
    for stage in (*said.stages, *drawn.stages):
        assert stage.seconds is not None
        assert math.fsum(stage.seconds.values()) == pytest.approx(body["elapsed_s"], rel=1e-4)


def test_no_text_of_a_report_becomes_markup() -> None:
    clean, dirty = (
        read_run(through_json(body), "run.json")
        for body in (simulated_body([1.0, 2.0]), poisoned(simulated_body([1.0, 2.0])))
    )
    for make in (render_run, lambda run: render_comparison(run, run)):
        good, bad = Page(make(clean)), Page(make(dirty))
        assert [tag for tag, _ in good.tags] == [tag for tag, _ in bad.tags]
        assert not [attrs for _, attrs in bad.tags if any(name.startswith("on") for name in attrs)]


def test_page_is_self_contained() -> None:
    html = render_run(read_run(through_json(simulated_body([1.0, 2.0])), "run.json"))
    page = Page(html)
    assert not [attrs for _, attrs in page.tags if {"src", "href"} & set(attrs)]
    assert "url(" not in html
    assert "@import" not in html
    assert len(html) < 200_000


def test_a_page_stays_small_however_long_the_run() -> None:
    body = simulated_body([1.0, 1.1], microbatches=6_000)
    html = render_run(read_run(through_json(body), "run.json"))
    assert len(html) < 400_000  # and almost 700,000 if all was drawn
    assert "The run is too long" in html


def mutations(body: Any, chance: random.Random) -> Any:
    """Yield ``body`` with one of its values replaced."""
    body = copy.deepcopy(body)
    node = body
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = chance.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and chance.random() < 0.8:
            node = node[key]
            continue
        node[key] = chance.choice(["text", -1, 1.5, 1e400, float("nan"), [], {}, True, [[]], {"a": 1}])
        return body


@pytest.mark.parametrize("seed", range(rounds(15)))
def test_a_report_that_is_damaged_gives_one_line_or_a_page(seed: int) -> None:
    body = mutations(through_json(simulated_body([1.0, 2.0], microbatches=3)), random.Random(seed))
    refused = ""
    try:
        run = read_run(body, "run.json")
        Page(render_run(run))
        compare_lines(run, run)
    except RequestError as error:
        refused = str(error)
    assert refused == "" or re.fullmatch("run.json: .*", refused)


# --- two runs ---------------------------------------------------------------------------------------


def test_two_runs_side_by_side() -> None:
    a, b = simulated_body([1.0, 2.0]), simulated_body([1.0, 1.0])
    b |= {"simulated": False, "command": ["runtime.py", "0", "2", "-pt", "1,4,5,8", "-q", "8,0"]}
    runs = [read_run(through_json(body), name) for body, name in ((a, "a.json"), (b, "b.json"))]
    groups = {group.title: {row.name: row for row in group.rows} for group in compare_runs(*runs)}
    faster = groups["Whole run"]["throughput"]
    assert faster.better is True
    assert float(faster.change.rstrip("%")) == pytest.approx(95, abs=4)
    assert groups["Stage 1"]["compute a microbatch"].change == "-50.0%"
    assert groups["Stage 0"]["compute a microbatch"].better is None
    asked = groups["Asked differently"]
    assert (asked["kind"].a, asked["kind"].b) == ("simulated", "measured")
    assert (asked["command"].a, asked["command"].b) == ("–", "-q 8,0")
    assert "model" not in asked
    page = Page(render_comparison(*runs))
    assert sum(tag == "canvas" for tag, _ in page.tags) == 2
    assert any("throughput" in line and "+9" in line for line in compare_lines(*runs))
    assert "no room for: change" not in compare_lines(*runs, room=90)
    narrow = compare_lines(*runs, room=45)
    assert "no room for: change" in narrow
    assert all(len(line) <= 45 for line in narrow[: narrow.index("no room for: change")])


def test_runs_of_different_shape_are_compared_too() -> None:
    a, b = (read_run(through_json(simulated_body(costs)), "r") for costs in ([1.0], [0.5, 0.5, 0.1]))
    titles = [group.title for group in compare_runs(a, b)]
    assert titles[:4] == ["Whole run", "Stage 0", "Stage 1", "Stage 2"]
    Page(render_comparison(a, b))


# --- pipeedge-report --------------------------------------------------------------------------------


def save(path: Path, body: Any) -> Path:
    path.write_text(json.dumps(body))
    return path


def test_the_program_writes_a_page_beside_the_report(tmp_path: Path) -> None:
    run = save(tmp_path / "run.json", simulated_body([1.0, 2.0]))
    said = make_report(parse_report([str(run)]))
    assert said[-1].endswith("run.html")
    assert any(line.startswith("bottleneck  Stage 1") for line in said)
    assert "some/model" in (tmp_path / "run.html").read_text()
    other = save(tmp_path / "other.json", simulated_body([1.0, 1.0]))
    make_report(ReportRequest((run, other)))
    make_report(ReportRequest((run, other), tmp_path / "named.html"))
    assert {path.name for path in tmp_path.iterdir()} == {
        "run.json",
        "run.html",
        "other.json",
        "run-other.html",
        "named.html",
    }
    assert summary_lines(read_run(json.loads(run.read_text()), "r"))[0] == "some/model (simulated)"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["no.json"], "no.json: cannot be read (No such file or directory)"),
        (["bad.json"], "bad.json: is not valid JSON"),
        (["deep.json"], "deep.json: is not valid JSON"),
        (["list.json"], "list.json: is not an object; is it a report of this program?"),
        (["empty.json"], "empty.json: has no model"),
        (["good.json", "-o", "page.txt"], "page.txt: the page is HTML"),
        (["good.json", "-o", "nowhere/page.html"], "the directory nowhere does not exist"),
        (["good.json"] * 3, "3 reports: give one to show, or two to compare"),
        (["."], "is a directory, not a report"),
    ],
)
def test_bad_input_gets_one_line(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_bytes(b"\xff\x00{")
    Path("deep.json").write_text("[" * 200_000)
    save(Path("list.json"), [1, 2])
    save(Path("empty.json"), {})
    save(Path("good.json"), simulated_body([1.0]))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RequestError, match=re.escape(line)):
        make_report(parse_report(arguments))
    assert sorted(tmp_path.iterdir()) == before
