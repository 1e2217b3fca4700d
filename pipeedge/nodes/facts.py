"""What this machine is, as other nodes see it."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

import pipeedge
from pipeedge.base.machine import available_bytes, processors
from pipeedge.nodes.messages import Here

__all__ = ["processor_name", "state_facts"]


@cache
def processor_name(
    cpuinfo: Path = Path("/proc/cpuinfo"), model: Path = Path("/proc/device-tree/model")
) -> str:
    """Return the name of the processor, or that of the board where the processor has none.

    Args:
        cpuinfo: File in which Linux describes the processors.
        model: File with the name of the board, on ARM.
    """
    for path, key in ((cpuinfo, "model name"), (cpuinfo, "Model"), (model, None)):
        try:
            text = path.read_text("utf-8", errors="replace")
        except OSError:
            continue
        if key is None:
            return text.strip("\0 \n")
        for line in text.splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return platform.processor() or platform.machine()


def state_facts(name: str, port: int, serial: str) -> Here:
    """Return what this machine is.

    Args:
        name: Name of this node.
        port: Port at which it listens.
        serial: Serial number of its certificate, in hexadecimal.
    """
    return Here(
        name=name,
        processor=processor_name(),
        cores=processors(),
        memory=available_bytes(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        version=pipeedge.__version__,
        torch=_version_of("torch"),
        links=[
            f"{interface} {found.speed} Mbit/s" if found.speed else interface
            for interface, found in sorted(psutil.net_if_stats().items())
            if found.isup and interface != "lo"
        ][:64],
        port=port,
        serial=serial,
    )


@cache
def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
