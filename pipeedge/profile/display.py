"""Show the profiler's progress, and summarize what it measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipeedge.base.wording import count, figure
from pipeedge.plan.specs import BYTES_PER_MB, short_dtype
from pipeedge.profile.results import ProfileResults

__all__ = ["conditions_summary", "progress_bar", "spread_warning", "summary"]

UNSTEADY = 0.1
"""Spread of the times, as a fraction of their total, above which to warn."""


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar with the time left on standard error.

    It is drawn only between passes, because a thread that draws while layers are timed would slow them down.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=1.0)

        def advance(what: str, done: float) -> None:
            bar.update(task, description=what, completed=done, refresh=True)

        yield advance


def summary(results: ProfileResults) -> Iterator[str]:
    """Yield the lines that summarize ``results`` for the user."""
    data = results.profile_data
    total = sum(layer.measured.time_s for layer in data)
    slowest = max(data, key=lambda layer: layer.measured.time_s)
    weights = sum(layer.memory_bytes for layer in data) / BYTES_PER_MB
    peak = max(data, key=lambda layer: layer.measured.activations_bytes or 0.0)
    threads = results.threads
    used = "an unknown number of threads" if threads is None else count(threads, "thread")
    yield f"{results.model_name}, microbatches of {results.batch_size}, {used}"
    yield (
        f"time         {figure(total)} s per microbatch ({figure(results.batch_size / total)} items/s); "
        f"the slowest layer is {slowest.layer}, {figure(1e3 * slowest.measured.time_s)} ms"
    )
    if results.tokens is not None:
        yield f"length       for sentences of {count(results.tokens, 'token')}{_other_lengths(results)}"
    yield (
        f"memory       {weights:.1f} MB of weights; activations up to "
        f"{(peak.measured.activations_bytes or 0) / BYTES_PER_MB:.1f} MB (layer {peak.layer}); the process "
        f"takes {(results.process_bytes or 0) / BYTES_PER_MB:.0f} MB besides"
    )
    if results.busy_w is not None and results.idle_w is not None:
        busy, idle = (f"{figure(watts, 3)} W" for watts in (results.busy_w, results.idle_w))
        yield f"power        {busy} while it computes, {idle} while it waits"
    if results.feed_s is not None and results.collect_s is not None:
        yield (
            f"data rank    feeds a microbatch in {figure(1e3 * results.feed_s)} ms, collects one in "
            f"{figure(1e3 * results.collect_s)} ms"
        )


def conditions_summary(results: ProfileResults) -> Iterator[str]:
    """Yield the line that summarizes one of several profiles for the user."""
    total, size = sum(layer.measured.time_s for layer in results.profile_data), results.batch_size
    yield (
        f"time         microbatches of {size} in {short_dtype(results.dtype)}: {figure(total)} s each "
        f"({figure(size / total)} items/s)"
    )


def _other_lengths(results: ProfileResults) -> str:
    return "".join(
        f", {figure(sum(layer.lengths[number].measured.time_s for layer in results.profile_data))} s "
        f"for {tokens}"
        for number, tokens in enumerate(results.other_tokens)
    )


def spread_warning(results: ProfileResults) -> str | None:
    """Return a warning if the times vary too much between repetitions, or else None."""
    measured = [layer.measured for layer in results.profile_data]
    total = sum(each.time_s for each in measured)
    spread = sum(each.time_spread_s or 0.0 for each in measured)
    if not total or spread / total <= UNSTEADY:
        return None
    return (
        f"layer times vary by {spread / total:.0%} between repetitions (the medians are kept); measure again "
        "while nothing else runs"
    )
