"""Bodies of requests in JSON, as the clients of each interface send them. Pure.

A body is decoded into its type, which also bounds how deep it may be; what does not fit is refused in a line
that names the place. So are fields that a type does not have: a client must not believe that it is obeyed.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from pipeedge.base.errors import InputError
from pipeedge.base.wording import excerpt

__all__ = [
    "ClassParameters",
    "ClassifyBody",
    "EmbedBody",
    "EmbeddingsBody",
    "IndexBody",
    "InferBody",
    "InferTensor",
    "PredictBody",
    "RankBody",
    "RequestedOutput",
    "RerankBody",
    "RootEmbedBody",
    "SentenceParameters",
    "SimilarityBody",
    "SimilarityInput",
    "TextParameters",
    "decode_body",
]

_Decoded = TypeVar("_Decoded")

_NOT_NULL = re.compile(r"Expected `null`, got `\w+` - at `\$\.([^`]+)`")
"""What msgspec says of a field that is known, but not supported."""
_MOST_DIMENSIONS = 8

Some = Annotated[list[str], Meta(min_length=1)]
Texts = Annotated[
    str | Annotated[list[str | list[str]], Meta(min_length=1)],
    Meta(description="a text, a pair, or a list of lists with one or two texts each"),
]
Unsupported = Annotated[None, Meta(description="not supported: leave it out")]
Normalize = Annotated[bool, Meta(description="make every vector one long")]
Truncate = Annotated[bool, Meta(description="cut a text that is too long, rather than refuse it")]
Direction = Annotated[Literal["right", "Right"], Meta(description="the end is what is cut off")]
RawScores = Annotated[bool, Meta(description="scores as the model computes them, without softmax or sigmoid")]
ModelName = Annotated[str, Meta(description="name of the model that is served, if any is given")]
Count = Annotated[int, Meta(ge=1)]


class Body(Struct, forbid_unknown_fields=True):
    """A JSON object without fields that nobody reads."""


class EmbeddingsBody(Body):
    """``POST /v1/embeddings``."""

    input: Annotated[
        str | list[str | int | list[int]],
        Meta(description="a text or an image as a data URL, token ids, or several of them"),
    ]
    model: ModelName = ""
    encoding_format: Annotated[str, Meta(description="float or base64")] = "float"
    user: Annotated[str | None, Meta(description="who asks; nothing depends on it, nothing is kept")] = None
    dimensions: Unsupported = None


class SentenceParameters(Body):
    """How sentences are read."""

    truncate: Truncate = False
    truncation_direction: Direction = "right"
    prompt_name: Unsupported = None


class VectorParameters(SentenceParameters):
    """How sentences become vectors."""

    normalize: Normalize = True
    dimensions: Unsupported = None


class EmbedBody(VectorParameters, kw_only=True):
    """``POST /embed``."""

    inputs: str | Some


class SimilarityInput(Body):
    """A sentence, and those that it is compared with."""

    source_sentence: str
    sentences: Some


class SimilarityBody(Body):
    """``POST /similarity``."""

    inputs: SimilarityInput
    parameters: SentenceParameters = field(default_factory=SentenceParameters)


class RootEmbedBody(VectorParameters, kw_only=True):
    """``POST /`` for a model that gives vectors, as the client of Hugging Face sends it."""

    inputs: Annotated[
        str | Some | SimilarityInput,
        Meta(description="texts to embed, or a sentence to compare with others"),
    ]
    parameters: Annotated[SentenceParameters | None, Meta(description="for sentences that are compared")] = (
        None
    )


class ClassParameters(Body):
    """Which classes are named, and with which scores."""

    top_k: Annotated[Count | None, Meta(description="number of classes to name, best first")] = None
    function_to_apply: Annotated[
        Literal["softmax", "sigmoid", "none"] | None, Meta(description="how outputs become scores")
    ] = None


class TextParameters(ClassParameters):
    """The same, and classes that are given with the request."""

    candidate_labels: Annotated[
        Some | None, Meta(description="classes to choose from, for a model of natural language inference")
    ] = None
    hypothesis_template: Annotated[
        str | None, Meta(description="sentence about the text, with {} in place of a class")
    ] = None
    multi_label: Annotated[bool | None, Meta(description="score each of these classes by itself")] = None


class PredictBody(Body):
    """``POST /predict``, and ``POST /`` for a model that classifies texts."""

    inputs: Texts
    raw_scores: RawScores = False
    truncate: Truncate = False
    truncation_direction: Direction = "right"
    parameters: TextParameters = field(default_factory=TextParameters)


class RerankBody(Body):
    """``POST /rerank``."""

    query: str
    texts: Some
    raw_scores: RawScores = False
    return_text: Annotated[bool, Meta(description="give each text back with its score")] = False
    truncate: Truncate = False
    truncation_direction: Direction = "right"


class RankedDocument(Body):
    """A text to rank."""

    text: str


class RankBody(Body):
    """``POST /v1/rerank``."""

    query: str
    documents: Annotated[list[str | RankedDocument], Meta(min_length=1)]
    model: ModelName = ""
    top_n: Annotated[Count | None, Meta(description="number of documents to name, best first")] = None
    return_documents: Annotated[bool, Meta(description="give each document back with its score")] = False
    truncate: Truncate = False


class ClassifyBody(Body):
    """``POST /classify``, and ``POST /`` for a model that classifies images."""

    inputs: Annotated[str | Some, Meta(description="images as data URLs, or as base64")]
    parameters: ClassParameters = field(default_factory=ClassParameters)


class TensorParameters(Body):
    """Where the values of a tensor are."""

    binary_data_size: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="number of bytes behind the JSON")
    ] = None


class InferTensor(Body):
    """A tensor of ``POST /v2/models/NAME/infer``."""

    name: str
    shape: Annotated[list[Annotated[int, Meta(ge=1, le=1 << 31)]], Meta(max_length=_MOST_DIMENSIONS)]
    datatype: str
    data: Annotated[
        Any, Meta(description="values, flat or nested; null if they follow the JSON as bytes")
    ] = None
    parameters: TensorParameters = field(default_factory=TensorParameters)


class OutputParameters(Body):
    """How an output is sent."""

    binary_data: Annotated[bool | None, Meta(description="as bytes behind the JSON")] = None


class RequestedOutput(Body):
    """An output that is asked for."""

    name: str
    parameters: OutputParameters = field(default_factory=OutputParameters)


class InferParameters(Body):
    """How a request is answered."""

    binary_data_output: Annotated[bool, Meta(description="send outputs as bytes behind the JSON")] = False
    timeout: Annotated[
        Annotated[int, Meta(ge=0)],
        Meta(description="microseconds until the answer is no use; 0 for no limit"),
    ] = 0


class InferBody(Body):
    """``POST /v2/models/NAME/infer``."""

    inputs: Annotated[list[InferTensor], Meta(min_length=1)]
    id: Annotated[str | None, Meta(description="comes back with the answer")] = None
    outputs: Annotated[list[RequestedOutput], Meta(max_length=1)] = field(default_factory=list)
    parameters: InferParameters = field(default_factory=InferParameters)


class IndexBody(Body):
    """``POST /v2/repository/index``."""

    ready: Annotated[bool, Meta(description="list only models that are ready")] = False


def decode_body(body: bytes, kind: type[_Decoded]) -> _Decoded:
    """Decode a request of ``kind``.

    Raises:
        InputError: It is not JSON, or does not fit.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        unsupported = _NOT_NULL.fullmatch(str(error))
        if unsupported is not None:
            raise InputError(f"{unsupported[1]} is not supported: leave it out") from None
        raise InputError(f"the request does not fit: {excerpt(str(error), 200)}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InputError(f"the request is not JSON: {excerpt(str(error), 200)}") from None
