"""Bodies of requests in JSON, as the clients of each interface send them. Pure.

A body is decoded into its type, which also bounds how deep it may be; what does not fit is refused in a line
that names the place. Fields that are not listed are ignored, as new versions of the clients add some.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from pipeedge.base.errors import InputError
from pipeedge.base.wording import excerpt

__all__ = [
    "ClassifyBody",
    "EmbedBody",
    "EmbeddingsBody",
    "InferBody",
    "InferTensor",
    "PredictBody",
    "RerankBody",
    "RequestedOutput",
    "RootBody",
    "decode_body",
]

_Body = TypeVar("_Body")

Some = Annotated[list[str], Meta(min_length=1)]
Ids = Annotated[list[int], Meta(min_length=1)]


class EmbeddingsBody(Struct):
    """``POST /v1/embeddings``."""

    input: str | list[str | int | list[int]]
    """A text or an image as a data URL, token ids, or several of them."""
    model: str = ""
    encoding_format: str = "float"
    dimensions: int | None = None


class EmbedBody(Struct):
    """``POST /embed``."""

    inputs: str | Some
    normalize: bool = True
    truncate: bool = False


class PredictBody(Struct):
    """``POST /predict``: a text, a pair, or a list of lists with one or two texts each."""

    inputs: str | Annotated[list[str | list[str]], Meta(min_length=1)]
    raw_scores: bool = False
    truncate: bool = False


class RerankBody(Struct):
    """``POST /rerank``."""

    query: str
    texts: Some
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool = False


class RootBody(Struct):
    """``POST /``, as the client of Hugging Face sends it to any model."""

    inputs: str | list[str | list[str]]
    normalize: bool = True
    truncate: bool = False
    raw_scores: bool = False


class ClassifyBody(Struct):
    """``POST /classify``: images as data URLs, or as base64."""

    inputs: str | Some


class InferTensor(Struct):
    """A tensor of ``POST /v2/models/NAME/infer``."""

    name: str
    shape: list[Annotated[int, Meta(ge=0, le=1 << 31)]]
    datatype: str
    data: Any = None
    """Values as JSON, flat or nested; None if they follow the JSON as bytes."""
    parameters: dict[str, Any] = field(default_factory=dict)


class RequestedOutput(Struct):
    """An output that is asked for."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)


class InferBody(Struct):
    """``POST /v2/models/NAME/infer``."""

    inputs: Annotated[list[InferTensor], Meta(min_length=1)]
    id: str | None = None
    outputs: list[RequestedOutput] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)


def decode_body(body: bytes, kind: type[_Body]) -> _Body:
    """Decode a request of ``kind``.

    Raises:
        InputError: It is not JSON, or does not fit.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InputError(f"the request does not fit: {excerpt(str(error), 200)}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InputError(f"the request is not JSON: {excerpt(str(error), 200)}") from None
