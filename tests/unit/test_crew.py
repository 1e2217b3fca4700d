"""Test threads that end together, and those that somebody waits for later."""

from __future__ import annotations

import threading

import pytest
from waiting import LIMIT_S

from pipeedge.base.crew import Crew, Threads


def test_threads_of_a_stopped_crew_can_be_waited_for() -> None:
    threads, go_on = Threads(), threading.Event()
    crew = Crew(threads)
    crew.start("work", lambda: go_on.wait(LIMIT_S))
    crew.stop()
    assert not threads.join(0.0)
    go_on.set()
    assert threads.join(LIMIT_S)


def test_a_thread_does_not_wait_for_itself() -> None:
    threads, joined = Threads(), list[bool]()
    threads.start("work", lambda: joined.append(threads.join(LIMIT_S)))
    assert threads.join(LIMIT_S)
    assert joined == [True]


def test_a_crew_whose_thread_cannot_be_started_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while Python 3.12 ends."""

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    crew = Crew()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            crew.start("work", lambda: None)
    assert crew.wait(0.0)
