"""Test reading ahead in threads: in order, bounded, ended by an error or a stop."""

from __future__ import annotations

import threading

import pytest
from fake_items import NumberedItems

from pipeedge.base.crew import Closed, Crew
from pipeedge.base.errors import InputError
from pipeedge.data import DataSetSource, InputSource, ReadAhead
from pipeedge.data.items import Item


class Gated(NumberedItems):
    """Items of which, where they are paired, the even ones wait for the odd one after them.

    Args:
        count: How many there are.
        bad: Items that cannot be read.
        stuck: An item whose reading never ends.
        paired: Whether items wait for one another.
    """

    def __init__(
        self, count: int, bad: frozenset[int] = frozenset(), *, stuck: int | None = None, paired: bool = True
    ) -> None:
        super().__init__(count, self._gate)
        self.read_now: list[int] = []
        self.changed = threading.Condition()
        self._bad = bad
        self._stuck = stuck
        self._paired = paired

    def _gate(self, index: int) -> None:
        if index == self._stuck:
            threading.Event().wait()
        with self.changed:
            if self._paired and index % 2 == 0 and index + 1 < self.count:
                assert self.changed.wait_for(lambda: index + 1 in self.read_now, 30)
            self.read_now.append(index)
            self.changed.notify_all()
        if index in self._bad:
            raise InputError(f"item {index} is bad")


def test_items_are_in_order_although_read_out_of_order() -> None:
    items, crew = Gated(9), Crew()
    source = InputSource(items)
    reading = ReadAhead(source, 4, threads=2)
    reading.start(crew)
    groups = list(source.groups(4, reading.readings()))
    assert crew.wait(30)
    assert [[number for number, _ in group.numbered] for group in groups] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert items.read_now[:2] == [1, 0]
    assert sum(lane.microbatches for lane in reading.lanes) == 9


def test_no_more_than_a_microbatch_is_read_ahead() -> None:
    items, crew = Gated(40, paired=False), Crew()
    reading = ReadAhead(InputSource(items), 4, threads=2)
    reading.start(crew)
    readings = reading.readings()
    for taken in range(1, 30):
        next(readings)
        with items.changed:
            # All that there is room for is read, and no more.
            assert items.changed.wait_for(lambda taken=taken: len(items.read_now) >= taken + 4, 30)  # type: ignore[misc]
            assert max(items.read_now) < taken + 4
    reading.close()
    assert crew.wait(30)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_first_bad_item_in_order_ends_the_run(threads: int) -> None:
    """An item beyond it may be bad too, and be read before it."""
    items, crew = Gated(8, frozenset({5, 4, 7})), Crew()
    items.read_now += [1, 3, 5, 7] if threads == 1 else []
    source = InputSource(items)
    reading = ReadAhead(source, 8, threads=threads)
    crew.start("feed", lambda: list(source.groups(2, reading.readings())) and None)
    reading.start(crew)
    with pytest.raises(InputError, match="item 4 is bad"):
        crew.wait(30)
    with pytest.raises(Closed):
        next(reading.readings())


def test_bad_items_that_are_skipped_leave_gaps() -> None:
    items, crew = Gated(8, frozenset({1, 4})), Crew()
    source = InputSource(items, skip_bad=True)
    reading = ReadAhead(source, 2, threads=2)
    reading.start(crew)
    groups = list(source.groups(3, reading.readings()))
    assert [[number for number, _ in group.numbered] for group in groups] == [[0, 2, 3], [5, 6, 7]]
    assert [skipped.reason for skipped in source.skipped] == ["item 1 is bad", "item 4 is bad"]


@pytest.mark.parametrize("position", [None, 2, 5])
def test_skipped_items_count_once_however_often_they_are_read(position: int | None) -> None:
    source = DataSetSource(InputSource(Gated(8, frozenset({1, 4, 6}), paired=False), skip_bad=True))
    for at, groups in ((None, 2), (position, 9)):
        crew, stream = Crew(), source.stream(2, position=at)
        stream.start(crew)
        for _ in range(groups):
            stream.take()
        crew.stop(Closed())
    assert [skipped.reason for skipped in source.skipped] == [f"item {n} is bad" for n in (1, 4, 6)]


def test_stop_wakes_waiters_while_a_read_hangs() -> None:
    items, crew = Gated(6, stuck=2), Crew()
    source = InputSource(items)
    reading = ReadAhead(source, 1, threads=2)
    reading.start(crew)
    crew.start("feed", lambda: list(source.groups(1, reading.readings())) and None)
    crew.stop(InputError("stopped"))
    with pytest.raises(InputError, match="stopped"):
        crew.wait(30)


def test_unexpected_error_ends_the_crew() -> None:
    class Faulty(Gated):
        def read(self, index: int) -> Item:
            raise MemoryError("no memory for item 0")

    crew = Crew()
    source = InputSource(Faulty(2))
    reading = ReadAhead(source, 2, threads=1)
    reading.start(crew)
    crew.start("feed", lambda: list(source.groups(2, reading.readings())) and None)
    with pytest.raises(MemoryError, match="item 0"):
        crew.wait(30)
