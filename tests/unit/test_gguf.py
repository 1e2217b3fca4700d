"""Test GGUF files: forms against transformers, models against transformers, and files that are damaged."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from decoder_cases import CASES, DecoderCase
from effort import cases
from gguf_rows import FORMS, random_rows
from gguf_writing import model_settings, model_tensors, save_gguf, tokenizer_settings, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import LONGEST_LINE, rounds
from transformers.integrations.gguf.dequant import GGML_NAME, dequantize

from pipeedge import _native as native
from pipeedge.base.errors import ModelError, PipeEdgeError, WeightsError
from pipeedge.base.schedule import LayerRange
from pipeedge.data.prompts import open_vocabulary, read_generation_defaults
from pipeedge.decoding.loop import LocalDecoder
from pipeedge.models.decoder import find_decoder
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.gguf_config import ARCHITECTURES
from pipeedge.models.registry import PUZZLES, find_any
from pipeedge.models.weights.file_kinds import open_weights
from pipeedge.models.weights.gguf_header import read_gguf_header
from pipeedge.models.words import CodedWords

GGML_NAMES = sorted(set(FORMS) & set(GGML_NAME.values()))
FILES = (
    "llama2",
    "llama3",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "olmo3",
    "granite",
    "gpt2",
)


@pytest.mark.parametrize("form", GGML_NAMES)
def test_codes_have_the_values_that_transformers_gives_them(form: str) -> None:
    number = next(number for number, name in GGML_NAME.items() if name == form)
    rows = random_rows(form, 5, 512, 3)
    wanted = dequantize(torch.from_numpy(rows), number).float().view(5, 512)
    found = torch.from_numpy(native.decode_rows(form, rows, 512))
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", ["Q5_0", "Q5_1"])
def test_codes_of_five_bits_have_a_common_scale(form: str) -> None:
    (row,) = random_rows(form, 1, 32, 3)
    scale, *offset = row[: 2 if form == "Q5_0" else 4].view("<f2").astype(np.float32)
    fifths, fours = row[-20:-16].view("<u4")[0], row[-16:]
    codes = [
        int(fours[i % 16] >> (4 * (i // 16)) & 15) + 16 * int(fifths >> np.uint32(i) & 1) for i in range(32)
    ]
    wanted = [scale * code + offset[0] if offset else scale * (code - 16) for code in codes]
    assert np.allclose(native.decode_rows(form, row[None], 32)[0], wanted, rtol=1e-6, atol=1e-7)


def packed(form: str, rows: np.ndarray, width: int, coding: str) -> np.ndarray:
    """Return the weights that a head of int8 or int4 has for rows of a form: the scores of unit vectors."""
    head = native.DecoderHead(
        weights=coding,
        stream="float32",
        hidden=width,
        tokens=len(rows),
        norm_centred=False,
        eps=0,
        scale=1,
        cap=0,
    )
    head.fill("weight", 0, rows, coding=form)
    scores = np.empty((width, len(rows)), np.float32)
    head.score(np.eye(width, dtype=np.float32), scores, threads=1)
    return scores.T


@pytest.mark.parametrize(
    ("form", "coding"),
    [("Q8_0", "int8"), ("Q5_0", "int8"), ("Q4_0", "int4"), ("Q4_1", "int4"), ("Q4_K", "int4")],
)
@settings(max_examples=cases(6))
@given(seed=st.integers(0, 999))
def test_codes_are_taken_over(form: str, coding: str, seed: int) -> None:
    rows = random_rows(form, 40, 256, seed)
    exact = native.decode_rows(form, rows, 256)
    found = packed(form, rows, 256, coding)
    step = np.abs(exact.reshape(40, 8, 32)).max(2) / (127 if coding == "int8" else 7.5)
    allowed = np.abs(exact) * 2.0**-8  # a scale of 8 bits
    if form in ("Q4_1", "Q4_K"):  # a zero in eighths, or a range that zeros do not reach
        allowed = allowed + np.repeat(step, 32, 1).reshape(40, 256)
    assert np.all(np.abs(found - exact) <= allowed + 1e-6)


@pytest.mark.parametrize("coding", ["int8", "int4"])
@settings(max_examples=cases(8))
@given(width=st.integers(1, 100), rows=st.integers(1, 70), seed=st.integers(0, 999))
def test_own_codes_give_the_same_matrix(coding: str, width: int, rows: int, seed: int) -> None:
    weights = np.random.default_rng(seed).standard_normal((rows, width), np.float32)
    codes = native.encode_rows(coding, weights, threads=2)
    head = native.DecoderHead(
        weights=coding, stream="float32", hidden=width, tokens=rows, norm_centred=False, eps=0, scale=1, cap=0
    )
    x, scores = np.random.default_rng(1).standard_normal((3, width), np.float32), []
    for values, form in ((weights, None), (codes, coding)):
        head.fill("weight", 0, values, coding=form)
        scores.append(np.empty((3, rows), np.float32))
        head.score(x, scores[-1], threads=1)
    assert np.array_equal(*scores)


@pytest.fixture(scope="module")
def models() -> dict[str, transformers.PreTrainedModel]:
    scales = {"gemma2": 16, "gemma3": 16}  # of attention, which a file does not say
    found = {}
    for name in FILES:
        own = {"query_pre_attn_scalar": scales[name]} if name in scales else {}
        found[name] = DecoderCase(CASES[name].cls, {**CASES[name].options, **own}).model()
    return found


def scores_of(path: Path, dtype: torch.dtype, tokens: list[int]) -> torch.Tensor:
    decoder = LocalDecoder(find_decoder(path), dtype, context=128)
    lists = decoder.begin()
    return decoder.score(decoder.step([(lists, 0, tokens)]))


TOKENS = torch.randint(1, 83, (60,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("name", FILES)
def test_models_in_files_have_the_scores_of_transformers(
    name: str, models: dict[str, transformers.PreTrainedModel], tmp_path: Path
) -> None:
    path = save_gguf(models[name], tmp_path / "model.gguf")
    with torch.inference_mode():
        wanted = models[name](torch.tensor([TOKENS])).logits[0]
    found = scores_of(path, torch.float32, TOKENS)
    largest = float(wanted.abs().max())
    assert float((found - wanted).abs().max()) <= 1e-5 * largest


def test_matrices_of_more_bits_keep_them_in_a_stage_of_4(tmp_path: Path) -> None:
    """As in Q4_K_M: values and the last products of an MLP have more bits than the rest."""
    model = transformers.LlamaForCausalLM.from_pretrained(find_any(PUZZLES).directory, dtype=torch.float32)
    wide = ("attn_v.weight", "ffn_down.weight")
    tensors = [
        (name, values, "Q8_0" if name.endswith(wide) and "blk.1" in name else form)
        for name, values, form in model_tensors(model, "Q4_0")
    ]
    settings_of_model = model_settings(model) | {"tokenizer.ggml.model": "no_vocab"}
    path = write_gguf(tmp_path / "model.gguf", settings_of_model, tensors)
    decoder = find_decoder(path)
    assert decoder.stored_dtype == "int4"
    sizes = []
    for block in range(2):
        layers = LayerRange(4 * block, 4 * block + 4)
        stage = decoder.stage(layers, find_dtype("int4"), pages=1, context=64)
        sizes.append(stage.weight_bytes)
        assert abs(decoder.weight_bytes(layers, find_dtype("int4")) / stage.weight_bytes - 1) < 0.02
    shapes = {name: values.size for name, values, _ in tensors if name.startswith("blk.1.")}
    kept = sum(shapes[f"blk.1.{name}.weight"] for name in ("attn_q", "attn_k", "attn_v", "ffn_down"))
    assert sizes[1] - sizes[0] == kept * (34 - 19) // 32
    exact, found = (scores_of(path, find_dtype(dtype), TOKENS) for dtype in ("float32", "int4"))
    assert float((found - exact).norm() / exact.norm()) < 0.02


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the included decoder as a GGUF file, with its vocabulary and chat template."""
    directory = find_any(PUZZLES).directory
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    vocabulary = tokenizer_settings(transformers.AutoTokenizer.from_pretrained(directory))
    return save_gguf(model, tmp_path_factory.mktemp("puzzles") / "puzzles.Q8_0.gguf", "Q8_0", vocabulary)


