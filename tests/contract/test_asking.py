"""Test how the server waits for answers: no longer than it may, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from pipeedge.data.items import Item
from pipeedge.serve import asking
from pipeedge.serve.asking import Asker
from pipeedge.serve.batching import BatchLimits
from pipeedge.serve.requests import RequestQueue

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
def asker(queue: RequestQueue) -> Iterator[Asker]:
    service: Any = types.SimpleNamespace(queue=queue, probe=lambda: ITEM)
    asker = Asker(service, 60.0)
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
