"""Test how many things are read, prepared by several threads, and asked in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from waiting import LIMIT_S, until

from pipeedge.api import answering
from pipeedge.base.errors import InputError
from pipeedge.data.items import Item
from pipeedge.serve.pending import EndedError, PendingAnswers


@dataclass
class Preparation:
    """Prepares even numbers only after the odd one that follows; cannot read negative ones."""

    prepared: dict[int, threading.Event] = field(default_factory=dict)

    def together(self, values: Sequence[object], sources: Sequence[str]) -> list[Item] | None:
        return None

    def item(self, value: int, source: str) -> Item:
        if value < 0:
            raise InputError(f"{source}: negative")
        if value % 2 == 0:
            assert self.prepared[value + 1].wait(LIMIT_S)
        self.prepared[value].set()
        return Item((torch.tensor([value]),), None, source)


@dataclass
class Service:
    """Answers each number with itself, at once."""

    preparation: Preparation | GroupPreparation
    asked: list[int] = field(default_factory=list)

    @property
    def queue(self) -> Service:
        return self

    def submit(self, items: Sequence[Item], *, block: bool) -> PendingAnswers:
        assert block
        answers = PendingAnswers(len(items))
        numbers = [int(item.tensors[0]) for item in items]
        self.asked += numbers
        answers.put([(place, np.float32([number])) for place, number in enumerate(numbers)])
        return answers


def ask(values: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[Service, Iterator[float]]:
    monkeypatch.setattr(answering, "read_threads", lambda: 3)
    service = Service(Preparation({number: threading.Event() for number in range(20)}))
    found = answering.answers_in_order(service, values, group=1, ahead=4)  # type: ignore[arg-type]
    return service, (float(answer.outputs[0]) for answer in found)


def test_groups_that_are_prepared_out_of_order_are_asked_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    service, found = ask(list(range(20)), monkeypatch)
    assert list(found) == service.asked == list(range(20))


def test_nothing_after_a_failure_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    service, found = ask([0, 1, 2, 3, -1, 5, 7, 9], monkeypatch)
    assert [next(found) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(InputError, match=r"input\[4\]: negative"):
        next(found)
    assert service.asked == [0, 1, 2, 3]


@dataclass
class GroupPreparation:
    """Prepares the group of the number 100 only after a negative one has failed, in another group."""

    begun: threading.Event = field(default_factory=threading.Event)
    failed: threading.Event = field(default_factory=threading.Event)

    def together(self, values: Sequence[int], sources: Sequence[str]) -> list[Item]:
        if 100 in values:
            self.begun.set()
            assert self.failed.wait(LIMIT_S)
        return [self.item(*each) for each in zip(values, sources, strict=True)]

    def item(self, value: int, source: str) -> Item:
        if value < 0:
            self.failed.set()
            raise TypeError(f"{source}: a failure that nobody has thought of")
        return Item((torch.tensor([value]),), None, source)


def test_an_unexpected_failure_comes_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "read_threads", lambda: 5)  # one for each value, if they come one by one
    preparation = GroupPreparation()
    service = Service(preparation)

    def values() -> Iterator[int]:
        yield 100
        assert preparation.begun.wait(LIMIT_S)
        yield from (1, 2, -1, 3)

    found = answering.answers_in_order(service, values(), group=4, ahead=16)  # type: ignore[arg-type]
    assert [float(next(found).outputs[0]) for _ in range(3)] == [100, 1, 2]
    with pytest.raises(TypeError, match=r"input\[3\]: a failure"):
        next(found)
    assert service.asked == [100, 1, 2]


@dataclass
class SlowService(Service):
    """Answers the first item alone."""

    pending: list[PendingAnswers] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, items: Sequence[Item], *, block: bool) -> PendingAnswers:
        answers = PendingAnswers(len(items), withdraw=self._withdraw)
        if not self.pending:
            answers.put([(0, np.float32([0]))])
        self.pending.append(answers)
        return answers

    def _withdraw(self, answers: PendingAnswers) -> None:
        assert self.lock.acquire(timeout=LIMIT_S)
        self.lock.release()


def test_what_nobody_takes_any_more_is_given_up() -> None:
    service = SlowService(GroupPreparation())
    found = answering.answers_in_order(service, range(100), group=2, ahead=4)  # type: ignore[arg-type]
    assert float(next(found).outputs[0]) == 0
    # One group has been taken, two wait to be, and the next one waits for room.
    until(lambda: len(service.pending) == 4, "all that may be asked")
    with service.lock:  # as the garbage collector may do while a thread has it
        found.close()  # type: ignore[attr-defined]
    until(lambda: all(answers.complete for answers in service.pending), "all to be given up")
    for answers in service.pending[1:]:
        with pytest.raises(EndedError, match="given up"):
            answers[0]
