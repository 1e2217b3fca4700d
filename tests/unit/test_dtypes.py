"""Test shards in bfloat16, float16 and int8: exact sums, float32, files, real ranks."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from models_oracle import TEXT_CLASSES, Case, image_cases, reference_output, save, text_cases
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shipped_model import CPU, DIGITS, heldout, through

from pipeedge import _native as native
from pipeedge.base.errors import RequestError, ScheduleError, SpecError, WeightsError
from pipeedge.base.fields import decode, encode
from pipeedge.base.schedule import DTYPES, LayerRange, Schedule, StagePlan
from pipeedge.data import Microbatch, open_input
from pipeedge.data.agreement import Outputs, agreement, joined, outputs_by_block
from pipeedge.models import find_model
from pipeedge.models.dtypes import INT4, emulated_here, find_dtype, slow_here, stream_dtype
from pipeedge.models.int8 import Int8Linear, quantize_rows
from pipeedge.models.int8_kernels import (
    FloatProduct,
    IntProduct,
    NativeKernel,
    SeparateKernel,
    int8_kernel,
    int8_kernels,
)
from pipeedge.models.linear import Linear
from pipeedge.models.weights.download import convert, save_weights
from pipeedge.models.words import WORD_TABLE
from pipeedge.plan.planning import Plan
from pipeedge.plan.schedule_choice import plan_schedule
from pipeedge.plan.schedule_files import format_schedule, load_schedule
from pipeedge.profile.options import parse_profiler
from pipeedge.request.environment import Environment
from pipeedge.request.files import InputRequest
from pipeedge.request.options import parse_runtime

REDUCED = (torch.bfloat16, torch.float16, torch.int8, INT4)
BF16_STEP = 2.0**-8


def layer(weight: torch.Tensor, bias: torch.Tensor | None, kernels: str | None = None) -> Int8Linear:
    plain = Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    built = Int8Linear(plain, torch.bfloat16, kernels or int8_kernels(CPU)[0])
    built.set_weight(*quantize_rows(weight.clone()), CPU)
    if bias is not None:
        built.bias = torch.nn.Parameter(bias.bfloat16(), requires_grad=False)
    return built


@st.composite
def products(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows of very different sizes, rows and channels of zeros, sizes that fill no register."""
    rows, inputs, outputs = (draw(st.integers(1, most)) for most in (20, 70, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = 10.0 ** rng.integers(-6, 5, (rows, 1)) * rng.integers(0, 4, (rows, 1)).clip(0, 1)
    x = rng.standard_normal((rows, inputs)) * sizes
    w = rng.standard_normal((outputs, inputs)) * 10.0 ** rng.integers(-4, 3, (outputs, 1))
    w[rng.integers(0, outputs)] *= draw(st.sampled_from([0.0, 1.0]))
    bias = torch.from_numpy(rng.standard_normal(outputs)).bfloat16() if draw(st.booleans()) else None
    return torch.from_numpy(x).bfloat16(), torch.from_numpy(w).float(), bias


@pytest.mark.parametrize("kernels", [int8_kernels(CPU)[0], "emulated"], ids=["chosen", "plain"])
@settings(max_examples=40)
@given(case=products())
def test_8_bit_product_error_is_within_its_steps(
    kernels: str, case: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
) -> None:
    x, w, bias = case
    exact = x.double() @ w.double().t()
    with torch.inference_mode():
        found = layer(w, bias, kernels)(x).double()
    # Half a step of each factor, where the step of a row is its largest value over 127.
    x_step = x.double().abs().amax(1, keepdim=True) / 127 * (1 + BF16_STEP)
    w_step = w.double().abs().amax(1)[None, :] / 127
    x_sum, w_sum = x.double().abs().sum(1, keepdim=True), w.double().abs().sum(1)[None, :]
    bound = x_step / 2 * w_sum + w_step / 2 * x_sum + x_step * w_step * x.shape[1] / 4
    if bias is not None:
        exact = exact + bias.double()
    # One rounding to bfloat16.
    bound = 1.01 * bound + BF16_STEP * (exact.abs() + bound) + 1e-9
    assert bool((found - exact).abs().le(bound).all())


@pytest.mark.parametrize("kernels", ["native", "torch", "onednn"])
@settings(max_examples=40)
@given(case=products())
def test_every_kernel_gives_the_same_bits(
    kernels: str, case: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
) -> None:
    if kernels not in int8_kernels(CPU):
        pytest.skip(f"this processor has no exact {kernels}")
    x, w, bias = case
    chosen = layer(w, bias, kernels)
    product = getattr(chosen._kernel, "product", None)
    assume(type(product) is not FloatProduct)  # a small layer is emulated
    with torch.inference_mode():
        assert torch.equal(chosen(x), layer(w, bias, "emulated")(x))


@settings(max_examples=40)
@given(case=products(), data=st.data())
def test_a_token_does_not_depend_on_its_neighbours(
    case: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], data: st.DataObject
) -> None:
    x, w, bias = case
    row = data.draw(st.integers(0, x.shape[0] - 1))
    with torch.inference_mode():
        built = layer(w, bias)
        assert torch.equal(built(x)[row], built(x[row : row + 1])[0])


def test_nan_stays_nan() -> None:
    built = layer(torch.randn(5, 8), None)
    x = torch.ones(3, 8).bfloat16()
    x[1, 2] = math.nan
    x[2, 3] = math.inf
    with torch.inference_mode():
        finite = built(x).isfinite().all(dim=1)
    assert finite.tolist() == [True, False, False]


def test_overflowing_processor_gets_a_safe_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.float() @ b.float()).clamp(max=2**15).int())
    monkeypatch.setattr(native, "linear8_variants", lambda: ["avx2", "portable"])
    assert int8_kernels(CPU) == ("native", "emulated")


