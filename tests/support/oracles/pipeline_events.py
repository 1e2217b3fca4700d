"""Simulate a pipeline with a queue of events, as a reference for ``simulate``.

Threads are generators that yield what they wait for; links are counters of frames and posted receives. This
shares nothing with ``pipeedge.simulate.simulation`` except the names of the costs.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from pipeedge.simulate.simulation import PipelineModel, SimulatedLink

IN_FLIGHT = 2
POSTED = 2


@dataclass
class Played:
    """Times of the events."""

    fed_at: list[float] = field(default_factory=list)
    result_at: list[float] = field(default_factory=list)
    taken: dict[int, list[float]] = field(default_factory=dict)
    """Times at which each stage took its microbatches."""
    waited_for_link: dict[int, float] = field(default_factory=dict)
    waited_for_input: dict[int, float] = field(default_factory=dict)
    """Seconds that each stage waited for input, including the first wait."""
    free_at: dict[int, float] = field(default_factory=dict)


class _Loop:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def run(self) -> None:
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()


class _Link:
    """Counters of frames that were sent, are on the wire, or wait to be taken."""

    def __init__(self, loop: _Loop, costs: SimulatedLink) -> None:
        self._loop = loop
        self._costs = costs
        self._queue: deque[tuple[int, float]] = deque()
        self._inbox: deque[int] = deque()
        self._receives = POSTED
        self._under_way = 0
        self._wire_busy = False
        self._taker: Callable[[int], None] | None = None
        self._sender: Callable[[], None] | None = None

    def when_room(self, go_on: Callable[[], None]) -> None:
        if self._full():
            self._sender = go_on
        else:
            go_on()

    def post(self, number: int, share: float) -> None:
        if self._costs.in_memory:
            self._inbox.append(number)
            self._hand_over()
            return
        self._under_way += 1
        self._queue.append((number, share))
        self._transmit()

    def take(self, go_on: Callable[[int], None]) -> None:
        self._taker = go_on
        self._hand_over()

    def _full(self) -> bool:
        if self._costs.in_memory:
            return len(self._inbox) == POSTED
        return self._under_way == IN_FLIGHT

    def _transmit(self) -> None:
        if self._wire_busy or not self._queue or not self._receives:
            return
        number, share = self._queue.popleft()
        self._receives -= 1
        self._wire_busy = True

        def leave() -> None:
            self._wire_busy = False
            self._loop.after(self._costs.latency_s, lambda: self._arrive(number))
            self._transmit()

        self._loop.after(self._costs.wire_s * share, leave)

    def _arrive(self, number: int) -> None:
        self._under_way -= 1
        self._inbox.append(number)
        self._wake_sender()
        self._hand_over()

    def _hand_over(self) -> None:
        if self._taker is None or not self._inbox:
            return
        go_on, self._taker = self._taker, None
        number = self._inbox.popleft()
        self._receives += 1
        self._transmit()
        self._wake_sender()
        go_on(number)

    def _wake_sender(self) -> None:
        if self._sender is not None and not self._full():
            go_on, self._sender = self._sender, None
            go_on()


_Thread = Generator[tuple[str, Any], Any, None]


def _start(loop: _Loop, thread: _Thread) -> None:
    def go_on(value: Any = None) -> None:
        try:
            wish, of = thread.send(value)
        except StopIteration:
            return
        if wish == "sleep":
            loop.after(of, go_on)
        elif wish == "room":
            of.when_room(go_on)
        else:
            of.take(go_on)

    go_on()


def play(model: PipelineModel) -> Played:
    """Simulate the whole run."""
    loop, played = _Loop(), Played()
    links = [_Link(loop, costs) for costs in model.links]
    last = model.microbatches - 1

    def share(number: int) -> float:
        return model.last_fraction if number == last else 1.0

    def feed() -> _Thread:
        for number in range(model.microbatches):
            yield "sleep", model.feed_s * share(number)
            read_at = loop.now
            yield "room", links[0]
            # Over a network it is made in the frame that is sent.
            played.fed_at.append(read_at if model.links[0].in_memory else loop.now)
            links[0].post(number, share(number))

    def compute(stage: int) -> _Thread:
        costs = model.stages[stage]
        played.taken[stage], played.waited_for_link[stage] = [], 0.0
        played.waited_for_input[stage] = 0.0
        for _ in range(model.microbatches):
            since = loop.now
            number = yield "take", links[stage]
            played.taken[stage].append(loop.now)
            played.waited_for_input[stage] += loop.now - since
            yield "sleep", (costs.decode_s + costs.compute_s + costs.encode_s) * share(number)
            since = loop.now
            yield "room", links[stage + 1]
            played.waited_for_link[stage] += loop.now - since
            yield "sleep", costs.send_s * share(number)
            links[stage + 1].post(number, share(number))
            played.free_at[stage] = loop.now

    def collect() -> _Thread:
        for _ in range(model.microbatches):
            number = yield "take", links[-1]
            played.result_at.append(loop.now)
            yield "sleep", model.collect_s * share(number)

    for thread in (feed(), *(compute(stage) for stage in range(len(model.stages))), collect()):
        _start(loop, thread)
    loop.run()
    return played
