"""Observe the machine that the doctor runs on. Tests replace the answers."""

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
    """Identity and memory of a machine."""

    host: str
    """Host name."""
    machine: str
    """Identifier that processes on one machine share."""
    free_bytes: int
    """Memory that programs can still get without swapping, in bytes."""
    limit_free_bytes: int | None
    """Bytes that are free under the control group's limit, or None without a limit."""
    process_bytes: int
    """Memory of this process in bytes."""


class Probe:
    """Observes the machine itself."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        """Directory that contains ``proc`` and ``sys``."""

    def clock(self) -> float:
        """Return the time of day in seconds."""
        return time.time()

    def software(self) -> Mapping[str, Any]:
        """Return versions that replace those of this process in the comparison of ranks: none."""
        return {}

    def machine(self) -> MachineFacts:
        """Return the identity and current memory of this machine."""
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
        """Return the fewest bytes free under the limits of this control group and its parents."""
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
            # "max" means no limit; version 1 expresses that by a number beyond any memory.
            if most and used and most.isdigit() and used.isdigit() and int(most) < 1 << 60:
                free.append(max(0, int(most) - int(used) + self._reclaimable(f"{mount}/{group}")))
        return free

    def _reclaimable(self, group: str) -> int:
        """Return the bytes of cached files, which count as used but are freed when memory is short."""
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
