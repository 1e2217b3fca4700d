"""Show the profiler's progress, and summarize what it measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipeedge.base.wording import count, figure
from pipeedge.plan.specs import BYTES_PER_MB, EndCosts, short_dtype
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
    if results.ends is not None:
        yield from _steps_summary(results, results.ends)
        return
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


def _steps_summary(results: ProfileResults, ends: EndCosts) -> Iterator[str]:
    """Yield the lines that summarize the profile of a decoder."""
    layers = [layer.steps for layer in results.profile_data if layer.steps is not None]

    def step_s(rows: int) -> float:
        return sum(
            max(one.fixed_s, min(one.start_s + rows * one.row_s, one.many_start_s + rows * one.many_row_s))
            for one in layers
        )

    threads = "an unknown number of threads" if results.threads is None else count(results.threads, "thread")
    yield f"{results.model_name}, {short_dtype(results.dtype)}, {threads}"
    yield (
        f"decode       a step takes {_ms(step_s(1))} with 1 row, {_ms(step_s(16))} with 16, and "
        f"{_ms(1000 * sum(one.position_s for one in layers))} more for 1,000 positions before a row"
    )
    yield (
        f"prefill      {figure(256 / step_s(256))} tokens/s in chunks of 256, and "
        f"{_ms(1000 * sum(one.chunk_position_s for one in layers))} more for 1,000 positions before a token"
    )
    yield f"head         {_ms(max(ends.fixed_s, ends.start_s + ends.row_s))} for 1 row on the data rank"
    yield (
        f"memory       {sum(layer.memory_bytes for layer in results.profile_data) / BYTES_PER_MB:.1f} MB of "
        f"weights, {ends.memory_bytes / BYTES_PER_MB:.1f} MB of embedding and head on the data rank, "
        f"{sum(one.cache_bytes for one in layers) / 1024:.1f} kB of cache for each position"
    )
    if results.residual is not None:
        varies = "" if results.variation is None else f"; equal steps vary by {results.variation:.0%}"
        yield f"fit          measured steps deviate from this by up to {results.residual:.0%}{varies}"


def _ms(seconds: float) -> str:
    return f"{figure(1e3 * seconds, 3)} ms"


def conditions_summary(results: ProfileResults) -> Iterator[str]:
    """Yield the line that summarizes one of several profiles for the user."""
    if results.ends is not None:
        yield from _steps_summary(results, results.ends)
        return
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
    kept = "medians" if results.ends is None else "means"
    return (
        f"layer times vary by {spread / total:.0%} between repetitions (the {kept} are kept); measure again "
        "while nothing else runs"
    )
