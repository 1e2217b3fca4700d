"""Describe what to train and how: frozen and validated on creation. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

from pipeedge.base.errors import RequestError, ScheduleError
from pipeedge.base.schedule import Schedule
from pipeedge.base.wording import count, figure
from pipeedge.request.config import DEFAULT_MAX_IMAGE_PIXELS, WorldRequest, check_report_name
from pipeedge.train.orders import make_order

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

_MAX_STEPS = 10**9
_MAX_THREADS = 1024
_MAX_RATE = 1e6
_MAX_MEMORY_MB = 1e9
_MAX_PIECES = 100_000
"""Largest product of stages and microbatches; more is a mistake, and making the order would take minutes."""


@dataclass(frozen=True)
class PipelineRequest:
    """How to divide the model, and in which order the workers act."""

    schedule: str = "1f1b"
    """One of ``orders.SCHEDULES``."""
    stages: int = 4
    """Number of stages."""
    workers: int = 1
    """Number of workers."""
    threads: int = 1
    """Number of threads of each worker."""
    partition: tuple[int, ...] | None = None
    """First and last layer of each stage, from 1, or None to balance the measured costs."""
    memory_mb: float | None = None
    """Memory that a worker may use when the partition is computed, in units of 2^20 bytes, or None for its
    share of the available memory."""

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ScheduleError(f"--stages {self.stages}: must be at least 1")
        if self.workers < 1:
            raise ScheduleError(f"--workers {self.workers}: must be at least 1")
        if not 1 <= self.threads <= _MAX_THREADS:
            raise RequestError(f"--threads {self.threads}: must be 1 to {_MAX_THREADS}")
        if self.memory_mb is not None and not 0 < self.memory_mb <= _MAX_MEMORY_MB:
            raise RequestError(
                f"--memory {figure(self.memory_mb)}: must be megabytes above 0 and up to "
                f"{figure(_MAX_MEMORY_MB, 7)}"
            )
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

    world: WorldRequest
    pipeline: PipelineRequest = field(default_factory=PipelineRequest)
    model: str = VGG19
    """``vgg19``, ``vit-digits``, a known image model or a directory."""
    pretrained: bool = False
    """Whether to start from the model's weights instead of random ones."""
    data: str = RANDOM
    """``random``, ``digits``, or a folder with one folder of images per class."""
    max_image_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
    """Number of pixels of the largest image to decode."""
    batch_size: int = 64
    """Number of items per update."""
    microbatch_size: int = 4
    """Number of items in a microbatch."""
    batches: int = 4
    """Number of batches in total, including those before a checkpoint."""
    optimizer: str = "sgd"
    """One of ``OPTIMIZERS``."""
    rate: float = 0.01
    """Learning rate."""
    seed: int = 0
    """Seed of initial weights, item order and dropout."""
    checkpoint_dir: Path | None = None
    """Directory of the checkpoints, or None for none."""
    checkpoint_every: int = 10
    """Number of batches between checkpoints; there is always one after the last batch."""
    resume: bool = False
    """Whether to continue from the last checkpoint."""
    report: Path | None = None
    """File to write the report to, or None."""
    trace: Path | None = None
    """File to write the trace to, or None."""
    command: tuple[str, ...] = field(default=(), compare=False)
    """Command line, for the report."""

    def __post_init__(self) -> None:
        if not 1 <= self.batches <= _MAX_STEPS:
            raise RequestError(f"--batches {self.batches}: must be 1 to {_MAX_STEPS}")
        if self.batch_size < 1 or self.microbatch_size < 1:
            raise RequestError(
                f"--batch-size {self.batch_size}, --microbatch-size {self.microbatch_size}: both must be at "
                "least 1"
            )
        if self.batch_size % self.microbatch_size:
            raise RequestError(
                f"--batch-size {self.batch_size} is not divisible by --microbatch-size {self.microbatch_size}"
            )
        if self.optimizer not in OPTIMIZERS:
            raise RequestError(f"--optimizer {self.optimizer}: choose {' or '.join(OPTIMIZERS)}")
        if not 0 < self.rate <= _MAX_RATE:
            raise RequestError(
                f"--lr {figure(self.rate)}: must be above 0 and at most {figure(_MAX_RATE, 7)}"
            )
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"--seed {self.seed}: must be 0 to 2^63 - 1")
        if self.checkpoint_every < 1:
            raise RequestError(f"--checkpoint-every {self.checkpoint_every}: must be at least 1")
        if self.resume and self.checkpoint_dir is None:
            raise RequestError("--resume needs the directory of the checkpoint: give --checkpoint-dir")
        if self.report is not None:
            check_report_name(self.report)
        if self.max_image_pixels < 1:
            raise RequestError(f"--max-image-pixels {self.max_image_pixels}: must be at least 1")
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
        facts = {f"--{name.replace('_', '-')}": value for name, value in asdict(self.pipeline).items()}
        for name in ("model", "pretrained", "data", "batch_size", "microbatch_size", "batches", "optimizer"):
            facts[f"--{name.replace('_', '-')}"] = getattr(self, name)
        facts |= {"--lr": self.rate, "--seed": self.seed, "--resume": self.resume}
        facts |= {"--checkpoint-dir": str(self.checkpoint_dir), "--checkpoint-every": self.checkpoint_every}
        return {name: _plain(value) for name, value in facts.items()}


def _plain(value: object) -> str | float | None:
    """Return a value in the form of the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if value is None or isinstance(value, str | int | float) else str(value)
