"""Test arrays as input, and input of the wrong kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fake_models import bert, digits, vit

from pipeedge.base.errors import InputError
from pipeedge.data import InputRequest, open_input


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

    def test_padding_is_known_by_the_mask(self, tmp_path: Path) -> None:
        arrays = tokens()
        arrays["attention_mask"][0, 2:] = 0
        arrays["attention_mask"][1, :1] = 0
        files = (npz(tmp_path, "a.npz", **arrays), npz(tmp_path, "b.npz", **tokens(1, 6)))
        (microbatch,) = open_input(InputRequest(paths=files), bert()).microbatches(8)
        expected = torch.zeros((4, 6), dtype=torch.bool)
        expected[:3, :5] = torch.from_numpy(arrays["attention_mask"]).bool()
        expected[3] = True
        assert microbatch.token_mask(6).equal(expected)

    def test_labels_beyond_the_classes(self, tmp_path: Path) -> None:
        path = npz(tmp_path, **tokens(), labels=np.array([1, -1, 2]))
        message = r"input\.npz\[2\]: labels has 2, not a class of local/bert; its classes are 0 to 1"
        with pytest.raises(InputError, match=message):
            open_input(InputRequest(paths=(path,)), bert())

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
        path = tmp_path / "a.mp4"
        path.write_text("x")
        with pytest.raises(InputError, match=r"a.mp4: unknown kind of input.*\.png"):
            open_input(InputRequest(paths=(path,)), vit())

    def test_mixed_input_is_refused(self, tmp_path: Path) -> None:
        text = tmp_path / "input.txt"
        text.write_text("x")
        paths = (npz(tmp_path, x=np.zeros(1)), text)
        with pytest.raises(InputError, match=r"input.npz holds arrays, .*input.txt text"):
            open_input(InputRequest(paths=paths), vit())

    def test_input_of_the_wrong_kind_is_refused(self, tmp_path: Path) -> None:
        text = tmp_path / "input.txt"
        text.write_text("x")
        with pytest.raises(InputError, match=r"takes images"):
            open_input(InputRequest(paths=(text,)), vit())
        with pytest.raises(InputError, match=r"takes sentences"):
            open_input(InputRequest(paths=(tmp_path,)), bert())
        with pytest.raises(InputError, match="CoLA is a data set of sentences"):
            open_input(InputRequest(dataset_name="CoLA"), vit())
        with pytest.raises(InputError, match="ImageNet is a data set of images"):
            open_input(InputRequest(dataset_name="ImageNet", dataset_root=tmp_path), bert())
