"""Connections that the hub has accepted: who is served first, and who makes room for others."""

from __future__ import annotations

import heapq
import socket
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping

from pipeedge.control.connection import Connection
from pipeedge.control.epoch_messages import EPOCH_TO_HUB
from pipeedge.control.messages import TO_HUB, Decoder, Message, Verdict, frame
from pipeedge.control.wire import WireEnd

__all__ = ["Caller", "in_turn", "surplus"]

_GRACE_S = 0.1
"""Seconds that a peer has to reply to the answer of TLS before another connection may replace it."""


class Caller(Connection):
    """A connection that the hub has accepted.

    Args:
        number: number of the connection.
        sock: socket of the connection.
        peer: address of the other end, for messages.
        end: this end.
        max_message_bytes: length of the longest message that is accepted.
        close_at: time at which it is closed if the peer has not proved to be a member.
    """

    def __init__(
        self,
        number: int,
        sock: socket.socket,
        peer: str,
        end: WireEnd,
        *,
        max_message_bytes: int,
        close_at: float,
    ) -> None:
        super().__init__(sock, end, Decoder(TO_HUB | EPOCH_TO_HUB, max_message_bytes))
        self.number = number
        self.peer = peer
        self.close_at = close_at
        """Time at which it is closed if the peer has not proved to be a member."""
        self.spared_until: float | None = None
        """Time from which another connection may replace it, once its peer was answered."""

    def answered(self, now: float) -> None:
        """Leave the peer time to reply, once, so that it cannot hold its place by sending bit by bit."""
        if self.spared_until is None:
            self.spared_until = now + _GRACE_S

    @property
    def is_stranger(self) -> bool:
        """Whether the peer has not proved to be a member, or has proved to be none."""
        return not self.end.established or bool(self.end.failure)

    def queue_message(self, message: Message) -> None:
        """Queue a message. A verdict replaces all messages of which nothing has been sent yet."""
        if isinstance(message, Verdict):
            self.withdraw()
        self.queue(frame(message))


def in_turn(strangers: list[Caller]) -> list[Caller]:
    """Return the order in which strangers are served.

    First come those that were answered already, because without the key a stranger gets no further. Then come
    the newest of each address in turn: where they come faster than they can be served, those that have waited
    longest have little hope, and a rank that is closed dials again.
    """
    newer: Counter[str] = Counter()
    places = {}
    for stranger in sorted(strangers, key=lambda each: each.number, reverse=True):
        places[stranger.number] = (stranger.spared_until is None, newer[stranger.peer])
        newer[stranger.peer] += 1
    return sorted(strangers, key=lambda each: places[each.number])


def surplus(callers: Mapping[int, Caller], ranked: Collection[int], most: int, now: float) -> list[Caller]:
    """Return callers to close: the oldest ones, from the address that has most at the time.

    Strangers at one address thus do not displace a rank at another.

    Args:
        callers: all of them by number, oldest first.
        ranked: numbers of those that are ranks, which stay.
        most: number of callers for which there is room.
        now: present time.
    """
    left = len(callers) - most
    if left <= 0:
        return []
    unknown = [
        each
        for number, each in callers.items()
        if number not in ranked and (each.spared_until is None or each.spared_until <= now)
    ]
    strangers = [each for each in unknown if each.is_stranger]
    crowds: dict[str, deque[Caller]] = defaultdict(deque)
    for each in strangers if len(strangers) >= left else unknown:
        crowds[each.peer].append(each)
    sizes = [(-len(crowd), peer) for peer, crowd in crowds.items()]
    heapq.heapify(sizes)
    chosen: list[Caller] = []
    while len(chosen) < left and sizes:
        size, peer = sizes[0]
        chosen.append(crowds[peer].popleft())
        if size == -1:
            heapq.heappop(sizes)
        else:
            heapq.heapreplace(sizes, (size + 1, peer))
    return chosen
