"""Models by name or directory."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import re
from pathlib import Path

from pipeedge.base.errors import ModelError, WeightsError
from pipeedge.base.json_file import find_json
from pipeedge.models.families.catalogue import TOWERS, family_of, parse_hf_config
from pipeedge.models.gguf_config import config_of
from pipeedge.models.image_size import preprocessed_size
from pipeedge.models.known import KNOWN
from pipeedge.models.outline import Outline
from pipeedge.models.pooling_files import with_pooling
from pipeedge.models.weights.file_kinds import find_in_directory, open_weights
from pipeedge.models.weights.gguf_header import GGUF_SUFFIX, read_gguf_header
from pipeedge.models.weights.hub import (
    UnknownRepositoryError,
    fetch_weights,
    find_file,
    find_snapshot,
    is_repository_name,
)
from pipeedge.models.weights.safetensors_files import SINGLE_FILE

__all__ = ["DIGITS", "MODEL_NAMES", "PUZZLES", "SHIPPED", "find_any", "find_outline"]

DIGITS = "vit-digits"
"""Name of the small encoder that ships with the package."""
PUZZLES = "llama-puzzles"
"""Name of the small decoder that ships with the package."""
SHIPPED = (DIGITS, PUZZLES)
"""Models that ship with the package."""
_ASSETS = Path(__file__).resolve().parent.parent / "assets"
_SIZE = re.compile(r"([0-9]{1,5})(?:x([0-9]{1,5}))?")
_LIKE = 0.6
"""Least similarity, from 0 to 1, at which a known name is suggested for a wrong one."""

log = logging.getLogger(__name__)

MODEL_NAMES: tuple[str, ...] = (*KNOWN, *SHIPPED)
"""Every name that ``find_any`` knows; it also accepts directories and repositories of the hub."""


def find_outline(name_or_dir: str | os.PathLike[str], *, fetch: bool = True) -> Outline:
    """Return the encoder of a known name, in a local Hugging Face directory, or in a repository of the hub.

    Arguments and errors are those of ``find_any``.

    Raises:
        ModelError: It is a decoder, besides the reasons of ``find_any``.
    """
    outline = find_any(name_or_dir, fetch=fetch)
    if outline.family.decodes:
        raise ModelError(
            f"{outline.name} generates text (family {outline.family.name}): this takes encoders only "
            "(docs/decoders.md)"
        )
    return outline


def find_any(name_or_dir: str | os.PathLike[str], *, fetch: bool = True) -> Outline:
    """Return the model of a known name, in a directory or GGUF file, or in a repository of the hub.

    A known name wins over a directory of that name, and a directory over a repository; write ``./name`` for
    the directory. The weights of a repository are fetched when they are first read.

    Args:
        name_or_dir: Known name, directory, GGUF file, ``ORG/NAME`` of a repository, or ``ORG/NAME/FILE.gguf``
            for a file in one. ``#vision`` or ``#text`` at its end chooses between two models in one
            checkpoint, ``#448`` or ``#480x640`` another size of images, height first.
        fetch: Whether the configuration of a repository may be fetched if the hub's local cache lacks it.

    Raises:
        ModelError: The name is unknown, the ``config.json`` is missing or not supported, or the model does
            not take images of that size.
    """
    name = os.fspath(name_or_dir)
    whole, size = _split_size(name)
    if size is not None:
        return _of_size(find_any(whole, fetch=fetch), name, size)
    if name in KNOWN:
        return KNOWN[name]
    if name in SHIPPED:
        return _from_directory(_ASSETS / name, name)
    place, tower = _split_tower(name)
    if Path(place).is_dir():
        return _from_directory(Path(place), name, tower)
    if place.endswith(GGUF_SUFFIX):
        return _from_gguf(_gguf_file(place, fetch=fetch), name)
    elsewhere = ""
    if is_repository_name(place):
        try:
            return _from_repository(place, name, tower, fetch=fetch)
        except UnknownRepositoryError as error:
            elsewhere = f", and {error}"
    near = _nearest(name)
    hint = f"did you mean {near}? " if near else ""
    raise ModelError(
        f"{name} is neither a known model nor a directory{elsewhere}; {hint}known are "
        f"{', '.join(MODEL_NAMES)}, and any local Hugging Face directory, GGUF file, or repository ORG/NAME "
        "of the hub, of a supported family (docs/models.md)"
    )


def _gguf_file(place: str, *, fetch: bool) -> Path:
    """Return a GGUF file of this machine, or one of a repository from the hub's local cache or the hub.

    Raises:
        ModelError: There is no such file.
    """
    path = Path(place)
    if path.exists():
        if not path.is_file():  # opening a pipe would block until somebody writes to it
            raise ModelError(f"{path} is not a regular file")
        return path
    owner, _, rest = place.partition("/")
    repository, _, file = rest.partition("/")
    if not file or not is_repository_name(f"{owner}/{repository}"):
        raise ModelError(
            f"there is no file {place}; one of a repository of the hub is named ORG/NAME/FILE.gguf"
        )
    try:
        return find_file(f"{owner}/{repository}", file, fetch=fetch)
    except UnknownRepositoryError as error:
        raise ModelError(f"there is no file {place}, and {error}") from None


def _from_gguf(path: Path, name: str) -> Outline:
    """Return the decoder in a GGUF file."""
    try:
        config, labels = parse_hf_config(config_of(read_gguf_header(path)))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    return Outline(name, config, labels, path.parent, path, is_file=True)


def _nearest(name: str) -> str | None:
    """Return the known model that ``name`` resembles: misspelt, or without its owner or its end."""

    def similarity(known: str) -> float:
        forms = (known, known.rpartition("/")[2])
        wanted = name.casefold()
        return max(
            difflib.SequenceMatcher(None, wanted, form.casefold()).ratio()
            for whole in forms
            for form in (whole, whole[: len(name)])
        )

    best = max(MODEL_NAMES, key=similarity)
    return best if similarity(best) >= _LIKE else None


def _split_size(name: str) -> tuple[str, tuple[int, int] | None]:
    """Return the name without the size of images at its end, and that size, if any."""
    whole, _, end = name.rpartition("#")
    found = _SIZE.fullmatch(end)
    if not whole or found is None or Path(name).is_dir():
        return name, None
    height, width = found.groups()
    return whole, (int(height), int(width or height))


def _of_size(outline: Outline, name: str, size: tuple[int, int]) -> Outline:
    """Return a model as it takes images of ``size``, under the whole ``name``."""
    if outline.takes_text:
        raise ModelError(f"{outline.name} takes sentences: leave out {name.removeprefix(outline.name)}")
    try:
        config = outline.config.of_image_size(size)
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None
    return dataclasses.replace(outline, name=name, config=config)


def _split_tower(name: str) -> tuple[str, str | None]:
    """Return the directory or repository in ``name``, and the tower at its end, if any."""
    place, _, tower = name.rpartition("#")
    return (place, tower) if place and tower in TOWERS and not Path(name).is_dir() else (name, None)


def _from_repository(repository: str, name: str, tower: str | None, *, fetch: bool) -> Outline:
    snapshot = find_snapshot(repository, fetch=fetch)
    model = _from_directory(snapshot.directory, name, tower, repository=repository)
    if not snapshot.knows_modules and model.output_kind == "vector" and model.takes_text:
        log.warning(
            "whether %s has a modules.json is not known without a network: its output is that of the plain "
            "model",
            name,
        )
    return model


def _from_directory(
    directory: Path, name: str, tower: str | None = None, repository: str | None = None
) -> Outline:
    path = directory / "config.json"
    if path.exists() and not path.is_file():  # opening a pipe would block until somebody writes to it
        raise ModelError(f"{path} is not a regular file")
    document = find_json(path, dict, ModelError)
    if document is None:
        files = sorted(path.name for path in directory.glob(f"*{GGUF_SUFFIX}"))
        hint = f"; name its file, such as {directory / files[0]}" if files else ""
        raise ModelError(
            f"{directory} has no config.json: a model directory holds config.json and model.safetensors{hint}"
        )
    if repository is not None and not document.get("architectures"):
        fetch_weights(repository, directory)  # their names reveal the head
    try:
        weights = find_in_directory(directory)
    except WeightsError:
        # The weights may be elsewhere (-M); if they are not, ``load`` reports them missing.
        weights = directory
        if any(directory.glob("model.*.safetensors")):
            # Only converted weights exist. This is the name of their original.
            weights = directory / SINGLE_FILE
    names: tuple[str, ...] = ()
    if not document.get("architectures") and weights.is_file():
        with open_weights(weights) as file:
            names = tuple(file.names)
    try:
        config, labels = parse_hf_config(document, tensor_names=names, tower=tower)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    if config.head == "vector":
        config = with_pooling(config, directory)
    size = preprocessed_size(directory) if family_of(config).any_image_size else None
    if size is not None:
        config = config.of_image_size(size)
    return Outline(name, config, labels, directory, weights, repository)
