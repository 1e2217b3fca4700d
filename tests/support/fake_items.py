"""Input that consists of numbers, with what the test wants to happen while an item is read."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeedge.data.items import NO_TOKENS, Item


class NumberedItems:
    """Items that hold their number; ``reading`` is called with it while an item is read."""

    has_labels = False
    max_tokens = None
    token_counts = NO_TOKENS
    in_memory = False
    pixels = None

    def __init__(self, count: int, reading: Callable[[int], None]) -> None:
        self.count = count
        self._reading = reading

    def __len__(self) -> int:
        return self.count

    def source(self, index: int) -> str:
        return f"item {index}"

    def read(self, index: int) -> Item:
        self._reading(index)
        return Item((torch.tensor([index]),), None, self.source(index))
