"""Items on their way to an answer, the groups that they travel in, and counts of both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from pipeedge.base.errors import PipeEdgeError
from pipeedge.base.text_lengths import RecentLengths
from pipeedge.data.items import Item
from pipeedge.data.source import Group, Microbatch
from pipeedge.serve.pending import Found, PendingAnswers

__all__ = ["Claimed", "Counts", "Entry", "QueueState", "RequestGroup", "deliver", "found_of_items"]

_LONGEST_RETRY_S = 60
_SMOOTHING = 0.2
"""Weight of the latest microbatch in the average time of an item."""


class Entry(Struct, frozen=True, eq=False):
    """An item, and where its answer goes."""

    item: Item
    answers: PendingAnswers
    place: int
    """Place of its answer among them."""
    tokens: int
    """Number of its tokens; 1 for an image."""

    @classmethod
    def of(cls, items: Sequence[Item], answers: PendingAnswers, places: Sequence[int]) -> list[Entry]:
        """Return the entries of items of one model that begin to wait for the answers in ``places``."""
        has_tokens = any(item.tensors[0].dim() == 1 for item in items[:1])
        tokens = [len(item.tensors[0]) for item in items] if has_tokens else [1] * len(items)
        return list(map(cls, items, repeat(answers), places, tokens))


Claimed: TypeAlias = Mapping[PendingAnswers, Sequence[tuple[int, Found]]]
"""Answers for those who wait, each with its place among theirs."""


def deliver(claimed: Claimed) -> None:
    """Bring answers to those who wait, who are woken once for all that they get."""
    for answers, some in claimed.items():
        answers.put(some)


@dataclass(frozen=True)
class RequestGroup(Group):
    """Items of requests that travel together; they exist once, so the ledger of the run keeps them."""

    is_kept = True

    entries: tuple[Entry, ...]
    formed_at: float
    """Time when it was formed, in seconds."""

    @classmethod
    def of(cls, numbers: Sequence[int], entries: Sequence[Entry], now: float) -> RequestGroup:
        """Return the group of some entries, with their numbers in order of arrival."""
        items = [entry.item for entry in entries]
        return cls(list(zip(numbers, items, strict=True)), tuple(entries), now)


def found_of_items(outputs: torch.Tensor, microbatch: Microbatch) -> list[Found]:
    """Return the outputs of each item, without padding; an error for one whose outputs are not all numbers.

    Args:
        outputs: Outputs of the microbatch [items, ...].
        microbatch: The microbatch.
    """
    # Copied, as the link needs its memory again; by NumPy, as torch gives up the lock of Python for every
    # operation, and threads that prepare may keep it for milliseconds.
    values = (outputs if outputs.dtype is torch.float32 else outputs.float()).numpy().copy()
    rows: list[npt.NDArray[np.float32]] = list(values)
    if values.ndim > 2 and microbatch.tokens is not None:
        rows = [row[:length] for row, length in zip(rows, microbatch.tokens, strict=True)]
    elif np.isfinite(values).all():
        return list[Found](rows)
    return [
        row if np.isfinite(row).all() else _not_finite(source)
        for row, source in zip(rows, microbatch.sources, strict=True)
    ]


def _not_finite(source: str) -> PipeEdgeError:
    return PipeEdgeError(f"{source}: the model produced NaN or infinity: check its weights")


@dataclass(frozen=True)
class QueueState:
    """State of the queue at one moment, and counts since it was opened."""

    requests_waiting: int
    """Number of requests of which some item is not under way yet."""
    waiting: int
    """Number of items that wait."""
    under_way: int
    """Number of items that are in the pipeline."""
    answered: int
    failed: int
    """Number of items without an answer: cancelled, too late, or with outputs that are NaN or infinite."""
    refused: int
    """Number of items that there was no room for."""
    microbatches: int
    tokens: int
    """Number of tokens of all items that were answered; an image counts as one."""
    padded_tokens: int
    """Number of tokens including padding."""


@dataclass
class Counts:
    """Counts of all items by their outcome, and the time that items take."""

    answered: int = 0
    failed: int = 0
    refused: int = 0
    under_way: int = 0
    """Number of items that are in the pipeline, also of those that nobody awaits any more."""
    written_at: float = -math.inf
    """Time of the latest result, in seconds."""
    lengths: RecentLengths = field(default_factory=RecentLengths)
    """Numbers of tokens of the items that were answered lately."""
    _microbatches: int = 0
    _tokens: int = 0
    _padded_tokens: int = 0
    _item_s: float = 0.0

    def computed(self, group: RequestGroup, now: float) -> None:
        """Count a microbatch whose outputs have come."""
        self.under_way -= len(group.entries)
        each_s = (now - max(self.written_at, group.formed_at)) / len(group.entries)
        self._item_s += (each_s - self._item_s) * (_SMOOTHING if self._microbatches else 1.0)
        self.written_at = now
        lengths = [entry.tokens for entry in group.entries]
        self._microbatches += 1
        self._tokens += sum(lengths)
        self._padded_tokens += len(lengths) * max(lengths)
        self.lengths.add(lengths, now)

    def retry_after_s(self, waiting: int) -> int:
        """Return the whole seconds after which ``waiting`` items have left."""
        return max(1, min(_LONGEST_RETRY_S, math.ceil(self._item_s * waiting)))

    def state(self, requests_waiting: int, waiting: int) -> QueueState:
        """Return the counts with those of this moment."""
        return QueueState(
            requests_waiting=requests_waiting,
            waiting=waiting,
            under_way=self.under_way,
            answered=self.answered,
            failed=self.failed,
            refused=self.refused,
            microbatches=self._microbatches,
            tokens=self._tokens,
            padded_tokens=self._padded_tokens,
        )
