"""Test input other than images: requests, the default input, text, arrays, microbatches."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_models import FakeModel, bert, vit
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeedge.data.text
from pipeedge.base.errors import InputError
from pipeedge.data import InputRequest, open_input
from pipeedge.data.companions import companion_file, hub_reachable
from pipeedge.data.defaults import asset, hashed_ids
from pipeedge.data.items import Item, JoinedItems, MemoryItems, RepeatedItems
from pipeedge.data.source import InputSource
from pipeedge.data.text import Sentence, find_tokenizer, read_sentences
from pipeedge.models import find_model

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", ".", "##s"]


def digits() -> FakeModel:
    model = vit(8, 1, directory=asset("vit-digits"))
    return dataclasses.replace(model, config=dataclasses.replace(model.config, num_labels=10))


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """Return a model directory with a tiny WordPiece vocabulary."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return directory


def file_with(tmp_path: Path, text: str, name: str = "input.txt") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def npz(tmp_path: Path, name: str = "input.npz", **arrays: object) -> Path:
    path = tmp_path / name
    np.savez(path, **arrays)
    return path


def tokens(items: int = 3, length: int = 5) -> dict[str, np.ndarray]:
    shape = (items, length)
    return {
        "input_ids": np.arange(items * length).reshape(shape),
        "attention_mask": np.ones(shape, dtype=np.int8),
        "token_type_ids": np.zeros(shape, dtype=np.int32),
    }


