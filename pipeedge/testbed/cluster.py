"""The hosts of a test bed, and whether a machine can emulate them. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace

from pipeedge.base.errors import SpecError
from pipeedge.base.wording import figure

__all__ = ["NETWORK", "Cluster", "EmulatedHost", "check_host_name"]

NETWORK = ipaddress.ip_network("10.213.0.0/16")
"""Network of the hosts; nothing outside the test bed sees it."""
_LONGEST_INTERFACE = 15
"""Maximum length of an interface name: Linux's IFNAMSIZ without the terminating zero."""


@dataclass(frozen=True)
class EmulatedHost:
    """One host of a test bed."""

    name: str
    type_name: str
    address: str
    bw_bytes_per_s: float
    """Bandwidth of a TCP connection in each direction, bytes per second."""
    cpu_fraction: float | None
    """Number of processors that the host may use, or None for no limit."""
    mem_bytes: int
    """Memory that the host's processes may use together, in bytes."""

    def __post_init__(self) -> None:
        problem = check_host_name(self.name)
        if problem:
            raise SpecError(f"host {self.name} {problem}")
        if not self.bw_bytes_per_s > 0:
            raise SpecError(f"host {self.name} has a bandwidth of 0, so no other host can reach it")


@dataclass(frozen=True)
class Cluster:
    """The hosts of a test bed, in the order of the file."""

    hosts: tuple[EmulatedHost, ...]

    @property
    def prefix_length(self) -> int:
        """Length of the network prefix in the hosts' addresses, in bits."""
        return NETWORK.prefixlen

    def with_host(self, host: EmulatedHost) -> Cluster:
        """Return the cluster with ``host`` in place of the one of that name."""
        return replace(self, hosts=tuple(host if old.name == host.name else old for old in self.hosts))

    def check(self, *, processors: int, mem_bytes: int) -> None:
        """Check that this machine can emulate the cluster.

        Raises:
            SpecError: It lacks processors or memory.
        """
        wanted = sum(host.cpu_fraction or 0.0 for host in self.hosts)
        if wanted > processors * (1 + 1e-9):
            raise SpecError(
                f"the hosts need {figure(wanted)} processors together, but this machine has {processors}, so "
                "they would slow each other down; lower cpu_fraction"
            )
        for host in self.hosts:
            if host.mem_bytes > mem_bytes:
                raise SpecError(
                    f"host {host.name} needs {host.mem_bytes >> 20} MB of memory, but this machine has "
                    f"{mem_bytes >> 20} MB; lower mem_MB of {host.type_name}"
                )


def check_host_name(name: str) -> str | None:
    """Describe why ``name`` cannot name a host and its interface, or return None if it can."""
    if len(name) > _LONGEST_INTERFACE:
        return f"has a name of {len(name)} characters; interface names have at most {_LONGEST_INTERFACE}"
    if not re.fullmatch("[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name, re.ASCII):
        return "has an invalid name: use letters and digits, and -._ between them"
    if name in ("br0", "lo", "localhost"):
        return "has a name that the system uses itself"
    return None
