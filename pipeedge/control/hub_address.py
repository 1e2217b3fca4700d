"""The address of the hub, which a rank dials before anything listens there."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeedge.base.errors import DeadlineError, PeerFailedError, PipeEdgeError, RequestError
from pipeedge.base.wording import figure
from pipeedge.control.connection import Connection
from pipeedge.control.messages import FROM_HUB, Decoder
from pipeedge.control.wire import ClearEnd, SealedEnd
from pipeedge.transport.dialling import NotAMemberError, dial
from pipeedge.transport.membership import Membership
from pipeedge.transport.sealed import SealedSocket, socket_of
from pipeedge.transport.wires import Connections

__all__ = ["HubAddress", "explain_refusal"]

_RETRY_S = 0.2
_FIRST_RETRY_S = 0.01
"""Ranks that are started together listen and connect within moments of each other."""
_PATIENCE_S = 2.0
"""Seconds after which the user hears that rank 0 is not there yet."""
_CONNECT_S = 5.0
"""Longest time in seconds for one attempt to connect. TLS may take longer, where many knock at the hub."""


@dataclass(frozen=True)
class HubAddress:
    """Where the hub listens, and how it is spoken to."""

    addr: str
    port: int
    context: ssl.SSLContext | None = None
    """Settings of TLS, or None to speak in clear."""

    @classmethod
    def of(cls, addr: str, port: int, membership: Membership | None) -> HubAddress:
        """Return the address of a hub of the run with the key ``membership``, or without one."""
        return cls(addr, port, None if membership is None else membership.client_context())

    def dial(
        self, timeout_s: float, show_waiting: Callable[[str, bool], None] = lambda line, over: None
    ) -> Connection:
        """Connect to the hub, which may not be there yet.

        Args:
            timeout_s: Seconds within which it must appear.
            show_waiting: Takes a line for the user if that takes a while, and one when the wait is over.

        Raises:
            DeadlineError: It did not appear within ``timeout_s``.
            RequestError: The address cannot be resolved, or only one of the two ends has this key.
            PeerFailedError: Another program listens there.
        """
        started = time.monotonic()
        deadline = started + timeout_s
        retry_s, waits = _FIRST_RETRY_S, False
        while True:
            try:
                connection = self._connect(max(_RETRY_S, deadline - time.monotonic()))
                if waits:
                    show_waiting("rank 0 is here", True)
                return connection
            except NotAMemberError as error:
                raise explain_refusal(f"rank 0 at {self.addr}:{self.port}", str(error)) from error
            except socket.gaierror as error:
                raise RequestError(
                    f"--addr {self.addr}: cannot resolve this name ({error.strerror})"
                ) from error
            except OSError as error:
                if time.monotonic() + _RETRY_S > deadline:
                    raise DeadlineError(
                        f"rank 0 never appeared at {self.addr}:{self.port} within {figure(timeout_s)} s "
                        f"({error.strerror or error}): start rank 0 or read why it ended, and check "
                        "--addr and --port"
                    ) from error
                if not waits and time.monotonic() - started > _PATIENCE_S:
                    waits = True
                    show_waiting(f"waiting for rank 0 at {self.addr}:{self.port} to start", False)
                time.sleep(retry_s)  # there is no event for a remote port that opens
                retry_s = min(2 * retry_s, _RETRY_S)

    def _connect(self, remaining_s: float) -> Connection:
        stream = dial(
            (self.addr, self.port),
            Connections(),
            context=self.context,
            deadline=time.monotonic() + remaining_s,
            connect_s=_CONNECT_S,
        )
        end = SealedEnd(stream.sealing) if isinstance(stream, SealedSocket) else ClearEnd(accepts=False)
        return Connection(socket_of(stream), end, Decoder(FROM_HUB))


def explain_refusal(who: str, failure: str) -> PipeEdgeError:
    """Return the error for a hub that is no member.

    Args:
        who: Name of the hub in the message.
        failure: What it is or does instead (``WireEnd.failure``).
    """
    if "key" in failure:
        return RequestError(f"{who} {failure}: give every rank the same --key")
    if "certificate" in failure:
        return RequestError(f"{who} {failure}")
    return PeerFailedError(f"{who} {failure}: is it PipeEdge? Check --addr and --port")
