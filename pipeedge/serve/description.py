"""The description of all routes in the form of OpenAPI. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

import pipeedge
from pipeedge.serve import bodies, text_bodies

__all__ = ["OPEN_PATHS", "openapi_document", "query_parameters"]


class Label(Struct):
    """A class, and how sure the model is of it."""

    label: Annotated[str, Meta(description="name of the class")]
    score: Annotated[float, Meta(description="softmax score over all classes")]


class Embedding(Struct):
    """The vector of one input."""

    object: str
    index: Annotated[int, Meta(description="number of the input")]
    embedding: Annotated[list[float] | str, Meta(description="numbers, or base64 of float32, little-endian")]


class Usage(Struct):
    """Number of tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct):
    """Reply of ``/v1/embeddings``."""

    object: str
    data: list[Embedding]
    model: str
    usage: Usage


class RankedText(Struct):
    """A document, and how well it suits the query."""

    index: Annotated[int, Meta(description="number of the document")]
    relevance_score: Annotated[float, Meta(description="from 0 to 1")]
    document: Annotated[
        bodies.RankedDocument | None, Meta(description="its text, if return_documents is true")
    ] = None


class Ranking(Struct):
    """Reply of ``/v1/rerank``."""

    model: str
    results: Annotated[list[RankedText], Meta(description="best first")]


class ServedName(Struct):
    """A model that is served."""

    id: Annotated[str, Meta(description="its name")]
    object: str
    created: Annotated[int, Meta(description="time of its start, in seconds since 1970")]
    owned_by: str


class ServedNames(Struct):
    """Reply of ``/v1/models``."""

    object: str
    data: list[ServedName]


class Rank(Struct):
    """A text, and how well it suits the query."""

    index: Annotated[int, Meta(description="number of the text")]
    score: float
    text: Annotated[str, Meta(description="the text, if return_text is true")] = ""


class FailedRequest(Struct):
    """Description of the fault of a request."""

    error: Annotated[str, Meta(description="one sentence")]
    error_type: str


@dataclass(frozen=True)
class _RouteNote:
    """Description of a route."""

    tag: str
    summary: str
    text: str = ""
    bodies: tuple[type, ...] = ()
    """Forms of the body as JSON, of which a model takes one; none if there is no body."""
    other_bodies: tuple[str, ...] = ()
    """Other content types that it takes."""
    reply: Any = None
    """Form of the reply as JSON, or None for any object."""
    example: Any = None
    """Body of an example, or None."""
    parameters: tuple[str, ...] = ()
    media: str = "application/json"
    """Content type of the reply."""


