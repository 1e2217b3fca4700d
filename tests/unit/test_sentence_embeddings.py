"""Test embeddings of directories in the form of sentence-transformers, against an oracle in NumPy."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from models_oracle import save, scramble
from safetensors.torch import load_file, save_file
from small_models import VOCABULARY, WORDS

from pipeedge.base.errors import InputError, ModelError, WeightsError
from pipeedge.base.payload import Payload
from pipeedge.base.schedule import LayerRange
from pipeedge.data import InputRequest, open_input
from pipeedge.models import Model, find_model
from pipeedge.models.weights.download import convert

FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
TYPE = "sentence_transformers.models."
SENTENCES = ("the cat sat on a mat", "day", "all day the cat slept", "and a mat")
HIDDEN = 24
_SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "vocab_size": len(VOCABULARY),
    "max_position_embeddings": 26,
}
_IDS = {f"{name}_token_id": 0 for name in ("pad", "eos", "bos", "cls", "sep")}
ENCODERS = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**_SIZES)),
    "mpnet": lambda: transformers.MPNetModel(transformers.MPNetConfig(**_SIZES)),
    "modernbert": lambda: transformers.ModernBertModel(
        transformers.ModernBertConfig(**_SIZES, **_IDS, local_attention=4)
    ),
}


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def write_directory(
    directory: Path,
    encoder: transformers.PreTrainedModel,
    *,
    pooling: Mapping[str, Any],
    dense: Sequence[tuple[int, bool, str]] = (),
    normalize: bool = False,
) -> list[tuple[np.ndarray, np.ndarray | None, str]]:
    """Write an encoder with modules behind it; return weight, bias and activation of its dense layers."""
    save(encoder, directory)
    (directory / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    names = [("Transformer", ""), ("Pooling", "1_Pooling")]
    write_json(directory / "1_Pooling" / "config.json", pooling)
    width = HIDDEN * max(1, sum(value is True for value in pooling.values()))
    generator, layers = torch.Generator().manual_seed(5), []
    for number, (outputs, biased, activation) in enumerate(dense, start=2):
        path = f"{number}_Dense"
        names.append(("Dense", path))
        config = {"in_features": width, "out_features": outputs, "bias": biased}
        write_json(directory / path / "config.json", {**config, "activation_function": activation})
        tensors = {"linear.weight": torch.randn(outputs, width, generator=generator) / width**0.5}
        if biased:
            tensors["linear.bias"] = torch.randn(outputs, generator=generator)
        save_file(tensors, directory / path / "model.safetensors")
        bias = tensors["linear.bias"].numpy() if biased else None
        layers.append((tensors["linear.weight"].numpy(), bias, activation))
        width = outputs
    if normalize:
        names.append(("Normalize", f"{len(names)}_Normalize"))
    write_json(
        directory / "modules.json",
        [
            {"idx": place, "name": str(place), "path": path, "type": f"{TYPE}{kind}"}
            for place, (kind, path) in enumerate(names)
        ],
    )
    return layers


def oracle(
    states: np.ndarray,
    lengths: Sequence[int],
    modes: Sequence[str],
    layers: Sequence[tuple[np.ndarray, np.ndarray | None, str]],
    *,
    normalize: bool,
) -> np.ndarray:
    """Return the embeddings of final hidden states, sentence by sentence, from the unpadded tokens alone."""
    rows = []
    for row, length in zip(states.astype(np.float64), lengths, strict=True):
        tokens = row[:length]
        ways = {
            "cls": lambda tokens=tokens: tokens[0],
            "max": lambda tokens=tokens: tokens.max(0),
            "mean": lambda tokens=tokens: tokens.mean(0),
            "mean_sqrt_len_tokens": lambda tokens=tokens: tokens.sum(0) / np.sqrt(len(tokens)),
            "weightedmean": lambda tokens=tokens: np.average(tokens, 0, np.arange(1, len(tokens) + 1)),
            "lasttoken": lambda tokens=tokens: tokens[-1],
        }
        vector = np.concatenate([ways[mode]() for mode in modes])
        for weight, bias, activation in layers:
            vector = weight @ vector + (0 if bias is None else bias)
            vector = np.tanh(vector) if activation.endswith("Tanh") else vector
        rows.append(vector / np.linalg.norm(vector) if normalize else vector)
    return np.array(rows)


def tokens_of(model: Model, texts: Sequence[str], directory: Path) -> Payload:
    """Return the input of the first stage, as a run makes it from a file."""
    path = directory / "sentences.txt"
    path.write_text("".join(f"{text}\n" for text in texts))
    (microbatch,) = open_input(InputRequest(paths=(path,)), model).microbatches(len(texts))
    return microbatch.payload


def embed(model: Model, cuts: Sequence[int], inputs: Payload) -> np.ndarray:
    """Return the embeddings that stages with these cuts compute."""
    payload, (items, tokens) = inputs, inputs[0].shape
    with torch.inference_mode():
        for start, stop in pairwise([0, *cuts, model.n_layers]):
            payload = model.load(LayerRange(start, stop), kernels="torch")(payload)
            specs = model.payload_specs(stop, items, tokens)
            assert [(tuple(t.shape), t.dtype) for t in payload] == [(s.shape, s.dtype) for s in specs]
    return payload[0].numpy()


def states_of(
    encoder: transformers.PreTrainedModel, directory: Path, texts: Sequence[str]
) -> tuple[np.ndarray, list[int]]:
    """Return final hidden states as transformers computes them, and the lengths in tokens."""
    tokenizer = transformers.BertTokenizer.from_pretrained(directory)
    batch = tokenizer(list(texts), padding=True, return_tensors="pt")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.inference_mode():
        states = encoder(**inputs).last_hidden_state
    return states.numpy(), batch["attention_mask"].sum(1).tolist()


sentences = st.lists(st.sampled_from(WORDS), min_size=1, max_size=9).map(" ".join)
dense_layers = st.lists(
    st.tuples(
        st.integers(1, 12),
        st.booleans(),
        st.sampled_from(["torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"]),
    ),
    max_size=2,
)


@pytest.mark.parametrize("family", ENCODERS)
@settings(max_examples=cases(60))
@given(
    flags=st.sets(st.sampled_from(list(FLAGS)), min_size=1, max_size=3),
    dense=dense_layers,
    normalize=st.booleans(),
    seed=st.integers(0, 99),
    texts=st.lists(sentences, min_size=1, max_size=4),
)
def test_embeddings_equal_those_of_sentence_transformers(
    family: str,
    flags: set[str],
    dense: list[tuple[int, bool, str]],
    normalize: bool,
    seed: int,
    texts: list[str],
) -> None:
    encoder = ENCODERS[family]()
    scramble(encoder, seed)
    encoder.set_attn_implementation("eager")
    encoder.eval()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        pooling = {"word_embedding_dimension": HIDDEN, **{flag: flag in flags for flag in FLAGS}}
        layers = write_directory(directory, encoder, pooling=pooling, dense=dense, normalize=normalize)
        modes = [mode for flag, mode in FLAGS.items() if flag in flags]
        states, lengths = states_of(encoder, directory, texts)
        expected = oracle(states, lengths, modes, layers, normalize=normalize)
        model = find_model(directory)
        assert model.output_kind == "vector"
        inputs = tokens_of(model, texts, directory)
        whole = embed(model, [], inputs)
        np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-5)
        for cut in range(1, model.n_layers):
            assert np.array_equal(embed(model, [cut], inputs), whole)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    encoder = ENCODERS["bert"]()
    scramble(encoder, 1)
    write_directory(
        tmp_path / "model",
        encoder,
        pooling={"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True},
        dense=[(10, True, "torch.nn.modules.activation.Tanh")],
        normalize=True,
    )
    return tmp_path / "model"


@pytest.mark.parametrize("mode", ["mean", ["cls", "mean"]])
def test_pooling_mode_may_be_named(directory: Path, mode: object) -> None:
    write_json(directory / "1_Pooling" / "config.json", {"embedding_dimension": HIDDEN, "pooling_mode": mode})
    if isinstance(mode, list):
        with pytest.raises(
            ModelError, match=r"2_Dense/config\.json: takes vectors of 24 values, but gets 48"
        ):
            find_model(directory)
    else:
        pooling = find_model(directory).config.pooling
        assert pooling is not None
        assert pooling.modes == ("mean",)


def test_converted_weights_hold_the_dense_layers(directory: Path) -> None:
    model = find_model(directory)
    target = model.converted_path(torch.bfloat16)
    convert(model, model.default_weights, target, torch.bfloat16, say=lambda _: None)
    inputs = tokens_of(model, SENTENCES, directory)
    exact = embed(model, [], inputs)
    (directory / "2_Dense" / "model.safetensors").unlink()
    (directory / "model.safetensors").unlink()
    with torch.inference_mode():
        (reduced,) = find_model(directory).load(dtype=torch.bfloat16)(inputs)
    assert np.abs(reduced.numpy() - exact).max() < 0.05


def test_fingerprint_covers_the_dense_layers(directory: Path) -> None:
    before = find_model(directory).fingerprint()
    path = directory / "2_Dense" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
    assert find_model(directory).fingerprint() != before


def test_sentences_follow_the_rules_of_the_directory(directory: Path, tmp_path: Path) -> None:
    """They are cut at ``max_seq_length``, in small letters if asked for, behind the default prompt."""
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": 5, "do_lower_case": True})
    write_json(
        directory / "config_sentence_transformers.json",
        {"default_prompt_name": "query", "prompts": {"query": "a mat ", "passage": ""}},
    )
    (tmp_path / "s.txt").write_text("THE cat sat on a mat\nday\n")
    (microbatch,) = open_input(InputRequest(paths=(tmp_path / "s.txt",)), find_model(directory)).microbatches(
        2
    )
    words = [[VOCABULARY[number] for number in row] for row in microbatch.payload[0].tolist()]
    assert words == [["[CLS]", "a", "mat", "the", "[SEP]"], ["[CLS]", "a", "mat", "day", "[SEP]"]]
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": 0})
    with pytest.raises(InputError, match="max_seq_length is 0, not a number of tokens"):
        open_input(InputRequest(paths=(tmp_path / "s.txt",)), find_model(directory))


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (
            "modules.json",
            [{"type": f"{TYPE}Transformer", "path": ""}, {"type": f"{TYPE}LSTM", "path": "1"}],
            "LSTM",
        ),
        ("modules.json", [{"type": f"{TYPE}CLIPModel", "path": ""}], "the module CLIPModel is not supported"),
        (
            "modules.json",
            [{"type": f"{TYPE}Transformer", "path": ""}],
            "the modules are Transformer; supported",
        ),
        ("modules.json", [{"type": f"{TYPE}Pooling", "path": "../1"}], "must be the name of a directory"),
        ("modules.json", [{"path": "x"}], "each module needs a type and a path"),
        ("modules.json", {}, "is not a JSON list"),
        (
            "1_Pooling/config.json",
            {"word_embedding_dimension": 7},
            "pools vectors of 7 values, the model's have 24",
        ),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "no pooling mode is not supported"),
        ("1_Pooling/config.json", {"pooling_mode_new": True}, "pooling_mode_new is not supported"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "the pooling mode 'median' is not supported"),
        (
            "1_Pooling/config.json",
            {"pooling_mode": "mean", "include_prompt": False},
            "include_prompt is false",
        ),
        ("2_Dense/config.json", {"in_features": 24, "out_features": 0}, "out_features is 0"),
        (
            "2_Dense/config.json",
            {"activation_function": "torch.nn.ELU"},
            "the activation ELU is not supported",
        ),
    ],
)
def test_modules_that_are_not_supported_are_named(
    directory: Path, file: str, content: object, said: str
) -> None:
    write_json(directory / file, content)
    with pytest.raises(ModelError) as caught:
        find_model(directory)
    assert said in str(caught.value)
    assert str(directory / file) in str(caught.value)


def test_missing_files_of_modules_are_named(directory: Path) -> None:
    (directory / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="2_Dense has neither"):
        find_model(directory).load()
    (directory / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"1_Pooling/config\.json cannot be read"):
        find_model(directory)
