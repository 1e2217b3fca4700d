"""Ports for the programs and listeners of a test."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator


def _ports() -> Iterator[int]:
    """Yield ports from blocks of 16 that this process owns, below the ephemeral ports of the system.

    The process keeps the first port of a block bound until it ends, so that the tests of other workers and
    checkouts on this machine do not use the block.
    """
    blocks, claims = 500, []
    for offset in range(blocks):
        first = 20000 + (os.getpid() + offset) % blocks * 16
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", first))
        except OSError:
            claim.close()
            continue
        claims.append(claim)
        yield from range(first + 1, first + 16)


_free_ports = _ports()
_ports_lock = threading.Lock()


def free_port() -> int:
    """Return a port that nobody uses, and that no other test gets."""
    with _ports_lock:
        for port in _free_ports:
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return port
    raise RuntimeError("no port is free")
