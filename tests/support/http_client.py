"""A server that answers over HTTP in the test's process, and a client of the standard library for it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ports import free_port
from waiting import LIMIT_S, until

from pipeedge.base.errors import PipeEdgeError
from pipeedge.request.config import RunRequest
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime
from pipeedge.run import pipeline
from pipeedge.run.text_ends import open_served_text
from pipeedge.serve.http_ends import HttpEnds


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def line(self) -> str:
        """Return the line that says what is wrong, in the form of any route."""
        error = self.json["error"]
        found = error["message"] if isinstance(error, dict) else error
        assert "\n" not in found
        return found


def ask(
    port: int,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """Send one request; what is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    kind = {} if isinstance(body, bytes) or body is None else {"content-type": "application/json"}
    try:
        connection.request(method, path, content, {**kind, **(headers or {})})
        reply = connection.getresponse()
        found = {name.lower(): value for name, value in reply.getheaders()}
        return Reply(reply.status, found, reply.read())
    finally:
        connection.close()


class ServedModel:
    """``runtime.py 0 1 --serve`` in threads of this process, as long as the body of a ``with`` statement.

    Args:
        options: Options of all ranks.
        world: Number of ranks.
    """

    def __init__(self, *options: object, world: int = 1) -> None:
        self.port = free_port()
        self.lines: list[str] = []
        self.failure: BaseException | None = None
        own = ["--serve", str(self.port)]
        common = ["--quiet", "--port", str(free_port()), *map(str, options)]
        self._requests = [
            parse_runtime([str(rank), str(world), *common, *own[: 2 * (rank == 0)]], Environment()).request
            for rank in range(world)
        ]
        self._serving = HttpEnds(self.lines.append, open_served_text)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            pipeline.run(self._requests[0], _no_console, self.lines.append, self._serving.open)
        except BaseException as error:
            self.failure = error

    def _run_other(self, request: RunRequest) -> None:
        with suppress(PipeEdgeError):  # it may be lost
            pipeline.run(request, _no_console, lambda line: None)

    def __enter__(self) -> ServedModel:
        self._thread.start()
        for request in self._requests[1:]:
            threading.Thread(target=self._run_other, args=(request,), daemon=True).start()
        until(
            lambda: any("answers at" in line for line in self.lines) or self.failure is not None, "the server"
        )
        assert self.failure is None, self.failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drain()

    def drain(self) -> None:
        """End the server as SIGTERM does, and wait for that."""
        self._serving.drain()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def get(self, path: str, **headers: str) -> Reply:
        return ask(self.port, "GET", path, headers=headers)

    def post(self, path: str, body: object, **headers: str) -> Reply:
        return ask(
            self.port, "POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()}
        )


def _no_console() -> Any:
    raise AssertionError("a quiet run prints nothing")
