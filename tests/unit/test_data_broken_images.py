"""Test images that are broken, huge or of a missing format: each is one refusal, without other output."""

from __future__ import annotations

import io
import os
import random
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_models import vit
from PIL import Image, features
from PIL.PngImagePlugin import PngImageFile

from pipeedge.base.errors import InputError
from pipeedge.base.streams import log_warnings
from pipeedge.data import InputRequest, images, open_input, pictures
from pipeedge.data.images import default_recipe, encode_picture, image_transform
from pipeedge.data.pictures import MOST_SIDE, decode_image, open_image
from pipeedge.data.png import has_all_rows

WIDTH, HEIGHT = 21, 30
NOISE = np.random.default_rng(0).integers(1, 256, (HEIGHT, WIDTH, 4), dtype=np.uint8)
FUZZ_ROUNDS = int(os.environ.get("PIPEEDGE_FUZZ_ROUNDS", "40"))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(raw: bytes, *, colour: int, bits: int = 8, interlace: int = 0, pieces: int = 1 << 20) -> bytes:
    """Return a PNG of the given uncompressed data, which may be too short."""
    data = zlib.compress(raw)
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, bits, colour, 0, 0, interlace)
    parts = [chunk(b"IDAT", data[at : at + pieces]) for at in range(0, len(data), pieces)]
    palette = chunk(b"PLTE", bytes(range(256)) * 3) if colour == 3 else b""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + palette + b"".join(parts) + chunk(b"IEND", b"")


def rows(number: int, channels: int, *, black: int = 0) -> bytes:
    """Return the first rows of noise, the last of them black."""
    made = NOISE[:number, :, :channels].copy()
    made[number - black :] = 0
    return b"".join(b"\0" + row.tobytes() for row in made)


CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


@pytest.mark.parametrize("colour", CHANNELS)
@pytest.mark.parametrize("pieces", [1, 50, 1 << 20])
def test_png_whose_rows_end_early_is_refused(colour: int, pieces: int) -> None:
    for number in (1, 10, HEIGHT - 1):
        data = png(rows(number, CHANNELS[colour]), colour=colour, pieces=pieces)
        with pytest.raises(InputError, match=r"^a: cannot be read as an image \(image file is truncated"):
            decode_image(io.BytesIO(data), "a")
        assert not has_all_rows(io.BytesIO(data))
    whole = png(rows(HEIGHT, CHANNELS[colour]), colour=colour, pieces=pieces)
    assert has_all_rows(io.BytesIO(whole))
    black = png(rows(HEIGHT, CHANNELS[colour], black=3), colour=colour, pieces=pieces)
    assert decode_image(io.BytesIO(black), "a").size == (WIDTH, HEIGHT)


def passes(number: int) -> bytes:
    """Return the first passes of an interlaced grey image of one bit a pixel."""
    made = b""
    for left, top, across, down in (
        *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)),
        *((0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
    )[:number]:
        columns = len(range(left, WIDTH, across))
        made += (b"\0" + b"\xff" * ((columns + 7) // 8)) * len(range(top, HEIGHT, down))
    return made


def test_interlaced_png_needs_all_passes() -> None:
    whole = decode_image(io.BytesIO(png(passes(7), colour=0, bits=1, interlace=1)), "a")
    assert np.asarray(whole).all()
    for number in range(1, 7):
        with pytest.raises(InputError, match="truncated"):
            decode_image(io.BytesIO(png(passes(number), colour=0, bits=1, interlace=1)), "a")


def saved(kind: str, mode: str = "RGB", **options: object) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(NOISE[:, :, :3]).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


FORMATS: tuple[tuple[str, dict[str, object]], ...] = (
    *(("PNG", {}), ("BMP", {}), ("GIF", {}), ("JPEG", {}), ("PPM", {}), ("JPEG2000", {}), ("WEBP", {})),
    *(("TIFF", {"compression": kind}) for kind in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")),
    ("TIFF", {"compression": "group4", "mode": "1"}),
    *((("AVIF", {}),) if features.check("avif") else ()),
)


@pytest.mark.parametrize(("kind", "options"), FORMATS)
def test_damaged_images_raise_one_error_and_print_nothing(
    kind: str, options: dict[str, object], capfd: pytest.CaptureFixture[str]
) -> None:
    data, chance, said = saved(kind, **options), random.Random(1), list[str]()
    with warnings.catch_warnings(record=True) as warned:
        warnings.resetwarnings()
        log_warnings("test")
        for number in range(FUZZ_ROUNDS):
            damaged = bytearray(data)
            for _ in range(chance.choice((1, 2, 8))):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            size = chance.randrange(len(damaged)) if number % 3 == 0 else len(damaged)
            try:
                decode_image(io.BytesIO(bytes(damaged[:size])), "a", 1 << 20)
            except InputError as error:
                said.append(str(error))
    assert all(line.startswith("a: ") and line.isprintable() for line in said)
    assert not warned
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("size", [(MOST_SIDE + 1, 1), (1, MOST_SIDE + 1), (1, 89_000_000)])
def test_long_sides_are_refused_before_decoding(size: tuple[int, int], tmp_path: Path) -> None:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 0, 0, 0, 0))
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"never read"))
    expected = rf"a\.png: {size[0]} x {size[1]}: a side of an image may have 65,535 pixels; cut the image"
    with pytest.raises(InputError, match=expected):
        open_image(tmp_path / "a.png")


