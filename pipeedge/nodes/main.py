"""``pipeedge node``: a machine that waits for work."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import ExitStack
from typing import NoReturn

from pipeedge.base.errors import RequestError
from pipeedge.base.guard import guard
from pipeedge.base.program import is_verbose
from pipeedge.base.streams import end, print_notice, print_result
from pipeedge.nodes.discovery import Address, Announced, Discovery, Named, cluster_label
from pipeedge.nodes.identity import own_membership, read_key
from pipeedge.nodes.inviting import invite, join, make_default_key
from pipeedge.nodes.node import Node, describe
from pipeedge.nodes.options import NodeRequest, parse_node
from pipeedge.nodes.pairing import JOIN_PORT
from pipeedge.nodes.store import NodeStore
from pipeedge.profile.network import parse_place
from pipeedge.request.environment import Environment

__all__ = ["main", "serve"]

PROGRAM = "pipeedge node"


def main() -> NoReturn:
    """Serve until SIGTERM or Ctrl-C, and end the process."""
    end(
        PROGRAM,
        guard(
            PROGRAM,
            lambda: serve(parse_node(sys.argv[1:], Environment.read())),
            verbose=is_verbose(sys.argv),
        ),
    )


class _Both:
    """Nodes that the user names, and those that are announced."""

    def __init__(self, named: Named, announced: Announced) -> None:
        self._parts: tuple[Discovery, ...] = (named, announced)

    def places(self) -> tuple[Address, ...]:
        """Return the addresses at which nodes may be now."""
        return tuple(dict.fromkeys(place for part in self._parts for place in part.places()))


def serve(request: NodeRequest) -> None:
    """Serve until a signal comes.

    Raises:
        RequestError: The key, the port or the directory cannot be used.
    """
    if request.invite:
        make_default_key(request.key, print_notice)
    if request.join is not None:
        join(request.join, request.key, request.name, request.at, print_notice)
    key = read_key(request.key)
    store = NodeStore(request.directory.expanduser())
    own = own_membership(key, store, request.name)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with ExitStack() as stack:
        named = Named(map(parse_place, request.nodes))

        def discover(port: int) -> Discovery:
            if not request.announces:
                return named
            try:
                announced = stack.enter_context(Announced(cluster_label(own.trusted), port))
            except RequestError as error:
                if not request.nodes:
                    raise
                print_notice(f"finding only the nodes that --nodes names ({error})")
                return named
            return _Both(named, announced)

        node = Node(own, store, discover, port=request.port, say=print_notice)
        stack.callback(node.close)
        print_notice(describe(node.facts()))
        print_notice(f"{node.name} waits for work at port {node.port} (cluster {own.fingerprint})")
        if request.invite:
            threading.Thread(target=_invite, args=(request,), name="invite", daemon=True).start()
        ended.wait()
        print_notice(f"{node.name} ends")


def _invite(request: NodeRequest) -> None:
    status = guard(
        PROGRAM,
        lambda: invite(request.key, request.invite, JOIN_PORT, print_notice, print_result),
        verbose=False,
    )
    del status  # the node goes on: 'pipeedge key' prints another code


if __name__ == "__main__":
    main()
