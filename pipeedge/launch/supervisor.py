"""Run the processes of all ranks, forward their output line by line, and stop all when the run has failed.

    running ──a rank fails──> settling ──settle_s──> ending ──grace_s──> killed
       │                      (the others learn of it   (SIGTERM; ssh:     (SIGKILL)
       │                       and report it)            end of input)
       └──Ctrl-C──────────────────────────────────────> ending, without further output

A run that goes on after failures needs all ranks until rank 0 says that it begins, and only a few from then
on. A rank that fails just before, when nobody else may know of it, is settled like any other, but the word of
rank 0 that the run begins nevertheless takes it back. A rank that is lost later can be started again.

Each stream has a thread that forwards its lines, and each process one that waits for it. They report to
the calling thread through one queue, which it reads with the deadline of the state. Nothing polls.
"""

from __future__ import annotations

import enum
import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Protocol, TypeAlias

from pipeedge.base.errors import EXIT_PEER, PipeEdgeError, RequestError
from pipeedge.base.interrupt import INTERRUPTED
from pipeedge.base.streams import print_data
from pipeedge.launch.commands import RankCommand

__all__ = [
    "ExitLimits",
    "Lines",
    "Output",
    "RankExit",
    "RankProcess",
    "Supervisor",
    "run_process",
    "status_of",
]

_SSH_FAILED = 255
_SIGNALLED = 128
_LIVED_S = 10.0
"""Seconds after which the loss of a rank that was started again is said again."""
_DRAIN_S = 2.0
"""Seconds to wait for the last lines of a process that has exited."""


@dataclass(frozen=True)
class RankExit:
    """How a rank ended."""

    rank: int
    code: int
    """Return code as ``subprocess`` gives it: negative for a signal."""
    remote: bool = False
    """Whether the process is an ssh client."""

    @property
    def status(self) -> int:
        """Exit status as a shell gives it; a failed ssh counts as a peer that cannot be reached."""
        if self.remote and self.code == _SSH_FAILED:
            return EXIT_PEER
        return _SIGNALLED - self.code if self.code < 0 else self.code

    def words(self) -> str:
        """Describe the ending in a sentence."""
        if self.remote and self.code == _SSH_FAILED:
            return (
                f"rank {self.rank} is lost: ssh could not connect or lost its connection "
                "(see its output above)"
            )
        if self.code < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.code).name}"
        return f"rank {self.rank} exited with status {self.code}"


def status_of(endings: Sequence[RankExit]) -> RankExit | None:
    """Return the ending that decides the exit status: the first failure that another rank did not cause.

    A rank that fails tells the others, which then exit with ``EXIT_PEER`` in any order. A rank that was
    interrupted comes before those that failed because of it.

    Args:
        endings: Endings in the order in which they were seen, up to the moment when the rest were stopped.
    """
    failed = [ending for ending in endings if ending.status != 0]
    own = [ending for ending in failed if ending.status not in (EXIT_PEER, INTERRUPTED)]
    interrupted = [ending for ending in failed if ending.status == INTERRUPTED]
    return next(iter(own or interrupted or failed), None)


class Lines(Protocol):
    """A destination for output."""

    def __call__(self, text: str, *, error: bool) -> None:
        """Write one line, with its newline. Raises OSError if the reader has gone."""


class RankProcess(Protocol):
    """A rank that runs somewhere, and reports its lines and its ending."""

    def ask_to_end(self, number: int) -> None:
        """Let it end, as signal ``number`` does."""

    def kill(self) -> None:
        """End it at once."""


Forward: TypeAlias = Callable[[int, str, bool], None]
"""Takes a rank, a line of its output with the newline, and whether it comes from standard error."""
StartProcess: TypeAlias = Callable[
    [RankCommand, Mapping[str, str], Forward, Callable[[RankExit], None]], RankProcess
]
"""Starts the process of a rank: its command, environment, and what takes its lines and its ending."""


