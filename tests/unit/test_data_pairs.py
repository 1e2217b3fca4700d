"""Test pairs of sentences: tables and lines that hold them, their tokens, and messages for malformed rows."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from fake_models import bert, write_tokenizer
from small_models import VOCABULARY

from pipeedge.base.errors import InputError, one_line
from pipeedge.data import InputRequest, open_input
from pipeedge.data.tables import BadRow
from pipeedge.data.text import Sentence, read_sentences
from pipeedge.models.outline import Outline

PAIRS = [("the cat", "sat"), ("a mat", "the cat sat on"), ("day", "all day and all")]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vocabulary")
    (directory / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return directory


def model(directory: Path, tokens: int = 24) -> Outline:
    return bert(len(VOCABULARY), tokens, directory=directory)


def rows(*columns: str, separator: str = "\t") -> str:
    """Return the table of ``PAIRS``, with a number first and a header if ``columns`` name it."""
    lines = [separator.join(("n", *columns))] if columns else []
    lines += [separator.join((str(number), *pair)) for number, pair in enumerate(PAIRS)]
    return "\n".join(lines) + "\n"


def lines(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def read(tmp_path: Path, name: str, content: str, *columns: str) -> list[Sentence]:
    """Return the sentences of a file, all of which must be good."""
    path = tmp_path / name
    path.write_text(content)
    rows = read_sentences(path, columns)
    for row in rows:
        if isinstance(row, BadRow):
            raise row.error
    return [row for row in rows if isinstance(row, Sentence)]


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("a.tsv", rows("query", "passage"), ()),
        ("a.csv", rows("Premise", "Hypothesis", separator=";"), ()),
        ("a.csv", rows("text", "text_pair", separator=","), ()),
        ("a.tsv", rows("left", "right"), ("left", "right")),
        ("a.tsv", rows(), ("2", "3")),
        ("a.jsonl", lines(*PAIRS), ()),
        ("a.jsonl", lines(*({"sentence1": a, "sentence2": b, "n": 1} for a, b in PAIRS)), ()),
        ("a.jsonl", lines(*({"b": b, "a": a} for a, b in PAIRS)), ("a", "b")),
    ],
)
def test_pairs_of_tables_and_lines(tmp_path: Path, name: str, content: str, columns: tuple[str, ...]) -> None:
    sentences = read(tmp_path, name, content, *columns)
    assert [(one.text, one.pair) for one in sentences] == PAIRS
    first = 1 if name.endswith("jsonl") or columns == ("2", "3") else 2
    assert [one.source for one in sentences] == [f"{tmp_path / name}:{first + row}" for row in range(3)]


def test_lines_of_single_sentences_and_labels(tmp_path: Path) -> None:
    content = (
        lines({"text": " the cat ", "label": 2}, {"text": "sat", "label": -1}) + "\n" + lines({"text": "on"})
    )
    assert [(one.text, one.pair, one.label) for one in read(tmp_path, "a.jsonl", content)] == [
        ("the cat", None, 2),
        ("sat", None, None),
        ("on", None, None),
    ]


def test_one_column_alone_gives_single_sentences(tmp_path: Path) -> None:
    sentences = read(tmp_path, "a.tsv", rows("query", "passage"), "passage")
    assert [one.texts for one in sentences] == [(b,) for _, b in PAIRS]


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        ("a.tsv", "query\tpassage\na\n", (), r"a\.tsv:2: this row has no column 2"),
        (
            "a.tsv",
            "query\tpassage\na\tb\n\nc\t \n",
            (),
            r"a\.tsv:4: the second sentence of this pair is empty",
        ),
        ("a.tsv", "query\tpassage\n\tb\n", (), r"a\.tsv:2: the first sentence of this pair is empty"),
        ("a.tsv", "a\tb\n", ("a", "c"), r"has no column c.*\(--text-pair-column\)"),
        ("a.tsv", "a\tb\n", ("1", "0"), "--text-pair-column 0: columns are counted from 1"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', (), r"a\.jsonl:2: is not JSON"),
        ("a.jsonl", '["a", "b", "c"]\n', (), r"a\.jsonl:1: a list of 3 values, not a pair of sentences"),
        ("a.jsonl", '["a", 7]\n', (), r"a\.jsonl:1: 7 is not a sentence"),
        ("a.jsonl", '"a"\n', (), r"a\.jsonl:1: is neither an object nor a pair"),
        ("a.jsonl", '{"words": "a"}\n', (), r"a\.jsonl:1: which key has the sentence\?.*its keys are words"),
        ("a.jsonl", '{"words": "a"}\n', ("word",), r"a\.jsonl:1: has no word; did you mean words\?"),
        (
            "a.jsonl",
            '{"text": "a"}\n["a", "b"]\n',
            (),
            r"a\.jsonl:1: one sentence, but .*a\.jsonl:2 has a pair",
        ),
        ("a.jsonl", '{"text": " "}\n', (), r"a\.jsonl:1: the sentence is empty"),
        ("a.jsonl", '["", ""]\n', (), r"a\.jsonl:1: the first sentence of this pair is empty"),
        ("a.jsonl", '{"text": "\\ud800"}\n', (), r"a\.jsonl:1: the sentence is not valid Unicode"),
        ("a.csv", 'text\na\n\n""\n', (), r"a\.csv:4: the sentence is empty"),
        ("a.tsv", "id\ttext\n1\t \n", (), r"a\.tsv:2: the sentence is empty"),
        ("a.csv", "text,label,Label\na,0,1\n", (), r"a\.csv: has 2 columns label; rename all but one"),
        ("a.jsonl", "\n\n", (), r"a\.jsonl: no sentence in this file"),
    ],
)
def test_malformed_rows_are_named(
    tmp_path: Path, name: str, content: str, columns: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path, name, content, *columns)
    assert str(caught.value) == one_line(caught.value)


def test_tokens_and_types_are_those_of_the_tokenizer(tmp_path: Path, vocabulary: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(*PAIRS))
    (microbatch,) = open_input(InputRequest(paths=(path,)), model(vocabulary)).microbatches(8)
    ids, mask, types = microbatch.payload
    place = {word: number for number, word in enumerate(VOCABULARY)}
    for row, (first, second) in enumerate(PAIRS):
        a, b = first.split(), second.split()
        words = ["[CLS]", *a, "[SEP]", *b, "[SEP]"]
        length = len(words)
        assert ids[row, :length].tolist() == [place[word] for word in words]
        assert types[row].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * (ids.shape[1] - length)
        assert mask[row].tolist() == [1] * length + [0] * (ids.shape[1] - length)
    assert microbatch.texts == tuple("\t".join(pair) for pair in PAIRS)


@pytest.mark.parametrize("pair", [("cat " * 50, "sat"), ("sat", "cat " * 5000), ("cat " * 900, "sat " * 700)])
def test_long_pairs_lose_the_end_of_the_longer_sentence(
    pair: tuple[str, str], tmp_path: Path, vocabulary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import BertTokenizer

    path = tmp_path / "a.jsonl"
    path.write_text(lines(pair))
    with caplog.at_level(logging.WARNING):
        source = open_input(InputRequest(paths=(path,)), model(vocabulary, 12))
    assert "1 of 1 sentences are longer than the 12 tokens" in caplog.text
    (microbatch,) = source.microbatches(1)
    expected = BertTokenizer.from_pretrained(vocabulary)(*pair, truncation=True, max_length=12)
    assert microbatch.payload[0].tolist() == [expected["input_ids"]]
    assert microbatch.payload[2].tolist() == [expected["token_type_ids"]]
    assert len(expected["input_ids"]) == 12


def test_model_without_token_types_gets_none(tmp_path: Path, vocabulary: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(*PAIRS))
    plain = bert(len(VOCABULARY), 24, type_vocab=0, directory=vocabulary)
    (microbatch,) = open_input(InputRequest(paths=(path,)), plain).microbatches(8)
    assert len(microbatch.payload) == 2


def test_token_types_beyond_the_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(*PAIRS))
    write_tokenizer(tmp_path, VOCABULARY, second=2)
    with pytest.raises(InputError, match="has token types up to 2, but local/bert has 2 types"):
        open_input(InputRequest(paths=(path,)), model(tmp_path))


def test_options_of_columns_that_contradict() -> None:
    with pytest.raises(InputError, match="--text-pair-column needs --text-column"):
        InputRequest(paths=(Path("a.tsv"),), text_pair_column="b")
    with pytest.raises(InputError, match="give two names or two numbers"):
        InputRequest(paths=(Path("a.tsv"),), text_column="a", text_pair_column="2")