@pytest.mark.parametrize(
    ("variant", "instructions", "names"),
    [
        ("portable", set(), ("torch", "emulated")),
        ("avx2", set(), ("native", "torch", "emulated")),
        ("avx512vnni", {"avx512_vnni"}, ("native", "onednn", "torch", "emulated")),
        ("avx512vnni", {"avx512_vnni", "amx_int8"}, ("onednn", "native", "torch", "emulated")),
    ],
)
def test_a_processor_gets_the_kernels_that_its_instructions_allow(
    variant: str, instructions: set[str], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: a.int() @ b.int())
    monkeypatch.setattr(native, "linear8_variants", lambda: [variant])
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(instructions, True))
    assert int8_kernels(CPU) == names


@pytest.mark.parametrize(
    ("device", "inputs", "outputs", "product"),
    [
        ("cpu", 8, 8, IntProduct),
        ("cpu", 7, 8, FloatProduct),
        ("cpu", 8, 1, FloatProduct),
        ("cuda", 16, 24, IntProduct),
        ("cuda", 16, 20, FloatProduct),
    ],
)
def test_layers_that_do_not_suit_a_kernel_are_emulated(
    device: str, inputs: int, outputs: int, product: type
) -> None:
    for name, expected in (("torch", product), ("emulated", FloatProduct)):
        kernel = int8_kernel(name, torch.device(device), inputs, outputs)
        assert isinstance(kernel, SeparateKernel)
        assert type(kernel.product) is expected
    assert type(int8_kernel("native", CPU, inputs, outputs)) is NativeKernel


# --- shards ---------------------------------------------------------------------------------------------


