"""Test answers as they grow: text in pieces, stop strings, ends, and the prompts they follow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeedge.base.errors import InputError
from pipeedge.decoding.generation import FinishReason, Generation
from pipeedge.decoding.prompt import Prompt, PromptMaker
from pipeedge.decoding.sampling import Sampling
from pipeedge.decoding.text_stream import TextStream
from pipeedge.decoding.vocabulary import Vocabulary

DIRECTORY = ROOT / "pipeedge" / "assets" / "llama-puzzles"


def puzzles() -> Vocabulary:
    return Vocabulary(AutoTokenizer.from_pretrained(DIRECTORY), DIRECTORY / "tokenizer.json", "puzzles", 262)


def sentencepiece_like() -> Vocabulary:
    """Return a tokenizer with the decoder of Llama 2: blanks as underlines, unknown characters as bytes."""
    words = [
        "<unk>",
        "<s>",
        "\u2581",
        "\u2581a",
        "b",
        "\u2581\u2581",
        "\ufffd",
        "\u00e9",
        "\u2581the",
        "x\u2581y",
    ]
    vocab = {word: number for number, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend = PreTrainedTokenizerFast(tokenizer_object=inner, additional_special_tokens=words[:2])
    return Vocabulary(backend, Path("tokenizer.json"), "llama2", len(vocab) + 3)


def test_a_text_that_a_tokenizer_cannot_encode_is_one_line() -> None:
    inner = Tokenizer(models.WordLevel({"known": 0}))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    backend = PreTrainedTokenizerFast(tokenizer_object=inner)
    vocabulary = Vocabulary(backend, Path("tokenizer.json"), "small", 1)
    assert vocabulary.encode("known") == [0]
    with pytest.raises(InputError, match=r"^tokenizer\.json does not encode strange: .*UNK"):
        vocabulary.encode("strange")


KINDS = {"byte-level": puzzles(), "sentencepiece": sentencepiece_like()}


def token_strings(vocabulary: Vocabulary) -> st.SearchStrategy[list[int]]:
    """Return texts in tokens, with some bytes replaced, and anything else."""
    texts = st.text(st.sampled_from("ab é雪🙂\u200d�\n"), max_size=12).map(vocabulary.encode)
    broken = st.tuples(texts, st.lists(st.integers(0, vocabulary.tokens - 1), max_size=4), st.randoms()).map(
        lambda drawn: mixed(*drawn)
    )
    return st.one_of(broken, st.lists(st.integers(0, vocabulary.tokens - 1), max_size=60))


def mixed(tokens: list[int], others: list[int], source: random.Random) -> list[int]:
    tokens = list(tokens)
    for other in others:
        tokens.insert(source.randint(0, len(tokens)), other)
    return tokens


def in_pieces(stream: TextStream, tokens: Sequence[int]) -> list[str]:
    return [*map(stream.push, tokens), stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=cases(50_000, 500), deadline=None)
@given(data=st.data())
def test_text_in_pieces_is_the_text_at_once(kind: str, data: st.DataObject) -> None:
    vocabulary = KINDS[kind]
    tokens = data.draw(token_strings(vocabulary))
    assert "".join(in_pieces(TextStream(vocabulary), tokens)) == vocabulary.decode(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_long_answers_are_decoded_in_parts(kind: str) -> None:
    vocabulary = KINDS[kind]
    source = random.Random(3)
    for _ in range(20):
        tokens = [source.randrange(vocabulary.tokens) for _ in range(600)]
        assert "".join(in_pieces(TextStream(vocabulary), tokens)) == vocabulary.decode(tokens)


class Letters:
    """A vocabulary in which each token is a short text."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self._words[token] for token in tokens)

    def is_silent(self, token: int) -> bool:
        return False

    def is_byte(self, token: int) -> bool:
        return False


WORDS = ["a", "b", "c", "ab", "ba", "abc", "caab", ""]


