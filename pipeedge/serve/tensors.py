"""Tensors of the Open Inference Protocol: JSON or bytes to arrays. Pure.

{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}
{..., "parameters": {"binary_data_size": 14}} and the bytes behind the JSON; a string there has its length
before it, as 4 bytes, little-endian
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from pipeedge.base.errors import InputError
from pipeedge.base.wording import excerpt
from pipeedge.serve.bodies import InferBody, InferTensor

__all__ = ["BYTES", "DATATYPES", "read_tensors"]

BYTES = "BYTES"
DATATYPES: Mapping[str, str] = MappingProxyType(
    {
        "BOOL": "?",
        "UINT8": "<u1",
        "INT8": "<i1",
        "INT32": "<i4",
        "INT64": "<i8",
        "UINT32": "<u4",
        "FP16": "<f2",
        "FP32": "<f4",
        "FP64": "<f8",
    }
)
"""Number type of NumPy for each datatype."""
_SIZE = "binary_data_size"


def read_tensors(body: InferBody, rest: bytes) -> dict[str, np.ndarray]:
    """Return the inputs of a request by name; those of strings or bytes are arrays of objects.

    Args:
        body: The request.
        rest: Bytes behind its JSON.

    Raises:
        InputError: A tensor is malformed, or bytes are missing or left over.
    """
    found: dict[str, np.ndarray] = {}
    place = 0
    for tensor in body.inputs:
        if tensor.name in found:
            raise InputError(f"{excerpt(tensor.name)}: two inputs have this name")
        if tensor.data is None:
            size = tensor.parameters.get(_SIZE)
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(rest) - place:
                raise InputError(f"{excerpt(tensor.name)}: has neither data nor a {_SIZE} that fits")
            found[tensor.name] = _from_bytes(tensor, rest[place : place + size])
            place += size
        else:
            found[tensor.name] = _from_json(tensor)
    if place != len(rest):
        raise InputError(f"{len(rest) - place} bytes follow that belong to no input")
    return found


def _dtype(tensor: InferTensor) -> str:
    try:
        return DATATYPES[tensor.datatype]
    except KeyError:
        known = ", ".join([*DATATYPES, BYTES])
        raise InputError(
            f"{excerpt(tensor.name)}: datatype {excerpt(tensor.datatype)} is not supported; use {known}"
        ) from None


def _shaped(tensor: InferTensor, values: np.ndarray) -> np.ndarray:
    if values.size != math.prod(tensor.shape):
        raise InputError(
            f"{excerpt(tensor.name)}: {values.size} values do not fit the shape {excerpt(tensor.shape)}"
        )
    return values.reshape(tensor.shape)


def _from_json(tensor: InferTensor) -> np.ndarray:
    if tensor.datatype == BYTES:
        texts = _flat(tensor, tensor.data)
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"{excerpt(tensor.name)}: datatype {BYTES} in JSON takes strings")
        return _shaped(tensor, _objects(texts))
    try:
        values = np.asarray(tensor.data)
        if values.dtype.kind not in "biuf":
            raise ValueError("these are no numbers")
        with np.errstate(over="ignore"):
            return _shaped(tensor, values.reshape(-1).astype(_dtype(tensor)))
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{excerpt(tensor.name)}: {excerpt(str(error), 120)}") from None


def _flat(tensor: InferTensor, data: object) -> list[object]:
    """Return the values of lists within lists, as far as the shape has dimensions."""
    values: list[object] = [data]
    for _ in tensor.shape:
        if not all(isinstance(one, list) for one in values):
            break
        values = [inner for one in values if isinstance(one, list) for inner in one]
    return values


def _from_bytes(tensor: InferTensor, data: bytes) -> np.ndarray:
    if tensor.datatype != BYTES:
        dtype = np.dtype(_dtype(tensor))
        if len(data) % dtype.itemsize:
            raise InputError(f"{excerpt(tensor.name)}: {len(data)} bytes are no {tensor.datatype}")
        return _shaped(tensor, np.frombuffer(data, dtype).copy())  # torch needs memory of its own
    texts: list[object] = []
    place = 0
    while place < len(data):
        (size,) = struct.unpack_from("<I", data, place) if place + 4 <= len(data) else (len(data),)
        place += 4
        if size > len(data) - place:
            raise InputError(f"{excerpt(tensor.name)}: a string is longer than what follows")
        texts.append(data[place : place + size])
        place += size
    return _shaped(tensor, _objects(texts))


def _objects(values: Sequence[object]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array