def check_reduced(case: Case, dtype: torch.dtype, cuts: list[int], directory: Path) -> None:
    # A row of padding alone attends evenly only where the bias of a mask outweighs any score: not in float16.
    case = dataclasses.replace(case, lengths=tuple(max(1, length) for length in case.lengths))
    reference, inputs = case.model(), case.inputs()
    expected = reference_output(reference, inputs)
    model = find_model(save(reference, directory))
    cuts = [cut for cut in cuts if cut < model.n_layers]
    whole = through(model, [dtype], [], inputs)
    assert torch.equal(through(model, [dtype] * (len(cuts) + 1), cuts, inputs), whole)
    # Activations are of order one; norms over very few values may blow a rounding up.
    most = {torch.int8: 1.0, torch.bfloat16: 0.3, torch.float16: 0.05, INT4: 5.0}[dtype]
    assert (whole - expected).abs().max() <= most


TOWERS = ["clip", "clip#text", "siglip"]
FAMILIES = ["vit", "deit", "dinov2", "dinov3", *TOWERS, "modernbert", *TEXT_CLASSES]
CUTS = st.sets(st.integers(1, 11), min_size=1, max_size=6).map(sorted)


@settings(max_examples=24, derandomize=True)
@given(
    case=st.one_of(image_cases("vit"), image_cases("deit"), *(text_cases(family) for family in TEXT_CLASSES)),
    dtype=st.sampled_from(REDUCED),
    cuts=CUTS,
)
def test_every_cut_gives_the_same_bits_near_those_of_float32(
    case: Case, dtype: torch.dtype, cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_reduced(case, dtype, cuts, tmp_path_factory.mktemp("model"))


def test_bfloat16_is_as_near_to_float32_as_transformers_is() -> None:
    reference = transformers.ViTForImageClassification.from_pretrained(DIGITS.directory).eval()
    inputs = (torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0)),)
    exact = reference_output(reference, inputs)
    theirs = reference_output(reference.bfloat16(), (inputs[0].bfloat16(),)).float()
    ours = through(DIGITS, [torch.bfloat16], [], inputs)
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_accuracy_on_held_out_digits_is_kept(dtype: torch.dtype) -> None:
    images, labels = heldout()
    correct = [
        int((through(DIGITS, [each], [], (images,)).argmax(1) == labels).sum())
        for each in (torch.float32, dtype)
    ]
    assert correct[0] - correct[1] <= 0.003 * len(labels)


@settings(max_examples=8)
@given(dtypes=st.lists(st.sampled_from([torch.float32, *REDUCED]), min_size=2, max_size=4), data=st.data())
def test_stages_of_different_dtypes_interoperate(dtypes: list[torch.dtype], data: st.DataObject) -> None:
    count = len(dtypes) - 1
    cuts = sorted(data.draw(st.sets(st.integers(1, 15), min_size=count, max_size=count)))
    images, _ = heldout()
    expected = through(DIGITS, [torch.float32], [], (images[:24],))
    found = through(DIGITS, dtypes, cuts, (images[:24],))
    assert float(torch.nn.functional.cosine_similarity(found, expected).min()) > 0.95


@pytest.mark.parametrize("dtype", [torch.float32, *REDUCED], ids=str)
def test_weight_bytes_match_the_prediction(dtype: torch.dtype) -> None:
    large = find_model("google/vit-large-patch16-224")
    half = LayerRange(0, 48)
    share = large.weight_bytes(half, dtype) / large.weight_bytes(half)
    most = {torch.float32: 1.0, torch.bfloat16: 0.5, torch.float16: 0.5, torch.int8: 0.27, INT4: 0.165}
    assert share <= most[dtype]
    assert large.build(half, dtype).parameter_count == large.parameter_count(half)


