"""Describe what to train and how: frozen and validated on creation. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from pipeedge.base.errors import RequestError, ScheduleError
from pipeedge.base.schedule import Schedule
from pipeedge.base.wording import count, figure
from pipeedge.request.config import WorldRequest
from pipeedge.request.declared import (
    Check,
    ObeyedBy,
    agreed_values,
    at_least,
    between,
    check_options,
    option,
    option_like,
)
from pipeedge.request.files import DEFAULT_MAX_IMAGE_PIXELS, InputRequest, OutputRequest
from pipeedge.request.parsing import nonempty, path
from pipeedge.train.orders import SCHEDULES, make_order

__all__ = [
    "AUTO",
    "DEFAULT_RATES",
    "DIGITS",
    "OPTIMIZERS",
    "RANDOM",
    "VGG19",
    "PipelineRequest",
    "TrainingRequest",
]

VGG19 = "vgg19"
RANDOM = "random"
DIGITS = "digits"
AUTO = "auto"
DEFAULT_RATES: Mapping[str, float] = MappingProxyType({"sgd": 0.01, "adamw": 1e-3})
OPTIMIZERS = tuple(DEFAULT_RATES)
_RATES = ", ".join(f"{figure(rate)} for {optimizer}" for optimizer, rate in DEFAULT_RATES.items())

_MAX_STEPS = 10**9
_MAX_THREADS = 1024
_MAX_RATE = 1e6
_MAX_MEMORY_MB = 1e9
_MAX_PIECES = 100_000
"""Largest product of stages and microbatches; more is a mistake, and making the order would take minutes."""


def _partition(text: str) -> tuple[int, ...] | None:
    if text == AUTO:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a list like 1,19,20,44") from None


@dataclass(frozen=True)
class PipelineRequest:
    """Division of the model, and order of the workers' actions."""

    OBEYED_BY: ClassVar[ObeyedBy] = ObeyedBy.ALL

    schedule: str = option(
        "1f1b",
        "--schedule",
        choices=SCHEDULES,
        help="order of the workers' actions ({default})",
    )
    stages: int = option(
        4,
        "--stages",
        type=int,
        check=at_least(1),
        help="number of parts of the model ({default})",
    )
    workers: int = option(
        1,
        "--workers",
        type=int,
        check=at_least(1),
        help="number of processes, each with one or more stages (one per core)",
    )
    threads: int = option(
        1,
        "--threads",
        type=int,
        check=between(1, _MAX_THREADS, f"must be 1 to {_MAX_THREADS}"),
        help="threads of each worker (its share of the cores, to which it is bound)",
    )
    partition: tuple[int, ...] | None = option(
        None,
        "--partition",
        type=_partition,
        metavar="LIST|auto",
        help="first and last layer of each stage, from 1, e.g. 1,19,20,44; auto measures every layer and "
        "makes the slowest worker as fast as possible (auto)",
    )
    memory_mb: float | None = option(
        None,
        "--memory",
        type=float,
        metavar="MB",
        check=Check(
            lambda memory: 0 < memory <= _MAX_MEMORY_MB,
            f"must be megabytes above 0 and up to {figure(_MAX_MEMORY_MB, 7)}",
        ),
        help="memory of a worker, for --partition auto (its share of the free memory)",
    )
    """Memory in units of 2^20 bytes."""

    def __post_init__(self) -> None:
        check_options(self, ScheduleError)
        if self.memory_mb is not None and self.partition is not None:
            raise RequestError(
                "--memory has no effect with a given --partition; leave it out, or use --partition auto"
            )
        if self.partition is not None:
            stages = len(Schedule.from_partition(self.partition).stages)
            if stages != self.stages:
                raise ScheduleError(
                    f"--partition has {count(stages, 'stage')}, but --stages is {self.stages}; leave out "
                    "--stages"
                )


