"""Replies of the server: JSON, and one line for what went wrong, in the form that each interface expects."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import msgspec
from starlette.responses import Response

from pipeedge.base.errors import InputError, PeerError, PipeEdgeError, one_line
from pipeedge.serve.requests import ExpiredError, QueueFullError

__all__ = ["HttpError", "error_content", "error_reply", "json_reply", "status_of_error"]

_KINDS = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        405: "invalid_request_error",
        408: "timeout",
        413: "invalid_request_error",
        415: "invalid_request_error",
        429: "overloaded",
        431: "invalid_request_error",
        500: "server_error",
        503: "unhealthy",
        504: "timeout",
    }
)


class HttpError(Exception):
    """A request that is refused."""

    def __init__(
        self, status: int, line: str, *, retry_after_s: int | None = None, close: bool = False
    ) -> None:
        super().__init__(line)
        self.status = status
        self.line = line
        self.retry_after_s = retry_after_s
        """Seconds after which the client may try again, or None if that is no use."""
        self.close = close
        """Whether the connection ends, because the rest of the request is not read."""


def status_of_error(error: BaseException) -> HttpError:
    """Return how a failure is answered."""
    if isinstance(error, HttpError):
        return error
    line = one_line(error)
    if isinstance(error, InputError):
        return HttpError(400, line)
    if isinstance(error, QueueFullError):
        return HttpError(429, line, retry_after_s=error.retry_after_s)
    if isinstance(error, ExpiredError):
        return HttpError(504, line)
    if isinstance(error, PeerError):
        return HttpError(503, line, retry_after_s=1)
    if isinstance(error, PipeEdgeError):
        return HttpError(500, line)
    return HttpError(500, f"internal error: {type(error).__name__}")


def json_reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return ``content`` as JSON."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_content(path: str, error: HttpError) -> dict[str, Any]:
    """Return what a reply to a request of ``path`` that failed says."""
    kind = _KINDS.get(error.status, "invalid_request_error")
    if path.startswith("/v1/"):
        return {"error": {"message": error.line, "type": kind, "param": None, "code": None}}
    return {"error": error.line, "error_type": kind}


def error_reply(path: str, error: HttpError) -> Response:
    """Return the reply to a request of ``path`` that failed."""
    content = error_content(path, error)
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.close:
        headers["connection"] = "close"
    return json_reply(content, error.status, headers)
