"""Look at the network of this machine: name, interface and address."""

from __future__ import annotations

import queue
import socket
import threading
from dataclasses import dataclass

from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name
from pipeedge.doctor.findings import Level, problem
from pipeedge.doctor.network_checks import check_addr, check_interface
from pipeedge.doctor.notes import ExaminationOver, FindingLog
from pipeedge.request.config import WorldRequest
from pipeedge.transport.interfaces import choose_interface, interface_addresses

__all__ = ["NetworkLook", "look_at_network", "own_addresses"]


@dataclass(frozen=True)
class NetworkLook:
    """How this machine reaches rank 0."""

    resolved: str
    """IP address behind ``--addr``."""
    interface: str | None
    """Interface of the links, or None if none leads to ``--addr``."""


def look_at_network(world: WorldRequest, notes: FindingLog) -> NetworkLook:
    """Look at the name of rank 0 and at the interface that leads to it.

    Raises:
        ExaminationOver: Rank 0 cannot be reached by this address.
    """
    if world.agent_store:
        notes.add(
            problem(
                "port",
                "torchrun's agent holds the port; give RANK WORLD, or use "
                f"{program_name('pipeedge-launch')} --doctor",
            )
        )
        raise ExaminationOver
    try:
        resolved = _resolve(world.addr, world.port, world.timeout_s)
    except OSError as error:
        notes.add_own(
            problem(
                "name",
                f"--addr {world.addr} cannot be resolved ({error.strerror or error}): correct it, add it to "
                "/etc/hosts, or give the IP address",
            )
        )
        raise ExaminationOver from None
    finding = check_addr(world.addr, resolved, rank=world.rank, world_size=world.size, own=own_addresses())
    notes.add_own(finding)
    if finding.level is Level.PROBLEM:
        raise ExaminationOver
    return NetworkLook(resolved, _look_at_interface(world, notes))


def _look_at_interface(world: WorldRequest, notes: FindingLog) -> str | None:
    """Return the interface of the links, or None after noting why there is none."""
    chosen = None
    with notes.recording("interface"):
        chosen = choose_interface(world.socket_ifname, world.addr, world.port)
        routed: str | None = chosen
        if world.socket_ifname is not None:
            try:
                routed = choose_interface(None, world.addr, world.port)
            except RequestError:
                routed = None
        notes.add_own(check_interface(chosen, routed, world.addr))
    return chosen


def _resolve(addr: str, port: int, timeout_s: float) -> str:
    """Return the IP address of ``addr``.

    Raises:
        OSError: It has none, or the name server does not answer in time.
    """
    answers: queue.Queue[str | OSError] = queue.Queue()

    def ask() -> None:
        try:
            address = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)[0][4]
            answers.put(str(address[0]).split("%")[0])
        except UnicodeError:
            answers.put(OSError("no host name"))
        except OSError as error:
            answers.put(error)

    # In a thread, which is left behind: the system's resolver takes no deadline.
    threading.Thread(target=ask, name="resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise OSError("no name server answers") from None
    if isinstance(answer, OSError):
        raise answer
    return answer


def own_addresses() -> list[str]:
    """Return the IP addresses of this machine."""
    return [address for found in interface_addresses().values() for address in found]