def test_vocabulary_template_and_end_are_those_of_the_file(puzzles: Path) -> None:
    outlines = find_any(PUZZLES), find_any(str(puzzles))
    theirs, ours = (
        open_vocabulary(one, () if one.directory is None else (one.directory,)) for one in outlines
    )
    message = [{"role": "user", "content": "\u00e4 12 + 7?\n"}]
    assert ours.render(message) == theirs.render(message)
    assert ours.encode_rendered(ours.render(message)) == theirs.encode_rendered(theirs.render(message))
    tokens = list(range(260))
    assert [ours.token_bytes(one) for one in tokens] == [theirs.token_bytes(one) for one in tokens]
    assert [ours.is_silent(one) for one in tokens] == [theirs.is_silent(one) for one in tokens]
    assert (
        read_generation_defaults(outlines[1]).end_tokens == read_generation_defaults(outlines[0]).end_tokens
    )
    assert outlines[1].stored_dtype == "int8"


def test_words_of_a_file_stay_in_it(puzzles: Path) -> None:
    decoder = LocalDecoder(find_decoder(puzzles), torch.int8, context=64)
    assert isinstance(decoder.ends._words, CodedWords)
    with open_weights(puzzles) as file:
        table = torch.cat([part.clone() for part in file.read_rows("token_embd.weight", 7)])
    assert torch.equal(decoder.ends.embed([3, 250, 3], [0, 1, 2]), table[[3, 250, 3]].bfloat16())


