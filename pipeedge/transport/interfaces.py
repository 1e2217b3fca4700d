"""Network interfaces: which exist, and which one leads to rank 0."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys

import psutil

from pipeedge.base.errors import RequestError

__all__ = [
    "choose_interface",
    "interface_addresses",
    "is_loopback",
    "link_address",
    "listen",
    "listen_everywhere",
    "use_interface",
]

_OPEN_FILES = 1 << 16
_BACKLOG = 1024
"""Connections that wait to be accepted. While there are as many, nobody else can connect."""


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """Return the IP addresses of each interface that is up, or whose state is unknown."""
    down = _interfaces_down()
    return {
        name: tuple(
            entry.address.split("%")[0]
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        )
        for name, entries in sorted(psutil.net_if_addrs().items())
        if name not in down
    }


def _interfaces_down() -> set[str]:
    """Return the interfaces that are known to be down."""
    try:
        return {name for name, state in psutil.net_if_stats().items() if not state.isup}
    except OSError:  # sandboxes and emulators may lack the system call that tells
        return set()


def choose_interface(wanted: str | None, addr: str, port: int) -> str:
    """Return the interface for the links: ``wanted``, or the one that routes to ``addr``.

    Raises:
        RequestError: The interface does not exist or has no address, or no route leads to ``addr``.
    """
    addresses = interface_addresses()
    if wanted is not None:
        if not addresses.get(wanted):
            known = ", ".join(name for name, found in addresses.items() if found)
            what = "is down or has no IP address" if wanted in psutil.net_if_addrs() else "does not exist"
            raise RequestError(f"-s/--socket-ifname {wanted}: the interface {what}; there are {known}")
        return wanted
    source = _source_address(addr, port)
    for name, found in addresses.items():
        if source in found:
            return name
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == source for entry in entries):
            raise RequestError(f"the interface {name}, which leads to --addr {addr}, is down or unplugged")
    raise RequestError(f"no interface has the address {source} that routes to {addr}; name one with -s")


def link_address(interface: str, addr: str, port: int) -> str:
    """Return the address of this machine at which other ranks reach it.

    Args:
        interface: Interface of the links, or an empty string for any.
        addr: Address of rank 0.
        port: Port of rank 0. The address of this machine on the way there is taken if it belongs to the
            interface.

    Raises:
        RequestError: The interface has no address that others could use, or no route leads to ``addr``.
    """
    towards_hub = _source_address(addr, port)
    known = interface_addresses().get(interface, ())
    if not interface or towards_hub in known:
        return towards_hub
    # The scope of a link-local address means nothing to others.
    usable = [address for address in known if not ipaddress.ip_address(address).is_link_local]
    alike = [address for address in usable if (":" in address) == (":" in towards_hub)]
    if not usable:
        raise RequestError(f"-s/--socket-ifname {interface}: the interface has no address for links")
    return (alike or usable)[0]


def use_interface(name: str) -> None:
    """Have the links that this process opens from here on use the interface ``name``.

    gloo and TensorPipe read their interface from the environment, when they connect.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = name
    os.environ["TP_SOCKET_IFNAME"] = name


def is_loopback(addr: str) -> bool:
    """Return whether only processes of this machine reach ``addr``; true if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(addr, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return True  # whoever listens there, or dials, says so
    return all(ipaddress.ip_address(str(entry[4][0]).split("%")[0]).is_loopback for entry in found)


def _source_address(addr: str, port: int) -> str:
    try:
        family, kind, _, _, address = socket.getaddrinfo(addr, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: a datagram socket only looks up the route
            return str(probe.getsockname()[0]).split("%")[0]
    except socket.gaierror as error:
        raise RequestError(f"--addr {addr}: cannot resolve this name ({error.strerror})") from error
    except OSError as error:
        raise RequestError(f"--addr {addr}: no route leads there ({error.strerror})") from error


def listen(addr: str, port: int) -> socket.socket:
    """Return a socket that listens at ``addr`` only, never at all addresses.

    A listening process needs a file descriptor for every connection, also those of strangers. The limit of
    open files is therefore raised.

    Args:
        addr: Address or name of this machine.
        port: Port, or 0 for any free one.

    Raises:
        RequestError: ``addr`` does not belong to this machine, or ``port`` is in use.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise RequestError(f"--addr {addr}: cannot resolve this name ({error.strerror})") from error
    _raise_open_files()
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if isinstance(error, PermissionError):
            raise RequestError(f"--port {port}: not permitted here; choose one above 1023") from error
        in_use = port != 0 and _is_own(str(address[0]))
        if in_use:
            raise RequestError(
                f"--port {port} is in use on {addr}: another run may still be there; choose another --port"
            ) from error
        own = ", ".join(address for found in interface_addresses().values() for address in found)
        raise RequestError(
            f"--addr {addr} is not an address of this machine, where rank 0 must listen; its addresses: {own}"
        ) from error
    return listener


def listen_everywhere(port: int, option: str) -> socket.socket:
    """Return a socket that listens at all addresses of this machine, for programs that check who calls.

    Args:
        port: Port, or 0 for any free one.
        option: Option that gives the port, for the message.

    Raises:
        RequestError: The port is in use, or not permitted.
    """
    _raise_open_files()
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
            )
        return socket.create_server(("", port), backlog=_BACKLOG)
    except OSError as error:
        raise RequestError(f"{option}: cannot listen at port {port} ({error.strerror})") from error


def _raise_open_files() -> None:
    """Raise this process's limit of open files as far as it may without privileges."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _is_own(address: str) -> bool:
    return address.startswith("127.") or any(address in found for found in interface_addresses().values())
