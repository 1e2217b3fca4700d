"""Test the gate without connections: hosts, large bodies, and requests that are refused or come too late."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from pipeedge.serve import gate
from pipeedge.serve.figures import ServiceFigures
from pipeedge.serve.gate import Gate, GateLimits

LIMITS = GateLimits(max_body_bytes=1 << 20, body_s=60.0)


async def length(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the length of the body."""
    message = await receive()
    await PlainTextResponse(str(len(message["body"])))(scope, receive, send)


class Client:
    """A client of a gate, whose body comes in parts."""

    def __init__(self, behind: Gate, *, path: str = "/embed", headers: dict[str, str] | None = None) -> None:
        self._parts: asyncio.Queue[Message] = asyncio.Queue()
        self._sent: list[Message] = []
        self.read = 0
        given = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": given,
        }
        self.task = asyncio.ensure_future(behind(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        part = await self._parts.get()
        self.read += len(part.get("body", b""))
        return part

    async def _send(self, message: Message) -> None:
        self._sent.append(message)

    async def say(self, part: bytes, *, more: bool = True) -> None:
        """Send a part of the body, and let the gate take it."""
        self._parts.put_nowait({"type": "http.request", "body": part, "more_body": more})
        for _ in range(10):
            await asyncio.sleep(0)

    async def reply(self) -> tuple[int, dict[str, str], bytes]:
        await self.task
        head, body = self._sent
        headers = {name.decode(): value.decode() for name, value in head["headers"]}
        return head["status"], headers, body["body"]


def run(
    scenario: Callable[[Gate], Awaitable[None]],
    limits: GateLimits = LIMITS,
    app: Any = length,
    ending: Callable[[], bool] = lambda: False,
) -> None:
    async def whole() -> None:
        await scenario(Gate(app, limits, ServiceFigures(), lambda path: path, ending))

    asyncio.run(whole())


def test_large_requests_that_do_not_end_keep_no_small_ones_out() -> None:
    large = bytes(LIMITS.max_body_bytes - 6)

    async def scenario(behind: Gate) -> None:
        slow = [Client(behind) for _ in range(8)]
        for client in slow:
            await client.say(large)
        for _ in range(3):
            small = Client(behind)
            await small.say(bytes(100), more=False)
            assert (await small.reply())[::2] == (200, b"100")
        assert not any(client.task.done() for client in slow)

    run(scenario)


def test_the_oldest_large_request_that_does_not_end_gives_way() -> None:
    large = bytes(LIMITS.max_body_bytes - 6)

    async def scenario(behind: Gate) -> None:
        slow = [Client(behind) for _ in range(8)]
        for client in slow:
            await client.say(large)
        for number in (0, 1):
            other = Client(behind)
            await other.say(large)
            await other.say(b"", more=False)
            assert (await other.reply())[::2] == (200, str(len(large)).encode())
            await slow[number].say(b"123456", more=False)  # received, so that the client reads the reply
            status, headers, body = await slow[number].reply()
            assert (status, headers["connection"], headers["retry-after"]) == (429, "close", "1")
            assert json.loads(body)["error"] == "too many large requests at a time"
            again = Client(behind)
            await again.say(large)
            slow.append(again)
        for client in slow[2:]:
            await client.say(b"123456", more=False)
            assert (await client.reply())[0] == 200
        assert behind._bodies._large == 0

    run(scenario)


@pytest.mark.parametrize(
    ("limits", "headers", "status"),
    [
        (GateLimits(1 << 20, 60.0, (b"secret",)), {}, 401),
        (GateLimits(1 << 20, 60.0, local_names_only=True), {"host": "evil.example"}, 403),
        (LIMITS, {"content-length": "9999999"}, 413),
        (LIMITS, {"content-length": "9" * 5000}, 413),
        (LIMITS, {"cookie": "a" * 20_000}, 431),
    ],
)
def test_the_body_of_a_refused_request_is_received(
    limits: GateLimits, headers: dict[str, str], status: int
) -> None:
    """Or its reply is lost: the connection is reset while the client still sends."""

    async def scenario(behind: Gate) -> None:
        client = Client(behind, headers=headers)
        for _ in range(5):
            await client.say(bytes(1000))
            assert not client.task.done()
        await client.say(bytes(7), more=False)
        assert (await client.reply())[0] == status
        assert client.read == 5007
        waiting = Client(behind, headers={**headers, "expect": "100-continue"})
        assert (await waiting.reply())[0] == status  # it sends nothing before it hears that it may

    run(scenario, limits)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("127.9.9.9", 200),
        ("[::1]:8000", 200),
        ("localhost", 200),
        ("LOCALHOST.:8000", 200),
        ("pi.localhost:8000", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("192.168.0.7:8000", 403),
        ("[::2]", 403),
        ("", 403),
    ],
)
def test_a_local_server_answers_to_its_own_names(host: str, status: int) -> None:
    async def scenario(behind: Gate) -> None:
        client = Client(behind, headers={"host": host})
        await client.say(b"", more=False)
        assert (await client.reply())[0] == status

    run(scenario, GateLimits(1 << 20, 60.0, local_names_only=True))


def test_an_encoded_body_is_refused() -> None:
    async def scenario(behind: Gate) -> None:
        for encoding, status in (("gzip", 415), ("identity", 200)):
            client = Client(behind, headers={"content-encoding": encoding})
            await client.say(b"abc", more=False)
            found, _, body = await client.reply()
            assert found == status
            if status == 415:
                assert json.loads(body)["error"] == "content-encoding gzip: send the body as it is"

    run(scenario)


def test_replies_at_the_end_close_their_connections() -> None:
    async def scenario(behind: Gate) -> None:
        client = Client(behind)
        await client.say(b"abc", more=False)
        status, headers, _ = await client.reply()
        assert (status, headers["connection"]) == (200, "close")

    run(scenario, ending=lambda: True)


def test_a_request_that_comes_too_late_for_the_end_hears_of_it() -> None:
    async def scenario(behind: Gate) -> None:
        client = Client(behind)
        await client.say(b"abc")
        client.task.cancel()
        status, headers, body = await client.reply()
        assert (status, headers["connection"]) == (503, "close")
        assert json.loads(body)["error"] == "the server has ended"

    run(scenario)


def test_a_body_that_stops_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_SLOW_START_S", 0.01)

    async def scenario(behind: Gate) -> None:
        client = Client(behind)
        await client.say(bytes(100_000))
        monkeypatch.setattr(gate, "_LEAST_BYTES_PER_S", 1 << 30)
        await client.say(bytes(1000))
        assert (await client.reply())[0] == 408
        assert behind._bodies._large == 0

    run(scenario)
