"""The routes, each as its clients know it: OpenAI's embeddings, text-embeddings-inference, images.

/v1/embeddings                        OpenAI
/v1/rerank                            Cohere, Jina
/embed /predict /rerank /similarity   text-embeddings-inference; / is the one that suits the model
/classify                             images: a file, several as a form, or as data URLs

A request may have thousands of items: each handler says how many, and how to prepare a part of them.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
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
    ClassParameters,
    EmbedBody,
    EmbeddingsBody,
    PredictBody,
    RankBody,
    RerankBody,
    RootEmbedBody,
    SimilarityBody,
    SimilarityInput,
    TextParameters,
    decode_body,
)
from pipeedge.serve.pending import PendingAnswers
from pipeedge.serve.replies import json_reply
from pipeedge.serve.uploads import decode_data_url, files_of_form
from pipeedge.serve.zero_shot import Hypotheses, hypotheses

__all__ = ["Handler", "Routes"]

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

_TOP = 5
_COUNT = re.compile("0*[1-9][0-9]{0,8}")
_FEW_ITEMS = 64
"""Number of vectors up to which the loop itself writes a reply; more of them would keep others waiting."""


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
        self._asker.service.check_name(body.model)
        if body.encoding_format not in ("float", "base64"):
            raise InputError(f"encoding_format {excerpt(body.encoding_format)}: use float or base64")
        inputs: Sequence[object] = body.input if isinstance(body.input, list) else [body.input]
        if inputs and all(isinstance(one, int) for one in inputs):
            inputs = [inputs]  # one text, as token ids
        tokens = 0

        def prepare(part: range) -> Sequence[Item]:
            nonlocal tokens
            items = self._embeddable(inputs, part)
            if self._model.takes_text:
                tokens += sum(len(item.tensors[0]) for item in items)
            return items

        answers = await self._asker.answers(request, len(inputs), prepare, quick=self._is_quick(inputs))

        def reply() -> Response:
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
                        for index, vector in enumerate(map(_vector, answers))
                    ],
                    "model": self._model.name,
                    "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                }
            )

        return await self._written(reply, len(inputs))

    def _embeddable(self, inputs: Sequence[object], part: range) -> list[Item]:
        """Return the items of ``part`` of texts, images and token ids."""
        some = [inputs[number] for number in part]
        if self._model.takes_text and all(isinstance(one, str) for one in some):
            texts = zip(part, some, strict=True)
            sentences = [Sentence(str(text), f"input[{number}]") for number, text in texts]
            return self._preparation.sentences(sentences, truncate=False, warn=False)
        return [self._embeddable_one(f"input[{number}]", inputs[number]) for number in part]

    def _embeddable_one(self, source: str, value: object) -> Item:
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

        def reply() -> Response:
            vectors = map(_vector, answers)
            return json_reply([(_unit(one) if normalize else one).tolist() for one in vectors])

        return await self._written(reply, len(texts))

    async def similarity(self, request: Request) -> Response:
        """Answer ``POST /similarity``."""
        body = decode_body(await request.body(), SimilarityBody)
        return await self._similarity(request, body.inputs, truncate=body.parameters.truncate)

    async def _similarity(self, request: Request, inputs: SimilarityInput, *, truncate: bool) -> Response:
        self._must_give("vector")
        texts = [(inputs.source_sentence,), *((text,) for text in inputs.sentences)]
        names = ["source_sentence", *(f"sentences[{number}]" for number in range(len(inputs.sentences)))]
        answers = await self._sentences(request, texts, names, truncate=truncate)
        source, *others = (_unit(_vector(answer)) for answer in answers)
        return json_reply([float(source @ other) for other in others])

    # -- classes -------------------------------------------------------------------------------------

    async def predict(self, request: Request) -> Response:
        """Answer ``POST /predict``."""
        if not self._model.takes_text:  # said before a picture is taken for bad JSON
            self._must_give("logits")
            raise InputError(f"{self._model.name} takes images: POST the picture itself to / or /classify")
        body = decode_body(await request.body(), PredictBody)
        # A list of strings is one text or pair; a list of lists is a batch of these.
        is_batch = not isinstance(body.inputs, str) and not all(isinstance(one, str) for one in body.inputs)
        return await self._predict(
            request, body, body.inputs if is_batch else [body.inputs], is_batch=is_batch
        )

    async def _predict(
        self, request: Request, body: PredictBody, inputs: Iterable[Any], *, is_batch: bool
    ) -> Response:
        """Answer a request about texts, and pairs of texts."""
        self._must_give("logits")
        texts = [(one,) if isinstance(one, str) else tuple(map(str, one)) for one in inputs]
        most = _top(request, body.parameters)
        if body.raw_scores and body.parameters.function_to_apply is not None:
            raise InputError("raw_scores and function_to_apply do not go together: give one of them")
        if body.parameters.candidate_labels is not None:
            return await self._zero_shot(request, body, texts, most, is_batch=is_batch)
        _check_zero_shot_alone(body.parameters)
        function = "none" if body.raw_scores else body.parameters.function_to_apply
        answers = await self._sentences(request, texts, truncate=body.truncate)
        found = [_classes(answer, most, function) for answer in answers]
        return json_reply(found if is_batch else found[0])

    async def _zero_shot(
        self,
        request: Request,
        body: PredictBody,
        texts: Sequence[tuple[str, ...]],
        most: int | None,
        *,
        is_batch: bool,
    ) -> Response:
        """Answer which of the classes that come with the request suit a text."""
        asked: Hypotheses = hypotheses(body, self._model.labels, self._model.name)
        wrong = next((number for number, each in enumerate(texts) if len(each) != 1), None)
        if wrong is not None:
            raise InputError(f"inputs[{wrong}]: {len(texts[wrong])} texts; give one with candidate_labels")
        pairs = [(text, sentence) for (text,) in texts for sentence in asked.sentences]
        names = [f"inputs[{number}]" for number in range(len(texts)) for _ in asked.sentences]
        answers = await self._sentences(request, pairs, names, truncate=body.truncate)
        logits = np.stack([answer.outputs for answer in answers]).reshape(len(texts), len(asked.labels), -1)
        found = [
            [{"label": label, "score": score} for label, score in asked.ranked(each)[:most]]
            for each in logits
        ]
        return json_reply(found if is_batch else found[0])

    async def rerank(self, request: Request) -> Response:
        """Answer ``POST /rerank``."""
        body = decode_body(await request.body(), RerankBody)
        logits = await self._relevance(request, body.query, body.texts, "texts", truncate=body.truncate)
        scores = logits if body.raw_scores else _sigmoid(logits)
        return json_reply(
            [
                {"index": index, "score": float(scores[index])}
                | ({"text": body.texts[index]} if body.return_text else {})
                for index in np.argsort(-scores, kind="stable").tolist()
            ]
        )

    async def rank(self, request: Request) -> Response:
        """Answer ``POST /v1/rerank``."""
        body = decode_body(await request.body(), RankBody)
        self._asker.service.check_name(body.model)
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        scores = _sigmoid(
            await self._relevance(request, body.query, texts, "documents", truncate=body.truncate)
        )
        return json_reply(
            {
                "model": self._model.name,
                "results": [
                    {"index": index, "relevance_score": float(scores[index])}
                    | ({"document": {"text": texts[index]}} if body.return_documents else {})
                    for index in np.argsort(-scores, kind="stable").tolist()[: body.top_n]
                ],
            }
        )

    async def _relevance(
        self, request: Request, query: str, texts: Sequence[str], name: str, *, truncate: bool
    ) -> np.ndarray:
        """Return how well each text suits the query, as the model computes it."""
        self._must_give("logits")
        if self._model.config.num_labels != 1 or not self._model.takes_text:
            raise InputError(f"{self._model.name} does not rank: it has more than one output")
        pairs = [(query, text) for text in texts]
        names = [f"{name}[{number}]" for number in range(len(texts))]
        answers = await self._sentences(request, pairs, names, truncate=truncate)
        return np.array([float(answer.outputs[0]) for answer in answers])

    # -- images --------------------------------------------------------------------------------------

    async def classify(self, request: Request) -> Response:
        """Answer ``POST /classify``; of several images, a bad one fails alone."""
        self._must_give("logits")
        if self._model.takes_text:
            raise InputError(f"{self._model.name} takes sentences: ask /predict")
        files, is_batch, parameters = await self._files(request)
        most = _top(request, parameters)
        most = _TOP if most is None else most

        def prepare(part: range) -> Sequence[Item | InputError]:
            found = [self._image_or_error(number, files[number]) for number in part]
            if not is_batch and isinstance(found[0], InputError):
                raise found[0]
            return found

        answers = await self._asker.answers(request, len(files), prepare, quick=self._is_quick(files))
        found = [
            _classes_or_error(answers, place, most, parameters.function_to_apply)
            for place in range(len(answers))
        ]
        return json_reply(found if is_batch else found[0])

    def _image_or_error(self, index: int, data: str | bytes) -> Item | InputError:
        source = _image_name(index)
        try:
            return self._preparation.image(
                decode_data_url(data, source) if isinstance(data, str) else data, source
            )
        except InputError as error:
            return error

    async def _files(self, request: Request) -> tuple[Sequence[str | bytes], bool, ClassParameters]:
        """Return the images of a request, as files or data URLs, whether they are a list, and the rest."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "multipart/form-data":
            files = await files_of_form(request)
            if not files:
                raise InputError("the form has no file")
            return files, len(files) > 1, ClassParameters()
        if kind == "application/json":
            body = decode_body(await request.body(), ClassifyBody)
            is_batch = not isinstance(body.inputs, str)
            images = [body.inputs] if isinstance(body.inputs, str) else body.inputs
            return images, is_batch, body.parameters
        return [await request.body()], False, ClassParameters()

    async def root(self, request: Request) -> Response:
        """Answer ``POST /`` in the way that suits the model."""
        if not self._model.takes_text:
            return await self.classify(request)
        if self._model.output_kind != "vector":
            body = decode_body(await request.body(), PredictBody)
            if body.parameters.candidate_labels is not None:
                is_batch = not isinstance(body.inputs, str)
                return await self._predict(
                    request, body, body.inputs if is_batch else [body.inputs], is_batch=is_batch
                )
            # Hugging Face's own client takes the first of a list for its only text.
            several = [body.inputs] if isinstance(body.inputs, str) else body.inputs
            return await self._predict(request, body, several, is_batch=True)
        if "top" in request.query_params:
            raise InputError(f"top: {self._model.name} gives vectors, which have no classes")
        asked = decode_body(await request.body(), RootEmbedBody)
        truncate = asked.truncate or (asked.parameters is not None and asked.parameters.truncate)
        if isinstance(asked.inputs, SimilarityInput):
            return await self._similarity(request, asked.inputs, truncate=truncate)
        return await self._embed(request, asked.inputs, normalize=asked.normalize, truncate=truncate)

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
        self,
        request: Request,
        texts: Sequence[tuple[str, ...]],
        names: Sequence[str] | None = None,
        *,
        truncate: bool,
    ) -> PendingAnswers:
        """Return the answers to texts, and pairs of them; messages call them ``names``, or by number."""
        wrong = next((number for number, each in enumerate(texts) if len(each) not in (1, 2)), None)
        if wrong is not None:
            raise InputError(f"inputs[{wrong}]: {len(texts[wrong])} texts; give one, or a pair")

        def prepare(part: range) -> Sequence[Item]:
            sentences = [
                Sentence(
                    texts[number][0],
                    f"inputs[{number}]" if names is None else names[number],
                    pair=next(iter(texts[number][1:]), None),
                )
                for number in part
            ]
            try:
                return self._preparation.sentences(sentences, truncate=truncate, warn=False)
            except TooLongError as error:
                raise InputError(f"{error}, or set truncate") from None

        quick = self._is_quick([text for each in texts for text in each])
        return await self._asker.answers(request, len(texts), prepare, quick=quick)

    def _is_quick(self, values: Sequence[object]) -> bool:
        """Return whether texts or images are prepared in so little time that no other thread is needed."""
        plain = [value for value in values if isinstance(value, str | bytes)]
        return len(plain) == len(values) and self._preparation.is_quick(plain)

    async def _written(self, reply: Callable[[], Response], items: int) -> Response:
        """Return a reply with the vectors of ``items``, which takes long for many of them."""
        return reply() if items <= _FEW_ITEMS else await self._asker.in_thread(reply)


