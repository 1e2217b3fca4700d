"""Test how the server waits for answers: no longer than it may, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from clock import Clock
from waiting import LIMIT_S

from pipeedge.base.errors import InputError, PipeEdgeError
from pipeedge.data.items import Item
from pipeedge.serve import asking
from pipeedge.serve.asking import Asker
from pipeedge.serve.batching import BatchLimits
from pipeedge.serve.replies import HttpError
from pipeedge.serve.requests import ExpiredError, QueueFullError, RequestQueue

ITEM = Item((torch.zeros(1, 8, 8, dtype=torch.uint8),), None, "item")


class Request:
    """A request whose client leaves when ``left`` is set."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self.headers = headers or {}
        self.left = asyncio.Event()

    async def receive(self) -> Mapping[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


@pytest.fixture
def queue(clock: Clock) -> RequestQueue:
    """Return a queue that nothing feeds a pipeline from."""
    return RequestQueue(BatchLimits(max_items=1, max_tokens=1, max_waiting=3), clock=clock)


@pytest.fixture
def clock() -> Clock:
    return Clock(5.0)


@pytest.fixture
def asker(queue: RequestQueue, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asker]:
    """Return one that prepares in a single thread."""
    monkeypatch.setattr(asking, "read_threads", lambda: 1)
    service: Any = types.SimpleNamespace(queue=queue, probe=lambda: ITEM)
    asker = Asker(service, 60.0, clock)
    yield asker
    asker.close()


def test_a_probe_that_fails_leaves_the_queue(
    queue: RequestQueue, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "PROBE_S", 0.01)

    async def probe() -> bool:
        return await asker.is_healthy(Request())  # type: ignore[arg-type]

    assert not asyncio.run(probe())
    assert (queue.state().waiting, queue.state().failed) == (0, 1)


def ask(asker: Asker, prepare: Callable[[range], list[Item]], timeout_s: float, **options: Any) -> None:
    """Ask, and fail as no answer comes."""

    async def answers() -> None:
        await asker.answers(request(timeout_s), 1, prepare, **options)

    asyncio.run(answers())


def request(timeout_s: float) -> Any:
    return Request({"x-request-timeout": str(timeout_s)})


def test_a_deadline_holds_for_preparation(queue: RequestQueue, asker: Asker) -> None:
    """Two requests are over, one while it is prepared, and one that waits for the only thread."""
    going, prepared = threading.Event(), list[str]()

    def prepare(name: str, part: range) -> list[Item]:
        prepared.append(name)
        assert going.wait(LIMIT_S)
        return [ITEM]

    for name in ("first", "second"):
        with pytest.raises(ExpiredError, match=r"the request was not answered within 0.05 s"):
            ask(asker, functools.partial(prepare, name), 0.05)
    going.set()
    asker._workers.shutdown()
    assert prepared == ["first"]
    assert (queue.state().waiting, queue.state().requests_waiting) == (0, 0)


def test_a_client_that_leaves_during_preparation_is_noticed(queue: RequestQueue, asker: Asker) -> None:
    going = threading.Event()

    def prepare(part: range) -> list[Item]:
        assert going.wait(LIMIT_S)
        return [ITEM]

    async def leave() -> None:
        leaving = request(LIMIT_S)
        leaving.left.set()
        await asker.answers(leaving, 1, prepare)

    with pytest.raises(HttpError, match="the client has left"):
        asyncio.run(leave())
    going.set()
    asker._workers.shutdown()
    assert (queue.state().waiting, queue.state().requests_waiting) == (0, 0)


@pytest.mark.parametrize("quick", [False, True])
def test_preparation_takes_part_of_the_time_that_a_request_has(
    queue: RequestQueue, asker: Asker, clock: Clock, quick: bool
) -> None:
    def prepare(seconds: float, part: range) -> list[Item]:
        clock.now += seconds
        return [ITEM]

    with pytest.raises(ExpiredError, match="within 10 s"):
        ask(asker, functools.partial(prepare, 11), 10, quick=quick)
    assert (queue.state().waiting, queue.state().failed) == (0, 0)
    opened = queue.open(1, timeout_s=10)
    assert opened.deadline_s == clock.now + 10


def test_what_was_prepared_as_the_request_ended_leaves_the_queue(
    queue: RequestQueue, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    putting, going, put = threading.Event(), threading.Event(), queue.put

    def put_late(*arguments: Any) -> None:
        putting.set()
        assert going.wait(LIMIT_S)
        put(*arguments)

    async def leave() -> None:
        leaving = request(LIMIT_S)
        asking = asyncio.ensure_future(asker.answers(leaving, 1, lambda _: [ITEM]))
        assert await asyncio.to_thread(putting.wait, LIMIT_S)
        leaving.left.set()
        await asking

    monkeypatch.setattr(queue, "put", put_late)
    with pytest.raises(HttpError, match="the client has left"):
        asyncio.run(leave())
    going.set()
    asker._workers.shutdown()
    assert (queue.state().waiting, queue.state().requests_waiting) == (0, 0)


def answer_next(queue: RequestQueue) -> int:
    """Answer the next item as a pipeline would, and return its number."""
    group = queue.stream().next(1)
    assert group is not None
    batch = group.collate(tuple(spec.empty() for spec in group.specs))
    (number,) = batch.numbers
    queue.write(number, torch.tensor([[float(number)]]), batch)
    return number


def test_a_long_request_comes_in_parts_as_there_is_room(queue: RequestQueue, asker: Asker) -> None:
    """Eight items pass through a queue of three, and another request gets its turn among them."""
    prepared, most = list[int](), 0

    def prepare(part: range) -> list[Item]:
        prepared.extend(part)
        return [ITEM] * len(part)

    async def both() -> tuple[list[float], list[float]]:
        nonlocal most
        long = asyncio.ensure_future(asker.answers(request(LIMIT_S), 8, prepare))
        while not prepared:
            await asyncio.sleep(0)
        short = asyncio.ensure_future(asker.answers(request(LIMIT_S), 1, lambda _: [ITEM]))
        answered = 0
        while answered < 9:
            most = max(most, queue.state().waiting)
            if queue.state().waiting:
                answered += answer_next(queue) >= 0
            await asyncio.sleep(0)
        return (
            [float(one.outputs[0]) for one in await long],
            [float(one.outputs[0]) for one in await short],
        )

    long, (short,) = asyncio.run(both())
    assert prepared == list(range(8))
    assert long == sorted(long)
    assert {*long, short} == set(range(9))
    assert short < max(long)
    assert most <= 3
    assert asker.asked.answers == 2


def test_requests_and_items_that_wait_are_counted_apart(queue: RequestQueue, asker: Asker) -> None:
    async def crowd() -> None:
        asked = [
            asyncio.ensure_future(asker.answers(request(LIMIT_S), 5, lambda part: [ITEM] * len(part)))
            for _ in range(3)
        ]
        while queue.state().waiting < 3:
            await asyncio.sleep(0)
        assert queue.state().requests_waiting == 3
        with pytest.raises(QueueFullError, match="3 requests wait already; try again later"):
            await asker.answers(request(LIMIT_S), 1, lambda _: [ITEM])
        asked.pop().cancel()
        for _ in range(10):
            answer_next(queue)
            while queue.state().waiting == 0 and queue.state().requests_waiting:
                await asyncio.sleep(0)
        await asyncio.gather(*asked)

    asyncio.run(crowd())
    assert (queue.state().requests_waiting, queue.state().answered) == (0, 10)


def test_a_request_that_was_accepted_is_answered_though_the_end_comes_first(
    queue: RequestQueue, asker: Asker
) -> None:
    async def end() -> list[float]:
        asked = asyncio.ensure_future(asker.answers(request(LIMIT_S), 6, lambda part: [ITEM] * len(part)))
        while not queue.state().waiting:
            await asyncio.sleep(0)
        queue.drain()
        for _ in range(6):
            while not queue.state().waiting:
                await asyncio.sleep(0)
            answer_next(queue)
        return [float(one.outputs[0]) for one in await asked]

    assert asyncio.run(end()) == list(range(6))
    assert queue.stream().next(1) is None


def test_a_failure_reaches_a_request_whose_parts_are_still_to_come(queue: RequestQueue, asker: Asker) -> None:
    async def fail() -> None:
        asked = asyncio.ensure_future(asker.answers(request(LIMIT_S), 6, lambda part: [ITEM] * len(part)))
        while not queue.state().waiting:
            await asyncio.sleep(0)
        queue.fail(PipeEdgeError("rank 1 is gone"))
        list(await asked)

    with pytest.raises(PipeEdgeError, match="rank 1 is gone"):
        asyncio.run(fail())


def test_an_input_that_fails_gives_its_room_back(queue: RequestQueue, asker: Asker) -> None:
    def prepare(part: range) -> list[Item]:
        if part.start == 4:
            raise InputError("inputs[4]: the sentence is empty")
        return [ITEM] * len(part)

    async def fail() -> None:
        asked = asyncio.ensure_future(asker.answers(request(LIMIT_S), 6, prepare))
        while not asked.done():
            if queue.state().waiting:
                answer_next(queue)
            await asyncio.sleep(0)
        await asked

    with pytest.raises(InputError, match=r"inputs\[4\]: the sentence is empty"):
        asyncio.run(fail())
    assert queue.state().requests_waiting == 0
    queue.submit([ITEM] * 3)  # as many as fit
