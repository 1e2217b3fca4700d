"""The Open Inference Protocol: what the model takes, and tensors in and out.

text           BYTES [items] or [items, 1]             image          BYTES [items], each a file
input_ids ...  INT64 [items, tokens]                   pixel_values   FP32 [items, channels, height, width]
outputs        FP32 [items, values]; [items, tokens, classes] for models that classify every token
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

import pipeedge
from pipeedge.base.errors import InputError
from pipeedge.data.items import Item
from pipeedge.data.text import Sentence
from pipeedge.serve.answers import ModelAnswer
from pipeedge.serve.asking import Asker
from pipeedge.serve.bodies import InferBody, decode_body
from pipeedge.serve.replies import HttpError, json_reply
from pipeedge.serve.tensors import BYTES, read_tensors

__all__ = ["InferenceRoutes"]

_JSON_LENGTH = "inference-header-content-length"
_TEXT, _IMAGE, _OUTPUTS = "text", "image", "outputs"


class InferenceRoutes:
    """Handlers of ``/v2``.

    Args:
        asker: What asks the pipeline.
    """

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._model = asker.service.model
        self._preparation = asker.service.preparation

    async def live(self, request: Request) -> Response:
        """Answer ``GET /v2/health/live``: the server answers."""
        return json_reply({"live": True})

    async def ready(self, request: Request) -> Response:
        """Answer ``GET /v2/health/ready`` and that of the model: the pipeline answers."""
        self._check_name(request)
        if not await self._asker.is_healthy(request):
            raise HttpError(503, "the pipeline does not answer", retry_after_s=1)
        return json_reply({"ready": True})

    async def server(self, request: Request) -> Response:
        """Answer ``GET /v2``."""
        extensions = ["binary_tensor_data"]
        return json_reply({"name": "pipeedge", "version": pipeedge.__version__, "extensions": extensions})

    async def metadata(self, request: Request) -> Response:
        """Answer ``GET /v2/models/NAME``, and that of its one version."""
        self._check_name(request)
        if self._model.takes_text:
            inputs = [_described(_TEXT, BYTES, [-1])]
            inputs += [_described(name, "INT64", [-1, -1]) for name in self._model.input_names]
        else:
            size = [self._model.config.channels, *self._model.config.image_size]
            inputs = [_described(_IMAGE, BYTES, [-1]), _described("pixel_values", "FP32", [-1, *size])]
        dimensions = [-1, -1, -1] if self._model.output_kind == "tokens" else [-1, -1]
        return json_reply(
            {
                "name": self._model.name,
                "versions": ["1"],
                "platform": "pipeedge",
                "inputs": inputs,
                "outputs": [_described(_OUTPUTS, "FP32", dimensions)],
            }
        )

    async def infer(self, request: Request) -> Response:
        """Answer ``POST /v2/models/NAME/infer``."""
        self._check_name(request)
        content = await request.body()
        length = request.headers.get(_JSON_LENGTH, str(len(content)))
        if not length.isdecimal() or int(length[:12]) > len(content):
            raise InputError(f"the header {_JSON_LENGTH} must be the length of the JSON")
        body = decode_body(content[: int(length)], InferBody)
        unknown = [output.name for output in body.outputs if output.name != _OUTPUTS]
        if unknown:
            raise InputError(f"there is no such output; the model has one, {_OUTPUTS}")
        tensors = read_tensors(body, content[int(length) :])
        self._asker.check_count(max((len(array) for array in tensors.values() if array.ndim), default=0))
        outputs = _stacked(await self._asker.answers(request, lambda: self._items(tensors)))
        return json_reply(
            {
                "model_name": self._model.name,
                "model_version": "1",
                **({} if body.id is None else {"id": body.id}),
                "outputs": [
                    {
                        "name": _OUTPUTS,
                        "datatype": "FP32",
                        "shape": list(outputs.shape),
                        "data": outputs.ravel().tolist(),
                    }
                ],
            }
        )

    def _items(self, tensors: Mapping[str, np.ndarray]) -> list[Item]:
        kind = _TEXT if self._model.takes_text else _IMAGE
        if kind not in tensors:
            strings = next((name for name, array in tensors.items() if array.dtype == object), None)
            if strings is not None:
                raise InputError(f"no input is called {kind}, which is what the model takes as {BYTES}")
            return self._preparation.arrays(tensors, "inputs")
        values = tensors[kind]
        if values.dtype != object or not values.ndim or values.size != len(values):
            raise InputError(f"{kind} must be {BYTES} of shape [items]")
        named = [(f"{kind}[{index}]", value) for index, value in enumerate(values.ravel())]
        if kind == _IMAGE:
            return [self._image(*each) for each in named]
        sentences = [Sentence(_text(source, value), source) for source, value in named]
        return self._preparation.sentences(sentences, truncate=False)

    def _image(self, source: str, value: str | bytes) -> Item:
        if isinstance(value, str):
            raise InputError(f"{source}: send images as bytes behind the JSON, or to /classify")
        return self._preparation.image(value, source)

    def _check_name(self, request: Request) -> None:
        name = request.path_params.get("model")
        if name not in (None, self._model.name, self._asker.service.given_name):
            raise HttpError(404, "there is no such model; GET / shows the one that is served")


def _text(source: str, value: str | bytes) -> str:
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError:
        raise InputError(f"{source}: is not UTF-8") from None


def _described(name: str, datatype: str, shape: Sequence[int]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def _stacked(answers: Sequence[ModelAnswer]) -> np.ndarray:
    """Return all outputs [items, ...]; where some have more tokens, others end with zeros."""
    longest = max(len(answer.outputs) for answer in answers)
    rows = [
        np.pad(answer.outputs, [(0, longest - len(answer.outputs)), (0, 0)])
        if answer.outputs.ndim == 2
        else answer.outputs
        for answer in answers
    ]
    return np.stack(rows)
