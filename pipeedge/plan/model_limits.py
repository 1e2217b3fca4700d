"""Refuse options that a kind of model does not have, in one line each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pipeedge.base.errors import RequestError
from pipeedge.models.outline import Outline
from pipeedge.request.config import RunRequest
from pipeedge.request.declared import options_of

__all__ = ["fitting_request"]


def fitting_request(request: RunRequest, model: Outline) -> RunRequest:
    """Return the request of a run of ``model``, in the number type of a GGUF file unless another is chosen.

    Raises:
        RequestError: It has an option that such a model does not have.
    """
    if model.family.decodes:
        _check_decoder(request, model)
    else:
        _check_encoder(request, model)
    # --plan auto chooses among the number types of profiles.
    chosen = request.schedule.dtypes is not None or request.schedule.joint
    stored = None if chosen else model.stored_dtype
    if stored is None:
        return request
    return dataclasses.replace(request, schedule=dataclasses.replace(request.schedule, dtypes=(stored,)))


def _check_encoder(request: RunRequest, model: Outline) -> None:
    for group in (request.generation, request.cache):
        for one in options_of(type(group)):
            if getattr(group, str(one.field)) != one.default:
                raise RequestError(f"{one.name}: {model.name} does not generate text (docs/decoders.md)")


def _check_decoder(request: RunRequest, model: Outline) -> None:
    refused: Mapping[str, tuple[bool, str]] = {
        "--objective energy": (
            request.schedule.objective == "energy",
            "models that generate text are planned for throughput or latency",
        ),
        f"-d/--device {request.model.device}": (
            request.model.device != "cpu",
            "models that generate text compute on cpu",
        ),
        f"--kernels {request.model.kernels}": (
            request.model.kernels != "auto",
            "models that generate text have kernels of their own",
        ),
        f"--dataset-name {request.input.dataset_name}": (
            request.input.dataset_name is not None,
            "it has no prompts; give --prompt, or --input with a .txt or .jsonl file",
        ),
        "--text-column": (
            request.input.text_column is not None,
            "prompts come from a .txt file, or from a .jsonl file with prompt or messages",
        ),
    }
    for option, (is_given, why) in refused.items():
        if is_given:
            raise RequestError(f"{option}: {why}")
    from pipeedge.models.decoder import check_decoder_dtype  # imports torch, which a dry run does without
    from pipeedge.models.dtypes import find_dtype

    if request.schedule.dtypes is not None and not request.schedule.automatic_dtype:
        for dtype in request.schedule.dtypes:
            check_decoder_dtype(find_dtype(dtype))
