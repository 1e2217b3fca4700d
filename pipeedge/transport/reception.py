"""Accept connections, and pass on those that introduce themselves within seconds.

    stranger ──connect──> door ──TLS──> hello ──> admit ──> a link
                           └── late, malformed, displaced ──> closed

One thread does all of it and never waits for a single caller (``door`` says who gives way).
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable

from pipeedge.transport.door import Caller, Door
from pipeedge.transport.sealed import SealedSocket, Stream

__all__ = ["MAX_CALLERS", "Reception"]

_READ_BYTES = 1 << 12
MAX_CALLERS = 64
"""Largest number of connections that have not introduced themselves."""


class _Newcomer(Caller):
    """A connection that has not introduced itself yet."""

    def __init__(self, number: int, sock: socket.socket, peer: str, close_at: float) -> None:
        super().__init__(number, sock, peer, close_at)
        self.stream: Stream = sock
        self.hello = b""
        self.is_refused = False
        """Whether the peer has proved to be no member, and is left time to read so."""

    def hear(self, context: ssl.SSLContext | None, length: int) -> None:
        """Go on with the handshake, if the connection is to be secured, and read a hello of ``length`` bytes.

        Raises:
            BlockingIOError: There is more to come.
            OSError: The handshake failed, or the connection is lost.
        """
        if self.is_refused:
            while self.socket.recv(_READ_BYTES):
                pass
            raise ConnectionResetError
        if context is not None and isinstance(self.stream, socket.socket):
            # Not before the first byte, so that a silent caller costs no memory for TLS.
            self.stream = SealedSocket(self.stream, context, accepts=True)
        while isinstance(self.stream, SealedSocket) and not self.stream.shake_hands():
            pass
        while len(self.hello) < length:
            data = self.stream.recv(length - len(self.hello))
            if not data:
                raise ConnectionResetError
            self.hello += data

    def describe(self, error: ssl.SSLError) -> str:
        """Return why the peer is no member, to follow its name in a sentence."""
        return self.stream.sealing.describe(error) if isinstance(self.stream, SealedSocket) else str(error)


class Reception:
    """Accepts connections on a listening socket, in a thread.

    Args:
        listener: Listening socket; the reception closes it.
        context: Settings of TLS, or None if the connections are clear.
        hello_bytes: Length of an introduction.
        admit: Called by the thread with each connection (which does not block) and its introduction. Returns
            whether it has taken the connection over or closed it; otherwise it is called again after
            ``reconsider``.
        refused: Called by the thread with the address of each caller that is no member, and why, to follow
            its name in a sentence.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        context: ssl.SSLContext | None,
        hello_bytes: int,
        admit: Callable[[Stream, bytes], bool],
        refused: Callable[[str, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._hello_bytes = hello_bytes
        self._admit = admit
        self._refused = refused
        self._clock = clock
        self._closing = False
        self._waker, self._wakened = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._door = Door(listener, self._selector, welcome=_Newcomer, most=MAX_CALLERS, clock=clock)
        self._wakened.setblocking(False)
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="reception", daemon=True)
        self._thread.start()

    def reconsider(self) -> None:
        """Offer again the connections that ``admit`` could not decide on."""
        self._waker.send(b"\0")

    def stop(self) -> None:
        """Let the thread close the listening socket, and all connections that were not taken over."""
        self._closing = True
        with contextlib.suppress(OSError):  # another thread closes it
            self.reconsider()

    def close(self) -> None:
        """Stop, and wait until all is closed."""
        self.stop()
        self._thread.join()
        self._waker.close()
        self._wakened.close()

    def _serve(self) -> None:
        try:
            # Asked before each wait: the byte that wakes it may have been read together with an earlier one.
            while not self._closing:
                patience_s = self._door.patience_s()
                self._handle(self._selector.select(None if math.isinf(patience_s) else patience_s))
                for caller in self._door.overdue():
                    self._door.drop(caller)
        finally:
            self._door.close()
            self._selector.close()

    def _handle(self, events: list[tuple[selectors.SelectorKey, int]]) -> None:
        if any(key.fileobj is self._wakened for key, _ in events):
            self._wakened.recv(4096)
            for caller in list(self._door.callers.values()):
                if len(caller.hello) == self._hello_bytes:
                    self._offer(caller)
        served, someone_knocks = self._door.turn(events)
        for caller, _ in served:
            self._hear(caller)
        if someone_knocks:
            for caller in self._door.accept():
                self._door.drop(caller)

    def _hear(self, caller: _Newcomer) -> None:
        try:
            caller.hear(self._context, self._hello_bytes)
        except BlockingIOError:
            if isinstance(caller.stream, SealedSocket):
                caller.answered(self._clock())
            return
        except OSError as error:
            if not isinstance(error, ssl.SSLError):
                self._door.drop(caller)
                return
            if self._refused is not None:
                self._refused(caller.peer, caller.describe(error))
            # To close now would reset the connection if the peer has sent more, and lose what tells it why.
            caller.is_refused = True
            with contextlib.suppress(OSError):
                caller.socket.shutdown(socket.SHUT_WR)
            return
        self._selector.unregister(caller.socket)
        self._offer(caller)

    def _offer(self, caller: _Newcomer) -> None:
        if self._admit(caller.stream, caller.hello):
            self._door.release(caller)
