"""Test the queue of requests as source and sink, with a pipeline of one's own in between."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch
from clock import Clock
from hypothesis import given
from hypothesis import strategies as st
from waiting import LIMIT_S, until

from pipeedge.base.backpressure import window
from pipeedge.base.crew import Closed, Crew
from pipeedge.base.errors import InputError, PeerFailedError, PipeEdgeError, RequestError
from pipeedge.base.payload import TensorSpec
from pipeedge.data.items import Item
from pipeedge.data.source import Group
from pipeedge.run.ledger import Ledger
from pipeedge.serve.batching import BatchLimits
from pipeedge.serve.pending import EndedError, PendingAnswers
from pipeedge.serve.requests import ExpiredError, QueueFullError, RequestQueue


def item(value: float, tokens: int = 1) -> Item:
    return Item((torch.full((tokens,), value),), None, f"item {value:g}")


def make_queue(clock: Clock | None = None, output_kind: str = "logits", **changed: int) -> RequestQueue:
    limits = BatchLimits(**{"max_items": 3, "max_tokens": 1000, "max_waiting": 10, **changed})
    names = ("a", "b")
    return RequestQueue(limits, class_names=names, output_kind=output_kind, clock=clock or Clock(5.0))


def answer(
    queue: RequestQueue, group: Group, *, number: int = 0, outputs: torch.Tensor | None = None
) -> None:
    """ModelAnswer each item of ``group`` with its own value."""
    batch = group.collate(tuple(spec.empty() for spec in group.specs))
    values = batch.payload[0][:, :1].float() if outputs is None else outputs
    queue.write(number, values, batch)


def take(queue: RequestQueue) -> Group:
    group = queue.stream().next(3)
    assert group is not None
    return group


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_every_item_gets_its_own_answer(sizes: list[int]) -> None:
    queue, pending = make_queue(max_waiting=100), []
    for request, size in enumerate(sizes):
        pending.append(queue.submit([item(10 * request + place) for place in range(size)]))
    queue.drain()
    stream = queue.stream()
    groups = list(iter(lambda: stream.next(3), None))
    for group in groups:
        answer(queue, group)
    assert all(each.complete for each in pending)
    found = [[answer.outputs.tolist() for answer in each] for each in pending]
    assert found == [[[10 * request + place] for place in range(size)] for request, size in enumerate(sizes)]
    state = queue.state()
    assert (state.waiting, state.under_way, state.answered) == (0, 0, sum(sizes))
    assert state.microbatches == len(groups) == math.ceil(sum(sizes) / 3)


def numbers(group: Group | None) -> list[int]:
    assert group is not None
    return [number for number, _ in group.numbered]


class Feeding:
    """The feeder of a pipeline without stages: it takes numbers and groups from the ledger as that wants."""

    def __init__(self, queue: RequestQueue, ledger: Ledger) -> None:
        self.queue = queue
        self.ledger = ledger
        self.fed: list[Group] = []
        self.crew = Crew()
        self.stream = queue.stream()
        self.stream.start(self.crew)
        self.crew.on_stop(ledger.close)
        self.crew.start("feed", self._feed)

    def _feed(self) -> None:
        while (number := self.ledger.wait_for_room()) is not None:
            group = self.ledger.next_group(lambda: self.stream.next(3))
            if group is None:
                return
            self.ledger.feed(number, group.collate(tuple(map(TensorSpec.empty, group.specs))), 0.0)
            self.fed.append(group)

    def answer(self) -> None:
        """Answer the oldest microbatch under way, as a collector does."""
        number = self.ledger.written
        taken = self.ledger.take(number, self.ledger._epoch)
        assert taken is not None
        batch, _ = taken
        self.queue.write(number, batch.payload[0][:, :1].float(), batch)
        self.ledger.wrote(number)

    def stop(self) -> None:
        self.crew.stop()
        assert self.crew.join(LIMIT_S)


def values(groups: list[Group]) -> list[list[float]]:
    return [[float(one.tensors[0][0]) for _, one in group.numbered] for group in groups]


def test_requests_under_way_are_fed_again_and_answered_once() -> None:
    """A pipeline fails twice, once before it was fed all again; two items are given up meanwhile."""
    queue, ledger = make_queue(), Ledger()
    pending = queue.submit([item(value) for value in range(8)])
    ledger.restart(1, 9)
    feeding = Feeding(queue, ledger)
    until(lambda: len(feeding.fed) == 3, "all microbatches")
    feeding.answer()
    feeding.stop()
    given_up = queue.submit([item(8)])
    ledger.restart(2, 1)
    feeding = Feeding(queue, ledger)
    until(lambda: len(feeding.fed) == 1, "the one that there is room for")
    assert (queue.state().answered, queue.state().under_way, queue.state().waiting) == (3, 5, 1)
    feeding.stop()
    assert values(feeding.fed) == [[3, 4, 5]]
    given_up.cancel()
    ledger.restart(3, 9)
    feeding = Feeding(queue, ledger)
    late = queue.submit([item(9)])
    until(lambda: len(feeding.fed) == 3, "what is fed again, and what came later")
    assert values(feeding.fed) == [[3, 4, 5], [6, 7], [9]]
    for _ in range(3):
        feeding.answer()
    feeding.stop()
    assert [answer.outputs[0] for answer in (*pending, *late)] == [*range(8), 9]
    state = queue.state()
    assert (state.answered, state.failed, state.under_way, state.microbatches) == (9, 1, 0, 4)


def test_request_that_was_taken_but_not_fed_is_not_lost() -> None:
    """The link to the first stage has no room for it when the pipeline fails."""
    queue, ledger = make_queue(), Ledger()
    pending = queue.submit([item(1)])
    ledger.restart(1, 9)
    assert ledger.next_group(lambda: queue.stream().next(3)) is not None
    ledger.restart(2, 9)
    feeding = Feeding(queue, ledger)
    until(lambda: len(feeding.fed) == 1, "what was taken")
    feeding.answer()
    feeding.stop()
    assert pending[0].outputs == [1]


def test_no_more_microbatches_leave_than_the_stages_need() -> None:
    queue, ledger = make_queue(), Ledger()
    queue.submit([item(value) for value in range(10)])
    ledger.restart(1, window(1, endless=True, goes_on=False))
    feeding = Feeding(queue, ledger)
    until(lambda: len(feeding.fed) == 3, "a full window")
    assert queue.state().waiting == 1
    feeding.answer()
    until(lambda: len(feeding.fed) == 4, "the microbatch that there is room for")
    feeding.stop()


def test_a_full_queue_refuses_or_waits() -> None:
    clock = Clock(5.0)
    queue = make_queue(clock, max_waiting=6)
    queue.submit([item(value) for value in range(6)])
    with pytest.raises(QueueFullError, match="6 items wait") as refused:
        queue.submit([item(6)])
    assert refused.value.retry_after_s == 1
    with pytest.raises(InputError, match="at most 6"):
        queue.submit([item(value) for value in range(7)])
    group = take(queue)
    clock.now += 90
    answer(queue, group)  # 30 s an item
    queue.submit([item(value) for value in range(3)])
    with pytest.raises(QueueFullError) as refused:
        queue.submit([item(6)])
    assert refused.value.retry_after_s == 60  # at most
    assert queue.state().refused == 2
    late: list[object] = []
    thread = threading.Thread(target=lambda: late.append(queue.submit([item(9)], block=True)))
    thread.start()
    take(queue)
    thread.join(LIMIT_S)
    assert len(late) == 1


def test_items_that_expire_make_room_for_those_who_wait_for_it() -> None:
    clock = Clock(5.0)
    queue = make_queue(clock, max_waiting=3)
    queue.submit([item(value) for value in range(3)], timeout_s=7)
    submitting = Crew()
    submitting.start("submit", lambda: queue.submit([item(9)], block=True))
    until(lambda: len(queue._line) == 1, "the thread that waits for room")
    clock.now += 7
    feeding, groups = Crew(), list[Group]()
    feeding.start("feed", lambda: groups.append(take(queue)))
    until(lambda: len(groups) == 1, "the item that there is room for")
    assert [one.source for _, one in groups[0].numbered] == ["item 9"]
    assert submitting.wait(LIMIT_S)
    assert feeding.wait(LIMIT_S)


def test_room_is_given_first_come_first_served() -> None:
    queue = make_queue(max_waiting=6)
    queue.submit([item(0) for _ in range(6)])
    sources = list[str]()

    def feed() -> None:
        sources.extend(one.source for _, one in take(queue).numbered)

    submitting = Crew()
    for place, size in enumerate((5, 1, 1, 4), start=1):
        some = [item(place)] * size
        submitting.start("submit", functools.partial(queue.submit, some, block=True))
        until(functools.partial(lambda length: len(queue._line) == length, place), "the thread in its place")
    feed()
    with pytest.raises(QueueFullError):  # there is room, but others came before
        queue.submit([item(9)])
    assert (len(queue._line), queue.state().waiting) == (4, 3)
    feed()
    until(lambda: len(queue._line) == 2, "the two threads that there is room for now")
    while len(sources) < 17:
        feed()
    assert submitting.wait(LIMIT_S)
    assert sources == ["item 0"] * 6 + ["item 1"] * 5 + ["item 2", "item 3"] + ["item 4"] * 4


@pytest.mark.parametrize("end", [RequestQueue.drain, RequestQueue.abandon])
def test_everybody_who_waits_for_room_hears_of_the_end(end: Callable[[RequestQueue], None]) -> None:
    queue, refused = make_queue(max_waiting=2), list[EndedError]()
    queue.submit([item(0), item(0)])

    def submit() -> None:
        with pytest.raises(EndedError) as error:
            queue.submit([item(1), item(2)], block=True)
        refused.append(error.value)

    submitting = Crew()
    for _ in range(3):
        submitting.start("submit", submit)
    until(lambda: len(queue._line) == 3, "the threads that wait for room")
    end(queue)
    assert submitting.wait(LIMIT_S)
    assert len(refused) == 3


def test_an_item_that_expires_is_answered_though_no_other_comes() -> None:
    clock = Clock(5.0)
    queue, crew = make_queue(clock), Crew()
    late = queue.submit([item(1)], timeout_s=7)
    clock.now += 7
    stream = queue.stream()
    stream.start(crew)
    crew.start("feed", lambda: stream.next(3) and None)
    until(lambda: late.complete, "the answer to the item that is too late")
    with pytest.raises(ExpiredError, match="deadline"):
        late[0]
    crew.stop()
    assert crew.wait(LIMIT_S)


def test_what_is_cancelled_or_late_is_not_computed() -> None:
    clock = Clock(5.0)
    queue = make_queue(clock)
    kept, cancelled = queue.submit([item(1)]), queue.submit([item(2)]).future()
    late = queue.submit([item(3)], timeout_s=7)
    assert cancelled.cancel()
    clock.now += 7
    group = take(queue)
    assert [one.source for _, one in group.numbered] == ["item 1"]
    with pytest.raises(ExpiredError, match="deadline"):
        late.future().result()
    answer(queue, group)
    assert kept[0].outputs.tolist() == [1]
    assert queue.state().failed == 2
    # One that is cancelled under way does not harm the others of its microbatch.
    given_up, future, wanted = (queue.submit([item(value)]) for value in (4, 5, 6))
    cancelled = future.future()
    group = take(queue)
    given_up.cancel()
    assert cancelled.cancel()
    answer(queue, group)
    with pytest.raises(CancelledError):
        cancelled.result()
    with pytest.raises(EndedError, match="given up"):
        given_up[0]
    assert wanted[0].outputs.tolist() == [6]
    assert queue.state().failed == 4


@given(st.permutations(range(6)), st.lists(st.integers(1, 3), min_size=6, max_size=6))
def test_answers_come_in_their_order_whatever_comes_first(places: list[int], sizes: list[int]) -> None:
    pending, heard, found = PendingAnswers(len(places)), list[bool](), list[float]()
    pending.when_complete(lambda: heard.append(pending.complete))
    waiting = threading.Thread(target=lambda: found.extend(float(answer.outputs[0]) for answer in pending))
    waiting.start()
    for size in sizes:
        some, places = places[:size], places[size:]
        assert pending.complete == (not some)
        pending.put([(place, np.float32([place])) for place in some])
    waiting.join(LIMIT_S)
    assert (heard, found) == ([True], list(range(6)))
    pending.put([(0, EndedError("too late"))])
    pending.cancel()
    pending.when_complete(lambda: heard.append(pending[0].outputs[0] == 0))
    assert heard == [True, True]


def test_an_item_whose_outputs_are_no_numbers_fails_alone() -> None:
    queue = make_queue()
    pending = queue.submit([item(1), item(2)])
    answer(queue, take(queue), outputs=torch.tensor([[math.nan, 1], [0, 1]]))
    with pytest.raises(PipeEdgeError, match="item 1: the model produced NaN or infinity"):
        pending[0]
    assert pending[1].best.label == "b"
    assert (queue.state().answered, queue.state().failed) == (1, 1)


def test_outputs_of_tokens_come_without_padding() -> None:
    queue = make_queue(output_kind="tokens")
    pending = queue.submit([item(1, tokens=2), item(2, tokens=4)])
    answer(queue, take(queue), outputs=torch.arange(16.0).view(2, 4, 2))
    short, long = pending
    assert short.outputs.tolist() == [[0, 1], [2, 3]]
    assert long.outputs.shape == (4, 2)
    assert [token.label for token in short.tokens] == ["b", "b"]
    with pytest.raises(RequestError, match=r"^the model classifies every token: use tokens$"):
        short.top()
    state = queue.state()
    assert (state.tokens, state.padded_tokens) == (6, 8)


def test_a_failure_is_the_answer_to_everything() -> None:
    queue = make_queue()
    pending = queue.submit([item(value) for value in range(5)])
    take(queue)
    assert queue.__enter__().started.is_set()
    queue.__exit__(PeerFailedError, PeerFailedError("rank 1 failed: it is out of memory"), None)
    assert pending.complete
    for place in range(5):
        with pytest.raises(PeerFailedError, match="rank 1 failed"):
            pending[place]
    with pytest.raises(PeerFailedError, match="rank 1 failed"):
        queue.submit([item(1)])


@pytest.mark.parametrize("abandon", [False, True])
def test_a_queue_that_ends_answers_what_is_under_way(abandon: bool) -> None:
    queue = make_queue()
    pending = queue.submit([item(value) for value in range(5)])
    with queue:
        stream = queue.stream()
        first = stream.next(3)
        assert first is not None
        if abandon:
            queue.abandon()
        else:
            queue.drain()
        with pytest.raises(EndedError, match="takes no further"):
            queue.submit([item(1)])
        second = stream.next(3)
        answer(queue, first)
        assert [pending[place].outputs[0] for place in range(3)] == [0, 1, 2]
        if abandon:
            assert second is None
            with pytest.raises(EndedError):
                pending[3]
        else:
            assert second is not None
            answer(queue, second)
            assert stream.next(3) is None
            assert pending[4].outputs.tolist() == [4]


def test_a_closed_stream_wakes_its_thread() -> None:
    queue, crew = make_queue(), Crew()
    stream = queue.stream()
    stream.start(crew)
    crew.stop()
    with pytest.raises(Closed):
        stream.next(3)


def test_results_that_nobody_asked_for_are_refused() -> None:
    queue = make_queue()
    with pytest.raises(PipeEdgeError, match="microbatch 1, which nobody asked for"):
        answer(queue, Group([(3, item(3))]), number=1)
    with pytest.raises(ValueError, match="do not fit 2"):
        queue.stream().next(2)
