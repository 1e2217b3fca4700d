"""The Corpus of Linguistic Acceptability: sentences that are acceptable (1) or not (0).

A. Warstadt, A. Singh, S. R. Bowman, "Neural Network Acceptability Judgments", TACL 7, 2019; distributed as
part of GLUE. ``datasets`` fetches and reads it; ``dataset_root`` may name a local copy instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeedge.base.errors import InputError, RequestError
from pipeedge.data.companions import companion_directories, hub_reachable
from pipeedge.data.items import Items
from pipeedge.data.text import Sentence, checked_row, open_tokenizer
from pipeedge.models.outline import Outline
from pipeedge.request.files import InputRequest

__all__ = ["cola_items"]

REPOSITORY, CONFIGURATION = "nyu-mll/glue", "cola"
SPLITS: Mapping[str, str] = MappingProxyType(
    {"train": "train", "val": "validation", "validation": "validation", "dev": "validation", "test": "test"}
)


def cola_items(request: InputRequest, model: Outline) -> Items:
    """Return the sentences of a split of CoLA, tokenised for ``model``, with labels if the split has them.

    ``request.dataset_root`` is a copy of the hub's files (``cola/train-*.parquet``), or a folder into which
    ``datasets`` may fetch them. Without it, the usual cache of ``datasets`` is used.

    Raises:
        InputError: The data set is not on this machine and cannot be fetched, or the split is unknown.
        RequestError: ``datasets`` is not installed.
    """
    asked = request.dataset_split or "train"
    if asked not in SPLITS:
        raise InputError(f"CoLA has no split {asked!r}; it has train, validation and test")
    split = SPLITS[asked]
    tokenizer = open_tokenizer(model, companion_directories(request, model))
    table = read_split(request.dataset_root, split)
    return tokenizer.rows(
        [
            # In GLUE, a label of -1 means that the label is withheld, as in the test split.
            checked_row(Sentence(text, f"CoLA/{split}[{index}]", label if label >= 0 else None))
            for index, (text, label) in enumerate(zip(table["sentence"], table["label"], strict=True))
        ]
    )


def read_split(root: Path | None, split: str) -> Any:
    """Return a table with the columns ``sentence`` and ``label``."""
    try:
        import datasets
    except ImportError as error:
        raise RequestError("CoLA needs the package datasets: pip install 'pipeedge[runtime]'") from error
    if root is not None and not root.is_dir():
        raise InputError(f"--dataset-root {root}: no such folder")
    local = [] if root is None else sorted(root.rglob(f"{split}-*.parquet"))
    try:
        if local:
            return datasets.load_dataset("parquet", data_files={split: list(map(str, local))}, split=split)
        cache = None if root is None else str(root)
        with offline_unless_reachable(datasets.config):
            return datasets.load_dataset(REPOSITORY, CONFIGURATION, split=split, cache_dir=cache)
    except Exception as error:  # network, disk and hub each have their own exception tree
        where = f" {local[0]}" if local else ""
        raise InputError(
            f"CoLA{where} cannot be read ({type(error).__name__}): fetch {REPOSITORY} once where there is a "
            "network, or name a folder with its cola/*.parquet files as --dataset-root"
        ) from error


@contextmanager
def offline_unless_reachable(config: Any) -> Iterator[None]:
    """Make ``datasets`` use its cache at once if the hub does not answer, instead of after six attempts."""
    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or not hub_reachable()
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before
