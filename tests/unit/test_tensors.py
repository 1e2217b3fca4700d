"""Test tensors of the Open Inference Protocol: a value that would become another one is refused."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeedge.base.errors import InputError
from pipeedge.serve.bodies import InferBody
from pipeedge.serve.tensors import read_tensors


def read(rest: bytes = b"", **tensor: Any) -> np.ndarray:
    body = msgspec.convert({"inputs": [{"name": "a", **tensor}]}, InferBody)
    return read_tensors(body, rest)["a"]


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "line"),
    [
        ("INT32", [1], [4294967302], "a: 4294967302 does not fit INT32"),
        ("UINT8", [1], [262], "a: 262 does not fit UINT8"),
        ("UINT8", [2], [3, -1], "a: -1 does not fit UINT8"),
        ("INT64", [1], [2**63], "a: 9223372036854775808 does not fit INT64"),
        ("INT64", [1], [10**5000], "a: a number of 16610 bits does not fit INT64"),
        ("INT64", [1], [6.9], "a: 6.9 is not a whole number, as INT64 takes"),
        ("INT64", [1], [6.0], "a: 6.0 is not a whole number, as INT64 takes"),
        ("INT64", [2], [1, True], "a: true is not a whole number, as INT64 takes"),
        ("INT64", [2], [1, None], "a: null is not a whole number, as INT64 takes"),
        ("INT64", [1], ["1"], "a: '1' is not a whole number, as INT64 takes"),
        ("INT64", [1], [{}], "a: an object is not a whole number, as INT64 takes"),
        ("BOOL", [1], [1], "a: 1 is not true or false, as BOOL takes"),
        ("FP32", [1], [True], "a: true is not a number, as FP32 takes"),
        ("FP32", [1], [1e39], "a: 1e+39 does not fit FP32"),
        ("FP16", [2], [1.0, 70000], "a: 70000 does not fit FP16"),
        ("FP64", [1], [10**400], "a: a number of 1329 bits does not fit FP64"),
        ("BYTES", [1], [3], "a: datatype BYTES in JSON takes strings"),
        ("INT64", [2, 3], [1, 2], "a: 2 values do not fit the shape [2, 3]"),
        ("INT64", [2, 3], [[1, 2], [3, 4], [5, 6]], "a: the lists in data do not have the shape [2, 3]"),
        ("INT64", [2, 2], [[1, 2, 3], [4]], "a: the lists in data do not have the shape [2, 2]"),
        ("INT64", [1, 2], [[[1, 2]]], "a: the lists in data do not have the shape [1, 2]"),
        ("INT64", [2], [1, [2]], "a: a list is not a whole number, as INT64 takes"),
    ],
)
def test_values_that_would_become_others_are_refused(
    datatype: str, shape: list[int], data: Any, line: str
) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(line)}$"):
        read(datatype=datatype, shape=shape, data=data)


@pytest.mark.parametrize(
    ("datatype", "shape", "data"),
    [
        ("INT32", [2], [-(2**31), 2**31 - 1]),
        ("UINT8", [1, 2], [0, 255]),
        ("INT64", [2, 1, 2], [[[1, 2]], [[3, -(2**63)]]]),
        ("INT64", [2, 2], [1, 2, 3, 4]),
        ("BOOL", [2], [True, False]),
        ("FP32", [3], [1, 2.5, -1e-3]),
        ("BYTES", [2], ["a", "b"]),
    ],
)
def test_values_of_a_type_are_taken_flat_and_nested(datatype: str, shape: list[int], data: Any) -> None:
    found = read(datatype=datatype, shape=shape, data=data)
    assert found.shape == tuple(shape)
    dtype = object if datatype == "BYTES" else np.float32 if datatype == "FP32" else None
    np.testing.assert_array_equal(found.ravel(), np.array(data, dtype).ravel())


@pytest.mark.parametrize(
    ("tensor", "rest", "line"),
    [
        ({"datatype": "BOOL", "shape": [2]}, b"\x01\x02", "a: 2 is neither 0 nor 1, as BOOL takes"),
        ({"datatype": "INT64", "shape": [1]}, b"1234567", "a: 7 bytes are no INT64"),
        ({"datatype": "BYTES", "shape": [1]}, b"\x01\0\0", "a: a string is longer than what follows"),
        ({"datatype": "FP32", "shape": [2]}, b"1234", "a: 1 values do not fit the shape [2]"),
        (
            {"datatype": "FP32", "shape": [1], "data": [1]},
            b"1234",
            "a: has both data and binary_data_size: give one of them",
        ),
    ],
)
def test_wrong_bytes_are_refused(tensor: dict[str, Any], rest: bytes, line: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(line)}$"):
        read(rest, **tensor, parameters={"binary_data_size": len(rest)})


def test_a_tensor_whose_bytes_are_missing_is_refused() -> None:
    with pytest.raises(InputError, match="a: binary_data_size is 9, and 3 bytes follow"):
        read(b"abc", datatype="BYTES", shape=[1], parameters={"binary_data_size": 9})
    with pytest.raises(InputError, match="a: has neither data nor binary_data_size"):
        read(datatype="BYTES", shape=[1])


@pytest.mark.parametrize("shape", [[1] * 70, [0, 2**31, 2**31, 2**31], [-1], [2**31 + 1], [True]])
def test_shapes_that_no_tensor_has_are_refused(shape: list[Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match="shape"):
        read(datatype="BYTES", shape=shape, data=[])