@dataclass(frozen=True)
class TrainingRequest:
    """The request of one worker."""

    OBEYED_BY: ClassVar[ObeyedBy] = ObeyedBy.ALL

    world: WorldRequest
    pipeline: PipelineRequest = field(default_factory=PipelineRequest)
    model: str = option(
        VGG19,
        "-m/--model",
        type=nonempty,
        metavar="NAME|DIR",
        help=f"{VGG19}, vit-digits, a known ViT or DeiT, or a local Hugging Face directory ({{default}})",
    )
    pretrained: bool = option(
        False,
        "--pretrained",
        help="start from the model's weights instead of random ones",
    )
    data: str = option(
        RANDOM,
        "--data",
        type=nonempty,
        metavar="NAME|FOLDER",
        help=f"{RANDOM}, {DIGITS} (for vit-digits), or a folder with one folder of images per class "
        "({default})",
    )
    max_image_pixels: int = option_like(InputRequest, "max_image_pixels", obeyed_by=ObeyedBy.EACH)
    batch_size: int = option(
        64,
        "--batch-size",
        type=int,
        check=at_least(1),
        help="items per update ({default})",
    )
    microbatch_size: int = option(
        4,
        "--microbatch-size",
        type=int,
        check=at_least(1),
        help="items in a microbatch ({default}; sequential: the whole batch)",
    )
    batches: int = option(
        4,
        "--batches",
        type=int,
        check=between(1, _MAX_STEPS, f"must be 1 to {_MAX_STEPS}"),
        help="number of batches in total ({default})",
    )
    """Number of batches in total, including those before a checkpoint."""
    optimizer: str = option("sgd", "--optimizer", choices=OPTIMIZERS, help="optimizer ({default})")
    rate: float = option(
        DEFAULT_RATES["sgd"],
        "--lr",
        type=float,
        metavar="RATE",
        check=Check(
            lambda rate: 0 < rate <= _MAX_RATE, f"must be above 0 and at most {figure(_MAX_RATE, 7)}"
        ),
        help=f"learning rate ({_RATES})",
    )
    seed: int = option(
        0,
        "--seed",
        type=int,
        check=between(0, 2**63 - 1, "must be 0 to 2^63 - 1"),
        help="seed of initial weights, item order, dropout ({default})",
    )
    checkpoint_dir: Path | None = option(
        None,
        "--checkpoint-dir",
        type=path,
        metavar="DIR",
        help="save checkpoints here, in a directory that all workers share",
    )
    checkpoint_every: int = option(
        10,
        "--checkpoint-every",
        type=int,
        check=at_least(1),
        help="batches between two checkpoints ({default})",
    )
    """Number of batches between checkpoints; there is always one after the last batch."""
    resume: bool = option(False, "--resume", help="continue from the last complete checkpoint")
    report: Path | None = option_like(
        OutputRequest,
        "report",
        help="write a report of what ran, how fast, and where the time went: .json, or .html for a page",
    )
    trace: Path | None = option_like(
        OutputRequest, "trace", help="write the activities of each worker, for ui.perfetto.dev"
    )
    command: tuple[str, ...] = field(default=(), compare=False)
    """Command line, for the report."""

    def __post_init__(self) -> None:
        check_options(self)
        if self.batch_size % self.microbatch_size:
            raise RequestError(
                f"--batch-size {self.batch_size} is not divisible by --microbatch-size {self.microbatch_size}"
            )
        if self.resume and self.checkpoint_dir is None:
            raise RequestError("--resume needs the directory of the checkpoint: give --checkpoint-dir")
        if self.max_image_pixels != DEFAULT_MAX_IMAGE_PIXELS and self.data in (RANDOM, DIGITS):
            raise RequestError("--max-image-pixels has an effect only with --data FOLDER; leave it out")
        pipeline = self.pipeline
        if pipeline.stages * self.microbatches > _MAX_PIECES:
            raise ScheduleError(
                f"--stages {pipeline.stages} with {count(self.microbatches, 'microbatch')} per batch makes "
                f"more than {_MAX_PIECES} steps; use larger microbatches or fewer stages"
            )
        make_order(
            pipeline.schedule,
            stages=pipeline.stages,
            workers=pipeline.workers,
            microbatches=self.microbatches,
        )
        if pipeline.workers != self.world.size:
            raise RequestError(
                f"--workers {pipeline.workers} in a world of {self.world.size}: leave it out under torchrun"
            )

    @property
    def microbatches(self) -> int:
        """Number of microbatches in a batch."""
        return self.batch_size // self.microbatch_size

    def facts(self) -> dict[str, str | float | None]:
        """Return the values on which all workers must agree, by option."""
        return {one.flags[-1]: _plain(value) for one, value in agreed_values(self)}


def _plain(value: object) -> str | float | None:
    """Return a value in the form of the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if value is None or isinstance(value, str | int | float) else str(value)
