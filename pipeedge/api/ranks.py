"""Ranks of a pipeline as processes of this machine, beside the one that asks them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType

from pipeedge.base.errors import RequestError
from pipeedge.launch.commands import RankCommand

__all__ = ["LocalRanks"]

_ENDING_S = 10.0
"""Seconds that ranks have to end by themselves, as they do when rank 0 ends."""
_GRACE_S = 5.0
"""Seconds that they have after SIGTERM."""


class LocalRanks:
    """Processes that run as long as the body of a ``with`` statement.

    Args:
        commands: Commands of the ranks.
        environment: Environment of this process; variables that a command sets are added if it lacks them.
    """

    def __init__(self, commands: Sequence[RankCommand], environment: Mapping[str, str]) -> None:
        self._commands = commands
        self._environment = environment
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> LocalRanks:
        for command in self._commands:
            try:
                process = subprocess.Popen(
                    command.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**command.environment, **self._environment},
                    start_new_session=True,  # Ctrl-C is for rank 0, which ends the others
                )
            except OSError as error:
                self.end(0.0)
                raise RequestError(f"cannot start {command.argv[0]}: {error.strerror}") from error
            self._processes.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(0.0 if isinstance(error, KeyboardInterrupt) else _ENDING_S)

    def end(self, patience_s: float) -> None:
        """Wait until all have ended; stop those that have not within ``patience_s`` seconds."""
        for limit_s, stop in (
            (patience_s, subprocess.Popen.terminate),
            (_GRACE_S, subprocess.Popen.kill),
        ):
            deadline = time.monotonic() + limit_s
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
            for process in self._processes:
                if process.poll() is None:
                    stop(process)
        for process in self._processes:
            process.wait()
