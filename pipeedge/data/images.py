"""Images to ``pixel_values``: decode, resize, crop. Values are normalised by a table where that is exact.

A model directory with a ``preprocessor_config.json`` is processed by transformers' image processors.
Otherwise the defaults of the nine known models are used: the same arithmetic with Pillow and NumPy alone
(``tests/unit/test_data_images.py`` compares the two).
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

from pipeedge.base.deferred_imports import import_postponed
from pipeedge.base.errors import InputError
from pipeedge.base.heap import return_freed_memory
from pipeedge.base.payload import BYTE_VALUES, PixelTable
from pipeedge.base.wording import count, figure, printable
from pipeedge.data.companions import companion_file
from pipeedge.data.items import NO_TOKENS, Item
from pipeedge.data.pictures import (
    HEIF_SUFFIXES,
    IMAGE_SUFFIXES,
    INSTALL_HEIF,
    LARGE_PIXELS,
    REDUCED_PIXELS,
    is_image,
    needs_heif,
    open_image,
)
from pipeedge.models.outline import Outline

__all__ = [
    "NO_MEMORY",
    "IMAGE_SUFFIXES",
    "DecodedImages",
    "DirectoryTransform",
    "FoundImages",
    "ImageFiles",
    "ImageRecipe",
    "ImageSizes",
    "ImageTransform",
    "check_shape",
    "default_recipe",
    "encode_picture",
    "find_images",
    "image_transform",
    "is_image",
    "open_image",
    "skipped_line",
]

log = logging.getLogger(__name__)

NO_MEMORY = "not enough memory for this image; make it smaller"
_LISTED_TYPES = 8
PROCESSOR_FILE = "preprocessor_config.json"
_SIZES_ONLY = {"do_rescale": False, "do_normalize": False}
"""Options with which an image processor leaves the values unchanged."""


class ImageTransform(Protocol):
    """A conversion of images to the input of a model."""

    @property
    def table(self) -> PixelTable | None:
        """Values that the bytes from ``encode`` stand for, or None if it returns the values themselves."""

    def resized_pixels(self, width: int, height: int) -> int:
        """Return the number of pixels that an image of this size is resized to, before it is cropped."""

    def encode(self, image: Image.Image) -> torch.Tensor:
        """Return ``image`` [channels, height, width], as uint8 if there is a table, else as float32."""

    def encode_arrays(self, pixels: np.ndarray) -> torch.Tensor:
        """Return what ``encode`` does for each image of one size, [items, channels, height, width].

        Args:
            pixels: uint8 [items, height, width] or [items, height, width, channels].
        """


@dataclass(frozen=True)
class ImageSizes:
    """A conversion of images to bytes of one size."""

    channels: int
    """Number of channels: 1 (grey) or 3 (RGB)."""
    resize: tuple[int, int]
    """Height and width that the whole image is resized to, in pixels."""
    crop: tuple[int, int]
    """Height and width of the centre crop after resizing, in pixels."""
    resample: Image.Resampling
    """Resampling filter for resizing."""

    def resized_pixels(self, width: int, height: int) -> int:
        """Return the number of pixels that an image of this size is resized to."""
        del width, height
        return self.resize[0] * self.resize[1]

    def encode(self, image: Image.Image) -> torch.Tensor:
        """Return ``image`` as uint8 [channels, height, width]."""
        height, width = self.resize
        if image.mode != "L":  # grey is converted later: its channels are equal
            image = to_channels(image, self.channels)
        if image.size != (width, height):
            image = image.resize((width, height), self.resample)
        image = to_channels(image, self.channels)
        if self.crop != self.resize:
            top, left = (height - self.crop[0]) // 2, (width - self.crop[1]) // 2
            image = image.crop((left, top, left + self.crop[1], top + self.crop[0]))
        pixels = np.asarray(image).reshape(*self.crop, self.channels)
        return torch.from_numpy(
            np.array(pixels.transpose(2, 0, 1), order="C")
        )  # copied, because Pillow's memory is read-only

    def encode_arrays(self, pixels: np.ndarray) -> torch.Tensor:
        """Return what ``encode`` does for each of uint8 [items, height, width] or with channels last."""
        channels = pixels.shape[3] if pixels.ndim == 4 else 1
        if not self.resize == self.crop == pixels.shape[1:3] or channels != self.channels:
            return _encoded_each(self, pixels)
        planes = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
        return torch.from_numpy(np.array(planes, order="C"))


@dataclass(frozen=True)
class ImageRecipe(ImageSizes):
    """The parameters of a conversion of images to the input of a model."""

    mean: tuple[float, ...]
    """Mean subtracted from each channel, after scaling it to 0 to 1."""
    std: tuple[float, ...]
    """Standard deviation that each channel is divided by, after subtracting the mean."""

    @cached_property
    def table(self) -> PixelTable:
        """Values that each byte of each channel stands for."""
        levels = np.arange(BYTE_VALUES, dtype=np.float32)[None] / np.float32(BYTE_VALUES - 1)
        mean, std = (np.asarray(of, np.float32)[:, None] for of in (self.mean, self.std))
        return PixelTable(torch.from_numpy((levels - mean) / std))


def default_recipe(model: Outline) -> ImageRecipe:
    """Return the recipe of the model's family, for its image size.

    Images of other than three channels are resized, and their values are from -1 to 1.
    """
    size, channels = model.config.image_size, model.config.channels
    defaults = model.image_defaults
    if channels != len(defaults.mean):
        half = (0.5,) * channels
        return ImageRecipe(channels, size, size, Image.Resampling.BILINEAR, half, half)
    height, width = (round(side * defaults.resize) for side in size)
    resample = Image.Resampling.BICUBIC if defaults.bicubic else Image.Resampling.BILINEAR
    return ImageRecipe(channels, (height, width), size, resample, defaults.mean, defaults.std)


@dataclass(frozen=True)
class DirectoryTransform:
    """The image processor of a model directory."""

    processor: Any
    """Image processor of transformers."""
    channels: int
    """Number of channels: 1 (grey) or 3 (RGB)."""
    shape: tuple[int, int, int]
    """Channels, height and width that the model takes."""
    path: Path
    """File that describes the processor."""
    table: PixelTable | None = None
    """Values that the bytes stand for, if scaling and normalising a value depend on that value alone."""
    sizes: ImageSizes | None = None
    """Faster resampling that gives equal bytes, if there is one."""

    def resized_pixels(self, width: int, height: int) -> int:
        """Return the number of pixels that an image of this size is resized to.

        That is many for a narrow image, if its shorter side gets a certain length.
        """
        size = dict(getattr(self.processor, "size", None) or {})
        shortest = size.get("shortest_edge")
        if not getattr(self.processor, "do_resize", False) or not shortest or size.get("longest_edge"):
            return 0
        return int(shortest) ** 2 * max(width, height) // min(width, height)

    def encode(self, image: Image.Image) -> torch.Tensor:
        """Return ``image`` [channels, height, width], as uint8 if there is a table, else as float32.

        Raises:
            InputError: The result has another shape than the model takes.
        """
        if self.sizes is not None:
            return self.sizes.encode(image)
        return self._encode(image, **(_SIZES_ONLY if self.table is not None else {}))

    def encode_arrays(self, pixels: np.ndarray) -> torch.Tensor:
        """Return what ``encode`` does for uint8 [items, height, width] or [items, height, width, channels].

        Raises:
            InputError: The result has another shape than the model takes.
        """
        return _encoded_each(self, pixels) if self.sizes is None else self.sizes.encode_arrays(pixels)

    def with_table(self) -> DirectoryTransform:
        """Return a copy that uses a table, and sizes, if they give the same bits; else self."""
        plain = found = replace(self, table=None, sizes=None)
        ramp = Image.fromarray(np.arange(BYTE_VALUES, dtype=np.uint8).reshape(16, 16))
        height, width = self.shape[1:]
        noise = np.random.default_rng(0).integers(0, BYTE_VALUES, (height + 9, width + 5, 3), dtype=np.uint8)
        try:
            grey = to_channels(ramp, self.channels)
            values = self._process(grey, do_resize=False, do_center_crop=False)
            levels = np.ascontiguousarray(values["pixel_values"][0], np.float32)
            table = PixelTable(torch.from_numpy(levels.reshape(self.channels, BYTE_VALUES)))
            picture = Image.fromarray(noise)
            encoded = plain._encode(picture, **_SIZES_ONLY)
            if encoded.dtype is torch.uint8 and table.look_up(encoded[None])[0].equal(plain.encode(picture)):
                found = replace(plain, table=table)
                found = replace(found, sizes=found._find_sizes(picture))
        except Exception as error:  # a hand-written file may raise anything inside transformers
            log.debug("%s: pictures are processed by transformers (%s)", self.path, error)
        return found

    def _find_sizes(self, picture: Image.Image) -> ImageSizes | None:
        """Return what gives the same bytes, of ``picture`` and of others made of it, or None."""
        size = dict(self.processor.size)
        if not self.processor.do_resize or not {"height", "width"} <= size.keys():
            return None
        crop = dict(self.processor.crop_size) if getattr(self.processor, "do_center_crop", False) else size
        sizes = ImageSizes(
            self.channels,
            (size["height"], size["width"]),
            (crop["height"], crop["width"]),
            Image.Resampling(self.processor.resample),
        )
        others = (picture, picture.convert("L"), picture.resize((2 * size["width"], 3 * size["height"])))
        return sizes if all(sizes.encode(each).equal(self.encode(each)) for each in others) else None

    def _encode(self, image: Image.Image, **options: bool) -> torch.Tensor:
        picture = to_channels(image, self.channels)
        try:
            made = np.asarray(self._process(picture, **options)["pixel_values"][0])
            pixels = np.array(made, np.uint8 if made.dtype == np.uint8 else np.float32, order="C")
        except MemoryError:
            raise
        except Exception as error:  # a hand-written file may raise anything inside transformers
            raise InputError(
                f"{self.path}: cannot process images of {self.channels} channels ({error}); "
                "is it for another model?"
            ) from error
        if pixels.shape != self.shape:
            raise InputError(
                f"{self.path} produces images of shape {pixels.shape}, but the model takes {self.shape}"
            )
        return torch.from_numpy(pixels)

    def _process(self, picture: Image.Image, **options: bool) -> Any:
        if self.channels == 1:
            # A trailing dimension is added, because processors take the channels of a plain image to be RGB.
            grey = np.asarray(picture)[:, :, None]
            return self.processor(grey, return_tensors="np", input_data_format="channels_last", **options)
        return self.processor(picture, return_tensors="np", **options)


def _encoded_each(transform: ImageSizes | DirectoryTransform, pixels: np.ndarray) -> torch.Tensor:
    return torch.stack([transform.encode(Image.fromarray(np.ascontiguousarray(each))) for each in pixels])


def check_shape(transform: ImageTransform, name: str, width: int, height: int) -> None:
    """Check that an image does not become huge when it is resized.

    Raises:
        InputError: It is so narrow that it does.
    """
    if width and height and transform.resized_pixels(width, height) > REDUCED_PIXELS:
        raise InputError(
            f"{name}: {width} x {height} is too narrow to be resized for this model; cut the image into parts"
        )


def encode_picture(
    transform: ImageTransform, name: str, open_picture: Callable[[], Image.Image]
) -> torch.Tensor:
    """Return what ``transform.encode`` makes of the image that ``open_picture`` returns.

    Args:
        transform: The conversion.
        name: What messages call the image.
        open_picture: Decodes the image.

    Raises:
        InputError: The image cannot be decoded, is too narrow to be resized, or there is not enough memory.
    """
    picture, is_large = None, False
    try:
        picture = open_picture()
        is_large = picture.width * picture.height > LARGE_PIXELS
        check_shape(transform, name, *picture.size)
        return transform.encode(picture)
    except MemoryError:
        is_large = True  # the refusal is raised below, when nothing holds the image any more
    finally:
        picture = None
        if is_large:
            return_freed_memory()
    raise InputError(f"{name}: {NO_MEMORY}")


def image_transform(model: Outline, directories: Iterable[Path]) -> ImageTransform:
    """Return the conversion of images to the model's input.

    It is the one described in the first of ``directories`` (or of the hub's local cache) that has a
    description, else the default of the model's family.

    Raises:
        InputError: The description cannot be read or does not fit the model, or the model's number of
            channels is not that of any image.
    """
    if model.config.channels not in (1, 3):
        raise InputError(
            f"{model.name} takes {model.config.channels} channels, but images have 1 or 3: give .npz arrays"
        )
    path = companion_file(model.name, directories, (PROCESSOR_FILE,))
    if path is None:
        return default_recipe(model)
    import_postponed()
    from transformers import AutoImageProcessor  # takes seconds to import, and most runs do not need it

    try:
        load = partial(AutoImageProcessor.from_pretrained, path.parent, local_files_only=True, backend="pil")
        processor = load()
        if model.config.interpolated:
            processor = load(**resized_options(processor, model.config.image_size))
    except Exception as error:  # a hand-written file may raise anything inside transformers
        raise InputError(f"{path}: not an image processor that transformers can read ({error})") from error
    channels, (height, width) = model.config.channels, model.config.image_size
    transform = DirectoryTransform(processor, channels, (channels, height, width), path)
    transform.encode(Image.new("RGB", (width, height)))  # a description of another model shows before the run
    return transform.with_table()


def resized_options(processor: Any, size: tuple[int, int]) -> dict[str, dict[str, int]]:
    """Return the options with which an image processor makes images of another size.

    What is cut off is the same share of a picture as with the processor's own size.

    Args:
        processor: Image processor of transformers.
        size: Height and width in pixels.
    """
    height, width = size
    whole, crop = dict(processor.size), getattr(processor, "crop_size", None)
    exact = {"height": height, "width": width}
    if not (getattr(processor, "do_center_crop", False) and crop):
        return {"size": exact}
    rows, columns = height / crop["height"], width / crop["width"]
    if whole.get("shortest_edge"):
        resized = {"shortest_edge": round(whole["shortest_edge"] * max(rows, columns))}
    else:
        resized = {"height": round(whole["height"] * rows), "width": round(whole["width"] * columns)}
    return {"size": resized, "crop_size": exact}


def to_channels(image: Image.Image, channels: int) -> Image.Image:
    """Return ``image`` as 8-bit grey (1 channel) or RGB (3)."""
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


@dataclass(frozen=True)
class FoundImages:
    """The files found below a folder."""

    paths: tuple[Path, ...]
    """Paths of the images, sorted."""
    skipped: Counter[str]
    """Number of other files by suffix; hidden files are not counted."""


def skipped_line(where: str, skipped: Counter[str]) -> str | None:
    """Return a line about the files in folders that are not images, or None if there are none.

    Args:
        where: Names of the folders.
        skipped: Number of files by suffix.
    """
    if not skipped:
        return None
    listed = skipped.most_common(_LISTED_TYPES)
    kinds = [f"{figure(number)} {printable(suffix) or 'without a suffix'}" for suffix, number in listed]
    others = skipped.total() - sum(number for _, number in listed)
    if others:
        kinds.append(f"{figure(others)} others")
    line = f"{printable(where)}: skipped {count(skipped.total(), 'file')} of other types ({', '.join(kinds)})"
    if needs_heif() and any(skipped[suffix] for suffix in HEIF_SUFFIXES):
        line += f"; HEIF images need the package pillow-heif: {INSTALL_HEIF}"
    return line


def find_images(folder: Path) -> FoundImages:
    """Find the images below ``folder``. Hidden files are left out, links are followed."""
    found: list[Path] = []
    skipped: Counter[str] = Counter()
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:  # a link to a folder that was visited before
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(parent, name) for name in files if is_image(name)]
        skipped.update(
            Path(name).suffix.lower() for name in files if not name.startswith(".") and not is_image(name)
        )
    return FoundImages(tuple(sorted(found)), skipped)


class DecodedImages:
    """Image files, decoded one at a time; where they are, and their classes, a subclass knows."""

    transform: ImageTransform
    max_pixels: int | None
    """Largest image to decode, as for ``open_image``."""
    max_tokens = None
    token_counts = NO_TOKENS
    in_memory = False

    @property
    def pixels(self) -> PixelTable | None:
        """Values that the bytes of the images stand for."""
        return self.transform.table

    def file(self, index: int) -> tuple[Path, int | None]:
        """Return the path of image ``index``, and its true class or None."""
        raise NotImplementedError

    def source(self, index: int) -> str:
        """Return the path of image ``index``."""
        return str(self.file(index)[0])

    def read(self, index: int) -> Item:
        """Decode image ``index``."""
        path, label = self.file(index)
        pixels = encode_picture(self.transform, printable(path), lambda: open_image(path, self.max_pixels))
        return Item((pixels,), label, str(path))


@dataclass(frozen=True)
class ImageFiles(DecodedImages):
    """Images in any files."""

    paths: tuple[Path, ...]
    labels: tuple[int | None, ...]
    """True class of each image, or None if not known."""
    transform: ImageTransform
    max_pixels: int | None = None

    @property
    def has_labels(self) -> bool:
        """Whether the true class of some image is known."""
        return any(label is not None for label in self.labels)

    def __len__(self) -> int:
        return len(self.paths)

    def file(self, index: int) -> tuple[Path, int | None]:
        """Return the path of image ``index``, and its true class or None."""
        return self.paths[index], self.labels[index]
