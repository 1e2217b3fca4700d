"""The key of this node: from the cluster's, which signs one for it, or from its own file."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path

from pipeedge.base.errors import RequestError
from pipeedge.base.files import write_secret
from pipeedge.nodes.store import NodeStore
from pipeedge.request.files import STANDARD_INPUT
from pipeedge.transport.authority import Authority, make_node_key, name_in
from pipeedge.transport.membership import Membership

__all__ = ["default_key", "host_name", "own_membership", "read_key"]


def default_key() -> Path:
    """Return the path of the key where none is named."""
    return Path("~/.config/pipeedge/cluster.pem").expanduser()


def host_name() -> str:
    """Return the name of this machine, as a node may be called."""
    plain = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().partition(".")[0]).strip("-")
    return plain or "node"


def read_key(path: Path | None) -> Membership:
    """Read the key of this cluster, or of a node of it.

    Args:
        path: The file, or None for the default one.

    Raises:
        RequestError: It is missing or cannot be used.
    """
    path = default_key() if path is None else path
    if path == STANDARD_INPUT:
        raise RequestError("--key -: a node reads its key again after a restart; name a file")
    if not path.exists():
        raise RequestError(
            f"{path}: no key yet: 'pipeedge key' makes one for a new cluster, and 'pipeedge join CODE' joins "
            "that of another machine"
        )
    return Membership.from_file(path)


def own_membership(key: Membership, store: NodeStore, name: str | None) -> Membership:
    """Return what this node presents: its own key, signed by the cluster's.

    Args:
        key: Key that the user has named.
        store: Where the key of this node is kept, if the cluster's signs it here.
        name: Name that the user wants, or None for that of the machine.

    Raises:
        RequestError: The key cannot sign, or is that of a node of another name.
    """
    authority = Authority.of(key)
    if authority is None:
        certified = name_in(key.certificate)[0]
        if name not in (None, certified):
            raise RequestError(
                f"--name {name}: {key.source} is the key of {certified}: leave out --name, or join again"
            )
        return key
    wanted = host_name() if name is None else name
    if store.own_key.exists():
        found = Membership.from_file(store.own_key)
        if found.trusted == key.trusted and name_in(found.certificate)[0] == wanted:
            return replace(found, source=key.source)
        store.own_key.unlink()
    private, public = make_node_key()
    text = f"{private}\n{authority.sign(wanted, public)}\n{key.certificate}\n"
    write_secret(store.own_key, text, "--directory")
    return Membership.from_text(text, key.source)
