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
Normalize = Annotated[bool, Meta(description="make every vector one long")]
Truncate = Annotated[bool, Meta(description="cut a text that is too long, rather than refuse it")]
RawScores = Annotated[bool, Meta(description="scores as the model computes them, without softmax or sigmoid")]


class EmbeddingsBody(Struct):
    """``POST /v1/embeddings``."""

    input: Annotated[
        str | list[str | int | list[int]],
        Meta(description="a text or an image as a data URL, token ids, or several of them"),
    ]
    model: Annotated[str, Meta(description="any: one model is served")] = ""
    encoding_format: Annotated[str, Meta(description="float or base64")] = "float"
    dimensions: Annotated[int | None, Meta(description="not supported")] = None


class EmbedBody(Struct):
    """``POST /embed``."""

    inputs: str | Some
    normalize: Normalize = True
    truncate: Truncate = False


class PredictBody(Struct):
    """``POST /predict``."""

    inputs: Annotated[
        str | Annotated[list[str | list[str]], Meta(min_length=1)],
        Meta(description="a text, a pair, or a list of lists with one or two texts each"),
    ]
    raw_scores: RawScores = False
    truncate: Truncate = False


class RerankBody(Struct):
    """``POST /rerank``."""

    query: str
    texts: Some
    raw_scores: RawScores = False
    return_text: Annotated[bool, Meta(description="give each text back with its score")] = False
    truncate: Truncate = False


class RootBody(Struct):
    """``POST /``, as the client of Hugging Face sends it to any model."""

    inputs: str | Annotated[list[str | list[str]], Meta(min_length=1)]
    normalize: Normalize = True
    truncate: Truncate = False
    raw_scores: RawScores = False


class ClassifyBody(Struct):
    """``POST /classify``."""

    inputs: Annotated[str | Some, Meta(description="images as data URLs, or as base64")]


class InferTensor(Struct):
    """A tensor of ``POST /v2/models/NAME/infer``."""

    name: str
    shape: list[Annotated[int, Meta(ge=0, le=1 << 31)]]
    datatype: str
    data: Annotated[
        Any, Meta(description="values, flat or nested; null if they follow the JSON as bytes")
    ] = None
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
