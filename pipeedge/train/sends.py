"""Send the tensors of one batch, and release each as soon as it has arrived.

    post ──> queue ──> [wait for the oldest, release it]

gloo keeps a tensor until its send has been waited for, and cannot tell whether the wait would be long.
torch's runtime waits at the end of the batch; until then, every gradient sent to the previous stage would
stay in memory.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from types import TracebackType

import torch.distributed as dist

__all__ = ["Sends"]


class Sends:
    """A context manager that waits in a thread for posted sends, and exits when all have arrived.

    After an error it does not wait.
    """

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[dist.Work | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        # A daemon thread, because a wait in gloo cannot be aborted and must not keep a failed process alive.
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
        """Start sending."""
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
