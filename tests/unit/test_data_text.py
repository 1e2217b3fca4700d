"""Test text as input: lines, columns of tables, and tokenizers."""

from __future__ import annotations

import dataclasses
import io
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from fake_models import bert

import pipeedge.data.text
from pipeedge.base.errors import InputError
from pipeedge.data import InputRequest, open_input
from pipeedge.data.beginnings import wide_encoding
from pipeedge.data.text import Sentence, TokenItems, find_tokenizer, read_sentences

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", ".", "##s"]


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """Return a model directory with a tiny WordPiece vocabulary."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return directory


class CountingBackend:
    """A tokenizer that notes how many characters it is called with."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.lengths: list[int] = []

    def __call__(self, texts: list[str], **options: object) -> object:
        self.lengths.append(sum(map(len, texts)))
        return self._backend(texts, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)


def file_with(tmp_path: Path, text: str, name: str = "input.txt") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


class TestText:
    def test_one_sentence_a_line(self, tmp_path: Path, vocabulary: Path) -> None:
        path = file_with(tmp_path, "\ufeffThe cats sat.\n\n  \nthe cat\nunheard\n")
        source = open_input(InputRequest(paths=(path,)), bert(vocab=10, directory=vocabulary))
        assert len(source) == 3
        assert source.max_tokens == 7
        assert not source.has_labels
        (microbatch,) = source.microbatches(8)
        ids, mask, types = microbatch.payload
        assert ids.tolist() == [[2, 5, 6, 9, 7, 8, 3], [2, 5, 6, 3, 0, 0, 0], [2, 1, 3, 0, 0, 0, 0]]
        assert mask.tolist() == [[1] * 7, [1] * 4 + [0] * 3, [1] * 3 + [0] * 4]
        assert types.shape == ids.shape
        assert microbatch.sources == (f"{path}:1", f"{path}:4", f"{path}:5")

    def test_sentences_go_through_the_models_own_tokenizer(self, vocabulary: Path) -> None:
        source = open_input(InputRequest(max_items=6), bert(vocab=10, directory=vocabulary))
        (microbatch,) = source.microbatches(8)
        assert microbatch.payload[0][:, 0].tolist() == [VOCABULARY.index("[CLS]")] * 6
        assert VOCABULARY.index("the") in microbatch.payload[0]

    def test_long_sentences_are_truncated_with_one_warning(
        self, tmp_path: Path, vocabulary: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = file_with(tmp_path, "the cat\n" + "cat " * 50 + "\n" + "sat " * 60 + "\n")
        with caplog.at_level(logging.WARNING):
            source = open_input(InputRequest(paths=(path,)), bert(10, 6, directory=vocabulary))
        (message,) = [one for one in caplog.messages if "longer" in one]
        assert "2 of 3 sentences" in message
        assert f"{path}:2" in message
        assert source.max_tokens == 6
        (microbatch,) = source.microbatches(8)
        assert microbatch.payload[0].tolist() == [[2, 5, 6, 3, 0, 0], [2, 6, 6, 6, 6, 3], [2, 7, 7, 7, 7, 3]]

    def test_only_newlines_end_a_sentence(self, tmp_path: Path, vocabulary: Path) -> None:
        path = tmp_path / "input.txt"
        path.write_bytes("the \x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029 cat\r\nsat".encode())
        source = open_input(InputRequest(paths=(path,)), bert(10, directory=vocabulary))
        (microbatch,) = source.microbatches(8)
        assert microbatch.sources == (f"{path}:1", f"{path}:2")
        assert microbatch.payload[0][0].tolist()[:2] == [2, 5]
        assert microbatch.payload[0][1].tolist()[:3] == [2, 7, 3]

    @pytest.mark.parametrize(
        ("name", "content", "column"),
        [
            ("a.csv", 'id,text\n1,the\n\n2,"cat, sat"\n4,"the\nsat"\n', None),
            ("a.csv", "label,review\n0,the\n,cat sat\n1.0,the sat\n", None),
            ("a.csv", "Sentence;n\r\nthe;1\r\ncat, sat;2\r\nthe sat;3\r\n", None),
            ("a.csv", "only\nthe\ncat sat\nthe sat\n", None),
            ("a.tsv", "id\tfirst\tsecond\n1\tx\tthe\n2\tx\tcat sat\n3\tx\tthe sat\n", "second"),
            ("a.tsv", '1\t"the\n2\tcat sat\n3\tthe sat\n', "2"),
            ("-", "n,text\n1,the\n2,cat sat\n3,the sat\n", "text"),
            ("-", "the\r\n\ncat sat\nthe sat", None),
        ],
    )
    def test_columns_of_tables_and_standard_input(
        self,
        tmp_path: Path,
        vocabulary: Path,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        content: str,
        column: str | None,
    ) -> None:
        path = Path("-") if name == "-" else tmp_path / name
        if name == "-":
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
        else:
            path.write_bytes(content.encode())
        request = InputRequest(paths=(path,), text_column=column)
        (microbatch,) = open_input(request, bert(10, directory=vocabulary)).microbatches(8)
        assert microbatch.texts is not None
        words = [text.replace('"', "").replace(",", "").split() for text in microbatch.texts]
        assert words == [["the"], ["cat", "sat"], ["the", "sat"]]
        assert microbatch.sources[0] == ("standard input" if name == "-" else str(path)) + (
            ":1" if "text" not in content and content[:3] in ("the", '1\t"') else ":2"
        )

    def test_rows_keep_their_numbers_where_others_are_skipped(self, tmp_path: Path, vocabulary: Path) -> None:
        model = bert(10, directory=vocabulary)
        first = file_with(tmp_path, "id,text,label\n1,the,1\n2,,0\n3,cat,7\n4,sat,\n", "a.csv")
        second = file_with(
            tmp_path, '{"text": "the"}\n\n{"text": " "}\n{"text": \n{"text": "cat"}\n', "b.jsonl"
        )
        request = InputRequest(paths=(first, second), skip_bad_input=True)
        source = open_input(request, model)
        assert len(source) == 8
        batches = list(source.microbatches(3))
        assert [batch.numbers for batch in batches] == [(0, 3, 4), (7,)]
        assert batches[0].labels == (1, None, None)
        assert batches[0].sources == (f"{first}:2", f"{first}:5", f"{second}:1")
        assert [skipped.source for skipped in source.skipped] == [
            f"{first}:3",
            f"{first}:4",
            f"{second}:3",
            f"{second}:4",
        ]
        limited = open_input(dataclasses.replace(request, max_items=3), model)
        assert [batch.numbers for batch in limited.microbatches(8)] == [(0,)]
        assert [batch.numbers for batch in source.rest(4).microbatches(8)] == [(4, 7)]

    def test_bad_rows_are_refused_before_the_run(self, tmp_path: Path, vocabulary: Path) -> None:
        model = bert(10, directory=vocabulary)
        path = file_with(tmp_path, "id,text\n1,the\n2,\n", "a.csv")
        message = r"a\.csv:3: the sentence is empty; --skip-bad-input leaves such rows out"
        with pytest.raises(InputError, match=message):
            open_input(InputRequest(paths=(path,)), model)
        assert len(open_input(InputRequest(paths=(path,), max_items=1), model)) == 1
        empty = file_with(tmp_path, '{"text": ""}\n{"text": " "}\n', "b.jsonl")
        with pytest.raises(InputError, match=r"none of the 2 items can be read; the first: .*b\.jsonl:1"):
            open_input(InputRequest(paths=(empty,), skip_bad_input=True), model)

    def test_a_sentence_without_tokens_is_a_bad_row(self, tmp_path: Path, vocabulary: Path) -> None:
        """This tokenizer adds no special tokens, and drops control characters."""
        from transformers import BertTokenizer

        tokenizer = find_tokenizer(bert(10, directory=vocabulary), (vocabulary,))
        assert tokenizer is not None
        backend = BertTokenizer.from_pretrained(vocabulary)
        backend.backend_tokenizer.post_processor = None
        bare = dataclasses.replace(tokenizer, backend=backend)
        rows = read_sentences(
            file_with(tmp_path, '{"text": "the"}\n{"text": "\\u0000"}\n{"text": "cat"}\n', "a.jsonl")
        )
        items = bare.rows(rows)
        assert [items.read(index).text for index in (0, 2)] == ["the", "cat"]
        with pytest.raises(InputError, match="gives no token for this sentence"):
            items.read(1)

    @pytest.mark.parametrize(
        ("content", "column", "message"),
        [
            ("id,body\n1,a\n", None, r"which column has the sentences\? --text-column NAME, of id, body"),
            ("id,body\n1,a\n", "bdy", r"has no column bdy; did you mean body\?; its columns are id, body"),
            ("a,b\n1\n", "b", r"a\.csv:2: this row has no column 2"),
            ("a,b\n1,2\n", "0", "columns are counted from 1"),
            ('a\n"' + "x" * 200_000 + '"\n', None, r"a\.csv:2: cannot be read as a table \(field larger"),
        ],
    )
    def test_tables_without_the_column(
        self, tmp_path: Path, vocabulary: Path, content: str, column: str | None, message: str
    ) -> None:
        path = file_with(tmp_path, content, "a.csv")
        with pytest.raises(InputError, match=message):
            open_input(InputRequest(paths=(path,), text_column=column), bert(10, directory=vocabulary))

    def test_patterns_are_expanded(self, tmp_path: Path, vocabulary: Path) -> None:
        first, second = file_with(tmp_path, "the", "b[1].txt"), file_with(tmp_path, "cat", "b2.txt")
        model = bert(10, directory=vocabulary)
        for paths, expected in (((first,), ["the"]), ((tmp_path / "b*.txt",), ["cat", "the"])):
            (microbatch,) = open_input(InputRequest(paths=paths), model).microbatches(8)
            assert list(microbatch.texts or ()) == expected
        assert second.exists()
        with pytest.raises(InputError, match=r"\*\.txt: no file matches this pattern"):
            open_input(InputRequest(paths=(tmp_path / "x*.txt",)), model)

    def test_options_that_would_have_no_effect(self, tmp_path: Path, vocabulary: Path) -> None:
        path = file_with(tmp_path, "the")
        with pytest.raises(InputError, match=r"--text-column x: the input has no \.csv, \.tsv or \.jsonl"):
            open_input(InputRequest(paths=(path,), text_column="x"), bert(10, directory=vocabulary))
        with pytest.raises(InputError, match="cannot be combined with files"):
            InputRequest(paths=(Path("-"), path))

    @pytest.mark.parametrize("word", ["cat ", "x" * 99 + " ", "cat" + " " * 2000, "\u4e2d", "xy" * 500 + " "])
    def test_only_the_beginning_of_a_long_line_is_tokenised(
        self, tmp_path: Path, vocabulary: Path, monkeypatch: pytest.MonkeyPatch, word: str
    ) -> None:
        limit = 16
        path = file_with(tmp_path, "the " + word * (1_000_000 // len(word)) + "\nthe sat\n")
        tokenizer = find_tokenizer(bert(10, limit, directory=vocabulary), (vocabulary,))
        assert tokenizer is not None
        backend = tokenizer.backend
        counting = CountingBackend(backend)
        items = dataclasses.replace(tokenizer, backend=counting).rows(read_sentences(path))
        assert isinstance(items, TokenItems)
        assert sum(counting.lengths) < 500_000
        # The beginning decides alone: the same ids as of a text that is just long enough.
        expected = backend([("the " + word * 40)[:400_000], "the sat"], truncation=True, max_length=limit)
        assert [list(ids) for ids in items.ids] == expected["input_ids"]

    @pytest.mark.parametrize(
        ("text", "is_refused"),
        [
            ("x" * 999_999, True),
            (" " * 9_999 + "cat", True),
            ("\u4e2d" * 999_999, False),
            ("cat " * 9_999, False),
        ],
    )
    def test_a_sentence_that_would_take_long_is_refused_where_others_wait(
        self, vocabulary: Path, text: str, is_refused: bool
    ) -> None:
        tokenizer = find_tokenizer(bert(10, 16, directory=vocabulary), (vocabulary,))
        assert tokenizer is not None
        limited = dataclasses.replace(tokenizer, refused_characters=5_000)
        sentences = [Sentence("the cat", "a"), Sentence(text, "b"), Sentence("x" * 5_000, "c")]
        if is_refused:
            with pytest.raises(
                InputError, match="b: its first 5,000 characters give fewer than the 16 tokens"
            ):
                limited.items(sentences)
        else:
            assert limited.items(sentences).ids == tokenizer.items(sentences).ids

    def test_tokenizers_are_called_with_few_characters_at_a_time(
        self, tmp_path: Path, vocabulary: Path
    ) -> None:
        tokenizer = find_tokenizer(bert(10, 512, directory=vocabulary), (vocabulary,))
        assert tokenizer is not None
        counting = CountingBackend(tokenizer.backend)
        lines = [Sentence("cat " * 4_999 + "sat", str(number)) for number in range(20)]
        dataclasses.replace(tokenizer, backend=counting).items(lines)
        assert max(counting.lengths) <= 1 << 18

    def test_all_files_in_order_and_a_limit(self, tmp_path: Path, vocabulary: Path) -> None:
        first, second = file_with(tmp_path, "the\ncat\n", "z.txt"), file_with(tmp_path, "sat\n", "a.txt")
        model = bert(10, directory=vocabulary)
        (microbatch,) = open_input(InputRequest(paths=(first, second)), model).microbatches(8)
        assert microbatch.payload[0][:, 1].tolist() == [5, 6, 7]
        limited = open_input(InputRequest(paths=(first, second), max_items=1), model)
        assert len(limited) == 1

    @pytest.mark.parametrize("kept", ["tokenizer.json", "tokenizer.json tokenizer_config.json"])
    def test_a_tokenizer_json_serves_too(self, tmp_path: Path, vocabulary: Path, kept: str) -> None:
        from transformers import BertTokenizer

        directory = tmp_path / "saved"
        BertTokenizer.from_pretrained(vocabulary).save_pretrained(directory)
        for path in directory.iterdir():
            if path.name not in kept.split():
                path.unlink()
        path = file_with(tmp_path, "The cats sat.\n")
        (microbatch,) = open_input(InputRequest(paths=(path,)), bert(10, directory=directory)).microbatches(1)
        assert microbatch.payload[0].tolist() == [[2, 5, 6, 9, 7, 8, 3]]

    def test_a_tokenizer_beside_the_weights_serves_a_named_model(
        self, tmp_path: Path, vocabulary: Path
    ) -> None:
        path = file_with(tmp_path, "the cat\n")
        request = InputRequest(paths=(path,), companion_directory=vocabulary)
        assert len(open_input(request, bert(10))) == 1

    def test_without_a_vocabulary_it_says_where_to_put_one(self, tmp_path: Path) -> None:
        path = file_with(tmp_path, "the cat\n")
        with pytest.raises(InputError, match=rf"put its tokenizer.json or vocab.txt into {tmp_path}"):
            open_input(InputRequest(paths=(path,)), bert(directory=tmp_path))

    @pytest.mark.parametrize("reachable", [False, True])
    def test_a_named_model_whose_tokenizer_cannot_be_fetched(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reachable: bool
    ) -> None:
        import transformers

        asked: list[str] = []

        def from_pretrained(name: str) -> None:
            asked.append(name)
            raise OSError("no such repository")

        monkeypatch.setattr(pipeedge.data.text, "hub_reachable", lambda: reachable)
        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
        with pytest.raises(InputError, match="into a model directory and name that with -m"):
            open_input(InputRequest(paths=(file_with(tmp_path, "a"),)), bert())
        assert asked == (["local/bert"] if reachable else [])

    def test_a_tokenizer_of_another_model(self, tmp_path: Path, vocabulary: Path) -> None:
        path = file_with(tmp_path, "the cats\n")
        with pytest.raises(InputError, match="tokenizer of another model"):
            open_input(InputRequest(paths=(path,)), bert(vocab=9, directory=vocabulary))

    def test_a_damaged_tokenizer(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(InputError, match=r"tokenizer.json: not a tokenizer"):
            open_input(InputRequest(paths=(file_with(tmp_path, "a\n"),)), bert(directory=tmp_path))

    @pytest.mark.parametrize(
        ("content", "message"),
        [(b"", "no sentence"), (b" \n\n", "no sentence"), (b"\xff\xfe\xfa", "UTF-8")],
    )
    def test_files_without_sentences(
        self, tmp_path: Path, vocabulary: Path, content: bytes, message: str
    ) -> None:
        path = tmp_path / "input.txt"
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"input.txt: .*{message}"):
            open_input(InputRequest(paths=(path,)), bert(10, directory=vocabulary))


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl"])
def test_a_file_that_is_not_there_is_called_so(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_sentences(tmp_path / name)
    assert str(caught.value) == f"{tmp_path / name}: no such file"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl"])
def test_wide_text_is_refused_with_how_to_convert_it(encoding: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    content = '{"text": "the cat sat"}\n' if name.endswith("jsonl") else "text\nthe cat sat\n"
    path.write_bytes(content.encode(encoding))
    with pytest.raises(InputError) as caught:
        read_sentences(path)
    line = rf"{path}: is (\S+) text; convert it to UTF-8: iconv -f \1 -t UTF-8 {path} > (\S+)"
    found = re.fullmatch(line, str(caught.value))
    assert found is not None, caught.value
    (tmp_path / found[2]).write_text(path.read_bytes().decode(found[1]))
    (sentence,) = [one for one in read_sentences(tmp_path / f"utf-8{path.suffix}") if one.text != "text"]
    assert sentence.text == "the cat sat"


@pytest.mark.parametrize("content", [b"", b"a", b"caf\xc3\xa9", b"a\0b", "\u4e2d\u6587".encode()])
def test_narrow_text_is_not_taken_for_wide(content: bytes) -> None:
    assert wide_encoding(content) is None
