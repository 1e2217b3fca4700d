"""Threads that end together: the first failure of any of them is raised where they are waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Closed", "Crew"]


class Closed(Exception):  # noqa: N818 - a signal between threads, not an error
    """What a thread waits for has been closed; whoever closed it knows why."""


class Crew:
    """Threads that end together."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._error: BaseException | None = None
        self._stopped = False
        self._cleanups: list[Callable[[], None]] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread."""
        with self._changed:
            self._running += 1
        # Daemons: one that is blocked inside gloo cannot be woken, and must not keep a process that
        # has failed from ending.
        threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()

    def on_stop(self, cleanup: Callable[[], None]) -> None:
        """Call ``cleanup`` when the crew is stopped, so that nobody goes on waiting."""
        with self._changed:
            self._cleanups.append(cleanup)

    def stop(self, error: BaseException | None = None) -> None:
        """End early; ``error`` is why, unless there was one before it."""
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

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every thread has ended, or one has failed, or the crew was stopped.

        Returns:
            Whether that was so within ``timeout_s``.

        Raises:
            BaseException: the first failure.
        """
        with self._changed:
            ended = self._changed.wait_for(lambda: self._running == 0 or self._stopped, timeout_s)
            if self._error is not None:
                raise self._error
            return ended

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Closed:
            pass  # whoever closed the channel knows why
        except BaseException as error:  # handed on whole, to be raised where the crew is waited for
            self.stop(error)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()
