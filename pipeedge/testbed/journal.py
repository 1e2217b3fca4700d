"""What a test bed consists of, written down before it is made.

A crash at any moment leaves a journal that names at least all that was made, and nothing that was there
before: names are looked up before they are written down. So whoever comes next can take away what is left.
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

__all__ = ["Journal", "Owner", "Shelf"]


@dataclass(frozen=True)
class Owner:
    """The process that a test bed goes down with; its start tells it from a later one of the same number."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Owner:
        """Of a process that lives; ``started`` is empty for one that does not."""
        return cls(pid, _start_of(pid))

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return bool(self.started) and _start_of(self.pid) == self.started


def _start_of(pid: int) -> str:
    try:
        # The name of the program stands in parentheses, and may hold anything.
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
    """Goes down with it; None: stays until somebody takes it down."""
    whole: bool = False
    """Everything was made."""

    @property
    def left_over(self) -> bool:
        """Whether nobody will take it down who should have."""
        return not self.owner.alive if self.owner is not None else not self.whole

    @property
    def switch(self) -> str:
        """The namespace of the switch."""
        return f"{self.name}-switch"

    def namespace(self, host: str) -> str:
        """The network namespace of a host."""
        return f"{self.name}-{host}"

    def group(self, host: str) -> str:
        """The control group of a host."""
        return f"pipeedge-testbed/{self.name}/{host}"

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All of them."""
        return (self.switch, *(self.namespace(host.name) for host in self.hosts))

    @property
    def groups(self) -> tuple[str, ...]:
        """All control groups that hold processes."""
        return tuple(self.group(host.name) for host in self.hosts)

    def host(self, name: str) -> EmulatedHost:
        """A host by name.

        Raises:
            RequestError: there is none.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.hosts)
        raise RequestError(f"the test bed {self.name} has no host {name}; its hosts are {known}")

    def finished(self, owner: Owner | None) -> Journal:
        """Everything was made, and is ``owner``'s."""
        return replace(self, whole=True, owner=owner)

    def to_json(self) -> str:
        """For the shelf."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Journal:
        """From the shelf."""
        body: dict[str, Any] = json.loads(text)
        hosts = tuple(EmulatedHost(**host) for host in body["hosts"])
        owner = None if body["owner"] is None else Owner(**body["owner"])
        return cls(body["name"], hosts, owner, body["whole"])


class Shelf:
    """The journals of this machine, ``DIRECTORY/NAME/journal.json``, and other files of a test bed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def place(self, name: str) -> Path:
        """The directory of a test bed."""
        return self._directory / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else makes or takes down test beds meanwhile."""
        self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        with (self._directory / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def names(self) -> list[str]:
        """Of all test beds."""
        return sorted(path.parent.name for path in self._directory.glob("*/journal.json"))

    def find(self, name: str) -> Journal | None:
        """A test bed's journal, if there is one."""
        try:
            return Journal.from_json((self.place(name) / "journal.json").read_text())
        except FileNotFoundError:
            return None

    def write(self, journal: Journal) -> None:
        """Keep ``journal``, in place of what stood there."""
        self.place(journal.name).mkdir(exist_ok=True)
        write_text(self.place(journal.name) / "journal.json", journal.to_json())

    def forget(self, name: str) -> None:
        """A test bed is gone."""
        for path in (*self.place(name).glob("*"), *self.place(name).glob(".journal*")):
            path.unlink()
        with contextlib.suppress(FileNotFoundError):
            self.place(name).rmdir()
        # The lock stays: whoever waits for it holds it open.
