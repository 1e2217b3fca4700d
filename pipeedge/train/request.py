"""What ``train.py`` is asked to do: frozen, validated on creation. Imports nothing heavy."""

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
"""Stages times microbatches: beyond, what is asked is a slip, and making the order would take minutes."""


@dataclass(frozen=True)
class PipelineRequest:
    """How the model is cut, and who does what when."""

    schedule: str = "1f1b"
    """One of ``orders.SCHEDULES``."""
    stages: int = 4
    workers: int = 1
    threads: int = 1
    """Of each worker."""
    partition: tuple[int, ...] | None = None
    """First and last layer of each stage, from 1; None: as even as the costs of the layers allow."""
    memory_mb: float | None = None
    """That a worker may use, in units of 2^20 bytes, where the partition is found; None: its part of what is
    available."""

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ScheduleError(f"--stages {self.stages}: at least 1")
        if self.workers < 1:
            raise ScheduleError(f"--workers {self.workers}: at least 1")
        if not 1 <= self.threads <= _MAX_THREADS:
            raise RequestError(f"--threads {self.threads}: 1 to {_MAX_THREADS}")
        if self.memory_mb is not None and not 0 < self.memory_mb <= _MAX_MEMORY_MB:
            raise RequestError(
                f"--memory {figure(self.memory_mb)}: megabytes above 0 and up to {figure(_MAX_MEMORY_MB, 7)}"
            )
        if self.memory_mb is not None and self.partition is not None:
            raise RequestError(
                "--memory goes with --partition auto; a partition that is given is taken as it is"
            )
        if self.partition is not None:
            stages = len(Schedule.from_partition(self.partition).stages)
            if stages != self.stages:
                raise ScheduleError(f"--partition has {count(stages, 'stage')}, --stages says {self.stages}")


@dataclass(frozen=True)
class TrainingRequest:
    """All that one worker is asked to do."""

    world: WorldRequest
    pipeline: PipelineRequest = field(default_factory=PipelineRequest)
    model: str = VGG19
    """``vgg19``, ``vit-digits``, a known image model or a directory."""
    pretrained: bool = False
    """Begin with the model's weights instead of random ones."""
    data: str = RANDOM
    """``random``, ``digits``, or a folder with a folder of pictures for each class."""
    max_image_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
    """Largest picture to decode."""
    batch_size: int = 64
    microbatch_size: int = 4
    batches: int = 4
    """Batches in all, those before a checkpoint included."""
    optimizer: str = "sgd"
    rate: float = 0.01
    seed: int = 0
    checkpoint_dir: Path | None = None
    checkpoint_every: int = 10
    """Batches; after the last there is one in any case."""
    resume: bool = False
    report: Path | None = None
    trace: Path | None = None
    command: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.batches <= _MAX_STEPS:
            raise RequestError(f"--batches {self.batches}: at least 1")
        if self.batch_size < 1 or self.microbatch_size < 1:
            raise RequestError(
                f"--batch-size {self.batch_size}, --microbatch-size {self.microbatch_size}: at least 1"
            )
        if self.batch_size % self.microbatch_size:
            raise RequestError(
                f"--batch-size {self.batch_size} is not divisible by --microbatch-size {self.microbatch_size}"
            )
        if self.optimizer not in OPTIMIZERS:
            raise RequestError(f"--optimizer {self.optimizer}: choose {' or '.join(OPTIMIZERS)}")
        if not 0 < self.rate <= _MAX_RATE:
            raise RequestError(f"--lr {figure(self.rate)}: a number above 0 and up to {figure(_MAX_RATE, 7)}")
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"--seed {self.seed}: 0 or more")
        if self.checkpoint_every < 1:
            raise RequestError(f"--checkpoint-every {self.checkpoint_every}: at least 1")
        if self.resume and self.checkpoint_dir is None:
            raise RequestError("--resume needs --checkpoint-dir, where the checkpoint is")
        if self.report is not None:
            check_report_name(self.report)
        if self.max_image_pixels < 1:
            raise RequestError(f"--max-image-pixels {self.max_image_pixels}: must be at least 1")
        if self.max_image_pixels != DEFAULT_MAX_IMAGE_PIXELS and self.data in (RANDOM, DIGITS):
            raise RequestError("--max-image-pixels goes with --data FOLDER")
        pipeline = self.pipeline
        if pipeline.stages * self.microbatches > _MAX_PIECES:
            raise ScheduleError(
                f"--stages {pipeline.stages} with {count(self.microbatches, 'microbatch')} a batch: "
                "more than "
                f"{_MAX_PIECES} steps; take larger microbatches or fewer stages"
            )
        make_order(
            pipeline.schedule,
            stages=pipeline.stages,
            workers=pipeline.workers,
            microbatches=self.microbatches,
        )
        if pipeline.workers != self.world.size:
            raise RequestError(
                f"--workers {pipeline.workers} in a world of {self.world.size}: under torchrun leave it out"
            )

    @property
    def microbatches(self) -> int:
        """Of a batch."""
        return self.batch_size // self.microbatch_size

    def facts(self) -> dict[str, str | float | None]:
        """What all workers must have been asked alike, by option."""
        facts = {f"--{name.replace('_', '-')}": value for name, value in asdict(self.pipeline).items()}
        for name in ("model", "pretrained", "data", "batch_size", "microbatch_size", "batches", "optimizer"):
            facts[f"--{name.replace('_', '-')}"] = getattr(self, name)
        facts |= {"--lr": self.rate, "--seed": self.seed, "--resume": self.resume}
        facts |= {"--checkpoint-dir": str(self.checkpoint_dir), "--checkpoint-every": self.checkpoint_every}
        return {name: _plain(value) for name, value in facts.items()}


def _plain(value: object) -> str | float | None:
    """As it stands on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if value is None or isinstance(value, str | int | float) else str(value)
