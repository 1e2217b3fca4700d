"""Rows of results as documents: what a ``.jsonl`` has in a line, and a ``.parquet`` in a row.

    classes   {"item": 0, "source": "a.png", "label": 3, "top": [{"class": 3, "name": "3", "score": 0.98}]}
    tokens    {"item": 0, "source": "a.txt:1", "tokens": [{"class": 3, "name": "B-PER", "score": 0.98}, ...]}
    vectors   {"item": 0, "source": "a.txt:1", "text": "the sentence", "vector": [0.25, -1.5, ...]}

Label and text are there if they are known.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pipeedge.data.source import Microbatch

__all__ = [
    "ClassDocuments",
    "Document",
    "Documents",
    "TokenDocuments",
    "VectorDocuments",
    "best_classes",
    "class_name",
    "class_scores",
    "real_tokens",
]

TOP_CLASSES = 5


@dataclass(frozen=True)
class Document:
    """The row of an item."""

    item: int
    """Position of the item in the input, from 0."""
    source: str
    label: int | None
    text: str | None
    """Sentence of the item, or None if it is not text."""
    content: Any
    """Classes, as dictionaries, or a vector, as a tensor on the CPU."""


class Documents(ABC):
    """Makes the rows of outputs of one kind.

    Args:
        labels: Names of the classes, or None if not known.
    """

    key: ClassVar[str]
    """Key of the content."""

    def __init__(self, labels: Sequence[str] | None) -> None:
        self._labels = labels

    def of(self, outputs: torch.Tensor, items: Microbatch) -> Iterator[Document]:
        """Yield the row of each item, for its outputs [items, ...]."""
        texts: Sequence[str | None] = items.texts or [None] * items.items
        columns = zip(items.numbers, items.sources, items.labels, texts, strict=True)
        for known, content in zip(columns, self._contents(outputs, items), strict=True):
            yield Document(*known, content)

    @abstractmethod
    def _contents(self, outputs: torch.Tensor, items: Microbatch) -> Iterator[object]:
        """Yield the content of each row."""

    def _entry(self, number: int, score: float) -> dict[str, object]:
        name = class_name(self._labels, number)
        named: dict[str, object] = {} if name is None else {"name": name}
        return {"class": number, **named, "score": float(f"{score:.6g}") if math.isfinite(score) else None}


class ClassDocuments(Documents):
    """The best classes of each item."""

    key = "top"

    def _contents(self, outputs: torch.Tensor, items: Microbatch) -> Iterator[object]:
        del items
        for best in best_classes(outputs):
            yield [self._entry(number, score) for number, score in best]


class TokenDocuments(Documents):
    """The best class of each token that is not padding."""

    key = "tokens"

    def _contents(self, outputs: torch.Tensor, items: Microbatch) -> Iterator[object]:
        for tokens in real_tokens(outputs, items):
            scores, classes = tokens.double().softmax(dim=1).max(dim=1)
            yield list(map(self._entry, classes.tolist(), scores.tolist()))


class VectorDocuments(Documents):
    """The values of each item."""

    key = "vector"

    def _contents(self, outputs: torch.Tensor, items: Microbatch) -> Iterator[object]:
        del items
        yield from outputs.detach().to("cpu", torch.float32)


def class_scores(outputs: torch.Tensor) -> torch.Tensor:
    """Return the scores of all classes, as float64, for logits ``outputs`` [items, classes]."""
    # float64 makes scores independent of how a processor sums many small float32 values. A single output is a
    # score by itself: of a regression, or of how well a passage answers a query.
    return outputs.double() if outputs.shape[1] == 1 else outputs.double().softmax(dim=1)


def best_classes(outputs: torch.Tensor) -> Iterator[list[tuple[int, float]]]:
    """Yield the best classes of each item, with their scores, for logits ``outputs`` [items, classes]."""
    scores, classes = class_scores(outputs).topk(min(TOP_CLASSES, outputs.shape[1]), dim=1)
    for best, values in zip(classes.tolist(), scores.tolist(), strict=True):
        yield list(zip(best, values, strict=True))


def real_tokens(outputs: torch.Tensor, items: Microbatch) -> list[torch.Tensor]:
    """Return the values of the tokens of each item of ``outputs`` [items, tokens, ...], without padding."""
    mask = items.token_mask(outputs.shape[1])
    return [row[kept] for row, kept in zip(outputs, mask, strict=True)]


def class_name(labels: Sequence[str] | None, number: int) -> str | None:
    """Return the name of class ``number``, or None if not known."""
    return labels[number] if labels is not None and number < len(labels) else None