class TestRequest:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_items": 0}, "-b/--batch-size 0"),
            ({"max_items": -3}, "-b/--batch-size -3"),
            ({"dataset_name": "MNIST"}, "choose one of CoLA, ImageNet"),
            ({"dataset_name": "CoLA", "paths": (Path("a.txt"),)}, "not both"),
            ({"dataset_root": Path("x")}, "--dataset-root needs --dataset-name"),
            ({"dataset_split": "val"}, "--dataset-split needs"),
            ({"dataset_indices_file": Path("x")}, "--dataset-indices-file needs"),
            ({"dataset_shuffle": True}, "--dataset-shuffle needs"),
            ({"dataset_name": "CoLA", "seed": -1}, "seed -1"),
        ],
    )
    def test_invalid_requests_are_refused_on_creation(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(InputError, match=message):
            InputRequest(**options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sequences:
    """Sequences of the given lengths, filled with their index + 1; those in ``bad`` cannot be read."""

    lengths: tuple[int, ...]
    bad: frozenset[int] = frozenset()
    has_labels = True
    in_memory = True
    pixels = None

    @property
    def max_tokens(self) -> int:
        return max(self.lengths, default=0)

    def __len__(self) -> int:
        return len(self.lengths)

    def source(self, index: int) -> str:
        return f"sequence {index}"

    def read(self, index: int) -> Item:
        if index in self.bad:
            raise InputError(f"sequence {index} is bad")
        ids = torch.full((self.lengths[index],), index + 1)
        return Item((ids, torch.ones_like(ids)), index, self.source(index))


class TestMicrobatches:
    @given(
        lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20),
        ubatch=st.integers(1, 25),
        bad=st.frozensets(st.integers(0, 19)),
    )
    @settings(max_examples=100)
    def test_every_readable_item_once_in_order_and_padded_to_the_longest(
        self, lengths: list[int], ubatch: int, bad: frozenset[int]
    ) -> None:
        good = [index for index in range(len(lengths)) if index not in bad]
        source = InputSource(Sequences(tuple(lengths), bad), skip_bad=True)
        assert len(source) == len(lengths)
        if not good:
            with pytest.raises(InputError, match=f"none of the {len(lengths)} items? can be read"):
                list(source.microbatches(ubatch))
            return
        microbatches = list(source.microbatches(ubatch))
        assert [number for one in microbatches for number in one.numbers] == good
        assert [label for one in microbatches for label in one.labels] == good
        assert [one.items for one in microbatches[:-1]] == [ubatch] * (len(microbatches) - 1)
        assert 1 <= microbatches[-1].items <= ubatch
        for one in microbatches:
            ids, mask = one.payload
            longest = max(lengths[number] for number in one.numbers)
            assert ids.shape == mask.shape == (one.items, longest)
            for row, number in enumerate(one.numbers):
                length = lengths[number]
                assert ids[row].tolist() == [number + 1] * length + [0] * (longest - length)
                assert mask[row].tolist() == [1] * length + [0] * (longest - length)
        skipped = [index for index in range(len(lengths)) if index in bad]
        assert [one.source for one in source.skipped] == [f"sequence {index}" for index in skipped]

    def test_a_bad_item_ends_the_run_unless_skipped(self) -> None:
        source = InputSource(Sequences((1, 1, 1), frozenset({1})))
        microbatches = source.microbatches(1)
        assert next(microbatches).numbers == (0,)
        with pytest.raises(InputError, match="sequence 1 is bad"):
            next(microbatches)

    def test_items_are_decoded_when_their_microbatch_is_due(self) -> None:
        decoded: list[int] = []

        class Watched(Sequences):
            def read(self, index: int) -> Item:
                decoded.append(index)
                return super().read(index)

        microbatches = InputSource(Watched((1,) * 6)).microbatches(2)
        assert decoded == []
        next(microbatches)
        assert decoded == [0, 1]

    def test_only_different_items_are_compared(self) -> None:
        repeated = InputSource(RepeatedItems(Sequences((1, 1, 1)), 8))
        repeated.check_distinct(3, "--check")
        with pytest.raises(InputError, match="--check 4: the input has 3 distinct items among its first 4, "):
            repeated.check_distinct(4, "--check")
        with pytest.raises(
            InputError, match=r"--agreement 20: .* 3 distinct items among its first 8, .* --input"
        ):
            repeated.check_distinct(20, "--agreement")
        twice = InputSource(Sequences((1, 2)), order=[1, 1])
        with pytest.raises(InputError, match="--check 2: the input has 1 distinct item among"):
            twice.check_distinct(2, "--check")

    def test_a_microbatch_needs_an_item(self) -> None:
        with pytest.raises(InputError, match="microbatch size 0"):
            InputSource(Sequences((1,))).microbatches(0)
        with pytest.raises(InputError, match="the input is empty"):
            InputSource(Sequences(()))

    @given(parts=st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=5))
    @settings(max_examples=50)
    def test_joined_and_repeated_items(self, parts: list[list[int]]) -> None:
        joined = JoinedItems(tuple(Sequences(tuple(part)) for part in parts))
        expected = [(length, index) for part in parts for index, length in enumerate(part)]
        assert len(joined) == len(expected)
        read = [joined.read(index) for index in range(len(joined))]
        assert [(len(item.tensors[0]), item.label) for item in read] == expected
        assert [joined.source(index) for index in range(len(joined))] == [item.source for item in read]
        assert joined.max_tokens == max((length for length, _ in expected), default=0)
        if expected:
            repeated = RepeatedItems(joined, 11)
            labels = [repeated.read(index).label for index in range(11)]
            assert labels == [expected[index % len(expected)][1] for index in range(11)]