@settings(max_examples=cases(3000), deadline=None)
@given(
    st.lists(st.integers(0, len(WORDS) - 1), max_size=25),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_no_stop_string_leaks(tokens: list[int], stop: list[str]) -> None:
    """The text ends before the stop string that is complete first, and nothing is held back in vain."""
    letters = Letters(WORDS)
    whole = letters.decode(tokens)
    ends = [(place + len(one), place) for one in stop if (place := whole.find(one)) >= 0]
    expected = whole[: min(ends)[1]] if ends else whole
    stream = TextStream(letters, stop)
    shown = ""
    for number, token in enumerate(tokens):
        shown += stream.push(token)
        assert expected.startswith(shown)
        if stream.stopped:
            break
        waiting = letters.decode(tokens[: number + 1])[len(shown) :]
        assert not waiting or any(one.startswith(waiting) for one in stop)
    assert stream.stopped == bool(ends)
    assert shown + stream.finish() == expected


def generation(options: Sampling, tokens: Sequence[int], **more: Any) -> tuple[Generation, list[str]]:
    """Return an answer that consists of ``tokens``, as far as it goes, and its pieces."""
    vocabulary = KINDS["byte-level"]
    answer = Generation(Prompt((5, 6), options), vocabulary, more.pop("context", 100), frozenset({3}), **more)
    pieces = []
    for token in tokens:
        scores = np.zeros(vocabulary.tokens, np.float32)
        scores[token] = 5
        pieces.append(answer.take(scores).text)
        if answer.finish_reason is not None:
            break
    return answer, pieces


GREEDY = Sampling(temperature=0)


def test_an_answer_ends_with_the_models_own_token() -> None:
    text = KINDS["byte-level"].encode("naïve")
    answer, pieces = generation(GREEDY, [*text, 3, 70])
    assert pieces == ["n", "a", "", "ï", "v", "e", ""]
    done = answer.answer()
    assert (done.text, done.finish_reason, done.prompt_tokens) == ("naïve", FinishReason.STOP, 2)
    assert [one.token for one in done.drawn] == [*text, 3]
    answer, _ = generation(Sampling(temperature=0, ignore_eos=True, max_tokens=4), [70, 3, 70, 70, 70])
    assert answer.finish_reason is FinishReason.LENGTH
    assert len(answer.tokens) == 4


def test_an_answer_ends_at_a_stop_string_or_token_or_when_it_is_long_enough() -> None:
    encode = KINDS["byte-level"].encode
    answer, pieces = generation(Sampling(temperature=0, stop=("END",)), encode("one EN two ENDED"))
    assert "".join(pieces) == answer.answer().text == "one EN two "
    assert answer.finish_reason is FinishReason.STOP
    answer, _ = generation(Sampling(temperature=0, stop_token_ids=(70,)), [80, 70, 81])
    assert answer.tokens == [80, 70]
    assert answer.answer().text == KINDS["byte-level"].decode([80])
    answer, pieces = generation(GREEDY, encode("abcdefgh"), context=6)
    assert (answer.answer().text, answer.finish_reason) == ("abcd", FinishReason.LENGTH)
    # What may be a beginning of a stop string is text after all, and half a character is what is left of it.
    answer, pieces = generation(Sampling(temperature=0, stop=("END",), max_tokens=2), encode("EN"))
    assert pieces == ["", "EN"]
    answer, pieces = generation(Sampling(temperature=0, max_tokens=2), encode("a雪"))
    assert pieces == ["a", "\ufffd"]


def maker(vocabulary: Vocabulary = KINDS["byte-level"], **more: Any) -> PromptMaker:
    return PromptMaker(vocabulary, GREEDY, more.pop("context", 50), **more)


def test_prompts_come_from_texts_tokens_and_conversations() -> None:
    vocabulary = KINDS["byte-level"]
    prompt = maker().from_text("2+2?", 4, "a.txt:5")
    assert vocabulary.backend.decode(prompt.tokens) == "<|user|>2+2?<|end|><|assistant|>"
    assert (prompt.item, prompt.source, prompt.sequence) == (4, "a.txt:5", 4)
    assert maker(raw=True).from_text("2+2?").tokens == tuple(vocabulary.encode("2+2?"))
    without = sentencepiece_like()
    assert maker(without).from_text("ab").tokens == tuple(without.encode("ab"))
    messages = [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
    document = {"messages": messages, "temperature": 0.5, "seed": 3, "bad_words": ["ab"]}
    chat = maker().from_document(document, 4, "a.jsonl:5")
    assert chat.tokens == prompt.tokens
    assert (chat.sampling.temperature, chat.sampling.seed, chat.sequence) == (0.5, 3, 0)
    ab = tuple(vocabulary.encode("ab"))
    assert set(chat.sampling.bad_words) == {ab, tuple(vocabulary.encode(" ab"))}
    for kind in ("prompt", "prompt_token_ids"):
        assert maker().from_document({kind: [7, 8]}, 0, "a").tokens == (7, 8)
    assert maker().from_document({"prompt": "2+2?"}, 0, "a").tokens == tuple(vocabulary.encode("2+2?"))


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ([1], "is not an object"),
        ({}, "it has none of them"),
        ({"prompt": "a", "messages": []}, "it has prompt and messages"),
        ({"prompt": "a", "temprature": 1}, "unknown field temprature; did you mean temperature"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [1, 262]}, "has token 262; the model's are 0 to 261"),
        ({"prompt_token_ids": [-1]}, "has token -1"),
        ({"prompt_token_ids": [True]}, "a list of whole numbers is needed"),
        ({"prompt": "a" * 50}, "has 50 tokens; the context of 50"),
        ({"prompt": "a" * 60_000}, "60,000 characters, too many"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"prompt": "a", "tools": []}, "tools needs messages"),
        ({"messages": []}, "a list of one or more messages"),
        ({"messages": ["a"]}, r"messages\[0\] is not an object"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content is 3"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "other than text"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1.0; 0 to 100"),
        ({"prompt": "a", "stop": 3}, "stop is 3"),
        ({"prompt": "a", "logit_bias": {"300": 1}}, "token 300 is beyond"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "the key x"),
        ({"prompt": "a", "top_logprobs": 2}, "needs logprobs"),
        ({"prompt": "a", "max_tokens": 2, "max_completion_tokens": 3}, "give one of them"),
    ],
)
def test_a_prompt_that_cannot_run_is_one_line(document: object, line: str) -> None:
    with pytest.raises(InputError, match=line) as caught:
        maker().from_document(document, 0, "a.jsonl:7")
    assert str(caught.value).startswith("a.jsonl:7: ")
    assert "\n" not in str(caught.value)


def test_messages_need_a_template() -> None:
    with pytest.raises(InputError, match=r"has no chat template.*--prompt"):
        maker(sentencepiece_like()).from_document({"messages": [{"role": "user", "content": "a"}]}, 0, "a")