# --- files ----------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path, model_dirs: dict[str, Path]) -> Path:
    """A copy of a small ViT that may be written to."""
    target = tmp_path / "vit"
    target.mkdir()
    for file in model_dirs["vit"].iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_stored_weights_give_the_same_bits(
    family: str, dtype: torch.dtype, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    name, mark, tower = family.partition("#")
    model = find_model(f"{model_dirs[name]}{mark}{tower}")
    stored = tmp_path / "w.safetensors"
    convert(model, model.weights_path(), stored, dtype, say=lambda _line: None)
    for layers in (LayerRange(0, 5), LayerRange(5, 12)):
        ours, theirs = (model.load(layers, path, dtype=dtype) for path in (stored, None))
        for (name, a), (_, b) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
            a, b = (tensor.to_dense() if tensor.is_mkldnn else tensor for tensor in (a, b))
            # Words stay in the type of their file until they are looked up.
            assert torch.equal(a, b.to(a.dtype) if name == WORD_TABLE else b), name
    assert model.fingerprint(stored) == model.fingerprint()
    size = sum(t.nbytes for t in load_file(stored).values())
    assert size == model.weight_bytes(dtype=dtype)


def test_stored_8_bit_weights_are_within_half_a_step(directory: Path) -> None:
    original = load_file(directory / "model.safetensors")
    save_weights([str(directory)], Path(), dtype=torch.int8, say=lambda _line: None)
    with safe_open(directory / "model.int8.safetensors", "pt") as file:
        names = [name for name in file.keys() if not name.endswith("_scale")]  # noqa: SIM118
        assert sorted(names) == sorted(original)
        for name in names:
            tensor = file.get_tensor(name)
            if tensor.dtype is not torch.int8:
                torch.testing.assert_close(tensor.float(), original[name], rtol=2 * BF16_STEP, atol=0)
                continue
            scale = file.get_tensor(f"{name}_scale")[:, None]
            off = (tensor.float() * scale - original[name]).abs()
            assert bool(off.le(0.5001 * scale).all())


def test_a_device_needs_only_the_stored_weights(directory: Path) -> None:
    model = find_model(directory)
    pixels = torch.randn(2, 3, 16, 16)
    with torch.inference_mode():
        expected = model.load(dtype=torch.int8)((pixels,))[0]
        save_weights([str(directory)], Path(), dtype=torch.int8, say=lambda _line: None)
        fingerprint = model.fingerprint()
        (directory / "model.safetensors").unlink()
        model = find_model(directory)
        assert model.fingerprint() == fingerprint
        assert torch.equal(model.load(dtype=torch.int8)((pixels,))[0], expected)
    with pytest.raises(WeightsError, match=r"no weights at .*model.safetensors"):
        model.load(dtype=torch.bfloat16)


def broken(name: str, directory: Path) -> Path:
    model = find_model(directory)
    stored = directory / "w.safetensors"
    convert(model, model.weights_path(), stored, torch.int8, say=lambda _line: None)
    tensors = load_file(stored)
    key = "vit.encoder.layer.1.output.dense.weight"
    if name == "no scales":
        del tensors[f"{key}_scale"]
    elif name == "other scales":
        tensors[f"{key}_scale"] = tensors[f"{key}_scale"][:-1].clone()
    elif name == "half scales":
        tensors[f"{key}_scale"] = tensors[f"{key}_scale"].half()
    elif name == "norm in 8 bits":
        tensors["vit.layernorm.weight"] = tensors["vit.layernorm.weight"].to(torch.int8)
    save_file(tensors, stored)
    return stored


@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [
        ("as it is", torch.float32, "stored as int8, float32 is needed; run with --dtype int8"),
        ("as it is", torch.bfloat16, "stored as int8, bfloat16 is needed; run with --dtype int8"),
        ("no scales", torch.int8, r"1.output.dense.weight has no scales \(.*weight_scale\)"),
        ("other scales", torch.int8, r"weight_scale is F32 of shape \[23\]; float32 of \[24\] is needed"),
        ("half scales", torch.int8, r"weight_scale is F16 of shape \[24\]; float32 of \[24\] is needed"),
        ("norm in 8 bits", torch.int8, "layernorm.weight is stored as int8, bfloat16 is needed"),
    ],
)
def test_stored_weights_that_do_not_fit_are_refused(
    name: str, dtype: torch.dtype, said: str, directory: Path
) -> None:
    with pytest.raises(WeightsError, match=said):
        find_model(directory).load(weights=broken(name, directory), dtype=dtype)