_MODEL = "/v2/models/{model}"
_EMBED, _CLASSIFY, _TENSORS, _SERVICE = "Embeddings", "Classes", "Open Inference Protocol", "The service"
_TEXT = "Text"
_IMAGE = "data:image/png;base64,..."
_INFER = _RouteNote(
    _TENSORS,
    "Compute the outputs for tensors",
    "Tensors come as JSON or as bytes behind it: text or image as BYTES, or the model's own inputs.",
    bodies=(bodies.InferBody,),
    other_bodies=("application/octet-stream",),
    example={"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a sentence"]}]},
    parameters=("model", "x-request-timeout", "inference-header-content-length"),
)
_CONFIG = _RouteNote(_TENSORS, "The model's configuration, as Triton writes it", parameters=("model",))
_STATISTICS = _RouteNote(
    _TENSORS,
    "Number of inferences, and how long requests took",
    "In the form of Triton. All requests to the model count, by whatever route.",
)
_TIMED = ("x-request-timeout",)
_OPERATIONS: Mapping[tuple[str, str], _RouteNote] = MappingProxyType(
    {
        ("post", "/v1/embeddings"): _RouteNote(
            _EMBED,
            "Embed texts or images, as OpenAI's clients ask",
            bodies=(bodies.EmbeddingsBody,),
            reply=Embeddings,
            example={"input": ["a sentence", "another"]},
            parameters=_TIMED,
        ),
        ("post", "/embed"): _RouteNote(
            _EMBED,
            "Embed texts, as clients of text-embeddings-inference ask",
            bodies=(bodies.EmbedBody,),
            reply=list[list[float]],
            example={"inputs": "a sentence"},
            parameters=_TIMED,
        ),
        ("post", "/similarity"): _RouteNote(
            _EMBED,
            "Compare a sentence with others",
            "Cosines of the angles between their vectors.",
            bodies=(bodies.SimilarityBody,),
            reply=list[float],
            example={"inputs": {"source_sentence": "a sentence", "sentences": ["another", "a third"]}},
            parameters=_TIMED,
        ),
        ("post", "/classify"): _RouteNote(
            _CLASSIFY,
            "Classify images",
            "Send the bytes of a file, a form with several files, or JSON. Of several images, a bad one has "
            "an error in its place.",
            bodies=(bodies.ClassifyBody,),
            other_bodies=("application/octet-stream", "multipart/form-data"),
            reply=list[Label],
            example={"inputs": _IMAGE},
            parameters=("top", *_TIMED),
        ),
        ("post", "/predict"): _RouteNote(
            _CLASSIFY,
            "Classify texts, or pairs of texts",
            "With candidate_labels, a model of natural language inference chooses among these.",
            bodies=(bodies.PredictBody,),
            reply=list[Label],
            example={"inputs": "a sentence"},
            parameters=("top", *_TIMED),
        ),
        ("post", "/rerank"): _RouteNote(
            _CLASSIFY,
            "Rank texts by how well they suit a query",
            bodies=(bodies.RerankBody,),
            reply=list[Rank],
            example={"query": "a question", "texts": ["a passage", "another"]},
            parameters=_TIMED,
        ),
        ("post", "/v1/rerank"): _RouteNote(
            _CLASSIFY,
            "Rank documents by how well they suit a query, as clients of Cohere and Jina ask",
            bodies=(bodies.RankBody,),
            reply=Ranking,
            example={"query": "a question", "documents": ["a passage", "another"], "top_n": 1},
            parameters=_TIMED,
        ),
        ("post", "/"): _RouteNote(
            _CLASSIFY,
            "Ask in the way that suits the model, as huggingface_hub does",
            "Answers as /embed, /similarity, /predict or /classify does, whichever suits model and body.",
            bodies=(bodies.PredictBody, bodies.RootEmbedBody, bodies.ClassifyBody),
            other_bodies=("application/octet-stream", "multipart/form-data"),
            example={"inputs": "a sentence"},
            parameters=("top", *_TIMED),
        ),
        ("get", "/v2"): _RouteNote(_TENSORS, "Name and version of the server"),
        ("get", "/v2/health/live"): _RouteNote(_TENSORS, "Tell that the server answers"),
        ("get", "/v2/health/ready"): _RouteNote(_TENSORS, "Tell whether the pipeline answers"),
        ("get", _MODEL): _RouteNote(_TENSORS, "Inputs and outputs of the model", parameters=("model",)),
        ("get", f"{_MODEL}/ready"): _RouteNote(
            _TENSORS, "Tell whether the model answers", parameters=("model",)
        ),
        ("post", f"{_MODEL}/infer"): _INFER,
        ("get", f"{_MODEL}/config"): _CONFIG,
        ("get", f"{_MODEL}/stats"): replace(_STATISTICS, parameters=("model",)),
        ("get", f"{_MODEL}/versions/1"): _RouteNote(
            _TENSORS, "The same; a model has one version", parameters=("model",)
        ),
        ("get", f"{_MODEL}/versions/1/ready"): _RouteNote(
            _TENSORS, "Tell whether this version answers", parameters=("model",)
        ),
        ("post", f"{_MODEL}/versions/1/infer"): _INFER,
        ("get", f"{_MODEL}/versions/1/config"): _CONFIG,
        ("get", f"{_MODEL}/versions/1/stats"): replace(_STATISTICS, parameters=("model",)),
        ("get", "/v2/models/stats"): _STATISTICS,
        ("post", "/v2/repository/index"): _RouteNote(
            _TENSORS,
            "Name and state of the model that is served",
            bodies=(bodies.IndexBody,),
            reply=list[dict[str, str]],
            example={"ready": True},
        ),
        ("get", "/v1/models"): _RouteNote(
            _SERVICE, "Name of the model that is served, as OpenAI's clients ask", reply=ServedNames
        ),
        ("get", "/v1/models/{model}"): _RouteNote(
            _SERVICE, "The same for one name", reply=ServedName, parameters=("model",)
        ),
        ("get", "/info"): _RouteNote(
            _SERVICE,
            "The model and the limits of requests, as text-embeddings-inference tells",
            "huggingface_hub asks it by get_endpoint_info().",
        ),
        ("get", "/health"): _RouteNote(
            _SERVICE,
            "Tell whether the pipeline answers",
            "200 if a result came within 30 s, or an item of the server's own has an answer; else 503.",
        ),
        ("get", "/status"): _RouteNote(_SERVICE, "The pipeline as it is now: stages, queue, epoch, events"),
        ("get", "/metrics"): _RouteNote(_SERVICE, "Figures for Prometheus", media="text/plain"),
        ("get", "/"): _RouteNote(
            _SERVICE, "A page about the pipeline, with a box to try it", media="text/html"
        ),
        ("get", "/docs"): _RouteNote(_SERVICE, "This description, for people", media="text/html"),
        ("get", "/openapi.json"): _RouteNote(_SERVICE, "This description, for programs"),
    }
)

