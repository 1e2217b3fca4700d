"""Build the command that starts each rank. Pure: a request in, commands out.

    --local N         N processes on this machine, with its cores divided among them
    --hosts a,b,c     rank 0 on a, rank 1 on b, ..., one each, over OpenSSH
    -sd devices.yml   the hosts of the file, in its order

A remote command passes through two shells, the login shell that ssh starts and the ``sh`` that runs our
script, and is quoted for both. The script ties the rank's life to the connection: ssh's standard input
stays open as long as the launcher lives, and the script stops the rank when it reaches the end of it. (A
pseudo-terminal would do that too, but mixes standard output with standard error.)

The key of the run comes first on that input, as one line with commas for its line ends, because ``read``
takes one line and not a byte more. The script passes it on to the rank's own standard input (``--key -``), so
it is in no command line, no environment and no file.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pipeedge.base.errors import RequestError

__all__ = [
    "DOCTOR_MODULE",
    "RUNTIME_MODULE",
    "Host",
    "RankCommand",
    "Remote",
    "local_commands",
    "parse_host",
    "remote_commands",
    "threads_each",
]

RUNTIME_MODULE = "pipeedge.run.main"
DOCTOR_MODULE = "pipeedge.doctor"

_LAST_PORT = 65535
_KILL_AFTER_S = 5
"""Seconds that a remote rank may take to exit after SIGTERM before it gets SIGKILL."""


@dataclass(frozen=True)
class RankCommand:
    """The command that starts one rank."""

    rank: int
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Environment variables to set, unless the launcher's own environment has them already."""
    remote: bool = False
    """Whether the process is an ssh client, whose rank exits when its standard input is closed."""
    secret: str = field(default="", repr=False)
    """Line to write to the standard input of a remote one, or nothing."""

    def shown(self) -> str:
        """Return the command in a form that can be pasted into a shell."""
        assignments = [f"{name}={_quoted(value)}" for name, value in self.environment.items()]
        return " ".join([*assignments, *map(_quoted, self.argv)])


def _quoted(word: str) -> str:
    """Quote ``word`` for a shell, with unprintable characters escaped so that a terminal ignores them."""
    if word.isprintable():
        return shlex.quote(word)
    letters = (
        f"\\{letter}"
        if letter in "\\'"
        else letter
        if letter.isprintable()
        else "".join(f"\\x{byte:02x}" for byte in letter.encode(errors="surrogateescape"))
        for letter in word
    )
    return f"$'{''.join(letters)}'"


@dataclass(frozen=True)
class Host:
    """A machine to reach over ssh."""

    name: str
    """Name under which other machines reach it, and which devices.yml uses."""
    user: str | None = None
    """User to log in as, or None for the default."""


