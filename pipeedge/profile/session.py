"""Carry out the profiler's work, in order.

    check everything ─> bandwidth ─> agreement ─> layers ─> results ─> models, device types ─> plot
                                                  └─ of each profile ─┘

The results of each profile are written when they are complete, and all other files when everything is
measured. Each file is replaced as a whole, so an interruption at any moment leaves files that are valid. If
several profiles were to be measured, the same command goes on with those that are not finished.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

from pipeedge.base.errors import RequestError, SpecError
from pipeedge.base.files import InputPath, OutputFile, check_outputs, check_writable
from pipeedge.base.heap import keep_freed_memory, share_one_heap
from pipeedge.base.machine import available_bytes, resident_bytes
from pipeedge.base.wording import count
from pipeedge.data.protected_files import input_paths, model_paths
from pipeedge.models.decoder import DecoderModel, find_runnable
from pipeedge.models.dtypes import dtype_name, emulated_here, slow_here
from pipeedge.observe.energy import open_source
from pipeedge.profile.decoder_job import DecoderJob, measure_decoder
from pipeedge.profile.display import conditions_summary, progress_bar, spread_warning, summary
from pipeedge.profile.dtype_agreement import measure_agreement, open_compared
from pipeedge.profile.forecast import duration_text, profile_seconds
from pipeedge.profile.job import Job
from pipeedge.profile.layer_work import Advance, measure_links, measure_model, time_one_pass
from pipeedge.profile.likeness import with_times_of
from pipeedge.profile.measuring import Pacing
from pipeedge.profile.power import PowerMeter
from pipeedge.profile.products import Products, chosen_figures
from pipeedge.profile.request import MeasureRequest, ProfileCommand
from pipeedge.profile.result_files import load_results, save_results
from pipeedge.profile.results import ProfileResults
from pipeedge.request.files import InputRequest

__all__ = ["profile", "use_results"]

Tell = Callable[[str], None]
AnyJob: TypeAlias = Job | DecoderJob


@dataclass(frozen=True)
class _Checked:
    """Result of checking the files."""

    old: Mapping[Path, ProfileResults]
    """Contents of the results files that exist."""
    finished: Mapping[Path, ProfileResults]
    """Contents of the files to which nothing is added but agreement."""
    replaced: frozenset[Path]
    """Outputs that exist and are replaced."""


def profile(command: ProfileCommand, tell: Tell, warn: Tell) -> None:
    """Measure layers, and write the results and the files made from them.

    Args:
        command: Request with something to measure.
        tell: Called with each line for the user.
        warn: Called with each warning.

    Raises:
        PipeEdgeError: The request cannot be carried out; nothing was written but results of whole profiles.
    """
    if command.measure is None:
        raise ValueError("nothing to measure")
    jobs = _without_emulated(
        {command.results_of(job.conditions): job for job in _jobs(command.measure)}, warn
    )
    products = Products(command.emit, tell, warn)
    checked = _check(jobs, products)
    figures = chosen_figures(command.emit, tell)

    for slow in dict.fromkeys(slow_here(job.dtype, job.device) for job in jobs.values()):
        if slow is not None:
            warn(slow)
    free_bytes = available_bytes() + resident_bytes()
    for path in checked.finished:
        tell(f"measured     {path} is kept from an earlier run; delete it to measure it again")
    rest = {path: job for path, job in jobs.items() if path not in checked.finished}
    process_bytes = _process_bytes()  # before any layer is loaded
    keep_freed_memory()  # as a rank does
    share_one_heap()
    shares = [] if command.measure.like is not None else _shares(tuple(rest.values()), tell)
    agreement = _agreement(jobs, checked.finished, tell)
    results = _with_agreement(jobs, checked.finished, agreement)
    measured: dict[Path, ProfileResults] = {}

    def finish(path: Path, layers: ProfileResults) -> None:
        known = agreement.get(jobs[path].conditions.dtype)
        measured[path] = replace(layers, process_bytes=process_bytes, agreement=known)
        results.update(_joined({path: measured[path]}, checked.old))
        save_results(path, results[path])

    like = command.measure.like
    if like is None:
        _measure(rest, shares, finish)
    else:
        other = load_results(like)
        for path, job in rest.items():
            finish(path, with_times_of(job.expected(), other, str(like)))
    _report(rest, measured, several=len(jobs) > 1, tell=tell, warn=warn)
    products.write({path: results[path] for path in jobs}, figures, free_bytes, checked.replaced)


def _jobs(request: MeasureRequest) -> Sequence[AnyJob]:
    """Check a request against its model, and return a job for each of its profiles."""
    model = find_runnable(request.model.name)
    return DecoderJob.each(request, model) if isinstance(model, DecoderModel) else Job.each(request)


def _without_emulated(jobs: Mapping[Path, AnyJob], warn: Tell) -> Mapping[Path, AnyJob]:
    """Leave out number types that the processor emulates, unless no other is asked for.

    What has no profile, no plan with ``--dtype auto`` chooses.
    """
    left = {path: job for path, job in jobs.items() if not emulated_here(job.dtype, job.device)}
    if not left or len(left) == len(jobs):
        return jobs
    for name in dict.fromkeys(dtype_name(job.dtype) for path, job in jobs.items() if path not in left):
        warn(f"{name} is left out: this processor emulates it; to measure it all the same, ask for it alone")
    return left


def _check(jobs: Mapping[Path, AnyJob], products: Products) -> _Checked:
    """Raise now what would otherwise fail after minutes of measuring."""
    job = next(iter(jobs.values()))
    for path in jobs:
        check_writable(path, "-o/--results-yml")
    replaced = check_outputs(
        [*(OutputFile("-o/--results-yml", path) for path in jobs), *products.outputs()],
        [
            *model_paths(job.model, job.request.model.weights),
            *input_paths(InputRequest(paths=job.request.input)),
        ],
    )
    if job.request.agreement_items and isinstance(job, Job):
        open_compared(job)
    old = {path: load_results(path) for path in jobs if path.exists()}
    expected = {path: each.expected() for path, each in jobs.items()}
    finished = {path: found for path, found in old.items() if len(jobs) > 1 and expected[path].is_in(found)}
    for path, found in finished.items():
        expected[path].check_conditions(found, str(path))
    if len(finished) == len(jobs) and products.emit.type_name is None:
        finished = {}  # there is nothing to do: the results are refused as those of a single profile
    rest = {path: results for path, results in expected.items() if path not in finished}
    products.check({**finished, **_joined(rest, old)})
    return _Checked(old, finished, replaced)


def _joined(
    new: Mapping[Path, ProfileResults], old: Mapping[Path, ProfileResults]
) -> dict[Path, ProfileResults]:
    """Return the results of each file together with what it has already."""
    return {
        path: results.joined(old[path], str(path)) if path in old else results
        for path, results in new.items()
    }


def _shares(jobs: Sequence[AnyJob], tell: Tell) -> list[float]:
    """Return the fraction of the time that each job is expected to take, and say how long all will."""
    if len(jobs) < 2:
        return [1.0] * len(jobs)
    encoders = [job for job in jobs if isinstance(job, Job)]
    if not encoders:
        return [1 / len(jobs)] * len(jobs)
    seconds = _expected_seconds(encoders)
    tell(f"measuring    {count(len(jobs), 'profile')}, {duration_text(sum(seconds))}")
    return [each / sum(seconds) for each in seconds]


def _agreement(
    jobs: Mapping[Path, AnyJob], finished: Mapping[Path, ProfileResults], tell: Tell
) -> Mapping[str, float]:
    """Return the agreement of each number type with float32, as far as it is requested and not known yet."""
    lacking = [
        job
        for path, job in jobs.items()
        if isinstance(job, Job) and (path not in finished or finished[path].agreement is None)
    ]
    if all(job.dtype is torch.float32 for job in lacking):
        return {}
    return measure_agreement(lacking, tell)


def _with_agreement(
    jobs: Mapping[Path, AnyJob], finished: Mapping[Path, ProfileResults], agreement: Mapping[str, float]
) -> dict[Path, ProfileResults]:
    """Return the finished results, and save those to which agreement is added."""
    results = dict(finished)
    for path, old in finished.items():
        part = agreement.get(jobs[path].conditions.dtype)
        if old.agreement is None and part is not None:
            results[path] = replace(old, agreement=part)
            save_results(path, results[path])
    return results


def _measure(
    jobs: Mapping[Path, AnyJob], shares: Sequence[float], finish: Callable[[Path, ProfileResults], None]
) -> None:
    """Measure all jobs, and call ``finish`` with the results of each as soon as they are known."""
    if not jobs:
        return
    power = PowerMeter(open_source()[0])
    try:
        idle_w = power.idle_w()
        with progress_bar() as advance:
            advance("measuring the transports", 0.0)
            handling = measure_links(next(iter(jobs.values())))
            for number, (path, job) in enumerate(jobs.items()):
                what = f"{number + 1} of {len(jobs)}: " if len(jobs) > 1 else ""
                part = _part_of(advance, what, sum(shares[:number]), shares[number])
                if isinstance(job, Job):
                    results = measure_model(job, handling, part, power)
                else:
                    results = measure_decoder(job, handling, part, power)
                finish(path, replace(results, idle_w=idle_w))
    finally:
        power.close()


def _expected_seconds(jobs: Sequence[Job]) -> list[float]:
    """Return the seconds that each job is expected to take, from a pass of the smallest one."""
    smallest = min(jobs, key=lambda job: job.batch_size)
    one = time_one_pass(smallest)
    pacing = Pacing(smallest.request.iterations, smallest.request.warmup)
    return [profile_seconds(one, job.batch_size, job.tokens, pacing) for job in jobs]


def _part_of(advance: Advance, before: str, start: float, share: float) -> Advance:
    """Return what shows the progress of a part of the work, which begins at ``start`` of it."""
    return lambda what, done: advance(before + what, start + share * done)


def _report(
    jobs: Mapping[Path, AnyJob],
    measured: Mapping[Path, ProfileResults],
    *,
    several: bool,
    tell: Tell,
    warn: Tell,
) -> None:
    """Summarize what was measured, and name the results files."""
    for path, job in jobs.items():
        results = measured[path]
        for line in conditions_summary(results) if several else summary(results):
            tell(line)
        unsteady = spread_warning(results)
        if unsteady is not None:
            warn(f"{job.conditions}: {unsteady}" if several else unsteady)
        tell(f"results      {path}, layers {job.layers} of {job.model.n_layers}")


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
        PipeEdgeError: The request cannot be carried out; nothing was written.
    """
    if not command.results.exists():
        raise SpecError(f"{command.results}: no such file; profile first, without --from-results")
    emit = command.emit
    products = Products(emit, tell, warn)
    replaced = check_outputs(products.outputs(), [InputPath("--from-results", command.results)])
    results = load_results(command.results)
    if emit.plot is None and emit.type_name is None:
        raise RequestError("--from-results has nothing to make: give -dt/--dev-type or --plot")
    products.check({command.results: results})
    figures = chosen_figures(emit, tell)
    products.write({command.results: results}, figures, available_bytes() + resident_bytes(), replaced)
