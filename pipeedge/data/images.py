"""Pictures to ``pixel_values``: decode, resize, crop; normalising is left to a table where that is exact.

A model directory with a ``preprocessor_config.json`` decides for itself, through transformers' image
processors. Without one the defaults of the nine models are used, the same arithmetic with Pillow and
NumPy alone (``tests/test_data_images.py`` holds the two against each other).
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

from pipeedge.base.errors import InputError
from pipeedge.base.payload import BYTE_VALUES, PixelTable
from pipeedge.base.wording import count, figure, printable
from pipeedge.data.companions import companion_file
from pipeedge.data.model_inputs import ModelInputs
from pipeedge.data.pictures import IMAGE_SUFFIXES, is_image, open_image
from pipeedge.data.source import Item

__all__ = [
    "IMAGE_SUFFIXES",
    "FoundImages",
    "ImageFiles",
    "ImageRecipe",
    "ImageTransform",
    "default_recipe",
    "find_images",
    "image_transform",
    "is_image",
    "open_image",
    "skipped_line",
    "transformed",
]

log = logging.getLogger(__name__)

_LISTED_TYPES = 8
PROCESSOR_FILE = "preprocessor_config.json"
_SIZES_ONLY = {"do_rescale": False, "do_normalize": False}
"""Options with which an image processor leaves the values as they are."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class ImageTransform(Protocol):
    """Turns a picture into the input of a model."""

    @property
    def table(self) -> PixelTable | None:
        """What the bytes that ``encode`` gives stand for; None where it gives the values themselves."""

    def encode(self, image: Image.Image) -> torch.Tensor:
        """Return ``image`` [channels, height, width], uint8 where there is a table, else float32."""


@dataclass(frozen=True)
class ImageRecipe:
    """How a picture becomes the input of a model."""

    channels: int
    """1 (grey) or 3 (RGB)."""
    resize: tuple[int, int]
    """Height and width the whole picture is resized to, in pixels."""
    crop: tuple[int, int]
    """Height and width cut from the centre after that, in pixels."""
    resample: Image.Resampling
    """Filter of the resize."""
    mean: tuple[float, ...]
    """Subtracted from each channel, after scaling it to 0 to 1."""
    std: tuple[float, ...]
    """Each channel is divided by it, after that."""

    @cached_property
    def table(self) -> PixelTable:
        """What each byte of each channel stands for."""
        levels = np.arange(BYTE_VALUES, dtype=np.float32)[None] / np.float32(BYTE_VALUES - 1)
        mean, std = (np.asarray(of, np.float32)[:, None] for of in (self.mean, self.std))
        return PixelTable(torch.from_numpy((levels - mean) / std))

    def encode(self, image: Image.Image) -> torch.Tensor:
        """Return ``image`` as uint8 [channels, height, width]."""
        height, width = self.resize
        if image.mode != "L":  # of grey, each channel is the same before resizing and after
            image = to_channels(image, self.channels)
        resized = to_channels(image.resize((width, height), self.resample), self.channels)
        top, left = (height - self.crop[0]) // 2, (width - self.crop[1]) // 2
        cropped = resized.crop((left, top, left + self.crop[1], top + self.crop[0]))
        pixels = np.asarray(cropped).reshape(*self.crop, self.channels)
        return torch.from_numpy(
            np.array(pixels.transpose(2, 0, 1), order="C")
        )  # Pillow's memory is read only


def default_recipe(model: ModelInputs) -> ImageRecipe:
    """The recipe of the model's family, for its own image size.

    ViT: resize, values from -1 to 1. DeiT: resize to 256/224 of the size with bicubic interpolation, cut
    the centre out, ImageNet's mean and deviation.
    """
    size, channels = model.config.image_size, model.config.channels
    if model.family == "deit" and channels == 3:
        height, width = (round(side * 256 / 224) for side in size)
        return ImageRecipe(
            channels, (height, width), size, Image.Resampling.BICUBIC, IMAGENET_MEAN, IMAGENET_STD
        )
    half = (0.5,) * channels
    return ImageRecipe(channels, size, size, Image.Resampling.BILINEAR, half, half)


