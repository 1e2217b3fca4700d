"""Limit the processor time and memory of a host's processes by control groups.

    version 1   MOUNT/cpu/pipeedge-testbed/NAME/HOST    MOUNT/memory/pipeedge-testbed/NAME/HOST
    version 2   MOUNT/pipeedge-testbed/NAME/HOST

Each controller is used wherever it is mounted, so a mixture of both versions works too.

A quota is ``fraction * period`` of processor time in each period. With the kernel's default period of 100
ms, a host with a quarter of a processor would run for 25 ms and then pause for 75, as long as several
layers take, while its input waits. A real slow host is slow all the time. With a period of 10 ms a pause
lasts 8 to 16 ms at most (the kernel checks at every tick, of 1 to 10 ms, and deducts any excess from the
next period), and the mean is still exact to within one percent. Shorter periods do not shorten the pauses,
and cost more.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeedge.base.errors import PipeEdgeError, RequestError
from pipeedge.base.wording import figure

__all__ = ["GroupSettings", "Hierarchy", "HostUsage", "find_hierarchies", "kill_all"]

PERIOD_US = 10_000
_LEAST_QUOTA_US = 1_000
"""Smallest quota that the kernel accepts, in microseconds."""
_PREFERENCE = 16
"""Factor by which a preferred group outweighs others; well below the limit, for the kernel's threads."""
_CONTROLLERS = ("cpu", "memory")
_DEATH_S = 10.0


@dataclass(frozen=True)
class GroupSettings:
    """Limits of a host's control group."""

    cpu_fraction: float | None
    """Number of processors, or None for no limit."""
    mem_bytes: int
    """Memory in bytes."""

    def quota_us(self) -> tuple[int, int]:
        """Return quota and period in microseconds; a quota of -1 means no limit."""
        if self.cpu_fraction is None:
            return -1, PERIOD_US
        period = max(PERIOD_US, round(_LEAST_QUOTA_US / self.cpu_fraction))
        return round(self.cpu_fraction * period), period


@dataclass(frozen=True)
class HostUsage:
    """Resources that the processes of a host have used so far."""

    processes: int
    """Number of running processes."""
    mem_bytes: int
    """Memory in use, in bytes."""
    throttled_s: float
    """Seconds for which the quota kept its processes, taken together, from running."""


@dataclass(frozen=True)
class Hierarchy:
    """A mounted tree of groups and the controllers that it offers."""

    mount: Path
    version: int
    controllers: tuple[str, ...]

    def create(self, group: str) -> None:
        """Create the group and its missing parents."""
        path = self.mount
        for part in Path(group).parts:
            if self.version == 2 and path != self.mount:
                _write(path / "cgroup.subtree_control", " ".join(f"+{name}" for name in self.controllers))
            path = path / part
            path.mkdir(exist_ok=True)

    def limit(self, group: str, settings: GroupSettings) -> None:
        """Set the limits of a group."""
        self.limit_time(group, settings)
        if "memory" in self.controllers:
            name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
            _write(self.mount / group / name, str(settings.mem_bytes))

    def limit_time(self, group: str, settings: GroupSettings) -> None:
        """Set only the limit of processor time, also while processes run in the group."""
        path = self.mount / group
        quota, period = settings.quota_us()
        if "cpu" in self.controllers and self.version == 1:
            _write(path / "cpu.cfs_period_us", str(period))
            _write(path / "cpu.cfs_quota_us", str(quota))
        elif "cpu" in self.controllers:
            _write(path / "cpu.max", f"{'max' if quota < 0 else quota} {period}")

    def prefer(self, group: str) -> None:
        """Give a group and its parents precedence over other work on the machine, up to their quota."""
        for part in [Path(group), *Path(group).parents][:-1]:
            if "cpu" in self.controllers and self.version == 1:
                _write(self.mount / part / "cpu.shares", str(1024 * _PREFERENCE))
            elif "cpu" in self.controllers:
                _write(self.mount / part / "cpu.weight", str(100 * _PREFERENCE))

    def processes(self, group: str) -> list[int]:
        """Return the ids of the processes in a group, none if it does not exist."""
        try:
            return [int(line) for line in (self.mount / group / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def remove(self, group: str) -> None:
        """Remove an empty group."""
        with contextlib.suppress(FileNotFoundError):
            (self.mount / group).rmdir()

    def usage(self, group: str) -> HostUsage:
        """Return the usage that this tree records for a group, with 0 for what it does not record."""
        path = self.mount / group
        memory = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        name, unit = ("throttled_time", 1e-9) if self.version == 1 else ("throttled_usec", 1e-6)
        throttled = _statistic(path / "cpu.stat", name) if "cpu" in self.controllers else 0
        return HostUsage(
            processes=len(self.processes(group)),
            mem_bytes=_number(path / memory) if "memory" in self.controllers else 0,
            throttled_s=throttled * unit,
        )


def find_hierarchies(mounts: str) -> tuple[Hierarchy, ...]:
    """Find the mounted controllers of processor time and memory.

    Args:
        mounts: Contents of ``/proc/mounts``.

    Raises:
        RequestError: A controller is unavailable; the message says which and why.
    """
    found: dict[Path, tuple[int, list[str]]] = {}
    unified: list[Path] = []
    for line in mounts.splitlines():
        _, place, kind, options = line.split()[:4]
        mount = Path(place.replace("\\040", " "))
        if kind == "cgroup2":
            unified.append(mount)
        elif kind == "cgroup":
            mine = [name for name in _CONTROLLERS if name in options.split(",")]
            if mine:
                found[mount] = (1, mine)
    missing = {name for name in _CONTROLLERS if not any(name in names for _, names in found.values())}
    for mount in unified:
        offered = missing & set(_words(mount / "cgroup.controllers"))
        if offered:
            _check_passed_on(mount, offered)
            found[mount] = (2, sorted(offered))
            missing -= offered
    if missing:
        which = " and ".join(sorted(missing))
        raise RequestError(
            f"the test bed needs the control group controller {which}, which is not mounted on this machine "
            "(see /proc/cgroups and /proc/mounts)"
        )
    return tuple(Hierarchy(mount, version, tuple(names)) for mount, (version, names) in found.items())


def _check_passed_on(mount: Path, controllers: Iterable[str]) -> None:
    """Check that the root group passes the controllers on, without which version 2 groups lack them."""
    passed_on = _words(mount / "cgroup.subtree_control")
    for name in sorted(controllers):
        if name not in passed_on:
            raise RequestError(
                f"the test bed needs the control group controller {name} in {mount}; enable it with "
                f"'echo +{name} > {mount}/cgroup.subtree_control'"
            )


def kill_all(hierarchies: Sequence[Hierarchy], group: str) -> None:
    """Kill every process in a group, and wait until it has exited.

    Raises:
        PipeEdgeError: A process does not exit.
    """
    while pids := sorted({pid for tree in hierarchies for pid in tree.processes(group)} - {os.getpid()}):
        for pid in pids:
            _kill_and_wait(pid)


def _kill_and_wait(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        if not select.select([handle], [], [], _DEATH_S)[0]:
            raise PipeEdgeError(
                f"process {pid} in the test bed still runs {figure(_DEATH_S)} s after SIGKILL"
            )
    finally:
        os.close(handle)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise RequestError(
            f"the test bed must write {text} to {path}, which fails: {error.strerror}"
        ) from error


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _statistic(path: Path, name: str) -> int:
    words = _words(path)
    return int(words[words.index(name) + 1]) if name in words[:-1] else 0
