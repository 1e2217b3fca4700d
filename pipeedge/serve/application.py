"""The application: every route with its handler, behind the gate."""

from __future__ import annotations

import dataclasses
import functools
import secrets
from importlib.resources import files
from typing import Any

import jinja2
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

import pipeedge
from pipeedge.serve import bodies
from pipeedge.serve.asking import Asker
from pipeedge.serve.figures import ServiceFigures
from pipeedge.serve.gate import Gate, GateLimits
from pipeedge.serve.inference import InferenceRoutes
from pipeedge.serve.replies import HttpError, error_reply, json_reply, status_of_error
from pipeedge.serve.routes import Handler, Routes
from pipeedge.serve.watching import PipelineWatch

__all__ = ["make_application"]

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)


def make_application(asker: Asker, watch: PipelineWatch, limits: GateLimits) -> ASGIApp:
    """Return the application for one model.

    Args:
        asker: What asks the pipeline.
        watch: What is known of the pipeline.
        limits: Limits of requests.
    """
    figures = ServiceFigures()
    pages = _Pages(asker, watch, figures, needs_key=bool(limits.keys))
    routes = _table(pages, Routes(asker), InferenceRoutes(asker))
    pages.describe(routes)
    application = Starlette(routes=routes, exception_handlers={HTTPException: _refused})

    def route_of(path: str) -> str:
        for route in routes:
            if route.matches({"type": "http", "path": path, "method": "GET"})[0] is not Match.NONE:
                return route.path
        return "other"

    return Gate(application, limits, figures, route_of)


def _table(pages: _Pages, routes: Routes, inference: InferenceRoutes) -> list[Route]:
    model = "/v2/models/{model:path}"
    return [
        _get("/", pages.index),
        _get("/status", pages.status),
        _get("/health", pages.health),
        _get("/metrics", pages.metrics),
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
    line = {404: "there is no such route; GET /openapi.json lists them", 405: "not with this method"}
    return error_reply(request.url.path, HttpError(status, line.get(status, "the request is refused")))


_BODIES: dict[str, type] = {
    "/": bodies.RootBody,
    "/v1/embeddings": bodies.EmbeddingsBody,
    "/embed": bodies.EmbedBody,
    "/predict": bodies.PredictBody,
    "/rerank": bodies.RerankBody,
    "/classify": bodies.ClassifyBody,
    "/v2/models/{model:path}/infer": bodies.InferBody,
}


class _Pages:
    """Handlers that tell about the service itself."""

    def __init__(
        self, asker: Asker, watch: PipelineWatch, figures: ServiceFigures, *, needs_key: bool
    ) -> None:
        self._asker = asker
        self._watch = watch
        self._figures = figures
        self._needs_key = needs_key
        self._described: dict[str, Any] = {}
        text = (files("pipeedge") / "assets" / "serve" / "index.html").read_text("utf-8")
        self._page = jinja2.Environment(autoescape=True).from_string(text)

    async def index(self, request: Request) -> Response:
        """Answer ``GET /``: a page for people."""
        nonce, model = secrets.token_urlsafe(16), self._asker.service.model
        page = self._page.render(
            model=model.name, takes_text=model.takes_text, needs_key=self._needs_key, nonce=nonce
        )
        return HTMLResponse(page, headers={"content-security-policy": _POLICY.format(nonce=nonce)})

    async def status(self, request: Request) -> Response:
        """Answer ``GET /status``: the pipeline as it is now."""
        return json_reply(
            {
                "model": self._asker.service.model.name,
                "stages": [dataclasses.asdict(state) for state in self._watch.stages()],
                "bottleneck": self._watch.bottleneck(),
                "queue": dataclasses.asdict(self._asker.service.queue.state()),
                "epoch": dataclasses.asdict(self._watch.epoch),
                "events": [dataclasses.asdict(event) for event in self._watch.events()],
            }
        )

    async def health(self, request: Request) -> Response:
        """Answer ``GET /health``: a result came lately, or a probe passes."""
        if not await self._asker.is_healthy(request):
            raise HttpError(503, "the pipeline does not answer", retry_after_s=1)
        return json_reply({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Answer ``GET /metrics``, for Prometheus."""
        queue, watch = self._asker.service.queue.state(), self._watch
        text = self._figures.text(queue, watch.work, watch.epoch)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        """Answer ``GET /openapi.json``."""
        return json_reply(self._described)

    def describe(self, routes: list[Route]) -> None:
        """Make the description of all ``routes``."""
        kinds = tuple(dict.fromkeys(_BODIES.values()))
        schemas, components = msgspec.json.schema_components(
            kinds, ref_template="#/components/schemas/{name}"
        )
        schema_of = dict(zip(kinds, schemas, strict=True))
        paths: dict[str, dict[str, Any]] = {}
        for route in routes:
            for method in (route.methods or set()) - {"HEAD"}:
                text = (route.endpoint.__doc__ or "").strip().splitlines()[0]
                operation: dict[str, Any] = {"summary": text, "responses": {"200": {"description": "OK"}}}
                kind = _BODIES.get(route.path)
                if kind is not None and method == "POST":
                    content = {"application/json": {"schema": schema_of[kind]}}
                    operation["requestBody"] = {"content": content}
                path = route.path.replace(":path", "")
                paths.setdefault(path, {})[method.lower()] = operation
        self._described = {
            "openapi": "3.1.0",
            "info": {"title": "PipeEdge", "version": pipeedge.__version__},
            "paths": paths,
            "components": {"schemas": components},
        }