@dataclass(frozen=True)
class DirectoryTransform:
    """The image processor that a model directory describes."""

    processor: Any
    """A transformers image processor."""
    channels: int
    """1 (grey) or 3 (RGB)."""
    shape: tuple[int, int, int]
    """Channels, height and width that the model takes."""
    path: Path
    """The file that describes it."""
    table: PixelTable | None = None
    """What the bytes stand for, where scaling and normalising a value depend on nothing but that value."""

    def encode(self, image: Image.Image) -> torch.Tensor:
        """Return ``image`` [channels, height, width], uint8 where there is a table, else float32.

        Raises:
            InputError: the description makes something else of it than the model takes.
        """
        return self._encode(image, **(_SIZES_ONLY if self.table is not None else {}))

    def with_table(self) -> DirectoryTransform:
        """Return the same with a table, where looking values up in one gives the same bits; else as it is."""
        plain = replace(self, table=None)
        ramp = Image.fromarray(np.arange(BYTE_VALUES, dtype=np.uint8).reshape(16, 16))
        height, width = self.shape[1:]
        noise = np.random.default_rng(0).integers(0, BYTE_VALUES, (height + 9, width + 5, 3), dtype=np.uint8)
        try:
            grey = to_channels(ramp, self.channels)
            values = self._process(grey, do_resize=False, do_center_crop=False)
            found = np.ascontiguousarray(values["pixel_values"][0], np.float32)
            table = PixelTable(torch.from_numpy(found.reshape(self.channels, BYTE_VALUES)))
            picture = Image.fromarray(noise)
            encoded = plain._encode(picture, **_SIZES_ONLY)
            if encoded.dtype is torch.uint8 and table.look_up(encoded[None])[0].equal(plain.encode(picture)):
                return replace(self, table=table)
        except Exception as error:  # whatever a hand-written file provokes inside transformers
            log.debug("%s: pictures are sent as floating point (%s)", self.path, error)
        return plain

    def _encode(self, image: Image.Image, **options: bool) -> torch.Tensor:
        picture = to_channels(image, self.channels)
        try:
            made = np.asarray(self._process(picture, **options)["pixel_values"][0])
            pixels = np.array(made, np.uint8 if made.dtype == np.uint8 else np.float32, order="C")
        except Exception as error:  # whatever a hand-written file provokes inside transformers
            raise InputError(
                f"{self.path}: does not serve for images of {self.channels} channels ({error}); "
                "is it of another model?"
            ) from error
        if pixels.shape != self.shape:
            raise InputError(f"{self.path} makes images of {pixels.shape}, the model takes {self.shape}")
        return torch.from_numpy(pixels)

    def _process(self, picture: Image.Image, **options: bool) -> Any:
        if self.channels == 1:
            # A trailing dimension, because processors guess the channels of a plain picture as RGB.
            grey = np.asarray(picture)[:, :, None]
            return self.processor(grey, return_tensors="np", input_data_format="channels_last", **options)
        return self.processor(picture, return_tensors="np", **options)


def transformed(transform: ImageTransform, image: Image.Image) -> torch.Tensor:
    """Return ``image`` as the model takes it, float32 [channels, height, width]."""
    encoded = transform.encode(image)
    return encoded if transform.table is None else transform.table.look_up(encoded[None])[0]


def image_transform(model: ModelInputs, directories: Iterable[Path]) -> ImageTransform:
    """What turns a picture into the model's input: that of the first of ``directories`` (or of the hub's
    local cache) that describes one, else the default of the model's family.

    Raises:
        InputError: the description cannot be read or does not fit the model, or no picture has as many
            channels as the model.
    """
    if model.config.channels not in (1, 3):
        raise InputError(
            f"{model.name} takes {model.config.channels} channels, pictures have 1 or 3: give .npz arrays"
        )
    path = companion_file(model.name, directories, (PROCESSOR_FILE,))
    if path is None:
        return default_recipe(model)
    from transformers import AutoImageProcessor  # seconds to import, and most runs do without

    try:
        processor = AutoImageProcessor.from_pretrained(path.parent, local_files_only=True, backend="pil")
    except Exception as error:  # whatever a hand-written file provokes inside transformers
        raise InputError(f"{path}: not an image processor that transformers can read ({error})") from error
    channels, (height, width) = model.config.channels, model.config.image_size
    transform = DirectoryTransform(processor, channels, (channels, height, width), path)
    transform.encode(Image.new("RGB", (width, height)))  # a description of another model shows before the run
    return transform.with_table()


def to_channels(image: Image.Image, channels: int) -> Image.Image:
    """``image`` as 8 bit grey (1 channel) or RGB (3)."""
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


@dataclass(frozen=True)
class FoundImages:
    """What there is below a folder."""

    paths: tuple[Path, ...]
    """Pictures, sorted by path."""
    skipped: Counter[str]
    """Number of other files of each suffix; hidden files are not counted."""


def skipped_line(where: str, skipped: Counter[str]) -> str | None:
    """Return a line about the files in folders that are no pictures, or None without any.

    Args:
        where: the folders.
        skipped: number of files of each suffix.
    """
    if not skipped:
        return None
    listed = skipped.most_common(_LISTED_TYPES)
    kinds = [f"{figure(number)} {printable(suffix) or 'without a suffix'}" for suffix, number in listed]
    others = skipped.total() - sum(number for _, number in listed)
    if others:
        kinds.append(f"{figure(others)} others")
    return f"{printable(where)}: skipped {count(skipped.total(), 'file')} of other types ({', '.join(kinds)})"


def find_images(folder: Path) -> FoundImages:
    """Find the pictures below ``folder``; hidden files are left out, links are followed."""
    found: list[Path] = []
    skipped: Counter[str] = Counter()
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(parent, name) for name in files if is_image(name)]
        skipped.update(
            Path(name).suffix.lower() for name in files if not name.startswith(".") and not is_image(name)
        )
    return FoundImages(tuple(sorted(found)), skipped)


@dataclass(frozen=True)
class ImageFiles:
    """Pictures on disk, decoded one at a time."""

    paths: tuple[Path, ...]
    labels: tuple[int | None, ...]
    """The true class of each, where known."""
    transform: ImageTransform
    max_pixels: int | None = None
    """Largest picture to decode, as ``open_image`` takes it."""

    max_tokens = None
    in_memory = False

    @property
    def has_labels(self) -> bool:
        """Whether the true class of some picture is known."""
        return any(label is not None for label in self.labels)

    @property
    def pixels(self) -> PixelTable | None:
        """What the bytes of the pictures stand for."""
        return self.transform.table

    def __len__(self) -> int:
        return len(self.paths)

    def source(self, index: int) -> str:
        """The path of picture ``index``."""
        return str(self.paths[index])

    def read(self, index: int) -> Item:
        """Decode picture ``index``."""
        path = self.paths[index]
        return Item(
            (self.transform.encode(open_image(path, self.max_pixels)),), self.labels[index], str(path)
        )
