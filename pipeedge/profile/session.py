"""Carry out the profiler's work, in order.

    check everything ─> bandwidth ─> layers ─> results ─> models, device types ─> plot

Nothing is written before everything is measured, and each file is replaced as a whole, so an interruption at
any moment leaves the files as they were.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipeedge.base.errors import RequestError, SpecError
from pipeedge.base.files import InputPath, OutputFile, check_outputs, check_writable
from pipeedge.base.heap import keep_freed_memory
from pipeedge.base.machine import available_bytes, resident_bytes
from pipeedge.data.protected_files import input_paths, model_paths
from pipeedge.models.dtypes import slow_here
from pipeedge.profile.display import progress_bar, spread_warning, summary
from pipeedge.profile.dtype_agreement import measure_agreement, open_compared
from pipeedge.profile.job import Job
from pipeedge.profile.layer_work import measure_data_rank, measure_layers
from pipeedge.profile.products import Products, chosen_figures
from pipeedge.profile.request import ProfileCommand
from pipeedge.profile.result_files import load_results, save_results
from pipeedge.profile.results import ProfileResults
from pipeedge.request.files import InputRequest

__all__ = ["profile", "use_results"]

Tell = Callable[[str], None]


@dataclass(frozen=True)
class _Checked:
    """What the check of the files found."""

    old: ProfileResults | None
    """Contents of the results file, or None if it does not exist."""
    replaced: frozenset[Path]
    """Outputs that exist and are replaced."""


def profile(command: ProfileCommand, tell: Tell, warn: Tell) -> None:
    """Measure layers, and write the results and the files made from them.

    Args:
        command: request with something to measure.
        tell: called with each line for the user.
        warn: called with each warning.

    Raises:
        PipeEdgeError: the request cannot be carried out; nothing was written.
    """
    if command.measure is None:
        raise ValueError("nothing to measure")
    job = Job.of(command.measure)
    products = Products(command.emit, command.results, tell, warn)
    checked = _check(command, job, products)
    figures = chosen_figures(command.emit, tell)

    slow = slow_here(job.dtype, job.device)
    if slow is not None:
        warn(slow)
    free_bytes = available_bytes() + resident_bytes()
    measured = _measure(job, tell)
    old = checked.old
    results = measured if old is None else measured.joined(old, str(command.results))
    save_results(command.results, results)
    for line in summary(measured):
        tell(line)
    unsteady = spread_warning(measured)
    if unsteady is not None:
        warn(unsteady)
    tell(f"results      {command.results}, layers {job.layers} of {job.model.n_layers}")
    products.write(results, figures, free_bytes, checked.replaced)


def _check(command: ProfileCommand, job: Job, products: Products) -> _Checked:
    """Raise now what would otherwise fail after minutes of measuring."""
    check_writable(command.results, "-o/--results-yml")
    replaced = check_outputs(
        [OutputFile("-o/--results-yml", command.results), *products.outputs()],
        [
            *model_paths(job.model, job.request.model.weights),
            *input_paths(InputRequest(paths=job.request.input)),
        ],
    )
    if job.request.agreement_items:
        open_compared(job)
    old = load_results(command.results) if command.results.exists() else None
    expected = job.expected()
    products.check(expected if old is None else expected.joined(old, str(command.results)))
    return _Checked(old, replaced)


def _measure(job: Job, tell: Tell) -> ProfileResults:
    """Return everything that is measured of the job."""
    process_bytes = _process_bytes()  # before any layer is loaded
    keep_freed_memory()  # as a rank does
    with progress_bar() as advance:
        measured = measure_layers(job, advance)
    data_work = measure_data_rank(job)
    return replace(
        measured,
        process_bytes=process_bytes,
        agreement=measure_agreement(job, tell),
        feed_s=None if data_work is None else data_work.feed_s,
        collect_s=None if data_work is None else data_work.collect_s,
    )


def _process_bytes() -> int:
    """Return the memory of a rank without a shard: that of this process with everything a rank imports."""
    for module in ("pipeedge.run.pipeline", "pipeedge.run.reporting", "pipeedge.base.console"):
        importlib.import_module(module)
    with torch.inference_mode():
        torch.nn.functional.linear(torch.ones(8, 64), torch.ones(64, 64))  # starts threads and kernels
    return resident_bytes()


def use_results(command: ProfileCommand, tell: Tell, warn: Tell) -> None:
    """Make the requested files from a results file, without measuring layers.

    Raises:
        PipeEdgeError: the request cannot be carried out; nothing was written.
    """
    if not command.results.exists():
        raise SpecError(f"{command.results}: no such file; profile first, without --from-results")
    emit = command.emit
    products = Products(emit, command.results, tell, warn)
    replaced = check_outputs(products.outputs(), [InputPath("--from-results", command.results)])
    results = load_results(command.results)
    if emit.plot is None and emit.type_name is None:
        raise RequestError("--from-results has nothing to make: give -dt/--dev-type or --plot")
    products.check(results)
    figures = chosen_figures(emit, tell)
    products.write(results, figures, available_bytes() + resident_bytes(), replaced)
