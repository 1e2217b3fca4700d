"""Judge how a rank reaches rank 0: observations in, findings out. Pure."""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Sequence

from pipeedge.base.errors import EXIT_PEER
from pipeedge.base.wording import figure
from pipeedge.doctor.findings import Finding, ok, problem, warning

__all__ = ["check_addr", "check_interface", "diagnose_dial"]

_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}


def check_addr(addr: str, resolved: str, *, rank: int, world_size: int, own: Sequence[str]) -> Finding:
    """Check that ``--addr`` names rank 0's machine.

    Args:
        addr: Address as the user gave it.
        resolved: IP address to which this rank resolves it.
        rank: This rank.
        world_size: Number of ranks.
        own: IP addresses of this machine.
    """
    is_loopback = ipaddress.ip_address(resolved).is_loopback
    said = addr if addr == resolved else f"{addr} is {resolved}"
    by_name = addr not in (resolved, "localhost")
    if is_loopback and world_size > 1 and by_name:
        return warning(
            "name",
            f"--addr {said} here, an address that other machines cannot reach: "
            "give rank 0's network address, or correct /etc/hosts",
        )
    if rank == 0 and resolved not in own and not is_loopback:
        return problem(
            "name",
            f"--addr {said}, which is not an address of this machine, where rank 0 must listen; "
            f"its addresses: {', '.join(address for address in own if _is_reachable(address)) or 'none'}",
        )
    return ok("name", f"--addr {said}")


def _is_reachable(address: str) -> bool:
    """Return whether other machines may reach ``address`` without naming an interface."""
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local)


def check_interface(chosen: str, routed: str | None, addr: str) -> Finding:
    """Check that the links use the interface that leads to ``--addr``.

    Args:
        chosen: Interface of the links.
        routed: Interface that routes to ``--addr``, or None if there is none.
        addr: Address as the user gave it.
    """
    if routed is not None and routed != chosen:
        return warning(
            "interface",
            f"links go over {chosen}, but {routed} leads to --addr {addr}: leave out -s unless this is "
            "intended",
        )
    return ok("interface", f"links go over {chosen}, which leads to --addr {addr}")


def diagnose_dial(
    addr: str, port: int, cause: OSError | None, *, resolved: str, timeout_s: float, own: Sequence[str]
) -> Finding:
    """Explain why rank 0 could not be reached.

    Args:
        addr: Address as the user gave it.
        port: Port on which rank 0 should listen.
        cause: Error of the last attempt to connect, or None if another program listens there.
        resolved: IP address of ``addr``.
        timeout_s: Seconds for which connecting was retried.
        own: IP addresses of this machine.
    """
    where = f"{addr}:{port}" if addr == resolved else f"{addr}:{port} ({resolved})"
    if isinstance(cause, ConnectionRefusedError):
        if ipaddress.ip_address(resolved).is_loopback or resolved in own:
            hint = "start it; if it runs on another machine, give that machine's address as --addr"
        else:
            hint = "start it there, with the same --addr and --port; if it runs, read its output"
        return problem(
            "port",
            f"the machine at {where} is up, but rank 0 did not listen there for {figure(timeout_s)} "
            f"s: {hint}",
            EXIT_PEER,
        )
    if isinstance(cause, TimeoutError):
        return problem(
            "port",
            f"no answer from {where}: a firewall drops the packets (open TCP port {port} on rank 0's "
            "machine), or no machine has this address",
            EXIT_PEER,
        )
    if cause is not None and cause.errno in _UNREACHABLE:
        return problem(
            "port",
            f"{where} cannot be reached ({cause.strerror}): the machine is off, or there is no route to its "
            "network; try ping",
            EXIT_PEER,
        )
    why = "" if cause is None else f" ({cause.strerror or cause})"
    return problem("port", f"no connection to rank 0 at {where}{why}: check --addr and --port", EXIT_PEER)
