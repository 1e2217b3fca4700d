"""Test channels: bounded, in order, and no thread waits forever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import LIMIT_S

from pipeedge.base.channel import Channel
from pipeedge.base.crew import Closed


class Thread(threading.Thread):
    """Runs ``work``; ``outcome`` is what it returned, or the exception it raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.outcome: object = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._work()
        except BaseException as error:
            self.outcome = error

    def ended(self) -> object:
        self.join(LIMIT_S)
        assert not self.is_alive(), "still waiting"
        return self.outcome

    def waits(self) -> bool:
        self.join(0.05)
        return self.is_alive()


def test_values_are_ordered_and_bounded_by_the_capacity() -> None:
    channel: Channel[int] = Channel(2)
    produced: list[int] = []

    def produce() -> None:
        for number in range(500):
            channel.put(number)
            produced.append(number)
        channel.finish()

    thread = Thread(produce)
    taken: list[int] = []
    while (value := channel.get()) is not None:
        taken.append(value)
        assert len(produced) <= len(taken) + 2 + 1  # two queued, one just handed over
    assert taken == list(range(500))
    assert thread.ended() is None


def test_full_channel_blocks_its_producer() -> None:
    channel: Channel[str] = Channel(1)
    channel.put("a")
    thread = Thread(lambda: channel.put("b"))
    assert thread.waits()
    assert channel.get() == "a"
    assert thread.ended() is None
    assert channel.get() == "b"
    assert channel.empty


def test_finish_drains_queued_values() -> None:
    channel: Channel[int] = Channel(2)
    channel.put(1)
    channel.put(2)
    channel.finish()
    assert [channel.get(), channel.get(), channel.get(), channel.get()] == [1, 2, None, None]
    with pytest.raises(Closed):
        channel.put(3)


def test_finish_wakes_a_waiting_consumer() -> None:
    channel: Channel[int] = Channel(1)
    thread = Thread(channel.get)
    assert thread.waits()
    channel.finish()
    assert thread.ended() is None


@pytest.mark.parametrize("side", ["put", "get"])
def test_close_wakes_all_threads_for_good(side: str) -> None:
    channel: Channel[int] = Channel(1)
    if side == "put":
        channel.put(0)
    threads = [Thread(channel.get if side == "get" else lambda: channel.put(1)) for _ in range(3)]
    assert all(thread.waits() for thread in threads)
    channel.close()
    assert all(isinstance(thread.ended(), Closed) for thread in threads)
    with pytest.raises(Closed):
        channel.get()
    with pytest.raises(Closed):
        channel.put(2)


def test_close_after_finish_raises_closed() -> None:
    channel: Channel[int] = Channel(1)
    channel.put(1)
    channel.finish()
    channel.close()
    with pytest.raises(Closed):
        channel.get()


def test_many_threads_neither_lose_nor_duplicate_values() -> None:
    channel: Channel[int] = Channel(3)
    taken: list[int] = []

    def consume() -> None:
        while (value := channel.get()) is not None:
            taken.append(value)

    consumers = [Thread(consume) for _ in range(4)]
    producers = [
        Thread(lambda first=first: [channel.put(value) for value in range(first, 400, 4)])
        for first in range(4)
    ]
    for thread in producers:
        thread.ended()
    channel.finish()
    for thread in consumers:
        thread.ended()
    assert sorted(taken) == list(range(400))


def test_capacity_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Channel(0)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's account of threads")
def test_waiting_costs_no_processor_time() -> None:
    """Threads that wait are not woken: the number of times that they gave up a processor stands still."""
    channel: Channel[int] = Channel(1)
    threads = [Thread(channel.get) for _ in range(4)]

    def switches() -> list[str]:
        states = [Path(f"/proc/self/task/{thread.native_id}/status").read_text() for thread in threads]
        return [line for state in states for line in state.splitlines() if "ctxt_switches" in line]

    for _ in range(20):  # until all have come to the place where they wait
        before = switches()
        time.sleep(0.2)
        if switches() == before:
            break
    else:
        pytest.fail("the waiting threads are woken again and again")
    channel.close()
    for thread in threads:
        thread.ended()


def test_a_last_value_takes_the_place_of_what_is_queued_and_to_come() -> None:
    channel: Channel[int] = Channel(1)
    channel.put(1)
    waiting = Thread(lambda: channel.put(2))
    assert waiting.waits()
    channel.finish_with(9)
    assert isinstance(waiting.ended(), Closed)
    assert [channel.get(), channel.get()] == [9, None]
    channel.finish_with(8)  # all was taken
    assert channel.get() is None


def test_a_channel_without_bound_takes_what_waits() -> None:
    channel: Channel[int] = Channel(1)
    channel.put(1)
    waiting = Thread(lambda: channel.put(2))
    assert waiting.waits()
    channel.unbound()
    assert waiting.ended() is None
    channel.finish()
    assert channel.get_waiting(3) == [1, 2]
