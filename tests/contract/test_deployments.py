"""A deployment whose node is a double: when it gives up, and when it tries again."""

from __future__ import annotations

import threading
from pathlib import Path

from waiting import LIMIT_S, until

from pipeedge.base.errors import PeerFailedError, PipeEdgeError
from pipeedge.nodes.deployment import Deployment
from pipeedge.nodes.facts import state_facts
from pipeedge.nodes.messages import Here, Up
from pipeedge.nodes.peer import Peer
from pipeedge.nodes.store import NodeStore
from pipeedge.transport.authority import make_cluster_key
from pipeedge.transport.membership import Membership


class Around:
    """A node whose profiler always fails."""

    def __init__(self, directory: Path) -> None:
        self.name, self.port = "pi1", 1
        self.store = NodeStore(directory)
        self.membership = Membership.from_text(make_cluster_key(), "k")
        self.profiles = 0
        self.lines: list[str] = []

    def facts(self) -> Here:
        return state_facts(self.name, 1, "")

    def look(self) -> list[tuple[Peer, str]]:
        return []

    def profile(self, *_: object) -> object:
        self.profiles += 1
        raise PeerFailedError("the profiler ended with status 1")

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_what_never_answered_ends_with_the_reason(tmp_path: Path) -> None:
    around, over = Around(tmp_path), threading.Event()
    made = Deployment(Up("vit-digits"), around, "vit-digits on pi1", over.set)  # type: ignore[arg-type]
    news = made.listen()
    made.start()
    assert over.wait(LIMIT_S)
    while not isinstance(end := news.get(timeout=LIMIT_S), PipeEdgeError):
        pass
    assert str(end) == "the profiler ended with status 1"
    made.stop()
    assert made.is_over
    assert around.profiles == 1
    assert made.listen().get(timeout=LIMIT_S) is end  # who listens later hears it, too


def test_after_a_restart_of_the_node_it_tries_again(tmp_path: Path) -> None:
    around = Around(tmp_path)
    made = Deployment(Up("vit-digits"), around, "vit-digits on pi1", patient=True, retry_s=0.01)  # type: ignore[arg-type]
    made.start()
    until(lambda: around.profiles > 2, "attempts")
    made.stop()
    assert any("cannot go on yet" in line for line in around.lines)
