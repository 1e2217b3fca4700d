"""Handlers that tell about the service itself: pages for people, figures, and what the routes are."""

from __future__ import annotations

import dataclasses
import secrets
import time
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

import pipeedge
from pipeedge.data import read_threads
from pipeedge.data.row_documents import class_name
from pipeedge.models import Model
from pipeedge.observe.pipeline_state import PipelineState
from pipeedge.serve.asking import Asker
from pipeedge.serve.description import openapi_document
from pipeedge.serve.figures import ServiceFigures
from pipeedge.serve.reference import chapters
from pipeedge.serve.replies import HttpError, json_reply
from pipeedge.serve.text_asking import TextAsker

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
        self,
        asker: Asker | TextAsker,
        watch: PipelineState,
        figures: ServiceFigures,
        *,
        needs_key: bool,
    ) -> None:
        self._asker = asker
        self._model = asker.service.model
        self._watch = watch
        self._figures = figures
        self._needs_key = needs_key
        self._started_at = time.time()
        self._document = openapi_document(
            self._model.name, needs_key=needs_key, generates=isinstance(asker, TextAsker)
        )
        self._templates = Environment(
            autoescape=True, loader=FunctionLoader(_asset), undefined=StrictUndefined, trim_blocks=True
        )

    async def index(self, request: Request) -> Response:
        """Answer ``GET /`` of an encoder: a page for people."""
        model = self._encoder.service.model
        return self._page(
            "index.html",
            model=model.name,
            takes_text=model.takes_text,
            gives=model.output_kind,
            scores=model.output_kind == "logits" and model.config.num_labels == 1,
            needs_key=self._needs_key,
        )

    async def chat(self, request: Request) -> Response:
        """Answer ``GET /`` of a decoder: a page for people, with a conversation."""
        if not isinstance(self._asker, TextAsker):
            raise TypeError("only a decoder has conversations")
        has_template = self._asker.service.prompts.vocabulary.has_template
        return self._page(
            "chat.html", model=self._model.name, has_template=has_template, needs_key=self._needs_key
        )

    @property
    def _encoder(self) -> Asker:
        """What asks an encoder."""
        if not isinstance(self._asker, Asker):
            raise TypeError("the model is no encoder")
        return self._asker

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
                "slowness": dict(watch.slowness),
                "events": [dataclasses.asdict(event) for event in watch.events()],
            }
        )

    async def models(self, request: Request) -> Response:
        """Answer ``GET /v1/models``: the one that is served."""
        return json_reply({"object": "list", "data": [self._named()]})

    async def named(self, request: Request) -> Response:
        """Answer ``GET /v1/models/NAME``."""
        if not self._asker.service.is_named(request.path_params["model"]):
            raise HttpError(404, "there is no such model; GET /v1/models names the one that is served")
        return json_reply(self._named())

    def _named(self) -> dict[str, Any]:
        created = int(self._started_at)
        return {"id": self._model.name, "object": "model", "created": created, "owned_by": "pipeedge"}

    async def info(self, request: Request) -> Response:
        """Answer ``GET /info``, as text-embeddings-inference does."""
        service = self._encoder.service
        model = service.model
        limits = service.queue.limits
        return json_reply(
            {
                "model_id": model.name,
                "model_sha": None,
                "model_dtype": "+".join(dict.fromkeys(self._watch.dtypes())),
                "model_type": _model_type(model),
                "max_concurrent_requests": limits.max_waiting,
                "max_input_length": service.preparation.max_tokens,
                "max_batch_tokens": limits.max_tokens,
                "max_batch_requests": limits.max_items,
                "max_client_batch_size": service.queue.most_items,
                "auto_truncate": False,
                "tokenization_workers": read_threads(),
                "version": pipeedge.__version__,
                "sha": None,
                "docker_label": None,
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


def _model_type(model: Model) -> dict[str, Any]:
    """Return the kind of a model, as text-embeddings-inference has it; images and tokens have a like form."""
    if model.output_kind == "vector":
        pooling = model.config.pooling
        return {"embedding": {"pooling": "pooler" if pooling is None else "+".join(pooling.modes)}}
    names = [class_name(model.labels, number) for number in range(model.config.num_labels)]
    labels = [f"LABEL_{number}" if name is None else name for number, name in enumerate(names)]
    known = {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }
    if model.output_kind == "tokens":
        return {"token_classifier": known}
    return {"reranker" if model.takes_text and len(labels) == 1 else "classifier": known}


def _asset(name: str) -> str:
    return (files("pipeedge") / "assets" / "serve" / name).read_text("utf-8")
