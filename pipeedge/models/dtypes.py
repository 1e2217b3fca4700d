"""The number types in which a shard's weights are held and its layers computed.

    dtype      weights              between layers, and across cuts
    float32    float32              float32
    bfloat16   bfloat16             bfloat16
    float16    float16              float16
    int8       int8 in the linear   bfloat16
               layers of blocks,
               else bfloat16

A type is only as fast as the processor's instructions for it; without them torch computes the same by
longer ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from pipeedge.base.errors import RequestError
from pipeedge.base.program import program_name
from pipeedge.base.schedule import DTYPES

__all__ = ["dtype_name", "find_dtype", "slow_here", "stream_dtype"]

_TYPES: Mapping[str, torch.dtype] = MappingProxyType({name: getattr(torch, name) for name in DTYPES})

_INSTRUCTIONS: Mapping[torch.dtype, tuple[str, ...]] = MappingProxyType(
    {
        # As torch.cpu.get_capabilities() calls them, of x86 and of ARM. Any of them will do.
        torch.bfloat16: ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16"),
        torch.float16: ("avx512_fp16", "amx_fp16", "avx10_2", "fp16_arith"),
        torch.int8: ("avx512_vnni", "avx_vnni", "amx_int8", "avx10_2", "dot", "i8mm"),
    }
)


def find_dtype(name: str) -> torch.dtype:
    """The type called ``name``, with or without ``torch.`` in front.

    Raises:
        RequestError: it is none of ``schedule.DTYPES``.
    """
    found = _TYPES.get(name.removeprefix("torch."))
    if found is None:
        raise RequestError(f"--dtype {name}: choose one of {', '.join(DTYPES)}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def stream_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of hidden states, and so of what crosses a cut, where weights are in ``dtype``.

    int8 is for products with weights alone: sums, norms and attention need the range of a floating point
    type. bfloat16 is the faster one, and halves what crosses the cut.
    """
    return torch.bfloat16 if dtype is torch.int8 else dtype


def slow_here(
    dtype: torch.dtype, device: torch.device, capabilities: Mapping[str, Any] | None = None
) -> str | None:
    """Why ``dtype`` will be slow on ``device``, in words; None where it is not.

    Args:
        dtype: of the weights.
        device: that computes.
        capabilities: of the processor, as ``torch.cpu.get_capabilities`` has them; None: of this one.
    """
    if device.type != "cpu" or dtype is torch.float32:
        return None
    here = _capabilities() if capabilities is None else capabilities
    if not here:
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


def _capabilities() -> Mapping[str, Any]:
    """Of this processor; empty where torch is too old to tell."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    return {} if ask is None else dict(ask())
