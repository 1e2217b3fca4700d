"""Stages of decoders that raise an exception once, so that their ranks are lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from pipeedge.models.layers.decoder import DecoderStage


def fail_layers(monkeypatch: pytest.MonkeyPatch, moments: Mapping[int, int]) -> None:
    """Let stages raise an exception, each once.

    Args:
        monkeypatch: Undoes it.
        moments: Number of steps after which a stage fails, by its first layer, from 0.
    """
    step, steps, failed = DecoderStage.step, Counter[int](), set[int]()

    def counted(self: DecoderStage, *rest: Any, **options: Any) -> Any:
        first = self.layers.start
        steps[first] += 1
        if first not in failed and steps[first] > moments.get(first, steps[first]):
            failed.add(first)
            raise RuntimeError("bad memory")
        return step(self, *rest, **options)

    monkeypatch.setattr(DecoderStage, "step", counted)
