"""Answers to many things, in their order: read, prepared and asked in threads, not far ahead.

values ──[read]──> [group] ──> prepare, in several threads ──[ask]──> queue ──> answers

Things travel in groups of what is there, as handing each on to the next thread alone would cost more than
to compute a small model. Nothing waits for company: a thing may depend on the answer to the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeedge.base.crew import Closed
from pipeedge.base.errors import InputError
from pipeedge.data import read_threads
from pipeedge.data.items import Item
from pipeedge.data.text import Sentence
from pipeedge.serve.answers import ModelAnswer
from pipeedge.serve.pending import PendingAnswers
from pipeedge.serve.service import Service
from pipeedge.transport.channel import Channel

__all__ = ["answers_in_order"]

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class _Failed:
    """The end of a sequence that was cut off."""

    error: BaseException


@dataclass(frozen=True)
class _Prepared:
    """The items of a group, up to the one that failed."""

    items: list[Item]
    failed: _Failed | None = None


class _Line(Generic[_Value]):
    """Values on their way from one thread to another, in order, with a failure at the end if there is one."""

    def __init__(self, capacity: int) -> None:
        self._channel: Channel[_Value | _Failed] = Channel(capacity)
        self.close = self._channel.close

    def fill(self, values: Iterable[_Value]) -> None:
        """Put ``values`` on the line, in a thread of its own."""
        threading.Thread(target=self._fill, args=(values,), daemon=True).start()

    def _fill(self, values: Iterable[_Value]) -> None:
        try:
            for value in values:
                self._channel.put(value)
        except Closed:
            return
        except BaseException as error:  # raised where the answers are taken
            with suppress(Closed):
                self._channel.put(_Failed(error))
        self._channel.finish()

    def groups(self, most: int) -> Iterator[list[_Value]]:
        """Yield groups of up to ``most`` values that are there; raises what has ended them."""
        while found := self._channel.get_waiting(most):
            if values := [value for value in found if not isinstance(value, _Failed)]:
                yield values
            if isinstance(found[-1], _Failed):
                raise found[-1].error


def answers_in_order(
    service: Service, workers: Executor, values: Iterable[object], *, group: int, ahead: int
) -> Iterator[ModelAnswer]:
    """Yield the answers to ``values``.

    Args:
        service: What answers.
        workers: Threads that prepare.
        values: Things to ask about; may be endless, and may wait for their own answers.
        group: Largest number of things that are handed on together.
        ahead: Number of things that may be asked before the first of their answers is taken.

    Raises:
        InputError: Something cannot be read, or does not fit the model; in its turn.
        PipeEdgeError: The pipeline has failed.
    """
    read: _Line[tuple[int, object]] = _Line(2 * group)
    prepared: _Line[Future[_Prepared]] = _Line(read_threads() + 1)
    asked: _Line[PendingAnswers] = _Line(max(1, ahead // group))

    def ask() -> Iterator[PendingAnswers]:
        for futures in prepared.groups(1):
            ready = futures[0].result()
            if ready.items:
                yield service.queue.submit(ready.items, block=True)
            if ready.failed is not None:
                raise ready.failed.error

    read.fill(enumerate(values))
    prepared.fill(workers.submit(_prepared, service, some) for some in read.groups(group))
    asked.fill(ask())
    try:
        for several in asked.groups(1):
            yield from several[0]
    finally:
        for line in (read, prepared, asked):
            line.close()


def _prepared(service: Service, numbered: list[tuple[int, object]]) -> _Prepared:
    """Return the items of a group."""
    items: list[Item] = []
    sentences = [Sentence(each, f"input[{number}]") for number, each in numbered if isinstance(each, str)]
    if len(sentences) == len(numbered) and service.model.takes_text:
        with suppress(InputError):  # then one after the other, to know which
            return _Prepared(service.preparation.sentences(sentences))
    try:
        for number, value in numbered:
            items.append(service.preparation.item(value, f"input[{number}]"))
    except BaseException as error:  # raised in its turn
        return _Prepared(items, _Failed(error))
    return _Prepared(items)
