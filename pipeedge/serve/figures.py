"""Figures of a service in the text form of Prometheus. Only the thread that serves counts."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from pipeedge.observe.metrics import StageWork
from pipeedge.observe.pipeline_state import EpochState
from pipeedge.observe.token_figures import TextState
from pipeedge.serve.in_flight import QueueState

__all__ = ["ServiceFigures"]

_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the latency histogram, in seconds."""


class ServiceFigures:
    """Counts of requests by route and status, and how long answers took."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets = [0] * (len(_BOUNDS_S) + 1)
        self._seconds = 0.0

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count a request; ``seconds`` passed from its body to its answer."""
        self._requests[route, status] += 1
        if status < 400:
            self._buckets[bisect_left(_BOUNDS_S, seconds)] += 1
            self._seconds += seconds

    def text(self, queue: QueueState | TextState, work: Mapping[int, StageWork], epoch: EpochState) -> str:
        """Return all figures.

        Args:
            queue: State of the queue, of an encoder or a decoder.
            work: How each stage has spent its time, by rank.
            epoch: The epoch, and what the earlier ones have cost.
        """
        of_queue = _of_text(queue) if isinstance(queue, TextState) else _of_queue(queue)
        lines = (*self._of_requests(), *of_queue, *_of_stages(work), *_of_epochs(epoch))
        return "".join(f"{line}\n" for line in lines)

    def _of_requests(self) -> Iterator[str]:
        yield from _head("pipeedge_requests_total", "counter", "Requests by route and status")
        for (route, status), number in sorted(self._requests.items()):
            yield f'pipeedge_requests_total{{route="{route}",status="{status}"}} {number}'
        yield from _head("pipeedge_request_seconds", "histogram", "Seconds from a request to its answer")
        total = 0
        for bound, number in zip((*_BOUNDS_S, "+Inf"), self._buckets, strict=True):
            total += number
            yield f'pipeedge_request_seconds_bucket{{le="{bound}"}} {total}'
        yield f"pipeedge_request_seconds_sum {self._seconds:.6f}"
        yield f"pipeedge_request_seconds_count {total}"


_Figure: TypeAlias = tuple[str, str, str, float]
"""Name, kind, description and value."""


def _of_queue(queue: QueueState) -> Iterator[str]:
    return _single(
        ("requests_waiting", "gauge", "Requests of which some item waits", queue.requests_waiting),
        ("items_waiting", "gauge", "Items that wait", queue.waiting),
        ("items_under_way", "gauge", "Items in the pipeline", queue.under_way),
        ("items_answered_total", "counter", "Items with an answer", queue.answered),
        ("items_failed_total", "counter", "Items that were cancelled, late or failed", queue.failed),
        ("items_refused_total", "counter", "Items that there was no room for", queue.refused),
        ("microbatches_total", "counter", "Microbatches that were computed", queue.microbatches),
        ("tokens_total", "counter", "Tokens of the items; an image counts as one", queue.tokens),
        ("padded_tokens_total", "counter", "The same with padding", queue.padded_tokens),
    )


def _of_text(queue: TextState) -> Iterator[str]:
    return _single(
        ("sequences_waiting", "gauge", "Answers that wait to begin", queue.waiting),
        ("sequences_running", "gauge", "Answers that are being generated", queue.running),
        ("steps_in_flight", "gauge", "Steps in the pipeline", queue.steps),
        ("answers_total", "counter", "Answers that have ended", queue.answered),
        ("prompt_tokens_total", "counter", "Tokens of prompts", queue.prompt_tokens),
        ("completion_tokens_total", "counter", "Tokens that were generated", queue.completion_tokens),
        ("reused_tokens_total", "counter", "Tokens of equal beginnings, not computed", queue.reused_tokens),
        ("repeated_tokens_total", "counter", "Tokens computed again after losses", queue.repeated_tokens),
        (
            "partly_repeated_tokens_total",
            "counter",
            "Tokens of these that only some layers computed",
            queue.partly_repeated_tokens,
        ),
        ("kept_tokens_total", "counter", "Tokens not computed again after losses", queue.kept_tokens),
        ("proposed_tokens_total", "counter", "Tokens that were proposed and verified", queue.proposed_tokens),
        ("accepted_tokens_total", "counter", "Tokens of these that were right", queue.accepted_tokens),
        ("drafted_tokens_total", "counter", "Proposed tokens that were drafted", queue.drafted_tokens),
        (
            "accepted_drafted_tokens_total",
            "counter",
            "Drafted tokens that were right",
            queue.accepted_drafted_tokens,
        ),
        ("yields_total", "counter", "Times that an answer gave its pages to older ones", queue.yields),
        ("cache_pages", "gauge", "Pages of the cache", queue.pages),
        ("cache_pages_free", "gauge", "Pages of the cache that no answer needs", queue.free_pages),
        ("cache_pages_kept", "gauge", "Pages of these that hold beginnings", queue.kept_pages),
    )


def _of_stages(work: Mapping[int, StageWork]) -> Iterator[str]:
    yield from _head("pipeedge_stage_seconds_total", "counter", "Seconds of each stage, by what it did")
    for rank, each in sorted(work.items()):
        spent = {"busy": each.busy_s, "wait_input": each.wait_input_s, "wait_link": each.wait_link_s}
        for doing, seconds in spent.items():
            yield f'pipeedge_stage_seconds_total{{rank="{rank}",doing="{doing}"}} {seconds:.6f}'


def _of_epochs(epoch: EpochState) -> Iterator[str]:
    return _single(
        ("epoch", "gauge", "Number of the epoch; 0 if a lost rank ends the run", epoch.number),
        ("recovering", "gauge", "1 while no results come because of a failure", int(epoch.recovering)),
        ("lost_ranks_total", "counter", "Ranks that were lost", epoch.lost_ranks),
        ("recoveries_total", "counter", "Failures after which results came again", epoch.recoveries),
        ("lost_seconds_total", "counter", "Seconds without a result because of failures", epoch.lost_s),
        ("repeated_microbatches_total", "counter", "Microbatches computed again", epoch.repeated),
    )


def _single(*figures: _Figure) -> Iterator[str]:
    for name, kind, text, value in figures:
        yield from _head(f"pipeedge_{name}", kind, text)
        yield f"pipeedge_{name} {round(value, 6)}"


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"
