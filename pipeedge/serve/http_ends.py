"""The ends of a pipeline that answers over HTTP: the queue of requests, with a server in front of it.

bind the port ──> ranks agree, load, connect ──> serve ──> drain ──> last replies
                                                   │
                                          SIGTERM ─┘
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from pipeedge.base.errors import RequestError
from pipeedge.data import DataEnds, Microbatch
from pipeedge.data.step_queue import StepQueue
from pipeedge.models import Model
from pipeedge.models.decoder import DecoderModel
from pipeedge.observe.pipeline_state import PipelineState
from pipeedge.request.config import RunRequest
from pipeedge.request.http_options import ServeRequest
from pipeedge.serve.queued_model import QueuedModel
from pipeedge.serve.requests import RequestQueue
from pipeedge.serve.served_text import OpenText, ServedText

if TYPE_CHECKING:  # its packages may be missing
    from pipeedge.serve.asking import ThreadedAsker
    from pipeedge.serve.http_server import HttpServer

__all__ = ["HttpEnds"]

_PACKAGES = ("starlette", "anyio", "uvicorn", "python_multipart")


class HttpEnds:
    """Opens the ends of a pipeline that answers over HTTP, and ends it.

    Args:
        warn: Called with a line for the user that ends nothing.
        open_text: Opens what a decoder needs; None if only encoders are served.
    """

    def __init__(self, warn: Callable[[str], None], open_text: OpenText | None = None) -> None:
        self._warn = warn
        self._open_text = open_text
        self._queue: RequestQueue | StepQueue | None = None

    def open(self, request: RunRequest, model: Model | DecoderModel) -> DataEnds:
        """Open the port, and what the model needs to answer.

        Raises:
            RequestError: The port cannot be opened, the keys cannot be read, or a package is missing.
        """
        settings = request.serve
        _check_packages()
        from pipeedge.serve.application import make_application
        from pipeedge.serve.asking import Asker
        from pipeedge.serve.gate import GateLimits, read_keys
        from pipeedge.serve.http_server import HttpServer, open_listener
        from pipeedge.serve.text_asking import TextAsker

        keys = read_keys(settings.api_key)
        asker: Asker | TextAsker
        if isinstance(model, Model):
            service = QueuedModel.open(request, model, max_waiting=settings.max_waiting, for_strangers=True)
            asker = Asker(service, settings.request_timeout_s)
        elif self._open_text is None:
            raise RequestError("--serve: only encoders are served here")
        else:
            text = ServedText.open(request, model, self._open_text)
            asker = TextAsker(text, settings.request_timeout_s, settings.max_waiting)
        queue = asker.service.queue
        listener = open_listener(settings.host, settings.port)
        if not keys and not settings.is_local:
            self._warn(_open_to_all(settings))
        watch = PipelineState()
        limits = GateLimits(
            settings.max_body_bytes,
            settings.request_timeout_s,
            keys,
            local_names_only=not keys and not settings.names_address,
        )
        server = HttpServer(make_application(asker, watch, limits), listener)
        self._queue = queue
        sink = _ServedSink(queue, server, asker, lambda: self._warn(f"answers at {settings.url}"))
        if isinstance(queue, RequestQueue):
            return DataEnds(queue, sink, watcher=watch)
        return DataEnds(queue, sink, watcher=watch, text=queue.state, coming_bytes=queue.coming_bytes)

    def drain(self) -> bool:
        """Answer what was accepted, refuse what comes now, and end. Also for handlers of signals.

        Returns:
            Whether anything was accepted yet; if not, there is nothing to drain.
        """
        if self._queue is None or not self._queue.started.is_set():
            return False
        # In a thread, as the interrupted one may hold the lock of the queue.
        threading.Thread(target=self._queue.drain, name="drain", daemon=True).start()
        return True


class _ServedSink:
    """The queue as a sink, with the server that fills it."""

    unfinished: Path | None = None

    def __init__(
        self,
        queue: RequestQueue | StepQueue,
        server: HttpServer,
        asker: ThreadedAsker,
        tell: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._server = server
        self._asker = asker
        self._tell = tell

    @property
    def items(self) -> int:
        """Number of items that have an answer."""
        return self._queue.items

    def add_dependencies(self, depends_on: Mapping[str, str]) -> None:
        """Do nothing: answers are not kept for a later run."""

    def __enter__(self) -> _ServedSink:
        """Begin to serve: the pipeline is ready."""
        self._queue.__enter__()
        self._server.start()
        self._tell()
        return self

    def write(self, microbatch_number: int, outputs: torch.Tensor, microbatch: Microbatch) -> None:
        """Answer the items of a microbatch."""
        self._queue.write(microbatch_number, outputs, microbatch)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Fail what has no answer, and stop when the last replies are sent."""
        self._queue.__exit__(kind, error, traceback)
        self._server.stop()
        self._asker.close()


def _open_to_all(settings: ServeRequest) -> str:
    return (
        f"answers anyone who can reach {settings.host}:{settings.port}: give --api-key FILE, or listen on "
        "the loopback"
    )


def _check_packages() -> None:
    """Refuse to serve without the packages for it.

    Raises:
        RequestError: One is missing.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"--serve needs the package {missing[0]}: pip install 'pipeedge[serve]'")
