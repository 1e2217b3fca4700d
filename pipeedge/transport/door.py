"""The front door of a process: a listening socket, the callers it has let in, and who gives way to whom.

    stranger ──connect──> [ callers: so many, seconds each ] ──proves itself──> a rank, or a link
                               └── late, or one too many ──> closed

The hub has a door for the ranks, and each rank one for its links. A door belongs to the thread that waits on
its selector, and never waits itself. A caller that says nothing costs a socket until its time is over. When
there are too many, those of the address with most of them give way, the oldest first, so that strangers at
one address do not displace a member at another; a member that was displaced dials again.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import math
import selectors
import socket
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Generic, TypeVar

__all__ = ["PATIENCE_S", "Caller", "Door", "in_turn", "surplus"]

PATIENCE_S = 5.0
"""Seconds within which a caller must prove who it is, and within which one that was refused must read why."""
_STRANGERS_AT_ONCE = 16
"""Largest number of strangers that are served before others get their turn, as a handshake takes long."""
_ACCEPTED_AT_ONCE = 1024
"""Largest number of connections that are accepted before those that are open get their turn."""
_GRACE_S = 0.1
"""Seconds that a peer has to reply to the answer of TLS before another connection may replace it."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of a connection that cannot be accepted until the process or the machine gives something back."""
_EXHAUSTED_S = 0.1
"""Pause before the next attempt, while no stranger has anything to give back."""


class Caller:
    """An accepted connection.

    Args:
        number: Number of the connection, which grows.
        sock: Socket of the connection, which does not block.
        peer: Address of the other end.
        close_at: Time at which it is closed if the peer has not proved who it is.
    """

    def __init__(self, number: int, sock: socket.socket, peer: str, close_at: float) -> None:
        self.number = number
        self.socket = sock
        self.peer = peer
        self.close_at = close_at
        """Time at which it is closed if the peer has not proved who it is."""
        self.spared_until: float | None = None
        """Time from which another connection may replace it, once its peer was answered."""

    @property
    def is_stranger(self) -> bool:
        """Whether the peer has not proved to be a member, or has proved to be none."""
        return True

    def answered(self, now: float) -> None:
        """Leave the peer time to reply, once, so that it cannot hold its place by sending bit by bit."""
        if self.spared_until is None:
            self.spared_until = now + _GRACE_S

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


CallerT = TypeVar("CallerT", bound=Caller)


