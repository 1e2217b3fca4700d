"""What a test bed emulates: CLUSTER.yml. Pure but for reading the file.

    device_types: device_types.yml      # the name of such a file, or what it holds
    devices: devices.yml                # likewise
    cpu_fraction: {MB-D10: 0.25}        # processors of each host, by its type or its name
    process_MB: 512                     # memory of a program, beside what a stage may hold

Device types and devices are those that the scheduler reads, so that both see the same cluster.
``cpu_fraction`` may as well stand in the device type, where the scheduler passes over it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipeedge.base.errors import SpecError
from pipeedge.base.wording import figure
from pipeedge.base.yamlfile import Field, read_document
from pipeedge.plan.specs import (
    BYTES_PER_MB,
    DeviceType,
    device_types_of,
    devices_of,
    load_device_types,
    load_devices,
)

__all__ = ["Cluster", "EmulatedHost", "check_host_name", "load_cluster"]

_NETWORK = ipaddress.ip_network("10.213.0.0/16")
"""Nothing outside the test bed sees it."""
_LONGEST_INTERFACE = 15
"""Characters in the name of an interface, Linux' IFNAMSIZ without its end."""
_DEFAULT_PROCESS_MB = 512
_LEAST_FRACTION = 0.01
_Read = TypeVar("_Read")
_KEYS = ("device_types", "devices", "cpu_fraction", "process_MB")


@dataclass(frozen=True)
class EmulatedHost:
    """One host of a test bed."""

    name: str
    type_name: str
    address: str
    bw_bytes_per_s: float
    """Of either direction, as a connection sees it."""
    cpu_fraction: float | None
    """Processors that it has; None: whatever it gets."""
    mem_bytes: int
    """That its processes may take together."""

    def __post_init__(self) -> None:
        problem = check_host_name(self.name)
        if problem:
            raise SpecError(f"the host {self.name} {problem}")
        if not self.bw_bytes_per_s > 0:
            raise SpecError(
                f"the host {self.name} has no bandwidth; a host without a network can take no part"
            )


@dataclass(frozen=True)
class Cluster:
    """The hosts of a test bed, in the order of the file."""

    hosts: tuple[EmulatedHost, ...]

    @property
    def prefix_length(self) -> int:
        """Of the hosts' addresses."""
        return _NETWORK.prefixlen

    def check(self, *, processors: int, mem_bytes: int) -> None:
        """Whether this machine can be such a cluster.

        Raises:
            SpecError: it lacks processors or memory.
        """
        wanted = sum(host.cpu_fraction or 0.0 for host in self.hosts)
        if wanted > processors * (1 + 1e-9):
            raise SpecError(
                f"the hosts have {figure(wanted)} processors together and this machine {processors}: "
                "they would take them from one another; lower cpu_fraction"
            )
        for host in self.hosts:
            if host.mem_bytes > mem_bytes:
                raise SpecError(
                    f"the host {host.name} has {host.mem_bytes >> 20} MB of memory, more than this machine "
                    f"with {mem_bytes >> 20}; lower mem_MB of {host.type_name}"
                )


def check_host_name(name: str) -> str | None:
    """What keeps ``name`` from being the name of a host and of its interface, in words; None: nothing."""
    if len(name) > _LONGEST_INTERFACE:
        return f"has {len(name)} characters; the name of an interface has {_LONGEST_INTERFACE} at most"
    if not re.fullmatch("[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name, re.ASCII):
        return "is no host name: letters, digits, and -._ between them"
    if name in ("br0", "lo", "localhost"):
        return "is a name of the system's own"
    return None


def load_cluster(path: Path | str) -> Cluster:
    """The cluster of a file.

    Raises:
        SpecError: with file, line and key; unknown hosts or types, impossible numbers, names that are no
            names of interfaces.
    """
    document = read_document(path)
    for key, entry in document.entries().items():
        if key not in _KEYS:
            entry.fail(f"is no key of a cluster file; there are {', '.join(_KEYS)}")
    types_at, devices_at = document.at("device_types"), document.at("devices")
    types = _inline_or_file(types_at, path, load_device_types, device_types_of)
    devices = _inline_or_file(devices_at, path, load_devices, devices_of)
    _check_devices(devices_at, devices, types)
    fractions = _fractions(document.find("cpu_fraction"), devices)
    process = document.find("process_MB")
    process_bytes = (_DEFAULT_PROCESS_MB if process is None else process.number()) * BYTES_PER_MB
    hosts = []
    addresses = _NETWORK.hosts()
    for type_name, names in devices.items():
        for name in names:
            fraction = fractions.get(
                name, fractions.get(type_name, _own_fraction(types_at, type_name, types))
            )
            hosts.append(
                EmulatedHost(
                    name=name,
                    type_name=type_name,
                    address=str(next(addresses)),
                    bw_bytes_per_s=types[type_name].bw_bytes_per_s,
                    cpu_fraction=fraction,
                    mem_bytes=int(types[type_name].mem_bytes + process_bytes),
                )
            )
    if not hosts:
        devices_at.fail("names no host")
    return Cluster(tuple(hosts))


def _inline_or_file(
    entry: Field, cluster_file: Path | str, load: Callable[[Path], _Read], read: Callable[[Field], _Read]
) -> _Read:
    """What ``entry`` holds, or what the file holds that it names, beside the cluster file."""
    if entry.is_name:
        return load(Path(cluster_file).parent / entry.text())
    return read(entry)


def _check_devices(
    entry: Field, devices: Mapping[str, tuple[str, ...]], types: Mapping[str, DeviceType]
) -> None:
    hosts = 0
    for type_name, names in devices.items():
        if type_name not in types:
            entry.fail(f"{type_name} is no device type; there are {', '.join(types)}")
        if names and not types[type_name].bw_bytes_per_s > 0:
            entry.fail(f"{type_name} has a bandwidth of 0: a host without a network can take no part")
        for name in names:
            hosts += 1
            problem = check_host_name(name)
            if problem:
                entry.fail(f"{type_name}: the host {name} {problem}")
    if hosts > _NETWORK.num_addresses - 2:
        entry.fail(f"names {figure(hosts)} hosts; a test bed has addresses for {_NETWORK.num_addresses - 2}")


def _fractions(entry: Field | None, devices: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """By type or host."""
    if entry is None:
        return {}
    known = {*devices, *(name for names in devices.values() for name in names)}
    fractions = {}
    for name, value in entry.entries().items():
        if name not in known:
            value.fail("no host and no device type of this cluster has that name")
        fractions[name] = value.number(least=_LEAST_FRACTION)
    return fractions


def _own_fraction(entry: Field, type_name: str, types: Mapping[str, DeviceType]) -> float | None:
    """What the device type says itself."""
    value = types[type_name].extra.get("cpu_fraction")
    if value is None:
        return None
    if not isinstance(value, int | float) or not _LEAST_FRACTION <= value < float("inf"):
        entry.fail(
            f"{type_name}: cpu_fraction is {value}; a number of processors from {_LEAST_FRACTION} is due"
        )
    return float(value)
