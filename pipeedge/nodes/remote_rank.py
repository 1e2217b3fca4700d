"""A rank on another node, as the supervisor of a run sees it: a process that says lines, and ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pipeedge.base.errors import EXIT_PEER, PipeEdgeError, exit_code, one_line
from pipeedge.base.wording import printable
from pipeedge.launch.supervisor import Forward, RankExit
from pipeedge.nodes.messages import Ended, News, Said, StartRank
from pipeedge.nodes.talk import Talk

__all__ = ["RemoteRank"]


class RemoteRank:
    """Has a node run a rank. The rank lives as long as the connection to the node.

    Args:
        dial: Connects to the node.
        request: The rank.
        forward: Takes its lines.
        tell: Takes what the node fetches for it.
        ended: Called once it has ended, also if it could not be started.
    """

    def __init__(
        self,
        dial: Callable[[], Talk],
        request: StartRank,
        forward: Forward,
        tell: Callable[[News], None],
        ended: Callable[[RankExit], None],
    ) -> None:
        self._dial = dial
        self._request = request
        self._forward = forward
        self._tell = tell
        self._ended = ended
        self._lock = threading.Lock()
        self._talk: Talk | None = None
        self._is_over = False
        threading.Thread(target=self._run, name=f"rank {request.rank}", daemon=True).start()

    def ask_to_end(self, number: int) -> None:
        """Let the rank end; its last lines still come."""
        del number  # the node chooses the signal
        with self._lock:
            self._is_over = True
            if self._talk is not None:
                self._talk.finish()

    def kill(self) -> None:
        """Give up the connection, with which the node ends the rank."""
        with self._lock:
            self._is_over = True
            if self._talk is not None:
                self._talk.hang_up()

    def _run(self) -> None:
        rank, code = self._request.rank, EXIT_PEER
        try:
            with self._dial() as talk:
                with self._lock:
                    if self._is_over:
                        return
                    self._talk = talk
                talk.send(self._request)
                code = self._follow(talk)
        except PipeEdgeError as error:
            code = exit_code(error)
            if not self._is_over:
                self._forward(rank, f"{printable(one_line(error))}\n", True)
        finally:
            with self._lock:
                self._talk = None
            self._ended(RankExit(rank, code))

    def _follow(self, talk: Talk) -> int:
        while True:
            message = talk.receive()
            if isinstance(message, Said):
                self._forward(self._request.rank, message.text, message.error)
            elif isinstance(message, News):
                self._tell(message)
            elif isinstance(message, Ended):
                return message.code
