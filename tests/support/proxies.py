"""A proxy between a client and a server on the loopback, which records and may damage what passes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

Change = Callable[[bytes], bytes]
"""Makes what is passed on of the bytes that came; empty bytes end the connection."""


class Proxy:
    """Passes on the bytes of all connections to ``server``. A context manager.

    Args:
        server: Address that is dialled for each client.
        to_client: Changes what the server sends.
    """

    def __init__(self, server: tuple[str, int], to_client: Change = lambda data: data) -> None:
        self._server = server
        self._to_client = to_client
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.passed = bytearray()
        """All bytes of both directions."""
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Proxy:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                ways = ((client, server, lambda data: data), (server, client, self._to_client))
                threads = [threading.Thread(target=self._pass_on, args=way, daemon=True) for way in ways]
                self._threads += threads
                for thread in threads:
                    thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, change: Change) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.passed += data
                changed = change(data)
                if not changed:
                    break
                target.sendall(changed)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
