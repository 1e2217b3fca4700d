"""Items from their arrival until they are fed, and the requests that wait for their answers.

    open ──> request waits until its last item is fed ──> ... until it has all answers
    reserve ──> offer ──> waiting ──form──> fed (``run.ledger`` knows what is under way) ──answer──> answered
                             └── withdraw, expire, drop_waiting ──> given up

A request of many items brings them in parts, each when there is room for it. So there are two counts: of the
requests that wait, and of the items that were prepared and wait.

Uses neither threads nor clocks: ``RequestQueue`` holds its lock during each call, and delivers the answers
afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeedge.base.errors import PipeEdgeError
from pipeedge.serve.batching import Batcher, BatchLimits
from pipeedge.serve.in_flight import Claimed, Counts, Entry, QueueState, RequestGroup
from pipeedge.serve.pending import Found, PendingAnswers

__all__ = ["Backlog"]


class Backlog:
    """Items that wait, requests without all their answers, and counts of those that had one.

    Args:
        limits: Limits of the items that wait, and of microbatches.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.counts = Counts()
        """Counts of items by their outcome; to be changed through this object alone."""
        self._batcher = Batcher(limits)
        self._waiting: dict[int, Entry] = {}
        self._requests: dict[PendingAnswers, None] = {}
        """Requests of which some item is neither answered nor given up, in order of arrival."""
        self._requests_waiting = 0
        self._reserved = 0
        self._tickets = 0

    @property
    def waiting(self) -> int:
        """Number of items that wait."""
        return len(self._waiting)

    @property
    def requests(self) -> Sequence[PendingAnswers]:
        """Requests of which some item is neither answered nor given up."""
        return tuple(self._requests)

    @property
    def requests_waiting(self) -> int:
        """Number of requests of which some item is neither fed nor given up."""
        return self._requests_waiting

    @property
    def room(self) -> int:
        """Number of further items that may wait."""
        return self._batcher.room - self._reserved

    # -- items that wait -----------------------------------------------------------------------------

    def open(self, answers: PendingAnswers) -> None:
        """Count a request whose items come now or later."""
        if answers.unfed:
            self._requests[answers] = None
            self._requests_waiting += 1

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
        self._leave(answers, items)
        self._claim(answers, items)

    def _leave(self, answers: PendingAnswers, items: int) -> None:
        """Count items of a request that do not wait any more."""
        answers.queued -= items
        self._feed(answers, items)

    def _feed(self, answers: PendingAnswers, items: int) -> None:
        """Count items of a request that were fed or given up."""
        if items:
            answers.unfed -= items
            self._requests_waiting -= not answers.unfed

    def _claim(self, answers: PendingAnswers, items: int) -> None:
        """Count items of a request that are answered or given up."""
        answers.unclaimed -= items
        if not answers.unclaimed:
            self._requests.pop(answers, None)

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
        unprepared = answers.unfed
        self._feed(answers, unprepared)
        self.counts.failed += answers.unclaimed - unprepared
        self._claim(answers, answers.unclaimed)

    def expire(self, now: float) -> list[Entry]:
        """Remove the items whose deadline is over, and return them."""
        return self._remove(self._batcher.expire(now))

    def drop_waiting(self) -> list[Entry]:
        """Remove all items that wait, and return them."""
        self._batcher.cancel(tickets := tuple(self._waiting))
        return self._remove(tickets)

    def give_up(self, entries: Sequence[Entry], error: PipeEdgeError) -> Claimed:
        """Count ``entries``, which were removed, as failed; return ``error`` for those somebody awaits."""
        return self._answer(entries, [error] * len(entries))

    def form(self, now: float) -> RequestGroup | None:
        """Form a microbatch of items that wait and return it, or None if none waits."""
        tickets = self._batcher.form()
        self.counts.under_way += len(tickets)
        return RequestGroup.of(tickets, self._remove(tickets), now) if tickets else None

    def _remove(self, tickets: Sequence[int]) -> list[Entry]:
        """Remove some items that wait, and return them."""
        entries = [self._waiting.pop(ticket) for ticket in tickets]
        for entry in entries:
            self._leave(entry.answers, 1)
        return entries

    # -- results -------------------------------------------------------------------------------------

    def answer(self, group: RequestGroup, found: Sequence[Found], now: float) -> Claimed:
        """Count the items of a microbatch whose outputs have come.

        Args:
            group: The microbatch.
            found: Outputs of each item, or the error of one whose outputs are not all numbers.
            now: Time in seconds.

        Returns:
            What was found for the items that somebody waits for.
        """
        self.counts.computed(group, now)
        return self._answer(group.entries, found)

    def _answer(self, entries: Sequence[Entry], found: Sequence[Found]) -> Claimed:
        """Return what was found for those entries that somebody still awaits; it is about to be delivered."""
        claimed: dict[PendingAnswers, list[tuple[int, Found]]] = {}
        for entry, own in zip(entries, found, strict=True):
            answers = entry.answers
            if answers.unclaimed:
                self._claim(answers, 1)
                claimed.setdefault(answers, []).append((entry.place, own))
                if isinstance(own, PipeEdgeError):
                    self.counts.failed += 1
                else:
                    self.counts.answered += 1
        return claimed

    # -- figures -------------------------------------------------------------------------------------

    def retry_after_s(self) -> int:
        """Return the whole seconds after which what waits now has left."""
        return self.counts.retry_after_s(sum(answers.unfed for answers in self._requests))

    def state(self) -> QueueState:
        """Return the state of this moment."""
        return self.counts.state(self._requests_waiting, len(self._waiting))
