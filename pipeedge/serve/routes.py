"""The routes, each as its clients know it: OpenAI's embeddings, text-embeddings-inference, images.

/v1/embeddings            OpenAI
/embed /predict /rerank   text-embeddings-inference; / is the one of them that suits the model
/classify                 images: a file, several as a form, or as data URLs
"""

from __future__ import annotations

import base64
import binascii
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

import numpy as np
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response

from pipeedge.base.errors import InputError, PipeEdgeError, one_line
from pipeedge.base.wording import excerpt
from pipeedge.data.items import Item
from pipeedge.data.text import Sentence, TooLongError
from pipeedge.serve.answers import ModelAnswer, ScoredClass
from pipeedge.serve.asking import Asker
from pipeedge.serve.bodies import (
    ClassifyBody,
    EmbedBody,
    EmbeddingsBody,
    PredictBody,
    RerankBody,
    RootBody,
    decode_body,
)
from pipeedge.serve.replies import json_reply

__all__ = ["Handler", "Routes"]

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

_DATA_URL = "data:"
_MOST_FILES = 64
_TOP = 5


class Routes:
    """Handlers of the routes for one model.

    Args:
        asker: What asks the pipeline.
    """

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._model = asker.service.model
        self._preparation = asker.service.preparation

    # -- embeddings ----------------------------------------------------------------------------------

    async def embeddings(self, request: Request) -> Response:
        """Answer ``POST /v1/embeddings``."""
        body = decode_body(await request.body(), EmbeddingsBody)
        self._must_give("vector")
        if body.encoding_format not in ("float", "base64"):
            raise InputError(f"encoding_format {excerpt(body.encoding_format)}: use float or base64")
        if body.dimensions is not None:
            raise InputError("dimensions is not supported: the vectors are as long as the model makes them")
        inputs: Sequence[object] = body.input if isinstance(body.input, list) else [body.input]
        if inputs and all(isinstance(one, int) for one in inputs):
            inputs = [inputs]  # one text, as token ids
        self._asker.check_count(len(inputs))
        items: list[Item] = []

        def prepare() -> Sequence[Item]:
            items.extend(self._embeddable(*pair) for pair in enumerate(inputs))
            return items

        answers = await self._asker.answers(request, prepare, quick=self._is_quick(inputs))
        vectors = [_vector(answer) for answer in answers]
        tokens = sum(len(item.tensors[0]) for item in items) if self._model.takes_text else 0
        return json_reply(
            {
                "object": "list",
                "data": [
                    {
                        "object": "embedding",
                        "index": index,
                        "embedding": (
                            vector.tolist()
                            if body.encoding_format == "float"
                            else base64.b64encode(vector.astype("<f4").tobytes()).decode()
                        ),
                    }
                    for index, vector in enumerate(vectors)
                ],
                "model": self._model.name,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    def _embeddable(self, index: int, value: object) -> Item:
        source = f"input[{index}]"
        if isinstance(value, list):
            try:
                return self._preparation.item({"input_ids": np.array(value, np.int64)}, source)
            except OverflowError:
                raise InputError(f"{source}: a token id is not a number of 64 bits") from None
        if not isinstance(value, str):
            raise InputError(f"{source}: is a single number; give a text, or a list of token ids")
        if not self._model.takes_text:
            return self._preparation.image(decode_data_url(value, source), source)
        return self._preparation.sentence(value, source=source, truncate=False, warn=False)

    async def embed(self, request: Request) -> Response:
        """Answer ``POST /embed``."""
        body = decode_body(await request.body(), EmbedBody)
        return await self._embed(request, body.inputs, normalize=body.normalize, truncate=body.truncate)

    async def _embed(
        self, request: Request, inputs: str | Sequence[str], *, normalize: bool, truncate: bool
    ) -> Response:
        self._must_give("vector")
        texts = [(inputs,)] if isinstance(inputs, str) else [(text,) for text in inputs]
        answers = await self._sentences(request, texts, truncate=truncate)
        vectors = [_vector(answer) for answer in answers]
        if normalize:
            vectors = [vector / max(float(np.linalg.norm(vector)), 1e-12) for vector in vectors]
        return json_reply([vector.tolist() for vector in vectors])

    # -- classes -------------------------------------------------------------------------------------

    async def predict(self, request: Request) -> Response:
        """Answer ``POST /predict``."""
        body = decode_body(await request.body(), PredictBody)
        return await self._predict(request, body.inputs, raw_scores=body.raw_scores, truncate=body.truncate)

    async def _predict(
        self, request: Request, inputs: str | Sequence[str | list[str]], *, raw_scores: bool, truncate: bool
    ) -> Response:
        self._must_give("logits")
        if not self._model.takes_text:
            raise InputError(f"{self._model.name} takes images: ask /classify")
        # A list of strings is one text or pair; a list of lists is a batch of these.
        is_batch = not isinstance(inputs, str) and not all(isinstance(one, str) for one in inputs)
        several = list(inputs) if is_batch else [inputs]
        texts = [(one,) if isinstance(one, str) else tuple(map(str, one)) for one in several]
        answers = await self._sentences(request, texts, truncate=truncate)
        found = [[_labelled(one) for one in _classes(answer, raw=raw_scores)] for answer in answers]
        return json_reply(found if is_batch else found[0])

    async def rerank(self, request: Request) -> Response:
        """Answer ``POST /rerank``."""
        body = decode_body(await request.body(), RerankBody)
        self._must_give("logits")
        if self._model.config.num_labels != 1:
            raise InputError(f"{self._model.name} does not rank: it has more than one output")
        pairs = [(body.query, text) for text in body.texts]
        answers = await self._sentences(request, pairs, truncate=body.truncate)
        logits = np.array([float(answer.outputs[0]) for answer in answers])
        scores = logits if body.raw_scores else 1 / (1 + np.exp(-logits))
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        ranks: list[dict[str, Any]] = [{"index": index, "score": float(scores[index])} for index in order]
        if body.return_text:
            ranks = [{**rank, "text": body.texts[rank["index"]]} for rank in ranks]
        return json_reply(ranks)

    # -- images --------------------------------------------------------------------------------------

    async def classify(self, request: Request) -> Response:
        """Answer ``POST /classify``; of several images, a bad one fails alone."""
        self._must_give("logits")
        if self._model.takes_text:
            raise InputError(f"{self._model.name} takes sentences: ask /predict")
        files, is_batch = await self._files(request)
        items: list[Item | InputError] = []

        def prepare() -> Sequence[Item]:
            items.extend(self._image_or_error(*pair) for pair in enumerate(files))
            if not is_batch and isinstance(items[0], InputError):
                raise items[0]
            return [item for item in items if isinstance(item, Item)]

        answers = iter(await self._asker.answers(request, prepare, quick=self._is_quick(files), least=0))
        found = [
            {"error": one_line(item)}
            if isinstance(item, InputError)
            else [_labelled(one) for one in next(answers).top(_top(request))]
            for item in items
        ]
        return json_reply(found if is_batch else found[0])

    def _image_or_error(self, index: int, data: bytes | InputError) -> Item | InputError:
        if isinstance(data, InputError):
            return data
        try:
            return self._preparation.image(data, _image_name(index))
        except InputError as error:
            return error

    async def _files(self, request: Request) -> tuple[Sequence[bytes | InputError], bool]:
        """Return the images of a request, and whether it may have several."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "multipart/form-data":
            files = await _files_of_form(request)
            if not files:
                raise InputError("the form has no file")
            return files, len(files) > 1
        if kind == "application/json":
            body = decode_body(await request.body(), ClassifyBody)
            if isinstance(body.inputs, str):
                return [decode_data_url(body.inputs, _image_name(0))], False
            self._asker.check_count(len(body.inputs))
            decoded = functools.partial(_decoded_or_error, body.inputs)
            return [decoded(index) for index in range(len(body.inputs))], True
        return [await request.body()], False

    async def root(self, request: Request) -> Response:
        """Answer ``POST /`` in the way that suits the model."""
        if not self._model.takes_text:
            return await self.classify(request)
        body = decode_body(await request.body(), RootBody)
        if self._model.output_kind != "vector":
            # Hugging Face's own client takes the first of a list for its only text.
            several = [body.inputs] if isinstance(body.inputs, str) else body.inputs
            lists = [[one] if isinstance(one, str) else one for one in several]
            return await self._predict(request, lists, raw_scores=body.raw_scores, truncate=body.truncate)
        texts = body.inputs if isinstance(body.inputs, list) else [body.inputs]
        plain = [text for text in texts if isinstance(text, str)]
        if len(plain) < len(texts):
            raise InputError(f"{self._model.name} embeds single texts, not pairs")
        return await self._embed(request, plain, normalize=body.normalize, truncate=body.truncate)

    # -- helpers -------------------------------------------------------------------------------------

    def _must_give(self, kind: str) -> None:
        """Refuse a route that the model is not for.

        Raises:
            InputError: Its outputs are of another kind.
        """
        if self._model.output_kind == kind:
            return
        suited = {
            "vector": "gives vectors: ask /v1/embeddings or /embed",
            "logits": f"classifies: ask {'/predict' if self._model.takes_text else '/classify'}",
            "tokens": "classifies every token: ask /v2",
        }
        raise InputError(f"{self._model.name} {suited[self._model.output_kind]}")

    async def _sentences(
        self, request: Request, texts: Sequence[tuple[str, ...]], *, truncate: bool
    ) -> list[ModelAnswer]:
        """Return the answers to texts, and pairs of them."""
        wrong = next((number for number, each in enumerate(texts) if len(each) not in (1, 2)), None)
        if wrong is not None:
            raise InputError(f"inputs[{wrong}]: {len(texts[wrong])} texts; give one, or a pair")
        self._asker.check_count(len(texts))

        def prepare() -> Sequence[Item]:
            sentences = [
                Sentence(text, f"inputs[{number}]", pair=next(iter(pair), None))
                for number, (text, *pair) in enumerate(texts)
            ]
            try:
                return self._preparation.sentences(sentences, truncate=truncate, warn=False)
            except TooLongError as error:
                raise InputError(f"{error}, or set truncate") from None

        quick = self._is_quick([text for each in texts for text in each])
        return await self._asker.answers(request, prepare, quick=quick)

    def _is_quick(self, values: Sequence[object]) -> bool:
        """Return whether texts or images are prepared in so little time that no other thread is needed."""
        plain = [value for value in values if isinstance(value, str | bytes)]
        return len(plain) == len(values) and self._preparation.is_quick(plain)


class _FormParser(MultiPartParser):
    """A parser of forms that refuses one without an end, whose last files would be missing or cut off."""

    def __init__(self, headers: Headers, stream: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers, self._to_the_end(stream), max_files=_MOST_FILES, max_fields=_MOST_FILES)
        self._has_ended = False

    def on_end(self) -> None:
        self._has_ended = True

    async def _to_the_end(self, stream: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        async for chunk in stream:
            yield chunk
        if not self._has_ended:
            raise MultiPartException("it is cut off before its closing boundary")


async def _files_of_form(request: Request) -> list[bytes]:
    """Return the files of a form.

    Raises:
        InputError: It is not one, or is cut off.
    """
    try:
        async with aclosing(request.stream()) as stream:
            form = await _FormParser(request.headers, stream).parse()
    except MultiPartException as error:
        raise InputError(f"the form cannot be read: {excerpt(error.message, 200)}") from None
    try:
        uploads = [one for _, one in form.multi_items() if isinstance(one, UploadFile)]
        return [await one.read() for one in uploads]
    finally:
        await form.close()


def decode_data_url(text: str, source: str) -> bytes:
    """Return the bytes of a data URL, or of base64 alone.

    Raises:
        InputError: It is neither.
    """
    encoded = text
    if text.startswith(_DATA_URL):
        head, comma, encoded = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InputError(f"{source}: a data URL must be data:image/...;base64,...")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{source}: is neither a data URL nor base64") from None


def _image_name(index: int) -> str:
    """Return what messages call an image of a request, in whatever form it comes."""
    return f"image {index}"


def _decoded_or_error(texts: Sequence[str], index: int) -> bytes | InputError:
    try:
        return decode_data_url(texts[index], _image_name(index))
    except InputError as error:
        return error


def _vector(answer: ModelAnswer) -> np.ndarray:
    if answer.outputs.ndim != 1:
        raise PipeEdgeError("the model gives no vector for an input")
    return answer.outputs


def _classes(answer: ModelAnswer, *, raw: bool) -> list[ScoredClass]:
    found = answer.top()
    if not raw:
        return found
    return [ScoredClass(one.number, one.name, float(answer.outputs[one.number])) for one in found]


def _labelled(one: ScoredClass) -> dict[str, Any]:
    return {"label": one.label, "score": one.score}


def _top(request: Request) -> int:
    text = request.query_params.get("top", str(_TOP))
    if not text.isdecimal() or int(text[:9]) < 1:
        raise InputError("top must be a number of classes, at least 1")
    return int(text[:9])
