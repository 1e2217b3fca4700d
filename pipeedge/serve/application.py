"""The application: every route with its handler, behind the gate."""

from __future__ import annotations

import functools

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from pipeedge.serve.asking import Asker
from pipeedge.serve.figures import ServiceFigures
from pipeedge.serve.gate import Gate, GateLimits
from pipeedge.serve.inference import InferenceRoutes
from pipeedge.serve.pages import Pages
from pipeedge.serve.replies import HttpError, error_reply, status_of_error
from pipeedge.serve.routes import Handler, Routes
from pipeedge.serve.watching import PipelineWatch

__all__ = ["all_routes", "make_application"]


def make_application(asker: Asker, watch: PipelineWatch, limits: GateLimits) -> ASGIApp:
    """Return the application for one model.

    Args:
        asker: What asks the pipeline.
        watch: What is known of the pipeline.
        limits: Limits of requests.
    """
    figures = ServiceFigures()
    pages = Pages(asker, watch, figures, needs_key=bool(limits.keys))
    routes = all_routes(pages, Routes(asker), InferenceRoutes(asker))
    application = Starlette(routes=routes, exception_handlers={HTTPException: _refused})

    def route_of(path: str) -> str:
        for route in routes:
            if route.matches({"type": "http", "path": path, "method": "GET"})[0] is not Match.NONE:
                return route.path
        return "other"

    return Gate(application, limits, figures, route_of)


def all_routes(pages: Pages, routes: Routes, inference: InferenceRoutes) -> list[Route]:
    """Return every route with its handler."""
    model = "/v2/models/{model:path}"
    return [
        _get("/", pages.index),
        _get("/status", pages.status),
        _get("/health", pages.health),
        _get("/metrics", pages.metrics),
        _get("/docs", pages.docs),
        _get("/openapi.json", pages.openapi),
        _post("/", routes.root),
        _post("/v1/embeddings", routes.embeddings),
        _post("/embed", routes.embed),
        _post("/predict", routes.predict),
        _post("/rerank", routes.rerank),
        _post("/classify", routes.classify),
        _get("/v2", inference.server),
        _get("/v2/health/live", inference.live),
        _get("/v2/health/ready", inference.ready),
        _post(f"{model}/versions/1/infer", inference.infer),
        _post(f"{model}/infer", inference.infer),
        _get(f"{model}/ready", inference.ready),
        _get(model, inference.metadata),
    ]


def _get(path: str, handler: Handler) -> Route:
    return Route(path, _guarded(handler), methods=["GET"])


def _post(path: str, handler: Handler) -> Route:
    return Route(path, _guarded(handler), methods=["POST"])


def _guarded(handler: Handler) -> Handler:
    """Return ``handler`` with a reply for each of its failures."""

    @functools.wraps(handler)
    async def handle(request: Request) -> Response:
        try:
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
    return error_reply(request.url.path, HttpError(status, line.get(status, "the request is refused")))
