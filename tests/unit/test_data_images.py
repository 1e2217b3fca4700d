"""Test images: arithmetic against transformers' processors, files, folders, and invalid images."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_models import vit
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features

from pipeedge.base.errors import InputError
from pipeedge.data import InputRequest, open_input, pictures
from pipeedge.data.defaults import asset
from pipeedge.data.images import (
    DirectoryTransform,
    ImageTransform,
    default_recipe,
    find_images,
    image_transform,
    open_image,
)
from pipeedge.data.pictures import IMAGE_SUFFIXES, eight_bit, is_image
from pipeedge.models.outline import Outline

# Both sides do the same arithmetic in float32, in another order: a few units in the last place of 1.
TOLERANCE = 1e-6


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BOX).convert(mode)


def saved(folder: Path, name: str, seed: int = 0, size: tuple[int, int] = (20, 30)) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(*size, seed).save(path)
    return path


def transformed(transform: ImageTransform, image: Image.Image) -> torch.Tensor:
    """Return ``image`` as the model takes it, float32 [channels, height, width]."""
    encoded = transform.encode(image)
    return encoded if transform.table is None else transform.table.look_up(encoded[None])[0]


def write_processor(directory: Path, **options: object) -> Path:
    (directory / "preprocessor_config.json").write_text(json.dumps(options))
    return directory


@pytest.mark.parametrize(
    ("options", "resized"),
    [
        ({"crop_size": 8, "size": {"shortest_edge": 10}}, (30, 25)),
        ({"crop_size": 8, "size": {"height": 12, "width": 10}}, (24, 25)),
        ({"do_center_crop": False, "size": {"height": 8, "width": 8}}, (16, 20)),
    ],
)
def test_processors_make_images_of_another_size(
    options: dict[str, object], resized: tuple[int, int], tmp_path: Path
) -> None:
    """Twice as high and 2.5 times as wide as the processor's own; the share that is cut off stays."""
    usual = {"image_processor_type": "CLIPImageProcessor", "do_resize": True, "do_center_crop": True}
    write_processor(tmp_path, **{**usual, "resample": 3, **options})
    model = vit()
    config = model.config.of_image_size((16, 20))
    transform = image_transform(replace(model, config=config), [tmp_path])
    image = picture(20, 24)
    height, width = resized
    top, left = (height - 16) // 2, (width - 20) // 2
    whole = image.resize((width, height), Image.Resampling.BICUBIC)
    expected = np.asarray(whole.crop((left, top, left + 20, top + 16))).transpose(2, 0, 1)
    assert torch.equal(transform.encode(image), torch.from_numpy(expected.copy()))


