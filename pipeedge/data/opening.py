"""Opening the input of a run, from the user's request and the model."""

from __future__ import annotations

import dataclasses
import glob
import io
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pipeedge.base.errors import InputError
from pipeedge.data.arrays import ArrayItems
from pipeedge.data.companions import companion_directories
from pipeedge.data.defaults import default_digits, default_photo, default_sentences, digits_fit
from pipeedge.data.images import (
    IMAGE_SUFFIXES,
    ImageFiles,
    encode_picture,
    find_images,
    image_transform,
    skipped_line,
)
from pipeedge.data.items import Item, Items, JoinedItems, MemoryItems, RepeatedItems
from pipeedge.data.labels import Classes
from pipeedge.data.pictures import HEIF_SUFFIXES, INSTALL_HEIF, decode_image, url_of
from pipeedge.data.selection import select
from pipeedge.data.source import InputSource, none_readable
from pipeedge.data.tables import LINES_SUFFIX, TABLE_SUFFIXES, BadRow
from pipeedge.data.text import Sentence, open_tokenizer, read_sentences
from pipeedge.models.outline import Outline
from pipeedge.request.config import RunRequest
from pipeedge.request.files import DEFAULT_ITEMS, STANDARD_INPUT, InputRequest

__all__ = ["expanded", "open_input", "open_run_input", "with_companions"]

log = logging.getLogger(__name__)

IMAGES, TEXT, ARRAYS = "images", "text", "arrays"


def open_input(request: InputRequest, model: Outline) -> InputSource:
    """Open the input of a run of ``model``, ready to produce microbatches.

    Files are found and checked here as far as possible without decoding images, so that mistakes show before
    any rank starts to work.

    Raises:
        InputError: The input cannot be read, is empty, or does not fit the model.
    """
    if request.dataset_name is not None:
        return open_dataset(request, model)
    if request.paths:
        items = path_items(request, model)
        return InputSource(items, order=first(items, request.max_items), skip_bad=request.skip_bad_input)
    count = DEFAULT_ITEMS if request.max_items is None else request.max_items
    return InputSource(RepeatedItems(default_items(request, model), count))


def open_run_input(request: RunRequest, model: Outline) -> InputSource:
    """Open the input of a run; a tokenizer may lie beside the weights that the run names.

    Raises:
        InputError: As ``open_input``.
    """
    return open_input(with_companions(request), model)


def with_companions(request: RunRequest) -> InputRequest:
    """Return the request for the input, with the directory of the weights that the run names."""
    weights = request.model.weights
    if weights is None:
        return request.input
    folder = weights if weights.is_dir() else weights.parent
    return dataclasses.replace(request.input, companion_directory=folder)


def first(items: Items, limit: int | None) -> range:
    """Return the indices of the first ``limit`` items, or of all without a limit."""
    return range(len(items) if limit is None else min(limit, len(items)))


def default_items(request: InputRequest, model: Outline) -> Items:
    """Return the input that ships with the package for ``model``."""
    directories = companion_directories(request, model)
    if model.takes_text:
        return default_sentences(model, directories)
    if digits_fit(model):
        return default_digits()
    return default_photo(image_transform(model, directories))


def open_dataset(request: InputRequest, model: Outline) -> InputSource:
    """Open a labelled data set: all of it or a part, possibly shuffled."""
    # Imported here because each needs a library that other runs do without.
    if request.dataset_name == "CoLA":
        from pipeedge.data.cola import cola_items

        if not model.takes_text:
            raise InputError(f"CoLA is a data set of sentences; {model.name} takes images")
        items = cola_items(request, model)
    else:
        from pipeedge.data.imagenet import imagenet_items

        if model.takes_text:
            raise InputError(f"ImageNet is a data set of images; {model.name} takes sentences")
        items = imagenet_items(request, model)
    return InputSource(items, order=select(request, len(items)), skip_bad=request.skip_bad_input)


