"""The application: every route with its handler, behind the gate."""

from __future__ import annotations

import functools

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from pipeedge.base.errors import InputError
from pipeedge.base.wording import excerpt
from pipeedge.observe.pipeline_state import PipelineState
from pipeedge.serve.asking import Asker
from pipeedge.serve.description import query_parameters
from pipeedge.serve.figures import ServiceFigures
from pipeedge.serve.gate import Gate, GateLimits
from pipeedge.serve.inference import InferenceRoutes
from pipeedge.serve.pages import Pages
from pipeedge.serve.replies import HttpError, error_reply, status_of_error
from pipeedge.serve.routes import Handler, Routes
from pipeedge.serve.text_asking import TextAsker
from pipeedge.serve.text_routes import TextRoutes

__all__ = ["all_routes", "make_application", "text_routes"]


def make_application(asker: Asker | TextAsker, watch: PipelineState, limits: GateLimits) -> ASGIApp:
    """Return the application for one model.

    Args:
        asker: What asks the pipeline.
        watch: What is known of the pipeline.
        limits: Limits of requests.
    """
    figures = ServiceFigures()
    pages = Pages(asker, watch, figures, needs_key=bool(limits.keys))
    if isinstance(asker, TextAsker):
        routes = text_routes(pages, TextRoutes(asker))
    else:
        routes = all_routes(pages, Routes(asker), InferenceRoutes(asker))
    application = Starlette(routes=routes, exception_handlers={HTTPException: _refused})

    def route_of(path: str) -> str:
        for route in routes:
            if route.matches({"type": "http", "path": path, "method": "GET"})[0] is not Match.NONE:
                return route.path
        return "other"

    return Gate(application, limits, figures, route_of, lambda: asker.service.queue.is_ending)


def _common_routes(pages: Pages) -> list[Route]:
    """Return the routes that encoders and decoders have, but the page."""
    return [
        _PathRoute("/status", get=pages.status),
        _PathRoute("/health", get=pages.health),
        _PathRoute("/metrics", get=pages.metrics),
        _PathRoute("/docs", get=pages.docs),
        _PathRoute("/openapi.json", get=pages.openapi),
        _PathRoute("/v1/models", get=pages.models),
        _PathRoute("/v1/models/{model:path}", get=pages.named),
    ]


def text_routes(pages: Pages, routes: TextRoutes) -> list[Route]:
    """Return every route of a decoder with its handler."""
    return [
        _PathRoute("/", get=pages.chat),
        *_common_routes(pages),
        _PathRoute("/v1/chat/completions", post=routes.chat),
        _PathRoute("/v1/completions", post=routes.completions),
        _PathRoute("/v1/responses", post=routes.responses),
    ]


def all_routes(pages: Pages, routes: Routes, inference: InferenceRoutes) -> list[Route]:
    """Return every route of an encoder with its handler."""
    model = "/v2/models/{model:path}"
    version = f"{model}/versions/1"
    return [
        _PathRoute("/", get=pages.index, post=routes.root),
        *_common_routes(pages),
        _PathRoute("/info", get=pages.info),
        _PathRoute("/v1/embeddings", post=routes.embeddings),
        _PathRoute("/v1/rerank", post=routes.rank),
        _PathRoute("/embed", post=routes.embed),
        _PathRoute("/similarity", post=routes.similarity),
        _PathRoute("/predict", post=routes.predict),
        _PathRoute("/rerank", post=routes.rerank),
        _PathRoute("/classify", post=routes.classify),
        _PathRoute("/v2", get=inference.server),
        _PathRoute("/v2/health/live", get=inference.live),
        _PathRoute("/v2/health/ready", get=inference.ready),
        _PathRoute("/v2/repository/index", post=inference.index),
        _PathRoute("/v2/models/stats", get=inference.statistics),
        _PathRoute(f"{version}/infer", post=inference.infer),
        _PathRoute(f"{version}/ready", get=inference.ready),
        _PathRoute(f"{version}/config", get=inference.config),
        _PathRoute(f"{version}/stats", get=inference.statistics),
        _PathRoute(version, get=inference.metadata),
        _PathRoute(f"{model}/infer", post=inference.infer),
        _PathRoute(f"{model}/ready", get=inference.ready),
        _PathRoute(f"{model}/config", get=inference.config),
        _PathRoute(f"{model}/stats", get=inference.statistics),
        _PathRoute(model, get=inference.metadata),
    ]


class _PathRoute(Route):
    """A path with the handler of each method. No later route takes the path, whatever the method.

    The name of a model may have slashes, so the last path above would take those before it.
    """

    def __init__(self, path: str, *, get: Handler | None = None, post: Handler | None = None) -> None:
        described = path.replace(":path", "")
        handlers = {
            method: _guarded(handler, query_parameters(method, described))
            for method, handler in (("GET", get), ("POST", post))
            if handler is not None
        }

        async def handle(request: Request) -> Response:
            return await handlers["GET" if request.method == "HEAD" else request.method](request)

        super().__init__(path, handle, methods=list(handlers))

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether the path is this one, for every method: another one is refused with those it has."""
        match, found = super().matches(scope)
        return (Match.NONE if match is Match.NONE else Match.FULL), found


def _guarded(handler: Handler, parameters: frozenset[str]) -> Handler:
    """Return ``handler`` with a reply for each of its failures, and for parameters that it does not take."""

    @functools.wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            unknown = next((name for name in request.query_params if name not in parameters), None)
            if unknown is not None:
                takes = ", ".join(sorted(parameters)) or "none"
                raise InputError(
                    f"there is no parameter {excerpt(unknown)} in this address; it takes {takes}"
                )
            return await handler(request)
        except HTTPException:
            raise
        except Exception as error:
            return error_reply(request.url.path, status_of_error(error))

    return handle


async def _refused(request: Request, error: Exception) -> Response:
    """Reply to a request that no route takes."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    line = {404: "there is no such route; GET /docs lists them", 405: "not with this method"}
    reply = error_reply(request.url.path, HttpError(status, line.get(status, "the request is refused")))
    if isinstance(error, HTTPException):
        reply.headers.update(error.headers or {})  # a 405 names the methods that the path has
    return reply