_OF_BOTH = frozenset(
    {
        *(("get", path) for path in ("/", "/docs", "/openapi.json", "/metrics", "/status", "/health")),
        ("get", "/v1/models"),
        ("get", "/v1/models/{model}"),
    }
)
"""Routes that encoders and decoders have."""
_GROWS = (
    "With stream, the answer comes as it grows: events of text/event-stream, each with a number, the last "
    "of them [DONE]."
)
_TEXT_OPERATIONS: Mapping[tuple[str, str], _RouteNote] = MappingProxyType(
    {
        ("post", "/v1/chat/completions"): _RouteNote(
            _TEXT,
            "Answer a conversation, as OpenAI's clients ask",
            _GROWS,
            bodies=(text_bodies.ChatBody,),
            example={"messages": [{"role": "user", "content": "What is 47 + 85?"}]},
            parameters=_TIMED,
        ),
        ("post", "/v1/completions"): _RouteNote(
            _TEXT,
            "Continue a text as it is, as OpenAI's older clients ask",
            _GROWS,
            bodies=(text_bodies.CompletionBody,),
            example={"prompt": "a beginning", "max_tokens": 32},
            parameters=_TIMED,
        ),
        ("post", "/v1/responses"): _RouteNote(
            _TEXT,
            "Answer a conversation in the newer form of OpenAI's clients",
            "Plain text, without tools; nothing is stored. With stream, the answer comes as it grows.",
            bodies=(text_bodies.ResponseBody,),
            example={"input": "What is 47 + 85?"},
            parameters=_TIMED,
        ),
        **{route: note for route, note in _OPERATIONS.items() if route in _OF_BOTH},
    }
)

_PARAMETERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "model": {
            "in": "path",
            "required": True,
            "description": "name of the model that is served",
            "schema": {"type": "string"},
        },
        "top": {
            "in": "query",
            "description": "number of classes to name, best first",
            "schema": {"type": "integer", "minimum": 1, "default": 5},
        },
        "x-request-timeout": {
            "in": "header",
            "description": "seconds after which the answer is no use any more",
            "schema": {"type": "number", "exclusiveMinimum": 0},
        },
        "inference-header-content-length": {
            "in": "header",
            "description": "length of the JSON, if bytes follow it",
            "schema": {"type": "integer", "minimum": 0},
        },
    }
)
_FAILURES: Mapping[str, str] = MappingProxyType(
    {
        "400": "the request or an input is wrong, or has a field or parameter that the route does not take",
        "401": "the key is missing or wrong",
        "403": "the request names another host than this machine",
        "408": "the request did not come in time",
        "413": "the body is too large",
        "429": "too much waits: try again after Retry-After seconds",
        "431": "the headers are too many or too long",
        "503": "the pipeline is ending or has failed",
        "504": "there was no answer in time",
    }
)
OPEN_PATHS = ("/", "/docs", "/openapi.json", "/health", "/v2/health/live", "/v2/health/ready")
"""Paths that anybody may read: they tell the name of the model, the routes, and whether it answers."""
_REFERENCE = "#/components/schemas/{name}"


def query_parameters(method: str, path: str) -> frozenset[str]:
    """Return the names of the parameters that a route takes in its address."""
    route = method.lower(), path
    operation = _OPERATIONS.get(route) or _TEXT_OPERATIONS[route]
    return frozenset(name for name in operation.parameters if _PARAMETERS[name]["in"] == "query")


def openapi_document(model: str, *, needs_key: bool, generates: bool = False) -> dict[str, Any]:
    """Return the description of all routes, as OpenAPI 3.1 has it.

    Args:
        model: Name of the model.
        needs_key: Whether only requests with a key are answered.
        generates: Whether the model generates text.
    """
    routes = _TEXT_OPERATIONS if generates else _OPERATIONS
    operations = routes.values()
    kinds = [
        FailedRequest,
        *(kind for each in operations for kind in (*each.bodies, each.reply) if kind is not None),
    ]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    schema_of = {str(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), each in routes.items():
        described = _described(method, path, each, schema_of)
        if needs_key and not (method == "get" and path in OPEN_PATHS):
            described["security"] = [{"key": []}]
        paths.setdefault(path, {})[method] = described
    keys = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if needs_key else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"{model} on PipeEdge",
            "version": pipeedge.__version__,
            "description": "Every failure has a status and one sentence that says what is wrong.",
        },
        "servers": [{"url": "./"}],
        "tags": [{"name": tag} for tag in dict.fromkeys(each.tag for each in operations)],
        "paths": paths,
        "components": {"schemas": components, **keys},
    }


def _described(method: str, path: str, each: _RouteNote, schema_of: Mapping[str, Any]) -> dict[str, Any]:
    """Return one operation."""
    failure = {"application/json": {"schema": schema_of[str(FailedRequest)]}}
    statuses = _FAILURES if method == "post" else {"503": _FAILURES["503"]}
    replied = {"type": "string"} if each.media != "application/json" else {"type": "object"}
    reply = replied if each.reply is None else schema_of[str(each.reply)]
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "tags": [each.tag],
        "summary": each.summary,
        "responses": {
            "200": {"description": "the answer", "content": {each.media: {"schema": reply}}},
            **{code: {"description": text, "content": failure} for code, text in statuses.items()},
        },
    }
    if each.text:
        found["description"] = each.text
    if each.parameters:
        found["parameters"] = [{"name": name, **_PARAMETERS[name]} for name in each.parameters]
    if each.bodies:
        forms = [schema_of[str(body)] for body in each.bodies]
        schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
        content: dict[str, Any] = {"application/json": {"schema": schema, "example": each.example}}
        content |= {kind: {} for kind in each.other_bodies}
        found["requestBody"] = {"required": True, "content": content}
    return found
