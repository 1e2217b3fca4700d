"""Test how the server waits for answers: no longer than it may, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from clock import Clock
from waiting import LIMIT_S

from pipeedge.data.items import Item
from pipeedge.serve import asking
from pipeedge.serve.asking import Asker
from pipeedge.serve.batching import BatchLimits
from pipeedge.serve.pending import PendingAnswers
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
def queue() -> RequestQueue:
    """Return a queue that nothing feeds a pipeline from."""
    return RequestQueue(BatchLimits(max_items=1, max_tokens=1, max_waiting=3))


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
    monkeypatch.setattr(asking, "_PROBE_S", 0.01)

    async def probe() -> bool:
        return await asker.is_healthy(Request())  # type: ignore[arg-type]

    assert not asyncio.run(probe())
    assert (queue.state().waiting, queue.state().failed) == (0, 1)


def ask(asker: Asker, prepare: Callable[[], list[Item]], timeout_s: float, **options: Any) -> None:
    """Ask, and fail as no answer comes."""

    async def answers() -> None:
        await asker.answers(request(timeout_s), prepare, **options)

    asyncio.run(answers())


def request(timeout_s: float) -> Any:
    return Request({"x-request-timeout": str(timeout_s)})


def queued(queue: RequestQueue) -> int:
    """Return how many items have ever joined the queue."""
    state = queue.state()
    return state.waiting + state.failed


def test_a_deadline_holds_for_preparation(queue: RequestQueue, asker: Asker) -> None:
    """Two requests are over, one while it is prepared, and one that waits for the only thread."""
    going, prepared = threading.Event(), list[str]()

    def prepare(name: str) -> list[Item]:
        prepared.append(name)
        assert going.wait(LIMIT_S)
        return [ITEM]

    for name in ("first", "second"):
        with pytest.raises(ExpiredError, match=r"the request was not answered within 0.05 s"):
            ask(asker, functools.partial(prepare, name), 0.05)
    going.set()
    asker._workers.shutdown()
    assert prepared == ["first"]
    assert queued(queue) == 0


def test_a_client_that_leaves_during_preparation_is_noticed(queue: RequestQueue, asker: Asker) -> None:
    going = threading.Event()

    def prepare() -> list[Item]:
        assert going.wait(LIMIT_S)
        return [ITEM]

    async def leave() -> None:
        leaving = request(LIMIT_S)
        leaving.left.set()
        await asker.answers(leaving, prepare)

    with pytest.raises(HttpError, match="the client has left"):
        asyncio.run(leave())
    going.set()
    asker._workers.shutdown()
    assert queued(queue) == 0


@pytest.mark.parametrize("quick", [False, True])
def test_items_have_the_time_that_preparation_has_left(
    queue: RequestQueue, asker: Asker, clock: Clock, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    left_s: list[float | None] = []

    def submit(items: Sequence[Item], *, timeout_s: float | None) -> PendingAnswers:
        left_s.append(timeout_s)
        raise QueueFullError("that is all", 1)

    def prepare(seconds: float) -> list[Item]:
        clock.now += seconds
        return [ITEM]

    monkeypatch.setattr(queue, "submit", submit)
    with pytest.raises(QueueFullError):
        ask(asker, lambda: prepare(7), 10, quick=quick)
    with pytest.raises(ExpiredError, match="within 10 s"):
        ask(asker, lambda: prepare(11), 10, quick=quick)
    assert left_s == [3]


def test_what_was_prepared_as_the_request_ended_leaves_the_queue(
    queue: RequestQueue, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitting, going, submit = threading.Event(), threading.Event(), queue.submit

    def submit_late(*arguments: Any, **options: Any) -> PendingAnswers:
        submitting.set()
        assert going.wait(LIMIT_S)
        return submit(*arguments, **options)

    async def leave() -> None:
        leaving = request(LIMIT_S)
        asking = asyncio.ensure_future(asker.answers(leaving, lambda: [ITEM]))
        assert await asyncio.to_thread(submitting.wait, LIMIT_S)
        leaving.left.set()
        await asking

    monkeypatch.setattr(queue, "submit", submit_late)
    with pytest.raises(HttpError, match="the client has left"):
        asyncio.run(leave())
    going.set()
    asker._workers.shutdown()
    assert (queue.state().waiting, queue.state().failed) == (0, 1)