def path_items(request: InputRequest, model: Outline) -> Items:
    """Return the items of ``request.paths``, in the order given."""
    given = expanded(request.paths)
    kinds = {path: kind_of(path, model) for path in given}
    one = given[0]
    for path, kind in kinds.items():
        if kind != kinds[one]:
            raise InputError(
                f"{one} holds {kinds[one]}, {path} {kind}: "
                "give images and folders, or text files, or .npz files, not a mixture"
            )
    kind = kinds[one]
    tables = any(
        path == STANDARD_INPUT or path.suffix.lower() in (*TABLE_SUFFIXES, LINES_SUFFIX) for path in given
    )
    if request.text_column is not None and not (kind == TEXT and tables):
        raise InputError(f"--text-column {request.text_column}: the input has no .csv, .tsv or .jsonl")
    if kind == ARRAYS:
        return join(array_items(given, request.max_items, model))
    if model.takes_text != (kind == TEXT):
        takes = "sentences (.txt, .csv, .tsv, .jsonl)" if model.takes_text else "images"
        raise InputError(f"{one} holds {kind}; {model.name} takes {takes} or .npz arrays")
    directories = companion_directories(request, model)
    if kind == TEXT:
        tokenizer = open_tokenizer(model, directories)
        return join([tokenizer.rows(rows) for rows in readable_rows(given, request, model)])
    transform = image_transform(model, directories)
    if one == STANDARD_INPUT:
        name, piped = "standard input", io.BytesIO(sys.stdin.buffer.read())
        pixels = encode_picture(transform, name, lambda: decode_image(piped, name, request.max_image_pixels))
        return MemoryItems((Item((pixels,), None, name),), pixels=transform.table)
    skipped: Counter[str] = Counter()
    paths = tuple(image for path in given for image in image_paths(path, skipped))
    line = skipped_line(", ".join(str(path) for path in given if path.is_dir()), skipped)
    if line is not None:
        log.warning("%s", line)
    return ImageFiles(paths, (None,) * len(paths), transform, request.max_image_pixels)


def readable_rows(
    paths: Sequence[Path], request: InputRequest, model: Outline
) -> list[list[Sentence | BadRow]]:
    """Return the rows of each file, as far as they are run.

    Raises:
        InputError: A row cannot be used (unless such rows are skipped), or none can.
    """
    left, found = request.max_items, list[list[Sentence | BadRow]]()
    for path in paths:
        found.append(read_sentences(path, request.text_columns, Classes.of(model))[:left])
        if left is not None:
            left -= len(found[-1])
    rows = [row for each in found for row in each]
    bad = [row for row in rows if isinstance(row, BadRow)]
    if bad and not request.skip_bad_input:
        raise InputError(f"{bad[0].error}; --skip-bad-input leaves such rows out")
    if len(bad) == len(rows):
        raise none_readable(len(rows), bad[0].error)
    return found


def array_items(paths: Sequence[Path], limit: int | None, model: Outline) -> list[Items]:
    """Open all files of arrays, without reading rows beyond the limit."""
    left, found = limit, list[Items]()
    for path in paths:
        found.append(ArrayItems.open(path, model, left))
        if left is not None:
            left -= len(found[-1])
    return found


def expanded(paths: Sequence[Path]) -> list[Path]:
    """Expand patterns (``photos/*.jpg``), which not every shell does, into the sorted files they match.

    Raises:
        InputError: A pattern matches nothing, or is a URL.
    """
    found: list[Path] = []
    for path in paths:
        url = url_of(path)
        if url is not None:
            raise InputError(f"{url} is a URL, and nothing is fetched: download it, and give the file")
        if not glob.has_magic(str(path)) or path.exists():
            found.append(path)
            continue
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
        if not matches:
            raise InputError(f"{path}: no file matches this pattern")
        found += map(Path, matches)
    return found


def kind_of(path: Path, model: Outline) -> str:
    """Return the kind of input at ``path``: images for a folder, what the model takes for standard input."""
    if path == STANDARD_INPUT:
        return TEXT if model.takes_text else IMAGES
    if path.is_dir():
        return IMAGES
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return ARRAYS
    if suffix in (".txt", LINES_SUFFIX, *TABLE_SUFFIXES):
        return TEXT
    if suffix in IMAGE_SUFFIXES:
        return IMAGES
    if suffix in HEIF_SUFFIXES:
        raise InputError(f"{path}: HEIF images need the package pillow-heif: {INSTALL_HEIF}")
    known = " ".join(IMAGE_SUFFIXES)
    raise InputError(
        f"{path}: unknown kind of input; known are folders, .txt, .csv, .tsv, .jsonl, .npz and images "
        f"({known})"
    )


def image_paths(path: Path, skipped: Counter[str]) -> tuple[Path, ...]:
    """Return ``path`` itself, or the images below it, and count other files there in ``skipped``."""
    if not path.is_dir():
        return (path,)
    found = find_images(path)
    if not found.paths:
        raise InputError(f"{path}: no image below this folder (known: {' '.join(IMAGE_SUFFIXES)})")
    skipped += found.skipped
    return found.paths


def join(parts: Sequence[Items]) -> Items:
    """Return the items of all ``parts``, one part after the other."""
    return parts[0] if len(parts) == 1 else JoinedItems(tuple(parts))