# Files that are damaged ---------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    """Return the one line by which a file is refused, whenever that is, or an empty one if it is not."""
    try:
        model = find_any(str(path))
        model.check_sizes()
        LocalDecoder(find_decoder(path), torch.int8, context=64)
        open_vocabulary(model, ())
        read_generation_defaults(model)
    except PipeEdgeError as error:
        return str(error)
    return ""


def header_bytes(path: Path) -> int:
    return len(read_gguf_header(path).raw)


@pytest.mark.parametrize("kept", [0, 3, 4, 12, 23, 24, 100, 1000, -40_000, -100, -1])
def test_truncated_file_is_refused_in_one_line(kept: int, puzzles: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(puzzles.read_bytes()[:kept])
    message = refusal(path)
    assert str(path) in message
    assert "\n" not in message
    assert "truncated" in message or "not a GGUF file" in message


def test_file_that_is_short_for_a_tensor_is_truncated(puzzles: Path, tmp_path: Path) -> None:
    tensors = read_gguf_header(puzzles).tensors
    last = max(tensors, key=lambda name: tensors[name].start)
    path = changed(tmp_path / "model.gguf", puzzles, last, size=1 << 22)
    assert f"is truncated: {path.stat().st_size} bytes of" in refusal(path)


def test_damaged_headers_are_refused_in_one_line(puzzles: Path, tmp_path: Path) -> None:
    path, whole = tmp_path / "model.gguf", bytearray(puzzles.read_bytes())
    drawn, header = random.Random(5), header_bytes(puzzles)
    hostile = [0, 1, 0xFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 1 << 62, 1 << 31, 33]
    for _ in range(rounds(60)):
        data = bytearray(whole)
        for _ in range(drawn.randint(1, 3)):
            size = drawn.choice([1, 4, 8])
            place = drawn.choice([drawn.randrange(0, 24), drawn.randrange(0, header - 8)])
            value = drawn.choice([*hostile, drawn.getrandbits(8 * size)]) & ((1 << (8 * size)) - 1)
            data[place : place + size] = value.to_bytes(size, "little")
        path.write_bytes(data)
        message = refusal(path)
        assert "\n" not in message
        assert len(message) < LONGEST_LINE


def changed(path: Path, source: Path, name: str, **changes: int) -> Path:
    """Write a file in whose index an entry has another number of dimensions, size, form or offset."""
    data = bytearray(source.read_bytes())
    place = data.index(name.encode()) + len(name)
    (dimensions,) = struct.unpack_from("<I", data, place)
    places = {"dimensions": place, "size": place + 4, "form": place + 4 + 8 * dimensions}
    places["offset"] = places["form"] + 4
    for field, value in changes.items():
        layout = "<Q" if field in ("size", "offset") else "<I"
        struct.pack_into(layout, data, places[field], value)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 1 << 40}, "is truncated: "),
        ({"offset": 0}, "have the same bytes"),
        ({"offset": 33}, "is not a multiple of 32"),
        ({"size": 0}, "cannot have the shape"),
        ({"size": 1 << 50}, "cannot have the shape"),
        ({"size": 33}, "cannot have the shape"),
        ({"size": 64}, "has shape [96, 64], the model needs [96, 96]"),
        ({"dimensions": 0}, "has 0 dimensions"),
        ({"dimensions": 77}, "has 77 dimensions"),
        ({"form": 99}, "is of type number 99"),
    ],
)
def test_index_that_cannot_be_right_is_refused(
    changes: dict[str, int], message: str, puzzles: Path, tmp_path: Path
) -> None:
    path = changed(tmp_path / "model.gguf", puzzles, "blk.1.attn_q.weight", **changes)
    found = refusal(path)
    assert message in found
    assert "\n" not in found


