"""The rendezvous of ``-c tcp``: rank 0 hears where each member listens, and tells all of them.

    rank 0   [serve] <──Join── member, member, ...      when all have come: ──GroupRoster──> each, and close

With a membership the connections are under TLS, so that only members learn where the others listen and by
which token they know one another. It needs neither torch nor a store.
"""

from __future__ import annotations

import contextlib
import secrets
import ssl
import time
from collections.abc import Iterable

from pipeedge.base.crew import Closed
from pipeedge.base.errors import DeadlineError, PeerFailedError, PipeEdgeError
from pipeedge.base.wording import figure
from pipeedge.transport.base import Rendezvous
from pipeedge.transport.dialling import NotAMemberError, dial, refusals
from pipeedge.transport.interfaces import listen
from pipeedge.transport.membership import Membership
from pipeedge.transport.reception import Reception
from pipeedge.transport.sealed import Stream
from pipeedge.transport.tcp_hello import (
    JOIN_BYTES,
    ROSTER_HEAD_BYTES,
    TOKEN_BYTES,
    GroupRoster,
    HelloError,
    Join,
    roster_length,
)
from pipeedge.transport.wires import Connections

__all__ = ["TcpRendezvousServer", "enter_rendezvous", "join"]

_ANNOUNCE_S = 5.0
"""Seconds within which a member takes the roster."""
_RETRY_S = 0.1


class TcpRendezvousServer:
    """Tells the members of a group where each listens, in a thread of its own.

    Args:
        addr: Address of this machine at which to listen.
        membership: Who may join, or None for anybody.
    """

    def __init__(self, addr: str, membership: Membership | None = None) -> None:
        self._addr = addr
        self._membership = membership
        self._reception: Reception | None = None
        self._awaited: frozenset[int] = frozenset()
        self._joined: dict[int, tuple[Join, Stream]] = {}

    def serve(self, members: Iterable[int]) -> int:
        """Serve ``members``, and return the port.

        Raises:
            RequestError: The address does not belong to this machine.
        """
        self._awaited = frozenset(members)
        listener = listen(self._addr, 0)
        port = int(listener.getsockname()[1])
        context = None if self._membership is None else self._membership.server_context()
        self._reception = Reception(listener, context=context, hello_bytes=JOIN_BYTES, admit=self._admit)
        return port

    def close(self) -> None:
        """Stop serving; do nothing if not served."""
        if self._reception is not None:
            self._reception.close()
            self._reception = None
        self._dismiss_all()

    def _admit(self, sock: Stream, hello: bytes) -> bool:
        try:
            introduced = Join.unpack(hello)
        except HelloError:
            sock.close()
            return True
        if introduced.rank not in self._awaited:
            sock.close()
            return True
        # A member that lost its connection comes again.
        former = self._joined.pop(introduced.rank, None)
        if former is not None:
            former[1].close()
        self._joined[introduced.rank] = introduced, sock
        if len(self._joined) == len(self._awaited):
            self._announce()
        return True

    def _announce(self) -> None:
        places = {rank: introduced.place for rank, (introduced, _) in self._joined.items()}
        message = GroupRoster(secrets.token_bytes(TOKEN_BYTES), places).pack()
        for _, sock in self._joined.values():
            with contextlib.suppress(OSError):  # who has left since is missed by those it has links with
                sock.settimeout(_ANNOUNCE_S)
                sock.sendall(message)
        self._dismiss_all()

    def _dismiss_all(self) -> None:
        for _, sock in self._joined.values():
            sock.close()
        self._joined = {}


def enter_rendezvous(
    rendezvous: Rendezvous,
    connections: Connections,
    context: ssl.SSLContext | None,
    deadline: float,
) -> Stream:
    """Connect to the rendezvous, from the address at which it can be reached.

    Args:
        rendezvous: The rendezvous.
        connections: What can be cut to end the wait.
        context: Settings of TLS, or None.
        deadline: When to give up, by the monotonic clock.

    Raises:
        PeerFailedError: It is not there.
        Closed: ``connections`` were cut.
    """
    where = f"{rendezvous.addr}:{rendezvous.port}"
    while True:
        try:
            return dial(
                (rendezvous.addr, rendezvous.port),
                connections,
                context=context,
                deadline=deadline,
            )
        except NotAMemberError as error:
            raise PeerFailedError(f"what listens at the rendezvous {where} {error}") from error
        except OSError as error:
            displaced = isinstance(error, ConnectionResetError) and time.monotonic() + _RETRY_S < deadline
            if not displaced:
                raise PeerFailedError(f"no rendezvous at {where}: {error.strerror or error}") from error
        connections.pause(_RETRY_S)


def join(
    sock: Stream,
    introduction: Join,
    rendezvous: Rendezvous,
    connections: Connections,
    context: ssl.SSLContext | None,
    deadline: float,
) -> GroupRoster:
    """Introduce this member, and wait until all have come.

    Args:
        sock: Connection to the rendezvous, which is closed. If it is lost, because strangers displaced it, it
            is dialed again.
        introduction: Introduction of this member.
        rendezvous: The rendezvous.
        connections: What can be cut to end the wait.
        context: Settings of TLS, or None.
        deadline: When to give up, by the monotonic clock.

    Raises:
        PeerFailedError: The rendezvous has ended, or is that of something else.
        DeadlineError: Not all members came in time.
        Closed: ``connections`` were cut.
    """
    where = f"{rendezvous.addr}:{rendezvous.port}"
    while True:
        try:
            return _wait_for_roster(sock, introduction, rendezvous, deadline)
        except NotAMemberError as error:
            raise PeerFailedError(f"what listens at the rendezvous {where} {error}") from error
        except HelloError as error:
            raise PeerFailedError(f"the rendezvous at {where} is not one of this group: {error}") from error
        except OSError as error:
            if connections.are_cut:
                raise Closed from error
            if isinstance(error, TimeoutError) or time.monotonic() + _RETRY_S > deadline:
                raise DeadlineError(
                    f"not all members came to the rendezvous at {where} within "
                    f"{figure(rendezvous.timeout_s)} s"
                ) from error
        finally:
            connections.close(sock)
        connections.pause(_RETRY_S)
        sock = enter_rendezvous(rendezvous, connections, context, deadline)


def _wait_for_roster(
    sock: Stream, introduction: Join, rendezvous: Rendezvous, deadline: float
) -> GroupRoster:
    sock.settimeout(max(0.01, deadline - time.monotonic()))
    with refusals(sock):
        sock.sendall(introduction.pack())
        head = _read(sock, ROSTER_HEAD_BYTES, deadline)
        roster = GroupRoster.unpack(head + _read(sock, roster_length(head) - len(head), deadline))
    if set(roster.places) != set(rendezvous.members):
        raise PipeEdgeError(f"the rendezvous names the members {sorted(roster.places)}")
    return roster


def _read(sock: Stream, length: int, deadline: float) -> bytes:
    data = b""
    while len(data) < length:
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        part = sock.recv(length - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data
