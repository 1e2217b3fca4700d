"""Limits of what may be under way at once, in the order in which a microbatch meets them.

    input ──> read ahead ──> feed ──> frames of a link ──> [compute] ──> ... ──> [collect] ──> results
    requests ──> the queue ──┘  └──────────────── the window ────────────────────────┘

Each limit is as small as it can be without slowing the pipeline down: what is under way takes memory, is
computed again after a failure, and cannot be put together with what comes later.
"""

from __future__ import annotations

__all__ = [
    "FRAMES_IN_FLIGHT",
    "LINK_WINDOW",
    "PACKETS_WITH_RECEIPTS",
    "READING_THREADS",
    "SAMPLED_PACKETS",
    "STAGES_AHEAD",
    "UNBOUNDED",
    "fed_to_new_plan",
    "window",
]

# -- before the pipeline ------------------------------------------------------------------------------

READING_THREADS = 4
"""Largest number of threads that read the input, or prepare requests. More would take processor time from a
stage on this rank, and more memory. They read one microbatch ahead."""

# -- from the feeder to the collector -----------------------------------------------------------------

STAGES_AHEAD = 3
"""Number of microbatches under way for each stage, where they may have to be fed again: one computes, one
waits for it, one is on its way."""
UNBOUNDED = 1 << 40
"""Window that is never full: where nothing is fed again, the links alone hold the feeder back."""


def window(stages: int, *, endless: bool, goes_on: bool) -> int:
    """Return the largest number of microbatches under way in a pipeline.

    Args:
        stages: Number of its stages.
        endless: Whether it computes requests, which can still change their company or be cancelled while they
            wait, so that no more are fed than keep every stage busy: one computes and one waits at each, and
            one is on its way back.
        goes_on: Whether microbatches under way are fed again after a failure.
    """
    if endless:
        return 2 * stages + 1
    return STAGES_AHEAD * stages if goes_on else UNBOUNDED


def fed_to_new_plan(results: int) -> int:
    """Return the largest number of microbatches that a new plan is fed beside one that drains.

    It is one at first, and one for each result that comes, and two for every second. To read and send all at
    once, only to wait in the new stages, would take the data rank's processor from the results that are due.

    Args:
        results: Number of results that have come since the change, from either plan.
    """
    return 1 + results + results // 2


# -- on a link ----------------------------------------------------------------------------------------

FRAMES_IN_FLIGHT = 2
"""Number of frames in the memory of one end of a link, or of a link in memory: one is on the wire, or is
computed, while the next is written, or waits. So the wire waits neither for a thread nor for a reply."""
LINK_WINDOW = 2 * FRAMES_IN_FLIGHT
"""Largest number of frames of a link that the receiving stage has not taken. Over gloo, two wait at each end;
over TCP and RPC, all of them may have arrived."""

# -- beside a link ------------------------------------------------------------------------------------

SAMPLED_PACKETS = 4
"""Number of packets that are watched at once to measure the link: a sample of two in a row, and the next."""
PACKETS_WITH_RECEIPTS = 2 * LINK_WINDOW
"""Number of packets that may wait for their receipts: more than may be in flight, so sending never waits."""
