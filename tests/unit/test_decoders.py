"""Test decoders in one process against transformers: scores, greedy tokens, and bits of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from decoder_cases import CASES, greedy
from effort import cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeedge import _native as native
from pipeedge.base.errors import ModelError
from pipeedge.base.machine import resident_bytes
from pipeedge.base.schedule import LayerRange
from pipeedge.decoding.exact import hidden_by_block
from pipeedge.decoding.loop import LocalDecoder
from pipeedge.models import find_outline
from pipeedge.models.decoder import DECODER_DTYPES, DecoderModel, find_decoder
from pipeedge.models.families.catalogue import parse_hf_config
from pipeedge.models.families.decoder import DecoderOptions
from pipeedge.models.layers import decoder as decoder_layers
from pipeedge.models.layers.decoder import StepRows
from pipeedge.models.registry import PUZZLES

LONGEST = 130


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, transformers.PreTrainedModel]]:
    root = tmp_path_factory.mktemp("decoders")
    return {
        name: (root / name, case.save(root / name, parts=number % 2 == 1))
        for number, (name, case) in enumerate(CASES.items())
    }


def wanted_scores(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        scores: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return scores


def found_scores(decoder: LocalDecoder, tokens: list[int], chunks: list[int]) -> torch.Tensor:
    """Return the scores behind each token, which arrive in chunks, the last of them one by one."""
    lists, parts, start = decoder.begin(), [], 0
    try:
        while start < len(tokens):
            size = chunks[len(parts)] if len(parts) < len(chunks) else 1
            parts.append(decoder.step([(lists, start, tokens[start : start + size])]))
            start += size
        return decoder.score(torch.cat(parts))
    finally:
        lists.give_back()


@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_transformers(
    name: str, saved: dict[str, tuple[Path, transformers.PreTrainedModel]]
) -> None:
    directory, reference = saved[name]
    model = find_decoder(directory)
    tokens = torch.randint(1, 83, (LONGEST,), generator=torch.Generator().manual_seed(5)).tolist()
    if (
        "dynamic" in name
    ):  # until the trained length, beyond which transformers rotates a prompt by its length
        tokens = tokens[: model.config.max_positions]
    wanted = wanted_scores(reference, tokens)
    # Cuts within blocks, and chunks that end within pages.
    found = found_scores(LocalDecoder(model, cuts=(1, 6, 11), context=256), tokens, [50, 3, 64])
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=cases(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_greedy_tokens_are_those_of_transformers(
    name: str, saved: dict[str, tuple[Path, transformers.PreTrainedModel]], data: st.DataObject
) -> None:
    directory, reference = saved[name]
    model = find_decoder(directory)
    cuts = sorted(data.draw(st.sets(st.integers(1, model.n_layers - 1), max_size=2)))
    prompt = data.draw(st.lists(st.integers(1, 82), min_size=1, max_size=90))
    tokens, chunk = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 100))
    decoder = LocalDecoder(model, cuts=cuts, context=128)
    assert decoder.generate(prompt, tokens, chunk=chunk) == greedy(reference, prompt, tokens)


def one_by_one(decoder: LocalDecoder, tokens: list[int]) -> torch.Tensor:
    """Return the hidden states of a sequence whose tokens are computed one after the other."""
    lists = decoder.begin()
    try:
        return torch.cat([decoder.step([(lists, place, [token])]) for place, token in enumerate(tokens)])
    finally:
        lists.give_back()


ROWS_ALONE = ("llama3", "gemma2", "olmo2", "gpt2", "phi3-long", "gemma3")


@pytest.fixture(scope="module")
def decoders(
    saved: dict[str, tuple[Path, transformers.PreTrainedModel]],
) -> dict[str, DecoderModel]:
    return {name: find_decoder(saved[name][0]) for name in ROWS_ALONE}


@pytest.mark.parametrize("dtype", DECODER_DTYPES, ids=str)
@pytest.mark.parametrize("name", ROWS_ALONE)
@settings(max_examples=cases(420, part=105), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_do_not_see_each_other(
    name: str,
    dtype: torch.dtype,
    decoders: dict[str, DecoderModel],
    data: st.DataObject,
) -> None:
    variant = data.draw(st.sampled_from(native.decoder_variants()))
    # Few long sequences, or many short ones: at most 64 rows decode together.
    most = data.draw(st.sampled_from([2, 6, 64]))
    tokens_of_one = st.lists(st.integers(1, 82), min_size=1, max_size=70 if most <= 6 else 4)
    sequences = data.draw(st.lists(tokens_of_one, min_size=most // 2, max_size=most))
    chunk, threads = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 3))
    cut = data.draw(st.integers(1, decoders[name].n_layers - 1))
    alone = LocalDecoder(decoders[name], dtype, context=96, threads=1, variant=variant)
    wanted = [one_by_one(alone, tokens) for tokens in sequences]
    together = LocalDecoder(
        decoders[name], dtype, cuts=(cut,), context=96, sequences=most, threads=threads, variant=variant
    )
    lists = [together.begin() for _ in sequences]
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    for start in range(0, max(map(len, sequences)), chunk):
        going = [number for number, tokens in enumerate(sequences) if start < len(tokens)]
        rows = [(lists[number], start, sequences[number][start : start + chunk]) for number in going]
        hidden = together.step(rows).split([len(tokens) for _, _, tokens in rows])
        for number, part in zip(going, hidden, strict=True):
            found[number].append(part.clone())
    for one, other in zip(wanted, found, strict=True):
        joined = torch.cat(other)
        assert torch.equal(one.view(torch.uint8), joined.view(torch.uint8))
        assert torch.equal(alone.score(one[-1:]), together.score(joined)[-1:])


@pytest.mark.parametrize("dtype", DECODER_DTYPES, ids=str)
def test_threads_give_the_same_bits(dtype: torch.dtype) -> None:
    """Threads begin only where there is enough to do: in a long step, and for many rows of the head."""
    model, tokens = find_decoder(PUZZLES), [3 + row % 250 for row in range(256)]
    found = []
    for threads in (1, 3):
        decoder = LocalDecoder(model, dtype, context=256, threads=threads)
        hidden = decoder.step([(decoder.begin(), 0, tokens)])
        found.append((hidden, decoder.score(hidden.repeat(8, 1))))
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(*found, strict=True)
    )


@pytest.mark.parametrize("dtype", DECODER_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["llama3", "phi3-long", "gpt2"])
def test_weights_read_in_small_parts_are_the_same(
    name: str,
    dtype: torch.dtype,
    saved: dict[str, tuple[Path, transformers.PreTrainedModel]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokens = find_decoder(saved[name][0]), list(range(1, 9))
    whole = found_scores(LocalDecoder(model, dtype, context=32), tokens, [8])
    monkeypatch.setattr(decoder_layers, "_PART_BYTES", 1)
    monkeypatch.setattr(decoder_layers, "_TOGETHER", 5)  # parts end within panels, and within a gate
    parts = found_scores(LocalDecoder(model, dtype, context=32), tokens, [8])
    assert torch.equal(whole, parts)


def test_windows_keep_no_more_pages_than_they_need(
    saved: dict[str, tuple[Path, transformers.PreTrainedModel]],
) -> None:
    model = find_decoder(saved["mistral"][0])
    assert set(model.config.own(DecoderOptions).windows) == {40}
    decoder = LocalDecoder(model, context=256)
    assert decoder.stages[0].cache_bytes == 3 * 3 * 32 * 2 * 2 * 32 * 4  # blocks, pages, positions, ...
    decoder.generate([1] * 200, 2)


def test_a_cleared_cache_is_in_memory(saved: dict[str, tuple[Path, transformers.PreTrainedModel]]) -> None:
    model = find_decoder(saved["gemma2"][0])
    layers = LayerRange(0, model.n_layers)
    pages = (60 << 20) // max(model.page_bytes(layers, torch.float32))
    stage = model.stage(layers, pages=pages, window_pages=pages)
    before = resident_bytes()
    stage.clear_cache()
    assert resident_bytes() - before > 0.8 * stage.cache_bytes > 0
    unwindowed = LayerRange(4, 8)
    stage = model.stage(unwindowed, pages=2)
    values = np.empty(model.page_bytes(unwindowed, torch.float32)[0], np.uint8)
    stage.step(
        [StepRows(0, 5, np.array([1], np.int32), np.array([], np.int32))],
        [torch.ones(5, model.config.hidden)],
    )
    for written in (True, False):
        stage.read_page(1, unwindowed, values)
        assert values.any() == written
        stage.clear_cache()


@pytest.mark.parametrize("name", ["llama3", "gemma3", "mistral", "gpt2"])
def test_a_block_at_a_time_gives_the_same_bits(
    name: str, saved: dict[str, tuple[Path, transformers.PreTrainedModel]]
) -> None:
    model = find_decoder(saved[name][0])
    texts = [list(range(1, 80)), [5], list(range(80, 1, -1)) * 2]
    found = hidden_by_block(model, model.ends(), texts)
    decoder = LocalDecoder(model, context=256)
    for text, hidden in zip(texts, found, strict=True):
        assert torch.equal(hidden, one_by_one(decoder, text))


def test_writing_a_position_twice_writes_the_same(
    saved: dict[str, tuple[Path, transformers.PreTrainedModel]],
) -> None:
    decoder = LocalDecoder(find_decoder(saved["gemma2"][0]), context=128)
    lists, tokens = decoder.begin(), list(range(1, 60))
    first = decoder.step([(lists, 0, tokens)])
    decoder.step([(lists, 59, [7])])
    again = decoder.step([(lists, 30, tokens[30:])])
    assert torch.equal(first[30:], again)


@pytest.mark.parametrize(
    ("dtype", "margin"), [(torch.bfloat16, 0.05), (torch.int8, 0.05), (torch.int4, 0.25)], ids=str
)
@pytest.mark.parametrize("name", ["llama3", "gemma3", "gpt2"])
def test_other_number_types_stay_close(
    name: str, dtype: torch.dtype, margin: float, saved: dict[str, tuple[Path, transformers.PreTrainedModel]]
) -> None:
    directory, reference = saved[name]
    tokens = list(range(1, 70))
    wanted = wanted_scores(reference, tokens)
    found = found_scores(LocalDecoder(find_decoder(directory), dtype, context=128), tokens, [64])
    assert float((found - wanted).norm() / wanted.norm()) < margin


def test_programs_refuse_a_decoder_in_one_line(
    saved: dict[str, tuple[Path, transformers.PreTrainedModel]],
) -> None:
    with pytest.raises(ModelError, match=r"generates text \(family llama\): this takes encoders only"):
        find_outline(saved["llama2"][0])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mixtral", "a mixture of experts"),
        ("qwen3_moe", "a mixture of experts"),
        ("mamba2", "a model with recurrent layers"),
        ("qwen2_vl", "a model with a vision or audio tower"),
        ("gemma3", "a model with a vision or audio tower"),
    ],
)
def test_other_kinds_of_decoders_are_named(kind: str, reason: str) -> None:
    with pytest.raises(ModelError, match=f"{reason}, which is not supported"):
        parse_hf_config({"model_type": kind})


@pytest.mark.parametrize("dtype", DECODER_DTYPES, ids=str)
@pytest.mark.parametrize("cut", [4, 5, 6, 7])
def test_a_stage_goes_on_with_the_layers_of_another(
    cut: int, dtype: torch.dtype, decoders: dict[str, DecoderModel]
) -> None:
    model, tokens = decoders["llama3"], [1 + 7 * place % 80 for place in range(50)]
    whole = LocalDecoder(model, dtype, context=64)
    lists = whole.begin()
    whole.step([(lists, 0, tokens[:-1])])
    wanted = whole.step([(lists, 49, tokens[-1:])])
    divided = LocalDecoder(model, dtype, cuts=(cut,), context=64)
    lists = divided.begin()
    divided.step([(lists, 0, tokens[:-1])])
    layers = LayerRange(0, model.n_layers)
    loaded: list[int] = []
    others = [(one, range(99)) for one in divided.stages[1:]]
    stage = model.stage(
        layers,
        dtype,
        pages=2,
        context=64,
        adopts=others,
        progress=loaded.append,
    )
    assert stage.adopted == set(range(cut, model.n_layers))
    assert sum(loaded) == model.parameter_count(layers)
    # The first stage is lost, and its layers compute again.
    rows = StepRows(0, 49, np.array(lists.pages, np.int32), np.array([], np.int32))
    stage.step([rows], (divided.ends.embed(tokens[:-1], range(49)),), stop=cut)
    divided.stages = [stage]
    assert torch.equal(divided.step([(lists, 49, tokens[-1:])]), wanted)
    larger = model.stage(layers, dtype, pages=3, context=64, adopts=[(stage, range(99))])
    assert larger.adopted == set()


@pytest.mark.parametrize("dtype", DECODER_DTYPES, ids=str)
@pytest.mark.parametrize("first", [3, 4, 5])
def test_a_stage_takes_copies_of_pages(
    first: int, dtype: torch.dtype, decoders: dict[str, DecoderModel]
) -> None:
    model, tokens = decoders["llama3"], [1 + 7 * place % 80 for place in range(66)]
    layers = LayerRange(first, model.n_layers)
    whole = LocalDecoder(model, dtype, context=96)
    lists = whole.begin()
    whole.step([(lists, 0, tokens[:-1])])
    wanted = whole.step([(lists, 65, tokens[-1:])])
    standby = model.stage(layers, dtype, pages=3, context=96)
    values = np.empty(model.page_bytes(layers, dtype)[0], np.uint8)
    for page in lists.pages:
        whole.stages[0].read_page(page, layers, values)
        standby.write_page(page, values)
    # The other layers have lost what they had, and compute again.
    stage = model.stage(pages=3, context=96, dtype=dtype, adopts=[(standby, range(99))])
    rows = StepRows(0, 65, np.array(lists.pages, np.int32), np.array([], np.int32))
    stage.step([rows], (whole.ends.embed(tokens[:-1], range(65)),), stop=layers.start)
    assert stage.adopted == set(range(layers.start, layers.stop))
    whole.stages = [stage]
    assert torch.equal(whole.step([(lists, 65, tokens[-1:])]), wanted)
    for page, size in ((3, 0), (-1, 0), (0, 1)):
        with pytest.raises(ValueError, match=r"page|values"):
            standby.write_page(page, np.empty(values.size + size, np.uint8))
