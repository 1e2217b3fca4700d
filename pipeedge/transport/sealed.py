"""TLS in memory, for every connection of the program, and a socket that carries its records.

    frame ──encrypt──> [records] ──eight at once──> socket ──eight at once──> [records] ──decrypt──> frame
                       └──────────────── Sealing ─────────────────┘  of each end

``Sealing`` has no socket: the control connections, which never block, move its records themselves
(``control.wire``). Links use ``SealedSocket``. ``ssl.SSLSocket`` asks the kernel once for each record of
16 KiB that it sends, and twice for each that it receives. For the kernel that is three times the work of
moving the same bytes at once, more than the copies that are made here cost.
"""

from __future__ import annotations

import socket
import ssl
from typing import TypeAlias

from pipeedge.transport.membership import describe_handshake_failure

__all__ = ["SealedSocket", "Sealing", "Stream", "socket_of"]

_BATCH_RECORDS = 8
"""Number of full records that are sent or received at once. They stay in the processor's cache until used."""
_DATA_BYTES = 16 << 10
"""Size of the data in a full record."""
_RECORD_BYTES = _DATA_BYTES + 22
"""Size of a full record with its header, type and tag, and of what is received where little is expected.

Batches of whole records leave no part of one behind, which would be moved in memory before the next batch.
"""
_BATCH_DATA_BYTES = _BATCH_RECORDS * _DATA_BYTES


class Sealing:
    """One end of TLS without a socket. It belongs to one thread at a time, as an ``ssl`` object must.

    Args:
        context: Settings of TLS.
        accepts: Whether this end has accepted the connection, rather than dialed it.
    """

    def __init__(self, context: ssl.SSLContext, *, accepts: bool) -> None:
        self.from_network, self.to_network = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.from_network, self.to_network, server_side=accepts)
        """TLS, which reads data from records that have come and writes records of data to be sent."""
        self.established = False
        """Whether the handshake is complete."""

    def shake_hands(self) -> bool:
        """Go on with the handshake as far as the records that have come allow; return whether it is complete.

        Raises:
            ssl.SSLError: It failed; ``to_network`` holds what tells the peer.
        """
        if not self.established:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                return False
            self.established = True
        return True

    def describe(self, error: ssl.SSLError) -> str:
        """Return why the other end of a failed handshake is no member, to follow its name in a sentence."""
        return describe_handshake_failure(error, self.tls)


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
        self.sealing = Sealing(context, accepts=accepts)
        """TLS of this end."""
        self._received = memoryview(b"")
        self._records = memoryview(b"")  # encrypted by ``send_at_once``, and not sent yet
        self._sealed = 0  # length of the data that they hold

    def shake_hands(self) -> bool:
        """Go on with the handshake, by one message of the peer at most; return whether it is complete.

        Raises:
            BlockingIOError: It must wait for the peer, on a socket that does not block.
            OSError: It failed.
        """
        if not self.sealing.established:
            try:
                if not self.sealing.shake_hands():
                    self._flush()
                    self._read_records()
            finally:
                self._flush()
        return self.sealing.established

    def fill(self, memory: memoryview) -> bool:
        """Receive until ``memory`` is full; return False if the peer has closed before."""
        # Its cost for each record of 16 KiB matters: hence one loop, and no exception but for a batch.
        read, length, done = self.sealing.tls.read, len(memory), 0
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
                return self.sealing.tls.read(limit)
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
                self._records, self._sealed = memoryview(self.sealing.to_network.read()), len(part)
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
        write, done = self.sealing.tls.write, 0
        while done < len(data):
            done += write(data[done : done + _BATCH_DATA_BYTES])

    def _read_records(self, limit: int = _RECORD_BYTES) -> int:
        """Take what has arrived; return its size, 0 if the peer has closed."""
        if len(self._received) < limit:
            self._received = memoryview(bytearray(limit))
        count = self.socket.recv_into(self._received, limit)
        if count:
            self.sealing.from_network.write(self._received[:count])
        else:
            self.sealing.from_network.write_eof()
        return count

    def _flush(self) -> None:
        if self.sealing.to_network.pending:
            self.socket.sendall(self.sealing.to_network.read())


Stream: TypeAlias = socket.socket | SealedSocket
"""A connection, clear or under TLS."""


def socket_of(stream: Stream) -> socket.socket:
    """Return the socket that carries ``stream``."""
    return stream.socket if isinstance(stream, SealedSocket) else stream
