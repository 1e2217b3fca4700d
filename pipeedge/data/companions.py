"""Where a model's tokenizer and image processor are: beside its weights, or in the hub's local cache."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipeedge.data.model_inputs import ModelInputs
from pipeedge.request.config import InputRequest

__all__ = ["companion_directories", "companion_file", "hub_reachable"]


def companion_directories(request: InputRequest, model: ModelInputs) -> tuple[Path, ...]:
    """Where to look, in this order: the model's own directory, that of its weights."""
    return tuple(
        directory for directory in (model.directory, request.companion_directory) if directory is not None
    )


def companion_file(model_name: str, directories: Iterable[Path], names: Iterable[str]) -> Path | None:
    """The first of ``names`` in the first of ``directories`` that has one; else in the hub's cache.

    Looks only at this machine's disk: a file that was never fetched is simply not there.
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
    """The repositories that ``model_name`` may stand for: BERT's moved under its authors' name."""
    return (model_name,) if "/" in model_name else (model_name, f"google-bert/{model_name}")


def cached_file(model_name: str, names: Iterable[str]) -> Path | None:
    """The first of ``names`` that the hub's local cache holds for the repository ``model_name``."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for name in names:
        try:
            found = try_to_load_from_cache(model_name, name)
        except HFValidationError:  # the path of a directory is no repository
            return None
        if isinstance(found, str):
            return Path(found)
    return None


def hub_reachable(timeout_s: float = 5.0) -> bool:
    """Whether the hub answers at all. The hub's own client takes half a minute to find that out."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=timeout_s)
    except Exception:  # the HTTP library behind the session differs from version to version
        return False
    return True
