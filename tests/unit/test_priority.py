"""Threads that let others go first."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.run import priority


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux only")
def test_only_the_calling_thread_and_those_it_starts_give_way() -> None:
    found = list[int]()

    def note() -> None:
        found.append(niceness())

    def work() -> None:
        priority.give_way()
        note()
        child = threading.Thread(target=note)
        child.start()
        child.join()

    before = niceness()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [min(19, before + 10)] * 2
    assert niceness() == before


def test_threads_compute_all_the_same_where_niceness_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_arguments: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", forbidden)
    priority.give_way()


def test_a_whole_process_does_not_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than on Linux, the number 0 stands for the process."""
    called = list[tuple[int, ...]]()
    monkeypatch.setattr(os, "setpriority", lambda *arguments: called.append(arguments))
    monkeypatch.setattr(sys, "platform", "darwin")
    priority.give_way()
    assert not called


@pytest.mark.parametrize(
    ("ranks", "thread"),
    [((0,), "compute"), ((1, 0), "compute"), ((0, 1), "collect"), ((1, 0, 2), None), ((1, 2), None)],
)
def test_what_came_first_goes_first(ranks: tuple[int, ...], thread: str | None) -> None:
    stages = tuple(StagePlan(LayerRange(4 * n, 4 * n + 4), rank) for n, rank in enumerate(ranks))
    assert priority.thread_that_gives_way(Schedule(stages), 0) == thread
