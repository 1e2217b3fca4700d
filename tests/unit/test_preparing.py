"""Test what becomes an item: sentences, pairs, images and arrays, and what is refused in one line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runtime_request import request
from served_models import MOST_TOKENS, save_bert, token_ids, token_types

from pipeedge.base.errors import InputError
from pipeedge.data.images import ImageSizes
from pipeedge.models import find_model
from pipeedge.serve.preparing import Preparation


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Preparation:
    directory = tmp_path_factory.mktemp("model") / "bert"
    save_bert(directory)
    return Preparation.open(request(f"0 1 -m {directory}"), find_model(directory))


@pytest.fixture(scope="module")
def digits() -> Preparation:
    return Preparation.open(request("0 1 -m vit-digits --max-image-pixels 10000"), find_model("vit-digits"))


def png(picture: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "PNG")
    return stream.getvalue()


PICTURE = np.arange(64, dtype=np.uint8).reshape(8, 8) * 3


def test_a_sentence_and_a_pair(sentences: Preparation) -> None:
    ids, mask, types = sentences.item("the cat sat").tensors
    assert ids.tolist() == token_ids("the cat sat")[0].tolist()
    assert mask.tolist() == [1] * 5
    assert types.tolist() == [0] * 5
    pair = sentences.item(("the cat", "sat on a mat"))
    assert pair.tensors[0].tolist() == token_ids("the cat", "sat on a mat")[0].tolist()
    assert pair.tensors[2].tolist() == token_types("the cat", "sat on a mat")[0].tolist()
    assert sentences.max_tokens == MOST_TOKENS
    assert sentences.pixels is None


def test_a_long_sentence_is_truncated_or_refused(
    sentences: Preparation, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(sentences.sentence("cat " * 99).tensors[0]) == MOST_TOKENS
    assert "are truncated" in caplog.text
    assert "cat cat" not in caplog.text
    with pytest.raises(InputError, match=f"^input: more than the {MOST_TOKENS} tokens that"):
        sentences.sentence("cat " * 99, truncate=False)


@pytest.mark.parametrize("missing", [(), ("token_type_ids",), ("attention_mask", "token_type_ids")])
def test_token_ids(sentences: Preparation, missing: tuple[str, ...]) -> None:
    ids = np.array([2, 7, 8, 3])
    arrays = {
        "input_ids": ids,
        "attention_mask": np.ones(4, np.int64),
        "token_type_ids": np.zeros(4, np.int64),
    }
    item = sentences.item({name: array for name, array in arrays.items() if name not in missing})
    assert [tensor.tolist() for tensor in item.tensors] == [ids.tolist(), [1] * 4, [0] * 4]


@pytest.mark.parametrize(
    "value",
    [PICTURE, torch.from_numpy(PICTURE), PICTURE[:, :, None], np.stack([PICTURE] * 3, 2), png(PICTURE)],
    ids=["array", "tensor", "one channel", "RGB", "file"],
)
def test_an_image_in_every_form(digits: Preparation, value: Any) -> None:
    assert digits.item(value).tensors[0].equal(torch.from_numpy(PICTURE)[None])
    assert digits.item(Image.fromarray(PICTURE)).tensors[0].equal(torch.from_numpy(PICTURE)[None])


def test_an_image_file(digits: Preparation, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(PICTURE))
    for path in (tmp_path / "a.png", str(tmp_path / "a.png")):
        assert digits.item(path).tensors[0].equal(torch.from_numpy(PICTURE)[None])


def test_pixel_values_become_the_bytes_that_they_stand_for(digits: Preparation) -> None:
    assert digits.pixels is not None
    values = digits.pixels.look_up(torch.from_numpy(PICTURE)[None, None])[0]
    assert digits.item(values).tensors[0].equal(torch.from_numpy(PICTURE)[None])
    assert digits.item({"pixel_values": values.double()}).tensors[0].equal(torch.from_numpy(PICTURE)[None])
    with pytest.raises(InputError, match=r"8 bits a value gives.* the pipeline with images_as_bytes=False$"):
        digits.item(values + 0.0012)
    with pytest.raises(InputError, match="that no image of 8 bits a value gives"):
        digits.item(values * 9)


def test_without_bytes_any_pixel_values_will_do() -> None:
    floats = Preparation.open(request("0 1 -m vit-digits"), find_model("vit-digits"), as_bytes=False)
    assert floats.pixels is None
    values = torch.linspace(-9, 9, 64).view(1, 8, 8)
    assert floats.item(values).tensors[0].equal(values)
    assert floats.item(PICTURE).tensors[0].dtype is torch.float32


@pytest.mark.parametrize(
    ("value", "line"),
    [
        pytest.param("  ", "input: the sentence is empty", id="blank"),
        pytest.param(("a cat", " "), "input: the second sentence of this pair is empty", id="half a pair"),
        pytest.param("a \ud800 cat", "input: the sentence is not valid Unicode", id="surrogate"),
        pytest.param(("a cat", "\udfff"), "input: the sentence is not valid Unicode", id="second surrogate"),
        pytest.param(3, "input: int; .* takes sentences", id="number"),
        pytest.param(b"the cat", "input: bytes; .* takes sentences", id="bytes"),
        pytest.param({"input_ids": [2, 99]}, "input_ids has 99, .* takes 0 to", id="no token"),
        pytest.param({"input_ids": np.zeros(4)}, "input_ids is float64, not a type of integers", id="floats"),
        pytest.param(
            {"ids": [2]}, "input: no input is called ids; .* takes input_ids, att", id="another name"
        ),
        pytest.param({"attention_mask": [1]}, "no array 'input_ids'", id="one missing"),
        pytest.param({"input_ids": [2] * 99}, "input_ids has 99 tokens an item", id="too many"),
    ],
)
def test_what_is_no_sentence_is_refused(sentences: Preparation, value: Any, line: str) -> None:
    with pytest.raises(InputError, match=line):
        sentences.item(value)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        pytest.param(b"GIF89a", "input: cannot be read as an image", id="broken"),
        pytest.param(png(np.zeros((101, 100), np.uint8)), "are 10,100 pixels, more than 10,000", id="large"),
        pytest.param(3, "input: int; vit-digits takes images", id="number"),
        pytest.param(Path("missing.png"), "missing.png: no such file", id="missing"),
        pytest.param("\ud800.png", r"ud800.png: cannot be read as an image", id="surrogate"),
        pytest.param("a\0.png", r"a\\x00.png: cannot be read as an image", id="null"),
        pytest.param(np.zeros((8, 8, 7), np.uint8), r"uint8 \[8, 8, 7\]; an image is", id="channels"),
        pytest.param(
            np.zeros((3, 8, 8)), r"pixel_values is \[1, 3, 8, 8\], .* takes \[items, 1, 8, 8\]", id="size"
        ),
        pytest.param({"pixel_values": np.full((1, 8, 8), np.nan)}, "not finite", id="NaN"),
        pytest.param("", "^input: the path of the image is empty$", id="empty path"),
        *(
            pytest.param(array, rf"^input: {array.dtype} \[8.*; an image is uint8, with values", id=name)
            for name, array in {
                "gray floats": np.zeros((8, 8), np.float32),
                "RGB floats": np.zeros((8, 8, 3)),
                "integers": np.zeros((8, 8), np.int64),
                "booleans": np.zeros((8, 8, 3), bool),
            }.items()
        ),
    ],
)
def test_what_is_no_image_is_refused(digits: Preparation, value: Any, line: str) -> None:
    with pytest.raises(InputError, match=line):
        digits.item(value)


def test_the_other_kind_is_refused(sentences: Preparation, digits: Preparation) -> None:
    with pytest.raises(InputError, match="input: a sentence; vit-digits takes images"):
        digits.sentence("the cat")
    with pytest.raises(InputError, match=r"input: an image; .* takes sentences"):
        sentences.image(png(PICTURE))


@pytest.mark.parametrize(
    ("data", "is_quick"),
    [
        (png(PICTURE), True),
        (png(np.zeros((9, 9000), np.uint8)), False),  # few bytes, and many pixels
        (png(np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)), False),
        (png(PICTURE)[:20], False),
        (png(PICTURE) + png(np.zeros((9, 9), np.uint8)), False),  # which of the two sizes counts?
        (b"GIF89a" + bytes(20), False),
        ("data:image/png;base64,", False),
    ],
)
def test_only_small_images_are_decoded_where_they_come(
    digits: Preparation, data: bytes | str, is_quick: bool
) -> None:
    assert digits.is_quick([data]) == is_quick


def test_only_short_texts_are_tokenised_where_they_come(sentences: Preparation) -> None:
    assert sentences.is_quick(["the cat sat", "a mat"])
    assert not sentences.is_quick(["the cat"] * 200)
    with sentences._tokenizing:  # as another thread does
        assert not sentences.is_quick(["the cat sat"])


@pytest.mark.parametrize(
    "value", [PICTURE, Image.fromarray(PICTURE), png(PICTURE)], ids=["array", "image", "file"]
)
def test_lack_of_memory_refuses_the_picture(
    value: object, digits: Preparation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ImageSizes, "encode", lacking)
    monkeypatch.setattr(ImageSizes, "encode_arrays", lacking)
    with pytest.raises(InputError, match=r"^input: not enough memory for this image; make it smaller$"):
        digits.item(value)
