"""Answer an iterable in its order: its values are read, prepared and asked in threads, not far ahead.

values ──[read]──> groups ──[ask]──> queue ──> answers
                      └─────[ask]──────┘          each thread takes a group, prepares it, and asks in its turn
[close] waits until no more answers are taken, and gives up what was asked

Things travel in groups of what is there, as handing each on to the next thread alone would cost more than
to compute a small model. Nothing waits for company: a thing may depend on the answer to the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from weakref import WeakSet

from pipeedge.base.channel import Channel
from pipeedge.base.crew import Closed, Threads
from pipeedge.base.errors import PipeEdgeError
from pipeedge.data import read_threads
from pipeedge.data.items import Item
from pipeedge.serve.answers import ModelAnswer
from pipeedge.serve.pending import EndedError, PendingAnswers
from pipeedge.serve.queued_model import QueuedModel

__all__ = ["Sequences", "answers_in_order"]


@dataclass(frozen=True)
class _Failed:
    """The end of a sequence that was cut off."""

    error: BaseException


class Sequences:
    """The sequences of questions that a pipeline answers."""

    def __init__(self) -> None:
        self.asking = Threads()
        """Threads that prepare and ask; they end with the sequence, or with ``end``."""
        self.reading = Threads()
        """Threads that read; they may have to wait for the user's next value, for any time."""
        self._open: WeakSet[_Questions] = WeakSet()
        self._changing = threading.Lock()

    def begin(self, questions: _Questions, values: Iterable[object]) -> None:
        """Start the threads of a sequence."""
        with self._changing:
            self._open.add(questions)
        self.reading.start("read", lambda: questions.read(values))
        for number in range(read_threads()):
            self.asking.start(f"ask {number}", questions.ask)

    def end(self) -> None:
        """Let all threads end, as the pipeline has; what was asked can still be taken."""
        with self._changing:
            left = list(self._open)
        for questions in left:
            questions.end()


def answers_in_order(
    service: QueuedModel,
    values: Iterable[object],
    *,
    group: int,
    ahead: int,
    sequences: Sequences | None = None,
    report: Callable[[PipeEdgeError], None] = lambda error: None,
) -> Iterator[ModelAnswer]:
    """Yield the answers to ``values``.

    Args:
        service: What answers.
        values: Things to ask about; may be endless, and may wait for their own answers.
        group: Largest number of things that are handed on together.
        ahead: Number of things that may be asked before the first of their answers is taken.
        sequences: All sequences of the pipeline; this one becomes one of them.
        report: Called with an error before it is raised.

    Raises:
        InputError: Something cannot be read, or does not fit the model; in its turn.
        PipeEdgeError: The pipeline has failed.
    """
    questions = _Questions(service, group, ahead)
    (sequences or Sequences()).begin(questions, values)
    taken: PendingAnswers | _Failed | None = None
    failure = PipeEdgeError  # at Python's end, this iterator may be closed after its module was emptied
    over: SimpleQueue[PendingAnswers | _Failed | None] = SimpleQueue()
    threading.Thread(target=lambda: questions.close(over.get()), name="close", daemon=True).start()
    try:
        while (taken := questions.asked.get()) is not None:
            if isinstance(taken, _Failed):
                raise taken.error
            yield from taken
    except failure as error:
        report(error)
        raise
    finally:
        # Another thread closes: the garbage collector may end this iterator in one that holds the queue's
        # lock, or when Python ends and no thread can be started.
        over.put(taken)


class _Questions:
    """Values on their way into the queue, through one thread that reads and some that ask.

    Args:
        service: What answers.
        group: Largest number of values that are handed on together.
        ahead: Number of values that may be asked before the first of their answers is taken.
    """

    def __init__(self, service: QueuedModel, group: int, ahead: int) -> None:
        self.asked: Channel[PendingAnswers | _Failed] = Channel(max(1, ahead // group))
        """The answers to come to each group, in order."""
        self._service = service
        self._group = group
        self._values: Channel[object] = Channel(2 * group)
        self._taking = threading.Lock()
        self._taken = 0
        """Number of values that some thread has taken."""
        self._turn = threading.Condition(threading.Lock())
        self._done = 0
        """Number of values that were asked about."""
        self._closed = False

    def read(self, values: Iterable[object]) -> None:
        """Read ``values``, which may block or raise."""
        with suppress(Closed):
            try:
                for value in values:
                    self._values.put(value)
            except Closed:
                raise
            except BaseException as error:  # raised where the answers are taken
                self._values.put(_Failed(error))
            self._values.finish()

    def ask(self) -> None:
        """Take one group after the other, prepare it beside others, and ask about it in its turn."""
        with suppress(Closed):
            while (taken := self._take())[1]:
                first, values = taken
                items, failed = _prepared(self._service, first, values)
                self._wait_for_turn(first)
                try:
                    if items:
                        self._ask(items)
                except Closed:
                    raise
                except BaseException as error:  # raised where the answers are taken
                    failed = _Failed(error)
                if failed is not None:  # nothing after it is asked
                    self.asked.put(failed)
                    self._end_turns()
                    break
                self._end_turn(len(values))
            else:
                self._wait_for_turn(taken[0])
            self.asked.finish()

    def _ask(self, items: list[Item]) -> None:
        answers = self._service.queue.submit(items, block=True)
        try:
            self.asked.put(answers)
        except Closed:
            answers.cancel()
            raise

    def end(self) -> None:
        """Let all threads end, and the sequence with an error after what was asked."""
        self._values.finish_with(_Failed(EndedError("the pipeline is ending and takes no further items")))
        self.asked.unbound()

    def close(self, taken: PendingAnswers | _Failed | None) -> None:
        """Let all threads end, and give up what was asked.

        Args:
            taken: What was taken last of the answers.
        """
        self._values.close()
        left = self.asked.close_and_take()
        self._end_turns()
        for answers in (taken, *left):
            if isinstance(answers, PendingAnswers):
                answers.cancel()

    def _take(self) -> tuple[int, list[object]]:
        """Wait for values; return what is there, if anything will be, and the number of the first."""
        with self._taking:
            first, values = self._taken, self._values.get_waiting(self._group)
            self._taken += len(values)
        return first, values

    def _wait_for_turn(self, first: int) -> None:
        """Wait until all values before number ``first`` were asked about.

        Raises:
            Closed: That is no longer wanted.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._closed or self._done == first)
            if self._closed:
                raise Closed

    def _end_turns(self) -> None:
        with self._turn:
            self._closed = True
            self._turn.notify_all()

    def _end_turn(self, values: int) -> None:
        with self._turn:
            self._done += values
            self._turn.notify_all()


def _prepared(service: QueuedModel, first: int, values: list[object]) -> tuple[list[Item], _Failed | None]:
    """Return the items of a group whose first value has number ``first``, up to the one that failed.

    Nothing is raised: a failure has to wait for its turn.
    """
    failed = values[-1] if isinstance(values[-1], _Failed) else None
    good = values if failed is None else values[:-1]
    sources = [f"input[{number}]" for number in range(first, first + len(good))]
    with suppress(BaseException):  # then one after the other, to know which
        together = service.preparation.together(good, sources)
        if together is not None:
            return together, failed
    items: list[Item] = []
    try:
        for value, source in zip(good, sources, strict=True):
            items.append(service.preparation.item(value, source))
    except BaseException as error:  # raised in its turn
        return items, _Failed(error)
    return items, failed
