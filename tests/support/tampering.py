"""A proxy between two members that records what passes, and damages it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

ADDR = "127.0.0.1"
_HEAD = 5
"""Bytes in front of a TLS record, of which the last two are its length."""

Tamper = Callable[[Iterator[bytes]], Iterator[bytes]]
"""Turns the pieces that one end sends into those that the other receives."""


def as_it_is(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Pass everything on."""
    yield from pieces


class Proxy:
    """Accepts connections and passes what comes on to ``port``, by threads that end with their connections.

    Args:
        port: Where to connect.
        tampers: What to do with the data that goes to ``port``, by the number of the connection.
        secured: Whether to cut the stream into TLS records, not into pieces as they come.
    """

    def __init__(self, port: int, tampers: dict[int, Tamper] | None = None, *, secured: bool = False) -> None:
        self._target = port
        self._tampers = tampers or {}
        self._secured = secured
        self._listener = socket.create_server((ADDR, 0))
        self.port = int(self._listener.getsockname()[1])
        """Where to connect to it."""
        self._lock = threading.Lock()
        self._recorded: list[bytes] = []
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def recorded(self) -> bytes:
        """Everything that has passed in either direction, by pieces."""
        with self._lock:
            return b"".join(self._recorded)

    def close(self) -> None:
        """Cut all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        number = 0
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection((ADDR, self._target))
            except OSError:
                return
            with self._lock:
                self._sockets += [near, far]
            tamper = self._tampers.get(number, as_it_is)
            for source, target, change in ((near, far, tamper), (far, near, as_it_is)):
                threading.Thread(target=self._pass, args=(source, target, change), daemon=True).start()
            number += 1

    def _pass(self, source: socket.socket, target: socket.socket, change: Tamper) -> None:
        with contextlib.suppress(OSError):
            for piece in change(self._pieces(source)):
                target.sendall(piece)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _pieces(self, source: socket.socket) -> Iterator[bytes]:
        data = b""
        while piece := source.recv(1 << 16):
            with self._lock:
                self._recorded.append(piece)
            if not self._secured:
                yield piece
                continue
            data += piece
            while len(data) >= _HEAD and len(data) >= _HEAD + int.from_bytes(data[3:_HEAD], "big"):
                end = _HEAD + int.from_bytes(data[3:_HEAD], "big")
                yield data[:end]
                data = data[end:]
