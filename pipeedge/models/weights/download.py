"""Fetching, checking and storing the weights of the known models under their default names.

    Google's ViT files       plain HTTP, resumed                            -> ViT-B_16-224.npz, ...
    DeiT and BERT            Hugging Face hub, resumed, then converted      -> DeiT_B_distilled.npz, ...
    ORG/NAME                 Hugging Face hub, into its local cache         -> NAME/ if a directory is named

A file gets its final name only after every name and shape in it, and for Google's files every checksum, has
been verified.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import torch

from pipeedge.base.errors import ModelError, RequestError, WeightsError
from pipeedge.base.files import InputPath, OutputFile, check_outputs, named_output
from pipeedge.base.schedule import LayerRange
from pipeedge.models.decoder import DecoderModel, find_runnable
from pipeedge.models.dtypes import INT4, dtype_name
from pipeedge.models.model import Model
from pipeedge.models.progress import ByteBar
from pipeedge.models.registry import MODEL_NAMES, SHIPPED
from pipeedge.models.weights.coded_writing import write_coded
from pipeedge.models.weights.file_kinds import open_weights
from pipeedge.models.weights.files import WeightsFile
from pipeedge.models.weights.http_transfer import fetch_file
from pipeedge.models.weights.hub import copy_snapshot
from pipeedge.models.weights.pickled import PickledWeights
from pipeedge.models.weights.writing import (
    make_directory_of,
    needed_names,
    write_converted,
    write_npz,
    write_random,
)

__all__ = ["HttpSource", "HubSource", "Origin", "download", "download_http", "download_hub", "save_weights"]

_CODED = (torch.int8, INT4)
"""Number types in which weights of decoders are stored."""


@dataclass(frozen=True)
class HttpSource:
    """A file at an HTTP address."""

    url: str


@dataclass(frozen=True)
class HubSource:
    """A repository on the Hugging Face hub, of which the first existing file of ``files`` is used."""

    repository: str
    files: tuple[str, ...] = ("model.safetensors", "pytorch_model.bin")
    endpoint: str | None = None
    """Hub to use instead of the one that ``huggingface_hub`` is configured for."""


Origin: TypeAlias = HttpSource | HubSource

_GOOGLE = "https://storage.googleapis.com/vit_models"
_ORIGINS: Mapping[str, Origin] = MappingProxyType(
    {
        "google/vit-base-patch16-224": HttpSource(f"{_GOOGLE}/imagenet21k%2Bimagenet2012/ViT-B_16-224.npz"),
        "google/vit-large-patch16-224": HttpSource(f"{_GOOGLE}/imagenet21k%2Bimagenet2012/ViT-L_16-224.npz"),
        "google/vit-huge-patch14-224-in21k": HttpSource(f"{_GOOGLE}/imagenet21k/ViT-H_14.npz"),
        "facebook/deit-base-distilled-patch16-224": HubSource("facebook/deit-base-distilled-patch16-224"),
        "facebook/deit-small-distilled-patch16-224": HubSource("facebook/deit-small-distilled-patch16-224"),
        "facebook/deit-tiny-distilled-patch16-224": HubSource("facebook/deit-tiny-distilled-patch16-224"),
        "bert-base-uncased": HubSource("google-bert/bert-base-uncased"),
        "bert-large-uncased": HubSource("google-bert/bert-large-uncased"),
        "textattack/bert-base-uncased-CoLA": HubSource("textattack/bert-base-uncased-CoLA"),
    }
)


def save_weights(
    names: Collection[str],
    directory: Path | None = None,
    *,
    random_seed: int | None = None,
    dtype: torch.dtype | None = None,
    origins: Mapping[str, Origin] = _ORIGINS,
    say: Callable[[str], object] = print,
) -> None:
    """Store the weights of the named models (by default all that have a source) in ``directory``.

    Complete files that exist already are kept.

    Args:
        names: Known model names, and repositories of the hub. With ``dtype``, Hugging Face directories are
            accepted too, whose weights are converted in place. Empty for all known models.
        directory: Directory for files with default names, and for copies of repositories; None: the current
            one, and no copies.
        random_seed: Seed of random weights of the right shapes to write instead of fetching any.
        dtype: Number type to store in addition to the originals, which are kept; None: originals only.
        origins: Source of each model's file.
        say: Called with one line per file.

    Raises:
        ModelError: A model has no source.
        WeightsError: A file cannot be fetched, does not fit its model, or cannot be written.
    """
    own = [name for name in names if dtype is not None and name not in SHIPPED and Path(name).is_dir()]
    others = [_downloadable(name, origins) for name in names or origins if name not in own]
    own += [
        _fetch_repository(model, directory, say)
        for model in others
        if isinstance(model, DecoderModel) or (model.repository is not None and random_seed is None)
    ]
    if dtype is not None:
        for name in own:
            model = find_runnable(name)
            convert(model, model.default_weights, model.converted_path(dtype), dtype, say)
    for model in others:
        if isinstance(model, DecoderModel) or (model.repository is not None and random_seed is None):
            continue
        target = (directory or Path()) / _default_file(model)
        if _is_wanted(model, target, say):
            if random_seed is not None:
                _save_random(model, target, random_seed, say)
            else:
                download(model, origins[model.name], target)
                say(f"{target}: weights of {model.name}")
        if dtype is not None:
            convert(model, target, model.converted_path(dtype, target), dtype, say)


def _is_wanted(model: Model, target: Path, say: Callable[[str], object]) -> bool:
    """Return whether a file has to be written, because it is not there or not usable."""
    if not target.exists():
        return True
    problem = _problem(model, target)
    if problem is None:
        say(f"{target}: already there and complete, kept (delete it to have it written again)")
    else:
        say(f"{problem}; it will be replaced")
    return problem is not None


def _save_random(model: Model, target: Path, seed: int, say: Callable[[str], object]) -> None:
    with ByteBar(target.name, model.weight_bytes()) as bar:
        write_random(target, model.build(), model.config, seed, progress=bar.advance)
    say(f"{target}: random weights of {model.name}, seed {seed}")


def convert(
    model: Model | DecoderModel,
    source: Path,
    target: Path,
    dtype: torch.dtype,
    say: Callable[[str], object] = print,
) -> None:
    """Write the weights at ``source`` to ``target`` in another number type, one tensor at a time.

    Raises:
        RequestError: A model of this kind is not stored in that type.
        WeightsError: ``source`` does not fit the model or is damaged, or ``target`` cannot be written.
    """
    if isinstance(model, DecoderModel) and dtype not in _CODED:
        raise RequestError(
            f"--dtype {dtype_name(dtype)}: the weights of models that generate text are stored as "
            f"{' or '.join(map(dtype_name, _CODED))}"
        )
    fingerprint = model.fingerprint(source)
    replaced = check_outputs([OutputFile("--dtype", target)], [InputPath(f"the model {model.name}", source)])
    if target.exists():
        with open_weights(target) as there:
            if there.source == fingerprint:
                say(f"{target}: already there and made from the same weights, kept")
                return
    with model.open(source) as file:
        if isinstance(model, DecoderModel):
            total = model.weight_bytes(LayerRange(0, model.n_layers), dtype) + model.end_bytes(dtype)
            with ByteBar(target.name, total) as bar:
                write_coded(target, model.config, file, dtype, fingerprint, progress=bar.advance)
        else:
            shard = model.shard_for(file, dtype=dtype)
            total = sum(tensor.nbytes for tensor in (*shard.parameters(), *shard.buffers()))
            with ByteBar(target.name, total) as bar:
                write_converted(target, shard, model.config, file, fingerprint, progress=bar.advance)
    say(
        f"{named_output(target, replaced)}: weights of {model.name} as {dtype_name(dtype)}, "
        f"{target.stat().st_size >> 20} MB"
    )


def _fetch_repository(
    model: Model | DecoderModel, directory: Path | None, say: Callable[[str], object]
) -> str:
    """Fetch a repository into the cache, and copy it to ``directory``; return a name for the result."""
    if isinstance(model, DecoderModel):
        with model.open():  # fetches them
            pass
        model.check_sizes()
    else:
        model.check_weights()  # fetches them, too
    snapshot = model.directory
    if directory is None or snapshot is None:
        say(f"{snapshot}: {model.name}, in the hub's local cache")
        return model.name
    target = directory / str(model.repository).rpartition("/")[2]
    copy_snapshot(snapshot, target)
    say(f"{target}: {model.name}, copied from the hub's local cache")
    return str(target)


def _default_file(model: Model) -> Path:
    """Return the name of the file for the weights of a known model, or for random ones of a repository."""
    return Path(f"{model.name.rpartition('/')[2]}.npz") if model.repository else model.default_weights


def _downloadable(name: str, origins: Mapping[str, Origin]) -> Model | DecoderModel:
    if name in SHIPPED:
        raise ModelError(f"{name} comes with the package, so there is nothing to fetch")
    model = find_runnable(name)
    if model.is_file:
        raise ModelError(f"{name} is a GGUF file, which holds its weights as they are: run it with -m")
    if name not in origins and model.repository is None:
        known = ", ".join(known for known in MODEL_NAMES if known in origins)
        raise ModelError(f"{name} is a directory; weights are fetched for {known}, or a repository ORG/NAME")
    return model


def _problem(model: Model, path: Path) -> str | None:
    """Return what is wrong with the weights at ``path`` for ``model``, or None. This reads only headers."""
    try:
        with open_weights(path) as file:
            needed_names(model.shard_for(file), model.config, file)
    except WeightsError as error:
        return str(error)
    return None


def download(model: Model, origin: Origin, target: Path) -> None:
    """Fetch the weights of ``model`` from ``origin`` to ``target``.

    Raises:
        WeightsError: The transfer failed (data received so far is kept, and the next call continues it), or
            the data does not fit the model.
    """
    make_directory_of(target)
    if isinstance(origin, HttpSource):
        download_http(model, origin, target)
    else:
        download_hub(model, origin, target)


# Plain HTTP -----------------------------------------------------------------------------------------


def download_http(model: Model, origin: HttpSource, target: Path) -> None:
    """Fetch an ``.npz`` file by HTTP, continuing ``<target>.part`` where an earlier call stopped."""
    part = target.with_name(target.name + ".part")
    resumed = part.exists()
    fetch_file(origin.url, part, target)
    problem = _find_damage(model, part)
    if problem is not None and resumed:
        # The part received earlier may belong to an older version of the file: fetch it again from the start.
        part.unlink()
        fetch_file(origin.url, part, target)
        problem = _find_damage(model, part)
    if problem is not None:
        part.unlink()
        raise WeightsError(f"the file from {origin.url} is not usable: {problem}")
    part.replace(target)


def _find_damage(model: Model, part: Path) -> str | None:
    """Return what is wrong with a fetched ``.npz`` file, or None, by names, shapes and checksums."""
    problem = _problem(model, part)
    if problem is None:
        with zipfile.ZipFile(part) as archive:
            try:
                broken = archive.testzip()
            except (zipfile.BadZipFile, OSError, EOFError) as error:
                return str(error)
        problem = f"the checksum of {broken} is wrong" if broken else None
    return problem


# Hugging Face hub -----------------------------------------------------------------------------------


def download_hub(model: Model, origin: HubSource, target: Path) -> None:
    """Fetch a file from the hub, continuing an earlier attempt, and convert it to ``target``.

    Temporary files of the transfer stay in ``<target>.part/`` until the conversion is done.
    """
    staging = target.with_name(target.name + ".part")
    fetched = _fetch_hub(origin, staging)
    with _open_fetched(fetched) as source:
        shard = model.shard_for(source)
        names = needed_names(shard, model.config, source)
        with ByteBar(target.name, sum(parameter.numel() for parameter in shard.parameters()) * 4) as bar:
            write_npz(target, names, source, progress=bar.advance)
    shutil.rmtree(staging)


def _fetch_hub(origin: HubSource, staging: Path) -> Path:
    # Imported here because it takes half a second, which only a download needs to spend.
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for name in origin.files:
        try:
            # Metadata is requested first: without a network this fails at once, while the download would
            # retry for half a minute.
            get_hf_file_metadata(hf_hub_url(origin.repository, name, endpoint=origin.endpoint))
            return Path(hf_hub_download(origin.repository, name, local_dir=staging, endpoint=origin.endpoint))
        except LocalEntryNotFoundError as error:
            problem = str(error.__cause__ or error)
        except EntryNotFoundError:
            problem = f"it has none of {', '.join(origin.files)}"
            continue
        except Exception as error:  # the hub's client passes on many exceptions of its HTTP library
            problem = f"{type(error).__name__}: {error}"
        break
    first_line = problem.strip().splitlines()[0] if problem.strip() else "no reason given"
    raise WeightsError(
        f"{origin.repository} on the Hugging Face hub cannot be fetched ({first_line}); without a network "
        f"here, fetch its {origin.files[0]} elsewhere and name that with -M, or use --random"
    )


def _open_fetched(path: Path) -> WeightsFile:
    return PickledWeights(path) if path.suffix == ".bin" else open_weights(path)
