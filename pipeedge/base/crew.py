"""A group of threads that end together: the first failure in any of them is raised in the waiting thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Closed", "Crew", "Threads"]


class Closed(Exception):  # noqa: N818 - a signal between threads, not an error
    """Raised in a thread whose channel was closed; the thread that closed it knows the reason."""


class Threads:
    """Threads that are left behind when a run fails, for a process that goes on or ends after it.

    They are daemons: one blocked inside gloo cannot be woken, and must not keep a failed process from
    exiting.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread.

        Raises:
            RuntimeError: No thread can be started, as while Python 3.12 ends.
        """
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        with self._lock:
            self._started = [*(one for one in self._started if one.is_alive()), thread]

    def join(self, timeout_s: float) -> bool:
        """Wait until all but the calling thread have ended; return whether that was within the time."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            others = [one for one in self._started if one is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in others)


class Crew:
    """A group of threads that end together.

    Args:
        threads: Starts the threads, and can be asked later whether they have ended.
    """

    def __init__(self, threads: Threads | None = None) -> None:
        self._threads = threads or Threads()
        self._changed = threading.Condition()
        self._running = 0
        self._error: BaseException | None = None
        self._stopped = False
        self._cleanups: list[Callable[[], None]] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread.

        Raises:
            RuntimeError: No thread can be started.
        """
        with self._changed:
            self._running += 1
        try:
            self._threads.start(name, lambda: self._run(work))
        except BaseException:
            self._leave()
            raise

    def on_stop(self, cleanup: Callable[[], None]) -> None:
        """Call ``cleanup`` when the crew is stopped, at once if it was; it must wake threads that wait."""
        with self._changed:
            if not self._stopped:
                self._cleanups.append(cleanup)
                return
        cleanup()

    def stop(self, error: BaseException | None = None) -> None:
        """Stop all threads early, because of ``error`` unless an earlier error was recorded."""
        with self._changed:
            if self._error is None:
                self._error = error
            if self._stopped:
                return
            self._stopped = True
            cleanups = list(self._cleanups)
            self._changed.notify_all()
        for cleanup in cleanups:
            cleanup()

    @property
    def stopped(self) -> bool:
        """Whether the crew was stopped, or a thread of it has failed."""
        with self._changed:
            return self._stopped

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every thread has ended, one has failed, or the crew was stopped.

        Returns:
            Whether that happened within ``timeout_s``.

        Raises:
            BaseException: The first failure of any thread.
        """
        with self._changed:
            ended = self._changed.wait_for(lambda: self._running == 0 or self._stopped, timeout_s)
            if self._error is not None:
                raise self._error
            return ended

    def join(self, timeout_s: float) -> bool:
        """Wait until every thread has ended, whatever has failed; return whether that was within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, timeout_s)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Closed:
            pass  # the thread that closed the channel knows why
        except BaseException as error:  # kept whole, to be raised in the thread that waits
            self.stop(error)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()
