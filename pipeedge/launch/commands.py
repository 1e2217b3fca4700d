"""Which command starts which rank. Pure: a request in, commands out.

    --local N         this machine, N processes, the processor's threads shared out among them
    --hosts a,b,c     rank 0 on a, rank 1 on b, ..., one each, over OpenSSH
    -sd devices.yml   the hosts of the file, in its order

A command for another machine crosses two shells, the one that ssh starts there and the ``sh`` with our
script, and is quoted for both. The script keeps the rank's fate tied to the connection: ssh's standard
input stays open as long as the launcher lives, and where it ends, the rank is ended. (A pseudo-terminal
would do that too, but mixes standard output with standard error.)
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
"""How long a rank on another machine may take to end after it was asked to."""


@dataclass(frozen=True)
class RankCommand:
    """What starts one rank."""

    rank: int
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Set for the process, where the launcher's own environment does not have them."""
    remote: bool = False
    """The process is an ssh: its rank ends when its standard input does."""

    def shown(self) -> str:
        """The command as one can paste it into a shell."""
        assignments = [f"{name}={_quoted(value)}" for name, value in self.environment.items()]
        return " ".join([*assignments, *map(_quoted, self.argv)])


def _quoted(word: str) -> str:
    """Return ``word`` as a shell reads it; what a terminal would act upon is written in escapes."""
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
    """A machine, as ssh is told of it."""

    name: str
    """As other machines reach it, and as devices.yml calls it."""
    user: str | None = None


@dataclass(frozen=True)
class Remote:
    """How a rank is started on another machine."""

    directory: str
    """Where it runs there; paths of the arguments are relative to it. ``~/`` is the user's home."""
    python: str
    """The interpreter there; a relative path is relative to the directory."""
    user: str | None = None
    """Who logs in, where the host does not say."""
    ssh: tuple[str, ...] = ("ssh",)
    """The program, with options of the user's own."""


def threads_each(cores: int, ranks: int) -> int:
    """Threads for each of ``ranks`` on one machine of ``cores``."""
    return max(1, cores // ranks)


def parse_host(text: str) -> Host:
    """``host`` or ``user@host``.

    Raises:
        RequestError: what ssh would take for an option, or could not be a host.
    """
    user, at, name = text.rpartition("@")
    for part in (user, name) if at else (name,):
        if not part or part.startswith("-") or any(char.isspace() or char in "'\"" for char in part):
            raise RequestError(f"--hosts: {text!r} is no host; give host or user@host")
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
    """Every rank on this machine.

    Args:
        ranks: how many.
        arguments: of the runtime, without RANK and WORLD.
        python: the interpreter.
        module: module that it runs, and the words that follow it.
        port: where rank 0 listens; None where ``arguments`` say it.
        cores: processors that may be used.
        prometheus_port: that ``arguments`` ask for: of rank 0, rank 1 gets the next one, and so on.

    Raises:
        RequestError: there are not that many ports.
    """
    if prometheus_port is not None and prometheus_port + ranks - 1 > _LAST_PORT:
        raise RequestError(
            f"--prometheus-port {prometheus_port}: {ranks} ranks on one machine need a port each, and the "
            f"last is {_LAST_PORT}"
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
) -> list[RankCommand]:
    """One rank on each of ``hosts``.

    Args:
        hosts: the host of each rank.
        arguments: of the runtime, without RANK and WORLD.
        remote: how to start there.
        module: module that is run, and the words that follow it.
        name_addr: add ``--addr`` with the first host; not where ``arguments`` say it.
        name_hosts: add ``-H`` with all of them.

    Raises:
        RequestError: a host twice.
    """
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"the host {name} is named twice; each host runs one rank")
    extra = [*(("--addr", names[0]) if name_addr else ()), *(("-H", ",".join(names)) if name_hosts else ())]
    return [
        RankCommand(
            rank,
            (
                *remote.ssh,
                *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5"),
                *(("-l", user) if (user := host.user or remote.user) else ()),
                host.name,
                _there(
                    [
                        *(remote.python, "-u", "-m", *module.split()),
                        *(str(rank), str(len(hosts)), *extra, *arguments),
                    ],
                    remote,
                ),
            ),
            remote=True,
        )
        for rank, host in enumerate(hosts)
    ]


def _there(command: Sequence[str], remote: Remote) -> str:
    """The line for the login shell at the other end, whichever that is: ``sh -c`` and one quoted word."""
    return f"exec sh -c {shlex.quote(_script(command, remote.directory))}"


def _script(command: Sequence[str], directory: str) -> str:
    """For ``sh``: run ``command``, end it when standard input ends, exit as it does.

    The watcher must hold neither standard output nor error, or sshd would wait for it.
    """
    return (
        f"cd {_quoted_path(directory)} || exit 2; "
        "exec 3<&0; "
        f"{shlex.join(command)} 3<&- </dev/null & rank=$!; "
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