# --- the request ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--dtype int3", "'int3' is not a number type; choose one of float32, bfloat16, float16, int8, int4"),
        ("--dtype int8,", "--dtype: 'int8,' is not a list"),
        ("--min-agreement 0.9", "--min-agreement needs --dtype auto"),
        ("--dtype auto", "--dtype auto needs automatic scheduling"),
        ("--dtype auto -pt 1,16", "--dtype auto needs automatic scheduling"),
        ("--dtype auto,int8", "--dtype: 'auto' is not a number type"),
        ("--dtype auto -sm m -sdt t -sd d --min-agreement 1.5", "must be from 0 to 1"),
    ],
)
def test_invalid_requests_are_refused(options: str, said: str) -> None:
    with pytest.raises((RequestError, ScheduleError), match=said.replace(".", r"\.")):
        parse_runtime(["0", "2", *options.split()], Environment())


def test_a_list_of_another_length_is_refused() -> None:
    request = parse_runtime(
        ["0", "2", "-m", "vit-digits", "--dtype", "int8,int8,int8"], Environment()
    ).request
    with pytest.raises(ScheduleError, match=r"3 number types \(--dtype\) for 2 stages"):
        plan_schedule(request, DIGITS)


def test_one_type_is_for_all_stages_and_a_list_for_each() -> None:
    for text, expected in (
        ("int8", ["int8"] * 2),
        ("torch.bfloat16,float32", ["bfloat16", "float32"]),
    ):
        request = parse_runtime(f"0 2 -m vit-digits --dtype {text}".split(), Environment()).request
        assert [plan.dtype for plan in plan_schedule(request, DIGITS).schedule.stages] == expected