class TestDefaultInput:
    def test_digits_are_the_held_out_images_with_labels(self) -> None:
        with np.load(asset("digits.npz")) as arrays:
            images, labels = arrays["images_heldout"], arrays["labels_heldout"]
        source = open_input(InputRequest(max_items=len(labels)), digits())
        assert source.has_labels
        microbatches = list(source.microbatches(100))
        pixels = torch.cat([one.payload[0] for one in microbatches])
        assert pixels.dtype == torch.float32
        assert pixels.shape == (len(labels), 1, 8, 8)
        np.testing.assert_allclose((pixels[:, 0].numpy() + 1) * 8, images, atol=1e-6)
        assert [label for one in microbatches for label in one.labels] == labels.tolist()

    def test_is_repeated_to_the_largest_number_of_items(self) -> None:
        assert len(open_input(InputRequest(), digits())) == 64
        source = open_input(InputRequest(max_items=362), digits())
        labels = [label for one in source.microbatches(8) for label in one.labels]
        assert len(labels) == 362
        assert labels[360:] == labels[:2]

    def test_a_photograph_for_any_other_image_model(self) -> None:
        (microbatch,) = open_input(InputRequest(max_items=3), vit()).microbatches(8)
        (pixels,) = microbatch.payload
        assert pixels.shape == (3, 3, 224, 224)
        assert torch.equal(pixels[0], pixels[2])
        assert pixels.std() > 0.1
        assert microbatch.labels == (None, None, None)

    def test_sentences_have_their_true_ids_for_berts_vocabulary(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        source = open_input(InputRequest(max_items=7), bert())
        (microbatch,) = source.microbatches(8)
        ids, mask, types = microbatch.payload
        assert ids.shape == mask.shape == types.shape == (7, source.max_tokens)
        assert not caplog.records
        # "To be, or not to be" and "God": ids that are known from the published vocabulary.
        assert ids[0].tolist()[:8] == [101, 2000, 2022, 1010, 2030, 2025, 2000, 2022]
        assert torch.equal(ids[0], ids[6])
        assert torch.equal(mask, (ids != 0).long())
        assert not types.any()

    def test_shipped_ids_are_consistent_with_their_sentences(self) -> None:
        entries = json.loads(asset("sentences.json").read_text(encoding="utf-8"))
        ids_of: dict[str, int] = {}
        for entry in entries:
            words = entry["text"].lower().replace(",", " ,").replace(".", " .").replace(":", " :").split()
            first, *inner, last = entry["bert_uncased_ids"]
            assert (first, last) == (101, 102)
            for word, number in zip(words, inner, strict=True):
                assert ids_of.setdefault(word, number) == number, word
        assert len(set(ids_of.values())) == len(ids_of)

    def test_another_vocabulary_gets_arbitrary_ids_and_says_so(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            source = open_input(InputRequest(max_items=6), bert(vocab=50, max_positions=10))
        (message,) = caplog.messages
        assert "good for timing only" in message
        (microbatch,) = source.microbatches(8)
        assert microbatch.payload[0].max() < 50
        assert microbatch.payload[0].shape[1] == 10
        assert hashed_ids("a b", 50) == hashed_ids("a b", 50)

    def test_sentences_go_through_the_models_own_tokenizer(self, vocabulary: Path) -> None:
        source = open_input(InputRequest(max_items=6), bert(vocab=10, directory=vocabulary))
        (microbatch,) = source.microbatches(8)
        assert microbatch.payload[0][:, 0].tolist() == [VOCABULARY.index("[CLS]")] * 6
        assert VOCABULARY.index("the") in microbatch.payload[0]


class TestCompanions:
    def test_the_first_directory_then_the_first_name(self, tmp_path: Path) -> None:
        first, second = tmp_path / "first", tmp_path / "second"
        for path in (first / "b", second / "a", second / "b"):
            path.parent.mkdir(exist_ok=True)
            path.write_text("")
        assert companion_file("local/model", (first, second), ("a", "b")) == first / "b"
        assert companion_file("local/model", (second, first), ("a", "b")) == second / "a"
        assert companion_file("local/model", (tmp_path,), ("a", "b")) is None
        assert companion_file(str(tmp_path), (), ("a",)) is None

    def test_a_model_in_the_hubs_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        def cached(repository: str, name: str) -> str | None:
            path = f"{tmp_path}/{name}"
            return path if (repository, name) == ("google-bert/bert-base-uncased", "vocab.txt") else None

        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
        names = ("tokenizer.json", "vocab.txt")
        assert companion_file("bert-base-uncased", (), names) == tmp_path / "vocab.txt"
        assert companion_file("bert-large-uncased", (), names) is None

    @pytest.mark.parametrize("answers", [True, False])
    def test_the_hub_is_reachable_if_it_answers(self, monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
        import huggingface_hub

        class Session:
            def head(self, _: str, timeout: float) -> None:
                assert timeout <= 5
                if not answers:
                    raise OSError("no route")

        monkeypatch.setattr(huggingface_hub, "get_session", Session)
        assert hub_reachable() is answers


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
            ("a.csv", 'id,text\n1,the\n\n2,"cat, sat"\n3,\n4,"the\nsat"\n', None),
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
        backend, lengths = tokenizer.backend, []

        def counting(texts: list[str], **options: object) -> object:
            lengths.append(sum(map(len, texts)))
            return backend(texts, **options)

        limited = dataclasses.replace(tokenizer, backend=counting)
        items = limited.items(read_sentences(path))
        assert sum(lengths) < 500_000
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
        backend, lengths = tokenizer.backend, []

        def counting(texts: list[str], **options: object) -> object:
            lengths.append(sum(map(len, texts)))
            return backend(texts, **options)

        lines = [Sentence("cat " * 4_999 + "sat", str(number)) for number in range(20)]
        dataclasses.replace(tokenizer, backend=counting).items(lines)
        assert max(lengths) <= 1 << 18

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


class TestArrays:
    def test_pixels_and_labels(self, tmp_path: Path) -> None:
        pixels = np.random.default_rng(0).normal(size=(5, 1, 8, 8))
        path = npz(tmp_path, pixel_values=pixels, labels=np.array([3, -1, 0, 9, 1]), other=np.zeros(2))
        source = open_input(InputRequest(paths=(path,)), digits())
        assert source.has_labels
        first, last = source.microbatches(3)
        assert first.labels + last.labels == (3, None, 0, 9, 1)
        read = torch.cat([first.payload[0], last.payload[0]])
        assert read.dtype == torch.float32
        np.testing.assert_array_equal(read.numpy(), pixels.astype(np.float32))
        assert first.sources[1] == f"{path}[1]"

    def test_tokens(self, tmp_path: Path) -> None:
        arrays = tokens()
        arrays["attention_mask"][1, 3:] = 0
        source = open_input(InputRequest(paths=(npz(tmp_path, **arrays),)), bert(vocab=15))
        assert source.max_tokens == 5
        (microbatch,) = source.microbatches(8)
        for name, tensor in zip(arrays, microbatch.payload, strict=True):
            assert tensor.dtype == torch.int64
            assert tensor.tolist() == arrays[name].tolist()

    def test_files_of_different_lengths_are_padded_and_masked(self, tmp_path: Path) -> None:
        paths = (npz(tmp_path, "a.npz", **tokens(1, 2)), npz(tmp_path, "b.npz", **tokens(1, 4)))
        source = open_input(InputRequest(paths=paths), bert())
        assert source.max_tokens == 4
        (microbatch,) = source.microbatches(2)
        assert microbatch.payload[1].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]

    def test_token_types_may_be_left_out(self, tmp_path: Path) -> None:
        arrays = tokens()
        del arrays["token_type_ids"]
        (microbatch,) = open_input(InputRequest(paths=(npz(tmp_path, **arrays),)), bert()).microbatches(8)
        assert not microbatch.payload[2].any()
        assert microbatch.payload[2].shape == (3, 5)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"input_ids": None}, "no array 'input_ids'"),
            ({"input_ids": None, "tokens": np.ones((3, 5))}, "no array 'input_ids', .*found: .*tokens"),
            ({"attention_mask": None}, "no array 'attention_mask'"),
            ({"input_ids": np.full((3, 5), 100)}, "input_ids has 100, .* takes 0 to 99"),
            ({"input_ids": np.full((3, 5), -1)}, "input_ids has -1"),
            ({"input_ids": np.ones((3, 5))}, "input_ids is float64"),
            ({"input_ids": np.ones(3, int)}, r"input_ids is \[3\]"),
            ({"attention_mask": np.full((3, 5), 2)}, "attention_mask has 2, .* takes 0 to 1"),
            ({"attention_mask": np.eye(3, 5, 1, int) * 0}, "masks every token of item 0"),
            ({"token_type_ids": np.full((3, 5), 2)}, "token_type_ids has 2"),
            ({"attention_mask": np.ones((3, 4), int)}, "different numbers of tokens"),
            ({"attention_mask": np.ones((2, 5), int)}, "different numbers of items"),
            ({"labels": np.zeros(2, int)}, "different numbers of items"),
            ({"labels": np.zeros((3, 2), int)}, "labels is int64"),
            ({"labels": np.zeros(3)}, "labels is float64"),
            (tokens(3, 0), "0 tokens an item"),
            (tokens(2, 9), "9 tokens an item, .* takes 1 to 8"),
            (tokens(0, 5), "contain no items"),
        ],
    )
    def test_tokens_that_do_not_fit(self, tmp_path: Path, change: dict[str, object], message: str) -> None:
        arrays = {name: array for name, array in {**tokens(), **change}.items() if array is not None}
        path = npz(tmp_path, **arrays)
        with pytest.raises(InputError, match=f"input.npz: .*{message}"):
            open_input(InputRequest(paths=(path,)), bert(vocab=100, max_positions=8))

    @pytest.mark.parametrize(
        ("pixels", "message"),
        [
            (np.zeros((2, 3, 8, 8), np.float32), r"pixel_values is \[2, 3, 8, 8\], .* \[items, 1, 8, 8\]"),
            (np.zeros((1, 8, 8), np.float32), r"pixel_values is \[1, 8, 8\]"),
            (np.zeros((2, 1, 8, 8), np.uint8), "not floating point"),
            (np.full((2, 1, 8, 8), np.nan, np.float32), "not finite"),
            (np.full((2, 1, 8, 8), 1e300), "not finite"),
            (np.zeros((0, 1, 8, 8), np.float32), "contain no items"),
        ],
    )
    def test_pixels_that_do_not_fit(self, tmp_path: Path, pixels: np.ndarray, message: str) -> None:
        with pytest.raises(InputError, match=message):
            open_input(InputRequest(paths=(npz(tmp_path, pixel_values=pixels),)), digits())

    def test_pickled_objects_are_never_loaded(self, tmp_path: Path) -> None:
        path = npz(tmp_path, pixel_values=np.array([{"a": 1}], dtype=object))
        with pytest.raises(InputError, match=r"pixel_values is \[1\]"):
            open_input(InputRequest(paths=(path,)), digits())

    def test_files_that_are_something_else(self, tmp_path: Path) -> None:
        whole = npz(tmp_path, pixel_values=np.zeros((2, 1, 8, 8), np.float32)).read_bytes()
        np.save(tmp_path / "plain.npy", np.zeros(3))
        contents = {
            "empty": b"",
            "text": b"hello",
            "cut": whole[: len(whole) // 2],
            "plain": (tmp_path / "plain.npy").read_bytes(),
        }
        for name, content in contents.items():
            path = tmp_path / f"{name}.npz"
            path.write_bytes(content)
            with pytest.raises(InputError, match=rf"{name}\.npz"):
                open_input(InputRequest(paths=(path,)), digits())


class TestKinds:
    def test_missing_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no such file or folder"):
            open_input(InputRequest(paths=(tmp_path / "a.png",)), vit())

    def test_unknown_suffix(self, tmp_path: Path) -> None:
        path = file_with(tmp_path, "x", "a.mp4")
        with pytest.raises(InputError, match=r"a.mp4: unknown kind of input.*\.png"):
            open_input(InputRequest(paths=(path,)), vit())

    def test_mixed_input_is_refused(self, tmp_path: Path) -> None:
        paths = (npz(tmp_path, x=np.zeros(1)), file_with(tmp_path, "x"))
        with pytest.raises(InputError, match=r"input.npz holds arrays, .*input.txt text"):
            open_input(InputRequest(paths=paths), vit())

    def test_input_of_the_wrong_kind_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"takes images"):
            open_input(InputRequest(paths=(file_with(tmp_path, "x"),)), vit())
        with pytest.raises(InputError, match=r"takes sentences"):
            open_input(InputRequest(paths=(tmp_path,)), bert())
        with pytest.raises(InputError, match="CoLA is a data set of sentences"):
            open_input(InputRequest(dataset_name="CoLA"), vit())
        with pytest.raises(InputError, match="ImageNet is a data set of images"):
            open_input(InputRequest(dataset_name="ImageNet", dataset_root=tmp_path), bert())


def test_items_in_memory() -> None:
    items = MemoryItems((Item((torch.zeros(1),), None, "a"), Item((torch.ones(1),), 4, "b")))
    assert items.has_labels
    assert items.source(1) == "b"
    assert MemoryItems(items.items[:1]).has_labels is False


def test_digits_are_the_default_wherever_they_fit(tmp_path: Path) -> None:
    """Any model that takes digits gets 64 different ones, not one photo 64 times."""
    shipped = find_model("vit-digits")
    other = dataclasses.replace(shipped, directory=tmp_path)
    source = open_input(InputRequest(), other)
    source.check_distinct(64, "--check")
    assert source.has_labels
    photo = open_input(InputRequest(), vit(8, 1))
    with pytest.raises(InputError, match="has 1 distinct item among its first 64,"):
        photo.check_distinct(64, "--agreement")