class _Process:
    """One rank's process on this machine and its threads."""

    def __init__(
        self,
        command: RankCommand,
        environment: Mapping[str, str],
        forward: Forward,
        ended: Callable[[RankExit], None],
    ) -> None:
        self.command = command
        try:
            self._popen = subprocess.Popen(
                command.argv,
                stdin=subprocess.PIPE if command.remote or command.secret else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environment),
                start_new_session=True,  # so that Ctrl-C in the terminal reaches the ranks only through us
            )
        except OSError as error:
            raise RequestError(f"cannot start {command.argv[0]}: {error.strerror}") from error
        if self._popen.stdin is not None and command.secret:
            with suppress(OSError):  # it has ended, and its output says why
                self._popen.stdin.write(command.secret.encode())
                self._popen.stdin.flush()
                if not command.remote:
                    self._popen.stdin.close()
        self._forward = forward
        self._ended = ended
        streams = [(self._popen.stdout, False), (self._popen.stderr, True)]
        self._readers = [
            threading.Thread(target=self._read, args=(stream, is_error), daemon=True)
            for stream, is_error in streams
            if stream is not None
        ]
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._wait, daemon=True).start()

    def ask_to_end(self, number: int) -> None:
        """Send signal ``number``, or close the input of ssh, on which the remote script stops its rank."""
        if self.command.remote and self._popen.stdin is not None:
            with suppress(OSError):
                self._popen.stdin.close()
        else:
            self._signal(number)

    def kill(self) -> None:
        """Kill the process at once."""
        if self._popen.stdin is not None:
            with suppress(OSError):
                self._popen.stdin.close()
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._popen.returncode is None:  # the process group exists until its leader has been waited for
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, number)

    def _read(self, stream: IO[bytes], is_error: bool) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace")
                self._forward(self.command.rank, text if text.endswith("\n") else f"{text}\n", is_error)

    def _wait(self) -> None:
        code = self._popen.wait()
        for reader in self._readers:
            reader.join(_DRAIN_S)
        if self._popen.stdin is not None:
            with suppress(OSError):
                self._popen.stdin.close()
        self._ended(RankExit(self.command.rank, code, self.command.remote))


def run_process(
    command: RankCommand,
    environment: Mapping[str, str],
    forward: Forward,
    ended: Callable[[RankExit], None],
) -> RankProcess:
    """Start the process of a rank on this machine, which may be that of ssh.

    Raises:
        RequestError: The program cannot be started.
    """
    return _Process(command, environment, forward, ended)


@dataclass(frozen=True)
class Output:
    """Destination of what the ranks and the launcher print."""

    lines: Lines
    """Takes the lines of the ranks."""
    say: Callable[[str], None]
    """Called with each line of the launcher's own."""
    mark: Callable[[int], str] = "[{}] ".format
    """Returns the prefix of a rank's lines."""
    program: str | None = None
    """Name of the program whose messages, which begin with it, are shown once if several ranks print the same
    one."""
    result_rank: int | None = None
    """Rank whose standard output is the results, which are printed without a prefix; None if no rank's is."""


@dataclass(frozen=True)
class ExitLimits:
    """Time that ranks have to exit once one has failed."""

    settle_s: float = 3.0
    """Seconds to exit by themselves."""
    grace_s: float = 5.0
    """Seconds to exit after they were signalled."""


class _Event(enum.Enum):
    """An event that is not the end of a rank."""

    BEGUN = enum.auto()
    """Rank 0 has said that the run begins."""
    UNREAD = enum.auto()
    """The reader of our output has gone."""
    STOP = enum.auto()
    """Another thread wants all ranks to end."""


