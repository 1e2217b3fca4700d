"""Accept connections, and pass on those that introduce themselves within seconds.

    stranger ──connect──> [ at most 64 callers, seconds each ] ──TLS──> hello ──> admit ──> a link
                                      └── late, malformed, displaced ──> closed

One thread does all of it and never waits for a single caller. A caller that says nothing costs a socket until
its time is over. When there are too many, a further one displaces the oldest; a member that was displaced
dials again.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable

from pipeedge.transport.sealed import SealedSocket, Stream

__all__ = ["HANDSHAKE_S", "Reception"]

HANDSHAKE_S = 5.0
"""Seconds within which a caller must have introduced itself."""
MAX_CALLERS = 64
"""Largest number of connections that have not introduced themselves."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of a connection that cannot be accepted until the process or the machine gives something back."""
_EXHAUSTED_S = 0.1
"""Pause before the next attempt, while no caller has anything to give back."""


class _Newcomer:
    """A connection that has not introduced itself yet."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self.stream: Stream = sock
        self.until = until
        self.hello = b""

    def shake_hands(self) -> None:
        """Go on with the handshake, if the connection is to be secured and is not yet.

        Raises:
            BlockingIOError: It must wait for the peer.
            OSError: It failed.
        """
        while isinstance(self.stream, SealedSocket) and not self.stream.shake_hands():
            pass

    def read(self, length: int) -> None:
        """Read a hello of ``length`` bytes as far as it has arrived.

        Raises:
            BlockingIOError: There is more to come.
            OSError: The connection is lost.
        """
        while len(self.hello) < length:
            data = self.stream.recv(length - len(self.hello))
            if not data:
                raise ConnectionResetError
            self.hello += data


class Reception:
    """Accepts connections on a listening socket, in a thread.

    Args:
        listener: Listening socket; the reception closes it.
        context: Settings of TLS, or None if the connections are clear.
        hello_bytes: Length of an introduction.
        admit: Called by the thread with each connection (which does not block) and its introduction. Returns
            whether it has taken the connection over or closed it; otherwise it is called again after
            ``reconsider``.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        context: ssl.SSLContext | None,
        hello_bytes: int,
        admit: Callable[[Stream, bytes], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._context = context
        self._hello_bytes = hello_bytes
        self._admit = admit
        self._clock = clock
        self._callers: dict[int, _Newcomer] = {}
        self._closing = False
        self._waker, self._wakened = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._wakened.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
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
                events = self._selector.select(self._patience_s())
                for key, _ in events:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wakened:
                        self._wakened.recv(4096)
                        self._offer_again()
                    elif key.fd in self._callers:  # it may have been displaced meanwhile
                        self._hear(self._callers[key.fd])
                self._dismiss_late()
        finally:
            for caller in self._callers.values():
                caller.stream.close()
            self._selector.close()
            self._listener.close()

    def _patience_s(self) -> float | None:
        first = next(iter(self._callers.values()), None)  # all have the same patience
        return None if first is None else max(0.0, first.until - self._clock())

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # The peer closed it already. Or there are no more file descriptors, which the callers give back.
            if not self._callers and error.errno in _EXHAUSTED:
                self._pause()
            self._dismiss_oldest()
            return
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:  # the peer has closed it
            sock.close()
            return
        if len(self._callers) >= MAX_CALLERS:
            self._dismiss_oldest()
        self._callers[sock.fileno()] = _Newcomer(sock, self._clock() + HANDSHAKE_S)
        self._selector.register(sock, selectors.EVENT_READ)

    def _pause(self) -> None:
        """Do not listen for a moment: while a connection waits, the selector would return at once."""
        self._selector.unregister(self._listener)
        self._selector.select(_EXHAUSTED_S)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _hear(self, caller: _Newcomer) -> None:
        try:
            if self._context is not None and isinstance(caller.stream, socket.socket):
                # Not before the first byte, so that a silent caller costs no memory for TLS.
                caller.stream = SealedSocket(caller.stream, self._context, accepts=True)
            caller.shake_hands()
            caller.read(self._hello_bytes)
        except BlockingIOError:
            return
        except OSError:
            self._dismiss(caller)
            return
        self._selector.unregister(caller.stream)
        self._offer(caller)

    def _offer(self, caller: _Newcomer) -> None:
        number = caller.stream.fileno()
        if self._admit(caller.stream, caller.hello):
            del self._callers[number]

    def _offer_again(self) -> None:
        for caller in list(self._callers.values()):
            if len(caller.hello) == self._hello_bytes:
                self._offer(caller)

    def _dismiss_late(self) -> None:
        now = self._clock()
        while self._callers and next(iter(self._callers.values())).until <= now:
            self._dismiss_oldest()

    def _dismiss_oldest(self) -> None:
        if self._callers:
            self._dismiss(next(iter(self._callers.values())))

    def _dismiss(self, caller: _Newcomer) -> None:
        del self._callers[caller.stream.fileno()]
        with contextlib.suppress(KeyError, ValueError):  # it waits to be reconsidered
            self._selector.unregister(caller.stream)
        caller.stream.close()
