"""Test that the beginning of a long text has the tokens of the whole, for tokenizers of two kinds."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fake_models import bert
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pipeedge.data.beginnings import words_for
from pipeedge.data.text import Sentence, Tokenizer

PADDING, UNKNOWN = {"pad_token": "[PAD]"}, {"unk_token": "[UNK]"}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
CORPUS = ["the cat sat on a mat", "2 dogs don't sleep, all day", "caf\u00e9 \u4e2d\u6587 x\u0301y"] * 4
LIMIT = 9
WORDS = st.sampled_from(
    ["the", "cats", "don't", "2nd", "mat,", "...", "\u4e2d\u6587", "\u0301", "\u0301x", "X" * 120]
)
BLANKS = st.sampled_from([" ", " ", " ", "\n", "\t", "  ", " \n", "\u00a0", "\u3000", "\x1c"])


@cache
def backend(kind: str) -> Any:
    """Return a tokenizer trained on a few words."""
    if kind == "WordPiece":
        made = Backend(models.WordPiece(**UNKNOWN))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=SPECIAL, show_progress=False)
    else:
        made = Backend(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=SPECIAL,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=made, **PADDING, **UNKNOWN)


@st.composite
def texts(draw: st.DrawFn, longest: int) -> str:
    words = draw(st.lists(WORDS, min_size=1, max_size=longest))
    return "the" + "".join(draw(BLANKS) + word for word in words)


@pytest.mark.parametrize("kind", ["WordPiece", "byte-level BPE"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_long_texts_and_pairs_are_truncated_as_by_transformers(kind: str, data: st.DataObject) -> None:
    one = data.draw(texts(40))
    pair = data.draw(st.none() | texts(6) | texts(40))
    tokenizer = Tokenizer(backend(kind), Path("tokenizer.json"), bert(400, LIMIT))
    both = (one,) if pair is None else (one, pair)
    expected = backend(kind)(*([each] for each in both), truncation="longest_first", max_length=LIMIT)
    found = tokenizer.items([Sentence(one, "a", pair=pair)], warn=False)
    assert list(found.ids[0]) == expected["input_ids"][0]


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_end_and_tokens_of_several_words_count_where_the_tokenizer_says_so(side: str) -> None:
    other = backend.__wrapped__("WordPiece")
    other.truncation_side = side
    other.add_tokens(["cat sat on a mat"])
    text = "cat sat on a mat " * 4 + "the " * 20 + "dogs sleep"
    tokenizer = Tokenizer(other, Path("tokenizer.json"), bert(400, LIMIT))
    expected = other(text, truncation=True, max_length=LIMIT)["input_ids"]
    assert list(tokenizer.items([Sentence(text, "a")], warn=False).ids[0]) == expected


@given(texts(40), st.integers(1, 20))
def test_words_are_cut_off_only_if_enough_remain(text: str, tokens: int) -> None:
    words = words_for(text, tokens)
    assert text.startswith(words)
    if words != text:
        assert sum(word[0].isascii() and word[0].isalnum() for word in words.split()) >= tokens


def test_most_of_a_long_text_is_cut_off() -> None:
    assert words_for("the cat sat " * 1_000_000, 512) == " ".join(
        ["the cat sat"] * 171
    )  # the first is not counted
    assert words_for("\u4e2d" * 9_999, 4) == "\u4e2d" * 9_999
