"""Decoding of image files to 8-bit images in memory: formats, size limits, and scaling of values.

    file ──head──> format, size: refused, or ──decode──> whole image ──if large, strip by strip──> a fraction

Formats are listed explicitly for Pillow. By default it would try every format it knows, and start other
programs (Ghostscript) for some of them, whatever the name of the file.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError, _imaging, features

from pipeedge.base.errors import InputError, one_line
from pipeedge.base.heap import return_freed_memory
from pipeedge.base.wording import excerpt, figure, printable
from pipeedge.data.png import has_all_rows
from pipeedge.request.files import DEFAULT_MAX_IMAGE_PIXELS

__all__ = [
    "HEIF_SUFFIXES",
    "IMAGE_SUFFIXES",
    "INSTALL_HEIF",
    "LARGE_PIXELS",
    "MOST_SIDE",
    "REDUCED_PIXELS",
    "decode_image",
    "eight_bit",
    "is_image",
    "needs_heif",
    "open_image",
    "url_of",
]

_HEIF = "HEIF"
_SUFFIXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "BMP": (".bmp",),
        "GIF": (".gif",),
        "JPEG": (".jfif", ".jpe", ".jpeg", ".jpg"),
        "PNG": (".png",),
        "PPM": (".pbm", ".pgm", ".pnm", ".ppm"),
        "AVIF": (".avif",),
        _HEIF: (".heic", ".heif"),
        "JPEG2000": (".j2k", ".jp2", ".jpx"),
        "TIFF": (".tif", ".tiff"),
        "WEBP": (".webp",),
    }
)
"""Suffixes by format. Pillow imports all its plug-ins when it first tries one behind the first five."""
HEIF_SUFFIXES = _SUFFIXES[_HEIF]
_FEATURES: Mapping[str, str] = MappingProxyType({"AVIF": "avif", "JPEG2000": "jpg_2000", "WEBP": "webp"})
"""Feature that Pillow must be built with for a format. Other formats are always available, except HEIF."""
_HEIF_PLUGIN = "pillow_heif"
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")
"""What the head of a file may name that contains images in this format; the last two are in AVIF's, too."""
INSTALL_HEIF = "pip install 'pipeedge[heif]'"
_BRANDS_AT = 4
_LONGEST_BRANDS = 64
_LONGEST_REASON = 200
_URL = re.compile("(?i)(data(?=:)|[a-z][a-z0-9+.-]+(?=:/)):/*")

REDUCED_PIXELS = 32_000_000
"""Number of pixels above which images are reduced to a fraction of their size."""
LARGE_PIXELS = 4_000_000
"""Number of pixels above which the memory of an image is returned to the system at once."""
_STRIP_PIXELS = 1_000_000
"""Number of pixels that are reduced together."""
MOST_SIDE = 65_535
"""Longest side of an image in pixels, which is that of a JPEG. Resizing needs tables for each row and column,
and each row has a place in memory of its own.
"""
_TIFF_BITS = 258
"""Tag with the number of bits of a value."""

# Pillow's own limit applies to the whole process, and ends in a warning whose filters all threads share. The
# caller's limit is used instead.
Image.MAX_IMAGE_PIXELS = None


def needs_heif() -> bool:
    """Return whether the package is missing that reads HEIF."""
    return importlib.util.find_spec(_HEIF_PLUGIN) is None


_FORMATS = tuple(
    name for name in _SUFFIXES if name != _HEIF and (name not in _FEATURES or features.check(_FEATURES[name]))
)
"""Formats that Pillow opens by itself here."""
IMAGE_SUFFIXES = tuple(
    sorted(suffix for name in (*_FORMATS, *(() if needs_heif() else (_HEIF,))) for suffix in _SUFFIXES[name])
)


def is_image(name: str) -> bool:
    """Return whether a file of this name is an image. Hidden files are not."""
    return not name.startswith(".") and name.lower().endswith(IMAGE_SUFFIXES)


def url_of(name: str | Path) -> str | None:
    """Return ``name`` as a URL for messages, if it is one and no file; a path has lost one of its slashes."""
    text = str(name)
    match = _URL.match(text)
    if match is None:
        return None
    if match[1].lower() == "data":
        return excerpt(text)
    return None if Path(name).exists() else excerpt(f"{match[1]}://{text[match.end() :]}", 80)


def open_image(path: Path, max_pixels: int | None = None) -> Image.Image:
    """Decode an image: upright, with 8 bits a value.

    Args:
        path: Path of the file.
        max_pixels: Largest image to decode (``--max-image-pixels``), or None for the default if the user has
            no option to change it.

    Raises:
        InputError: The file is not an image, is too large, or has values of an unknown range.
        MemoryError: The image does not fit into the memory.
    """
    name = printable(path)
    try:
        # Opening a pipe would block until somebody writes to it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{name}: is not a regular file")
        with path.open("rb") as stream:
            return decode_image(stream, name, max_pixels)
    except FileNotFoundError:
        raise InputError(f"{name}: no such file") from None
    except (OSError, ValueError) as error:  # a ValueError is about a name that no file can have
        raise InputError(f"{name}: cannot be read as an image ({error})") from error


