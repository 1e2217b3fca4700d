"""Requests of programs that work from the scheduler's files, without running a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeedge.request.config import ModelRequest, RunRequest
from pipeedge.request.declared import at_least, option, option_like
from pipeedge.request.parsing import nonempty
from pipeedge.request.scheduling import ScheduleRequest

__all__ = ["ProfiledRequest"]


@dataclass(frozen=True)
class ProfiledRequest:
    """A model and a load, and the files with their profiles."""

    models_file: Path = option_like(
        ScheduleRequest,
        "models_file",
        default=Path("models.yml"),
        help="layers of the models, with their sizes ({default})",
    )
    dev_types_file: Path = option_like(
        ScheduleRequest,
        "dev_types_file",
        default=Path("device_types.yml"),
        help="device types with their profiles ({default})",
    )
    model_name: str = option_like(
        ModelRequest,
        "name",
        arguments={"type": nonempty, "metavar": "NAME"},
        help="name of the model in -sm ({default})",
    )
    microbatch_size: int = option_like(RunRequest, "microbatch_size")
    tokens: int | None = option(
        None,
        "--tokens",
        type=int,
        check=at_least(1),
        help="tokens of the longest sentence, for text models (as profiled)",
    )
