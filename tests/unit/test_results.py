"""Test result files and accuracy, read back and compared with separate calculations."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from fake_models import with_head
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.errors import PipeEdgeError, RequestError
from pipeedge.data import parquet
from pipeedge.data.parquet import ParquetRows
from pipeedge.data.results import Accuracy, ResultWriter
from pipeedge.data.row_formats import ArrayRows, RowFormat
from pipeedge.data.source import Microbatch
from pipeedge.data.unfinished import UnfinishedOutput
from pipeedge.models.outline import Outline
from pipeedge.request.files import STANDARD_OUTPUT

SUFFIXES = (".csv", ".jsonl", ".npz", ".parquet")


def pictures(*numbers: int, labels: Sequence[int | None] | None = None) -> Microbatch:
    """Return a microbatch of pictures with these numbers."""
    sources = tuple(f"dir/{number}, “ä”.png" for number in numbers)
    return Microbatch((), tuple(labels or [None] * len(numbers)), sources, numbers)


def sentences(numbers: Sequence[int], *texts: str, tokens: Sequence[int] | None = None) -> Microbatch:
    """Return a microbatch of sentences with these numbers."""
    sources = tuple(f"a:{number + 1}" for number in numbers)
    lengths = None if tokens is None else tuple(tokens)
    return Microbatch((), (None,) * len(texts), sources, tuple(numbers), lengths, texts=texts)


NAMED = with_head(("zero", "one, or so", "two", "three", "four", "five"))
OUTPUTS = torch.tensor(
    [[0.0, 3.0, 1.0, 2.0, -1.0, -2.0], [5.0, 5.5, -9.0, 0.0, 0.5, 0.25], [9.0, 8, 7, 6, 5, 4]]
)


def written(
    path: Path, model: Outline, *parts: tuple[torch.Tensor, Microbatch], expected: int | None = None
) -> Path:
    with ResultWriter(path, model, expected) as writer:
        for number, (outputs, items) in enumerate(parts):
            writer.write(number, outputs, items)
    return path


def two_parts() -> tuple[tuple[torch.Tensor, Microbatch], ...]:
    return (OUTPUTS[:2], pictures(0, 1, labels=(1, None))), (OUTPUTS[2:], pictures(2, labels=(4,)))


def softmax(row: Sequence[float]) -> list[float]:
    total = sum(math.exp(value) for value in row)
    return [math.exp(value) / total for value in row]


TAGGER = with_head(("O", "B-PER"), "tokens")


def tagged() -> tuple[tuple[torch.Tensor, Microbatch], ...]:
    """Return sentences of 1, 3 and 2 tokens, whose microbatches are padded to 3 and 2."""
    values = torch.arange(18.0).view(3, 3, 2) * torch.tensor([1.0, -1.0])
    first = sentences((0, 2), "x", "x y z", tokens=(1, 3))
    return (values[:2], first), (values[2:, :2], sentences((3,), "x y", tokens=(2,)))


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

    def test_padding_that_came_with_the_input_is_left_out(self, tmp_path: Path) -> None:
        """The first item is padded at its end, the second at its beginning, the third not at all."""
        masks = (torch.tensor([1, 1, 0]).bool(), torch.tensor([0, 1, 1]).bool(), None)
        batch = replace(pictures(0, 1, 2), tokens=(3, 3, 3), masks=masks)
        values = torch.arange(24.0).view(3, 4, 2)
        expected = torch.cat([values[0, :2], values[1, 1:3], values[2, :3]])
        with np.load(written(tmp_path / "o.npz", TAGGER, (values, batch))) as arrays:
            assert arrays["tokens"].tolist() == [2, 2, 3]
            np.testing.assert_array_equal(arrays["outputs"], expected)
        lines = written(tmp_path / "o.jsonl", TAGGER, (values, batch)).read_text().splitlines()
        assert [len(json.loads(line)["tokens"]) for line in lines] == [2, 2, 3]
        assert batch.without_padding(values)[1].tolist() == [[0, 0], [10, 11], [12, 13], [0, 0]]

    def test_a_table_has_no_room_for_tokens(self, tmp_path: Path) -> None:
        with pytest.raises(
            RequestError, match=r"classifies every token; .*\.jsonl, \.npz and \.parquet only"
        ):
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
        items = sentences((0, 1), 'a "quoted", one', "zwei\u2028drei")
        table = written(tmp_path / "out.csv", NAMED, (OUTPUTS[:2], items))
        with table.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
        assert list(rows[0])[:5] == ["item", "source", "label", "text", "class_1"]
        assert tuple(row["text"] for row in rows) == items.texts
        lines = written(tmp_path / "out.jsonl", NAMED, (OUTPUTS[:2], items)).read_text(encoding="utf-8")
        assert tuple(json.loads(line)["text"] for line in lines.strip().split("\n")) == items.texts

    def test_csv_of_a_model_with_few_and_nameless_classes(self, tmp_path: Path) -> None:
        path = written(tmp_path / "out.csv", with_head(), (torch.zeros(1, 2), pictures(0)))
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
        path = written(tmp_path / "a.jsonl", with_head(("relevant",)), (outputs, pictures(0, 1)))
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [row["top"] for row in rows] == [
            [{"class": 0, "name": "relevant", "score": value}] for value in (-3.5, 7.25)
        ]
        path = written(tmp_path / "a.csv", with_head(), (outputs, pictures(0, 1)))
        with path.open(newline="") as file:
            assert [row["score_1"] for row in csv.DictReader(file)] == ["-3.5", "7.25"]
        assert Accuracy().with_outputs(outputs, [0, 1]) == Accuracy()

    def test_jsonl_is_valid_json_for_nan_outputs(self, tmp_path: Path) -> None:
        path = written(tmp_path / "out.jsonl", with_head(), (torch.full((1, 2), math.nan), pictures(0)))

        def refuse(text: str) -> None:
            raise AssertionError(text)

        row = json.loads(path.read_text(), parse_constant=refuse)
        assert [entry["score"] for entry in row["top"]] == [None, None]
        assert "name" not in row["top"][0]

    def test_npz(self, tmp_path: Path) -> None:
        path = written(tmp_path / "out.npz", NAMED, *two_parts(), expected=3)
        with np.load(path, allow_pickle=False) as arrays:
            assert sorted(arrays.files) == ["items", "labels", "outputs"]
            assert arrays["items"].tolist() == [0, 1, 2]
            assert arrays["outputs"].dtype == np.float32
            np.testing.assert_array_equal(arrays["outputs"], OUTPUTS.numpy())
            assert arrays["labels"].tolist() == [1, -1, 4]

    def test_npz_of_vectors_without_labels(self, tmp_path: Path) -> None:
        outputs = torch.randn(4, 3, 2, dtype=torch.bfloat16)
        path = written(
            tmp_path / "out.npz", with_head(head="vector"), (outputs, pictures(0, 1, 2, 3)), expected=4
        )
        with np.load(path) as arrays:
            assert arrays.files == ["outputs", "items"]
            np.testing.assert_array_equal(arrays["outputs"], outputs.float().numpy())

    def test_vectors_are_the_same_in_every_format(self, tmp_path: Path) -> None:
        outputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(2)) * 1e-3
        batch = sentences((0, 2, 3), "a", "zwei", "c")
        model = with_head(head="vector")
        lines = written(tmp_path / "o.jsonl", model, (outputs, batch)).read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        table = pyarrow.parquet.read_table(written(tmp_path / "o.parquet", model, (outputs, batch)))
        found = table.to_pylist()
        assert [(row["item"], row["source"], row["text"]) for row in found] == [
            (row["item"], row["source"], row["text"]) for row in rows
        ]
        assert table.schema.field("vector").type == pyarrow.list_(pyarrow.float32())
        for read in (rows, found):
            assert np.float32([row["vector"] for row in read]).tolist() == outputs.tolist()
        assert len(json.dumps(rows[0]["vector"][0])) < 16  # the shortest number that is this float32

    def test_a_vector_of_nan_is_null_in_json(self, tmp_path: Path) -> None:
        outputs = torch.tensor([[[math.nan, 1.5], [-math.inf, 0.1]]])
        path = written(tmp_path / "o.jsonl", with_head(head="vector"), (outputs, pictures(0)))
        assert json.loads(path.read_text())["vector"] == [[None, 1.5], [None, 0.1]]
        path = written(tmp_path / "o.parquet", with_head(head="vector"), (outputs, pictures(0)))
        (row,) = pyarrow.parquet.read_table(path).to_pylist()
        assert row["vector"][1] == [-math.inf, pytest.approx(0.1)]

    @pytest.mark.parametrize(("model", "parts"), [(NAMED, two_parts()), (TAGGER, tagged())])
    def test_parquet_has_what_lines_of_json_have(
        self, tmp_path: Path, model: Outline, parts: Sequence[tuple[torch.Tensor, Microbatch]]
    ) -> None:
        lines = written(tmp_path / "o.jsonl", model, *parts).read_text(encoding="utf-8").splitlines()
        rows = pyarrow.parquet.read_table(written(tmp_path / "o.parquet", model, *parts)).to_pylist()
        known = [{key: value for key, value in row.items() if value is not None} for row in rows]
        assert known == [json.loads(line) for line in lines]

    def test_row_groups_of_parquet_are_limited(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parquet, "_GROUP_ROWS", 4)
        parts = [(OUTPUTS[:2], pictures(number, number + 1)) for number in range(0, 10, 2)]
        file = pyarrow.parquet.ParquetFile(written(tmp_path / "o.parquet", NAMED, *parts))
        assert [file.metadata.row_group(each).num_rows for each in range(file.num_row_groups)] == [4, 4, 2]
        assert file.read(["item"])["item"].to_pylist() == list(range(10))

    def test_names_that_are_no_text(self, tmp_path: Path) -> None:
        batch = replace(pictures(0), sources=("dir/\udcff.png",))
        for suffix in SUFFIXES:
            written(tmp_path / f"o{suffix}", NAMED, (OUTPUTS[:1], batch))
        assert json.loads((tmp_path / "o.jsonl").read_text())["source"] == "dir/\udcff.png"
        assert r"dir/\udcff.png" in (tmp_path / "o.csv").read_text()

    def test_standard_output_has_each_row_at_once(self, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
        with ResultWriter(STANDARD_OUTPUT, NAMED, 3) as writer:
            for number, (outputs, items) in enumerate(two_parts()):
                writer.write(number, outputs, items)
                out = capsysbinary.readouterr().out
                assert [json.loads(line)["item"] for line in out.splitlines()] == list(items.numbers)
            assert writer.unfinished is None
        assert capsysbinary.readouterr().out == b""

    def test_places_in_the_input_where_items_were_skipped(self, tmp_path: Path) -> None:
        part = (OUTPUTS, pictures(0, 2, 5))
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
            (chunk, pictures(*which))
            for chunk, which in zip(
                outputs.split(sizes),
                (part.tolist() for part in torch.tensor(numbers).split(sizes)),
                strict=True,
            )
        ]
        for suffix in SUFFIXES:
            one = written(folder / f"one{suffix}", with_head(), (outputs, pictures(*numbers)))
            many = written(folder / f"many{suffix}", with_head(), *parts)
            assert one.read_bytes() == many.read_bytes()


class TestFailure:
    @pytest.mark.parametrize("suffix", SUFFIXES)
    def test_failed_run_keeps_the_existing_file(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"out{suffix}"
        path.write_text("before")

        def fail() -> None:
            with ResultWriter(path, NAMED, None) as writer:
                writer.write(0, OUTPUTS, pictures(0, 1, 2))
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
            writer.write(0, OUTPUTS, pictures(0, 1, 2))
            assert not path.exists()
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("path", [None, "out.npz"])
    def test_microbatches_out_of_order(self, tmp_path: Path, path: str | None) -> None:
        target = None if path is None else tmp_path / path
        with ResultWriter(target, NAMED, 3) as writer:
            writer.write(0, OUTPUTS[:1], pictures(0))
            with pytest.raises(PipeEdgeError, match="results of microbatch 2, expected 1"):
                writer.write(2, OUTPUTS[:1], pictures(2))
            with pytest.raises(PipeEdgeError, match="has 2 items, but 1 results"):
                writer.write(1, OUTPUTS[:1], pictures(1, 2))
            writer.write(1, OUTPUTS[1:], pictures(1, 2))
            assert writer.items == 3

    @pytest.mark.parametrize("name", [None, "out.jsonl"])
    def test_missing_results(self, tmp_path: Path, name: str | None) -> None:
        path = None if name is None else tmp_path / name
        with pytest.raises(PipeEdgeError, match="3 results for 4 items"):
            written(path, NAMED, (OUTPUTS, pictures(0, 1, 2)), expected=4)  # type: ignore[arg-type]
        assert [entry.name for entry in tmp_path.iterdir()] == ([] if name is None else ["out.jsonl.part"])

    def test_outputs_of_another_shape(self, tmp_path: Path) -> None:
        with pytest.raises(PipeEdgeError, match=r"\(2,\) values an item follow outputs of \(6,\)"):
            written(tmp_path / "a.npz", NAMED, (OUTPUTS, pictures(0, 1, 2)), (torch.zeros(1, 2), pictures(3)))
        assert not (tmp_path / "a.npz").exists()

    @pytest.mark.parametrize("suffix", SUFFIXES)
    def test_a_full_disk(self, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def append(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(UnfinishedOutput, "append", append)
        with pytest.raises(RequestError, match=rf"out{suffix}: cannot be written \(No space left"):
            written(tmp_path / f"out{suffix}", NAMED, *two_parts())
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("suffix", SUFFIXES)
    def test_a_disk_that_is_full_at_the_end_leaves_the_rows(
        self, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Full(io.BytesIO):
            def write(self, data: object) -> int:
                raise OSError(28, "No space left on device")

        def into_full(own: Callable[..., None]) -> Callable[..., None]:
            return lambda rows, unfinished, _target: own(rows, unfinished, Full())

        for rows in (RowFormat, ArrayRows, ParquetRows):
            monkeypatch.setattr(rows, "assemble", into_full(rows.assemble))
        with pytest.raises(RequestError, match=rf"out{suffix}: cannot be written \(No space left"):
            written(tmp_path / f"out{suffix}", NAMED, *two_parts())
        assert [path.name for path in tmp_path.iterdir()] == [f"out{suffix}.part"]


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

    def test_a_table_has_no_room_for_vectors(self, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match=r"a-model gives vectors.* \.jsonl, \.npz and \.parquet only"):
            ResultWriter(tmp_path / "out.csv", with_head(head="vector"), None)

    def test_parquet_without_its_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(RequestError, match=r"out\.parquet: .*pip install 'pipeedge\[parquet\]'"):
            ResultWriter(tmp_path / "out.parquet", NAMED, None)

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
