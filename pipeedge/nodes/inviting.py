"""Let machines join the cluster by a code, and join one by it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeedge.base.errors import PeerFailedError, PipeEdgeError, RequestError
from pipeedge.base.files import write_secret
from pipeedge.base.wording import printable
from pipeedge.nodes.discovery import JOINING, Announced, code_label
from pipeedge.nodes.identity import default_key, host_name, read_key
from pipeedge.nodes.pairing import CODE_S, JOIN_PORT, host_one, join_at, new_code, read_code
from pipeedge.profile.network import DEFAULT_PORT, parse_place
from pipeedge.transport.authority import Authority, make_cluster_key, make_node_key, name_in
from pipeedge.transport.interfaces import listen_everywhere

__all__ = ["invite", "join", "make_default_key"]

_FIND_S = 10.0
"""Seconds within which the holder of a code must be found in the network."""

Tell = Callable[[str], None]


def make_default_key(path: Path | None, tell: Tell) -> None:
    """Make the key of a new cluster, unless there is one.

    Args:
        path: File that the user has named, or None for the default one.
        tell: Called with a line about it.

    Raises:
        RequestError: It cannot be written.
    """
    path = default_key() if path is None else path
    if not path.exists():
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_secret(path, make_cluster_key(), "--key")
        tell(f"{printable(path)}: a new key, for a new cluster")


def invite(path: Path | None, count: int, port: int, tell: Tell, show: Tell) -> None:
    """Print a code, and let a machine join with it; ``count`` times.

    Args:
        path: Key of the cluster, or None for the default one.
        count: Number of machines.
        port: Port at which they join.
        tell: Called with lines about what happens.
        show: Called with each code, in the words that are typed on the other machine.

    Raises:
        PipeEdgeError: The key is that of a node, or nobody has joined in time.
    """
    key = read_key(path)
    authority = Authority.of(key)
    if authority is None:
        raise RequestError(
            f"{key.source} is the key of {name_in(key.certificate)[0]}: only the machine that has made the "
            "cluster's key lets others join"
        )
    with listen_everywhere(port, "--port") as listener:
        for _ in range(count):
            code = new_code()
            with _announced(code, port):
                show(f"pipeedge join {code}")
                tell(f"valid for one machine, {CODE_S / 60:g} minutes and three tries; waiting")
                tell(f"{host_one(listener, code, authority, tell)} has joined")


@contextlib.contextmanager
def _announced(code: str, port: int) -> Iterator[None]:
    """Announce the holder of a code, where the network allows it: others can still name this machine."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(PipeEdgeError):
            stack.enter_context(Announced(code_label(code), port, JOINING))
        yield


def join(code: str, path: Path | None, name: str | None, at: str | None, tell: Tell) -> Path:
    """Join the cluster whose holder has printed a code, and return the file with the key of this node.

    Args:
        code: The code, as it was typed.
        path: New file for the key, or None for the default one.
        name: Name of this node, or None for that of the machine.
        at: Machine that has printed the code, or None to look for it in the network.
        tell: Called with lines about what happens.

    Raises:
        PipeEdgeError: The code is wrong, or nobody has it.
    """
    path = default_key() if path is None else path
    if path.exists():
        raise RequestError(
            f"--key {path}: exists already, and is not replaced: this machine has joined a cluster; name "
            "another file to join another"
        )
    code = read_code(code)
    key = make_node_key()
    wanted = host_name() if name is None else name
    for address in _holders(code, at):
        try:
            member = join_at(address, code, wanted, key)
        except PeerFailedError as error:
            failure: PipeEdgeError = error
            continue
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_secret(path, member.to_text(), "--key")
        tell(f"{printable(path)}: the key of {wanted}, which has joined the cluster {member.fingerprint}")
        return path
    raise failure


def _holders(code: str, at: str | None) -> tuple[tuple[str, int], ...]:
    """Return where the holder of a code may be.

    Raises:
        PeerFailedError: It was not found in the network.
    """
    if at is not None:
        host, port = parse_place(at)
        return ((host, JOIN_PORT if port == DEFAULT_PORT and ":" not in at else port),)
    with Announced(code_label(code), None, JOINING) as network:
        found = network.wait(_FIND_S)
    if not found:
        raise PeerFailedError(
            "nobody in this network has that code: is it typed as printed, and still valid? In another "
            "network, name the machine with --at HOST"
        )
    return found
