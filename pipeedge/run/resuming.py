"""Going on from the unfinished output of an earlier run, on the data rank.

    FILE.part ──find_unfinished──> Found ──same model, input and options?──> the rest of the input
                                             └── no: refused in one line

The results depend on what ``request_dependencies`` and ``plan_dependencies`` list. If all of it is the same,
and so are torch, processors and kernels, the output is the same to the byte as that of a run that did not end
early.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch

import pipeedge
from pipeedge.base.errors import WeightsError
from pipeedge.base.wording import count, printable
from pipeedge.data.fingerprint import companions_fingerprint
from pipeedge.data.unfinished import Found, find_unfinished, unfinished_path
from pipeedge.models.outline import Outline
from pipeedge.plan.planning import Plan
from pipeedge.request.config import RunRequest

__all__ = ["find_rows", "made_with", "plan_dependencies", "request_dependencies"]

_TORCH = "the version of torch"


def find_rows(output: Path, *, resume: bool) -> tuple[Found | None, str | None]:
    """Return the rows to go on from, if any, and a line for the user about what an earlier run has left.

    Raises:
        RequestError: Another run is writing the same output.
    """
    path = output.resolve()
    part, found = printable(unfinished_path(output)), find_unfinished(path)
    if found is None:
        note = f"--resume: there are no rows in {part}, so the run begins with the first item"
        return None, note if resume else None
    if resume:
        note = f"--resume: the rows of {count(found.kept_items, 'item')} are taken from {part}"
        before, now = found.depends_on.get(_TORCH), made_with()[_TORCH]
        if before is not None and before != now:
            note += f", where torch {before} computed them; this is {now}, and last bits may differ"
        return found, note
    found.close()
    return None, (
        f"{part} has the rows of {count(found.items, 'item')} from a run that did not end well: they are "
        "replaced; with --resume, the run would have gone on from them"
    )


def request_dependencies(request: RunRequest, model: Outline, source: str) -> dict[str, str]:
    """Return what the rows depend on and this rank knows before the plan, by what a message calls it.

    Args:
        request: Request of the data rank.
        model: The model.
        source: Fingerprint of the whole input.
    """
    try:
        weights = model.fingerprint(request.model.weights)
    except WeightsError:
        weights = "none here"  # a rank without a stage needs none
    files = (model.directory, request.model.weights)
    folders = [path if path.is_dir() else path.parent for path in files if path is not None]
    names = hashlib.sha256(json.dumps(list(model.labels or ())).encode()).hexdigest()[:8]
    config = json.dumps(model.config.as_dict(), sort_keys=True).encode()
    return {
        "the version of PipeEdge": pipeedge.__version__,
        "the model": f"{model.name} {hashlib.sha256(config).hexdigest()[:8]} {names}",
        "the weights (-M)": weights,
        "the tokenizer or image processor": companions_fingerprint(folders),
        "the input": source,
        # A row of a decoder's step has the same bits whatever else is in it.
        "the microbatch size (-u)": "any" if model.family.decodes else str(request.microbatch_size),
        "--kernels": request.model.kernels,
    }


def made_with() -> Mapping[str, str]:
    """Return what a later run may have another version of: it rounds last bits, as another rank may."""
    return {_TORCH: str(torch.__version__)}


def plan_dependencies(plan: Plan) -> Mapping[str, str]:
    """Return what the rows depend on and the plan decides.

    The cuts between stages count only where they change values: if links are compressed or number types meet.
    """
    stages = plan.schedule.stages
    dtypes = [stage.dtype for stage in stages]
    bits = [stage.quant_bits for stage in stages]
    compression = plan.compression
    plain = len(set(dtypes)) == 1 and not any(bits) and compression.adaptive is None
    return {
        "the number types (--dtype)": dtypes[0] if plain else ",".join(dtypes),
        "the bits of the links (-q)": "0" if plain else ",".join(map(str, bits)),
        "--adaptive": str(compression.adaptive),
        "--clamp": "any" if plain else compression.clamp,
        "--link-transform": "any" if plain else compression.link_transform,
        "the layers of the stages": "any" if plain else ",".join(map(str, plan.schedule.partition())),
        **({} if plan.steps is None else {"--context": str(plan.steps.context)}),
    }