class TestBytes:
    """Test that images sent as bytes give the first stage the same bits as normalising them before."""

    @pytest.mark.parametrize("family", ["vit", "deit"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_the_recipes_table_gives_the_bits_of_the_arithmetic(
        self, family: str, dtype: torch.dtype
    ) -> None:
        recipe = default_recipe(vit(family=family))
        encoded = recipe.encode(picture(300, 260))
        assert (encoded.dtype, encoded.shape) == (torch.uint8, (3, 224, 224))
        scaled = encoded.permute(1, 2, 0).numpy().astype(np.float32) / np.float32(255)
        normal = (scaled - np.asarray(recipe.mean, np.float32)) / np.asarray(recipe.std, np.float32)
        expected = torch.from_numpy(normal).permute(2, 0, 1).to(dtype)
        found = recipe.table.look_up(encoded[None], dtype)[0]
        assert found.is_contiguous()
        assert torch.equal(found, expected)

    @pytest.mark.parametrize(
        "options",
        [
            {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]},
            {"do_normalize": False},
            {"do_rescale": False},
            {"rescale_factor": 0.1, "resample": 3},
        ],
    )
    def test_a_directorys_processor_gives_the_same_bits_by_table(
        self, tmp_path: Path, options: dict[str, object]
    ) -> None:
        size = {"height": 16, "width": 16}
        write_processor(tmp_path, image_processor_type="ViTImageProcessor", size=size, **options)
        transform = image_transform(vit(16, directory=tmp_path), (tmp_path,))
        assert isinstance(transform, DirectoryTransform)
        assert transform.table is not None
        assert transform.encode(picture(40, 30)).dtype is torch.uint8
        assert transform.sizes is not None
        whole = replace(transform, table=None, sizes=None).encode(picture(40, 30))
        assert whole.dtype is torch.float32
        assert torch.equal(transformed(transform, picture(40, 30)), whole)

    @pytest.mark.parametrize(
        "options",
        [
            {"size": {"height": 16, "width": 16}, "do_center_crop": False},
            {"size": {"height": 20, "width": 24}, "do_center_crop": True, "crop_size": 16, "resample": 2},
            {"size": {"shortest_edge": 20}, "do_center_crop": True, "crop_size": 16},
        ],
    )
    def test_pictures_of_any_kind_get_the_bytes_of_the_processor(
        self, tmp_path: Path, options: dict[str, object]
    ) -> None:
        write_processor(tmp_path, image_processor_type="CLIPImageProcessor", **options)
        transform = image_transform(vit(16, directory=tmp_path), (tmp_path,))
        assert isinstance(transform, DirectoryTransform)
        assert (transform.sizes is None) == ("shortest_edge" in options["size"])
        for mode in ("RGB", "L", "RGBA", "P"):
            for width, height in ((40, 30), (16, 16), (24, 20), (1, 9)):
                image = picture(width, height).convert(mode)
                expected = replace(transform, sizes=None).encode(image)
                assert torch.equal(transform.encode(image), expected)
                if mode != "P":
                    array = np.asarray(image)
                    assert torch.equal(transform.encode_arrays(np.stack([array, array]))[1], expected)

    def test_a_processor_that_looks_at_the_whole_picture_keeps_its_values(self) -> None:
        def centred(image: Image.Image, **options: object) -> dict[str, list[np.ndarray]]:
            values = np.asarray(image.resize((8, 8)), np.float32).transpose(2, 0, 1)
            return {"pixel_values": [values - values.mean()]}

        transform = DirectoryTransform(centred, 3, (3, 8, 8), Path("preprocessor_config.json")).with_table()
        assert transform.table is None
        assert transform.encode(picture(20, 20)).dtype is torch.float32


class TestArithmetic:
    @given(width=st.integers(1, 400), height=st.integers(1, 400), seed=st.integers(0, 99))
    @settings(max_examples=15)
    def test_vit_default_is_transformers_default(self, width: int, height: int, seed: int) -> None:
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        image = picture(width, height, seed)
        expected = ViTImageProcessorPil()(image, return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(
            transformed(default_recipe(vit()), image), expected, rtol=0, atol=TOLERANCE
        )

    @given(width=st.integers(1, 400), height=st.integers(1, 400), seed=st.integers(0, 99))
    @settings(max_examples=15)
    def test_deit_default_is_transformers_default(self, width: int, height: int, seed: int) -> None:
        from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil

        image = picture(width, height, seed)
        # The published models say ImageNet's statistics, which are not the processor's own default.
        processor = DeiTImageProcessorPil(image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])
        expected = processor(image, return_tensors="pt")["pixel_values"][0]
        actual = transformed(default_recipe(vit(family="deit")), image)
        torch.testing.assert_close(actual, expected, rtol=0, atol=5 * TOLERANCE)

    def test_processor_of_a_directory_is_used(self, tmp_path: Path) -> None:
        write_processor(
            tmp_path,
            image_processor_type="ViTImageProcessor",
            size={"height": 16, "width": 16},
            resample=0,
            image_mean=[0.1, 0.2, 0.3],
            image_std=[1.0, 2.0, 4.0],
        )
        image = picture(16, 16)
        actual = transformed(image_transform(vit(16, directory=tmp_path), (tmp_path,)), image)
        pixels = np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255
        mean, std = np.array([[[0.1]], [[0.2]], [[0.3]]]), np.array([[[1.0]], [[2.0]], [[4.0]]])
        np.testing.assert_allclose(actual.numpy(), (pixels - mean) / std, atol=TOLERANCE)

    @pytest.mark.parametrize(
        ("family", "description"),
        [
            ("vit", {"feature_extractor_type": "ViTFeatureExtractor", "resample": 2, "size": 224}),
            (
                "deit",
                {
                    "feature_extractor_type": "DeiTFeatureExtractor",
                    "image_mean": [0.485, 0.456, 0.406],
                    "image_std": [0.229, 0.224, 0.225],
                    "resample": 3,
                    "size": 256,
                    "crop_size": 224,
                },
            ),
        ],
    )
    def test_defaults_match_the_published_descriptions(
        self, tmp_path: Path, family: str, description: dict[str, object]
    ) -> None:
        write_processor(tmp_path, **description)
        model = vit(family=family, directory=tmp_path)
        image = picture(300, 200)
        actual = transformed(image_transform(model, (tmp_path,)), image)
        torch.testing.assert_close(
            transformed(default_recipe(model), image), actual, rtol=0, atol=5 * TOLERANCE
        )

    def test_shipped_description_of_digits_is_the_scale_of_training(self) -> None:
        model = vit(8, 1, directory=asset("vit-digits"))
        image = picture(8, 8, mode="L")
        actual = transformed(image_transform(model, (asset("vit-digits"),)), image)
        expected = np.asarray(image, dtype=np.float32)[None] / 255 * 2 - 1
        np.testing.assert_allclose(actual.numpy(), expected, atol=TOLERANCE)
        # The same as the default, so a copy of the model without the description works alike.
        torch.testing.assert_close(transformed(default_recipe(model), image), actual, rtol=0, atol=TOLERANCE)
        # A colour picture becomes grey.
        assert transformed(image_transform(model, (asset("vit-digits"),)), picture(40, 20)).shape == (1, 8, 8)

    def test_unusable_descriptions_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "preprocessor_config.json").write_text("{")
        with pytest.raises(InputError, match=r"preprocessor_config.json: not an image processor"):
            image_transform(vit(), (tmp_path,))
        write_processor(tmp_path, image_processor_type="ViTImageProcessor", size={"height": 9, "width": 8})
        with pytest.raises(InputError, match=r"of shape \(3, 9, 8\), but the model takes \(3, 16, 16\)"):
            image_transform(vit(16), (tmp_path,))
        with pytest.raises(InputError, match=r"process images of 3 channels .* is it for another model\?"):
            image_transform(vit(16), (asset("vit-digits"),))

    def test_a_model_of_other_channels(self) -> None:
        with pytest.raises(InputError, match="4 channels"):
            image_transform(vit(8, 4), ())

    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I;16"])
    @pytest.mark.parametrize("channels", [1, 3])
    def test_every_kind_of_picture(self, mode: str, channels: int) -> None:
        if mode == "I;16":
            image = Image.fromarray(np.full((9, 9), 128 << 8, dtype=np.uint16))
            assert image.mode == mode
            image = eight_bit(image)
        else:
            image = Image.new("L", (9, 9), 128).convert(mode)
        pixels = transformed(default_recipe(vit(8, channels)), image)
        assert pixels.shape == (channels, 8, 8)
        assert pixels.dtype == torch.float32
        if mode != "1":
            assert pixels.abs().max() < 0.02  # half of the range is the middle of -1 to 1


