"""Measure how often a number type gives the class of float32 (``--agreement``)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from pipeedge.base.wording import count
from pipeedge.data import InputSource, open_input
from pipeedge.models.dtypes import dtype_name
from pipeedge.profile.display import progress_bar
from pipeedge.profile.job import Job
from pipeedge.report.agreement import agreement, outputs_by_block
from pipeedge.request.files import InputRequest

__all__ = ["measure_agreement", "open_compared"]


def open_compared(job: Job) -> InputSource:
    """Open the items that ``--agreement`` compares.

    Raises:
        InputError: they cannot be read, or there are too few different ones.
    """
    request = job.request
    source = open_input(
        InputRequest(
            paths=request.input,
            max_items=request.agreement_items,
            max_image_pixels=request.max_image_pixels,
        ),
        job.model,
    )
    source.check_distinct(request.agreement_items, "--agreement")
    return source


def measure_agreement(job: Job, tell: Callable[[str], None]) -> float | None:
    """Return the fraction of items with the class of float32, or None if not requested."""
    request = job.request
    if not request.agreement_items:
        return None
    source = open_compared(job)
    with progress_bar() as advance:
        ours, exact = (
            outputs_by_block(
                job.model,
                source,
                request.batch_size,
                weights=request.model.weights,
                device=job.device,
                dtype=dtype,
                progress=functools.partial(
                    advance, f"computing {count(len(source), 'item')} in {dtype_name(dtype)}"
                ),
            )
            for dtype in (job.dtype, torch.float32)
        )
    found = agreement(ours, exact, classes=job.model.output_kind != "vector")
    tell(f"agreement    {found}")
    return found.part
