"""Handlers that tell about the service itself: pages for people, figures, and what the routes are."""

from __future__ import annotations

import dataclasses
import secrets
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from pipeedge.serve.asking import Asker
from pipeedge.serve.description import openapi_document
from pipeedge.serve.figures import ServiceFigures
from pipeedge.serve.reference import chapters
from pipeedge.serve.replies import HttpError, json_reply
from pipeedge.serve.watching import PipelineWatch

__all__ = ["Pages"]

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'; "
    "img-src blob:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Pages:
    """Handlers of the pages for one model.

    Args:
        asker: What asks the pipeline.
        watch: What is known of the pipeline.
        figures: Counts of requests.
        needs_key: Whether only requests with a key are answered.
    """

    def __init__(
        self, asker: Asker, watch: PipelineWatch, figures: ServiceFigures, *, needs_key: bool
    ) -> None:
        self._asker = asker
        self._model = asker.service.model
        self._watch = watch
        self._figures = figures
        self._needs_key = needs_key
        self._document = openapi_document(self._model.name, needs_key=needs_key)
        self._templates = Environment(
            autoescape=True, loader=FunctionLoader(_asset), undefined=StrictUndefined, trim_blocks=True
        )

    async def index(self, request: Request) -> Response:
        """Answer ``GET /``: a page for people."""
        model = self._model
        return self._page(
            "index.html",
            model=model.name,
            takes_text=model.takes_text,
            gives=model.output_kind,
            scores=model.output_kind == "logits" and model.config.num_labels == 1,
            needs_key=self._needs_key,
        )

    async def docs(self, request: Request) -> Response:
        """Answer ``GET /docs``: every route, for people."""
        url = str(request.base_url).rstrip("/")
        return self._page("docs.html", document=self._document, chapters=chapters(self._document, url))

    async def openapi(self, request: Request) -> Response:
        """Answer ``GET /openapi.json``: every route, for programs."""
        return json_reply(self._document)

    async def status(self, request: Request) -> Response:
        """Answer ``GET /status``: the pipeline as it is now."""
        watch = self._watch
        return json_reply(
            {
                "model": self._model.name,
                "stages": [dataclasses.asdict(state) for state in watch.stages()],
                "bottleneck": watch.bottleneck(),
                "queue": dataclasses.asdict(self._asker.service.queue.state()),
                "epoch": dataclasses.asdict(watch.epoch),
                "events": [dataclasses.asdict(event) for event in watch.events()],
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

    def _page(self, template: str, **values: object) -> Response:
        nonce = secrets.token_urlsafe(16)
        page = self._templates.get_template(template).render(nonce=nonce, **values)
        return HTMLResponse(
            page, headers={"content-security-policy": _POLICY.format(nonce=nonce), **_HEADERS}
        )


def _asset(name: str) -> str:
    return (files("pipeedge") / "assets" / "serve" / name).read_text("utf-8")
