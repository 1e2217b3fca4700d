"""Threads and conditions of a simulated world, in virtual time.

Each thread is a greenlet, in which the product's loops run as they are until they wait. Then the world
decides what happens next, so only one runs at a time, and the same seed gives the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent, greenlet

if TYPE_CHECKING:
    from failover_rank_shell import RankShell
    from failover_world import World


class Killed(BaseException):
    """Raised where a thread of a killed process waits."""


class SimThread:
    """A thread of a process."""

    def __init__(self, process: RankShell, work: Callable[[], None]) -> None:
        self.process = process
        self.waits = 0
        """Number of times that it has begun to wait."""
        self.killed = False
        self._world = getcurrent()
        self._work = work
        self._runs = greenlet(self._main)

    @property
    def done(self) -> bool:
        return self._runs.dead

    def _main(self) -> None:
        try:
            if not self.killed:
                self._work()
        except Killed:
            pass

    def resume(self) -> None:
        """Let it run until it waits or ends. Called by the world."""
        self._runs.parent = self._world = getcurrent()
        self._runs.switch()

    def wait(self) -> None:
        """Let the world go on until this thread is resumed. Called by this thread."""
        if not self.killed:
            self._world.switch()
        if self.killed:
            raise Killed


class Threads:
    """The threads of a world."""

    def __init__(self, world: World) -> None:
        self.current: SimThread | None = None
        self._world = world
        self._all: list[SimThread] = []

    def start(self, process: RankShell, work: Callable[[], None]) -> None:
        thread = SimThread(process, work)
        self._all.append(thread)
        self._world.at(self._world.now, self._resume, thread, thread.waits)

    def wake(self, thread: SimThread, waits: int) -> None:
        self._world.at(self._world.now, self._resume, thread, waits)

    def _resume(self, thread: SimThread, waits: int) -> None:
        if thread.done or thread.waits != waits:
            return  # it waits for something else by now
        if thread.process.paused:
            thread.process.miss(self._resume, thread, waits)
        else:
            self._run(thread)

    def _run(self, thread: SimThread) -> None:
        self.current = thread
        try:
            thread.resume()
        finally:
            self.current = None

    def wake_at(self, time: float, thread: SimThread) -> None:
        self._world.at(time, self._resume, thread, thread.waits)

    def kill(self, process: RankShell | None = None) -> None:
        """End the threads of a process, or all."""
        mine = [one for one in self._all if process is None or one.process is process]
        self._all = [one for one in self._all if process is not None and one.process is not process]
        for thread in mine:
            if not thread.done:
                thread.killed = True
                self._run(thread)


class SimCondition:
    """A condition in virtual time, with the interface of ``threading.Condition``.

    No lock is needed, as only one thread runs at a time.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: list[tuple[SimThread, int]] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> None:
        thread = self._world.threads.current
        assert thread is not None, "the world itself cannot wait"
        thread.waits += 1
        self._waiting.append((thread, thread.waits))
        if timeout is not None:
            self._world.threads.wake_at(self._world.now + timeout, thread)
        thread.wait()

    def wait_for(self, happened: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else self._world.now + timeout
        while not (found := happened()):
            if until is not None and self._world.now >= until:
                break
            self.wait(None if until is None else until - self._world.now)
        return found

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for thread, waits in waiting:
            self._world.threads.wake(thread, waits)
