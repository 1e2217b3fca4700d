"""Test reading ahead in threads: in order, bounded, ended by an error or a stop."""

from __future__ import annotations

import threading

import pytest
from fake_items import NumberedItems

from pipeedge.base.crew import Closed, Crew
from pipeedge.base.errors import InputError
from pipeedge.data import Group, InputSource, InputStream
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


def numbers(stream: InputStream, *sizes: int) -> list[list[int]]:
    """Take microbatches of some sizes, the last size until there is none left; return the items of each."""
    found, left = [], list(sizes)
    while (group := stream.next(left.pop(0) if len(left) > 1 else left[0])) is not None:
        found.append([number for number, _ in group.numbered])
    return found


def test_items_are_in_order_although_read_out_of_order() -> None:
    items = Gated(9)
    stream = InputStream(InputSource(items), threads=2)
    stream.start(Crew())
    assert numbers(stream, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert items.read_now[:2] == [1, 0]
    assert sum(lane.microbatches for lane in stream.lanes) == 9


def test_no_more_than_a_microbatch_is_read_ahead() -> None:
    items, crew = Gated(160, paired=False), Crew()
    stream = InputStream(InputSource(items), threads=2)
    stream.start(crew)
    for taken in range(4, 120, 4):
        stream.next(4)
        with items.changed:
            # All that there is room for is read, and no more.
            assert items.changed.wait_for(lambda taken=taken: len(items.read_now) >= taken + 4, 30)  # type: ignore[misc]
            assert max(items.read_now) < taken + 4
    crew.stop()


@pytest.mark.parametrize("threads", [0, 2])
def test_plan_with_microbatches_of_another_size_goes_on_where_the_last_one_stopped(threads: int) -> None:
    """The stream outlasts the first plan, and each item is read once."""
    items, crews = Gated(20, paired=False), (Crew(), Crew())
    stream = InputStream(InputSource(items), threads=threads)
    for crew in crews:
        stream.start(crew)
    assert numbers(stream, 2, 2, 5) == [
        [0, 1],
        [2, 3],
        [*range(4, 9)],
        [*range(9, 14)],
        [*range(14, 19)],
        [19],
    ]
    assert sorted(items.read_now) == list(range(20))
    crews[1].stop()
    if threads:
        with pytest.raises(Closed):
            InputStream.next(stream_closed_early(crews[0]), 3)


def stream_closed_early(crew: Crew) -> InputStream:
    """Return a stream that is closed when ``crew`` is stopped, which happens at once."""
    stream = InputStream(InputSource(Gated(3, stuck=0)), threads=1)
    stream.start(crew)
    crew.stop()
    return stream


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_first_bad_item_in_order_ends_the_run(threads: int) -> None:
    """An item beyond it may be bad too, and be read before it."""
    items = Gated(8, frozenset({5, 4, 7}))
    items.read_now += [1, 3, 5, 7] if threads == 1 else []
    stream = InputStream(InputSource(items), threads=threads)
    stream.start(Crew())
    assert [number for number, _ in (stream.next(4) or Group([])).numbered] == [0, 1, 2, 3]
    with pytest.raises(InputError, match="item 4 is bad"):
        stream.next(4)


def test_bad_items_that_are_skipped_leave_gaps() -> None:
    source = InputSource(Gated(8, frozenset({1, 4})), skip_bad=True)
    stream = InputStream(source, threads=2)
    stream.start(Crew())
    assert numbers(stream, 3) == [[0, 2, 3], [5, 6, 7]]
    assert [skipped.reason for skipped in source.skipped] == ["item 1 is bad", "item 4 is bad"]


@pytest.mark.parametrize("position", [None, 2, 5])
def test_skipped_items_count_once_however_often_they_are_read(position: int | None) -> None:
    source = InputSource(Gated(8, frozenset({1, 4, 6}), paired=False), skip_bad=True)
    for at, groups in ((None, 2), (position, 9)):
        crew, stream = Crew(), source.stream(position=at)
        stream.start(crew)
        for _ in range(groups):
            stream.next(2)
        crew.stop(Closed())
    assert [skipped.reason for skipped in source.skipped] == [f"item {n} is bad" for n in (1, 4, 6)]


def test_stop_wakes_waiters_while_a_read_hangs() -> None:
    crew = Crew()
    stream = InputStream(InputSource(Gated(6, stuck=2)), threads=2)
    stream.start(crew)
    crew.start("feed", lambda: numbers(stream, 1) and None)
    crew.stop(InputError("stopped"))
    with pytest.raises(InputError, match="stopped"):
        crew.wait(30)
    assert crew.join(30)


def test_unexpected_error_ends_the_run_in_its_turn() -> None:
    class Faulty(Gated):
        def read(self, index: int) -> Item:
            if index == 1:
                raise MemoryError("no memory for item 1")
            return super().read(index)

    stream = InputStream(InputSource(Faulty(2, paired=False)), threads=1)
    stream.start(Crew())
    assert stream.next(1) is not None
    with pytest.raises(MemoryError, match="item 1"):
        stream.next(1)
