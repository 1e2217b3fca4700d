"""Test the end of the HTTP server: everybody who has connected gets a reply, and nobody prevents the end."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from http_client import ServedModel
from ports import free_port
from test_serving import going, picture
from waiting import LIMIT_S, until

from pipeedge.serve import http_server

__all__ = ["going"]


def request(*, close: bool = False) -> bytes:
    data = picture(0)
    head = b"POST /classify HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n" % len(data)
    return head + (b"connection: close\r\n" if close else b"") + b"\r\n" + data


def connected(served: ServedModel) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), LIMIT_S)


def ask_and_stay(client: socket.socket) -> None:
    """Ask, and leave the connection open."""
    client.sendall(request())
    reply = http.client.HTTPResponse(client)
    reply.begin()
    assert reply.status == 200
    reply.read()


def all_of(client: socket.socket) -> bytes:
    """Return what is sent to a client until the end of its connection, which must not be reset."""
    received = b""
    while part := client.recv(1 << 16):
        received += part
    return received


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Return two events: the server begins to end, and holds still until the other one is set."""
    begun, knocked = threading.Event(), threading.Event()
    keep_out = http_server._keep_out

    def wait(listener: socket.socket) -> None:
        begun.set()
        assert knocked.wait(LIMIT_S)
        keep_out(listener)

    monkeypatch.setattr(http_server, "_keep_out", wait)
    monkeypatch.setattr(http_server, "_LAST_REPLIES_S", LIMIT_S)
    monkeypatch.setattr(http_server, "_LAST_WORDS_S", LIMIT_S)
    yield begun, knocked
    knocked.set()


def test_everybody_who_has_connected_gets_a_reply(ended: tuple[threading.Event, threading.Event]) -> None:
    """Some have asked before, some wait in the backlog, some ask only after the port is closed."""
    begun, knocked = ended
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(ServedModel("-m", "vit-digits"))
        idle = [stack.enter_context(connected(served)) for _ in range(10)]
        for client in idle:
            ask_and_stay(client)
        ending = threading.Thread(target=served.drain)
        ending.start()
        assert begun.wait(LIMIT_S)
        backlog = [stack.enter_context(connected(served)) for _ in range(10)]
        for client in (*idle[:5], *backlog[:5]):
            client.sendall(request())
        knocked.set()
        for client in (*idle[:5], *backlog[:5]):
            reply = all_of(client)
            assert reply.startswith(b"HTTP/1.1 503 ")
            assert b"connection: close" in reply
        for client in (*idle[5:], *backlog[5:]):
            client.sendall(request(close=True))
            assert all_of(client).startswith(b"HTTP/1.1 503 ")
        ending.join(LIMIT_S)
        assert not ending.is_alive()


def test_a_connection_that_asks_nothing_does_not_keep_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_LAST_WORDS_S", 0.05)
    monkeypatch.setattr(http_server, "_LAST_REPLIES_S", LIMIT_S)
    with ServedModel("-m", "vit-digits") as served, connected(served) as new, connected(served) as idle:
        ask_and_stay(idle)
        served.drain()
        assert (all_of(new), all_of(idle)) == (b"", b"")


def test_a_request_that_does_not_end_is_answered_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_LAST_REPLIES_S", 0.2)
    with ServedModel("-m", "vit-digits") as served, connected(served) as slow:
        slow.sendall(request()[:-1])
        until(lambda: served.get("/metrics").status == 200, "the server")
        served.drain()
        reply = all_of(slow)
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b"the server has ended" in reply


def test_a_request_that_was_accepted_is_answered_on_a_connection_that_then_closes(going: Any) -> None:
    with ServedModel("-m", "vit-digits", "-u", "1") as served, connected(served) as client:
        client.sendall(request())
        until(lambda: served.get("/status").json["queue"]["under_way"] == 1, "the request")
        ending = threading.Thread(target=served.drain)
        ending.start()
        until(lambda: served.get("/health").headers.get("connection") == "close", "the end of acceptance")
        going.set()
        reply = all_of(client)
        ending.join(LIMIT_S)
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in reply


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such filter")
def test_nobody_can_knock_between_the_last_look_and_the_end() -> None:
    with http_server.open_listener("127.0.0.1", free_port()) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as before, socket.socket() as after:
            http_server._keep_out(listener)
            after.setblocking(False)
            after.connect_ex(address)
            with pytest.raises(BlockingIOError):
                after.send(b"hello")
            assert http_server._has_knocked(listener)
            accepted, _ = listener.accept()
            with accepted:
                before.sendall(b"hello")
                assert accepted.recv(9) == b"hello"
            assert not http_server._has_knocked(listener)
            poll = select.poll()
            poll.register(after, select.POLLOUT)
            assert poll.poll(0) == []
