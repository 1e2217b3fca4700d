"""A connection under TLS that was accepted: TLS in memory, and a socket that carries its records.

    socket ──256 KiB at once──> [records] ──decrypt──> the reader's memory

``ssl.SSLSocket`` asks the kernel twice for each record of 16 KiB, which makes receiving half as expensive
again. Sending is cheapest through it, because it needs no copy, so the end that dials, and sends, uses that.
"""

from __future__ import annotations

import socket
import ssl

__all__ = ["SealedSocket"]

_RECEIVE_BYTES = 256 << 10
"""Size of what is received at once. It stays in the processor's cache until it is decrypted."""
_SHORT_BYTES = 16 << 10
"""Size of what is received at once where little is expected."""


class SealedSocket:
    """An accepted connection under TLS, with the methods of a socket that its users need.

    One thread at a time may use it. Errors are those of sockets and of ``ssl``.

    Args:
        sock: Accepted socket, which may be non-blocking. The connection closes it.
        context: Settings of TLS.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self.socket = sock
        self._from_network, self._to_network = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._from_network, self._to_network, server_side=True)
        self._established = False
        self._records = memoryview(b"")

    def shake_hands(self) -> None:
        """Go on with the handshake; do nothing once it is complete.

        Raises:
            BlockingIOError: It must wait for the peer, on a socket that does not block.
            OSError: It failed.
        """
        while not self._established:
            try:
                self._tls.do_handshake()
                self._established = True
            except ssl.SSLWantReadError:
                self._flush()
                self._read_records()
            finally:
                self._flush()

    def recv_into(self, memory: memoryview) -> int:
        """Receive into the start of ``memory``; return the number of bytes, 0 if the peer has closed.

        What is returned is what one record holds, at most.
        """
        while True:
            try:
                return int(self._tls.read(len(memory), memory))  # with a buffer, it returns the length
            except ssl.SSLWantReadError:
                if not self._read_records(_RECEIVE_BYTES if len(memory) > _SHORT_BYTES else _SHORT_BYTES):
                    return 0
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return 0

    def recv(self, limit: int) -> bytes:
        """Receive up to ``limit`` bytes; none if the peer has closed."""
        memory = memoryview(bytearray(limit))
        return bytes(memory[: self.recv_into(memory)])

    def sendall(self, data: memoryview | bytes) -> None:
        """Send all of ``data``."""
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        self._flush()

    def settimeout(self, seconds: float | None) -> None:
        """Set the timeout of the socket."""
        self.socket.settimeout(seconds)

    def fileno(self) -> int:
        """Return the file descriptor of the socket."""
        return self.socket.fileno()

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _read_records(self, limit: int = _SHORT_BYTES) -> int:
        """Take what has arrived; return its size, 0 if the peer has closed."""
        if len(self._records) < limit:
            self._records = memoryview(bytearray(limit))
        count = self.socket.recv_into(self._records, limit)
        if count:
            self._from_network.write(self._records[:count])
        else:
            self._from_network.write_eof()
        return count

    def _flush(self) -> None:
        if self._to_network.pending:
            self.socket.sendall(self._to_network.read())
