"""What the doctor asks of the machine it runs on. Tests give other answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

__all__ = ["MachineFacts", "Probe"]


@dataclass(frozen=True)
class MachineFacts:
    """Memory, and which machine it is."""

    host: str
    machine: str
    """The same for processes of one machine."""
    free_bytes: int
    """What programs can still get without swapping."""
    limit_free_bytes: int | None
    """What the limit of the control group leaves; None without a limit."""
    process_bytes: int
    """What this process takes."""


class Probe:
    """The machine itself."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        """Where ``proc`` and ``sys`` are."""

    def clock(self) -> float:
        """The time of day, seconds."""
        return time.time()

    def software(self) -> Mapping[str, Any]:
        """Versions that differ from those of this process; none do."""
        return {}

    def machine(self) -> MachineFacts:
        """Memory as it is now."""
        host = socket.gethostname()
        boot = self._read("proc/sys/kernel/random/boot_id")
        return MachineFacts(
            host=host,
            machine=boot or host,
            free_bytes=int(psutil.virtual_memory().available),
            limit_free_bytes=self._limit_free(),
            process_bytes=int(psutil.Process().memory_info().rss),
        )

    def _limit_free(self) -> int | None:
        """The least that this control group, or one around it, leaves."""
        free: list[int] = []
        for line in (self._read("proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                free += self._limits("sys/fs/cgroup", path, "memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                free += self._limits(
                    "sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes"
                )
        return min(free, default=None)

    def _limits(self, mount: str, path: str, limit: str, usage: str) -> list[int]:
        free = []
        for group in (Path(path.lstrip("/")), *Path(path.lstrip("/")).parents):
            most, used = (self._read(f"{mount}/{group}/{name}") for name in (limit, usage))
            # "max" is no limit; version 1 says it with a number beyond any memory.
            if most and used and most.isdigit() and used.isdigit() and int(most) < 1 << 60:
                free.append(max(0, int(most) - int(used) + self._reclaimable(f"{mount}/{group}")))
        return free

    def _reclaimable(self, group: str) -> int:
        """File pages count as used, and are given back when memory is short."""
        for line in (self._read(f"{group}/memory.stat") or "").splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
        return 0

    def _read(self, path: str) -> str | None:
        try:
            return (self._root / path).read_text().strip()
        except OSError:
            return None
