"""Resources of this machine: usable memory and processors."""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = [
    "ControlGroups",
    "MemoryBudget",
    "available_bytes",
    "peak_rss_mb",
    "process_age_s",
    "processor_vendor",
    "processors",
    "quota_threads",
    "resident_bytes",
]

_START_TIME = 19
"""Place of ``starttime`` in Linux's ``/proc/PID/stat``, counted behind the name of the program."""
SYSTEM_RESERVE_BYTES = 256 << 20
"""Memory left to the system and to other programs, in bytes."""


@dataclass(frozen=True)
class MemoryBudget:
    """Memory that a stage can rely on, and how the figure comes about."""

    free_bytes: int
    process_bytes: int
    """Memory of a rank without a shard, in bytes."""
    system_bytes: int = SYSTEM_RESERVE_BYTES

    @property
    def usable_bytes(self) -> int:
        """Bytes, in whole MB, for what the scheduler counts: weights, activations and microbatches."""
        rest = self.free_bytes - self.system_bytes - self.process_bytes
        return max(0, rest >> 20 << 20)

    def __str__(self) -> str:
        free, system, process = (
            amount >> 20 for amount in (self.free_bytes, self.system_bytes, self.process_bytes)
        )
        reserve = f"{system} for the system and {process} for a process"
        return f"{self.usable_bytes >> 20} MB: {free} free, less {reserve}"


@dataclass(frozen=True)
class ControlGroups:
    """Limits on this process, from its control groups and the groups that enclose them.

        /sys/fs/cgroup/memory/a/b    version 1, a tree for each controller: "9:memory:/a/b"
        /sys/fs/cgroup/a/b           version 2: "0::/a/b"

    Inside a container the mounted tree may begin at the container's own group, whatever the membership line
    says. The root of the tree is used then.
    """

    mount: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def free_bytes(self) -> int | None:
        """Return how many more bytes may be allocated, or None without a limit."""
        found = []
        for controller, limit, used, cache in (
            ("", "memory.max", "memory.current", "inactive_file"),
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            for group in self._groups(controller):
                most, now = _numbers(group / limit), _numbers(group / used)
                if most and now:
                    # The kernel drops cached file pages before an allocation fails.
                    found.append(max(0, most[0] - now[0] + _statistic(group / "memory.stat", cache)))
        return min(found, default=None)

    def quota(self) -> float | None:
        """Return the processor seconds allowed per second, or None without a limit."""
        found = []
        for group in self._groups(""):
            both = _numbers(group / "cpu.max")
            if len(both) == 2:
                found.append(both[0] / both[1])
        for group in self._groups("cpu"):
            quota, period = _numbers(group / "cpu.cfs_quota_us"), _numbers(group / "cpu.cfs_period_us")
            if quota and period and quota[0] > 0:
                found.append(quota[0] / period[0])
        return min(found, default=None)

    def _groups(self, controller: str) -> list[Path]:
        """Return this process's group and its ancestors, the root last; ``""`` is version 2."""
        root = self.mount / controller
        own = root / self._own_group(controller).lstrip("/")
        if not own.is_dir():
            return [root]
        return [own, *(parent for parent in own.parents if root in (parent, *parent.parents))]

    def _own_group(self, controller: str) -> str:
        try:
            lines = self.membership.read_text().splitlines()
        except OSError:
            return "/"
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return path
        return "/"


def available_bytes(groups: ControlGroups | None = None) -> int:
    """Return the bytes that can be allocated without swapping, within this process's control groups."""
    free = int(psutil.virtual_memory().available)
    allowed = (groups or ControlGroups()).free_bytes()
    return free if allowed is None else min(free, allowed)


def _numbers(path: Path) -> list[int]:
    """Return the numbers in a file, or none if it is missing or says "max" (no limit)."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def processors(groups: ControlGroups | None = None) -> int:
    """Return the number of processors that this process can keep busy, within its quota if it has one."""
    allowed = _runs_on()
    threads = quota_threads(groups)
    return allowed if threads is None else min(allowed, threads)


def quota_threads(groups: ControlGroups | None = None) -> int | None:
    """Return the number of threads that suits this process's quota, or None if no quota holds it back.

    This is the quota to the nearest whole number, and at least 1. One thread too many pauses with all others
    whenever the quota is used up, and one too few leaves part of it unused: rounding loses the least.
    """
    quota = (groups or ControlGroups()).quota()
    if quota is None or quota >= _runs_on():
        return None
    return max(1, math.floor(quota + 0.5))


def _runs_on() -> int:
    """Return the number of processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_vendor(cpuinfo: Path = Path("/proc/cpuinfo"), described: str | None = None) -> str | None:
    """Return the vendor of an x86 processor as it names itself (``AuthenticAMD``), or None if unknown.

    Args:
        cpuinfo: File in which Linux describes the processors.
        described: Description of the processor used without that file, which on Windows ends with the vendor;
            by default that of this machine.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        _, comma, vendor = (platform.processor() if described is None else described).rpartition(", ")
        return vendor if comma else None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), None)


def process_age_s() -> float:
    """Return the seconds since this process was started."""
    stat = Path("/proc/self/stat")
    if stat.exists():
        # By the clock that counts from boot: the time of day may have been set since then.
        started = int(stat.read_text().rpartition(")")[2].split()[_START_TIME])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    return time.time() - psutil.Process().create_time()


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_mb() -> float:
    """Return the peak resident memory of this process in MB of 2^20 bytes."""
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return resident_bytes() / 2**20
