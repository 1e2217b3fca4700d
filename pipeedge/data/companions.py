"""Location of a model's tokenizer and image processor: next to its weights, or in the hub's local cache."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipeedge.models.outline import Outline
from pipeedge.request.files import InputRequest

__all__ = ["companion_directories", "companion_file", "hub_reachable"]


def companion_directories(request: InputRequest, model: Outline) -> tuple[Path, ...]:
    """Return the directories to search, in order: the model's own, and that of its weights."""
    return tuple(
        directory for directory in (model.directory, request.companion_directory) if directory is not None
    )


def companion_file(model_name: str, directories: Iterable[Path], names: Iterable[str]) -> Path | None:
    """Return the first of ``names`` in the first of ``directories`` that has one, else in the hub's cache.

    Only this machine's disk is searched: a file that was never fetched counts as missing.
    """
    names = tuple(names)
    for directory in directories:
        for name in names:
            if (directory / name).is_file():
                return directory / name
    for repository in hub_names(model_name):
        found = cached_file(repository, names)
        if found is not None:
            return found
    return None


def hub_names(model_name: str) -> tuple[str, ...]:
    """Return the repositories that ``model_name`` may mean: BERT's moved under their authors' name."""
    name = model_name.partition("#")[0]  # without the tower or the size of images
    return (name,) if "/" in name else (name, f"google-bert/{name}")


def cached_file(model_name: str, names: Iterable[str]) -> Path | None:
    """Return the first of ``names`` in the hub's local cache for the repository ``model_name``, or None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for name in names:
        try:
            found = try_to_load_from_cache(model_name, name)
        except HFValidationError:  # the path of a directory is not a repository name
            return None
        if isinstance(found, str):
            return Path(found)
    return None


def hub_reachable(timeout_s: float = 5.0) -> bool:
    """Return whether the hub answers. The hub's own client takes half a minute to find that out."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=timeout_s)
    except Exception:  # the HTTP library differs between versions of the client
        return False
    return True
