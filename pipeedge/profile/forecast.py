"""Forecast how long measurements will take, from one pass of the model. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeedge.base.wording import count
from pipeedge.profile.measuring import Pacing

__all__ = ["OnePass", "duration_text", "profile_seconds"]


@dataclass(frozen=True)
class OnePass:
    """Times of one microbatch through all layers to measure."""

    load_s: float
    """Seconds to load the layers."""
    pass_s: float
    """Seconds that one microbatch takes, with the longest sentences."""
    batch_size: int
    """Number of items in that microbatch."""

    def seconds(self, items: int) -> float:
        """Return the seconds that ``items`` items take."""
        return self.pass_s * items / self.batch_size


def profile_seconds(one: OnePass, batch_size: int, tokens: Sequence[int | None], pacing: Pacing) -> float:
    """Return the seconds to expect for a profile.

    Args:
        one: A pass of the same layers, in any number type.
        batch_size: Number of items in a microbatch of the profile.
        tokens: Sentence lengths of the profile, longest first, or a single None for images.
        pacing: Number of repetitions.
    """
    longest = tokens[0] or 1
    lengths = [one.seconds(batch_size) * (each or 1) / longest for each in tokens]
    # One more pass measures the activations.
    return one.load_s + sum((pacing.repetitions_of(seconds) + 1) * seconds for seconds in lengths)


def duration_text(seconds: float) -> str:
    """Return a rough duration in words: ``about 3 minutes``."""
    if seconds < 45:
        return "less than a minute"
    minutes = seconds / 60
    if minutes < 90:
        return f"about {count(max(1, round(minutes)), 'minute')}"
    return f"about {count(math.ceil(minutes / 60 - 0.25), 'hour')}"
