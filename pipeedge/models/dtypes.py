"""The number types in which a shard holds its weights and computes its layers.

    dtype      weights              between layers, and across cuts
    float32    float32              float32
    bfloat16   bfloat16             bfloat16
    float16    float16              float16
    int8       int8 in the linear   bfloat16
               layers of blocks,
               else bfloat16
    int4       int4, in groups of   bfloat16
               32 with a scale and
               a zero, in the same
               layers

A type is only fast if the processor has instructions for it; otherwise torch computes the same result more
slowly.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from pipeedge import _native as native
from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name
from pipeedge.base.schedule import DTYPES

__all__ = [
    "INT4",
    "dtype_name",
    "emulated_here",
    "find_dtype",
    "grouped_bytes",
    "has_avx512",
    "slow_here",
    "stream_dtype",
]

_TYPES: Mapping[str, torch.dtype] = MappingProxyType({name: getattr(torch, name) for name in DTYPES})
INT4 = _TYPES["int4"]
"""The number type of 4 bits, which torch has as a name."""

_INSTRUCTIONS: Mapping[torch.dtype, tuple[str, ...]] = MappingProxyType(
    {
        # Names from torch.cpu.get_capabilities() on x86 and ARM. Any one of them is enough.
        torch.bfloat16: ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16"),
        torch.float16: ("avx512_fp16", "amx_fp16", "avx10_2", "fp16_arith"),
        torch.int8: ("avx512_vnni", "avx_vnni", "amx_int8", "avx10_2", "dot", "i8mm"),
        INT4: ("avx512_vnni", "avx2", "dot", "i8mm"),
    }
)
_GROUPED_BYTES: Mapping[torch.dtype, float] = MappingProxyType(
    {
        torch.int8: 1 + 2 / 32,  # a scale for each group of 32
        INT4: 0.5 + 3 / 32,  # a scale and a zero
    }
)
_BLOCKS_IN_CODES = "neon"
"""Where native code computes all of a block in int8 or int4, with norms and attention, from bfloat16 on."""


def find_dtype(name: str) -> torch.dtype:
    """Return the number type called ``name``, with or without the prefix ``torch.``.

    Raises:
        RequestError: The name is not in ``schedule.DTYPES``.
    """
    found = _TYPES.get(name.removeprefix("torch."))
    if found is None:
        raise RequestError(f"--dtype {name}: choose one of {', '.join(DTYPES)}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a number type: ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def stream_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the number type of hidden states, and thus of payloads, for weights in ``dtype``.

    int8 and int4 only serve products with weights: sums, norms and attention need the range of a floating
    point type. Of these, bfloat16 is fast and halves the bytes that cross a cut.
    """
    return torch.bfloat16 if dtype in (torch.int8, INT4) else dtype


def grouped_bytes(dtype: torch.dtype, values: int) -> int:
    """Return the bytes of so many weights of a decoder, whose int8 and int4 are in groups of 32."""
    return round(values * _GROUPED_BYTES.get(dtype, dtype.itemsize))


def slow_here(
    dtype: torch.dtype, device: torch.device, capabilities: Mapping[str, Any] | None = None
) -> str | None:
    """Return a sentence that says why ``dtype`` will be slow on ``device``, or None if it will not be.

    Args:
        dtype: Number type of the weights.
        device: Device that computes.
        capabilities: Capabilities of the processor in the form of ``torch.cpu.get_capabilities``; None: those
            of this processor.
    """
    if device.type != "cpu" or dtype is torch.float32:
        return None
    here = _capabilities() if capabilities is None else capabilities
    if not here or (dtype in (torch.int8, INT4) and here.get(_BLOCKS_IN_CODES)):
        return None
    for needed in dict.fromkeys((dtype, stream_dtype(dtype))):
        known = _INSTRUCTIONS[needed]
        if not any(here.get(name) for name in known):
            return (
                f"this processor has no instructions for {dtype_name(needed)} ({', '.join(known[:2])}, ...), "
                f"so {dtype_name(dtype)} will be slow here; {program_name('profiler.py')} --dtype "
                "measures how slow"
            )
    return None


def emulated_here(
    dtype: torch.dtype, device: torch.device, capabilities: Mapping[str, Any] | None = None
) -> bool:
    """Return whether ``device`` lacks the instructions for products in ``dtype``, which others then imitate.

    int8 and int4 never count as emulated: they have native code on x86 with AVX2, and else save memory.

    Args:
        dtype: Number type of the weights.
        device: Device that computes.
        capabilities: Capabilities of the processor, as ``slow_here`` takes them.
    """
    return dtype not in (torch.int8, INT4) and slow_here(dtype, device, capabilities) is not None


def has_avx512() -> bool:
    """Return whether this processor has AVX-512."""
    return bool(_capabilities().get("avx512_f"))


def _capabilities() -> Mapping[str, Any]:
    """Return the capabilities of this processor, or an empty map if neither torch nor native code knows."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    return {**({} if ask is None else ask()), **dict.fromkeys(native.arm_features(), True)}