class Door(Generic[CallerT]):
    """Accepts connections, for the thread that waits on ``selector``.

    Args:
        listener: Listening socket; the door closes it.
        selector: Selector of the thread. Callers are registered with themselves as data, all else has none.
        welcome: Called with number, socket, address and time to close of each connection; returns the caller.
        most: Largest number of callers.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        *,
        welcome: Callable[[int, socket.socket, str, float], CallerT],
        most: int,
        clock: Callable[[], float],
    ) -> None:
        self._listener = listener
        self._selector = selector
        self._welcome = welcome
        self._most = most
        self._clock = clock
        self._resume_at = math.inf
        self.lacks_files = False
        """Whether the last connection was not accepted because this process may open no more files."""
        self.callers: dict[int, CallerT] = {}
        """Connections by number, oldest first."""
        self.opened = 0
        """Number of connections that were accepted so far."""
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)

    def turn(self, events: list[tuple[selectors.SelectorKey, int]]) -> tuple[list[tuple[CallerT, int]], bool]:
        """Return the callers to serve now, each with what it is ready for, and whether someone knocks.

        Strangers beyond the limit are ready again in the next turn.
        """
        ready = [(key.data, mask) for key, mask in events if key.data is not None]
        late = in_turn([caller for caller, _ in ready if caller.is_stranger])[_STRANGERS_AT_ONCE:]
        waiting = {caller.number for caller in late}
        served = [(caller, mask) for caller, mask in ready if caller.number not in waiting]
        return served, any(key.fileobj is self._listener for key, _ in events)

    def accept(self, staying: Collection[int] = ()) -> list[CallerT]:
        """Accept all that wait, so that no member waits behind them in the kernel.

        Returns the callers to drop, because there are too many.

        Args:
            staying: Numbers of callers that do not give way to others.
        """
        room, self.lacks_files = self._most, False
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                # Nobody is waiting, or the peer has closed it already. Or there are no more file descriptors.
                self.lacks_files = error.errno == errno.EMFILE
                if error.errno in _EXHAUSTED:
                    room = min(room, len(self.callers) - 1)
                    self._pause()
                break
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:  # the peer has closed it
                sock.close()
                continue
            caller = self._welcome(self.opened, sock, str(address[0]), self._clock() + PATIENCE_S)
            self.opened += 1
            self.callers[caller.number] = caller
            self._selector.register(sock, selectors.EVENT_READ, caller)
        return surplus(self.callers, staying, room, self._clock())

    def patience_s(self) -> float:
        """Return the seconds until ``overdue`` is to be called; infinite if nothing is awaited."""
        due = min((each.close_at for each in self.callers.values() if each.is_stranger), default=math.inf)
        return max(0.0, min(due, self._resume_at) - self._clock())

    def overdue(self) -> list[CallerT]:
        """Return the callers to drop, because they have not proved in time who they are."""
        now = self._clock()
        if now >= self._resume_at and self._listener.fileno() >= 0:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._resume_at = math.inf
        return [each for each in self.callers.values() if each.is_stranger and now >= each.close_at]

    def release(self, caller: CallerT) -> None:
        """Forget a caller, which its new owner uses or closes."""
        del self.callers[caller.number]
        with contextlib.suppress(KeyError, ValueError):  # it was not waited for
            self._selector.unregister(caller.socket)

    def drop(self, caller: CallerT) -> None:
        """Close a caller."""
        self.release(caller)
        caller.close()

    def stop_listening(self) -> None:
        """Free the address; callers stay."""
        if self._listener.fileno() >= 0:
            if math.isinf(self._resume_at):
                self._selector.unregister(self._listener)
            self._resume_at = math.inf
            self._listener.close()

    def close(self) -> None:
        """Close the listening socket and all callers."""
        self.stop_listening()
        for caller in list(self.callers.values()):
            self.drop(caller)

    def _pause(self) -> None:
        """Do not listen for a moment: while a connection waits, the selector would return at once."""
        self._selector.unregister(self._listener)
        self._resume_at = self._clock() + _EXHAUSTED_S


def in_turn(strangers: list[CallerT]) -> list[CallerT]:
    """Return the order in which strangers are served.

    First come those that were answered already, because without the key a stranger gets no further. Then come
    the newest of each address in turn: where they come faster than they can be served, those that have waited
    longest have little hope, and a member that is closed dials again.
    """
    newer: Counter[str] = Counter()
    places = {}
    for stranger in sorted(strangers, key=lambda each: each.number, reverse=True):
        places[stranger.number] = (stranger.spared_until is None, newer[stranger.peer])
        newer[stranger.peer] += 1
    return sorted(strangers, key=lambda each: places[each.number])


def surplus(callers: Mapping[int, CallerT], staying: Collection[int], most: int, now: float) -> list[CallerT]:
    """Return callers to close: the oldest ones, from the address that has most at the time.

    Args:
        callers: All of them by number, oldest first.
        staying: Numbers of those that do not give way, like ranks.
        most: Number of callers for which there is room.
        now: Present time.
    """
    left = len(callers) - most
    if left <= 0:
        return []
    unknown = [
        each
        for number, each in callers.items()
        if number not in staying and (each.spared_until is None or each.spared_until <= now)
    ]
    strangers = [each for each in unknown if each.is_stranger]
    crowds: dict[str, deque[CallerT]] = defaultdict(deque)
    for each in strangers if len(strangers) >= left else unknown:
        crowds[each.peer].append(each)
    sizes = [(-len(crowd), peer) for peer, crowd in crowds.items()]
    heapq.heapify(sizes)
    chosen: list[CallerT] = []
    while len(chosen) < left and sizes:
        size, peer = sizes[0]
        chosen.append(crowds[peer].popleft())
        if size == -1:
            heapq.heappop(sizes)
        else:
            heapq.heapreplace(sizes, (size + 1, peer))
    return chosen
