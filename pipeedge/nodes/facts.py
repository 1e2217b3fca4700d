"""What this machine is, as other nodes see it."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import psutil

import pipeedge
from pipeedge.base.machine import available_bytes, processors
from pipeedge.nodes.messages import Here

__all__ = ["processor_name", "reading_speed", "state_facts"]

_BLOCK_BYTES = 32 << 20
"""Bytes that each thread reads: more than caches hold."""
_READING_S = 0.5
"""Seconds of reading: several periods of a quota of processor time."""


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


def reading_speed(
    threads: int, seconds: float = _READING_S, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the bytes that so many threads together read from memory per second.

    Args:
        threads: Number of threads.
        seconds: Shortest time to measure for.
        clock: Returns the time in seconds.
    """
    blocks = [np.ones(_BLOCK_BYTES // 4, np.float32) for _ in range(threads)]
    began = clock()

    def read(block: np.ndarray[tuple[int], np.dtype[np.float32]]) -> int:
        done = 0
        while not done or clock() - began < seconds:
            block.max()
            done += block.nbytes
        return done

    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(read, blocks))
    return done / (clock() - began)


@cache
def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
