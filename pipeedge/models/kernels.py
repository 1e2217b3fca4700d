"""The kernels that compute the linear layers of blocks: those a machine has, and the rule that chooses.

    name       float32, bfloat16, float16                     int8 (int4: native alone, on any processor)
    native     -                                              PipeEdge's own, weights packed; AVX2 or ARM
    onednn     oneDNN, weights packed while they are loaded,  oneDNN, weights packed; needs AVX512-VNNI
               activation and residual within the product
    torch      torch.nn.functional.linear: MKL or oneDNN on   torch._int_mm
               x86, OpenBLAS or Arm Compute Library on ARM
    emulated   -                                              products in float32

Decoders have native ones in every number type, and no others.

For one number type, results of different kernels differ only in the last bits, and for int8 not at all.

The rule depends on nothing but the processor, the instructions of it that oneDNN is allowed to use, and the
number type: a choice by stopwatch could differ from run to run, and so could the results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pipeedge.base.errors import RequestError
from pipeedge.base.machine import processor_vendor
from pipeedge.models.dtypes import INT4, dtype_name, has_avx512
from pipeedge.models.int8_kernels import int8_kernels
from pipeedge.request.environment import onednn_limit

__all__ = ["available", "choose", "preferred"]

_INTEL = "GenuineIntel"
_WITHOUT_AVX512 = ("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2")
"""Limits that keep oneDNN from AVX-512, as ``ONEDNN_MAX_CPU_ISA`` names them."""
_SIDE = 32
"""Width of the layer that shows whether oneDNN's product works."""
_CLOSE = 0.05


def choose(wanted: str, dtype: torch.dtype, device: torch.device) -> str:
    """Return the name of the kernels to use, one of ``available``.

    Args:
        wanted: Name of the kernels, or ``auto`` for what the rule says.
        dtype: Number type of the weights.
        device: Device to compute on.

    Raises:
        RequestError: This machine has no such kernels. The message lists those it has.
    """
    there = available(dtype, device)
    if not there:
        raise RequestError(f"--dtype {dtype_name(dtype)} computes on cpu, not on {device.type}")
    if wanted == "auto":
        wide = has_avx512() and onednn_limit() not in _WITHOUT_AVX512
        return preferred(dtype, processor_vendor(), there, wide=wide)
    if wanted not in there:
        listed = ", ".join(("auto", *there))
        raise RequestError(f"--kernels {wanted}: for {dtype_name(dtype)} this machine has {listed}")
    return wanted


def available(dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """Return the names of the kernels that compute in ``dtype`` on ``device``."""
    if dtype is INT4:
        return ("native",) if device.type == "cpu" else ()
    if dtype is torch.int8:
        return int8_kernels(device)
    return ("onednn", "torch") if device.type == "cpu" and _onednn_computes(dtype) else ("torch",)


def preferred(dtype: torch.dtype, vendor: str | None, there: Sequence[str], *, wide: bool) -> str:
    """Return the kernels that are fastest on a processor, as far as that is known.

    int8: those that compute with 8-bit instructions, packed if possible. float32: MKL uses its AVX-512 code
    on Intel's processors alone, and AVX2 elsewhere. bfloat16: ``torch`` calls oneDNN as well, and packs each
    time. On ARM, torch may use one of several libraries, and none was measured, so its own choice stays but
    for int8, which has native code.

    Args:
        dtype: Number type of the weights.
        vendor: Vendor of an x86 processor as it names itself, or None for others.
        there: Kernels that the machine has, the fastest for int8 first.
        wide: Whether oneDNN finds AVX-512 and may use it; with AVX2, it is no faster in float32 than MKL.
    """
    if dtype in (torch.int8, INT4):
        return there[0]
    if "onednn" not in there or vendor is None:
        return "torch"
    if dtype is torch.float32:
        return "onednn" if wide and vendor != _INTEL else "torch"
    return "onednn" if dtype is torch.bfloat16 else "torch"


def _onednn_computes(dtype: torch.dtype) -> bool:
    """Return whether oneDNN's packed product works in ``dtype``.

    This is tested by computing: it depends on how torch was built, on the processor, and on the instructions
    that oneDNN is allowed to use (``ONEDNN_MAX_CPU_ISA``).
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    ramp = torch.linspace(-1, 1, _SIDE * _SIDE).view(_SIDE, _SIDE).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(ramp, None)
        found = torch.ops.mkldnn._linear_pointwise(ramp, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(found.float(), F.linear(ramp.float(), ramp.float()), atol=_CLOSE, rtol=_CLOSE)
