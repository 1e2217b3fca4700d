"""Read the description of the cluster that a test bed emulates, CLUSTER.yml.

    device_types: device_types.yml      # the name of such a file, or its contents
    devices: devices.yml                # likewise
    cpu_fraction: {MB-D10: 0.25}        # processors of each host, by its type or its name
    process_MB: 512                     # memory of a program, in addition to what a stage may hold

Device types and devices are read by ``sched-pipeline``, so that the scheduler sees the same cluster.
``cpu_fraction`` may also be given in the device type, where the scheduler ignores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeedge.base.wording import figure
from pipeedge.base.yamlfile import Field, read_document
from pipeedge.plan.spec_files import read_files
from pipeedge.plan.specs import BYTES_PER_MB, DeviceType
from pipeedge.testbed.cluster import NETWORK, Cluster, EmulatedHost, check_host_name

__all__ = ["LEAST_FRACTION", "load_cluster"]

_DEFAULT_PROCESS_MB = 512
LEAST_FRACTION = 0.01
"""Smallest number of processors of a host."""
_KEYS = ("device_types", "devices", "cpu_fraction", "process_MB")


def load_cluster(path: Path | str) -> Cluster:
    """Read the cluster that a file describes.

    Raises:
        SpecError: The file has unknown hosts or types, impossible numbers, or names that cannot name an
            interface; the message gives file, line and key.
    """
    files = read_files(cluster=path)
    types, devices = files.device_types, files.devices
    document = read_document(path)
    for key, entry in document.entries().items():
        if key not in _KEYS:
            entry.fail(f"unknown key; a cluster file has {', '.join(_KEYS)}")
    types_at, devices_at = document.at("device_types"), document.at("devices")
    _check_devices(devices_at, devices, types)
    fractions = _fractions(document.find("cpu_fraction"), devices)
    process = document.find("process_MB")
    process_bytes = (_DEFAULT_PROCESS_MB if process is None else process.number()) * BYTES_PER_MB
    hosts = []
    addresses = NETWORK.hosts()
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
        devices_at.fail("lists no hosts")
    return Cluster(tuple(hosts))


def _check_devices(
    entry: Field, devices: Mapping[str, tuple[str, ...]], types: Mapping[str, DeviceType]
) -> None:
    hosts = 0
    for type_name, names in devices.items():
        if type_name not in types:
            entry.fail(f"{type_name} is not a device type; the known types are {', '.join(types)}")
        if names and not types[type_name].bw_bytes_per_s > 0:
            entry.fail(f"{type_name} has a bandwidth of 0, so no other host can reach its hosts")
        for name in names:
            hosts += 1
            problem = check_host_name(name)
            if problem:
                entry.fail(f"{type_name}: host {name} {problem}")
    if hosts > NETWORK.num_addresses - 2:
        entry.fail(f"lists {figure(hosts)} hosts; a test bed has addresses for {NETWORK.num_addresses - 2}")


def _fractions(entry: Field | None, devices: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """Return the processor fractions by device type or host."""
    if entry is None:
        return {}
    known = {*devices, *(name for names in devices.values() for name in names)}
    fractions = {}
    for name, value in entry.entries().items():
        if name not in known:
            value.fail("no host or device type of this cluster has that name")
        fractions[name] = value.number(least=LEAST_FRACTION)
    return fractions


def _own_fraction(entry: Field, type_name: str, types: Mapping[str, DeviceType]) -> float | None:
    """Return the processor fraction that the device type gives, if any."""
    value = types[type_name].extra.get("cpu_fraction")
    if value is None:
        return None
    if not isinstance(value, int | float) or not LEAST_FRACTION <= value < float("inf"):
        entry.fail(
            f"{type_name}: cpu_fraction is {value}; give a number of processors of at least {LEAST_FRACTION}"
        )
    return float(value)
