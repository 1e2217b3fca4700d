"""Models of the Hugging Face hub, by ``ORG/NAME`` or an old ``NAME``: files in its local cache, or fetched.

    find_snapshot    config.json, tokenizer, image processor, index    when a model is named
    fetch_weights    .safetensors files                                when weights are first read

The cache comes first: what is complete there is used without asking the hub, so later runs need no network.
All files are of one commit. Pickles are never fetched.
"""

from __future__ import annotations

import errno
import fnmatch
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeedge.base.errors import ModelError, PipeEdgeError, WeightsError
from pipeedge.base.wording import excerpt
from pipeedge.models.weights.safetensors_files import INDEX_FILE, SINGLE_FILE, indexed_files

__all__ = [
    "Snapshot",
    "UnknownRepositoryError",
    "copy_snapshot",
    "fetch_weights",
    "find_file",
    "find_snapshot",
    "is_repository_name",
    "missing_weights",
]

CONFIG_FILE, MODULES_FILE = "config.json", "modules.json"
_SMALL_FILES = (
    CONFIG_FILE,
    INDEX_FILE,
    "preprocessor_config.json",
    "processor_config.json",
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model", "spm.model"),
    *("generation_config.json", "chat_template.jinja"),
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
_MODULE_FILES = ("[1-9]_*/config.json", "[1-9]_*/model.safetensors")
"""Patterns of the files of a sentence-transformers module, in the directory that ``modules.json`` names."""
_NAME = re.compile(r"(?!.*(--|\.\.))([A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*(?<![.-])", re.ASCII)
_LONGEST_NAME = 96
_TIMEOUT_S = 10.0
_LONGEST_REASON = 160
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK_ERRORS = (*_FULL, errno.EACCES, errno.EPERM, errno.EROFS)

log = logging.getLogger(__name__)


class UnknownRepositoryError(ModelError):
    """A name for which neither the cache nor the hub has a repository; the message says where was looked."""


@dataclass(frozen=True)
class Snapshot:
    """The files of a repository at one commit, in the hub's local cache."""

    directory: Path
    knows_modules: bool
    """Whether it is known if the repository has a ``modules.json``. Another program may not have asked."""


def is_repository_name(name: str) -> bool:
    """Return whether ``name`` has the form of a repository on the hub.

    That is ``ORG/NAME``, or ``NAME`` as of the first models (``roberta-base``), which the hub knows still.
    """
    return len(name) <= _LONGEST_NAME and _NAME.fullmatch(name) is not None


def find_snapshot(name: str, *, fetch: bool = True) -> Snapshot:
    """Return the files of the repository ``name``, weights apart, from the cache or the hub.

    Args:
        name: Repository, as for ``is_repository_name``.
        fetch: Whether files that the cache lacks may be fetched.

    Raises:
        UnknownRepositoryError: There is no such repository in the cache, nor on the hub if it can be asked.
        ModelError: The hub refuses its files, or they cannot be stored.
    """
    from huggingface_hub import constants  # half a second, which other models do not need

    cached = _cached_snapshot(name)
    if cached is not None and cached.knows_modules:
        return cached
    if constants.HF_HUB_OFFLINE or not fetch:
        if cached is None:
            why = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
            raise UnknownRepositoryError(f"the hub's local cache does not have it{why}")
        return cached
    try:
        with _explained(name, ModelError):
            files = _fetch_small_files(name)
    except UnknownRepositoryError:
        if cached is None:
            raise
        return cached
    found = _cached_snapshot(name)
    if found is None:
        ggufs = [file for file in files if file.endswith(".gguf")]
        if ggufs:
            raise ModelError(
                f"{name} on the Hugging Face hub has GGUF files; name one of them, such as {name}/{ggufs[0]}"
            )
        raise ModelError(f"{name} on the Hugging Face hub has no {CONFIG_FILE}, so it is not a model")
    return found


def find_file(name: str, file: str, *, fetch: bool = True) -> Path:
    """Return a file of the repository ``name`` from the cache or the hub, such as a GGUF file.

    Args:
        name: Repository, as for ``is_repository_name``.
        file: Its path in the repository.
        fetch: Whether it may be fetched if the cache lacks it.

    Raises:
        UnknownRepositoryError: It is not in the cache, and the hub cannot be asked or has no such repository.
        ModelError: The repository has no such file.
        WeightsError: The file cannot be fetched or stored.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    cached = try_to_load_from_cache(name, file)
    if isinstance(cached, str):
        return Path(cached)
    if constants.HF_HUB_OFFLINE or not fetch:
        why = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise UnknownRepositoryError(f"the hub's local cache does not have it{why}")
    with _explained(name, ModelError):
        files = _files(name)[1]
        if file not in files:
            others = sorted(each for each in files if each.endswith(Path(file).suffix))
            has = f"; it has {excerpt(', '.join(others), _LONGEST_REASON)}" if others else ""
            raise ModelError(f"{name} on the Hugging Face hub has no file {file}{has}")
    log.warning("fetching %s of %s from the Hugging Face hub", file, name)
    by_hand = f"without a network here, fetch {file} elsewhere and give its path with -m"
    with _explained(f"{name}/{file}", WeightsError, by_hand):
        _fetch(name, file, None)
    found = try_to_load_from_cache(name, file)
    if not isinstance(found, str):
        raise ModelError(f"{file} of {name} cannot be stored in {constants.HF_HUB_CACHE}")
    return Path(found)


def missing_weights(directory: Path) -> tuple[str, ...]:
    """Return the names of the weights files that a snapshot lacks."""
    if (directory / SINGLE_FILE).exists():
        return ()
    index = directory / INDEX_FILE
    if not index.exists():
        return (SINGLE_FILE,)
    return tuple(file for file in indexed_files(index) if not (directory / file).exists())


def fetch_weights(name: str, directory: Path) -> None:
    """Fetch the weights of a repository into its snapshot, unless they are complete there.

    Args:
        name: Repository, as for ``is_repository_name``.
        directory: Its snapshot, as ``find_snapshot`` returned it.

    Raises:
        WeightsError: The hub cannot be reached, has no safetensors for this model, or refuses them; or they
            cannot be stored.
    """
    if not missing_weights(directory):
        return
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise WeightsError(
            f"the weights of {name} are not in the hub's local cache, and HF_HUB_OFFLINE is set: unset it, "
            f"or copy {directory} from another machine"
        )
    log.warning("fetching the weights of %s from the Hugging Face hub", name)
    with _explained(name, WeightsError):
        if not (directory / INDEX_FILE).exists():
            files = _files(name, directory.name)[1]
            if SINGLE_FILE not in files and INDEX_FILE not in files:
                raise WeightsError(_without_safetensors(name, files))
            _fetch(name, SINGLE_FILE if SINGLE_FILE in files else INDEX_FILE, directory.name)
        for file in missing_weights(directory):
            _fetch(name, file, directory.name)


def copy_snapshot(source: Path, target: Path) -> None:
    """Copy the files of a snapshot that a model directory consists of to ``target``.

    Raises:
        WeightsError: A file cannot be written.
    """
    try:
        for path in sorted(source.rglob("*")):
            relative = path.relative_to(source)
            if path.is_file() and (_is_small(relative.as_posix()) or relative.suffix == ".safetensors"):
                (target / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target / relative)
    except OSError as error:
        raise WeightsError(f"{target} cannot be written: {error.strerror or error}") from error


def _cached_snapshot(name: str) -> Snapshot | None:
    """Return the snapshot in the cache, or None if it lacks the configuration."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, CONFIG_FILE)
    modules = try_to_load_from_cache(name, MODULES_FILE)
    return Snapshot(Path(config).parent, modules is not None) if isinstance(config, str) else None


def _fetch_small_files(name: str) -> Sequence[str]:
    """Fetch all but the weights, of the newest commit; return the names of all files of it."""
    from huggingface_hub.errors import EntryNotFoundError

    commit, files = _files(name)
    for file in files:
        if _is_small(file):
            _fetch(name, file, commit)
    # This comes last, because it makes the snapshot the current one and tells that it is complete. If the
    # repository has no such file, the cache remembers that.
    try:
        _fetch(name, MODULES_FILE, None)
    except EntryNotFoundError:
        if MODULES_FILE in files:
            raise
    return files


def _is_small(file: str) -> bool:
    return file in (*_SMALL_FILES, MODULES_FILE) or any(fnmatch.fnmatch(file, each) for each in _MODULE_FILES)


def _files(name: str, revision: str | None = None) -> tuple[str, Sequence[str]]:
    """Return the commit of a repository and the names of its files."""
    from huggingface_hub import HfApi, constants

    info = HfApi(endpoint=constants.ENDPOINT).model_info(name, revision=revision, timeout=_TIMEOUT_S)
    return str(info.sha), [sibling.rfilename for sibling in info.siblings or ()]


def _fetch(name: str, file: str, revision: str | None) -> None:
    from huggingface_hub import constants, hf_hub_download

    client, breaks = logging.getLogger("huggingface_hub.file_download"), _BrokenConnections()
    client.addFilter(breaks)
    try:
        hf_hub_download(name, file, revision=revision, endpoint=constants.ENDPOINT)
    finally:
        client.removeFilter(breaks)


class _BrokenConnections(logging.Filter):
    """Say in one line that a download goes on, which the hub's client does in four."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the client itself is to log ``record``."""
        if not str(record.msg).startswith("Error while downloading"):
            return True
        if "resume" in str(record.msg):  # else the client gives up, and raises an exception
            reason = excerpt(str((record.args or ("",))[-1]), _LONGEST_REASON)  # type: ignore[index]
            log.warning("the connection broke (%s); the download goes on where it stopped", reason)
        return False


def _without_safetensors(name: str, files: Sequence[str]) -> str:
    weights = [file for file in files if file.endswith((".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack"))]
    others = f" (only {excerpt(', '.join(weights), _LONGEST_REASON)})" if weights else ""
    return (
        f"{name} on the Hugging Face hub has no safetensors weights{others}, and pickles are not read "
        "because unpickling can run code; convert it once with transformers: "
        f"AutoModel.from_pretrained({name!r}).save_pretrained(DIR), then -m DIR"
    )


_BY_HAND = (
    "without a network here, copy its snapshot from another machine's cache, or name the weights with -M"
)


@contextmanager
def _explained(name: str, kind: type[PipeEdgeError], by_hand: str = _BY_HAND) -> Iterator[None]:
    """Turn the exceptions of the hub's client, of its HTTP library and of the disk into one line.

    Args:
        name: What is fetched.
        kind: Exception to raise.
        by_hand: What to do if it cannot be fetched.
    """
    try:
        yield
    except PipeEdgeError:
        raise
    except Exception as error:  # the hub's client passes on many exceptions of its HTTP library
        raise _explanation(name, error, kind, by_hand) from error


def _explanation(name: str, error: Exception, kind: type[PipeEdgeError], by_hand: str) -> PipeEdgeError:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    cause: Any = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
    fetched = f"{name} on the Hugging Face hub"
    if isinstance(cause, GatedRepoError):
        return kind(
            f"{fetched} is only for people who accepted its conditions: accept them at "
            f"{constants.ENDPOINT}/{name}, then log in here with: hf auth login"
        )
    if isinstance(cause, RepositoryNotFoundError):
        return UnknownRepositoryError("the Hugging Face hub has no such repository, or keeps it private")
    if isinstance(cause, EntryNotFoundError):
        return kind(f"{fetched} lacks a file that it lists ({_first_line(cause)})")
    if isinstance(cause, OSError) and cause.errno in _DISK_ERRORS:
        full = "; free some space, or name another directory with HF_HUB_CACHE"
        return kind(
            f"{name} cannot be stored in {constants.HF_HUB_CACHE} ({cause.strerror})"
            f"{full if cause.errno in _FULL else ''}"
        )
    if kind is ModelError:
        return UnknownRepositoryError(f"{constants.ENDPOINT} does not answer ({_first_line(cause)})")
    return kind(f"{fetched} cannot be fetched ({_first_line(cause)}); {by_hand}")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return excerpt(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__, _LONGEST_REASON)
