"""Answers that are awaited: those to items that were asked together come as their microbatches do.

One object stands for all of them, as a future for each item would cost more than a small model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeedge.base.errors import PeerError, PipeEdgeError
from pipeedge.serve.answers import ModelAnswer

__all__ = ["AnswerFuture", "EndedError", "Found", "PendingAnswers"]

Found: TypeAlias = npt.NDArray[np.float32] | PipeEdgeError
"""Outputs of an item, or why there are none."""


class EndedError(PeerError):
    """The pipeline has ended, or is about to end, and takes no further items."""


class AnswerFuture(Future[ModelAnswer]):
    """An answer to come, which tells when somebody looks at the error that there is instead.

    Args:
        report: Called with the error of the answer when it is raised or returned.
    """

    def __init__(self, report: Callable[[PipeEdgeError], None]) -> None:
        super().__init__()
        self._report = report

    def result(self, timeout: float | None = None) -> ModelAnswer:
        """Wait for the answer and return it, or raise its error."""
        try:
            return super().result(timeout)
        except PipeEdgeError as error:
            self._report(error)
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the answer and return its error, or None if it has none."""
        error = super().exception(timeout)
        if isinstance(error, PipeEdgeError):
            self._report(error)
        return error


class PendingAnswers:
    """Answers to items that were asked together, in their order. Any thread may wait for them.

    Args:
        count: Number of items.
        class_names: Names of the classes, or None if the model does not define them.
        withdraw: Called when nobody waits any more for answers that are still to come.
        output_kind: What the outputs are, see ``ModelAnswer``.
        deadline_s: Time in seconds after which they need not be computed any more, or None.
    """

    def __init__(
        self,
        count: int,
        class_names: Sequence[str] | None = None,
        withdraw: Callable[[PendingAnswers], None] = lambda _: None,
        output_kind: str = "logits",
        deadline_s: float | None = None,
    ) -> None:
        self.deadline_s = deadline_s
        """Time after which they need not be computed any more, or None."""
        # These belong to the queue and its lock.
        self.unclaimed = count
        """Number of items that are neither answered nor given up."""
        self.unfed = count
        """Number of items that are neither under way nor given up; some may still have to be prepared."""
        self.reserved = 0
        """Number of items that there is room for in the queue, and that are still to be put there."""
        self.queued = 0
        """Number of items that wait in the queue, or have room there."""
        self._class_names = class_names
        self._withdraw = withdraw
        self._output_kind = output_kind
        self._changed = threading.Condition(threading.Lock())
        self._found: list[Found | None] = [None] * count
        self._missing = count
        self._call: Callable[[], object] | None = None

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._found)

    def __getitem__(self, place: int) -> ModelAnswer:
        """Wait for the answer to an item, and return it.

        Raises:
            PipeEdgeError: The item has none.
        """
        found = self._found[place]
        if found is None:
            found = self._wait(place)
        if isinstance(found, PipeEdgeError):
            raise found
        return ModelAnswer(found, self._class_names, self._output_kind)

    def __iter__(self) -> Iterator[ModelAnswer]:
        """Wait for one answer after the other.

        Raises:
            PipeEdgeError: An item has none.
        """
        for place, found in enumerate(self._found):  # each is looked at in its turn, when it may be there
            if found is None:
                found = self._wait(place)
            if isinstance(found, PipeEdgeError):
                raise found
            yield ModelAnswer(found, self._class_names, self._output_kind)

    def _wait(self, place: int) -> Found:
        with self._changed:
            found = self._found[place]
            while found is None:
                self._changed.wait()
                found = self._found[place]
        return found

    @property
    def complete(self) -> bool:
        """Whether all answers are there."""
        return not self._missing

    def put(self, found: Iterable[tuple[int, Found]]) -> None:
        """Take some answers, each with its place; those that are there already stay as they are."""
        with self._changed:
            for place, each in found:
                if self._found[place] is None:
                    self._found[place] = each
                    self._missing -= 1
            self._changed.notify_all()
            call = None
            if self.complete:
                call, self._call = self._call, None
        if call is not None:
            call()

    def when_complete(self, call: Callable[[], object]) -> None:
        """Have ``call`` called once all answers are there, by the thread that brings the last one."""
        with self._changed:
            if not self.complete:
                self._call = call
                return
        call()

    def cancel(self, cause: PipeEdgeError | None = None) -> None:
        """Give up the answers that are still to come.

        Args:
            cause: Why there are none, or None if nobody wants them.
        """
        if self.complete:
            return
        self._withdraw(self)
        error = cause or EndedError("the question was given up")
        self.put((place, error) for place in range(len(self)))

    def future(self, report: Callable[[PipeEdgeError], None] = lambda error: None) -> AnswerFuture:
        """Return the only answer as a future; to cancel that gives the question up.

        Args:
            report: Called with the error of the answer when somebody looks at it.
        """
        future = AnswerFuture(report)

        def finish() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(self[0])
            except PipeEdgeError as error:
                future.set_exception(error)

        future.add_done_callback(lambda done: self.cancel() if done.cancelled() else None)
        self.when_complete(finish)
        return future
