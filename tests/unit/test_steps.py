"""Test the scheduler of steps."""

from __future__ import annotations

from pipeedge.decoding.steps import CacheSize, StepLimits, StepScheduler


def test_prompts_go_in_chunks_and_sequences_share_steps() -> None:
    steps = StepScheduler(StepLimits(context=128, rows=16), CacheSize(pages=8))
    steps.add(0, range(20), 4)
    steps.add(1, [7], 2)
    found = {0: [], 1: []}
    while (step := steps.next()) is not None:
        assert step.rows <= 16
        drawn = {part.sequence: 1 for part in step.parts if part.scored}
        for number in drawn:
            found[number].append(step.number)
        steps.finished(step.number, drawn)
    assert {number: len(tokens) for number, tokens in found.items()} == {0: 4, 1: 2}
