"""Decoding of image files to 8-bit images in memory: formats, size limits, and scaling of values.

Formats are listed explicitly for Pillow. By default it would try every format it knows, and start other
programs (Ghostscript) for some of them, whatever the name of the file.
"""

from __future__ import annotations

import importlib.util
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError, features

from pipeedge.base.errors import InputError
from pipeedge.base.wording import figure, printable
from pipeedge.request.files import DEFAULT_MAX_IMAGE_PIXELS

__all__ = ["IMAGE_SUFFIXES", "decode_image", "eight_bit", "is_image", "is_small", "open_image"]

_SUFFIXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "BMP": (".bmp",),
        "GIF": (".gif",),
        "JPEG": (".jfif", ".jpe", ".jpeg", ".jpg"),
        "PNG": (".png",),
        "PPM": (".pbm", ".pgm", ".pnm", ".ppm"),
        "AVIF": (".avif",),
        "HEIF": (".heic", ".heif"),
        "JPEG2000": (".j2k", ".jp2", ".jpx"),
        "TIFF": (".tif", ".tiff"),
        "WEBP": (".webp",),
    }
)
"""Suffixes by format. Pillow imports all its plug-ins when it first tries one behind the first five."""
_FEATURES: Mapping[str, str] = MappingProxyType({"AVIF": "avif", "JPEG2000": "jpg_2000", "WEBP": "webp"})
"""Feature that Pillow must be built with for a format. Other formats are always available, except HEIF."""
_PNG_START = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
_PNG_SIZE_AT = len(_PNG_START)
"""Place of width and height in a PNG."""
_HEIF_PLUGIN = "pillow_heif"

_LARGE_PIXELS = 32_000_000
"""Number of pixels above which images are decoded at a fraction of their size, if the format allows that."""
_LEAST_SIDE = 1024
"""Smallest side in pixels that this reduction may produce."""

# Pillow's own limit applies to the whole process, and ends in a warning whose filters all threads share. The
# caller's limit is used instead.
Image.MAX_IMAGE_PIXELS = None


def _known_formats() -> tuple[str, ...]:
    """Return the formats that Pillow can open here. HEIF needs a plug-in."""
    missing = {name for name, feature in _FEATURES.items() if not features.check(feature)}
    if importlib.util.find_spec(_HEIF_PLUGIN) is not None:
        importlib.import_module(_HEIF_PLUGIN).register_heif_opener()
    else:
        missing.add("HEIF")
    return tuple(name for name in _SUFFIXES if name not in missing)


_FORMATS = _known_formats()
IMAGE_SUFFIXES = tuple(sorted(suffix for name in _FORMATS for suffix in _SUFFIXES[name]))


def is_image(name: str) -> bool:
    """Return whether a file of this name is an image. Hidden files are not."""
    return not name.startswith(".") and name.lower().endswith(IMAGE_SUFFIXES)


def open_image(path: Path, max_pixels: int | None = None) -> Image.Image:
    """Decode an image: upright, with 8 bits a value.

    Args:
        path: Path of the file.
        max_pixels: Largest image to decode (``--max-image-pixels``), or None for the default if the user has
            no option to change it.

    Raises:
        InputError: The file is not an image, is too large, or has values of an unknown range.
    """
    name = printable(path)
    try:
        # Opening a pipe would block until somebody writes to it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{name}: is not a regular file")
    except FileNotFoundError:
        raise InputError(f"{name}: no such file") from None
    except (OSError, ValueError) as error:  # a ValueError is about a name that no file can have
        raise InputError(f"{name}: cannot be read as an image ({error})") from error
    return decode_image(path, name, max_pixels)


def decode_image(source: Path | BinaryIO, name: str, max_pixels: int | None = None) -> Image.Image:
    """Decode ``source`` as ``open_image`` does; messages call it ``name``."""
    try:
        with Image.open(source, formats=_FORMATS) as image:
            _check_size(image, name, max_pixels)
            _reduce(image)
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return eight_bit(image, name)
    except MemoryError:
        raise InputError(f"{name}: not enough memory for this image") from None
    except (OSError, SyntaxError, ValueError) as error:
        # Of a file in memory, Pillow would name an object in memory.
        unnamed = isinstance(error, UnidentifiedImageError) and not isinstance(source, Path)
        reason = "its format is not known" if unnamed else error
        raise InputError(f"{name}: cannot be read as an image ({reason})") from error


def is_small(data: bytes, most_pixels: int) -> bool:
    """Return whether ``data`` is a PNG of at most ``most_pixels`` pixels, as its only head says."""
    if not data.startswith(_PNG_START) or len(data) < _PNG_SIZE_AT + 8 or data.count(b"IHDR") != 1:
        return False
    width, height = struct.unpack_from(">II", data, _PNG_SIZE_AT)
    return bool(width * height <= most_pixels)


def _check_size(image: Image.Image, name: str, max_pixels: int | None) -> None:
    limit = DEFAULT_MAX_IMAGE_PIXELS if max_pixels is None else max_pixels
    if image.width * image.height > limit:
        what_to_do = "make it smaller" if max_pixels is None else "--max-image-pixels allows more"
        raise InputError(
            f"{name}: {image.width} x {image.height} are {figure(image.width * image.height)} pixels, more "
            f"than {figure(limit)}, and would fill the memory; {what_to_do}"
        )


def _reduce(image: Image.Image) -> None:
    """Have a large JPEG decoded at a half, a quarter or an eighth of its size."""
    factor = 1
    while (
        factor < 8
        and image.width * image.height > _LARGE_PIXELS * factor**2
        and min(image.size) >= 2 * factor * _LEAST_SIDE
    ):
        factor *= 2
    if factor > 1:
        image.draft(image.mode, (image.width // factor, image.height // factor))


def eight_bit(image: Image.Image, name: str = "the picture") -> Image.Image:
    """Scale grey values of 16 bits to 8, where Pillow would clip them at 255.

    Raises:
        InputError: The range of the values is not known: 32-bit integers or floating point.
    """
    if image.mode.startswith("I;16"):
        bits = image.tag_v2.get(258, (16,))[0] if image.format == "TIFF" else 16  # type: ignore[attr-defined]
        return Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8))
    if image.mode == "I" and image.format in ("PNG", "PPM"):  # these formats have at most 16 bits
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = "integers of 32 bits" if image.mode == "I" else "floating point numbers"
        raise InputError(
            f"{name}: its values are {kind}, whose range is not known; save it with 8 or 16 bits a value, or "
            "give .npz arrays"
        )
    return image
