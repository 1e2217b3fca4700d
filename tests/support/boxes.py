"""Nodes in this process, on the loopback, with a cluster's key of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pipeedge.nodes.discovery import Named
from pipeedge.nodes.identity import own_membership
from pipeedge.nodes.node import Node
from pipeedge.nodes.store import NodeStore
from pipeedge.transport.authority import Authority, make_cluster_key, make_node_key
from pipeedge.transport.membership import Membership

CLUSTER = Membership.from_text(make_cluster_key(), "--key cluster.pem")
AUTHORITY = Authority.of(CLUSTER)
assert AUTHORITY is not None


class Box:
    """A node with a directory of its own, and what it has said."""

    def __init__(self, name: str, directory: Path, others: Callable[[], list[int]]) -> None:
        self.lines: list[str] = []
        self.store = NodeStore(directory)
        self.membership = own_membership(CLUSTER, self.store, name)
        places = Named([])
        places.places = lambda: tuple(("127.0.0.1", port) for port in others())  # type: ignore[method-assign]
        self.node = Node(self.membership, self.store, lambda port: places, port=0, say=self.lines.append)
        self.address = ("127.0.0.1", self.node.port)

    def said(self, part: str) -> bool:
        return any(part in line for line in self.lines)


@contextmanager
def boxes(directory: Path) -> Iterator[Callable[[str], Box]]:
    """Yield what starts a node by its name; each finds all others."""
    made: list[Box] = []
    with ExitStack() as stack:

        def make(name: str) -> Box:
            box = Box(name, directory / name, lambda: [each.node.port for each in made])
            stack.callback(box.node.close)
            made.append(box)
            return box

        yield make


def joined(name: str) -> Membership:
    private, public = make_node_key()
    return Membership.from_text(
        f"{private}\n{AUTHORITY.sign(name, public)}\n{CLUSTER.certificate}", f"the key of {name}"
    )
