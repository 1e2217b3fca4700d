"""The Open Inference Protocol: what the model takes, and tensors in and out.

text           BYTES [items] or [items, 1]             image          BYTES [items], each a file
input_ids ...  INT64 [items, tokens]                   pixel_values   FP32 [items, channels, height, width]
outputs        FP32 [items, values]; [items, tokens, classes] for models that classify every token
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

import pipeedge
from pipeedge.base.errors import InputError
from pipeedge.base.wording import excerpt
from pipeedge.data.items import Item
from pipeedge.data.text import Sentence
from pipeedge.serve.answers import ModelAnswer
from pipeedge.serve.asking import Asker, Prepare
from pipeedge.serve.bodies import IndexBody, InferBody, decode_body
from pipeedge.serve.replies import HttpError, json_reply
from pipeedge.serve.tensors import BYTES, read_tensors

__all__ = ["InferenceRoutes"]

_JSON_LENGTH = "inference-header-content-length"
_LENGTH = re.compile("[0-9]{1,12}")
_TEXT, _IMAGE, _OUTPUTS = "text", "image", "outputs"
_VERSION, _PLATFORM = "1", "pipeedge"
_SILENT = "the pipeline does not answer"

_Tensor: TypeAlias = tuple[str, str, Sequence[int]]
"""Name, datatype and shape, with -1 for any size."""


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
            raise HttpError(503, _SILENT, retry_after_s=1)
        return json_reply({"ready": True})

    async def server(self, request: Request) -> Response:
        """Answer ``GET /v2``."""
        extensions = ["binary_tensor_data", "model_configuration", "statistics"]
        return json_reply({"name": "pipeedge", "version": pipeedge.__version__, "extensions": extensions})

    async def metadata(self, request: Request) -> Response:
        """Answer ``GET /v2/models/NAME``, and that of its one version."""
        self._check_name(request)
        return json_reply(
            {
                "name": self._model.name,
                "versions": [_VERSION],
                "platform": _PLATFORM,
                "inputs": [_described(*each) for each in self._inputs()],
                "outputs": [_described(*self._output())],
            }
        )

    async def config(self, request: Request) -> Response:
        """Answer ``GET /v2/models/NAME/config``, as Triton does: shapes there are without the items."""
        self._check_name(request)
        queue = self._asker.service.queue
        return json_reply(
            {
                "name": self._model.name,
                "platform": _PLATFORM,
                "backend": _PLATFORM,
                "version_policy": {"specific": {"versions": [int(_VERSION)]}},
                "max_batch_size": queue.most_items,
                "input": [{**_configured(*each), "optional": True} for each in self._inputs()],
                "output": [_configured(*self._output())],
                "dynamic_batching": {"preferred_batch_size": [queue.limits.max_items]},
            }
        )

    def _inputs(self) -> list[_Tensor]:
        """Return what the model takes: either the first of these alone, or all others."""
        if self._model.takes_text:
            return [(_TEXT, BYTES, [-1]), *((name, "INT64", [-1, -1]) for name in self._model.input_names)]
        size = [self._model.config.channels, *self._model.config.image_size]
        return [(_IMAGE, BYTES, [-1]), ("pixel_values", "FP32", [-1, *size])]

    def _output(self) -> _Tensor:
        return (_OUTPUTS, "FP32", [-1, -1, -1] if self._model.output_kind == "tokens" else [-1, -1])

    async def statistics(self, request: Request) -> Response:
        """Answer ``GET /v2/models/NAME/stats``, and that of all models, of which there is one."""
        self._check_name(request)
        asked, queue = self._asker.asked, self._asker.service.queue.state()
        found = {
            "name": self._model.name,
            "version": _VERSION,
            "last_inference": int(asked.last_at * 1000),
            "inference_count": queue.answered,
            "execution_count": queue.microbatches,
            "inference_stats": {
                "success": {"count": asked.answers, "ns": int(asked.answers_s * 1e9)},
                "fail": {"count": asked.failures, "ns": int(asked.failures_s * 1e9)},
            },
        }
        return json_reply({"model_stats": [found]})

    async def index(self, request: Request) -> Response:
        """Answer ``POST /v2/repository/index``: the one model that is served."""
        content = await request.body()
        body = decode_body(content, IndexBody) if content else IndexBody()
        is_ready = await self._asker.is_healthy(request)
        state = {"state": "READY"} if is_ready else {"state": "UNAVAILABLE", "reason": _SILENT}
        listed = [{"name": self._model.name, "version": _VERSION, **state}]
        return json_reply(listed if is_ready or not body.ready else [])

    async def infer(self, request: Request) -> Response:
        """Answer ``POST /v2/models/NAME/infer``."""
        self._check_name(request)
        content = await request.body()
        length = request.headers.get(_JSON_LENGTH, str(len(content)))
        if _LENGTH.fullmatch(length) is None or int(length) > len(content):
            raise InputError(f"the header {_JSON_LENGTH} must be the length of the JSON")
        body = decode_body(content[: int(length)], InferBody)
        if any(output.name != _OUTPUTS for output in body.outputs):
            raise InputError(f"there is no such output; the model has one, {_OUTPUTS}")
        tensors = read_tensors(body, content[int(length) :])
        items, prepare = self._question(tensors)
        timeout_s = body.parameters.timeout / 1e6 or math.inf
        outputs = _stacked(list(await self._asker.answers(request, items, prepare, timeout_s=timeout_s)))
        found: dict[str, Any] = {"name": _OUTPUTS, "datatype": "FP32", "shape": list(outputs.shape)}
        data = b""
        if _wants_bytes(body):
            data = outputs.astype("<f4").tobytes()
            found["parameters"] = {"binary_data_size": len(data)}
        else:
            found["data"] = outputs.ravel().tolist()
        head = {"model_name": self._model.name, "model_version": _VERSION}
        reply = json_reply({**head, **({} if body.id is None else {"id": body.id}), "outputs": [found]})
        if not data:
            return reply
        headers = {_JSON_LENGTH: str(len(reply.body))}
        return Response(bytes(reply.body) + data, 200, headers, "application/octet-stream")

    def _question(self, tensors: Mapping[str, np.ndarray]) -> tuple[int, Prepare]:
        """Return the number of items that tensors are, and what prepares them.

        Raises:
            InputError: A tensor is not one of the model's, or does not fit.
        """
        kind = _TEXT if self._model.takes_text else _IMAGE
        if kind not in tensors:
            strings = next((name for name, array in tensors.items() if array.dtype == object), None)
            if strings is not None:
                raise InputError(f"no input is called {kind}, which is what the model takes as {BYTES}")
            rows = max((len(array) for array in tensors.values() if array.ndim), default=1)
            whole = functools.cache(lambda: self._preparation.arrays(tensors, "inputs"))
            return rows, lambda part: whole()[part.start : part.stop]
        values = tensors[kind]
        other = next((name for name in tensors if name != kind), None)
        if other is not None:
            raise InputError(f"{excerpt(other)}: {kind} is all that the model takes, if it is given")
        if values.dtype != object or not values.ndim or values.size != len(values):
            raise InputError(f"{kind} must be {BYTES} of shape [items]")
        flat = values.ravel()
        prepare = self._sentences if kind == _TEXT else self._images
        return len(flat), lambda part: prepare([(f"{kind}[{number}]", flat[number]) for number in part])

    def _sentences(self, named: Sequence[tuple[str, str | bytes]]) -> list[Item]:
        sentences = [Sentence(_text(source, value), source) for source, value in named]
        return self._preparation.sentences(sentences, truncate=False, warn=False)

    def _images(self, named: Sequence[tuple[str, str | bytes]]) -> list[Item]:
        return [self._image(*each) for each in named]

    def _image(self, source: str, value: str | bytes) -> Item:
        if isinstance(value, str):
            raise InputError(f"{source}: send images as bytes behind the JSON, or to /classify")
        return self._preparation.image(value, source)

    def _check_name(self, request: Request) -> None:
        name = request.path_params.get("model")
        if name is not None and not self._asker.service.is_named(name):
            raise HttpError(404, "there is no such model; GET / shows the one that is served")


def _text(source: str, value: str | bytes) -> str:
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError:
        raise InputError(f"{source}: is not UTF-8") from None


def _wants_bytes(body: InferBody) -> bool:
    """Return whether the output is sent as bytes behind the JSON."""
    chosen = next((output.parameters.binary_data for output in body.outputs), None)
    return body.parameters.binary_data_output if chosen is None else chosen


def _configured(name: str, datatype: str, shape: Sequence[int]) -> dict[str, Any]:
    """Return a tensor as Triton's configuration has it."""
    triton = "STRING" if datatype == BYTES else datatype
    return {"name": name, "data_type": f"TYPE_{triton}", "dims": list(shape[1:]) or [1]}


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
