"""Measure how often number types give the class of float32 (``--agreement``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from pipeedge.base.wording import count
from pipeedge.data import InputSource, open_input
from pipeedge.data.agreement import Outputs, agreement, outputs_by_block
from pipeedge.models.dtypes import dtype_name
from pipeedge.profile.display import progress_bar
from pipeedge.profile.job import Job
from pipeedge.request.files import InputRequest

__all__ = ["measure_agreement", "open_compared"]


def open_compared(job: Job) -> InputSource:
    """Open the items that ``--agreement`` compares.

    Raises:
        InputError: They cannot be read, or there are too few different ones.
    """
    request = job.request
    items = request.agreement_items
    wanted = InputRequest(paths=request.input, max_items=items, max_image_pixels=request.max_image_pixels)
    source = open_input(wanted, job.model)
    source.check_distinct(items, "--agreement")
    return source


def measure_agreement(jobs: Sequence[Job], tell: Callable[[str], None]) -> Mapping[str, float]:
    """Return the fraction of items with the class of float32 for each other number type of ``jobs``.

    It is measured with the largest microbatches, and empty if not requested.
    """
    last = jobs[-1]
    if not last.request.agreement_items:
        return {}
    source = open_compared(last)
    size = max(job.batch_size for job in jobs)

    def outputs(dtype: torch.dtype) -> Outputs:
        with progress_bar() as advance:
            what = f"computing {count(len(source), 'item')} in {dtype_name(dtype)}"
            return outputs_by_block(
                last.model,
                source,
                size,
                weights=last.request.model.weights,
                device=last.device,
                dtype=dtype,
                progress=functools.partial(advance, what),
            )

    exact = outputs(torch.float32)
    found = {}
    for dtype in dict.fromkeys(job.dtype for job in jobs):
        if dtype is torch.float32:
            continue
        compared = agreement(outputs(dtype), exact, classes=last.model.output_kind != "vector")
        tell(f"agreement    {dtype_name(dtype)}: {compared}")
        found[dtype_name(dtype)] = compared.part
    return found
