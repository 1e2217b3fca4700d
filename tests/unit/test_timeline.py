"""Test that spans read back as written, and add up."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeedge.observe.timeline import Span, ThreadState, Timeline

_SPANS = st.builds(
    lambda rank, lane, doing, start, length, microbatch: Span(
        rank, lane, doing, start, start + length, microbatch
    ),
    st.integers(0, 3),
    st.sampled_from(["stage 0", "stage 0 link", "feed"]),
    st.sampled_from(ThreadState),
    st.floats(-1e3, 1e3),
    st.floats(0, 1e3),
    st.none() | st.integers(0, 10**6),
)


def _key(span: Span) -> tuple[object, ...]:
    return span.rank, span.lane, span.doing, span.microbatch


@given(st.lists(_SPANS, max_size=30))
def test_a_timeline_reads_back_to_the_microsecond(spans: list[Span]) -> None:
    timeline = Timeline(12.5, tuple(spans))
    again = Timeline.from_body(json.loads(json.dumps(timeline.to_body())))
    assert again.length_s == 12.5
    assert again.lanes == timeline.lanes
    for lane in timeline.lanes:
        before = [span for span in timeline.spans if (span.rank, span.lane) == lane]
        after = [span for span in again.spans if (span.rank, span.lane) == lane]
        assert [_key(span) for span in before] == [_key(span) for span in after]
        for one, other in zip(before, after, strict=True):
            assert abs(one.start_s - other.start_s) <= 0.6e-6
            assert abs(one.end_s - other.end_s) <= 0.6e-6


@given(st.lists(_SPANS, max_size=30))
def test_the_times_of_a_lane_add_up(spans: list[Span]) -> None:
    timeline = Timeline(1.0, tuple(spans))
    total = sum(sum(timeline.seconds(rank, lane).values()) for rank, lane in timeline.lanes)
    assert total == pytest.approx(sum(span.end_s - span.start_s for span in spans))


def test_a_span_does_not_end_before_it_starts() -> None:
    with pytest.raises(ValueError, match="ends at 1"):
        Span(0, "feed", ThreadState.SEND, 2.0, 1.0)
