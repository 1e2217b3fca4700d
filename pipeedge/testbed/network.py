"""Set up network namespaces, virtual cables and rates with iproute2.

A host sends through ``eth0``, shaped by htb in its own namespace; the switch sends into the other end of
the cable, shaped there, so both directions have the host's bandwidth independently. The queue in front of
each is as long as a switch's: 50 ms at the rate, but at least eight of the kernel's own packets, which have
up to 64 KiB between namespaces. If the queue holds only three, TCP loses so many packets at once that it
waits for its retransmission timer (0.7 s for a frame that needs 0.46).

A packet leaves at once after a pause, and only the next one waits until that was transmitted. So a slow host
makes its packets shorter, of 1 ms or an Ethernet frame, or a frame of 64 KiB would arrive in no time.

    eth0 ── htb, the rate ──┬── 1:11  small packets, first     ── queue
                            └── 1:12  the rest                 ── queue

Small packets go first, as with the fair queues of Linux on real hosts, so that acknowledgements of incoming
data do not wait behind outgoing data. With a single queue, a slow host that forwards what it receives would
receive at two thirds of its rate.

Rates count the data of a TCP connection, as profiles and ``pipeedge-doctor`` do. The cable also carries
headers, 66 bytes for each 1448.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pipeedge.base.errors import PipeEdgeError, RequestError
from pipeedge.base.wording import figure

__all__ = [
    "BRIDGE",
    "Port",
    "change_rate",
    "check_programs",
    "cut",
    "existing_namespaces",
    "make_network",
    "remove_namespaces",
]

BRIDGE = "br0"
_PROGRAMS = ("ip", "tc")
_LIMIT_S = 60.0
_CARRIER_S = 10.0
_LOOK_AGAIN_S = 0.05
_HEADERS = 1514 / 1448
_QUEUE_S = 0.05
_LEAST_QUEUE = 8 * (64 << 10)
_SMALL_SHARE = 0.1
_LONGER_THAN_SMALL = "0xff80"
"""Bits of an IP packet's length that are zero in a small packet, of up to 127 bytes."""
_BURST_S = 0.001
"""Seconds of transmission that take no time after a pause, because timers may be late by as much."""
_FRAME = 1514
"""Bytes of an Ethernet frame, without its checksum."""
_LONGEST_PACKET = 1 << 16
"""Bytes of the longest packet that the kernel leaves whole on a cable between namespaces."""


@dataclass(frozen=True)
class Port:
    """A switch port with the host that is connected to it."""

    namespace: str
    """Network namespace of the host."""
    interface: str
    """Name of the cable's end at the switch; at the host it is ``eth0``."""
    address: str
    """Address of the host with its prefix length, ``10.213.0.1/16``."""
    bw_bytes_per_s: float | None
    """Bandwidth of each direction in bytes per second, or None for no limit."""


def check_programs() -> None:
    """Check that iproute2 is installed.

    Raises:
        RequestError: It is not.
    """
    for program in _PROGRAMS:
        if shutil.which(program) is None:
            raise RequestError(f"the test bed needs the program {program}: install iproute2")


def existing_namespaces() -> set[str]:
    """Return the names of all named network namespaces."""
    return {line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line.strip()}


def make_network(switch: str, ports: Sequence[Port]) -> None:
    """Create the namespaces of the switch and of each host, connect them and set their rates.

    The caller removes what was created, also after an error.

    Raises:
        RequestError: The kernel lacks a feature; the message says which.
        PipeEdgeError: A cable stays down.
    """
    for namespace in (switch, *(port.namespace for port in ports)):
        _need("network namespaces", ["ip", "netns", "add", namespace])
    at_switch = ["ip", "-n", switch]
    _need("bridges", [*at_switch, "link", "add", "name", BRIDGE, "type", "bridge"])
    _need("bridges", [*at_switch, "link", "set", "dev", BRIDGE, "up"])
    for port in ports:
        cable = [
            "link",
            "add",
            "name",
            port.interface,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            port.namespace,
        ]
        _need("veth pairs", [*at_switch, *cable])
        _need("bridges", [*at_switch, "link", "set", "dev", port.interface, "master", BRIDGE, "up"])
        for words in (f"addr add {port.address} dev eth0", "link set dev eth0 up", "link set dev lo up"):
            _run(["ip", "-n", port.namespace, *words.split()])
        if port.bw_bytes_per_s is not None:
            for namespace, interface in _ends(switch, port):
                _shape(namespace, interface, port.bw_bytes_per_s)
            _limit_packets(port.namespace, port.bw_bytes_per_s)
    for port in ports:
        _wait_for_carrier(port.namespace)


