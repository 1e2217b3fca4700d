"""Record what a test bed consists of before it is created.

A crash at any moment leaves a journal that names at least everything that was created, and nothing that
existed before, because conflicts are checked before the journal is written. So the next command can remove
what is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeedge.base.errors import RequestError
from pipeedge.base.yamlfile import write_text
from pipeedge.testbed.cluster import EmulatedHost

__all__ = ["Journal", "JournalFiles", "Owner"]


@dataclass(frozen=True)
class Owner:
    """The process whose end removes a test bed."""

    pid: int
    started: str
    """Start time of the process, which tells it from a later one with the same pid; empty if it is gone."""

    @classmethod
    def of(cls, pid: int) -> Owner:
        """Identify the process ``pid``."""
        return cls(pid, _start_of(pid))

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return bool(self.started) and _start_of(self.pid) == self.started


def _start_of(pid: int) -> str:
    try:
        # The program's name is in parentheses and may contain anything, even parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[19]


@dataclass(frozen=True)
class Journal:
    """One test bed."""

    name: str
    hosts: tuple[EmulatedHost, ...]
    owner: Owner | None
    """Process whose end removes the test bed, or None to keep it until it is taken down."""
    whole: bool = False
    """Whether everything has been created."""

    @property
    def left_over(self) -> bool:
        """Whether the process that should have removed the test bed, or finished it, is gone."""
        return not self.owner.alive if self.owner is not None else not self.whole

    @property
    def switch(self) -> str:
        """Name of the switch's network namespace."""
        return f"{self.name}-switch"

    def namespace(self, host: str) -> str:
        """Return the name of a host's network namespace."""
        return f"{self.name}-{host}"

    def group(self, host: str) -> str:
        """Return the path of a host's control group."""
        return f"pipeedge-testbed/{self.name}/{host}"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All network namespaces."""
        return (self.switch, *(self.namespace(host.name) for host in self.hosts))

    @property
    def groups(self) -> tuple[str, ...]:
        """Control groups of all hosts."""
        return tuple(self.group(host.name) for host in self.hosts)

    def host(self, name: str) -> EmulatedHost:
        """Return the host of that name.

        Raises:
            RequestError: There is none.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.hosts)
        raise RequestError(f"test bed {self.name} has no host {name}; its hosts are {known}")

    def finished(self, owner: Owner | None) -> Journal:
        """Return the journal of the finished test bed, which belongs to ``owner``."""
        return replace(self, whole=True, owner=owner)

    def changed(self, hosts: tuple[EmulatedHost, ...]) -> Journal:
        """Return the journal of the same test bed with other limits."""
        return replace(self, hosts=hosts)

    def to_json(self) -> str:
        """Return the journal as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Journal:
        """Read the journal from JSON text."""
        body: dict[str, Any] = json.loads(text)
        hosts = tuple(EmulatedHost(**host) for host in body["hosts"])
        owner = None if body["owner"] is None else Owner(**body["owner"])
        return cls(body["name"], hosts, owner, body["whole"])


class JournalFiles:
    """The journals of this machine, ``DIRECTORY/NAME/journal.json``, and other files of a test bed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def place(self, name: str) -> Path:
        """Return the directory of a test bed."""
        return self._directory / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from building or removing test beds while the block runs."""
        self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        with (self._directory / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def names(self) -> list[str]:
        """Return the names of all test beds."""
        return sorted(path.parent.name for path in self._directory.glob("*/journal.json"))

    def find(self, name: str) -> Journal | None:
        """Return a test bed's journal, or None if there is none."""
        try:
            return Journal.from_json((self.place(name) / "journal.json").read_text())
        except FileNotFoundError:
            return None

    def write(self, journal: Journal) -> None:
        """Store ``journal``, replacing an earlier one of the same name."""
        self.place(journal.name).mkdir(exist_ok=True)
        write_text(self.place(journal.name) / "journal.json", journal.to_json())

    def forget(self, name: str) -> None:
        """Remove the files of a test bed."""
        for path in (*self.place(name).glob("*"), *self.place(name).glob(".journal*")):
            path.unlink()
        with contextlib.suppress(FileNotFoundError):
            self.place(name).rmdir()
        # The lock file stays, because a process that waits for it holds it open.
