"""Test input in general: requests, microbatches, the default input, files that come with a model."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_models import bert, digits, vit
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.errors import InputError
from pipeedge.data import InputRequest, open_input
from pipeedge.data.companions import companion_file, hub_reachable
from pipeedge.data.defaults import asset, hashed_ids
from pipeedge.data.items import Item, JoinedItems, MemoryItems, RepeatedItems
from pipeedge.data.source import InputSource
from pipeedge.models import find_model


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

    @property
    def token_counts(self) -> Counter[int]:
        return Counter(self.lengths)

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
        assert joined.token_counts == Counter(length for length, _ in expected)
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
