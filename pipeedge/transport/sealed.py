"""A connection under TLS: TLS in memory, and a socket that carries its records.

    frame ──encrypt──> [records] ──eight at once──> socket ──eight at once──> [records] ──decrypt──> frame

``ssl.SSLSocket`` asks the kernel once for each record of 16 KiB that it sends, and twice for each that it
receives. For the kernel that is three times the work of moving the same bytes at once, more than the copies
that are made here cost.
"""

from __future__ import annotations

import socket
import ssl
from typing import TypeAlias

__all__ = ["SealedSocket", "Stream", "socket_of"]

_BATCH_RECORDS = 8
"""Number of full records that are sent or received at once. They stay in the processor's cache until used."""
_DATA_BYTES = 16 << 10
"""Size of the data in a full record."""
_RECORD_BYTES = _DATA_BYTES + 22
"""Size of a full record with its header, type and tag, and of what is received where little is expected.

Batches of whole records leave no part of one behind, which would be moved in memory before the next batch.
"""
_BATCH_DATA_BYTES = _BATCH_RECORDS * _DATA_BYTES


class SealedSocket:
    """A connection under TLS, with the methods of a socket that its users need.

    One thread at a time may use it. Errors are those of sockets and of ``ssl``.

    Args:
        sock: Connected socket, which may be non-blocking. The connection closes it.
        context: Settings of TLS.
        accepts: Whether this end has accepted the connection, rather than dialed it.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, accepts: bool) -> None:
        self.socket = sock
        self._from_network, self._to_network = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._from_network, self._to_network, server_side=accepts)
        """TLS, which explains why it has failed."""
        self._established = False
        self._received = memoryview(b"")
        self._records = memoryview(b"")  # encrypted by ``send_at_once``, and not sent yet
        self._sealed = 0  # length of the data that they hold

    def shake_hands(self) -> bool:
        """Go on with the handshake, by one message of the peer at most; return whether it is complete.

        Raises:
            BlockingIOError: It must wait for the peer, on a socket that does not block.
            OSError: It failed.
        """
        if not self._established:
            try:
                self.tls.do_handshake()
                self._established = True
            except ssl.SSLWantReadError:
                self._flush()
                self._read_records()
            finally:
                self._flush()
        return self._established

    def fill(self, memory: memoryview) -> bool:
        """Receive until ``memory`` is full; return False if the peer has closed before."""
        # Its cost for each record of 16 KiB matters: hence one loop, and no exception but for a batch.
        read, length, done = self.tls.read, len(memory), 0
        batch = _RECORD_BYTES * (_BATCH_RECORDS if length > _DATA_BYTES else 1)
        while done < length:
            try:
                done += read(length - done, memory[done:])  # type: ignore[operator]  # a length, with a buffer
            except ssl.SSLWantReadError:
                if not self._read_records(batch):
                    return False
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return False
        return True

    def recv(self, limit: int) -> bytes:
        """Receive up to ``limit`` bytes; none if the peer has closed."""
        while True:
            try:
                return self.tls.read(limit)
            except ssl.SSLWantReadError:
                if not self._read_records():
                    return b""
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return b""

    def sendall(self, data: memoryview | bytes) -> None:
        """Send all of ``data``."""
        self._encrypt(memoryview(data))
        self._flush()

    def send_at_once(self, data: memoryview) -> int:
        """Send as much of ``data`` as the kernel takes without waiting; return its length.

        The next call must go on where this one has stopped, because that part may be encrypted already.
        """
        sent = 0
        while self._records or sent < len(data):
            if not self._records:
                part = data[sent : sent + _BATCH_DATA_BYTES]
                self._encrypt(part)
                self._records, self._sealed = memoryview(self._to_network.read()), len(part)
            try:
                count = self.socket.send(self._records, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            self._records = self._records[count:]
            if not self._records:
                sent += self._sealed
        return sent

    def settimeout(self, seconds: float | None) -> None:
        """Set the timeout of the socket."""
        self.socket.settimeout(seconds)

    def fileno(self) -> int:
        """Return the file descriptor of the socket."""
        return self.socket.fileno()

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _encrypt(self, data: memoryview) -> None:
        # Each call gives up the interpreter's lock, so all records of a batch are made in one.
        write, done = self.tls.write, 0
        while done < len(data):
            done += write(data[done : done + _BATCH_DATA_BYTES])

    def _read_records(self, limit: int = _RECORD_BYTES) -> int:
        """Take what has arrived; return its size, 0 if the peer has closed."""
        if len(self._received) < limit:
            self._received = memoryview(bytearray(limit))
        count = self.socket.recv_into(self._received, limit)
        if count:
            self._from_network.write(self._received[:count])
        else:
            self._from_network.write_eof()
        return count

    def _flush(self) -> None:
        if self._to_network.pending:
            self.socket.sendall(self._to_network.read())


Stream: TypeAlias = socket.socket | SealedSocket
"""A connection, clear or under TLS."""


def socket_of(stream: Stream) -> socket.socket:
    """Return the socket that carries ``stream``."""
    return stream.socket if isinstance(stream, SealedSocket) else stream
