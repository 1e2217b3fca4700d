"""Find the nodes of a cluster: those that are named, and those that announce themselves by mDNS.

    named       pi1, pi2:29600, [fd00::2]:29600
    announced   a3f0...-1b2c._pipeedge._tcp.local.     in one network, by zeroconf

An announcement begins with a digest of the cluster's certificate. Nodes of the cluster know it; a stranger
learns that there are nodes, at which address and port, and neither their names nor whose they are.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import socket
import ssl
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol, TypeAlias

from pipeedge.base.errors import RequestError
from pipeedge.transport.interfaces import interface_addresses

__all__ = ["JOINING", "NODES", "Address", "Announced", "Discovery", "Named", "cluster_label", "code_label"]

Address: TypeAlias = tuple[str, int]
"""Host and port."""
NODES, JOINING = "_pipeedge._tcp.local.", "_pipeedge-join._tcp.local."
"""Types of the announced services: nodes, and holders of a code that wait for one to join."""
_LABEL_LETTERS = 20


class Discovery(Protocol):
    """What knows where nodes may be."""

    def places(self) -> tuple[Address, ...]:
        """Return the addresses at which nodes may be now."""


class Named:
    """Nodes that the user names.

    Args:
        places: Their addresses.
    """

    def __init__(self, places: Iterable[Address]) -> None:
        self._places = tuple(places)

    def places(self) -> tuple[Address, ...]:
        """Return the addresses."""
        return self._places


class Announced:
    """Announces this node, if it has a port, and listens for the others of its cluster, by mDNS.

    Args:
        label: Beginning of the names of the cluster's announcements.
        port: Port of this node, or None to announce nothing.
        kind: Type of the service.
        addresses: Addresses of this node; those of its interfaces but the loopback, if None.

    Raises:
        RequestError: Zeroconf is not installed, or the network allows no announcements.
    """

    def __init__(
        self,
        label: str,
        port: int | None,
        kind: str = NODES,
        addresses: Iterable[str] | None = None,
    ) -> None:
        try:
            from zeroconf import ServiceBrowser, ServiceInfo, Zeroconf
        except ImportError as error:
            raise RequestError(
                "finding nodes needs the package zeroconf: pip install 'pipeedge[nodes]', or name them with "
                "--nodes"
            ) from error
        self._label = label
        self._lock = threading.Lock()
        self._found: dict[str, tuple[Address, ...]] = {}
        self._changed = threading.Event()
        try:
            self._zeroconf = Zeroconf()
        except OSError as error:
            raise RequestError(
                f"nodes cannot be found in this network ({error.strerror or error}): name them with --nodes"
            ) from error
        self.own = ""
        """Name of the own announcement, or empty."""
        if port is not None:
            self.own = f"{label}-{secrets.token_hex(4)}.{kind}"
            usable = _own_addresses() if addresses is None else list(addresses)
            packed = [ipaddress.ip_address(each).packed for each in usable]
            info = ServiceInfo(
                kind, self.own, port=port, addresses=packed, server=f"{self.own.partition('.')[0]}.local."
            )
            self._zeroconf.register_service(info)
        listener: Any = (
            self  # has its methods, but not its class, which would need zeroconf to define this one
        )
        self._browser = ServiceBrowser(self._zeroconf, kind, listener=listener)

    def __enter__(self) -> Announced:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def places(self) -> tuple[Address, ...]:
        """Return the addresses of the others that are announced now."""
        with self._lock:
            return tuple(dict.fromkeys(place for each in self._found.values() for place in each))

    def wait(self, seconds: float) -> tuple[Address, ...]:
        """Wait until somebody is announced, for some seconds at most, and return the addresses."""
        self._changed.wait(seconds)
        return self.places()

    def close(self) -> None:
        """Take the announcement back."""
        self._zeroconf.close()

    # -- called by zeroconf --------------------------------------------------------------------------

    def add_service(self, zeroconf: Any, kind: str, name: str) -> None:
        """Take a service that is announced."""
        if not name.startswith(f"{self._label}-") or name == self.own:
            return
        info = zeroconf.get_service_info(kind, name)
        if info is not None and info.port:
            with self._lock:
                self._found[name] = tuple((each, info.port) for each in info.parsed_addresses())
            self._changed.set()

    update_service = add_service

    def remove_service(self, zeroconf: Any, kind: str, name: str) -> None:
        """Forget a service that was taken back."""
        with self._lock:
            self._found.pop(name, None)


def cluster_label(certificate: str) -> str:
    """Return the beginning of the names of a cluster's announcements.

    Args:
        certificate: Certificate of the cluster, as PEM.
    """
    return _label("nodes", ssl.PEM_cert_to_DER_cert(certificate))


def code_label(code: str) -> str:
    """Return the beginning of the announcement of a code's holder, from the first group of the code."""
    return _label("code", code.partition("-")[0].encode())


def _label(purpose: str, data: bytes) -> str:
    return hashlib.sha256(b"pipeedge " + purpose.encode() + b"\0" + data).hexdigest()[:_LABEL_LETTERS]


def _own_addresses() -> list[str]:
    found = [address for each in interface_addresses().values() for address in each]
    usable = [each for each in found if not ipaddress.ip_address(each).is_loopback]
    plain = [each for each in usable if not ipaddress.ip_address(each).is_link_local]
    return plain or usable or [socket.gethostbyname("localhost")]
