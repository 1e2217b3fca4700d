"""Test clocks: the offset is found to half the shortest round trip, and drift is followed."""

from __future__ import annotations

import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from pipeedge.control.announcement import Announcement
from pipeedge.control.clocks import ClockMap
from pipeedge.control.hub import Hub
from pipeedge.control.hub_address import HubAddress
from pipeedge.control.hub_client import HubClient
from pipeedge.control.messages import Planned, Summary

ways = st.tuples(st.floats(1e-5, 0.05), st.floats(1e-5, 0.05))


def exchange(clock: ClockMap, at: float, way: tuple[float, float], offset: float) -> None:
    clock.add(at, at + way[0] + offset, at + sum(way))


@given(st.lists(ways, min_size=1, max_size=300), st.floats(-1e5, 1e5), st.floats(0, 1000))
def test_the_offset_is_wrong_by_no_more_than_good_round_trips(
    trips: list[tuple[float, float]], offset: float, asked: float
) -> None:
    clock = ClockMap()
    for number, way in enumerate(trips):
        exchange(clock, float(number), way, offset)
    bound = 1.5 * min(map(sum, trips)) / 2
    # Two exchanges that are wrong in opposite directions look like drift, which goes on beyond them.
    assert abs(clock(asked) - (asked + offset)) <= 3 * bound + 1e-6


def test_drift_is_followed() -> None:
    clock = ClockMap()
    for second in range(0, 3600, 2):
        # 50 us a second, and one exchange in three takes its time.
        way = (0.2, 0.0001) if second % 3 == 0 else (0.0001, 0.0001)
        exchange(clock, float(second), way, 10 + second * 50e-6)
    for second in (0, 100, 1777, 3600):
        assert clock(second) == pytest.approx(second + 10 + second * 50e-6, abs=2e-4)


def test_without_an_exchange_time_is_what_it_is() -> None:
    assert ClockMap()(5.0) == 5.0


def test_members_know_the_hubs_clock() -> None:
    """The hub's clock begins when it opens; the members' run clock is an hour ahead of it."""
    listener = socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()
    ahead = 3600.0

    def clock() -> float:
        return time.monotonic() + ahead

    before = clock()
    with Hub(listener, world_size=1, timeout_s=60) as hub:
        after = clock()
        connection = HubAddress(address, port).dial(60)
        with HubClient(connection, rank=0, timeout_s=60, run_clock=clock) as member:
            member.hello(world_size=1, host="here")
            member.facts({})
            hub.gather()
            announcement = Announcement(Raw(b"{}"), (0,), data_rank=0)
            hub.apply(lambda state, now: state.plan(announcement, now))
            member.wait(Planned)
            order = member.turns.next()
            assert order is not None
            member.turns.ready(order.prepare.epoch)
            long = "a" * 60_000 + '"' * 60_000
            for number in range(11):
                member.record(f"\n{number}{long}")
            member.done({})
            member.wait(Summary)
            # The last ones, as the process of a run that fails often must not grow.
            assert member.records() == {0: "".join(f"\n{number}{long}" for number in range(2, 11))}
            error_s = clock() - before  # no exchange took longer
            assert member.hub_clock(before) <= error_s
            assert member.hub_clock(after) >= -error_s
