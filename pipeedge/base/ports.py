"""Ports for ranks that one program starts on this machine."""

from __future__ import annotations

import errno
import random
import socket

from pipeedge.base.errors import RequestError

__all__ = ["free_port"]

_PORTS = range(28672, 32768)
"""Ports below the ephemeral ones of Linux, macOS and Windows."""


def free_port(addr: str) -> int:
    """Return a port that is free at ``addr`` now; rank 0 reports it if another process takes it first.

    It is not an ephemeral one, which the system could give to any connection before rank 0 listens.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(addr, 0, type=socket.SOCK_STREAM)[0]
        for port in random.SystemRandom().sample(_PORTS, k=len(_PORTS)):
            with socket.socket(family, kind) as probe:
                try:
                    probe.bind((address[0], port, *address[2:]))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    continue
                return port
    except OSError as error:
        raise RequestError(
            f"--addr {addr}: not an address of this machine, where --local starts all ranks "
            f"({error.strerror})"
        ) from error
    raise RequestError(f"all ports from {_PORTS[0]} to {_PORTS[-1]} are in use: name another with --port")
