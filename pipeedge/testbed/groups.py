"""Control groups: how much processor time and memory the processes of a host get.

    version 1   MOUNT/cpu/pipeedge-testbed/NAME/HOST    MOUNT/memory/pipeedge-testbed/NAME/HOST
    version 2   MOUNT/pipeedge-testbed/NAME/HOST

Each controller is taken from wherever it is mounted, so that a mixture of both versions works too.

A quota is ``fraction * period`` of processor time in each period. The kernel's own period is 100 ms: a host
of a quarter of a processor would run 25 ms and then stand still for 75, as long as several layers take, and
what arrives meanwhile waits. A real slow host is slow all the time. With 10 ms it stands still for 8 to 16
ms at most (the kernel looks at every tick, of 1 to 10 ms, and balances what was too much in the next
period), and still the mean is exact within a percent. Shorter periods stand still no shorter, and cost
more.
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
"""The kernel takes no smaller one."""
_PREFERENCE = 16
"""How much weightier than others a preferred group is; far from the most: the kernel has threads too."""
_CONTROLLERS = ("cpu", "memory")
_DEATH_S = 10.0


@dataclass(frozen=True)
class GroupSettings:
    """What a host may take."""

    cpu_fraction: float | None
    mem_bytes: int

    def quota_us(self) -> tuple[int, int]:
        """Quota and period, microseconds; -1: no quota."""
        if self.cpu_fraction is None:
            return -1, PERIOD_US
        period = max(PERIOD_US, round(_LEAST_QUOTA_US / self.cpu_fraction))
        return round(self.cpu_fraction * period), period


@dataclass(frozen=True)
class HostUsage:
    """What the processes of a host have taken so far."""

    processes: int
    mem_bytes: int
    throttled_s: float
    """That its processes together were kept from a processor."""


@dataclass(frozen=True)
class Hierarchy:
    """A mounted tree of groups and the controllers that it offers."""

    mount: Path
    version: int
    controllers: tuple[str, ...]

    def create(self, group: str) -> None:
        """Make the group, and those around it that are not there."""
        path = self.mount
        for part in Path(group).parts:
            if self.version == 2 and path != self.mount:
                _write(path / "cgroup.subtree_control", " ".join(f"+{name}" for name in self.controllers))
            path = path / part
            path.mkdir(exist_ok=True)

    def limit(self, group: str, settings: GroupSettings) -> None:
        """Set what the processes of a group may take."""
        path = self.mount / group
        quota, period = settings.quota_us()
        if "cpu" in self.controllers and self.version == 1:
            _write(path / "cpu.cfs_period_us", str(period))
            _write(path / "cpu.cfs_quota_us", str(quota))
        elif "cpu" in self.controllers:
            _write(path / "cpu.max", f"{'max' if quota < 0 else quota} {period}")
        if "memory" in self.controllers:
            name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
            _write(path / name, str(settings.mem_bytes))

    def prefer(self, group: str) -> None:
        """Let a group and those around it have what they may take before other work of the machine has it."""
        for part in [Path(group), *Path(group).parents][:-1]:
            if "cpu" in self.controllers and self.version == 1:
                _write(self.mount / part / "cpu.shares", str(1024 * _PREFERENCE))
            elif "cpu" in self.controllers:
                _write(self.mount / part / "cpu.weight", str(100 * _PREFERENCE))

    def processes(self, group: str) -> list[int]:
        """Ids of the processes in a group; none where it is not there."""
        try:
            return [int(line) for line in (self.mount / group / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def remove(self, group: str) -> None:
        """Take away a group that is empty."""
        with contextlib.suppress(FileNotFoundError):
            (self.mount / group).rmdir()

    def usage(self, group: str) -> HostUsage:
        """What this tree knows of a group; 0 for what it does not."""
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
    """Where the controllers for processor time and memory are.

    Args:
        mounts: what ``/proc/mounts`` says.

    Raises:
        RequestError: a controller is not to be had; the message says which and why.
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
            f"the test bed needs the control group controller {which}, which is mounted nowhere here "
            "(see /proc/cgroups and /proc/mounts)"
        )
    return tuple(Hierarchy(mount, version, tuple(names)) for mount, (version, names) in found.items())


def _check_passed_on(mount: Path, controllers: Iterable[str]) -> None:
    """In version 2, groups have only what the one around them passes on."""
    passed_on = _words(mount / "cgroup.subtree_control")
    for name in sorted(controllers):
        if name not in passed_on:
            raise RequestError(
                f"the test bed needs the control group controller {name} in {mount}: "
                f"echo +{name} > {mount}/cgroup.subtree_control"
            )


def kill_all(hierarchies: Sequence[Hierarchy], group: str) -> None:
    """End every process in a group, and wait until it has ended.

    Raises:
        PipeEdgeError: one does not end.
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
                f"the process {pid} in the test bed does not end, {figure(_DEATH_S)} s after SIGKILL"
            )
    finally:
        os.close(handle)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise RequestError(
            f"the test bed needs {path}, which cannot be set to {text}: {error.strerror}"
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
