"""Items from their arrival to their answer: those that wait, and the microbatches under way.

    open ──> request waits until its last item is under way
    reserve ──> offer ──> waiting ──form──> under way ──land──> answered
                             │                │    ^
                             │                └────┘ feed_again: after a failure of the pipeline
                             └── withdraw, expire, drop_waiting ──> given up

A request of many items brings them in parts, each when there is room for it. So there are two counts: of the
requests that wait, and of the items that were prepared and wait.

Uses neither threads nor clocks: ``RequestQueue`` holds its lock during each call, and delivers the answers
afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipeedge.base.errors import PipeEdgeError
from pipeedge.serve.batching import Batcher, BatchLimits
from pipeedge.serve.in_flight import Claimed, Counts, Entry, Flight, QueueState, claim
from pipeedge.serve.pending import Found, PendingAnswers

__all__ = ["Backlog"]


class Backlog:
    """All items without an answer, and counts of those that had one.

    Args:
        limits: Limits of the items that wait, and of microbatches.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.counts = Counts()
        """Counts of items by their outcome; to be changed through this object alone."""
        self._batcher = Batcher(limits)
        self._waiting: dict[int, Entry] = {}
        self._requests: dict[PendingAnswers, None] = {}
        """Requests of which some item is neither under way nor given up, in order of arrival."""
        self._reserved = 0
        self._under_way: deque[Flight] = deque()
        self._again: deque[Flight] = deque()
        """Microbatches under way that are to be fed again."""
        self._tickets = 0
        self._fed = 0

    @property
    def waiting(self) -> int:
        """Number of items that wait."""
        return len(self._waiting)

    @property
    def requests(self) -> Sequence[PendingAnswers]:
        """Requests of which some item is neither under way nor given up."""
        return tuple(self._requests)

    @property
    def requests_waiting(self) -> int:
        """Number of these."""
        return len(self._requests)

    @property
    def room(self) -> int:
        """Number of further items that may wait."""
        return self._batcher.room - self._reserved

    def has_room_under_way(self, window: int) -> bool:
        """Return whether fewer than ``window`` microbatches are under way, or some are to be fed again."""
        return bool(self._again) or len(self._under_way) < window

    def has_next(self, window: int) -> bool:
        """Return whether a microbatch can be fed while fewer than ``window`` are under way."""
        return bool(self._again) or (bool(self._waiting) and len(self._under_way) < window)

    # -- items that wait -----------------------------------------------------------------------------

    def open(self, answers: PendingAnswers) -> None:
        """Count a request whose items come now or later."""
        if answers.unfed:
            self._requests[answers] = None

    def reserve(self, answers: PendingAnswers, items: int) -> None:
        """Keep room, which there must be, for items of a request that are still prepared."""
        self._reserved += items
        answers.reserved += items
        answers.queued += items

    def release(self, answers: PendingAnswers, items: int) -> None:
        """Give up room that was kept."""
        self._reserved -= items
        answers.reserved -= items
        answers.queued -= items

    def offer(self, entries: Sequence[Entry], deadline_s: float | None) -> None:
        """Add items of one request, not to be computed after ``deadline_s``, into room that it has kept."""
        if not entries:
            return
        first, answers = self._tickets, entries[0].answers
        self._reserved -= len(entries)
        answers.reserved -= len(entries)
        if not self._batcher.offer(first, [entry.tokens for entry in entries], deadline_s):
            raise ValueError("no room was kept for these items")
        self._tickets += len(entries)
        self._waiting.update(enumerate(entries, start=first))

    def fail(self, answers: PendingAnswers, items: int) -> None:
        """Count items of a request that could not be prepared, and for which room was kept."""
        self._reserved -= items
        answers.reserved -= items
        answers.unclaimed -= items
        self._leave(answers, items)

    def _leave(self, answers: PendingAnswers, items: int) -> None:
        """Count items of a request that do not wait any more."""
        answers.queued -= items
        answers.unfed -= items
        if not answers.unfed:
            self._requests.pop(answers, None)

    def _left(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._leave(entry.answers, 1)

    def refuse(self, items: int) -> None:
        """Count ``items`` that there is no room for."""
        self.counts.refused += items

    def withdraw(self, answers: PendingAnswers) -> None:
        """Give up the items whose answers nobody wants; those under way are computed in vain."""
        tickets = [ticket for ticket, entry in self._waiting.items() if entry.answers is answers]
        for ticket in tickets:
            del self._waiting[ticket]
        self._batcher.cancel(tickets)
        self.release(answers, answers.reserved)
        self._leave(answers, answers.queued)
        unprepared, answers.unfed = answers.unfed, 0
        self._requests.pop(answers, None)
        self.counts.failed += answers.unclaimed - unprepared
        answers.unclaimed = 0

    def expire(self, now: float) -> list[Entry]:
        """Remove the items whose deadline is over, and return them."""
        expired = list(map(self._waiting.pop, self._batcher.expire(now)))
        self._left(expired)
        return expired

    def drop_waiting(self) -> list[Entry]:
        """Remove all items that wait, and return them."""
        dropped = list(self._waiting.values())
        self._batcher.cancel(tuple(self._waiting))
        self._waiting.clear()
        self._left(dropped)
        return dropped

    def drop_all(self) -> list[Entry]:
        """Remove all items, also those under way, and return them."""
        dropped = self.drop_waiting()
        dropped += (entry for flight in self._under_way for entry in flight.entries)
        self._under_way.clear()
        self._again.clear()
        return dropped

    def give_up(self, entries: Sequence[Entry], error: PipeEdgeError) -> Claimed:
        """Count ``entries``, which were removed, as failed; return ``error`` for those somebody awaits."""
        claimed = claim(entries, [error] * len(entries))
        self.counts.failed += sum(map(len, claimed.values()))
        return claimed

    # -- microbatches under way ----------------------------------------------------------------------

    def feed_again(self, position: int | None) -> None:
        """Have the microbatches under way fed again.

        Args:
            position: Number of the first item to feed again among all that were fed; None for the first one
                without an answer.
        """
        self._again = deque(each for each in self._under_way if position is None or each.first >= position)

    def next_again(self) -> Flight | None:
        """Return the next microbatch that is to be fed again, or None."""
        return self._again.popleft() if self._again else None

    def form(self, now: float) -> Flight | None:
        """Form a microbatch of items that wait and return it, or None if none waits."""
        tickets = self._batcher.form()
        if not tickets:
            return None
        flight = Flight(self._fed, tuple(map(self._waiting.pop, tickets)), now)
        self._left(flight.entries)
        self._fed += len(tickets)
        self._under_way.append(flight)
        return flight

    def is_due(self, numbers: tuple[int, ...]) -> bool:
        """Return whether the next results to come are those of the items with these numbers."""
        return bool(self._under_way) and self._under_way[0].numbers == numbers

    def land(self, found: Sequence[Found], now: float) -> Claimed:
        """Remove the oldest microbatch under way, whose outputs have come.

        Args:
            found: Outputs of each item, or the error of one whose outputs are not all numbers.
            now: Time in seconds.

        Returns:
            What was found for the items that somebody waits for.
        """
        flight = self._under_way.popleft()
        claimed = claim(flight.entries, found)
        self.counts.landed(flight, now)
        for some in claimed.values():
            bad = sum(isinstance(own, PipeEdgeError) for _, own in some)
            self.counts.answered += len(some) - bad
            self.counts.failed += bad
        return claimed

    # -- figures -------------------------------------------------------------------------------------

    def retry_after_s(self) -> int:
        """Return the whole seconds after which what waits now has left."""
        return self.counts.retry_after_s(sum(answers.unfed for answers in self._requests))

    def state(self) -> QueueState:
        """Return the state of this moment."""
        under_way = sum(len(flight.entries) for flight in self._under_way)
        return self.counts.state(len(self._requests), len(self._waiting), under_way)
