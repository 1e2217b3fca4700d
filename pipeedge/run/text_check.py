"""Compare the scores of a run's answers with those of the model in float32: what types and links cost.

    prompt and answer ─> the model in float32, a block at a time ─> scores of each token ─┐
    hidden states of the run, kept ─> head ─────────────────────> scores of each token ───┴─> Agreement

Both see the same tokens: those of the run.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from pipeedge.data.agreement import Agreement
from pipeedge.data.step_queue import StepQueue
from pipeedge.decoding.exact import hidden_by_block
from pipeedge.models.decoder import DecoderModel

__all__ = ["check_text"]

_ROWS = 64
"""Tokens whose scores are in memory at a time."""


def check_text(queue: StepQueue, model: DecoderModel, weights: Path | None) -> Agreement:
    """Return how the scores of the answers that a queue has kept agree with those in float32.

    Args:
        queue: Queue of the run, which has ended.
        model: The decoder.
        weights: File of the weights, or None for the model's own.

    Raises:
        WeightsError: The weights are missing, or do not fit the model.
    """
    ends = queue.ends
    kept = [one for one in queue.kept.values() if one.generation.tokens]
    if ends is None or not kept:
        return Agreement(0, 0, 0.0, 0.0, 0.0, unit="token")
    exact_ends = model.ends(weights=weights)
    texts = [[*one.generation.prompt.tokens, *one.generation.tokens[:-1]] for one in kept]
    exact = hidden_by_block(model, exact_ends, texts, weights)
    tokens = same = 0
    cosines, deviation = list[torch.Tensor](), 0.0
    for one, states in zip(kept, exact, strict=True):
        first = len(one.generation.prompt.tokens) - 1
        for row in range(0, len(one.generation.tokens), _ROWS):
            own = torch.stack(one.hidden[row : row + _ROWS])
            found = ends.score(own)
            wanted = exact_ends.score(states[first + row : first + row + len(own)])
            tokens += len(own)
            same += int((found.argmax(1) == wanted.argmax(1)).sum())
            cosine = F.cosine_similarity(found.double(), wanted.double(), dim=1)
            cosines.append(torch.where((found == wanted).all(dim=1), 1.0, cosine))
            deviation = max(deviation, float((found - wanted).abs().max()))
    all_cosines = torch.cat(cosines)
    return Agreement(
        tokens, same, float(all_cosines.mean()), float(all_cosines.min()), deviation, unit="token"
    )