@given(
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4),
    bits=st.sampled_from([0, 4]),
)
def test_a_schedule_file_keeps_the_types(
    dtypes: list[str], bits: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stages = tuple(
        StagePlan(LayerRange(rank, rank + 1), rank, None, bits, dtype) for rank, dtype in enumerate(dtypes)
    )
    path = tmp_path_factory.mktemp("schedule") / "s.yml"
    path.write_text(format_schedule(Schedule(stages)))
    assert load_schedule(path) == Schedule(stages)
    plan = Plan(Schedule(stages), 0, 8, 8, None, None)
    assert decode(encode(plan), Plan) == plan


def test_a_schedule_file_with_an_unknown_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.yml").write_text("- 0: [1, 16]\n  dtype: int3\n")
    with pytest.raises(SpecError, match=r"s\.yml:2: .*dtype: is 'int3'; a stage computes in one of float32"):
        load_schedule(tmp_path / "s.yml")


def test_links_carry_the_type_of_the_stage_that_sends() -> None:
    request = parse_runtime(
        ["0", "3", "-m", "vit-digits", "--dtype", "bfloat16,float32,int8"], Environment()
    ).request
    plan = Plan(plan_schedule(request, DIGITS).schedule, 0, 8, 8, None, None)
    found = [link.specs[0].dtype for link in plan.links(DIGITS)]
    assert found == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    assert stream_dtype(find_dtype("int8")) is torch.bfloat16


def test_slow_dtype_gives_a_notice() -> None:
    here = {"avx2": True, "avx512_vnni": True}
    assert slow_here(torch.float32, CPU, here) is None
    assert "no instructions for bfloat16" in (slow_here(torch.bfloat16, CPU, here) or "")
    assert "no instructions for bfloat16" in (slow_here(torch.int8, CPU, here) or "")
    assert slow_here(torch.int8, CPU, {**here, "avx512_bf16": True}) is None
    assert "no instructions for int8" in (slow_here(torch.int8, CPU, {"avx512_bf16": True}) or "")
    assert slow_here(torch.float16, torch.device("cuda"), here) is None


@pytest.mark.parametrize(
    ("processor", "features", "slow"),
    [
        ("Cortex-A72", {"neon"}, {torch.bfloat16, torch.float16}),
        ("Cortex-A76", {"neon", "dot", "fp16_arith"}, {torch.bfloat16}),
        ("Neoverse N2", {"neon", "dot", "fp16_arith", "i8mm", "bf16"}, set()),
    ],
)
def test_slow_dtype_on_arm_gives_a_notice(
    processor: str, features: set[str], slow: set[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native code says what the processor has; torch for boards may be too old to."""
    monkeypatch.setattr(native, "arm_features", lambda: sorted(features))
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    types = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
    assert {dtype for dtype in types if slow_here(dtype, CPU)} == slow, processor
    assert {dtype for dtype in types if emulated_here(dtype, CPU)} == slow


# --- beside float32 -------------------------------------------------------------------------------------


def outputs(values: list[list[float]], numbers: tuple[int, ...] | None = None) -> Outputs:
    return Outputs(tuple(range(len(values))) if numbers is None else numbers, torch.tensor(values))


def test_agreement_counts_classes_and_finds_the_largest_deviation() -> None:
    found, exact = (
        outputs([[1.0, 2.0], [3.0, 0.0], [0.0, 0.0]]),
        outputs([[2.0, 1.0], [3.0, 0.5], [0.0, 0.0]]),
    )
    result = agreement(found, exact, classes=True)
    assert (result.items, result.same, result.largest_deviation) == (3, 2, 1.0)
    assert result.cosine_min == pytest.approx(0.8)
    assert agreement(found, exact, classes=False).same == 1


def test_numbers_of_a_regression_agree_if_they_are_near() -> None:
    exact = outputs([[10.0], [0.1], [-3.0]])
    found = outputs([[10.19], [-0.05], [-3.3]])
    assert agreement(found, exact, classes=True).same == 2


def test_items_agree_if_all_their_tokens_do_and_padding_does_not_count() -> None:
    """The second microbatch has one token more, and so has the padding of the first in the comparison."""
    exact = [torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[5.0, 0.0], [0.0, 9.0]]]), torch.zeros(1, 3, 2)]
    batches = [
        Microbatch((), (None, None), ("a", "b"), (0, 1), (2, 1)),
        Microbatch((), (None,), ("c",), (2,), (3,)),
    ]
    found = [part.clone() for part in exact]
    found[0][1, 1] = torch.tensor([9.0, 0.0])  # padding
    found[1][0, 2, 1] = 0.5

    def whole(parts: list[torch.Tensor]) -> Outputs:
        return Outputs(
            (0, 1, 2),
            joined([batch.without_padding(part) for part, batch in zip(parts, batches, strict=True)]),
        )

    result = agreement(whole(found), whole(exact), classes=True)
    assert (result.items, result.same, result.largest_deviation) == (3, 2, 0.5)


def test_agreement_joins_items_by_their_numbers() -> None:
    found = outputs([[1.0, 0.0], [0.0, 1.0]], (4, 7))
    exact = outputs([[9.0, 9.0], [0.0, 1.0]], (5, 7))
    result = agreement(found, exact, classes=True)
    assert (result.items, result.same, result.largest_deviation) == (1, 1, 0.0)
    assert agreement(found, outputs([[1.0, 0.0]], (9,)), classes=True).items == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_block_by_block_gives_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    source = open_input(InputRequest(max_items=20), DIGITS)
    found = outputs_by_block(DIGITS, source, 8, weights=None, device=CPU, dtype=dtype)
    batches = [through(DIGITS, [dtype], [], batch.payload) for batch in source.microbatches(8)]
    assert torch.equal(found.values, torch.cat(batches))
    assert found.numbers == tuple(range(20))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--agreement 4", "compares another number type with float32: give one with --dtype"),
        ("--dtype int8 --input x.png", "--input has an effect only with --agreement N"),
        ("--dtype int8 --agreement 4 --random-weights", "needs the model's own weights"),
        ("--dtype int3", "--dtype int3: give each type once"),
    ],
)
def test_profiler_refuses_incomparable_requests(options: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parse_profiler(options.split())
