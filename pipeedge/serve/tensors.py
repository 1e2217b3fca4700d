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
from typing import Any

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
_KINDS = MappingProxyType(
    {"b": "true or false", "i": "a whole number", "u": "a whole number", "f": "a number"}
)
"""What a value must be, by the kind of its number type."""
_MOST_BITS = 100


def read_tensors(body: InferBody, rest: bytes) -> dict[str, np.ndarray]:
    """Return the inputs of a request by name; those of strings or bytes are arrays of objects.

    Args:
        body: The request.
        rest: Bytes behind its JSON.

    Raises:
        InputError: A tensor is malformed, has a value that its type does not have, or bytes are missing or
            left over.
    """
    found: dict[str, np.ndarray] = {}
    place = 0
    for tensor in body.inputs:
        name, size = excerpt(tensor.name), tensor.parameters.binary_data_size
        if tensor.name in found:
            raise InputError(f"{name}: two inputs have this name")
        if (tensor.data is None) == (size is None):
            both = f"neither data nor {_SIZE}" if size is None else f"both data and {_SIZE}"
            raise InputError(f"{name}: has {both}: give one of them")
        if size is None:
            found[tensor.name] = _from_json(tensor)
            continue
        if size > len(rest) - place:
            raise InputError(f"{name}: {_SIZE} is {size}, and {len(rest) - place} bytes follow")
        found[tensor.name] = _from_bytes(tensor, rest[place : place + size])
        place += size
    if place != len(rest):
        raise InputError(f"{len(rest) - place} bytes follow that belong to no input")
    return found


def _dtype(tensor: InferTensor) -> np.dtype[Any]:
    try:
        return np.dtype(DATATYPES[tensor.datatype])
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
    values = _flat(tensor)
    if tensor.datatype == BYTES:
        if set(map(type, values)) - {str}:
            raise InputError(f"{excerpt(tensor.name)}: datatype {BYTES} in JSON takes strings")
        return _shaped(tensor, _objects(values))
    dtype = _dtype(tensor)
    _check_values(tensor, values, dtype)
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype)
        places = np.flatnonzero(~np.isfinite(array)).tolist() if dtype.kind == "f" else []
    except OverflowError:  # of numbers that are too large even for Python's
        places = [max(range(len(values)), key=lambda place: abs(values[place]))]
    if places:
        raise InputError(
            f"{excerpt(tensor.name)}: {_shown(values[places[0]])} does not fit {tensor.datatype}"
        )
    return _shaped(tensor, array)


def _check_values(tensor: InferTensor, values: Sequence[Any], dtype: np.dtype[Any]) -> None:
    """Refuse values that would become others.

    Raises:
        InputError: One is of another type, or too large for its own.
    """
    takes: tuple[type, ...] = {"b": (bool,), "f": (int, float)}.get(dtype.kind, (int,))
    if set(map(type, values)) - set(takes):
        wrong = next(value for value in values if type(value) not in takes)
        raise InputError(
            f"{excerpt(tensor.name)}: {_shown(wrong)} is not {_KINDS[dtype.kind]}, as {tensor.datatype} takes"
        )
    if values and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        wrong = next(
            (each for each in (min(values), max(values)) if not limits.min <= each <= limits.max), None
        )
        if wrong is not None:
            raise InputError(f"{excerpt(tensor.name)}: {_shown(wrong)} does not fit {tensor.datatype}")


def _shown(value: object) -> str:
    """Return a value of JSON for a message; large numbers take long to write in full."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of {value.bit_length()} bits"
    return "null" if value is None else excerpt(repr(value) if isinstance(value, str) else value)


def _flat(tensor: InferTensor) -> list[Any]:
    """Return the values of data, which is flat or in lists within lists, as the shape has dimensions.

    Raises:
        InputError: The lists are not as long as the shape says.
    """
    values: list[Any] = [tensor.data]
    for place, size in enumerate(tensor.shape):
        if set(map(type, values)) != {list}:
            break
        is_nested = any(isinstance(inner, list) for one in values for inner in one)
        wanted = size if is_nested else math.prod(tensor.shape[place:])
        if any(len(one) != wanted for one in values):
            shape = excerpt(tensor.shape)
            if place or is_nested:
                raise InputError(f"{excerpt(tensor.name)}: the lists in data do not have the shape {shape}")
            length = len(values[0])
            raise InputError(f"{excerpt(tensor.name)}: {length} values do not fit the shape {shape}")
        values = [inner for one in values for inner in one]
    return values


def _from_bytes(tensor: InferTensor, data: bytes) -> np.ndarray:
    if tensor.datatype != BYTES:
        dtype = _dtype(tensor)
        if len(data) % dtype.itemsize:
            raise InputError(f"{excerpt(tensor.name)}: {len(data)} bytes are no {tensor.datatype}")
        if dtype.kind == "b" and max(data, default=0) > 1:
            raise InputError(f"{excerpt(tensor.name)}: {max(data)} is neither 0 nor 1, as BOOL takes")
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