class TestFiles:
    def test_exif_orientation_is_applied(self, tmp_path: Path) -> None:
        image = Image.new("RGB", (30, 10))
        exif = Image.Exif()
        exif[0x0112] = 6  # a quarter turn
        image.save(tmp_path / "a.jpg", exif=exif)
        assert open_image(tmp_path / "a.jpg").size == (10, 30)

    def test_folders_are_searched_sorted_and_other_files_are_counted(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        names = ["b.png", "a/z.JPG", "a/b/c.webp", "c.gif", "a.bmp"]
        expected = sorted(saved(tmp_path, name) for name in names)
        saved(tmp_path, ".hidden.png")
        saved(tmp_path, ".thumbnails/x.png")
        (tmp_path / "readme.md").write_text("x")
        (tmp_path / "a" / "loop").symlink_to(tmp_path)
        (tmp_path / "a" / "clip.MOV").write_text("x")
        (tmp_path / "a" / "LICENSE").write_text("x")
        found = find_images(tmp_path)
        assert found.paths == tuple(expected)
        assert found.skipped == {".md": 1, ".mov": 1, "": 1}
        with caplog.at_level("WARNING"):
            source = open_input(InputRequest(paths=(tmp_path,)), vit(8))
        (line,) = caplog.messages
        assert line.startswith(f"{tmp_path}: skipped 3 files of other types (")
        assert set(line.partition("(")[2].rstrip(")").split(", ")) == {
            "1 .md",
            "1 without a suffix",
            "1 .mov",
        }
        sources = [path for one in source.microbatches(2) for path in one.sources]
        assert sources == list(map(str, expected))
        assert not source.has_labels

    def test_files_and_folders_in_the_order_given(self, tmp_path: Path) -> None:
        last, folder = saved(tmp_path, "z.png"), tmp_path / "folder"
        first = saved(folder, "a.png", 1)
        model = vit(8)
        (microbatch,) = open_input(InputRequest(paths=(last, folder)), model).microbatches(8)
        assert microbatch.sources == (str(last), str(first))
        expected = torch.stack(
            [transformed(default_recipe(model), open_image(path)) for path in (last, first)]
        )
        assert torch.equal(microbatch.payload[0], expected)
        assert len(open_input(InputRequest(paths=(last, folder), max_items=1), model)) == 1
        assert len(open_input(InputRequest(paths=(last, folder), max_items=99), model)) == 2

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no image below this folder"):
            open_input(InputRequest(paths=(tmp_path,)), vit())

    @pytest.fixture
    def some_bad(self, tmp_path: Path) -> tuple[Path, Outline]:
        saved(tmp_path, "0.png")
        (tmp_path / "1.jpg").write_bytes(b"this is no picture")
        (tmp_path / "2.png").write_bytes(b"")
        saved(tmp_path, "3.png")
        whole = saved(tmp_path, "4.png", size=(200, 200)).read_bytes()
        (tmp_path / "4.png").write_bytes(whole[: len(whole) // 2])
        return tmp_path, vit(8)

    def test_an_unreadable_picture_is_named(self, some_bad: tuple[Path, Outline]) -> None:
        folder, model = some_bad
        with pytest.raises(InputError, match=r"1.jpg: cannot be read as an image"):
            list(open_input(InputRequest(paths=(folder,)), model).microbatches(8))

    def test_unreadable_pictures_are_left_out_and_reported(self, some_bad: tuple[Path, Outline]) -> None:
        folder, model = some_bad
        source = open_input(InputRequest(paths=(folder,), skip_bad_input=True), model)
        (microbatch,) = source.microbatches(8)
        assert microbatch.numbers == (0, 3)
        assert [Path(one.source).name for one in source.skipped] == ["1.jpg", "2.png", "4.png"]
        assert all(one.reason.startswith(one.source) for one in source.skipped)
        list(source.microbatches(1))
        assert len(source.skipped) == 3

    def test_image_beyond_the_pixel_limit_is_refused(self, tmp_path: Path) -> None:
        saved(tmp_path, "a.png")
        fits = open_input(InputRequest(paths=(tmp_path,), max_image_pixels=600), vit(8))
        assert len(list(fits.microbatches(1))) == 1
        too_large = open_input(InputRequest(paths=(tmp_path,), max_image_pixels=599), vit(8))
        with pytest.raises(InputError, match=r"a\.png: 20 x 30 are 600 pixels, more than 599.*--max-image-"):
            list(too_large.microbatches(1))

    def test_the_default_limit_is_pillows(self, tmp_path: Path) -> None:
        Image.new("1", (10_000, 8_949)).save(tmp_path / "a.png")
        with pytest.raises(InputError, match=r"more than 89,478,485, and .* make it smaller"):
            open_image(tmp_path / "a.png")

    @pytest.mark.parametrize("suffix", [one for one in IMAGE_SUFFIXES if one not in (".heic", ".heif")])
    def test_every_format_is_read(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"a{suffix.upper()}"
        formats = {".jpe": "JPEG", ".jfif": "JPEG", ".pnm": "PPM"}
        whole = picture(40, 30).convert("1" if suffix == ".pbm" else "L" if suffix == ".pgm" else "RGB")
        whole.save(path, format=formats.get(suffix))
        opened = open_image(path)
        assert opened.size == (40, 30)
        # The file is closed: everything that is needed must be in memory.
        assert transformed(default_recipe(vit(8)), opened).shape == (3, 8, 8)
        assert is_image(path.name)

    def test_modern_formats_are_among_them(self) -> None:
        assert {".jfif", ".jp2", ".png"} <= set(IMAGE_SUFFIXES)
        assert features.check("avif") == (".avif" in IMAGE_SUFFIXES)

    def test_other_formats_are_not_opened_under_a_known_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def ghostscript(*_: object, **__: object) -> None:
            raise AssertionError("Ghostscript was started")

        monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", ghostscript)
        picture(20, 20).save(tmp_path / "a.eps")
        (tmp_path / "a.eps").rename(tmp_path / "a.png")
        with pytest.raises(InputError, match=r"a\.png: cannot be read as an image"):
            open_image(tmp_path / "a.png")

    def test_pipe_is_refused_without_blocking(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "a.png")
        with pytest.raises(InputError, match=r"a\.png: is not a regular file"):
            open_image(tmp_path / "a.png")

    @pytest.mark.parametrize("name", ["a.pgm", "a.png", "a.tif", "a.jp2"])
    def test_grey_of_16_bits_is_scaled(self, tmp_path: Path, name: str) -> None:
        values = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
        Image.fromarray(values).save(tmp_path / name)
        opened = np.asarray(open_image(tmp_path / name).convert("L"), dtype=int)
        assert np.abs(opened - values / 257).max() <= 1

    def test_a_pgm_of_another_maximum_is_scaled(self, tmp_path: Path) -> None:
        values = np.array([[0, 1000], [2048, 4095]])
        body = b"P5 2 2 4095\n" + values.astype(">u2").tobytes()
        (tmp_path / "a.pgm").write_bytes(body)
        opened = np.asarray(open_image(tmp_path / "a.pgm"), dtype=int)
        assert np.abs(opened - values * 255 / 4095).max() <= 1

    @pytest.mark.parametrize(
        ("values", "kind"),
        [(np.ones((8, 8), np.float32), "floating point"), (np.ones((8, 8), np.int32), "integers of 32 bits")],
    )
    def test_values_of_an_unknown_range_are_refused(
        self, tmp_path: Path, values: np.ndarray, kind: str
    ) -> None:
        Image.fromarray(values).save(tmp_path / "a.tif")
        with pytest.raises(InputError, match=rf"a\.tif: its values are {kind}.*range is not known"):
            open_image(tmp_path / "a.tif")

    def test_a_picture_from_standard_input(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = saved(tmp_path, "a.png")
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
        (piped,) = open_input(InputRequest(paths=(Path("-"),)), vit(8)).microbatches(1)
        (named,) = open_input(InputRequest(paths=(path,)), vit(8)).microbatches(1)
        assert torch.equal(piped.payload[0], named.payload[0])
        assert piped.sources == ("standard input",)

    def test_grey_pictures_give_the_same_values_as_their_colour_form(self) -> None:
        grey = picture(301, 203, mode="L")
        recipe = default_recipe(vit(16))
        assert torch.equal(transformed(recipe, grey), transformed(recipe, grey.convert("RGB")))

    def test_large_photos_are_decoded_at_a_fraction_of_their_size(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pictures, "REDUCED_PIXELS", 20_000)
        smooth = picture(32, 24).resize((640, 480), Image.Resampling.BICUBIC)
        smooth.save(tmp_path / "a.jpg", quality=95)
        reduced = open_image(tmp_path / "a.jpg")
        assert reduced.size == (160, 120)
        monkeypatch.undo()
        recipe = default_recipe(vit(16))
        assert (
            transformed(recipe, reduced) - transformed(recipe, open_image(tmp_path / "a.jpg"))
        ).abs().max() < 0.1
