"""Hosts that are far from each other, on one machine: namespaces whose packets wait on their way. Needs root.

    10.97.0.1 ──tun──> ┐                          ┌ ──tun──> 10.97.0.1
    10.97.0.2 ──tun──> ├ a queue of packets ─────>┤ ──tun──> 10.97.0.2
    10.97.0.3 ──tun──> ┘   each for so long       └ ──tun──> 10.97.0.3

The kernel's netem does the same, where it is built in. Everything else is the kernel's: TCP, its buffers and
its acknowledgements.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import selectors
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["DistantHosts", "distant_hosts"]

_NETWORK = "10.97.0"
_SET_INTERFACE = 0x400454CA
_TUN_WITHOUT_HEAD = 0x1001
_NEW_NETWORK = 0x40000000


class DistantHosts:
    """Hosts by their addresses.

    Args:
        names: Names of the namespaces.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = {f"{_NETWORK}.{number}": name for number, name in enumerate(names, 1)}

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """Return the words that run a command on a host."""
        return ["ip", "netns", "exec", self.names[host], *words]


@contextlib.contextmanager
def distant_hosts(count: int, one_way_s: float) -> Iterator[DistantHosts]:
    """Yield hosts whose packets need so long to each other."""
    hosts = DistantHosts([f"distant{os.getpid()}-{number}" for number in range(count)])
    with contextlib.ExitStack() as stack:
        tunnels = {}
        for address, name in hosts.names.items():
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
            tunnels[address] = _open_tunnel(name)
            stack.callback(os.close, tunnels[address])
            for words in (
                ("address", "add", f"{address}/24", "dev", "far"),
                ("link", "set", "far", "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-n", name, *words)
        over = threading.Event()
        relay = threading.Thread(target=_relay, args=(tunnels, one_way_s, over))
        relay.start()
        stack.callback(relay.join)
        stack.callback(over.set)
        yield hosts


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _open_tunnel(name: str) -> int:
    """Return the end of a new interface ``far`` of a namespace, whose packets are read and written."""
    found: list[int] = []

    def enter_and_open() -> None:
        # Only this thread enters the namespace.
        with Path(f"/run/netns/{name}").open() as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter {name}")
        tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tunnel, _SET_INTERFACE, struct.pack("16sH", b"far", _TUN_WITHOUT_HEAD))
        found.append(tunnel)

    thread = threading.Thread(target=enter_and_open)
    thread.start()
    thread.join()
    if not found:
        raise SystemExit("streams: distant hosts need root and /dev/net/tun")
    return found[0]


def _relay(tunnels: dict[str, int], delay_s: float, over: threading.Event) -> None:
    """Pass packets on until all is over."""
    ends = {bytes(map(int, address.split("."))): tunnel for address, tunnel in tunnels.items()}
    waiting: deque[tuple[float, int, bytes]] = deque()
    with selectors.DefaultSelector() as selector:
        for tunnel in tunnels.values():
            selector.register(tunnel, selectors.EVENT_READ)
        while not over.is_set():
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, target, packet = waiting.popleft()
                with contextlib.suppress(OSError):
                    os.write(target, packet)
            patience = max(0.0, waiting[0][0] - now) if waiting else 0.1
            for key, _ in selector.select(patience):
                with contextlib.suppress(BlockingIOError):
                    packet = os.read(key.fd, 1 << 16)
                    target = ends.get(packet[16:20])
                    if packet[0] >> 4 == 4 and target is not None:
                        waiting.append((time.monotonic() + delay_s, target, packet))
