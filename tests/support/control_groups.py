"""Files of control groups in a directory, as the kernel shows them to a process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeedge.base.machine import ControlGroups


def write_groups(place: Path, membership: str, files: Mapping[str, object]) -> ControlGroups:
    """Write ``files`` of a process whose ``/proc/self/cgroup`` says ``membership``."""
    for name, text in files.items():
        (place / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "cgroup" / name).write_text(f"{text}\n")
    (place / "membership").write_text(membership)
    return ControlGroups(place / "cgroup", place / "membership")
