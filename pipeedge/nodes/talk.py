"""A conversation with another node over TLS: messages, and bytes that follow them.

Each end belongs to one thread. Another thread may only ``hang_up`` or ``finish``, which use the socket alone.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pipeedge.base.errors import DeadlineError, PeerFailedError
from pipeedge.base.fields import MALFORMED, reader
from pipeedge.base.wording import figure
from pipeedge.control.messages import MAX_BYTES, Message, frame
from pipeedge.nodes.messages import FROM_NODE, TO_NODE, Refused
from pipeedge.transport.dialling import NotAMemberError, refusals
from pipeedge.transport.sealed import SealedSocket
from pipeedge.transport.wires import tune

__all__ = ["CHUNK", "HELLO", "NodeRefusedError", "Talk", "refusing"]

HELLO = b"PENODE1\n"
"""Introduction of a connection to a node."""
CHUNK = 1 << 20
_LENGTH = struct.Struct(">I")
_SILENCE_S = 15.0
"""Seconds after which a host that acknowledges nothing is lost."""
_READERS = {"node": reader(FROM_NODE), "caller": reader(TO_NODE)}


class NodeRefusedError(PeerFailedError):
    """A node has refused a request, or could not do it; the message is its own line."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__(line)
        self.exit_code = code


class Talk:
    """One end of a conversation.

    Args:
        stream: Connection after its handshake. The conversation closes it.
        name: Name of the other end, for messages.
        asks: Whether this end asks, rather than answers.
    """

    def __init__(self, stream: SealedSocket, name: str, *, asks: bool) -> None:
        self.name = name
        self._stream = stream
        self._read = _READERS["node" if asks else "caller"]
        stream.socket.setblocking(True)
        tune(stream.socket, _SILENCE_S)

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def socket(self) -> socket.socket:
        """Socket of the connection, to wait for."""
        return self._stream.socket

    @property
    def own_address(self) -> str:
        """Address of this machine on the way to the other end."""
        return _plain(self._stream.socket.getsockname()[0])

    @property
    def peer_address(self) -> str:
        """Address of the other end."""
        return _plain(self._stream.socket.getpeername()[0])

    def peer_certificate(self) -> tuple[str, str]:
        """Return the name and the serial number, in hexadecimal, in the certificate of the other end."""
        found: dict[str, Any] = self._stream.sealing.tls.getpeercert() or {}
        names = [value for part in found.get("subject", ()) for key, value in part if key == "commonName"]
        return (str(names[0]) if names else ""), str(found.get("serialNumber", "")).lower()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            PeerFailedError: The connection is lost.
        """
        with self._explained():
            self._stream.sendall(frame(message))

    def receive(self, within_s: float | None = None) -> Any:
        """Return the next message.

        Args:
            within_s: Longest wait for it in seconds, or None to wait as long as the other host is there.

        Raises:
            NodeRefusedError: The other end has refused the request.
            PeerFailedError: The connection is lost, or what comes is not a message.
            DeadlineError: Nothing came in time.
        """
        with self._explained(within_s):
            self._stream.settimeout(within_s)
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            if length > MAX_BYTES:
                raise PeerFailedError(f"{self.name} sent a message that is too long")
            text = self._exactly(length)
            self._stream.settimeout(None)
        try:
            message = self._read(text)
        except MALFORMED as error:
            raise PeerFailedError(
                f"{self.name} sent something that this version does not know ({error}); do both run the same?"
            ) from error
        if isinstance(message, Refused):
            raise NodeRefusedError(message.line, message.exit_code)
        return message

    def ask(self, request: Message, kind: type[Any], within_s: float | None = None) -> Any:
        """Send a request, and return its answer, which must be of a ``kind``.

        Raises:
            PeerFailedError: As in ``receive``, or the answer is of another kind.
        """
        self.send(request)
        return self.expect(kind, within_s)

    def expect(self, kind: type[Any], within_s: float | None = None) -> Any:
        """Return the next message, which must be of a ``kind``. Raises as ``ask`` does."""
        answer = self.receive(within_s)
        if not isinstance(answer, kind):
            raise PeerFailedError(f"{self.name} answered with {answer.kind} out of turn")
        return answer

    def send_bytes(self, parts: Iterable[bytes | memoryview]) -> None:
        """Send the bytes that a message has announced. Raises as ``send`` does."""
        with self._explained():
            for part in parts:
                self._stream.sendall(part)

    def receive_bytes(self, size: int) -> Iterator[memoryview]:
        """Yield the ``size`` bytes that a message has announced, in parts that are valid until the next one.

        Raises:
            PeerFailedError: The connection is lost.
        """
        memory = memoryview(bytearray(min(CHUNK, size)))
        while size:
            part = memory[: min(len(memory), size)]
            with self._explained():
                if not self._stream.fill(part):
                    raise ConnectionResetError("connection closed by the other end")
            size -= len(part)
            yield part

    def finish(self) -> None:
        """Say that this end asks for nothing more, from any thread; the other end may go on."""
        with contextlib.suppress(OSError):
            self._stream.socket.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """End the conversation at once, from any thread."""
        with contextlib.suppress(OSError):
            self._stream.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def _exactly(self, size: int) -> bytes:
        memory = bytearray(size)
        if not self._stream.fill(memoryview(memory)):
            raise ConnectionResetError("connection closed by the other end")
        return bytes(memory)

    @contextlib.contextmanager
    def _explained(self, within_s: float | None = None) -> Iterator[None]:
        try:
            with refusals(self._stream):
                yield
        except NotAMemberError as error:
            raise NotAMemberError(f"{self.name} {error}") from error
        except TimeoutError as error:
            within = "" if within_s is None else f" within {figure(within_s)} s"
            raise DeadlineError(f"{self.name} did not answer{within}") from error
        except OSError as error:
            raise PeerFailedError(f"{self.name} closed the connection ({error.strerror or error})") from error


def refusing(talk: Talk, line: str, code: int) -> None:
    """Tell the other end why its request is refused, if it still listens."""
    with contextlib.suppress(PeerFailedError):
        talk.send(Refused(line, code))


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that ``call`` takes."""
    began = clock()
    call()
    return clock() - began


def _plain(address: str) -> str:
    """Return an IPv4 address as such where a socket of IPv6 has it."""
    return address.removeprefix("::ffff:")
