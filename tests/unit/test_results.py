"""Test result files and accuracy, read back and compared with separate calculations."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeedge.data.results
from pipeedge.base.errors import PipeEdgeError, RequestError
from pipeedge.data.results import Accuracy, ResultWriter


@dataclass(frozen=True)
class Model:
    labels: tuple[str, ...] | None = None
    output_kind: str = "logits"
    name: str = "a-model"


@dataclass(frozen=True)
class Items:
    numbers: Sequence[int]
    labels: Sequence[int | None]
    sources: Sequence[str]
    texts: Sequence[str] | None = None
    tokens: Sequence[int] | None = None

    @classmethod
    def of(cls, *numbers: int, labels: Sequence[int | None] | None = None) -> Items:
        return cls(numbers, labels or [None] * len(numbers), [f"dir/{number}, “ä”.png" for number in numbers])


NAMED = Model(("zero", "one, or so", "two", "three", "four", "five"))
OUTPUTS = torch.tensor(
    [[0.0, 3.0, 1.0, 2.0, -1.0, -2.0], [5.0, 5.5, -9.0, 0.0, 0.5, 0.25], [9.0, 8, 7, 6, 5, 4]]
)


def written(
    path: Path, model: Model, *parts: tuple[torch.Tensor, Items], expected: int | None = None
) -> Path:
    with ResultWriter(path, model, expected) as writer:
        for number, (outputs, items) in enumerate(parts):
            writer.write(number, outputs, items)
    return path


def two_parts() -> tuple[tuple[torch.Tensor, Items], ...]:
    return (OUTPUTS[:2], Items.of(0, 1, labels=(1, None))), (OUTPUTS[2:], Items.of(2, labels=(4,)))


def softmax(row: Sequence[float]) -> list[float]:
    total = sum(math.exp(value) for value in row)
    return [math.exp(value) / total for value in row]


TAGGER = Model(("O", "B-PER"), output_kind="tokens")


def tagged() -> tuple[tuple[torch.Tensor, Items], ...]:
    """Return sentences of 1, 3 and 2 tokens, whose microbatches are padded to 3 and 2."""
    values = torch.arange(18.0).view(3, 3, 2) * torch.tensor([1.0, -1.0])
    first = Items((0, 2), (None, None), ("a:1", "a:3"), ("x", "x y z"), (1, 3))
    return (values[:2], first), (values[2:, :2], Items((3,), (None,), ("a:4",), ("x y",), (2,)))


class TestTokens:
    def test_json_has_the_best_class_of_each_token_without_padding(self, tmp_path: Path) -> None:
        path = written(tmp_path / "out.jsonl", TAGGER, *tagged(), expected=3)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["source"] for line in lines] == ["a:1", "a:3", "a:4"]
        assert [line["text"] for line in lines] == ["x", "x y z", "x y"]
        assert [len(line["tokens"]) for line in lines] == [1, 3, 2]
        outputs = torch.cat(
            [
                values[row, :length]
                for values, items in tagged()
                for row, length in enumerate(items.tokens or ())
            ]
        )
        found = [token for line in lines for token in line["tokens"]]
        for token, row in zip(found, outputs.tolist(), strict=True):
            best = max(range(2), key=row.__getitem__)
            assert (token["class"], token["name"]) == (best, TAGGER.labels[best] if TAGGER.labels else None)
            assert token["score"] == pytest.approx(softmax(row)[best], rel=1e-5)

    def test_arrays_hold_all_tokens_and_how_many_are_whose(self, tmp_path: Path) -> None:
        path = written(tmp_path / "out.npz", TAGGER, *tagged(), expected=3)
        (first, _), (second, _) = tagged()
        with np.load(path) as arrays:
            assert sorted(arrays) == ["items", "outputs", "tokens"]
            assert arrays["tokens"].tolist() == [1, 3, 2]
            assert arrays["items"].tolist() == [0, 2, 3]
            np.testing.assert_array_equal(
                arrays["outputs"], np.concatenate([first[0, :1], first[1], second[0]])
            )

    def test_a_table_has_no_room_for_tokens(self, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match=r"classifies every token; .*\.jsonl and \.npz only"):
            ResultWriter(tmp_path / "out.csv", TAGGER, None)


class TestFiles:
    def test_csv(self, tmp_path: Path) -> None:
        path = written(tmp_path / "out.csv", NAMED, *two_parts(), expected=3)
        with path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        assert [row["item"] for row in rows] == ["0", "1", "2"]
        assert [row["source"] for row in rows] == [f"dir/{number}, “ä”.png" for number in range(3)]
        assert [row["label"] for row in rows] == ["1", "", "4"]
        for row, outputs in zip(rows, OUTPUTS.tolist(), strict=True):
            best = sorted(range(6), key=lambda number: -outputs[number])[:5]
            assert [int(row[f"class_{place}"]) for place in range(1, 6)] == best
            assert [row[f"name_{place}"] for place in range(1, 6)] == [
                NAMED.labels[number] for number in best
            ]
            scores = [float(row[f"score_{place}"]) for place in range(1, 6)]
            assert scores == pytest.approx([softmax(outputs)[number] for number in best], rel=1e-5)

    def test_rows_of_text_carry_the_sentence(self, tmp_path: Path) -> None:
        items = Items((0, 1), (None, 1), ("s.txt:1", "s.txt:2"), ('a "quoted", one', "zwei\u2028drei"))
        table = written(tmp_path / "out.csv", NAMED, (OUTPUTS[:2], items))
        with table.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        assert list(rows[0])[:5] == ["item", "source", "label", "text", "class_1"]
        assert tuple(row["text"] for row in rows) == items.texts
        lines = written(tmp_path / "out.jsonl", NAMED, (OUTPUTS[:2], items)).read_text(encoding="utf-8")
        assert tuple(json.loads(line)["text"] for line in lines.strip().split("\n")) == items.texts

    def test_csv_of_a_model_with_few_and_nameless_classes(self, tmp_path: Path) -> None:
        path = written(tmp_path / "out.csv", Model(), (torch.zeros(1, 2), Items.of(0)))
        header, row = csv.reader(path.open(encoding="utf-8"))
        assert header == [
            "item",
            "source",
            "label",
            "class_1",
            "name_1",
            "score_1",
            "class_2",
            "name_2",
            "score_2",
        ]
        assert row[4:6] == ["", "0.5"]

    def test_jsonl(self, tmp_path: Path) -> None:
        path = written(tmp_path / "out.JSONL", NAMED, *two_parts())
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert [row["item"] for row in rows] == [0, 1, 2]
        assert [row.get("label", "unknown") for row in rows] == [1, "unknown", 4]
        assert rows[0]["source"] == "dir/0, “ä”.png"
        assert [entry["class"] for entry in rows[0]["top"]] == [1, 3, 2, 0, 4]
        assert rows[0]["top"][0]["name"] == "one, or so"
        assert rows[0]["top"][1]["score"] == pytest.approx(softmax(OUTPUTS[0].tolist())[3], rel=1e-5)

    def test_single_output_is_a_score_by_itself(self, tmp_path: Path) -> None:
        outputs = torch.tensor([[-3.5], [7.25]])
        path = written(tmp_path / "a.jsonl", Model(("relevant",)), (outputs, Items.of(0, 1)))
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["top"] for row in rows] == [
            [{"class": 0, "name": "relevant", "score": value}] for value in (-3.5, 7.25)
        ]
        path = written(tmp_path / "a.csv", Model(), (outputs, Items.of(0, 1)))
        with path.open(newline="") as file:
            assert [row["score_1"] for row in csv.DictReader(file)] == ["-3.5", "7.25"]
        assert Accuracy().with_outputs(outputs, [0, 1]) == Accuracy()

    def test_jsonl_is_valid_json_for_nan_outputs(self, tmp_path: Path) -> None:
        path = written(tmp_path / "out.jsonl", Model(), (torch.full((1, 2), math.nan), Items.of(0)))

        def refuse(text: str) -> None:
            raise AssertionError(text)

        row = json.loads(path.read_text(), parse_constant=refuse)
        assert [entry["score"] for entry in row["top"]] == [None, None]
        assert "name" not in row["top"][0]

    def test_npz(self, tmp_path: Path) -> None:
        path = written(tmp_path / "out.npz", NAMED, *two_parts(), expected=3)
        with np.load(path, allow_pickle=False) as arrays:
            assert sorted(arrays.files) == ["labels", "outputs"]
            assert arrays["outputs"].dtype == np.float32
            np.testing.assert_array_equal(arrays["outputs"], OUTPUTS.numpy())
            assert arrays["labels"].tolist() == [1, -1, 4]

    def test_npz_of_vectors_without_labels(self, tmp_path: Path) -> None:
        outputs = torch.randn(4, 3, 2, dtype=torch.bfloat16)
        path = written(
            tmp_path / "out.npz", Model(output_kind="vector"), (outputs, Items.of(0, 1, 2, 3)), expected=4
        )
        with np.load(path) as arrays:
            assert arrays.files == ["outputs"]
            np.testing.assert_array_equal(arrays["outputs"], outputs.float().numpy())

    def test_places_in_the_input_where_items_were_skipped(self, tmp_path: Path) -> None:
        part = (OUTPUTS, Items.of(0, 2, 5))
        with np.load(written(tmp_path / "out.npz", NAMED, part)) as arrays:
            assert arrays["items"].tolist() == [0, 2, 5]
        rows = written(tmp_path / "out.jsonl", NAMED, part).read_text().splitlines()
        assert [json.loads(row)["item"] for row in rows] == [0, 2, 5]

    @given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5))
    @settings(max_examples=20)
    def test_equal_results_give_equal_files_however_they_came(
        self, tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
    ) -> None:
        folder = tmp_path_factory.mktemp("results")
        outputs = torch.randn(sum(sizes), 7, generator=torch.Generator().manual_seed(len(sizes)))
        numbers = list(range(sum(sizes)))
        parts = [
            (chunk, Items.of(*which))
            for chunk, which in zip(
                outputs.split(sizes),
                (part.tolist() for part in torch.tensor(numbers).split(sizes)),
                strict=True,
            )
        ]
        for suffix in (".csv", ".jsonl", ".npz"):
            one = written(folder / f"one{suffix}", Model(), (outputs, Items.of(*numbers)))
            many = written(folder / f"many{suffix}", Model(), *parts)
            assert one.read_bytes() == many.read_bytes()


class TestFailure:
    @pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".npz"])
    def test_failed_run_keeps_the_existing_file(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"out{suffix}"
        path.write_text("before")

        def fail() -> None:
            with ResultWriter(path, NAMED, None) as writer:
                writer.write(0, OUTPUTS, Items.of(0, 1, 2))
                assert len(list(tmp_path.iterdir())) == 2
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        assert path.read_text() == "before"
        assert set(tmp_path.iterdir()) == {path, tmp_path / f"out{suffix}.part"}

    def test_file_appears_only_when_complete(self, tmp_path: Path) -> None:
        path = tmp_path / "out.csv"
        with ResultWriter(path, NAMED, 3) as writer:
            assert not path.exists()
            writer.write(0, OUTPUTS, Items.of(0, 1, 2))
            assert not path.exists()
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("path", [None, "out.npz"])
    def test_microbatches_out_of_order(self, tmp_path: Path, path: str | None) -> None:
        target = None if path is None else tmp_path / path
        with ResultWriter(target, NAMED, 3) as writer:
            writer.write(0, OUTPUTS[:1], Items.of(0))
            with pytest.raises(PipeEdgeError, match="results of microbatch 2, expected 1"):
                writer.write(2, OUTPUTS[:1], Items.of(2))
            with pytest.raises(PipeEdgeError, match="has 2 items, but 1 results"):
                writer.write(1, OUTPUTS[:1], Items.of(1, 2))
            writer.write(1, OUTPUTS[1:], Items.of(1, 2))
            assert writer.items == 3

    @pytest.mark.parametrize("name", [None, "out.jsonl"])
    def test_missing_results(self, tmp_path: Path, name: str | None) -> None:
        path = None if name is None else tmp_path / name
        with pytest.raises(PipeEdgeError, match="3 results for 4 items"):
            written(path, NAMED, (OUTPUTS, Items.of(0, 1, 2)), expected=4)  # type: ignore[arg-type]
        assert [entry.name for entry in tmp_path.iterdir()] == ([] if name is None else ["out.jsonl.part"])

    def test_outputs_of_another_shape(self, tmp_path: Path) -> None:
        with pytest.raises(PipeEdgeError, match=r"\(2,\) values an item follow outputs of \(6,\)"):
            written(tmp_path / "a.npz", NAMED, (OUTPUTS, Items.of(0, 1, 2)), (torch.zeros(1, 2), Items.of(3)))
        assert not (tmp_path / "a.npz").exists()

    @pytest.mark.parametrize("suffix", ["csv", "jsonl", "npz"])
    def test_a_full_disk(self, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = pipeedge.data.results.FORMATS[f".{suffix}"]
        full = OSError(28, "No space left on device")

        def write(*_: object, **__: object) -> None:
            raise full

        monkeypatch.setattr(rows, "encode", write)
        with pytest.raises(RequestError, match=rf"out.{suffix}: cannot be written \(No space left"):
            written(tmp_path / f"out.{suffix}", NAMED, *two_parts())
        assert not list(tmp_path.iterdir())


class TestPaths:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("out.txt", r"unknown suffix '.txt'; use .csv, .jsonl, .npz"),
            ("out", "unknown suffix ''"),
            ("nowhere/out.csv", "nowhere does not exist"),
            ("folder.csv", "is a directory"),
        ],
    )
    def test_invalid_output_is_refused_before_the_run(self, tmp_path: Path, name: str, message: str) -> None:
        (tmp_path / "folder.csv").mkdir()
        with pytest.raises(RequestError, match=message):
            ResultWriter(tmp_path / name, NAMED, None)

    @pytest.mark.parametrize("suffix", ["csv", "jsonl"])
    def test_vectors_go_to_arrays_only(self, tmp_path: Path, suffix: str) -> None:
        with pytest.raises(RequestError, match=r"a-model gives vectors.* \.npz only"):
            ResultWriter(tmp_path / f"out.{suffix}", Model(output_kind="vector"), None)

    def test_a_folder_that_cannot_be_written(self) -> None:
        with pytest.raises(RequestError, match="cannot write to /proc"):
            ResultWriter(Path("/proc/out.csv"), NAMED, None)

    def test_checking_leaves_nothing_behind(self, tmp_path: Path) -> None:
        ResultWriter(tmp_path / "out.csv", NAMED, None)
        assert not list(tmp_path.iterdir())

    def test_link_is_not_replaced(self, tmp_path: Path) -> None:
        target, link = tmp_path / "target.csv", tmp_path / "link.csv"
        target.write_text("before")
        link.symlink_to(target)
        written(link, NAMED, *two_parts())
        assert link.is_symlink()
        assert target.read_text().startswith("item,")

    def test_the_file_has_the_permissions_of_any_new_file(self, tmp_path: Path) -> None:
        (tmp_path / "plain").write_text("")
        path = written(tmp_path / "out.npz", NAMED, *two_parts())
        assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


class TestAccuracy:
    @given(
        best=st.lists(st.integers(0, 4), min_size=1, max_size=30),
        labels=st.lists(st.none() | st.integers(0, 4), min_size=30, max_size=30),
        size=st.integers(1, 7),
    )
    @settings(max_examples=50)
    def test_counts_labelled_items_only(self, best: list[int], labels: list[int | None], size: int) -> None:
        labels = labels[: len(best)]
        outputs = torch.nn.functional.one_hot(torch.tensor(best), 5).float()
        accuracy = Accuracy()
        for start in range(0, len(best), size):
            accuracy = accuracy.with_outputs(outputs[start : start + size], labels[start : start + size])
        labelled = [label for label in labels if label is not None]
        correct = sum(label is not None and one == label for one, label in zip(best, labels, strict=True))
        assert (accuracy.correct, accuracy.labelled) == (correct, len(labelled))
        assert accuracy.top1 == (correct / len(labelled) if labelled else None)
