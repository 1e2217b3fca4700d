"""The life of a transport, alike for all kinds: open, abort from any thread, close, and open again.

CLOSED ──open──> OPENING ─────────────────────> OPEN ──close──> CLOSED
                    └───abort──> ABORTED <──abort─┘
                                    └──close──> CLOSED
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from threading import Lock

from pipeedge.base.crew import Closed
from pipeedge.base.errors import PipeEdgeError

__all__ = ["Lifecycle", "TransportState"]


class TransportState(Enum):
    """TransportState of a transport."""

    CLOSED = "closed"
    OPENING = "opening"
    OPEN = "open"
    ABORTED = "aborted"


class Lifecycle:
    """TransportState of one transport. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._state = TransportState.CLOSED

    @property
    def state(self) -> TransportState:
        """TransportState at this moment."""
        with self._lock:
            return self._state

    @property
    def aborted(self) -> bool:
        """Whether the transport was aborted, and is to be closed."""
        return self.state is TransportState.ABORTED

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Open the transport in the body. If the body fails, the transport is closed again.

        Raises:
            PipeEdgeError: It is not closed.
            Closed: It was aborted meanwhile, and is to be closed.
        """
        with self._lock:
            if self._state is not TransportState.CLOSED:
                raise PipeEdgeError(f"the transport is {self._state.value}: close it before it is opened")
            self._state = TransportState.OPENING
        try:
            yield
        except BaseException:
            self.close()
            raise
        with self._lock:
            if self._state is not TransportState.OPENING:
                raise Closed
            self._state = TransportState.OPEN

    def check_open(self) -> None:
        """Raise unless the transport is open.

        Raises:
            PipeEdgeError: It was never opened, or was closed.
            Closed: It was aborted.
        """
        state = self.state
        if state is TransportState.ABORTED:
            raise Closed
        if state is not TransportState.OPEN:
            raise PipeEdgeError(f"the transport is {state.value}: open it before its links")

    def abort(self) -> bool:
        """Mark the transport as aborted; return False if it was closed or aborted already."""
        with self._lock:
            if self._state not in (TransportState.OPENING, TransportState.OPEN):
                return False
            self._state = TransportState.ABORTED
            return True

    def close(self) -> TransportState:
        """Mark the transport as closed and return the state that it leaves."""
        with self._lock:
            state, self._state = self._state, TransportState.CLOSED
            return state