def decode_image(stream: BinaryIO, name: str, max_pixels: int | None = None) -> Image.Image:
    """Decode an image file as ``open_image`` does; messages call it ``name``."""
    pixels = 0
    try:
        with Image.open(stream, formats=_formats(stream, name)) as image:
            pixels = image.width * image.height
            _check_size(image, name, max_pixels)
            if image.format == "TIFF":
                _silence_libtiff()
            factor = _factor(image.size)
            if factor > 1:  # JPEG can be decoded at a half, a quarter or an eighth of its size
                image.draft(image.mode, (image.width // factor, image.height // factor))
            image.load()
            if image.format == "PNG" and _is_doubtful(image):
                stream.seek(0)
                if not has_all_rows(stream):
                    raise InputError(f"{name}: cannot be read as an image (image file is truncated)")
            factor = _factor(image.size)
            picture: Image.Image = image
            if factor > 1:
                picture = _reduced(image, factor, name)
                image.close()
            ImageOps.exif_transpose(picture, in_place=True)
            return eight_bit(picture, name)
    except (InputError, MemoryError):
        raise
    except UnidentifiedImageError as error:  # it would name an object in memory
        raise InputError(f"{name}: cannot be read as an image (its format is not known)") from error
    except Exception as error:  # decoders of damaged files may raise anything
        reason = excerpt(one_line(error) if not isinstance(error, OSError) else str(error), _LONGEST_REASON)
        raise InputError(f"{name}: cannot be read as an image ({reason})") from error
    finally:
        if pixels > LARGE_PIXELS:
            return_freed_memory()


@cache
def _silence_libtiff() -> None:
    """Keep libtiff from printing what is wrong with a file; decoding it raises that."""
    with suppress(OSError, AttributeError):  # a Pillow without libtiff does not have the symbol
        set_handler = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
        set_handler.argtypes, set_handler.restype = [ctypes.c_void_p], ctypes.c_void_p
        set_handler(None)


def _formats(stream: BinaryIO, name: str) -> tuple[str, ...]:
    """Return the formats that an image may have.

    Raises:
        InputError: It is HEIF, and the package that reads it is missing.
    """
    brands = stream.read(_LONGEST_BRANDS)[_BRANDS_AT:]
    stream.seek(0)
    if not brands.startswith(tuple(b"ftyp" + brand for brand in _HEIF_BRANDS)) or b"avif" in brands:
        return _FORMATS
    if needs_heif():
        raise InputError(f"{name}: is a HEIF image, which needs the package pillow-heif: {INSTALL_HEIF}")
    importlib.import_module(_HEIF_PLUGIN).register_heif_opener()
    return (_HEIF,)


def _check_size(image: Image.Image, name: str, max_pixels: int | None) -> None:
    size = f"{name}: {image.width} x {image.height}"
    if max(image.size) > MOST_SIDE:
        raise InputError(
            f"{size}: a side of an image may have {figure(MOST_SIDE)} pixels; cut the image into parts, or "
            "make it smaller"
        )
    limit = DEFAULT_MAX_IMAGE_PIXELS if max_pixels is None else max_pixels
    if image.width * image.height > limit:
        what_to_do = "make it smaller" if max_pixels is None else "--max-image-pixels allows more"
        raise InputError(
            f"{size} are {figure(image.width * image.height)} pixels, more than {figure(limit)}, and would "
            f"fill the memory; {what_to_do}"
        )


def _factor(size: tuple[int, int]) -> int:
    """Return by how much the sides of an image are divided: a power of two."""
    factor = 1
    while size[0] * size[1] > REDUCED_PIXELS * factor**2:
        factor *= 2
    return factor


def _is_doubtful(image: Image.Image) -> bool:
    """Return whether the last rows of a PNG may be missing: they are black then, as they may also be."""
    last = image.crop((0, image.height - 1, image.width, image.height))
    return bool(image.info.get("interlace")) or not any(last.tobytes())


def _reduced(image: Image.Image, factor: int, name: str) -> Image.Image:
    """Return an image at a fraction of its size, with 8 bits a value, grey or RGB.

    Strip by strip, because converting all of it would take up to four bytes a pixel besides.
    """
    width, height = -(-image.width // factor), -(-image.height // factor)
    rows = factor * max(1, _STRIP_PIXELS // (image.width * factor))
    bits = _excess_bits(image, name)
    is_grey = bits is not None or image.mode in ("1", "L")
    reduced = Image.new("L" if is_grey else "RGB", (width, height))
    for top in range(0, image.height, rows):
        strip = _shifted(image.crop((0, top, image.width, min(top + rows, image.height))), bits)
        reduced.paste(strip.convert(reduced.mode).reduce(factor), (0, top // factor))
    orientation = image.getexif().get(ExifTags.Base.Orientation)
    if orientation is not None:
        reduced.getexif()[ExifTags.Base.Orientation] = orientation
    return reduced


def eight_bit(image: Image.Image, name: str = "the picture") -> Image.Image:
    """Scale grey values of 16 bits to 8, where Pillow would clip them at 255.

    Raises:
        InputError: The range of the values is not known: 32-bit integers or floating point.
    """
    return _shifted(image, _excess_bits(image, name))


def _excess_bits(image: Image.Image, name: str) -> int | None:
    """Return how many bits the values have beyond 8, or None if they have 8."""
    if image.mode.startswith("I;16"):
        bits = image.tag_v2.get(_TIFF_BITS, (16,))[0] if image.format == "TIFF" else 16  # type: ignore[attr-defined]
        return int(bits) - 8
    if image.mode == "I" and image.format in ("PNG", "PPM"):  # these formats have at most 16 bits
        return 8
    if image.mode in ("I", "F"):
        kind = "integers of 32 bits" if image.mode == "I" else "floating point numbers"
        raise InputError(
            f"{name}: its values are {kind}, whose range is not known; save it with 8 or 16 bits a value, or "
            "give .npz arrays"
        )
    return None


def _shifted(image: Image.Image, bits: int | None) -> Image.Image:
    return image if bits is None else Image.fromarray((np.asarray(image) >> bits).astype(np.uint8))
