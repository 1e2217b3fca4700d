"""Create hosts with networks of their own, for tests that cut cables, like the test bed without limits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeedge.base.errors import PipeEdgeError
from pipeedge.testbed import network

_CLONE_NEWNET = 0x40000000
"""Constant of Linux's sched.h."""


class Network:
    """Hosts in network namespaces, joined by a switch; needs root."""

    def __init__(self, name: str, hosts: int) -> None:
        self._switch = f"{name}-switch"
        self._ports = [
            network.Port(f"{name}-{host}", f"host{host}", f"10.213.7.{host + 1}/24", None)
            for host in range(hosts)
        ]

    def __enter__(self) -> Network:
        try:
            network.make_network(self._switch, self._ports)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        network.remove_namespaces([self._switch, *(port.namespace for port in self._ports)])

    def space(self, host: int) -> str:
        return self._ports[host].namespace

    def address(self, host: int) -> str:
        return self._ports[host].address.partition("/")[0]

    def cut(self, host: int) -> None:
        """Pull the cable of ``host``."""
        network.cut(self._switch, self._ports[host].interface)

    def black_hole(self, host: int, other: int) -> None:
        """Silently drop everything that ``host`` sends to ``other``, by a wrong hardware address."""
        nobody = ("lladdr", "02:00:00:00:00:fe", "dev", "eth0", "nud", "permanent")
        command = ["ip", "-n", self.space(host), "neigh", "replace", self.address(other), *nobody]
        subprocess.run(command, check=True, capture_output=True, timeout=20)


def enter(space: str) -> None:
    """Move this process, which has one thread, into a network namespace."""
    with Path("/run/netns", space).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {space}")


def make_network(name: str, hosts: int, stack: contextlib.ExitStack) -> Network:
    """Create a network for the rest of ``stack``, or skip the test."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        return stack.enter_context(Network(f"{name}{os.getpid()}", hosts))
    except PipeEdgeError as error:
        pytest.skip(f"no network namespaces here: {error}")