def _image_name(index: int) -> str:
    """Return what messages call an image of a request, in whatever form it comes."""
    return f"image {index}"


def _vector(answer: ModelAnswer) -> np.ndarray:
    if answer.outputs.ndim != 1:
        raise PipeEdgeError("the model gives no vector for an input")
    return answer.outputs


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-logits)))


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum())


_FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {"softmax": _softmax, "sigmoid": _sigmoid, "none": np.asarray}
)


def _classes(answer: ModelAnswer, most: int | None, function: str | None) -> list[dict[str, Any]]:
    """Return the best classes with scores by ``function``, or by the model's own if it is None."""
    best = answer.top(most)
    if function is not None:
        scores = _FUNCTIONS[function](answer.outputs.astype(np.float64))
        best = [ScoredClass(one.number, one.name, float(scores[one.number])) for one in best]
    return [_labelled(one) for one in best]


def _classes_or_error(answers: PendingAnswers, place: int, most: int, function: str | None) -> Any:
    try:
        answer = answers[place]
    except InputError as error:
        return {"error": one_line(error)}
    return _classes(answer, most, function)


def _labelled(one: ScoredClass) -> dict[str, Any]:
    return {"label": one.label, "score": one.score}


def _check_zero_shot_alone(parameters: TextParameters) -> None:
    """Refuse what only means something for classes that come with the request.

    Raises:
        InputError: There are none.
    """
    for name in ("hypothesis_template", "multi_label"):
        if getattr(parameters, name) is not None:
            raise InputError(f"{name} needs candidate_labels")


def _top(request: Request, parameters: ClassParameters) -> int | None:
    """Return the number of classes to name, or None if the request does not say.

    Raises:
        InputError: It is not a number, or is given twice.
    """
    found = request.query_params.getlist("top")
    if not found:
        return parameters.top_k
    (text, *others) = found
    if others or parameters.top_k is not None:
        raise InputError("top is given twice: give it once, or top_k alone")
    if _COUNT.fullmatch(text) is None:
        raise InputError("top must be a number of classes, at least 1")
    return int(text)