def test_narrow_image_is_refused_where_resizing_would_make_it_huge(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "crop_size": 16}'
    )
    by_shorter_side = image_transform(vit(16, directory=tmp_path), (tmp_path,))
    narrow = Image.new("L", (1, MOST_SIDE))
    assert by_shorter_side.resized_pixels(30, 20) == 16 * 24
    assert default_recipe(vit(16)).resized_pixels(*narrow.size) == 16 * 16
    encode_picture(by_shorter_side, "a", lambda: narrow)
    large = image_transform(vit(16, directory=tmp_path), (tmp_path,))
    large.processor.size = {"shortest_edge": 224}  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="a: 1 x 65535 is too narrow to be resized for this model"):
        encode_picture(large, "a", lambda: narrow)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
@pytest.mark.parametrize("orientation", [None, 6])
def test_large_images_of_any_kind_are_reduced(
    mode: str, orientation: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smooth = Image.linear_gradient("L").resize((801, 401))
    if mode == "I;16":
        image = Image.fromarray(np.asarray(smooth).astype(np.uint16) << 8)
    else:
        image = smooth.convert(mode)
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    image.save(path, exif=exif)
    whole = open_image(path)
    monkeypatch.setattr(pictures, "REDUCED_PIXELS", 100_000)
    monkeypatch.setattr(pictures, "_STRIP_PIXELS", 20_000)
    reduced = open_image(path)
    size = (401, 201)
    assert reduced.size == (size if orientation is None else size[::-1])
    assert reduced.mode == ("L" if mode in ("1", "L", "I;16") else "RGB")
    recipe = default_recipe(vit(8))
    difference = recipe.encode(reduced).float() - recipe.encode(whole).float()
    assert difference.abs().max() < (40 if mode == "1" else 4)


def lacking(*_: object, **__: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("place", ["decoding", "encoding"])
def test_lack_of_memory_refuses_one_picture(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("0.png", 10), ("1.png", 20), ("2.png", 10)):
        Image.new("L", (size, size)).save(tmp_path / name)
    kind, name = (PngImageFile, "load") if place == "decoding" else (images.ImageRecipe, "encode")
    original: Callable[..., object] = getattr(kind, name)

    def fails_for_one(*arguments: object) -> object:
        image = arguments[-1]
        assert isinstance(image, Image.Image)
        return lacking() if image.width == 20 else original(*arguments)

    monkeypatch.setattr(kind, name, fails_for_one)
    said = r"1\.png: not enough memory for this image; make it smaller"
    with pytest.raises(InputError, match=said):
        list(open_input(InputRequest(paths=(tmp_path,)), vit(8)).microbatches(1))
    source = open_input(InputRequest(paths=(tmp_path,), skip_bad_input=True), vit(8))
    assert [microbatch.numbers for microbatch in source.microbatches(1)] == [(0,), (2,)]
    assert [Path(one.source).name for one in source.skipped] == ["1.png"]


HEIC_HEAD = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


def test_heif_without_its_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pictures, images):
        monkeypatch.setattr(module, "needs_heif", lambda: True)
    kept = tuple(one for one in pictures.IMAGE_SUFFIXES if one not in pictures.HEIF_SUFFIXES)
    monkeypatch.setattr("pipeedge.data.opening.IMAGE_SUFFIXES", kept)
    monkeypatch.setattr(pictures, "IMAGE_SUFFIXES", kept)
    named = r"the package pillow-heif: pip install 'pipeedge\[heif\]'"
    (tmp_path / "a.HEIC").write_bytes(HEIC_HEAD)
    with pytest.raises(InputError, match=rf"a\.HEIC: HEIF images need {named}"):
        open_input(InputRequest(paths=(tmp_path / "a.HEIC",)), vit(8))
    with pytest.raises(InputError, match=f"^input: is a HEIF image, which needs {named}"):
        decode_image(io.BytesIO(HEIC_HEAD), "input")
    found = images.find_images(tmp_path)
    assert f"(1 .heic); HEIF images need {named}".replace("\\", "") in (
        images.skipped_line("photos", found.skipped) or ""
    )


@pytest.mark.parametrize("suffix", [".heic", ".heif", ".png"])
def test_heif_is_read_with_its_package(suffix: str, tmp_path: Path) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    smooth = Image.linear_gradient("L").resize((64, 48)).convert("RGB")
    pillow_heif.from_pillow(smooth).save(tmp_path / f"a{suffix}", quality=95)
    (batch,) = open_input(InputRequest(paths=(tmp_path / f"a{suffix}",)), vit(8)).microbatches(1)
    (tmp_path / "b.png").unlink(missing_ok=True)
    smooth.save(tmp_path / "b.png")
    (expected,) = open_input(InputRequest(paths=(tmp_path / "b.png",)), vit(8)).microbatches(1)
    torch.testing.assert_close(batch.payload[0], expected.payload[0], rtol=0, atol=0.03)
