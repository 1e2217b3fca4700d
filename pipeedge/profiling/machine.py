"""What this machine has: memory that may be used, processors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["MemoryBudget", "available_bytes", "processors", "resident_bytes"]

SYSTEM_RESERVE_BYTES = 256 << 20
"""Left to the system and to what else runs there."""


@dataclass(frozen=True)
class MemoryBudget:
    """How much memory a stage may count on, and why not more."""

    free_bytes: int
    process_bytes: int
    """A rank without a shard."""
    system_bytes: int = SYSTEM_RESERVE_BYTES

    @property
    def usable_bytes(self) -> int:
        """For weights, activations and microbatches, which the scheduler counts, in whole MB."""
        rest = self.free_bytes - self.system_bytes - self.process_bytes
        return max(0, rest >> 20 << 20)

    def __str__(self) -> str:
        free, system, process = (
            amount >> 20 for amount in (self.free_bytes, self.system_bytes, self.process_bytes)
        )
        reserve = f"{system} for the system and {process} for a process"
        return f"{self.usable_bytes >> 20} MB: {free} free, less {reserve}"


def available_bytes(proc: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be had without swapping, within this process's control group.

    Args:
        proc: where the control groups are.
    """
    free = int(psutil.virtual_memory().available)
    for limit, used, statistics, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        most, now = _number(proc / limit), _number(proc / used)
        if most is not None and now is not None:
            # What is only a copy of files is given up before anything fails.
            free = min(free, max(0, most - now + _statistic(proc / statistics, cache)))
    return free


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resident_bytes() -> int:
    """Memory of this process now."""
    return int(psutil.Process().memory_info().rss)