class Supervisor:
    """Runs all ranks until they have exited, or one without which the run fails has failed.

    Args:
        commands: Commands of all ranks.
        environment: Environment of the launcher; variables that a command sets are added if it lacks them.
        output: Destination of the output.
        limits: Time that the others have to exit after one has failed.
        needed: Ranks without which the run fails once it has begun, and with which it is over; None for all.
        begins: End of the line on standard error with which rank 0 says that the run begins, which is not
            forwarded. Without it, the run has begun with its ranks.
        start: Starts the process of a rank.
        again_s: Seconds after which a rank that is not needed is started again once it has ended; None for
            never.
    """

    def __init__(
        self,
        commands: Sequence[RankCommand],
        environment: Mapping[str, str],
        output: Output,
        limits: ExitLimits = ExitLimits(),
        needed: frozenset[int] | None = None,
        begins: str | None = None,
        start: StartProcess = run_process,
        again_s: float | None = None,
    ) -> None:
        self._commands = commands
        self._start_process = start
        self._again_s = again_s
        self._due: dict[int, float] = {}  # when to start a rank again
        self._said: set[int] = set()  # ranks whose loss was said, and which have not lived long since
        self._started_at: dict[int, float] = {}
        self._all = frozenset(command.rank for command in commands)
        self._needed = self._all if needed is None else needed
        self._begins = begins
        self._begun = begins is None
        self._environment = environment
        self._output = output
        self._message = None if output.program is None else f"{output.program}: "
        self._reported_by: dict[str, int] = {}
        self._limits = limits
        self._events: queue.Queue[RankExit | _Event] = queue.Queue()
        self._write = threading.Lock()
        self._quiet = False
        self._unprinted: PipeEdgeError | None = None
        self._alive: dict[int, RankProcess] = {}

    def run(self) -> int:
        """Start all ranks, wait for them, and return the exit status; Ctrl-C stops them quietly.

        Raises:
            RequestError: A command does not start.
            PipeEdgeError: Results cannot be printed.
        """
        try:
            try:
                for command in self._commands:
                    self._start(command)
                return self._watch()
            except KeyboardInterrupt:
                self._quiet = True
                self._end(signal.SIGINT)
                if self._unprinted is not None:
                    raise self._unprinted from None
                return INTERRUPTED
        finally:
            # No rank outlives this function, even after a second Ctrl-C or a command that did not start.
            for process in self._alive.values():
                process.kill()

    def stop(self) -> None:
        """Let ``run`` end all ranks as Ctrl-C does; for another thread."""
        self._events.put(_Event.STOP)

    def _start(self, command: RankCommand) -> None:
        environment = {**command.environment, **self._environment}
        self._started_at[command.rank] = time.monotonic()
        self._alive[command.rank] = self._start_process(command, environment, self._forward, self._events.put)

    def _start_due(self) -> None:
        """Start the ranks again whose time has come."""
        now = time.monotonic()
        for command in self._commands:
            if self._due.get(command.rank, math.inf) <= now:
                del self._due[command.rank]
                self._start(command)

    def _lose(self, ending: RankExit) -> None:
        """Report the end of a rank that is not needed, once until it has lived for a while again."""
        lived_s = time.monotonic() - self._started_at[ending.rank]
        if ending.status and (lived_s >= _LIVED_S or ending.rank not in self._said):
            self._said.add(ending.rank)
            self._output.say(ending.words())
        if self._again_s is not None:
            self._due[ending.rank] = time.monotonic() + self._again_s

    def _watch(self) -> int:
        endings: list[RankExit] = []
        deadline = None
        while self._alive:
            event = self._next(min((deadline, *self._due.values()), key=_when) if self._due else deadline)
            if event is None and (deadline is None or time.monotonic() < deadline):
                self._start_due()
                continue
            if event is None:
                self._end(signal.SIGTERM)
                break
            if isinstance(event, RankExit):
                endings.append(event)
                came: Sequence[RankExit] = (event,)
            else:
                self._begun, came = True, tuple(endings)
            needed = self._needed if self._begun else self._all
            for ending in came:
                if ending.rank not in needed:
                    endings.remove(ending)
                    self._lose(ending)
            is_over = needed.isdisjoint(self._alive) or any(ending.status for ending in endings)
            if not is_over:
                deadline = None
            elif deadline is None:
                self._due.clear()
                deadline = time.monotonic() + self._limits.settle_s
        decisive = status_of(endings)
        if decisive is None:
            return 0
        self._output.say(decisive.words())
        return decisive.status

    def _end(self, number: int) -> None:
        """Signal the remaining ranks to exit, and kill those that do not."""
        for process in self._alive.values():
            process.ask_to_end(number)
        deadline = time.monotonic() + self._limits.grace_s
        while self._alive and self._next(deadline) is not None:
            pass
        for process in self._alive.values():
            process.kill()
        deadline = time.monotonic() + self._limits.grace_s
        while self._alive and self._next(deadline) is not None:
            pass

    def _next(self, deadline: float | None) -> RankExit | _Event | None:
        """Return the ending of the next rank that exits, or another event; None at ``deadline``."""
        try:
            event = self._events.get(
                timeout=None if deadline is None else max(0.0, deadline - time.monotonic())
            )
        except queue.Empty:
            return None
        if event in (_Event.UNREAD, _Event.STOP):
            raise KeyboardInterrupt
        if isinstance(event, RankExit):
            del self._alive[event.rank]
        return event

    def _forward(self, rank: int, text: str, is_error: bool) -> None:
        if rank == 0 and is_error and self._begins is not None and text.rstrip().endswith(self._begins):
            self._events.put(_Event.BEGUN)
            return
        with self._write:
            if self._quiet or (is_error and self._was_reported(rank, text)):
                return
            try:
                if rank == self._output.result_rank and not is_error:
                    print_data(text.encode())
                else:
                    self._output.lines(f"{self._output.mark(rank)}{text}", error=is_error)
            except (OSError, KeyboardInterrupt, PipeEdgeError) as error:
                # The reader of our output has gone, so stop as on Ctrl-C; or results have no room.
                self._quiet = True
                self._unprinted = error if isinstance(error, PipeEdgeError) else None
                self._events.put(_Event.UNREAD)

    def _was_reported(self, rank: int, text: str) -> bool:
        """Return whether another rank printed this message: a mistake in the options appears on all ranks."""
        if self._message is None or not text.startswith(self._message):
            return False
        return self._reported_by.setdefault(text, rank) != rank


def _when(moment: float | None) -> float:
    """Return a moment, or infinity where there is none."""
    return math.inf if moment is None else moment
