"""Sends of one batch, whose tensors are let go of when they have arrived.

    post ──> queue ──> [wait for the oldest, forget it]

gloo keeps a tensor until somebody has waited for its send, and whether that would take long cannot be asked.
torch's runtime waits at the end of the batch; until then every gradient would be here that went to the stage
before.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from types import TracebackType

import torch.distributed as dist

__all__ = ["Sends"]


class Sends:
    """A context manager with a thread that waits for what was posted; without an error, it ends when all
    has arrived."""

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[dist.Work | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        # A daemon: a wait in gloo cannot be ended, and must not keep a process that has failed from ending.
        self._thread = threading.Thread(target=self._wait, name="sends", daemon=True)

    def __enter__(self) -> Sends:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._posted.put(None)
        if kind is not None:
            return
        self._thread.join()
        if self._error is not None:
            raise self._error

    def post(self, operations: Sequence[dist.P2POp]) -> None:
        """Begin to send."""
        for operation in operations:
            work = dist.isend(operation.tensor, operation.peer, operation.group, operation.tag)
            if work is not None:
                self._posted.put(work)

    def _wait(self) -> None:
        while (work := self._posted.get()) is not None:
            try:
                if self._error is None:
                    work.wait()
            except Exception as error:  # raised again where the batch ends
                self._error = error
            del work
