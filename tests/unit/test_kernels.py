"""Kernels: the rule that chooses among them, what a machine lacks, and their results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.errors import RequestError
from pipeedge.base.machine import processor_vendor
from pipeedge.models import find_model, kernels
from pipeedge.models.activations import ACTIVATIONS
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.kernels import available, choose, preferred
from pipeedge.models.linear import Linear, OnednnLinear
from pipeedge.request.environment import onednn_limit

CPU = torch.device("cpu")
DIGITS = find_model("vit-digits")
PACKED = [dtype for dtype in (torch.float32, torch.bfloat16) if "onednn" in available(dtype, CPU)]
needs_onednn = pytest.mark.skipif(torch.float32 not in PACKED, reason="torch was built without oneDNN")


# --- the rule -------------------------------------------------------------------------------------------

BOTH = ("onednn", "torch")
PLAIN = ("torch",)


@pytest.mark.parametrize(
    ("dtype", "vendor", "there", "chosen"),
    [
        ("float32", "AuthenticAMD", BOTH, "onednn"),
        ("float32", "HygonGenuine", BOTH, "onednn"),
        ("float32", "GenuineIntel", BOTH, "torch"),
        ("float32", None, BOTH, "torch"),
        ("float32", "AuthenticAMD", PLAIN, "torch"),
        ("bfloat16", "AuthenticAMD", BOTH, "onednn"),
        ("bfloat16", "GenuineIntel", BOTH, "onednn"),
        ("bfloat16", None, BOTH, "torch"),
        ("bfloat16", "AuthenticAMD", PLAIN, "torch"),
        ("float16", "AuthenticAMD", PLAIN, "torch"),
        ("int8", "AuthenticAMD", ("onednn", "torch", "emulated"), "onednn"),
        ("int8", "GenuineIntel", ("onednn", "torch", "emulated"), "onednn"),
        ("int8", None, ("torch", "emulated"), "torch"),
        ("int8", "AuthenticAMD", ("emulated",), "emulated"),
    ],
)
def test_the_rule_depends_on_processor_and_number_type(
    dtype: str, vendor: str | None, there: tuple[str, ...], chosen: str
) -> None:
    assert preferred(find_dtype(dtype), vendor, there, wide=True) == chosen
    narrow = "torch" if dtype == "float32" else chosen
    assert preferred(find_dtype(dtype), vendor, there, wide=False) == narrow


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\n", "AuthenticAMD"),
        ("processor\t: 0\nvendor_id\t: GenuineIntel\n", "GenuineIntel"),
        ("processor\t: 0\nBogoMIPS\t: 108.00\nCPU implementer\t: 0x41\n", None),
    ],
)
def test_linux_names_the_vendor_of_x86_processors(text: str, vendor: str | None, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    assert processor_vendor(file) == vendor


@pytest.mark.parametrize(
    ("described", "vendor"),
    [("AMD64 Family 25 Model 33 Stepping 0, AuthenticAMD", "AuthenticAMD"), ("i386", None), ("", None)],
)
def test_other_systems_name_the_vendor_at_the_end(described: str, vendor: str | None, tmp_path: Path) -> None:
    assert processor_vendor(tmp_path / "missing", described) == vendor


@pytest.mark.parametrize(
    ("variables", "limit"),
    [
        ({}, None),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx2"),
        ({"DNNL_MAX_CPU_ISA": "avx512_core"}, "avx512_core"),
        ({"ONEDNN_MAX_CPU_ISA": "DEFAULT", "DNNL_MAX_CPU_ISA": "AVX2"}, "default"),
        ({"ONEDNN_MAX_CPU_ISA": "", "DNNL_MAX_CPU_ISA": "SSE41"}, "sse41"),
    ],
)
def test_the_environment_limits_onednn(variables: dict[str, str], limit: str | None) -> None:
    assert onednn_limit(variables) == limit


@pytest.mark.parametrize(
    ("limit", "chosen"),
    [
        (None, "onednn"),
        ("default", "onednn"),
        ("avx512_core_bf16", "onednn"),
        ("avx10_1_512", "onednn"),
        ("avx2", "torch"),
        ("avx2_vnni_2", "torch"),
        ("sse41", "torch"),
    ],
)
def test_the_rule_knows_what_onednn_may_use(
    limit: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "has_avx512", lambda: True)
    monkeypatch.setattr(kernels, "processor_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(kernels, "available", lambda dtype, device: BOTH)
    monkeypatch.setattr(kernels, "onednn_limit", lambda: limit)
    assert choose("auto", torch.float32, CPU) == chosen
    assert choose("auto", torch.bfloat16, CPU) == "onednn"


# --- what a machine has ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_auto_is_one_of_the_available_kernels(dtype: torch.dtype) -> None:
    there = available(dtype, CPU)
    assert choose("auto", dtype, CPU) in there
    assert [choose(name, dtype, CPU) for name in there] == list(there)


@pytest.mark.parametrize(("name", "dtype"), [("onednn", "float16"), ("emulated", "float32"), ("mkl", "int8")])
def test_a_missing_kernel_is_one_line_with_those_that_are_there(name: str, dtype: str) -> None:
    listed = ", ".join(available(find_dtype(dtype), CPU))
    expected = f"--kernels {name}: for {dtype} this machine has auto, {listed}"
    with pytest.raises(RequestError, match=f"^{re.escape(expected)}$"):
        choose(name, find_dtype(dtype), CPU)
    with pytest.raises(RequestError, match=f"^{re.escape(expected)}$"):
        DIGITS.load(dtype=find_dtype(dtype), kernels=name)


def test_a_torch_without_onednn_computes_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert available(torch.float32, CPU) == ("torch",)
    assert choose("auto", torch.float32, CPU) == "torch"


def test_a_gpu_has_torch_s_own() -> None:
    assert available(torch.float32, torch.device("cuda")) == ("torch",)
    assert available(torch.int8, torch.device("cuda")) == ("torch", "emulated")


# --- results --------------------------------------------------------------------------------------------


def both(plain: Linear, dtype: torch.dtype, seed: int) -> tuple[Linear, OnednnLinear]:
    """``plain`` filled with random values, and the same layer packed."""
    packed = OnednnLinear(plain, dtype)
    plain = plain.to_empty(device="cpu").to(dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in plain.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / plain.in_features**0.5)
    packed.set_weight(plain.weight.clone())
    packed.bias = plain.bias
    return plain, packed


@needs_onednn
@settings(max_examples=150)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 30), st.integers(1, 70), st.integers(1, 70)),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    dtype=st.sampled_from(PACKED),
    seed=st.integers(0, 2**32),
)
def test_packed_layers_compute_what_plain_ones_do(
    sizes: tuple[int, int, int, int],
    activation: str,
    has_bias: bool,
    has_residual: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    items, tokens, inputs, outputs = sizes
    plain, packed = both(Linear(inputs, outputs, bias=has_bias, activation=activation), dtype, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(items, tokens, inputs, generator=generator).to(dtype)
    residual = torch.randn(items, tokens, outputs, generator=generator).to(dtype) if has_residual else None
    given_x, given_residual = x.clone(), None if residual is None else residual.clone()
    with torch.inference_mode():
        expected, found = plain(x, residual=residual), packed(x, residual=residual)
    tolerance = 5e-6 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert found.is_contiguous()
    assert torch.equal(x, given_x)
    assert residual is None or torch.equal(residual, given_residual)


@needs_onednn
@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "linear"])
def test_large_values_nan_and_infinity_go_through_a_packed_layer(dtype: torch.dtype, activation: str) -> None:
    plain, packed = both(Linear(16, 16, activation=activation), dtype, 0)
    x = torch.zeros(6, 16, dtype=dtype)
    x[1], x[2], x[3, 4], x[4, 7], x[5, 0] = 1e4, -1e4, torch.nan, torch.inf, -torch.inf
    with torch.inference_mode():
        expected, found = plain(x), packed(x)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-4, equal_nan=True)


@needs_onednn
def test_packed_weights_are_not_kept_twice() -> None:
    layers = DIGITS.load(kernels="onednn").packed_layers()
    assert len(layers) == DIGITS.n_layers
    assert all(layer.weight.is_mkldnn for _, layer in layers)
    assert [name for _, layer in layers for name, _ in layer.named_parameters()] == ["bias"] * len(layers)
    assert DIGITS.load(kernels="onednn").parameter_count == DIGITS.parameter_count()