@dataclass(frozen=True)
class Remote:
    """Settings for starting a rank on another machine."""

    directory: str
    """Remote working directory, to which paths in the arguments are relative; ``~/`` is the user's home."""
    python: str
    """Remote interpreter; a relative path is relative to the directory."""
    user: str | None = None
    """User to log in as if the host names none."""
    ssh: tuple[str, ...] = ("ssh",)
    """The ssh program with the user's own options."""
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Environment variables to set there."""


def threads_each(cores: int, ranks: int) -> int:
    """Return the number of threads for each of ``ranks`` processes that share ``cores`` cores."""
    return max(1, cores // ranks)


def parse_host(text: str) -> Host:
    """Parse ``host`` or ``user@host``.

    Raises:
        RequestError: ``text`` cannot be a host, or ssh would take it for an option.
    """
    user, at, name = text.rpartition("@")
    for part in (user, name) if at else (name,):
        if not part or part.startswith("-") or any(char.isspace() or char in "'\"" for char in part):
            raise RequestError(f"--hosts: {text!r} is not a valid host: use HOST or USER@HOST")
    return Host(name, user or None)


def local_commands(
    ranks: int,
    arguments: Sequence[str],
    *,
    python: str,
    module: str,
    port: int | None,
    cores: int,
    prometheus_port: int | None = None,
) -> list[RankCommand]:
    """Return the commands that start every rank on this machine.

    Args:
        ranks: Number of ranks.
        arguments: Options of the runtime, without RANK and WORLD.
        python: Path of the interpreter.
        module: Module to run, and the words that follow it.
        port: Port on which rank 0 listens, or None if ``arguments`` give it.
        cores: Number of cores to divide among the ranks.
        prometheus_port: Port of rank 0's metrics, if ``arguments`` ask for one; rank 1 gets the next, and
            so on.

    Raises:
        RequestError: Too few ports follow ``prometheus_port``.
    """
    if prometheus_port is not None and prometheus_port + ranks - 1 > _LAST_PORT:
        raise RequestError(
            f"--prometheus-port {prometheus_port}: {ranks} ranks on one machine need consecutive ports, and "
            f"{_LAST_PORT} is the last one; give a lower port"
        )
    threads = str(threads_each(cores, ranks))
    meeting = () if port is None else ("--port", str(port))

    def own(rank: int) -> tuple[str, ...]:
        return () if prometheus_port is None else ("--prometheus-port", str(prometheus_port + rank))

    return [
        RankCommand(
            rank,
            (python, "-u", "-m", *module.split(), str(rank), str(ranks), *meeting, *arguments, *own(rank)),
            {"OMP_NUM_THREADS": threads},
        )
        for rank in range(ranks)
    ]


def remote_commands(
    hosts: Sequence[Host],
    arguments: Sequence[str],
    remote: Remote,
    *,
    module: str,
    name_addr: bool,
    name_hosts: bool,
    key: str | None = None,
) -> list[RankCommand]:
    """Return the commands that start one rank on each of ``hosts``.

    Args:
        hosts: The host of each rank.
        arguments: Options of the runtime, without RANK and WORLD.
        remote: How to start a rank there.
        module: Module to run, and the words that follow it.
        name_addr: Whether to add ``--addr`` with the first host (false if ``arguments`` give it).
        name_hosts: Whether to add ``-H`` with all hosts.
        key: Text of the membership file that all ranks are given, or None.

    Raises:
        RequestError: A host is named twice.
    """
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"host {name} is named twice; each host runs one rank")
    extra = [*(("--addr", names[0]) if name_addr else ()), *(("-H", ",".join(names)) if name_hosts else ())]
    if key is not None:
        extra += ["--key", "-"]
    secret = "" if key is None else ",".join(key.splitlines()) + "\n"
    interpreter = (remote.python, "-u", "-m", *module.split())
    commands = []
    for rank, host in enumerate(hosts):
        words = (*interpreter, str(rank), str(len(hosts)), *extra, *arguments)
        ssh = _over_ssh(host, words, remote, reads_key=key is not None)
        commands.append(RankCommand(rank, ssh, remote=True, secret=secret))
    return commands


def _over_ssh(host: Host, command: Sequence[str], remote: Remote, *, reads_key: bool) -> tuple[str, ...]:
    """Return the command that runs ``command`` on ``host``."""
    user = host.user or remote.user
    variables = [f"{name}={value}" for name, value in remote.environment.items()]
    there = ("env", *variables, *command) if variables else command
    return (
        *remote.ssh,
        *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5"),
        *(("-l", user) if user else ()),
        host.name,
        _there(there, remote, reads_key=reads_key),
    )


def _there(command: Sequence[str], remote: Remote, *, reads_key: bool) -> str:
    """Return the line for the remote login shell: ``sh -c`` and one quoted word, which every shell reads."""
    return f"exec sh -c {shlex.quote(_script(command, remote.directory, reads_key=reads_key))}"


def _script(command: Sequence[str], directory: str, *, reads_key: bool) -> str:
    """Return an ``sh`` script that runs ``command``, stops it at the end of its input, and exits as it does.

    The watcher must not hold standard output or error open, because sshd would wait for it. ``echo`` is part
    of every shell, so that the key is not in the arguments of a process.
    """
    rank = shlex.join(command)
    if reads_key:
        start = f'read -r key <&3; echo "$key" | tr , \\\\012 | {rank} 3<&- & rank=$!; key=; '
    else:
        start = f"{rank} 3<&- </dev/null & rank=$!; "
    return (
        f"cd {_quoted_path(directory)} || exit 2; "
        "exec 3<&0; "
        f"{start}"
        "{ cat <&3; kill -TERM $rank; "
        f"sleep {_KILL_AFTER_S}; kill -KILL $rank; }} >/dev/null 2>&1 & watch=$!; "
        "wait $rank; status=$?; "
        "kill $watch 2>/dev/null; "
        "exit $status"
    )


def _quoted_path(path: str) -> str:
    if path == "~":
        return '"$HOME"'
    if path.startswith("~/"):
        return f'"$HOME"/{shlex.quote(path[2:])}'
    return shlex.quote(path)