def remove_namespaces(namespaces: Sequence[str]) -> None:
    """Remove those namespaces that exist, and with them their cables, bridge and rates."""
    there = existing_namespaces()
    for namespace in namespaces:
        if namespace in there:
            _run(["ip", "netns", "delete", namespace])


def cut(switch: str, interface: str) -> None:
    """Unplug the cable of a host from the switch."""
    _run(["ip", "-n", switch, "link", "set", "dev", interface, "down"])


def change_rate(switch: str, port: Port) -> None:
    """Give the cable of ``port`` another rate while it carries data; what is queued stays queued.

    Connections keep the longest packets that they had when they were made.

    Raises:
        RequestError: The kernel lacks a feature; the message says which.
    """
    if port.bw_bytes_per_s is None:
        raise ValueError(f"{port.interface} has no new rate")
    for namespace, interface in _ends(switch, port):
        _set_rate("change", namespace, interface, port.bw_bytes_per_s)
    _limit_packets(port.namespace, port.bw_bytes_per_s)


def _ends(switch: str, port: Port) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return namespace and interface of both ends of a cable, each of which limits what it sends."""
    return (port.namespace, "eth0"), (switch, port.interface)


def _burst(bw_bytes_per_s: float) -> int:
    return max(1, round(_BURST_S * bw_bytes_per_s))


def _limit_packets(namespace: str, bw_bytes_per_s: float) -> None:
    """Set the longest packet of a host, by the rate of its cable."""
    longest = min(max(_FRAME, _burst(bw_bytes_per_s)), _LONGEST_PACKET)
    words = ["link", "set", "dev", "eth0", "gso_max_size", str(longest)]
    _need("gso_max_size", ["ip", "-n", namespace, *words])


def _shape(namespace: str, interface: str, bw_bytes_per_s: float) -> None:
    at = f"dev {interface}"
    root = f"qdisc add {at} root handle 1: htb default 12 r2q 1000"
    _need("tc with sch_htb", ["tc", "-n", namespace, *root.split()])
    _set_rate("add", namespace, interface, bw_bytes_per_s)
    small = f"match u16 0 {_LONGER_THAN_SMALL} at 2 flowid 1:11"
    words = f"filter add {at} parent 1: protocol ip prio 1 u32 {small}"
    _need("tc with cls_u32", ["tc", "-n", namespace, *words.split()])


def _set_rate(verb: str, namespace: str, interface: str, bw_bytes_per_s: float) -> None:
    """Add or change the classes of an interface, and their queues."""
    rate = round(8 * _HEADERS * bw_bytes_per_s)
    burst = _burst(bw_bytes_per_s)
    queue = max(_LEAST_QUEUE, round(_QUEUE_S * bw_bytes_per_s))
    of_htb = f"ceil {rate}bit burst {burst} cburst {burst} quantum 60000"
    small = round(rate * _SMALL_SHARE)
    at = f"dev {interface}"
    for module, words in (
        ("sch_htb", f"class {verb} {at} parent 1: classid 1:1 htb rate {rate}bit {of_htb}"),
        ("sch_htb", f"class {verb} {at} parent 1:1 classid 1:11 htb prio 0 rate {small}bit {of_htb}"),
        ("sch_htb", f"class {verb} {at} parent 1:1 classid 1:12 htb prio 1 rate {rate - small}bit {of_htb}"),
        ("sch_fifo", f"qdisc {verb} {at} parent 1:11 bfifo limit {queue}"),
        ("sch_fifo", f"qdisc {verb} {at} parent 1:12 bfifo limit {queue}"),
    ):
        _need(f"tc with {module}", ["tc", "-n", namespace, *words.split()])


def _wait_for_carrier(namespace: str) -> None:
    """Wait until a new cable carries data, up to a second; what is sent before is lost."""
    deadline = time.monotonic() + _CARRIER_S
    while _run(["ip", "-n", namespace, "-br", "link", "show", "eth0"]).split()[1] != "UP":
        if time.monotonic() > deadline:
            raise PipeEdgeError(f"eth0 in {namespace} did not come up within {figure(_CARRIER_S)} s")
        time.sleep(_LOOK_AGAIN_S)


def _need(feature: str, command: Sequence[str]) -> None:
    try:
        _run(command)
    except PipeEdgeError as error:
        raise RequestError(
            f"the test bed needs {feature}, which this machine does not allow: {error}"
        ) from error


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise PipeEdgeError(f"{' '.join(command)}: {said}")
    return done.stdout