def test_several_readers_give_the_same_weights(puzzles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = find_decoder(puzzles), []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        read: list[int] = []
        model.stage(dtype=torch.int8, pages=1, progress=read.append)
        model.ends(torch.int8, progress=read.append)
        found.append((scores_of(puzzles, torch.int8, TOKENS), sum(read)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("name", ["blk.2.ffn_up.weight", "token_embd.weight"])
@pytest.mark.parametrize("threads", [1, 3])
def test_scale_that_is_not_finite_is_refused(
    name: str, threads: int, puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    path, data = tmp_path / "model.gguf", bytearray(puzzles.read_bytes())
    start = read_gguf_header(puzzles).tensors[name].start
    data[start + 34 : start + 36] = np.array([np.nan], "<f2").tobytes()
    path.write_bytes(data)
    assert refusal(path) == f"{path}: {name}: weights are not finite; fetch the file again"


def test_what_is_not_supported_is_named(
    tmp_path: Path, models: dict[str, transformers.PreTrainedModel]
) -> None:
    own, tensors = model_settings(models["llama2"]), model_tensors(models["llama2"])
    path = tmp_path / "model.gguf"
    for changes, message in (
        (
            {"general.architecture": "mamba"},
            "the architecture 'mamba' is not supported; supported are llama, ",
        ),
        ({"split.count": 3}, "it is one of 3 parts of a model; join them first"),
        ({"llama.expert_count": 8}, "it is a mixture of experts"),
        ({"llama.rope.scaling.type": "su"}, "the rotary scaling 'su' is not supported"),
        ({"llama.block_count": 4}, "has no tensor blk.3."),
        ({"llama.block_count": "three"}, "llama.block_count is 'three'; a whole number is needed"),
    ):
        write_gguf(path, own | changes, tensors)
        assert message in refusal(path)
    assert "llama" in ARCHITECTURES
    with pytest.raises(ModelError, match=r"there is no file nowhere\.gguf"):
        find_any("nowhere.gguf")
    with pytest.raises(ModelError, match="name its file, such as"):
        find_any(str(tmp_path))


def test_weights_of_a_file_that_are_too_new_are_named(puzzles: Path, tmp_path: Path) -> None:
    path = changed(
        tmp_path / "model.gguf", puzzles, "blk.1.attn_q.weight", form=20
    )  # IQ4_NL, which is shorter
    with (
        open_weights(path) as file,
        pytest.raises(WeightsError, match="is of type IQ4_NL, which is not read"),
    ):
        next(file.read_rows("blk.1.attn_q.weight", 8))
    assert "is of type IQ4_NL" in refusal(path)
